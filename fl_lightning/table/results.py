"""The folder of a table's or a search's results: of one file, so that two of one name do not overwrite each other."""

from __future__ import annotations

import os
from pathlib import Path

from fl_lightning.errors import require
from fl_lightning.files import content_of, holds, write_text

ORIGIN = "origin.txt"
"""Which file the results are of, as seen from their folder."""


def claim(folder: Path, file: Path) -> None:
    """Take down which file the results in a folder are of.

    A file that was moved or deleted since is nobody's claim any more, nor is a copy that says the same.

    Args:
        folder: of the results.
        file: the table's or the search's.

    Raises:
        ConfigError: if they are of another file, which is still there and says something else.
        WriteError: if it cannot be written down.
    """
    here = folder.resolve()
    try:
        other = Path(os.path.normpath(here / content_of(folder / ORIGIN).decode().strip()))
        alike = content_of(other) == content_of(file)
    except (OSError, ValueError):  # the first of its name, or there is no such file any more
        other, alike = file, True
    rule = f"{folder} holds the results of {_seen_from(Path.cwd(), other)}; give one of the two files another name"
    require(alike, "name", rule, folder.name)
    own = f"{_seen_from(here, file.resolve())}\n"
    if not holds(folder / ORIGIN, own):
        write_text(folder / ORIGIN, own)


def _seen_from(folder: Path, file: Path) -> str:
    try:
        return os.path.relpath(file, folder)
    except ValueError:  # on another drive
        return str(file)
