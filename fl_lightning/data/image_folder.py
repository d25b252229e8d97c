"""Your own images in folders."""

from __future__ import annotations

import io
import os
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.normalization import Normalize, constants, mean_and_std, require_normalize
from fl_lightning.data.pictures import as_shown, said_of
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, expanded
from fl_lightning.terminal import say

_UNREADABLE = frozenset(
    {".avif", ".dng", ".exr", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".pnm", ".svg", ".tga"}
)
"""Endings of images that are not read."""
_TESTS = ("test", "val", "valid", "validation")
"""What the folder of the official test part may be called; the first that is there is it."""


class ImageFolder(Dataset):
    """Your own images in folders: ``root/train/<class>/…`` and ``root/test/<class>/…``, or ``root/<class>/…``.

    Classes are the folders' names, sorted; ``val``, ``valid`` or ``validation`` is taken for ``test`` where there is no
    ``test``. Without ``train`` there is no official test part, so only the splits ``holdout`` and ``file`` work. Files
    that do not end like an image's are passed over.

    Images are decoded as viewers show them: upright by their EXIF orientation, and on white where they are transparent.
    16 bits a channel are scaled to 8.

    Args:
        root: the folder.
        size: size that every image is scaled to, one number for squares or [height, width]; by default images stay as
            they are and must share one size.
        grayscale: whether to decode to one grey channel instead of three colours.
        normalize: ``standard`` for mean and std of ``train``, or of all images where there is no such folder, ``half``
            for 0.5 and 0.5, ``none`` for pixels in [0, 1]. Under the split ``holdout`` clients' test samples are cut
            out of those images, too, and have a share in mean and std.
    """

    SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

    def __init__(
        self,
        root: str,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        normalize: Normalize = "standard",
    ) -> None:
        require_normalize(normalize)
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
                odd = sorted(names[0] ^ names[1])
                alike = ", ".join(ascii(label) for label in odd if _is_composed_otherwise(label, odd))
                rule = "are one but for their Unicode form; rename the folders of one part"
                require(not alike, KEY, f"ImageFolder: the classes {alike} of {self.root} {rule}")
                raise ConfigError(
                    KEY,
                    f"ImageFolder: training and test part of {self.root} must have images of the same classes; "
                    "only one of them has " + ", ".join(odd),
                )
        for line in self._left_out(len(parts)):
            say(f"ImageFolder: {line} if they are to count")
        number = {label: i for i, label in enumerate(classes)}
        x = self.decode([path for _, _, path in files])
        y = torch.tensor([number[label] for _, label, _ in files])
        num_train = sum(part == "train" for part, _, _ in files)
        mean, std = constants(self.normalize, x, lambda: mean_and_std(x[:num_train]))
        return Arrays(x, y, num_train, tuple(map(_printable, classes)), mean, std)

    def _files(self) -> list[tuple[str, str, Path]]:
        """(part, class, file) of all images: training part first, then sorted by class and file name."""
        found: list[tuple[str, str, Path]] = []
        for part, folder in self._folders().items():
            before, unknown = len(found), list[Path]()
            for label in _names(folder, directories=True):
                images = self._images(folder / label)
                found += [(part, label, folder / label / name) for name in images]
                self._refuse_deeper(folder / label)
                if not images and _UNREADABLE & {os.path.splitext(name)[1].lower() for name in _names(folder / label)}:
                    unknown.append(folder / label)
            if unknown and len(found) > before:
                known = ", ".join(sorted(self.SUFFIXES))
                rule = "ImageFolder: every folder of images is a class, and those of this one cannot be read"
                raise ConfigError(KEY, f"{rule}; convert them ({known})", str(unknown[0]))
            if len(found) == before:
                raise ConfigError(
                    KEY, "ImageFolder: there are no images; they belong at <class>/<image> below", str(folder)
                )
        return found

    def _folders(self) -> dict[str, Path]:
        """Where the images of each part are."""
        root = expanded(self.root)
        if not root.is_dir():
            raise ConfigError(
                KEY,
                "ImageFolder: there is no such folder; put images at <root>/train/<class>/ and <root>/test/<class>/",
                str(root),
            )
        if not (root / "train").is_dir():
            return {"train": root}
        test = next((root / name for name in _TESTS if (root / name).is_dir()), None)
        return {"train": root / "train"} if test is None else {"train": root / "train", "test": test}

    def _left_out(self, num_parts: int) -> Iterator[str]:
        """What may be meant to be read, and is not."""
        for folder in self._unread(num_parts):
            yield f"{folder} is not read; move its images into train or {_TESTS[0]}"
        for folder in dict.fromkeys([expanded(self.root), *self._folders().values()]):
            if self._images(folder):
                yield f"images beside the classes' folders in {folder} are not read; move them into these"
        for folder in self._folders().values():
            empty = [label for label in _names(folder, directories=True) if not self._images(folder / label)]
            if empty:
                yield f"no class in {folder} without an image of its own: {', '.join(empty)}; put images there"

    def _unread(self, num_parts: int) -> list[Path]:
        """The folders of images beside those of the parts that there are."""
        root = expanded(self.root)
        if not (root / "train").is_dir():
            return []
        read = {"train", *[name for name in _TESTS if (root / name).is_dir()][: num_parts - 1]}
        others = [root / name for name in _names(root, directories=True) if name not in read]
        return [own for own in others if any(self._images(own / label) for label in _names(own, directories=True))]

    def _images(self, folder: Path) -> list[str]:
        return [name for name in _names(folder) if os.path.splitext(name)[1].lower() in self.SUFFIXES]

    def _refuse_deeper(self, folder: Path) -> None:
        """Refuse images below a class's folder: they would be left out, and with them maybe the class.

        Raises:
            ConfigError: naming the first folder that holds some.
        """
        for inner in _names(folder, directories=True):
            for place, _, names in os.walk(folder / inner):
                known = any(os.path.splitext(name)[1].lower() in self.SUFFIXES for name in names)
                rule = "ImageFolder: images belong at <class>/<image>, and these lie deeper; move them up, or away"
                require(not known, KEY, rule, place)

    def decode(self, paths: list[Path]) -> Tensor:
        """Image files as uint8 [N, C, H, W].

        Raises:
            ConfigError: for the first that is broken, or of another size where none is given.
        """
        from PIL import Image

        mode = "L" if self.grayscale else "RGB"
        size = self.size

        def decode(path: Path) -> np.ndarray:
            try:
                # By its name PIL would map a TIFF file into memory, and read one that it has to turn askew.
                with Image.open(io.BytesIO(content_of(path))) as image:
                    pixels = as_shown(image).convert(mode)
                    if size is not None and pixels.size != (size[1], size[0]):
                        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                    return np.asarray(pixels)
            except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
                raise ConfigError(KEY, f"ImageFolder: {path} is broken or not an image ({said_of(error)})") from error

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


def _names(folder: Path, directories: bool = False) -> list[str]:
    """Sorted names of the files, or of the folders, in a folder; hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == directories)


def _printable(name: str) -> str:
    """A folder's name, which may be any bytes, as pages and pictures can show it."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _is_composed_otherwise(label: str, others: Sequence[str]) -> bool:
    """Whether another name is the same text, of letters with accents in one piece or in two."""
    form = unicodedata.normalize("NFC", label)
    return any(own != label and unicodedata.normalize("NFC", own) == form for own in others)
