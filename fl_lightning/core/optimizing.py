"""A server that makes more of the mean than the mean, because its method says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server, Weighting
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import ConfigError


class OptimizingServer(Server):
    """Averages, and lets an optimizer of its own step along the mean's difference to what there was.

    Args:
        initial: as the base's.
        step: what follows the mean; a copy does.
        trained: names of the weights that are parameters.
        weighting: as the base's.
    """

    hears_mean = in_parts = True

    def __init__(
        self, initial: Message, step: ServerOptimizer, trained: Iterable[str], weighting: Weighting = "samples"
    ) -> None:
        super().__init__(initial, weighting=weighting)
        self.optimizer = copy.deepcopy(step)
        self.optimizer.start(trained)


def optimizing_server(method: Any, initial: Message, facts: Facts) -> OptimizingServer:
    """A server that lets a copy of the method's `server_step` follow the mean: ``make_server = optimizing_server``."""
    return OptimizingServer(initial, method.server_step, (name for name, _ in method.named_parameters()))


def server_step(kind: Callable[..., ServerOptimizer], **options: Any) -> ServerOptimizer:
    """A server optimizer of a method's own options, which what it refuses is named by.

    Raises:
        ConfigError: for an option out of range.
    """
    try:
        return kind(**options)
    except ConfigError as error:
        raise error.at(f"method.{error.key.rpartition('.')[2]}") from None
