"""32×32 colour images whose files torchvision reads: CIFAR-10, CIFAR-100 and SVHN."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from abc import ABC
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import data_root
from fl_lightning.data.normalization import Normalize
from fl_lightning.data.published import PublishedSet
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import temporary_folder
from fl_lightning.seeding import numpy_generator

MOST_BYTES = 2**30  # of a published file


class TorchvisionSet(PublishedSet, ABC):
    """A set of 32×32 colour images whose files torchvision reads."""

    _archive: str | None = None

    def _source(self) -> Any:
        """The class of the same name in torchvision."""
        import torchvision

        return getattr(torchvision.datasets, self.name)

    def _md5(self) -> dict[str, str]:
        """The published md5 of each file."""
        source = self._source()
        files = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
        return {f"{source.base_folder}/{file}": md5 for file, md5 in files}

    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        """The data set as torchvision opens it."""
        return self._source()(folder, train=train, download=download)

    def _labels(self, part: Any) -> Any:
        return part.targets

    def _images(self, part: Any) -> np.ndarray:
        return part.data.transpose(0, 3, 1, 2)  # [N, H, W, C] -> [N, C, H, W]

    def files(self) -> list[str]:
        """The files that torchvision reads."""
        return list(self._md5())

    def _require_files(self) -> None:
        archive = None if self._archive is None else data_root(self.root) / self._archive
        if archive is not None and archive.is_file() and not all(path.exists() for path in self.sources()):
            self._unpack(archive)
        super()._require_files()

    def _unpack(self, archive: Path) -> None:
        """Use the published archive where the user has put that instead of its files."""
        root = data_root(self.root)
        with temporary_folder(root, "unpack") as temporary:
            try:
                with tarfile.open(archive) as tar:
                    for file in self.files():
                        size, member = tar.getmember(file).size, tar.extractfile(file)
                        if member is None or size > MOST_BYTES:
                            raise KeyError(f"{file} is no file in it")
                        whole = temporary / Path(file).name
                        with member, whole.open("wb") as target:
                            shutil.copyfileobj(member, target)
                        (root / file).parent.mkdir(parents=True, exist_ok=True)
                        os.replace(whole, root / file)
            except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error) as error:
                raise ConfigError(
                    KEY, f"{self.name}: {archive} cannot be unpacked ({error}); get it again or delete it"
                ) from error

    def _fetch(self, folder: Path) -> None:
        for train in (True, False):
            self._open(folder, train, download=True)

    def _decode(self) -> tuple[Tensor, Tensor, int, tuple[str, ...]]:
        from torchvision.datasets.utils import check_integrity

        root = data_root(self.root)
        for file, md5 in self._md5().items():
            if not check_integrity(root / file, md5):
                raise ConfigError(
                    KEY,
                    f"{self.name}: {root / file} is cut short or not the published file (its md5 is not {md5}); "
                    "delete it to have it downloaded again",
                )
        try:
            parts = [self._open(root, train) for train in (True, False)]
            x = torch.from_numpy(np.concatenate([self._images(part) for part in parts]))
            labels = [np.asarray(self._labels(part), dtype=np.int64) for part in parts]
        except Exception as error:
            raise ConfigError(KEY, f"{self.name}: the files in {root} cannot be read ({error})") from error
        classes = tuple(getattr(parts[0], "classes", None) or "0123456789")
        return x, torch.from_numpy(np.concatenate(labels)), len(labels[0]), classes


class CIFAR10(TorchvisionSet):
    """CIFAR-10: 60,000 photographs, 32×32 colour, 10 classes."""

    paper = "Krizhevsky, 2009, Learning Multiple Layers of Features from Tiny Images"
    standard = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    _archive = "cifar-10-python.tar.gz"


class CIFAR100(TorchvisionSet):
    """CIFAR-100: 60,000 photographs, 32×32 colour, 100 classes."""

    paper = "Krizhevsky, 2009, Learning Multiple Layers of Features from Tiny Images"
    standard = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    _archive = "cifar-100-python.tar.gz"


class SVHN(TorchvisionSet):
    """SVHN: 99,289 cropped house-number digits, 32×32 colour, 10 classes (73,257 for training, 26,032 for test).

    Args:
        root: as for every published set.
        download: as for every published set.
        normalize: as for every published set.
        train_samples: so many training images, drawn once for all runs; null takes all.
        test_samples: so many test images, likewise.
    """

    paper = "Netzer et al., NIPS Workshop 2011, Reading Digits in Natural Images with Unsupervised Feature Learning"
    standard = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

    def __init__(
        self,
        root: str | None = None,
        download: bool = True,
        normalize: Normalize = "standard",
        train_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        super().__init__(root, download, normalize)
        for name, samples, most in (("train", train_samples, 73_257), ("test", test_samples, 26_032)):
            fits = samples is None or 1 <= samples <= most
            require(fits, f"{KEY}.{name}_samples", f"must be from 1 to {most}, or null", samples)
        self.train_samples = train_samples
        self.test_samples = test_samples

    def arrays(self) -> Arrays:
        """Both parts, or as many of each as was asked for, in their order."""
        whole = super().arrays()
        sizes = (whole.num_train, len(whole.y) - whole.num_train)
        if (self.train_samples or sizes[0], self.test_samples or sizes[1]) == sizes:
            return whole
        rng = numpy_generator(0, "dataset/svhn")
        wanted = (self.train_samples or sizes[0], self.test_samples or sizes[1])
        drawn = [np.sort(rng.permutation(size)[:some]) for size, some in zip(sizes, wanted, strict=True)]
        rows = torch.from_numpy(np.concatenate([drawn[0], drawn[1] + sizes[0]]))
        return replace(whole, x=whole.x[rows], y=whole.y[rows], num_train=len(drawn[0]))

    def _md5(self) -> dict[str, str]:
        parts = self._source().split_list
        return {parts[part][1]: parts[part][2] for part in ("train", "test")}

    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        return self._source()(folder, split="train" if train else "test", download=download)

    def _labels(self, part: Any) -> Any:
        return part.labels

    def _images(self, part: Any) -> np.ndarray:
        return part.data  # [N, C, H, W] already
