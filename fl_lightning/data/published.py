"""Published sets of fixed files: where they are looked for, and how they are downloaded whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset, data_root
from fl_lightning.data.normalization import Constants, Normalize, constants, require_normalize
from fl_lightning.errors import ConfigError, shortened
from fl_lightning.files import temporary_folder

DOWNLOAD_TIMEOUT = 30.0
"""Seconds without an answer after which a download counts as failed."""


class PublishedSet(Dataset, ABC):
    """A published set of fixed files that torchvision can download.

    Args:
        root: folder that holds the set's files (``MNIST/raw``, ``cifar-10-batches-py``, ``train_32x32.mat`` …); by
            default ``$FL_LIGHTNING_DATA``, else ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5, ``none`` for pixels in [0, 1].
    """

    standard: Constants
    """The set's own mean and std per channel, which most papers use."""

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        require_normalize(normalize)
        self.root = root
        self.normalize = normalize
        self._download = download

    @property
    def name(self) -> str:
        """The class's name, which is torchvision's too."""
        return type(self).__name__

    @abstractmethod
    def files(self) -> list[str]:
        """The files that are read, relative to the root."""

    @abstractmethod
    def _fetch(self, folder: Path) -> None:
        """Have torchvision download the files into an empty folder."""

    @abstractmethod
    def _decode(self) -> tuple[Tensor, Tensor, int, tuple[str, ...]]:
        """Read the files; returns x, y, num_train and the names of the classes."""

    def sources(self) -> list[Path]:
        """The files that are read, whether they exist or not; ``.gz`` beside a missing file counts as the file."""
        return [_plain_or_gz(data_root(self.root) / file) for file in self.files()]

    def arrays(self) -> Arrays:
        """Decode from the files, which are downloaded first if they are not there."""
        self._require_files()
        x, y, num_train, classes = self._decode()
        mean, std = constants(self.normalize, x, lambda: self.standard)
        return Arrays(x, y, num_train, classes, mean, std)

    def _require_files(self) -> None:
        missing = [path for path in self.sources() if not path.exists()]
        if not missing:
            return
        problem = "`download` is false"
        if self._download:
            try:
                self._download_files()
            except (
                Exception
            ) as error:  # no network, no room, a server's answer, a wrong md5: whatever it is, it is reported
                problem = f"the download failed ({shortened(f'{type(error).__name__}: {error}', 60)})"
            else:
                return
        raise ConfigError(
            KEY,
            f"{self.name}: {missing[0]} is not there, and {problem}; put it there, or set `root` or FL_LIGHTNING_DATA",
        )

    def _download_files(self) -> None:
        """Download into a folder of its own and move whole files over, so that nothing half written is left behind."""
        root = data_root(self.root)
        with _folder_kept_on_success(root), temporary_folder(root, "download") as temporary:
            timeout = socket.getdefaulttimeout()
            try:
                socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
                self._fetch(temporary)
                for file in self.files():
                    (root / file).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(temporary / file, root / file)
            finally:
                socket.setdefaulttimeout(timeout)


def _plain_or_gz(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    return packed if not path.exists() and packed.exists() else path


@contextlib.contextmanager
def _folder_kept_on_success(folder: Path) -> Iterator[None]:
    """Make a folder with its parents; if the block fails, remove those that were made and are still empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise
