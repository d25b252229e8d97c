"""What a body that several clients have received makes of the samples that all of them are tested on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.core.method import Seen
from fl_lightning.federation.resting import embeds_by_a_body_that_travels

LIMIT = 1 << 28
"""Bytes of embeddings that are kept at most."""


class Embeddings:
    """Embeddings of a union's batches, kept from one client to the next that has received the same body.

    Personal heads on a shared body (FedPer, FedRep, FedCPD, …) are tested on the union of all test parts right after
    the receive: N passes through one body, of which one is enough. For another batch or body, and where an embedding
    rests on more than the body, it is computed as ever.

    Args:
        limit: bytes that are kept at most; what is beyond is computed anew.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._known: weakref.WeakKeyDictionary[ClientModule, _OfOneBody | None] = weakref.WeakKeyDictionary()

    def of(self, module: ClientModule, x: Tensor) -> _OfOneBody | None:
        """Those by the module's present body; None where they cannot be kept.

        Args:
            module: the resident module, a client's state in it.
            x: [1, …] any input.
        """
        if module not in self._known:
            self._known[module] = _OfOneBody() if embeds_by_a_body_that_travels(module, x) else None
        own = self._known[module]
        if own is not None:
            own.turn_to([*module.method.model.body.parameters(), *module.method.model.body.buffers()])
            own.room = self._limit - sum(other.size for other in self._known.values() if other is not None)
        return own


class _OfOneBody:
    """Embeddings by one body, by batch."""

    def __init__(self) -> None:
        self._body: list[Tensor] = []
        self._rows: dict[tuple[str, int], Tensor] = {}
        self.size = self.room = 0

    def turn_to(self, body: Sequence[Tensor]) -> None:
        """Forget all of another body's."""
        same = len(body) == len(self._body) and all(map(torch.equal, body, self._body))
        if not same:
            self._body = [tensor.detach().clone() for tensor in body]
            self._rows.clear()
            self.size = 0

    def show(self, seen: Seen, module: ClientModule, batch: tuple[str, int]) -> None:
        """Tell a batch its embedding, where it is known."""
        if batch in self._rows:
            seen.knows(module.method.model, self._rows[batch])

    def keep(self, seen: Seen, module: ClientModule, batch: tuple[str, int]) -> None:
        """Keep a batch's embedding, if somebody has asked for it and there is room."""
        z = seen.known(module.method.model)
        if z is None or batch in self._rows or z.nbytes > self.room:
            return
        is_part = z.untyped_storage().nbytes() > z.nbytes  # of a tensor that would stay alive as a whole
        self._rows[batch] = z.clone(memory_format=torch.contiguous_format) if is_part else z
        self.size += z.nbytes
        self.room -= z.nbytes
