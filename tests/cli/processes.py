"""Looking at other processes through /proc."""

from pathlib import Path


def _fields(pid) -> list[str]:
    """State, parent and so on of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def paused(pid: int) -> bool:
    """Whether a process was stopped, and may go on."""
    return _fields(pid)[:1] == ["T"]


def children(pid: int) -> list[int]:
    """Processes that a process started and that run, oldest first."""
    others = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    found = ((other, _fields(other)) for other in others)
    return sorted(other for other, fields in found if fields and int(fields[1]) == pid and fields[0] != "Z")


def working_in(folder: Path) -> list[int]:
    """Processes that run with `folder` as their working directory, whoever started them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:  # it is gone, or somebody else's
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process runs."""
    return _fields(pid)[:1] not in ([], ["Z"])
