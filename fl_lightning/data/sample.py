"""A smaller data set, drawn from another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.cache import load
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.dealing import by_class, largest_remainders
from fl_lightning.errors import require
from fl_lightning.seeding import numpy_generator


class Sample(Dataset):
    """A stratified sample of another data set, for what would take too long on all of it.

    Every class of both official parts gives the same share, rounded so that the sum is right; mean and std stay those
    of the whole set.

    Args:
        dataset: what is drawn from.
        samples: so many samples in all, both parts together.
        draw: which sample: the seed of the draw, which the run's own seed does not move.
    """

    def __init__(self, dataset: Dataset, samples: int, draw: int = 0) -> None:
        require(samples >= 1, f"{KEY}.samples", "must be >= 1", samples)
        require(draw >= 0, f"{KEY}.draw", "must be >= 0", draw)
        self.dataset = dataset
        self.samples = samples
        self.draw = draw

    @property
    def paper(self) -> str:  # type: ignore[override]
        """The whole set's."""
        return self.dataset.paper

    @property
    def text_column(self) -> str:
        """The whole set's."""
        return self.dataset.text_column

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """As the whole set does."""
        return self.dataset.encode(columns)

    def pictures(self, paths: Sequence[Path], shape: Sequence[int]) -> Tensor | None:
        """As the whole set does."""
        return self.dataset.pictures(paths, shape)

    def sources(self) -> list[Path] | None:
        """The whole set's."""
        return self.dataset.sources()

    def arrays(self) -> Arrays:
        """The sample, in the order of the whole set.

        Raises:
            ConfigError: as the whole set; if it has fewer samples, or the training part would get none.
        """
        whole = load(self.dataset)
        most = len(whole.y)
        require(self.samples <= most, f"{KEY}.samples", f"must be at most {most}, all that there are", self.samples)
        rng = numpy_generator(self.draw, "dataset/sample")
        in_test = np.arange(most) >= whole.num_train
        num_classes = len(whole.classes)
        groups = by_class(whole.y.numpy() + num_classes * in_test, 2 * num_classes, rng)
        sizes = largest_remainders(self.samples, np.array([len(group) for group in groups]))
        rows = np.sort(np.concatenate([group[:size] for group, size in zip(groups, sizes, strict=True)]))
        num_train = int((rows < whole.num_train).sum())
        require(num_train > 0, f"{KEY}.samples", "is too few: the training part would be empty", self.samples)
        drawn = torch.from_numpy(rows)
        groups_of = None if whole.groups is None else whole.groups[drawn]
        return replace(whole, x=whole.x[drawn], y=whole.y[drawn], num_train=num_train, groups=groups_of, digest="")
