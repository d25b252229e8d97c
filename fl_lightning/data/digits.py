"""The digits that scikit-learn ships: a real data set without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset


class Digits(Dataset):
    """scikit-learn's 1,797 handwritten digits, 8×8, 10 classes; comes with the installation.

    Values 0 to 16 become 0 to 255. The set has no official split: here every fifth sample of each class, in the set's
    order (the 5th, the 10th, …), is the test part, 355 samples, and 1,442 are left for training.
    """

    paper = "Alpaydin and Kaynak, 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository"

    MEAN = (0.3052,)
    STD = (0.3760,)

    def sources(self) -> list[Path]:
        """None: it comes with scikit-learn."""
        return []

    def arrays(self) -> Arrays:
        """Decode from scikit-learn."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        is_test = np.zeros(len(labels), dtype=bool)
        for c in range(10):
            is_test[np.flatnonzero(labels == c)[4::5]] = True
        order = np.concatenate([np.flatnonzero(~is_test), np.flatnonzero(is_test)])
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[order]
        return Arrays(
            x=torch.from_numpy(images).unsqueeze(1),
            y=torch.from_numpy(labels[order]),
            num_train=int((~is_test).sum()),
            classes=tuple("0123456789"),
            mean=self.MEAN,
            std=self.STD,
        )
