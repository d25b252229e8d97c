"""Rows of a file of numbers, kept column by column: of many rounds of many clients, a dict a row fills the memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

Row = dict[str, Any]


class PackedRows(Sequence[Row]):
    """Rows that have the same columns; each is made a dict of its own whenever it is looked at.

    Args:
        columns: name -> a value a row.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = {name: _packed(values) for name, values in columns.items()}
        self._length = len(next(iter(self._columns.values()), ()))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> PackedRows: ...
    def __getitem__(self, place: int | slice) -> Row | PackedRows:
        """A row; of a slice, rows."""
        chosen = {name: values[place] for name, values in self._columns.items()}
        return PackedRows(chosen) if isinstance(place, slice) else chosen

    def __iter__(self) -> Iterator[Row]:
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def column(self, name: str, missing: Any = None) -> Sequence[Any]:
        """A value a row.

        Args:
            name: of the column.
            missing: the value of every row where there is no such column.
        """
        return self._columns[name] if name in self._columns else [missing] * self._length

    def where(self, keep: Callable[..., bool], *names: str) -> PackedRows:
        """The rows of which `keep` says so; itself where that is all of them.

        Args:
            keep: takes a row's values in the columns `names`; None in one that there is not.
            names: of columns.
        """
        kept = [place for place, own in enumerate(zip(*map(self.column, names), strict=True)) if keep(*own)]
        if len(kept) == self._length:
            return self
        return PackedRows({name: [values[place] for place in kept] for name, values in self._columns.items()})


def packed(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> PackedRows:
    """Rows that come as a value a column; of columns of one name the last counts."""
    found: list[list[Any]] = [[] for _ in columns]
    add = [values.append for values in found]
    for row in rows:
        for put, value in zip(add, row, strict=True):
            put(value)
    return PackedRows(dict(zip(columns, found, strict=True)))


def _packed(values: Sequence[Any]) -> Sequence[Any]:
    """The same values, of one kind in 8 bytes each; a column of several kinds keeps what it is given."""
    kinds = set(map(type, values))
    if isinstance(values, array) or len(kinds) != 1:
        return values
    try:
        return array("d", values) if kinds == {float} else array("q", values) if kinds == {int} else values
    except OverflowError:  # a whole number that no machine word holds
        return values
