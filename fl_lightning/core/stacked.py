"""One mini-batch of several clients at once: the method's step as it is, under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from fl_lightning.core import engine
from fl_lightning.core.devices import Part
from fl_lightning.core.facts import Facts, Fit
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.meter import as_scalar
from fl_lightning.core.rows import Alias, Layout, OneByOne, Unstackable
from fl_lightning.core.stacked_layers import layers
from fl_lightning.core.step import Bench, Step

CLOSE, TINY = 1e-2, 1e-5
"""Two steps are the same whose gradients differ by less than so much of their length; the same for a number of 0."""


class Mixed(Exception):
    """A step asks for something in which its clients differ.

    Args:
        name: what it asks for: ``is_last``, ``num_batches``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Common:
    """What the clients of a step have in common; asking for what differs raises `Mixed`."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.told: dict[str, Any] = {}
        """The fit and the federation, as far as they are the same for all; the epoch is of the former."""
        self.asked: dict[tuple[str, str], Any] | None = None
        """What a step has asked for, and what it was told; None where nobody takes it down."""

    def of(self, name: str) -> Any:
        """What all clients of the present step have.

        Raises:
            Mixed: if they differ.
        """
        if name not in self.known:
            raise Mixed(name)
        return self.note("step", name, self.known[name])

    def note(self, of: str, name: str, value: Any) -> Any:
        """Take down what a step was told."""
        if self.asked is not None:
            self.asked[of, name] = value
        return value

    def tells(self, asked: Mapping[tuple[str, str], Any]) -> bool:
        """Whether a step would be told the same now."""
        return all(self._now(of, name) == value for (of, name), value in asked.items())

    def _now(self, of: str, name: str) -> Any:
        return self.known.get(name, self) if of == "step" else getattr(self.told[of], name, self)


class _OfAll:
    """What each client has of its own: it is read where all clients of a step have the same of it (`Common.of`).

    The class that it stands in for sets it as any attribute of its own, and nothing comes of that: each client has its
    own value, and `Common.known` holds what is equal.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        return owner.common.of(self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        """Leave it: `Common.known` says what it is."""


_OF_FITS = frozenset({"epoch", "epochs", "lr", "lr_factor", "accumulate"})
_OF_FACTS = frozenset(own.name for own in fields(Facts))


class CommonFit(Fit):
    """The fit of several clients: their counts are known where they are equal.

    Args:
        own: any client's.
        common: what the present step's clients have in common.
    """

    def __init__(self, own: Fit, common: Common) -> None:
        vars(self)["common"] = common
        super().__init__(own._optimizer, own.epochs, own.lr_factor, own.accumulate)
        self.lr = own.lr
        common.told["fit"] = self

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return vars(self)["common"].note("fit", name, value) if name in _OF_FITS else value

    num_batches, num_steps = _OfAll(), _OfAll()


class CommonFacts(Facts):
    """What several clients know of the federation: not which one they are."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("client", "is_newcomer"):
            raise Unstackable(f"its step asks for facts.{name}")
        value = super().__getattribute__(name)
        common = vars(self).get("common") if name in _OF_FACTS else None
        return value if common is None else common.note("facts", name, value)

    @classmethod
    def of(cls, facts: Facts, common: Common) -> CommonFacts:
        """A client's facts, without the client."""
        known = {own.name: getattr(facts, own.name) for own in fields(Facts) if own.name != "client"}
        made = common.told["facts"] = cls(**known)
        vars(made)["common"] = common
        return made


class _Taken(NamedTuple):
    """What a step has made.

    Args:
        total: the loss that is descended on; None where it descends on nothing.
        parts: of the phase, that step.
        logged: losses by name, the sum among them.
        size: samples that they are means over.
    """

    total: Tensor | None
    parts: tuple[str, ...]
    logged: dict[str, Tensor]
    size: int


class StackedStep(Step):
    """A step that takes its loss down instead of descending on it: backward is made for all clients at once."""

    def __init__(
        self, bench: Bench, part: Part, epoch: int, common: Common, state: Callable[[], Any] = lambda: None
    ) -> None:
        self.common = common
        super().__init__(bench, part, epoch)
        self.parts: tuple[str, ...] = ()
        self._state = state
        self._stood: Any = None

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Of the fit, 0-based."""
        return self.common.note("fit", "epoch", self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    is_first, is_last, steps_now = _OfAll(), _OfAll(), _OfAll()

    def descend(self, values: Mapping[str, Tensor], *parts: str) -> None:
        """Take the loss down.

        Raises:
            OneByOne: at the second descent of a step.
        """
        if self._descents:
            raise OneByOne("its step descends twice on a mini-batch")
        self._bench.note_descent(values)
        self._total, self._descents, self.parts = self.total(values), 1, parts
        self._logged.update(values)
        self._stood = self._state()

    def observe(self, out: Forward) -> None:
        """Show the pass to terms, which may add up what they see: of the pass, not of what the step has made."""
        self._check_rest()
        super().observe(out)
        self._stood = self._state() if self._descents else None

    def _check_rest(self) -> None:
        """Refuse what a step does with its tensors once it has descended: the descent itself is yet to come.

        Raises:
            OneByOne: if it has changed one.
        """
        if self._descents and self._state() != self._stood:
            raise OneByOne("its step changes tensors after it has descended")

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> NoReturn:
        """Not stacked.

        Raises:
            OneByOne: always.
        """
        raise OneByOne("its step takes gradients of its own")

    def follow(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not stacked.

        Raises:
            OneByOne: always.
        """
        raise OneByOne("its step takes gradients of its own")

    def taken(self) -> _Taken:
        """Let the method do its step, and what came of it."""
        self.take()
        self._check_rest()
        logged = dict(self._logged)
        if logged:
            total = self._total if self._descents == 1 else self._sum(logged)
            assert total is not None
            logged = {"loss": total, **logged}
        logged = {name: as_scalar(name, value) if value.dim() else value for name, value in logged.items()}
        return _Taken(self._total, self.parts, logged, self._size)


class Outcome(NamedTuple):
    """What a stacked step came to.

    Args:
        descends: whether there was a loss to descend on.
        gradients: [n, …] of each of the phase's parameters; None where the loss does not reach it.
        parts: of the phase, that step.
        logged: [n] each, losses by name.
        size: samples that they are means over.
        steps: optimizer steps that were made on it.
    """

    descends: bool
    gradients: list[Tensor | None]
    parts: tuple[str, ...]
    logged: dict[str, Tensor]
    size: int
    steps: int = 0


class StackedBench:
    """Steps of one phase for several clients.

    Args:
        layout: where the method's tensors stand.
        bench: what the phase's steps have in common; without optimizers.
        trained: places of the phase's parameters.
        common: what a step's clients have in common.
        aliases: attributes that hold parameters or buffers.
    """

    def __init__(
        self, layout: Layout, bench: Bench, trained: Sequence[int], common: Common, aliases: Sequence[Alias] = ()
    ) -> None:
        self.aliases = list(aliases)
        self.layout = layout
        self.bench = bench
        self.trained = list(trained)
        self.common = common

    def step(self, views: Sequence[Tensor], x: Tensor, y: Tensor, epoch: int) -> Outcome:
        """One mini-batch of each of n clients: losses and gradients; buffers that move are moved.

        Args:
            views: [n, …] every tensor of the clients, in the order of places.
            x: [n, B, …] inputs.
            y: [n, B] classes.
            epoch: of the fit, 0-based.

        Raises:
            Unstackable: saying why the step cannot be stacked.
            Mixed: if it asks for what differs among the clients.
        """
        count = len(y)
        leaves = [view[0] for view in views] if count == 1 else list(views)
        for index in self.trained:
            leaves[index] = leaves[index].detach().requires_grad_()
        memory = [leaf.data_ptr() for leaf in leaves] if count == 1 else []  # `vmap` refuses a step that sets `data`
        names: list[str] = []
        about: dict[str, Any] = {}
        moved: list[int] = []
        residents = self.layout.tensors()

        def state() -> Any:
            return [*map(id, self.layout.present()), *(tensor._version for own in (views, residents) for tensor in own)]

        def one(tensors: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
            with self.layout.swapped(tensors, self.aliases), layers(self.layout.device, count):
                taken = StackedStep(self.bench, Part.whole(x, y), epoch, self.common, state).taken()
                if count == 1 and taken.total is not None:  # here, as a checkpoint passes once more through the module
                    gradients[:] = descended(taken.total)
                after = self.layout.present()
            names[:] = taken.logged
            about.update(parts=taken.parts, size=taken.size, descends=taken.total is not None)
            moved[:] = [i for i, (new, old) in enumerate(zip(after, tensors, strict=True)) if new is not old]
            moved.extend(i for i, own in enumerate(memory) if after[i] is tensors[i] and after[i].data_ptr() != own)
            total = () if taken.total is None else (taken.total,)
            return total, tuple(taken.logged.values()), tuple(after[index] for index in moved)

        gradients: list[Tensor | None] = [None] * len(self.trained)
        inputs = [leaves[index] for index in self.trained]

        def descended(total: Tensor) -> Sequence[Tensor | None]:
            with self.bench.machine.wide():
                return engine.gradients(total, inputs) if total.requires_grad else gradients

        if count == 1:  # as it is: layers know more ways than `vmap` does
            made = one(leaves, x[0], y[0])
            total, logged, buffers = (tuple(value[None] for value in own) for own in made)
        else:
            total, logged, buffers = vmap(one, randomness="error")(leaves, x, y)
        descends = about["descends"] and total[0].requires_grad
        if count == 1:
            gradients = [None if own is None else own[None] for own in gradients]
        elif descends:
            gradients = list(descended(total[0].sum()))
        self._move(views, moved, buffers)
        losses = {name: value.detach() for name, value in zip(names, logged, strict=True)}
        return Outcome(descends, gradients, about["parts"], losses, about["size"])

    def _move(self, views: Sequence[Tensor], moved: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Take over tensors that the step has replaced."""
        for index, new in zip(moved, buffers, strict=True):
            if new.dtype != views[index].dtype or new.shape != views[index].shape:
                raise Unstackable(f"{self.layout.places[index].name} changes its type or shape in a step")
            with torch.no_grad():
                views[index].copy_(new)

    def alone(self, x: Tensor, y: Tensor, epoch: int) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """The same for the client that the resident module holds: losses, and gradients of the phase's parameters."""
        taken = StackedStep(self.bench, Part.whole(x, y), epoch, self.common).taken()
        gradients: list[Tensor | None] = [None] * len(self.trained)
        if taken.total is not None and taken.total.requires_grad:
            present = self.layout.tensors()
            own = [present[index] for index in self.trained]
            gradients = list(engine.gradients(taken.total, own))
        return {name: value.detach() for name, value in taken.logged.items()}, gradients


def agree(
    outcome: Outcome,
    tensors: Sequence[Tensor],
    losses: Mapping[str, Tensor],
    gradients: Sequence[Tensor | None],
    after: Sequence[Tensor],
    place: int = 0,
) -> bool:
    """Whether a client's step came to the same stacked as alone, within what rounding does.

    Args:
        outcome: the stacked step.
        tensors: the client's, after it.
        losses: of the step alone.
        gradients: of the step alone.
        after: the client's tensors after it.
        place: of the client in the stacked step.
    """
    if outcome.logged.keys() != losses.keys() or len(outcome.gradients) != len(gradients):
        return False
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(outcome.logged[name][place], losses[name]) for name in losses]
    stacked = [None if own is None else own[place] for own in outcome.gradients]
    pairs += [*zip(stacked, gradients, strict=True), *zip(tensors, after, strict=True)]
    return all(same(one, other) for one, other in pairs)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are the same within what rounding does.

    As a whole, not element by element: of two numbers that are nearly the same, pooling takes the one or the other, and
    one sample's share of a filter's gradient goes elsewhere.
    """
    if one is None or other is None:
        return one is other
    if not one.is_floating_point():
        return torch.equal(one, other)
    wide = accumulation_dtype(other.device)
    one, other = one.to(wide), other.to(wide)
    if not torch.isfinite(other).all():
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool((one - other).norm() <= CLOSE * other.norm() + TINY * one.numel() ** 0.5)


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Round as little as parameters are: without mixed precision, nor a GPU's 10 bits for factors of convolutions."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
