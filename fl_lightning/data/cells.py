"""What the cells of a column are: numbers, names, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from fl_lightning.archives import free_memory
from fl_lightning.data.arrays import KEY
from fl_lightning.errors import ConfigError, require

_NOTHING = {"", "?", ".", "-", "na", "nan", "n/a", "#n/a", "n.a.", "null", "nil", "none", "missing", "unknown"}
"""What tables write, in small letters, where there is no number."""


def are_numbers(cells: Sequence[str]) -> bool:
    """Whether all are numbers as tables write them; Python's own ``10_20`` is a name."""
    try:
        return all(float(cell) is not None and "_" not in cell for cell in cells)
    except ValueError:
        return False


def nothing_in(cells: Sequence[str]) -> Collection[str]:
    """What stands for an empty cell of a column: among names, a mark is a name of its own."""
    known = [cell for cell in cells if cell.strip().lower() not in _NOTHING]
    return _NOTHING if known and are_numbers(known) else {""}


def require_filled(
    name: str, cells: Sequence[str], nothing: Collection[str], places: Sequence[tuple[str, int]], remedy: str
) -> None:
    """Refuse an empty cell, by its file and line."""
    empty = next((row for row, cell in enumerate(cells) if cell.strip().lower() in nothing), None)
    path, line = places[empty or 0]
    require(empty is None, KEY, f"{path}: line {line} has nothing under {name!r}; fill it in, or {remedy}")


def require_one_kind(name: str, cells: Sequence[str], places: Sequence[tuple[str, int]]) -> None:
    """Refuse some names among many numbers, and numbers with decimal commas: they would make a column one of names."""
    odd = [row for row, cell in enumerate(cells) if not are_numbers([cell])]
    commas = [row for row in odd if "," in cells[row] and are_numbers([cells[row].replace(",", ".")])]
    if 2 * len(commas) > len(odd):
        path, line = places[commas[0]]
        rule = f"{path}: line {line} has {cells[commas[0]]!r} under {name!r}; write a decimal point"
        raise ConfigError(KEY, f"{rule}, or say {KEY}.names: [{name}] if all of them are names")
    path, line = places[odd[0]]
    rule = (
        f"{path}: line {line} has {cells[odd[0]]!r} under {name!r}, where most are numbers; mend it, leave the column "
        f"out, or say {KEY}.names: [{name}] if all of them are names"
    )
    require(2 * len(odd) > len(cells), KEY, rule)


def require_few(name: str, cells: Sequence[str]) -> None:
    """Refuse a column of names, one a line, say, whose features take more memory than is left."""
    values = len(set(cells))
    fits = 3 * 8 * values * len(cells) <= free_memory()  # float64, joined, and scaled
    rule = f"{name!r} has {values} different values, and a feature for each takes more memory than is left; add it"
    require(fits, f"{KEY}.leave_out", rule)


def one_hot(cells: Sequence[str]) -> np.ndarray:
    """A column of names as features, float64 [N, values]."""
    values, numbers = np.unique(np.array(cells), return_inverse=True)
    features = np.zeros((len(cells), len(values)), dtype=np.float64)
    features[np.arange(len(cells)), numbers] = 1
    return features


def labels_of(cells: Sequence[str]) -> np.ndarray:
    """Whole numbers where all are, each written in one way, else names: ``01`` beside ``1`` is another class.

    Names, too, where one is written as Python alone does (``1_2``, which would be 12), and where one has more than 64
    bits: together NumPy would make floats of them, which are no longer apart.
    """
    if not are_numbers(cells):
        return np.array(cells)
    try:
        numbers = [int(cell) for cell in cells]
    except ValueError:
        return np.array(cells)
    one_way = len({cell.strip() for cell in cells}) == len(set(numbers))
    fits = not numbers or (min(numbers) >= -(2**63) and max(numbers) < 2**63)
    return np.array(numbers if one_way and fits else cells)
