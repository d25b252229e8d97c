"""Image data sets, decoded to one uint8 tensor each."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import socket
import struct
import tarfile
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset, data_root
from fl_lightning.errors import ConfigError, require

Normalize = Literal["standard", "half"]
Constants = tuple[tuple[float, ...], tuple[float, ...]]

DOWNLOAD_TIMEOUT = 30.0
"""Seconds without an answer after which a download counts as failed."""


class Digits(Dataset):
    """scikit-learn's 1,797 handwritten digits, 8×8, 10 classes; comes with the installation.

    Values 0 to 16 become 0 to 255. The set has no official split: here every fifth sample of each class, in the set's
    order (the 5th, the 10th, …), is the test part, 355 samples, and 1,442 are left for training.
    """

    paper = "Alpaydin and Kaynak, 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository"

    MEAN = (0.3052,)
    STD = (0.3760,)

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


class _Published(Dataset):
    """A published set of fixed files that torchvision can download."""

    standard: Constants
    """The set's own mean and std per channel, which most papers use."""

    def __init__(self, root: str | None, download: bool, normalize: Normalize) -> None:
        _require_normalize(normalize)
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
        mean, std = self.standard if self.normalize == "standard" else _half(x.shape[1])
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
                problem = f"the download failed ({type(error).__name__}: {error})"
            else:
                return
        raise ConfigError(
            KEY,
            f"{self.name}: {missing[0]} is not there and {problem}. Put {', '.join(self.files())} under "
            f"{data_root(self.root)}, or set `root` or FL_LIGHTNING_DATA to the folder that has them",
        )

    def _download_files(self) -> None:
        """Download into a folder of its own and move whole files over, so that nothing half written is left behind."""
        root = data_root(self.root)
        with _folder_kept_on_success(root):
            temporary = Path(tempfile.mkdtemp(dir=root, prefix=".download-"))
            timeout = socket.getdefaulttimeout()
            try:
                socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
                self._fetch(temporary)
                for file in self.files():
                    (root / file).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(temporary / file, root / file)
            finally:
                socket.setdefaulttimeout(timeout)
                shutil.rmtree(temporary, ignore_errors=True)


class _Idx(_Published):
    """A set in MNIST's idx files."""

    def _prefixes(self) -> tuple[str, str]:
        return "train", "t10k"

    def files(self) -> list[str]:
        """Images and labels of the training and the test part, in torchvision's layout."""
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return [f"{self.name}/raw/{prefix}-{kind}" for prefix in self._prefixes() for kind in kinds]

    def _fetch(self, folder: Path) -> None:
        import torchvision

        getattr(torchvision.datasets, self.name)(folder, download=True)

    def _read_parts(self) -> tuple[Tensor, Tensor, int]:
        train_x, train_y, test_x, test_y = (_read_idx(path) for path in self.sources())
        for images, labels, path in ((train_x, train_y, self.sources()[0]), (test_x, test_y, self.sources()[2])):
            if len(images) != len(labels):
                raise ConfigError(
                    KEY, f"{self.name}: {path} has {len(images)} images but its labels file has {len(labels)} labels"
                )
        if train_x.shape[1:] != test_x.shape[1:]:
            raise ConfigError(
                KEY, f"{self.name}: training images are {train_x.shape[1:]} but test images {test_x.shape[1:]}"
            )
        x = torch.from_numpy(np.concatenate([train_x, test_x])).unsqueeze(1)
        y = torch.from_numpy(np.concatenate([train_y, test_y]).astype(np.int64))
        return x, y, len(train_y)


class MNIST(_Idx):
    """MNIST: 70,000 handwritten digits, 28×28 grey, 10 classes.

    Args:
        root: folder that holds ``MNIST/raw``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "LeCun et al., Proceedings of the IEEE 1998, Gradient-Based Learning Applied to Document Recognition"
    standard = ((0.1307,), (0.3081,))

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        super().__init__(root, download, normalize)

    def _decode(self) -> tuple[Tensor, Tensor, int, tuple[str, ...]]:
        return (*self._read_parts(), tuple("0123456789"))


class FashionMNIST(_Idx):
    """Fashion-MNIST: 70,000 articles of clothing, 28×28 grey, 10 classes.

    Args:
        root: folder that holds ``FashionMNIST/raw``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "Xiao et al., 2017, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms"
    standard = ((0.2860,), (0.3530,))

    CLASSES = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        super().__init__(root, download, normalize)

    def _decode(self) -> tuple[Tensor, Tensor, int, tuple[str, ...]]:
        return (*self._read_parts(), self.CLASSES)


class EMNIST(_Idx):
    """EMNIST: handwritten digits and letters, 28×28 grey; ``byclass`` has FEMNIST's 62 classes.

    Images are turned upright. The labels of ``letters`` start at 0. All splits use the mean and std of ``byclass``.

    Args:
        split: ``byclass`` (62 classes), ``balanced`` (47), ``letters`` (26), ``digits`` (10) or ``mnist`` (10).
        root: folder that holds ``EMNIST/raw``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files (560 MB) if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "Cohen et al., IJCNN 2017, EMNIST: Extending MNIST to Handwritten Letters"
    standard = ((0.1736,), (0.3317,))

    _DIGITS, _UPPER, _LOWER = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
    CLASSES = {  # noqa: RUF012 - a constant
        "byclass": _DIGITS + _UPPER + _LOWER,
        "balanced": _DIGITS + _UPPER + "abdefghnqrt",
        "letters": _LOWER,
        "digits": _DIGITS,
        "mnist": _DIGITS,
    }

    def __init__(
        self,
        split: Literal["byclass", "balanced", "letters", "digits", "mnist"] = "byclass",
        root: str | None = None,
        download: bool = True,
        normalize: Normalize = "standard",
    ) -> None:
        super().__init__(root, download, normalize)
        require(split in self.CLASSES, f"{KEY}.split", f"must be one of {', '.join(self.CLASSES)}", split)
        self.split = split

    def _prefixes(self) -> tuple[str, str]:
        return f"emnist-{self.split}-train", f"emnist-{self.split}-test"

    def _fetch(self, folder: Path) -> None:
        import torchvision

        torchvision.datasets.EMNIST(folder, split=self.split, download=True)

    def _decode(self) -> tuple[Tensor, Tensor, int, tuple[str, ...]]:
        x, y, num_train = self._read_parts()
        first = 1 if self.split == "letters" else 0
        return x.transpose(2, 3).contiguous(), y - first, num_train, tuple(self.CLASSES[self.split])


class _TorchvisionColour(_Published):
    """A set of 32×32 colour images whose files torchvision reads."""

    _archive: str | None = None

    @abstractmethod
    def _md5(self) -> dict[str, str]:
        """The published md5 of each file."""

    @abstractmethod
    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        """The data set as torchvision opens it."""

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
        with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as temporary:
            try:
                with tarfile.open(archive) as tar:
                    for file in self.files():
                        member = tar.extractfile(file)
                        if member is None:
                            raise KeyError(f"{file} is no file in it")
                        whole = Path(temporary) / Path(file).name
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


class CIFAR10(_TorchvisionColour):
    """CIFAR-10: 60,000 photographs, 32×32 colour, 10 classes.

    Args:
        root: folder that holds ``cifar-10-batches-py``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files (170 MB) if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "Krizhevsky, 2009, Learning Multiple Layers of Features from Tiny Images"
    standard = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    _archive = "cifar-10-python.tar.gz"

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        super().__init__(root, download, normalize)

    def _md5(self) -> dict[str, str]:
        from torchvision.datasets import CIFAR10 as Source

        return _cifar_md5(Source)

    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import CIFAR10 as Source

        return Source(folder, train=train, download=download)


class CIFAR100(_TorchvisionColour):
    """CIFAR-100: 60,000 photographs, 32×32 colour, 100 classes.

    Args:
        root: folder that holds ``cifar-100-python``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files (170 MB) if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "Krizhevsky, 2009, Learning Multiple Layers of Features from Tiny Images"
    standard = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    _archive = "cifar-100-python.tar.gz"

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        super().__init__(root, download, normalize)

    def _md5(self) -> dict[str, str]:
        from torchvision.datasets import CIFAR100 as Source

        return _cifar_md5(Source)

    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import CIFAR100 as Source

        return Source(folder, train=train, download=download)


class SVHN(_TorchvisionColour):
    """SVHN: 99,289 cropped house-number digits, 32×32 colour, 10 classes (73,257 for training, 26,032 for test).

    Args:
        root: folder that holds ``train_32x32.mat`` and ``test_32x32.mat``; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        download: whether to download the files (250 MB) if they are not there.
        normalize: ``standard`` for the set's own mean and std, ``half`` for 0.5 and 0.5.
    """

    paper = "Netzer et al., NIPS Workshop 2011, Reading Digits in Natural Images with Unsupervised Feature Learning"
    standard = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

    def __init__(self, root: str | None = None, download: bool = True, normalize: Normalize = "standard") -> None:
        super().__init__(root, download, normalize)

    def _md5(self) -> dict[str, str]:
        from torchvision.datasets import SVHN as Source

        return {Source.split_list[part][1]: Source.split_list[part][2] for part in ("train", "test")}

    def _open(self, folder: Path, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import SVHN as Source

        return Source(folder, split="train" if train else "test", download=download)

    def _labels(self, part: Any) -> Any:
        return part.labels

    def _images(self, part: Any) -> np.ndarray:
        return part.data  # [N, C, H, W] already


class ImageFolder(Dataset):
    """Your own images in folders: ``root/train/<class>/…`` and ``root/test/<class>/…``, or ``root/<class>/…``.

    Classes are the folders' names, sorted; ``val`` is taken for ``test`` where there is no ``test``. Without ``train``
    there is no official test part, so only the split ``holdout`` works. Files that do not end like an image's are
    passed over.

    Args:
        root: the folder.
        size: size that every image is scaled to, one number for squares or [height, width]; by default images stay as
            they are and must share one size.
        grayscale: whether to decode to one grey channel instead of three colours.
        normalize: ``standard`` for mean and std of the training part, ``half`` for 0.5 and 0.5.
    """

    SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

    def __init__(
        self,
        root: str,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        normalize: Normalize = "standard",
    ) -> None:
        _require_normalize(normalize)
        sides = [size, size] if isinstance(size, int) else size
        require(
            sides is None or (len(sides) == 2 and min(sides) >= 1),
            f"{KEY}.size",
            "must be one number or [height, width], at least 1",
            size,
        )
        self.root = root
        self.size = sides
        self.grayscale = grayscale
        self.normalize = normalize

    def sources(self) -> list[Path]:
        """All image files."""
        return [path for _, _, path in self._files()]

    def arrays(self) -> Arrays:
        """Decode all image files."""
        files = self._files()
        parts = {part for part, _, _ in files}
        classes = sorted({label for _, label, _ in files})
        if len(parts) == 2:
            names = [{label for part, label, _ in files if part == wanted} for wanted in ("train", "test")]
            if names[0] != names[1]:
                raise ConfigError(
                    KEY,
                    f"ImageFolder: training and test part of {self.root} must have images of the same classes; "
                    "only one of them has " + ", ".join(sorted(names[0] ^ names[1])),
                )
        number = {label: i for i, label in enumerate(classes)}
        x = self._decode([path for _, _, path in files])
        y = torch.tensor([number[label] for _, label, _ in files])
        num_train = sum(part == "train" for part, _, _ in files)
        mean, std = _half(x.shape[1]) if self.normalize == "half" else _mean_and_std(x[:num_train])
        return Arrays(x, y, num_train, tuple(classes), mean, std)

    def _files(self) -> list[tuple[str, str, Path]]:
        """(part, class, file) of all images: training part first, then sorted by class and file name."""
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise ConfigError(
                KEY,
                "ImageFolder: there is no such folder; put images at <root>/train/<class>/ and <root>/test/<class>/",
                str(root),
            )
        folders = {"train": root}
        if (root / "train").is_dir():
            folders = {"train": root / "train"}
            test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
            if test is not None:
                folders["test"] = test
        found: list[tuple[str, str, Path]] = []
        for part, folder in folders.items():
            before = len(found)
            for label in _names(folder, directories=True):
                images = [name for name in _names(folder / label) if os.path.splitext(name)[1].lower() in self.SUFFIXES]
                found += [(part, label, folder / label / name) for name in images]
            if len(found) == before:
                raise ConfigError(
                    KEY, "ImageFolder: there are no images; they belong at <class>/<image> below", str(folder)
                )
        return found

    def _decode(self, paths: list[Path]) -> Tensor:
        from PIL import Image

        mode = "L" if self.grayscale else "RGB"
        size = self.size

        def decode(path: Path) -> np.ndarray:
            try:
                with Image.open(path) as image:
                    pixels = image.convert(mode)
                    if size is not None and pixels.size != (size[1], size[0]):
                        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                    return np.asarray(pixels)
            except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
                raise ConfigError(KEY, f"ImageFolder: {path} is broken or not an image ({error})") from error

        first = decode(paths[0])
        x = np.empty((len(paths), *first.shape), dtype=np.uint8)

        def fill(chunk: range) -> None:
            for i in chunk:
                image = decode(paths[i])
                if image.shape != first.shape:
                    raise ConfigError(
                        KEY,
                        f"ImageFolder: images differ in size: {paths[i]} is {image.shape[0]}x{image.shape[1]} "
                        f"(height x width), {paths[0]} is {first.shape[0]}x{first.shape[1]}; give `size`",
                    )
                x[i] = image

        step = 512
        chunks = [range(start, min(start + step, len(paths))) for start in range(0, len(paths), step)]
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            list(pool.map(fill, chunks))  # in order: the first bad file is the one that is named
        finally:
            pool.shutdown(cancel_futures=True)
        images = x.reshape(*x.shape[:3], -1).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(images))


def _require_normalize(normalize: str) -> None:
    require(normalize in ("standard", "half"), f"{KEY}.normalize", "must be standard or half", normalize)


def _half(channels: int) -> Constants:
    return (0.5,) * channels, (0.5,) * channels


def _mean_and_std(x: Tensor) -> Constants:
    """Mean and population std per channel on the [0, 1] scale, in float64; a constant channel gets a std of 1."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float((share * levels).sum())
        variance = float((share * (levels - mean) ** 2).sum())
        means.append(mean)
        stds.append(variance**0.5 if variance > 1e-12 else 1.0)
    return tuple(means), tuple(stds)


def _names(folder: Path, directories: bool = False) -> list[str]:
    """Sorted names of the files, or of the folders, in a folder; hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == directories)


def _cifar_md5(source: Any) -> dict[str, str]:
    files = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
    return {f"{source.base_folder}/{file}": md5 for file, md5 in files}


def _plain_or_gz(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    return packed if not path.exists() and packed.exists() else path


def _read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes: images [N, H, W] (magic 2051) or labels [N] (magic 2049)."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(KEY, f"{path} cannot be read ({error}); delete it to have it downloaded again") from error
    axes = 3 if "idx3" in path.name else 1
    magic = struct.unpack(">I", content[:4])[0] if len(content) >= 4 else None
    if magic != 0x800 + axes:
        raise ConfigError(
            KEY, f"{path} is not the idx file it should be: its magic number must be {0x800 + axes}", magic
        )
    header = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:header]) if len(content) >= header else (0,)
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected or len(shape) != axes:
        state = "cut short" if len(content) < expected or len(shape) != axes else "too long"
        raise ConfigError(
            KEY,
            f"{path} is {state}: {len(content)} bytes where its header says {expected}; "
            "delete it to have it downloaded again",
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


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
