"""What a run does that its user may not have meant, and that is no mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fl_lightning.core.host import Parts
from fl_lightning.federation.callbacks import never_called
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.privacy import ClipAndNoise

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederatedLoop


@runtime_checkable
class Remarking(Protocol):
    """A method that has something to say of a precision."""

    def remark(self, precision: str) -> str:
        """What a user should know of the method under a precision (``bf16-true``), in one line; empty if nothing."""


def remarks(loop: FederatedLoop) -> Iterator[str]:
    """A line for each, once the loop is set up."""
    largest, size = int(loop.num_train.max()), loop.data.batch_size
    if size > largest and loop.num_clients > 0:
        yield f"data.batch_size: {size} is more than any client has ({largest} at most), so an epoch is one step"
    yield from (f"federation.callbacks: {said}" for said in never_called(loop.callbacks))
    method, chosen = loop.runner.modules[0].method, loop.settings.exchange
    wire, steps = loop.settings.wire or (), loop.settings.server_optimizer is not None
    rounds = [own for own in wire if isinstance(own, Quantize) and own.ways != "down" and not own.updates]
    if steps and any(not own.error_feedback for own in rounds):
        yield "federation.wire: Quantize rounds all alike, which a server optimizer adds up; say error_feedback: true"
    noisy = any(isinstance(own, ClipAndNoise) for own in wire)
    moved = [name for name in loop.runner.modules[0].division.shared if name.endswith("running_var")]
    if noisy and moved:
        yield f"federation.wire: noise may make {moved[0]} negative, whose model gives nan; say share_buffers: false"
    if method.model.own.has_loss and (method.terms.has_instead or isinstance(method.network(), Parts)):
        yield f"model: {type(method).__name__} has a loss of its own, where what training_step returns does not count"
    if isinstance(method, Remarking) and (said := method.remark(str(loop.runner.trainer.precision))):
        yield f"method: {type(method).__name__}: {said}"
    if chosen is not None and type(chosen).__name__ != method.exchange:
        own, name = method.exchange, type(method).__name__
        yield f"federation.exchange: {type(chosen).__name__}, where {name} is defined on {own}"
