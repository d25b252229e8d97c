"""Looks at a client while it takes part in a round: what it hears, its losses, its model, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from fl_lightning.core.checkup import Expected, Unsound, check_message, check_values, tensors_of
from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import batch_norms
from fl_lightning.core.message import Message
from fl_lightning.federation.sickness import ServerError


class Checkups:
    """What is looked at in the clients of one architecture.

    Args:
        module: the resident module.
        growth: `federation.max_growth`.
    """

    def __init__(self, module: ClientModule, growth: float) -> None:
        self.module = module
        self.growth = growth
        method = module.method
        self.parameters = frozenset(name for name, _ in method.named_parameters(remove_duplicate=False))
        counted = {id(tensor) for layer in batch_norms(method) for tensor in layer.buffers()}
        kept = {name: tensor for name, tensor in module.entries.items() if name in module.division.kept}
        self.kept = [n for n, t in kept.items() if n in self.parameters or id(t) in counted]
        shared = set(module.division.shared)
        weights = {name: tensor.detach().to("meta") for name, tensor in module.entries.items() if name in shared}
        artifacts = {name: shape for name, shape in method.interface().items() if name not in shared}
        self.expected = Expected(weights, artifacts, self.parameters)

    def losses(self) -> dict[str, float]:
        """The fit's mean losses; what is only logged, and no finite number, is left out.

        Raises:
            Unsound: naming the loss that was the first to be no finite number, and the step.
        """
        meter = self.module.meter
        means = meter.means()
        if all(map(math.isfinite, means.values())):
            return means
        weights = self.module.method.term_weights()
        counts = ["loss", *(name for name, weight in weights.items() if weight > 0)]
        broken = meter.first_broken(counts)
        if broken is not None:
            what = "the loss" if broken.name == "loss" else f"the loss's term {broken.name}"
            raise Unsound(f"{what} is {broken.value} at step {broken.step} of {meter.num_steps}")
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def state(self, entries: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
        """Look at what the client will keep: the parameters and statistics that it does not share.

        Args:
            entries: the client's present ones.
            before: what it kept until now.

        Raises:
            Unsound: naming the first entry that is wrong.
        """
        if self.kept:
            check_values({name: entries[name] for name in self.kept}, before, self.growth, self.parameters)

    def message(self, message: Message, received: Message, num_train: int) -> None:
        """Look at what the client sends, as it arrives.

        Args:
            message: what the wire made of it.
            received: what the client was sent, with the weights that it began from.
            num_train: training samples of the client.

        Raises:
            Unsound: naming the first entry that is wrong.
        """
        check_message(message, self.expected, num_train, received, self.growth)


_ANY = 1e100
"""More than any number of float32, and its third power is one of float64."""


class Inbound:
    """Looks whether what clients hear is finite; a message that goes to many is looked at once.

    Whether it has grown too much is asked of who sends it, and of the server when it has closed a round.
    """

    def __init__(self) -> None:
        self._last: Message | None = None

    def check(self, message: Message, round: int, client: int) -> None:
        """Look at what a client hears.

        Raises:
            ServerError: naming the first entry that is not finite.
        """
        if message is self._last:
            return
        try:
            check_values(tensors_of(message), {}, _ANY, ())
        except Unsound as error:
            raise ServerError(f"round {round}, the server: {error} in what client {client} hears") from error
        self._last = message
