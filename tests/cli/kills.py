"""A run that is killed before its n-th file operation, and resumed: the cases, and what became of each."""

from typing import NamedTuple

from cli.conftest import merged
from cli.fatal import operations
from cli.run_files import read_run

CHANGES = {"data": {"num_clients": 4}, "federation": {"rounds": 3}}
FIT = ("fit", "--config", "exp.yaml", "--quiet")
TABLE = {
    "title": "A small table",
    "name": "small",
    "seeds": [0],
    "base": {"files": ["exp.yaml"]},
    "columns": {"Digits": {"figures": {"received": "Local-T_received.last"}}},
    "rows": {"FedAvg": {"set": {"method": "FedAvg"}}, "FedRep": {"set": {"federation.lr_decay": 0.9}}},
}
SEARCH = {
    "title": "A small search",
    "name": "small",
    "trials": 2,
    "monitor": "Local-T_received.last",
    "base": {"files": ["exp.yaml"]},
    "rows": {"FedRep": {"space": {"optimizer.init_args.lr": [0.1, 0.2]}}},
}
OWN_FILES = {"table": ("table.md", "table.csv", "table.tex"), "tune": ("trials.csv", "fedrep.yaml")}
"""Command -> what it writes that does not depend on the time that runs took."""


class Kill(NamedTuple):
    """Who is killed, before which of its operations, and whether in the middle of it, which is a write."""

    who: str
    number: int
    torn: bool
    what: str


class Undisturbed:
    """A run that nobody kills, and all moments at which one like it could be.

    Args:
        place: the workplace that it runs in; it gets draws and configuration.
        options: words for the command line of this run and those that are killed.
        changes: what else the configuration says, by section.
    """

    def __init__(self, place, *options, changes=None) -> None:
        self.options = options
        self.changes = merged(CHANGES, changes or {})
        self.prepare(place)
        log = place.path / "operations.txt"
        code, _, err = place.call(*FIT, *options, fatal={"folder": str(place.path / "runs"), "log": str(log)})
        assert code == 0, err
        self.content = read_run(place.run)
        self.kills = kills_of(log)

    def prepare(self, place) -> None:
        """Write the small configuration into an empty workplace."""
        place.draws = False
        place.change(**self.changes)

    def of_resume(self, place, kill) -> list[Kill]:
        """All moments at which a run that was killed and goes on could be killed again; none if the kill missed.

        Args:
            place: an empty workplace.
            kill: when it is killed first.
        """
        self.prepare(place)
        folder, log = str(place.path / "runs"), place.path / "operations.txt"
        place.call(*FIT, "--resume", "auto", *self.options, fatal={"folder": folder, "die": tuple(kill[:3])})
        code, _, err = place.call(*FIT, "--resume", "auto", *self.options, fatal={"folder": folder, "log": str(log)})
        assert code == 0, err
        return kills_of(log) if log.exists() else []

    def outcome(self, place, kill, again=None) -> str:
        """Kill a run, resume it (and kill it again), let it finish; returns what is wrong with it, empty if nothing is.

        Args:
            place: an empty workplace.
            kill: when to kill it.
            again: when to kill it after its first resume; None for not again.
        """
        self.prepare(place)
        folder = str(place.path / "runs")
        for moment in (kill, again):
            if moment is not None:
                die = (moment.who, moment.number, moment.torn)
                code, _, err = place.call(*FIT, "--resume", "auto", *self.options, fatal={"folder": folder, "die": die})
                hit = code in (-9, 1) and "Traceback" not in err
                if not hit and not (moment is again and code == 0):  # what is left may be less than that
                    return f"exit code {code} where it should have been killed: {err}"
        code, _, err = place.call(*FIT, "--resume", "auto", *self.options)
        if code != 0:
            return f"exit code {code} when resumed: {err}"
        found = read_run(place.run)
        different = [name for name in self.content if found[name] != self.content[name]]
        left = [path.name for path in place.run.rglob("*.tmp")]
        return f"different: {', '.join(different)}" if different else f"left behind: {left}" if left else ""


class UndisturbedCommand:
    """A `table` or a `tune` that nobody kills, and all moments at which it could be while it writes its own files.

    Args:
        place: the workplace that it runs in.
        command: ``table`` or ``tune``.
    """

    def __init__(self, place, command) -> None:
        self.command = command
        log = place.path / "operations.txt"
        code, out, err = self._call(place, {"log": str(log)})
        assert code == 0, out + err
        self.content = self._read(place)
        self.kills = kills_of(log)

    def _call(self, place, fatal):
        place.draws = False
        place.change(data={"num_clients": 3}, federation={"rounds": 1})
        place.write("small.yaml", TABLE if self.command == "table" else SEARCH)
        fatal = None if fatal is None else {"folder": str(place.path / "runs" / f"{self.command}s"), **fatal}
        return place.call(self.command, "small.yaml", fatal=fatal)

    def _read(self, place):
        (folder,) = (place.path / "runs" / f"{self.command}s").iterdir()
        return {name: (folder / name).read_text() for name in OWN_FILES[self.command]}

    def outcome(self, place, kill, again=None) -> str:
        """Kill the command, and start it again (twice, where it is killed again); returns what is wrong with it."""
        for moment in (kill, again):
            if moment is not None:
                self._call(place, {"die": tuple(moment[:3])})
        code, out, err = self._call(place, None)
        if code != 0:
            return f"exit code {code} when started again: {out}{err}"
        found = self._read(place)
        different = [name for name in self.content if found[name] != self.content[name]]
        left = [path.name for path in (place.path / "runs").rglob("*.tmp")]
        return f"different: {', '.join(different)}" if different else f"left behind: {left}" if left else ""


def kills_of(log) -> list[Kill]:
    """The moments that a log of operations gives: before each, and in the middle of every write."""
    kills = []
    for who, done in sorted(operations(log).items()):
        for number, what in enumerate(done, start=1):
            kills.append(Kill(who, number, torn=False, what=what))
            if what.startswith("write "):
                kills.append(Kill(who, number, torn=True, what=what))
    return kills
