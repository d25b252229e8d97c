"""Smaller data sets for benchmarks that take too long on whole ones."""

from __future__ import annotations

import numpy as np
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.datasets import FashionMNIST
from fl_lightning.data.normalization import Normalize
from fl_lightning.errors import require


class FashionMNISTSample(FashionMNIST):
    """A stratified sample of Fashion-MNIST: equally many images of every class, both official parts merged.

    Args:
        samples: images in all, a multiple of 10.
        sample_seed: seed of the draw.
        root: folder that holds ``FashionMNIST/raw``, as for `FashionMNIST`.
        download: whether to download the files if they are not there.
        normalize: ``standard`` or ``half``, as for `FashionMNIST`.
    """

    name = "FashionMNIST"  # of the files

    def __init__(
        self,
        samples: int = 5000,
        sample_seed: int = 0,
        root: str | None = None,
        download: bool = True,
        normalize: Normalize = "standard",
    ) -> None:
        super().__init__(root, download, normalize)
        require(10 <= samples <= 70_000 and samples % 10 == 0, "data.dataset.samples", "10, 20, … or 70000", samples)
        self.samples = samples
        self.sample_seed = sample_seed

    def arrays(self) -> Arrays:
        """The sample, in the order of the whole set."""
        whole = super().arrays()
        labels, rng = whole.y.numpy(), np.random.default_rng(self.sample_seed)
        each = self.samples // len(whole.classes)
        drawn = [rng.permutation(np.flatnonzero(labels == label))[:each] for label in range(len(whole.classes))]
        rows = torch.from_numpy(np.sort(np.concatenate(drawn)))
        return Arrays(whole.x[rows], whole.y[rows], len(rows), whole.classes, whole.mean, whole.std)
