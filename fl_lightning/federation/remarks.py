"""What a run does that its user may not have meant, and that is no mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.core.host import Parts

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederatedLoop


def remarks(loop: FederatedLoop) -> Iterator[str]:
    """A line for each, once the loop is set up."""
    largest, size = int(loop.num_train.max()), loop.data.batch_size
    if size > largest and loop.num_clients > 0:
        yield f"data.batch_size: {size} is more than any client has ({largest} at most), so an epoch is one step"
    method, chosen = loop.runner.modules[0].method, loop.settings.exchange
    if method.model.own.has_loss and (method.terms.has_instead or isinstance(method.network(), Parts)):
        yield f"model: {type(method).__name__} has a loss of its own, where what training_step returns does not count"
    if chosen is not None and type(chosen).__name__ != method.exchange:
        own, name = method.exchange, type(method).__name__
        yield f"federation.exchange: {type(chosen).__name__}, where {name} is defined on {own}"
