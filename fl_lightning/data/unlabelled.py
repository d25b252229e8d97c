"""New samples without labels, read as a run's data set reads its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.cache import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.delimited import lines_in, text_of
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.normalising import as_inputs, scaled, wide
from fl_lightning.data.own_files import read_arrays
from fl_lightning.data.sample import Sample
from fl_lightning.data.tokens import read_table
from fl_lightning.errors import ConfigError, require
from fl_lightning.terminal import say
from fl_lightning.trust import is_known

KEY = "DATA"
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")


class Unlabelled(NamedTuple):
    """New samples.

    Args:
        x: [N, …] as `Arrays` holds them: images uint8, tokens int64, features as they are scaled.
        names: [N] each sample's file, or its place.
    """

    x: Tensor
    names: list[str]


def read_unlabelled(path: Path, dataset: Dataset, arrays: Arrays) -> Unlabelled:
    """Read samples: images, arrays (`.npz`, `.pt`), a table (`.csv`, `.tsv`, `.jsonl`, `.ndjson`) or texts.

    Args:
        path: the folder or file; of a `.txt` file every line is a text.
        dataset: the run's.
        arrays: what it decodes to.

    Raises:
        ConfigError: about ``DATA``, if there is nothing to read or it does not fit the data set.
    """
    require(path.exists(), KEY, "there is no such file or folder", str(path))
    names: list[str] = []
    if path.is_dir() or path.suffix.lower() in ImageFolder.SUFFIXES:
        x, names = _images(path, dataset, arrays)
    elif path.suffix.lower() in (".npz", ".pt"):
        x = _array(path)
    elif path.suffix.lower() in _TABLES:
        x = dataset.encode(read_table(path, KEY))
    elif path.suffix.lower() == ".txt":
        x = dataset.encode({dataset.text_column: lines_in(text_of(path, KEY))})
    else:
        kinds = f"an image or a folder of them, .npz, .pt, .txt, {', '.join(_TABLES)}"
        raise ConfigError(KEY, f"must be {kinds}", str(path))
    x = scaled_as(dataset, x).float() if x.is_floating_point() else x
    _require_fit(x, arrays)
    return Unlabelled(x, names or [str(index) for index in range(len(x))])


def _images(path: Path, dataset: Dataset, arrays: Arrays) -> tuple[Tensor, list[str]]:
    files = [path]
    if path.is_dir():
        there = (file for file in path.rglob("*") if file.suffix.lower() in ImageFolder.SUFFIXES)
        files = sorted(file for file in there if not _is_hidden(file.relative_to(path)))
    require(bool(files), KEY, "there is no image in that folder", str(path))
    with streams():
        x = dataset.pictures(files, arrays.x.shape[1:])
    if x is None:
        fits = arrays.x.dtype == torch.uint8 and arrays.x.shape[1] in (1, 3)
        require(fits, KEY, "the run's data set holds no images of bytes; give an array as .npz or .pt", str(path))
        channels, height, width = arrays.x.shape[1:]
        x = ImageFolder(str(path), [height, width], grayscale=channels == 1, normalize="half").decode(files)
    return x, [str(file.relative_to(path)) if path.is_dir() else file.name for file in files]


def _is_hidden(file: Path) -> bool:
    """Whether a file, or a folder that it lies in, is hidden: what a system puts beside images is none."""
    return any(part.startswith(".") for part in file.parts)


def _array(path: Path) -> Tensor:
    found = read_arrays(path, KEY)
    name = "x" if "x" in found else next(iter(found), "") if len(found) == 1 else "x_test"
    require(name in found, KEY, f"{path} must hold x, x_test or one array", ", ".join(found) or "nothing")
    return as_inputs(found[name], str(path))


def scaled_as(dataset: Dataset, x: Tensor) -> Tensor:
    """Features as a data set scales its own: by its training part, where it says ``normalize: standard``.

    One of somebody's own that does not say is taken not to scale, and a line says so.
    """
    if not says_how_it_scales(dataset):
        said = f"{type(whole(dataset)).__name__} has no attribute `normalize` that says how it scales"
        say(f"fl-lightning: {KEY}: features are taken as they are: {said}")
    training = unscaled(dataset)
    if training is None or training.shape[1:] != x.shape[1:]:
        return x
    return scaled(x.to(training.dtype), training)  # rounded as they were, if they were


def whole(dataset: Dataset) -> Dataset:
    """What a sample is drawn from: its mean and std are those of the whole set."""
    while isinstance(dataset, Sample):
        dataset = dataset.dataset
    return dataset


def says_how_it_scales(dataset: Dataset) -> bool:
    """Whether a data set is known to scale its features or not to: one of somebody's own says it by `normalize`."""
    return hasattr(whole(dataset), "normalize") or is_known(type(whole(dataset)).__module__)


def unscaled(dataset: Dataset) -> Tensor | None:
    """The training part of features as it is before it is scaled; None where none is."""
    if getattr(whole(dataset), "normalize", "none") == "none":
        return None
    plain = copy.copy(whole(dataset))
    plain.normalize = "none"  # type: ignore[attr-defined]
    with wide(), streams():
        raw = plain.arrays()
    return raw.x[: raw.num_train] if raw.x.is_floating_point() else None


def _require_fit(x: Tensor, arrays: Arrays) -> None:
    kinds = {torch.uint8: "bytes (uint8), which are normalised as in training", torch.int64: "whole numbers (tokens)"}
    kind = kinds.get(arrays.x.dtype, "numbers with a point (float32)")
    shape = list(arrays.x.shape[1:])
    got = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    require(x.dtype == arrays.x.dtype and list(x.shape[1:]) == shape, KEY, f"must be {kind}, [N, *{shape}]", got)
    if x.dtype == torch.int64 and x.numel():
        inside = int(x.min()) >= 0 and int(x.max()) < arrays.vocabulary_size
        require(inside, KEY, f"tokens must be from 0 to {arrays.vocabulary_size - 1}", int(x.max()))
    if x.is_floating_point():
        require(bool(x.isfinite().all()), KEY, "numbers must be finite")
