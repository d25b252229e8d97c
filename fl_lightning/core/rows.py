"""The tensors of several clients of one architecture, one row a client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.moving import copy_all
from fl_lightning.errors import place_of, shortened


class Unstackable(Exception):
    """Why clients cannot be stacked, in one line."""


class OneByOne(Unstackable):
    """What only a client alone can do in a step."""


class Upset(Unstackable):
    """What went wrong in a step, or with the data, and may be one client's: by itself that one falls sick."""


class Drawing(Unstackable):
    """Their steps draw random numbers: each client has streams of its own."""

    def __init__(self) -> None:
        super().__init__("its step draws random numbers")


class Place(NamedTuple):
    """Where a tensor stands.

    Args:
        name: in the method, of the first of its homes.
        homes: the modules' dictionaries that hold it, and its keys there; several for tied ones.
        kind: which of the rows.
        start: its first column there.
        end: the one behind its last.
        shape: of one client's.
        order: of its dimensions in memory, the outermost first, as the resident's are: what is alike is copied at once.
    """

    name: str
    homes: list[tuple[dict[str, Any], str]]
    kind: int
    start: int
    end: int
    shape: torch.Size
    order: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """[n, …] the tensors of n clients whose row is [n, width]; they share the memory."""
        own = flat[:, self.start : self.end].view(len(flat), *(self.shape[dim] for dim in self.order))
        return own.permute(0, *(1 + self.order.index(dim) for dim in range(len(self.shape))))

    def columns(self, tensors: Tensor) -> Tensor:
        """[n, columns] of tensors [n, …]: the inverse."""
        return tensors.permute(0, *(1 + dim for dim in self.order)).reshape(len(tensors), -1)


class Alias(NamedTuple):
    """An attribute that holds parameters or buffers, which have their places elsewhere.

    Args:
        home: the module's attributes.
        key: the attribute.
        value: a tensor, or a list or tuple of such, lists or tuples.
        numbers: the places of what it holds, by their ids.
    """

    home: dict[str, Any]
    key: str
    value: Any
    numbers: Mapping[int, int]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The same of other tensors, in the order of places."""

        def other(value: Any) -> Any:
            return tensors[self.numbers[id(value)]] if isinstance(value, Tensor) else type(value)(map(other, value))

        return other(self.value)


class Layout:
    """Where every parameter and buffer of a method stands in clients' rows.

    Parameters that are trained together share a row, so that an optimizer's part is mostly one whole row; each buffer
    has one of its own.

    Args:
        method: the resident one; its tensors stay the same objects.
        together: what says of a parameter's name with which others it is trained.
    """

    def __init__(self, method: nn.Module, together: Callable[[str], Hashable] = lambda name: None) -> None:
        found: dict[int, tuple[str, Tensor, list[tuple[dict[str, Any], str]]]] = {}
        for prefix, module in method.named_modules():
            for home in (module._parameters, module._buffers):
                for key, tensor in home.items():
                    if tensor is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        found.setdefault(id(tensor), (name, tensor, []))[2].append((home, key))  # type: ignore[arg-type]
        ordered = list(found.values())
        self.dtypes: list[torch.dtype] = []
        self.widths: list[int] = []
        self.places: list[Place] = []
        kinds: dict[Any, int] = {}
        for name, tensor, homes in ordered:
            # A layer that moves a buffer in place may need it in one piece.
            shares = (tensor.dtype, tensor.requires_grad, together(name)) if isinstance(tensor, nn.Parameter) else name
            kind = kinds.setdefault(shares, len(kinds))
            if kind == len(self.widths):
                self.dtypes.append(tensor.dtype)
                self.widths.append(0)
            start = self.widths[kind]
            self.widths[kind] += tensor.numel()
            self.places.append(Place(name, homes, kind, start, self.widths[kind], tensor.shape, _order(tensor)))
        self.device = ordered[0][1].device
        types = [self.dtypes[place.kind] for place in self.places]
        self._by_type = [[i for i, own in enumerate(types) if own == dtype] for dtype in dict.fromkeys(types)]
        self._buffers = [module._buffers for module in method.modules()]
        self._num_buffers = self._count()

    def tensors(self) -> list[Tensor]:
        """The resident module's present tensors, in the order of places.

        Raises:
            Unstackable: if one has become of another type or shape.
        """
        found = []
        for place in self.places:
            home, key = place.homes[0]
            tensor = home[key]
            if tensor.dtype != self.dtypes[place.kind] or tensor.shape != place.shape:
                raise Unstackable(f"{place.name} changes its type or shape")
            found.append(tensor)
        return found

    def copy(self, into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy a client's tensors, in the order of places; both as the layout knows them."""
        for numbers in self._by_type:  # a GPU starts one operation for tensors of one type
            torch._foreach_copy_([into[number] for number in numbers], [values[number] for number in numbers])

    def _count(self) -> int:
        return sum(tensor is not None for home in self._buffers for tensor in home.values())

    def check_buffers(self) -> None:
        """Refuse a module that has got buffers since.

        Raises:
            Unstackable: if it has more, or fewer, than it had.
        """
        if self._count() != self._num_buffers:
            raise Unstackable("it gets buffers in a round, which it must have from the beginning")

    def numbers(self) -> dict[int, int]:
        """Places of the resident module's present tensors, by their ids."""
        return {id(home[key]): i for i, place in enumerate(self.places) for home, key in place.homes}

    def index(self, tensors: Sequence[Tensor]) -> list[int]:
        """Places of some of the resident module's tensors."""
        numbers = self.numbers()
        return sorted({numbers[id(tensor)] for tensor in tensors})

    def present(self) -> list[Tensor]:
        """What stands in the module's places now: its own tensors, or within `swapped` others."""
        return [home[key] for home, key in (place.homes[0] for place in self.places)]

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor], aliases: Sequence[Alias] = ()) -> Iterator[None]:
        """Let the module have other tensors for the length of a block; what it makes of them is undone.

        Args:
            tensors: in the order of places.
            aliases: attributes that hold some of them, too.
        """
        before = [home[key] for place in self.places for home, key in place.homes]
        for place, tensor in zip(self.places, tensors, strict=True):
            for home, key in place.homes:
                home[key] = tensor
        for alias in aliases:
            alias.home[alias.key] = alias.of(tensors)
        try:
            yield
        finally:
            for alias in aliases:
                alias.home[alias.key] = alias.value
            waiting = iter(before)
            for place in self.places:
                for home, key in place.homes:
                    home[key] = next(waiting)


class Rows:
    """What several clients' modules hold.

    Args:
        layout: where what stands.
        flats: [K, width] of each kind.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor]) -> None:
        self.layout = layout
        self.flats = list(flats)
        self._views: dict[int, list[Tensor]] = {}
        self._rows: dict[int, list[Tensor]] = {}

    @classmethod
    def empty(cls, layout: Layout, count: int) -> Rows:
        """Rows for so many clients."""
        shapes = zip(layout.widths, layout.dtypes, strict=True)
        return cls(layout, [torch.empty(count, width, dtype=t, device=layout.device) for width, t in shapes])

    def __len__(self) -> int:
        return len(self.flats[0])

    @torch.no_grad()
    def put(self, row: int) -> None:
        """Take the resident module's tensors down.

        Raises:
            Unstackable: if they are not those that the layout knows, or have become of another type or shape.
        """
        self.layout.check_buffers()
        self.layout.copy(self._row(row), self.layout.tensors())

    @torch.no_grad()
    def load(self, row: int) -> None:
        """Bring a client's tensors into the resident module."""
        self.layout.copy(self.layout.tensors(), self._row(row))

    def _row(self, row: int) -> list[Tensor]:
        """One client's tensors, in the order of places; they share the memory."""
        if row not in self._rows:
            self._rows[row] = [view[row] for view in self.views(len(self))]
        return self._rows[row]

    def views(self, count: int) -> list[Tensor]:
        """[count, …] every tensor of the first `count` clients, in the order of places; they share the memory."""
        if count not in self._views:
            with torch.no_grad():
                # `.data`: a version of its own, or a counter that a step moves would spoil the backward pass of all.
                self._views[count] = [place.of(self.flats[place.kind][:count]).data for place in self.layout.places]
        return self._views[count]

    @torch.no_grad()
    def pick(self, rows: Tensor) -> Rows:
        """Copies of some clients' rows."""
        return Rows(self.layout, [flat.index_select(0, rows) for flat in self.flats])

    @torch.no_grad()
    def put_back(self, rows: Tensor, picked: Rows) -> None:
        """The inverse of `pick`."""
        for flat, own in zip(self.flats, picked.flats, strict=True):
            flat.index_copy_(0, rows, own)

    def clone(self) -> Rows:
        """Copies of all rows."""
        made = Rows(self.layout, [torch.empty_like(flat) for flat in self.flats])
        made.copy_(self)
        return made

    @torch.no_grad()
    def copy_(self, other: Rows) -> None:
        """Take over what other rows hold."""
        copy_all(self.flats, other.flats)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's dimensions as they stand in memory, the outermost first; as they are where it has gaps.

    A dimension of size 1 comes behind those of the same stride: of one channel, too, it says whether channels are last.
    """
    steps = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], -tensor.shape[dim]))
    return tuple(order) if tensor.permute(order).is_contiguous() else tuple(range(tensor.dim()))


class Turns:
    """Rows for one cohort after another, in as many places as there are cohorts that are still looked at.

    Args:
        layout: where what stands.
        places: how many.
    """

    def __init__(self, layout: Layout, places: int) -> None:
        self._layout = layout
        self._rows = deque([Rows.empty(layout, 0)] * places)

    def next(self, count: int) -> Rows:
        """Rows for so many clients, in the place that was given out longest ago."""
        rows = self._rows.popleft()
        self._rows.append(rows if len(rows) == count else Rows.empty(self._layout, count))
        return self._rows[-1]


_REASONS = {
    "random operation": "its step draws random numbers",
    "data-dependent control flow": "its step decides by a tensor's value",
    ".item()": "its step reads a number off a tensor",
    "modified by an inplace operation": "its step changes a tensor that its gradient needs",
}
"""What torch says, and what it means here."""


def reason_of(error: Exception) -> str:
    """Why stacking failed, in one line."""
    known = known_reason(error)
    if known:
        return known
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    where = place_of(error)
    return f"{shortened(f'{type(error).__name__}: {text}', 160 - len(where))}{where}"


def known_reason(error: Exception) -> str:
    """What of a step torch cannot stack, whoever's it is; empty for any other error."""
    return next((reason for said, reason in _REASONS.items() if said in str(error)), "")
