"""Configurations that come with the package, found by name wherever it is installed."""

from __future__ import annotations

from pathlib import Path

from fl_lightning import catalog

PREFIX = "experiments"


def folder() -> Path:
    """The folder of `experiments/`: inside an installed package, beside it in a clone."""
    inside = catalog.ROOT / PREFIX
    return inside if inside.is_dir() else catalog.ROOT.parent / PREFIX


def names() -> list[str]:
    """The names by which ours go, shortest first."""
    own = folder()
    found = (path.relative_to(own).with_suffix("").as_posix() for path in own.rglob("*.yaml"))
    return sorted(found, key=lambda name: (len(name), name))


def path_of(given: Path) -> Path:
    """The file that is meant: the one that is there, else one of ours.

    Ours go by their path in `experiments/`, with or without that word and the ending: ``quickstart``,
    ``fedcpd/cifar10_dirichlet01``, ``experiments/tables/quickstart.yaml``.

    Args:
        given: a file's path, or the name of one of ours.

    Returns:
        Its path; `given` itself where it is neither.
    """
    parts = given.parts[1:] if given.parts[:1] == (PREFIX,) else given.parts
    try:
        if not parts or given.is_absolute() or ".." in parts or given.exists():
            return given
        name = folder().joinpath(*parts)
        ours = name if name.suffix == ".yaml" else name.with_name(f"{name.name}.yaml")
        return ours if ours.is_file() else given
    except (OSError, ValueError):  # a name that no system takes: whoever reads it says so
        return given
