"""Who makes the optimizers of a fit in which a user's own LightningModule, or copies of it, learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn
from typing_extensions import override

from fl_lightning.models.head_cut import Joined
from fl_lightning.models.module_optimizers import Stretch
from fl_lightning.models.own_training import Counter, MakeOptimizer, OptimizerMaker


class Home(Protocol):
    """The share of a module in a fit, as far as its optimizers go."""

    joined: Joined
    stretches: list[Stretch]
    present: Stretch
    watches: bool

    def make(self, parameters: list[nn.Parameter], in_fit: bool = True) -> list[Any]:
        """The module's optimizers, of some parameters."""

    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer of the present phase start from a learning rate; false where it can not."""

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer of the fit has moved the parameters."""


class OwnOptimizers(OptimizerMaker):
    """Makes modules' own optimizers for a fit.

    Args:
        homes: the shares of a module and of its copies that learn in the fit; the first makes the optimizers of
            parameters that none of them has.
    """

    def __init__(self, homes: Sequence[Home]) -> None:
        self.homes = homes
        self.further: list[Any] = []
        """What a module of manual optimization has beside the first optimizer of the fit's last phase."""

    @override
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """The first one for the fit's next phase."""
        own = list(parameters)
        made = _home_of(own, self.homes).make(own)
        self.further = made[1:]
        return made[0]

    @override
    def outside(self, parameters: Iterable[nn.Parameter]) -> Any:
        """An optimizer that no schedule moves, and that nobody keeps."""
        return self.homes[0].make(list(parameters), in_fit=False)[0]

    @override
    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer of the present phase, and its schedule, start from a learning rate; false where none can."""
        return any(home.rescale(optimizer, lr) for home in self._homes_of(optimizer))

    @override
    def tune(self, optimizer: Any, change: Callable[[Any], None]) -> None:
        """Change an optimizer; the schedule of the present phase starts from where that leaves its learning rates."""
        for home in self._homes_of(optimizer):
            change = partial(home.present.tune, change=change)
        change(optimizer)

    def _homes_of(self, optimizer: Any) -> list[Home]:
        return [home for home in self.homes if any(optimizer is own for own in home.present.optimizers)]


class ConfiguredOptimizers(OptimizerMaker):
    """Makes the configuration's optimizers for a fit, which modules see as theirs.

    Args:
        homes: the shares of a module and of its copies that learn in the fit.
        configured: makes an optimizer.
    """

    def __init__(self, homes: Sequence[Home], configured: MakeOptimizer) -> None:
        self.homes = homes
        self._configured = configured

    @override
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """The fit's next one; after a fit one that no module sees, too."""
        own = list(parameters)
        made, home = self._configured(own), _home_of(own, self.homes)
        if home.stretches:
            home.present.add([made], home.after_step if home.watches else Counter(home.after_step))
        return made

    @override
    def outside(self, parameters: Iterable[nn.Parameter]) -> Any:
        """One that no module sees."""
        return self._configured(parameters)


def _home_of(parameters: Sequence[nn.Parameter], homes: Sequence[Home]) -> Home:
    """The module whose some of the parameters are; the first where they are nobody's. Tells all that train."""
    found = [home for home in homes if _holds(home, parameters)]
    for home in found:
        home.present.trains = True
    return found[0] if found else homes[0]


def _holds(home: Home, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether some of the parameters are a module's, its head among them."""
    wanted = {id(parameter) for parameter in parameters}
    with home.joined as joined:
        return any(id(parameter) in wanted for parameter in joined.module.parameters())
