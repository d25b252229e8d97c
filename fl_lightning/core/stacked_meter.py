"""The losses of several clients' steps, taken down together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.core.meter import Broken, LossMeter


class StackedMeter:
    """Takes down the losses of stacked steps.

    Args:
        count: clients.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_steps = [0] * count
        self._taken: list[tuple[list[int], int, Mapping[str, Tensor]]] = []
        self._means: list[dict[str, float]] | None = None

    def add(self, rows: Sequence[int], values: Mapping[str, Tensor], batch_size: int) -> None:
        """Take one step of some clients down.

        Args:
            rows: which clients.
            values: [n] each, by name.
            batch_size: samples that they are means over.
        """
        self._taken.append((list(rows), batch_size, values))
        for row in rows:
            self.num_steps[row] += 1

    def means(self, row: int) -> dict[str, float]:
        """A client's means over the samples of all its steps, by name."""
        if self._means is None:
            self._means = self._all_means()
        return dict(self._means[row])

    def _all_means(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in range(self.count)]
        for name in dict.fromkeys(name for _, _, values in self._taken for name in values):
            own = [(rows, size, values[name]) for rows, size, values in self._taken if name in values]
            rows = torch.tensor([row for rows, _, _ in own for row in rows])
            sizes = torch.tensor([size for rows, size, _ in own for _ in rows], dtype=torch.float64)
            values = torch.cat([values for _, _, values in own]).cpu().double()
            sums, samples = torch.zeros(2, self.count, dtype=torch.float64).unbind()
            sums.index_add_(0, rows, values * sizes)
            samples.index_add_(0, rows, sizes)
            for row, (total, size) in enumerate(zip(sums.tolist(), samples.tolist(), strict=True)):
                if size:
                    found[row][name] = total / size
        return found

    def names(self, row: int) -> set[str]:
        """What was taken down of a client."""
        return {name for rows, _, values in self._taken if row in rows for name in values}

    def of(self, row: int) -> LossMeter:
        """A client's meter."""
        return _OneOf(self, row)

    def replay(self, row: int) -> LossMeter:
        """A client's steps, one by one."""
        meter = LossMeter()
        for rows, size, values in self._taken:
            if row in rows:
                at = rows.index(row)
                meter.add({name: value[at] for name, value in values.items()}, size)
        return meter


class _OneOf(LossMeter):
    """One client's meter of several that were taken down together."""

    def __init__(self, together: StackedMeter, row: int) -> None:
        super().__init__()
        self._together = together
        self._row = row
        self.num_steps = together.num_steps[row]

    @property
    def names(self) -> set[str]:
        return self._together.names(self._row)

    def means(self) -> dict[str, float]:
        return self._together.means(self._row)

    def first_broken(self, names: Collection[str]) -> Broken | None:
        return self._together.replay(self._row).first_broken(names)
