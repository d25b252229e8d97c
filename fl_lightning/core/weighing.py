"""A server that believes what clients say of how much they count."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.message import Message
from fl_lightning.core.server import Server


class SelfWeighingServer(Server):
    """Weighs each client in the mean by a number that it sends; one below 0 counts as 0.

    Args:
        initial: as the base's.
        weighed_by: name of the artifact that is the number, a scalar tensor.
    """

    in_parts = True
    takes_noise = False  # clipped and blurred, the number is the same for all but for the noise

    def __init__(self, initial: Message, weighed_by: str) -> None:
        super().__init__(initial)
        self.weighed_by = weighed_by

    @override
    def close_round(self) -> None:
        super().close_round()
        self.message.artifacts.pop(self.weighed_by, None)  # the mean of what clients say of themselves helps nobody

    @override
    def weight_of(self, message: Message) -> float:
        number = message.artifacts[self.weighed_by]
        assert isinstance(number, Tensor)
        return max(float(number), 0.0)
