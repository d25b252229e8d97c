"""The same epoch of several clients, step by step: which of them have a mini-batch of one size, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.data.store import Bundle, Epoch


@dataclass
class Together:
    """One mini-batch of each of some clients, all of one size.

    Args:
        rows: which of the clients, in ascending order.
        x: [n, B, …] inputs.
        y: [n, B] classes.
        index: of the mini-batch in each client's epoch, 0-based.
        is_last: of each client, whether it is the epoch's last.
    """

    rows: list[int]
    x: Tensor
    y: Tensor
    index: list[int]
    is_last: list[bool]


def together(epochs: Sequence[Epoch], batch_size: int, steps_per_bundle: int) -> Iterator[Together]:
    """The mini-batches of one epoch of several clients: whole ones first, all clients' that still have one.

    A client's own mini-batches come in their order: only its last one can be smaller. Those are put together by size.

    Args:
        epochs: each client's, as `ClientData.bundles` gives them.
        batch_size: samples in a whole mini-batch.
        steps_per_bundle: mini-batches that are gathered at once.
    """
    sizes = [len(epoch.order) for epoch in epochs]
    full = [size // batch_size for size in sizes]
    steps = [-(-size // batch_size) for size in sizes]
    for start in range(0, max(full, default=0), steps_per_bundle):
        span = range(start, min(start + steps_per_bundle, max(full)))
        places = [(step, row) for step in span for row in range(len(epochs)) if full[row] > step]
        x, y = _gathered(epochs, [(row, step, batch_size) for step, row in places], batch_size, steps_per_bundle)
        at = 0
        for step in span:
            rows = [row for of, row in places if of == step]
            count, end = len(rows), at + len(rows) * batch_size
            own = x[at:end].view(count, batch_size, *x.shape[1:]), y[at:end].view(count, batch_size)
            yield Together(rows, *own, [step] * count, [steps[row] == step + 1 for row in rows])
            at = end
    smaller: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        if size % batch_size:
            smaller.setdefault(size % batch_size, []).append(row)
    for size, rows in sorted(smaller.items()):
        wanted = [(row, full[row], size) for row in rows]
        x, y = _gathered(epochs, wanted, batch_size, steps_per_bundle)
        own = x.view(len(rows), size, *x.shape[1:]), y.view(len(rows), size)
        yield Together(rows, *own, [full[row] for row in rows], [True] * len(rows))


def _gathered(
    epochs: Sequence[Epoch], wanted: Sequence[tuple[int, int, int]], batch_size: int, steps_per_bundle: int
) -> tuple[Tensor, Tensor]:
    """Some clients' mini-batches, one behind the other: (client, index of the mini-batch, its size)."""
    stores = {id(epochs[row].store) for row, _, _ in wanted}
    if len(stores) == 1 and not any(epoch.augments for epoch in epochs):
        orders = [epochs[row].order[at * batch_size : at * batch_size + size] for row, at, size in wanted]
        return epochs[wanted[0][0]].store.gather(torch.cat(orders))
    bundles: dict[tuple[int, int], Bundle] = {}  # gathered and augmented as one by one
    parts = []
    for row, at, size in wanted:
        key, start = (row, at // steps_per_bundle), at % steps_per_bundle * batch_size
        if key not in bundles:
            bundles[key] = epochs[row][at // steps_per_bundle]
        parts.append((bundles[key].x[start : start + size], bundles[key].y[start : start + size]))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
