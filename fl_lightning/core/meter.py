"""Mean losses of a local fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import ConfigError, require

if TYPE_CHECKING:
    from fl_lightning.core.devices import SharedFit


def loss_column(name: str) -> str:
    """The column of a loss: ``loss`` for the sum, ``loss/<term>`` for a part of it."""
    return name if name == "loss" else f"loss/{name}"


def as_scalar(name: str, value: Tensor) -> Tensor:
    """A loss of one element as a scalar.

    Raises:
        ConfigError: naming the loss, if it has more.
    """
    rule = f"its loss {name!r} must be a scalar tensor, not one of shape {list(value.shape)}"
    require(value.numel() == 1, "method", rule)
    return value.reshape(())


class Broken(NamedTuple):
    """A loss that is no finite number.

    Args:
        name: the loss.
        step: the first step at which it was none, 1-based.
        value: what it was.
    """

    name: str
    step: int
    value: float


class LossMeter:
    """Takes down the losses of steps; means over samples are read once, after the fit.

    Args:
        devices: those that share the fit; None for one.
    """

    def __init__(self, devices: SharedFit | None = None) -> None:
        self.devices = devices
        self._means: dict[str, float] | None = None
        self.losses: dict[str, list[tuple[Tensor, int]]] = {}
        self._steps: dict[str, list[int]] = {}
        self.num_steps = 0
        """Steps that were taken down."""
        self._before: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Take down one step's losses.

        Args:
            values: scalars, by name.
            batch_size: samples that they are means over.
        """
        self._means = None
        try:
            for name, value in values.items():
                self.losses.setdefault(name, []).append((value.detach(), batch_size))
                self._steps.setdefault(name, []).append(self.num_steps)
        except AttributeError:
            odd, value = next((name, own) for name, own in values.items() if not isinstance(own, Tensor))
            raise ConfigError("method", f"its loss {odd!r} must be a scalar tensor", value) from None
        self.num_steps += 1

    @property
    def names(self) -> set[str]:
        """What was taken down; the sum is ``loss``."""
        return set(self.losses)

    def means(self) -> dict[str, float]:
        """Mean over the samples of all steps, by name."""
        if self._means is None:
            self._means = self._means_of(self.losses)
        return dict(self._means)

    def end_epoch(self) -> None:
        """What is taken down from here on is the next epoch's."""
        self._before = {name: len(own) for name, own in self.losses.items()}

    def epoch_means(self) -> dict[str, float]:
        """Mean over the samples of the present epoch's steps, by name, of what was taken down in it."""
        own = {name: taken[self._before.get(name, 0) :] for name, taken in self.losses.items()}
        return self._means_of({name: taken for name, taken in own.items() if taken})

    def _means_of(self, losses: Mapping[str, Sequence[tuple[Tensor, int]]]) -> dict[str, float]:
        read = self._read(losses)
        return {name: self._mean(read[name], own) for name, own in losses.items() if self._counts(own)}

    def _read(self, losses: Mapping[str, Sequence[tuple[Tensor, int]]]) -> dict[str, Tensor]:
        """All values by name, on the CPU: one wait for the device."""
        if not losses:
            return {}
        values = [value for own in losses.values() for value, _ in own]
        if len({value.device for value in values}) > 1:  # a term's own zero may lie on the CPU
            values = [value.cpu() for value in values]
        if any(map(Tensor.dim, values)):
            values = [as_scalar(name, value).cpu() for name, own in losses.items() for value, _ in own]
        every = torch.stack(values).cpu()
        return dict(zip(losses, every.split([len(own) for own in losses.values()]), strict=True))

    def _counts(self, taken: Sequence[tuple[Tensor, int]]) -> bool:
        """Whether there was any sample; of several devices some may have none, and have to be there for the sum."""
        return self.devices is not None or any(size for _, size in taken)

    def _mean(self, values: Tensor, taken: Sequence[tuple[Tensor, int]]) -> float:
        values = values.double()
        sizes = torch.tensor([size for _, size in taken], dtype=torch.float64)
        sums = torch.stack([(values * sizes).sum(), sizes.sum()])
        sums = sums if self.devices is None else self.devices.total(sums)
        return float(sums[0] / sums[1])

    def first_broken(self, names: Collection[str]) -> Broken | None:
        """Which of some losses was the first to be no finite number; of those of one step the part before the sum.

        Steps are looked at only where a mean is not finite.

        Args:
            names: the losses; the sum is ``loss``.
        """
        broken = []
        for name, mean in self.means().items():
            if name not in names or math.isfinite(mean):
                continue
            values = self._read(self.losses)[name]
            index = int(torch.isfinite(values).logical_not().int().argmax())
            found = Broken(name, self._steps[name][index] + 1, float(values[index]))
            # several devices: it may have been another one's part
            broken.append(found if not math.isfinite(found.value) else found._replace(value=mean))
        return min(broken, key=lambda own: (own.step, own.name == "loss"), default=None)
