"""Smaller data sets for benchmarks that take too long on whole ones."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.datasets import FashionMNIST
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.normalization import Normalize
from fl_lightning.errors import require


def stratified(whole: Arrays, samples: int, seed: int) -> Arrays:
    """Equally many images of every class, in the order of the whole set, both official parts merged."""
    labels, rng = whole.y.numpy(), np.random.default_rng(seed)
    each = samples // len(whole.classes)
    drawn = [rng.permutation(np.flatnonzero(labels == label))[:each] for label in range(len(whole.classes))]
    rows = torch.from_numpy(np.sort(np.concatenate(drawn)))
    return Arrays(whole.x[rows], whole.y[rows], len(rows), whole.classes, whole.mean, whole.std)


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
        return stratified(super().arrays(), self.samples, self.sample_seed)


class ImageFolderSample(ImageFolder):
    """A stratified sample of a folder of images: equally many of every class, the parts as large as they were.

    Args:
        root: folder that holds ``train/<class>/`` and, where there is one, ``test/<class>/``.
        samples: images in all, a multiple of the number of classes.
        sample_seed: seed of the draw.
        normalize: ``standard`` or ``half``, as for `ImageFolder`.
    """

    def __init__(self, root: str, samples: int = 5000, sample_seed: int = 0, normalize: Normalize = "standard") -> None:
        super().__init__(root, normalize=normalize)
        require(samples >= 10, "data.dataset.samples", "must be >= 10", samples)
        self.samples = samples
        self.sample_seed = sample_seed

    def arrays(self) -> Arrays:
        """The sample, in the order of the whole set."""
        whole = super().arrays()
        share = self.samples / len(whole.y)
        ends = (0, whole.num_train, len(whole.y))
        parts = []
        for first, last in itertools.pairwise(ends):
            part = Arrays(whole.x[first:last], whole.y[first:last], last - first, whole.classes)
            parts.append(stratified(part, round(share * (last - first)), self.sample_seed))
        x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
        return Arrays(x, y, len(parts[0].y), whole.classes, whole.mean, whole.std)
