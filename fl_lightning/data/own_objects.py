"""Data sets that other libraries hold: torch's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import Dataset as TorchBase

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset, require_another
from fl_lightning.data.normalising import arrays_of, as_array, as_groups, as_inputs, as_labels, on_one_scale
from fl_lightning.data.normalization import Normalize, require_normalize
from fl_lightning.data.pictures import as_bytes, said_of
from fl_lightning.data.text import as_text
from fl_lightning.data.tokens import Words
from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.files import expanded
from fl_lightning.seeding import kept_streams
from fl_lightning.terminal import say

_ASKED_TWICE = 8  # samples of a part, by which transforms that draw show themselves


class TorchDataset(Dataset):
    """A `torch.utils.data.Dataset` of (input, label) pairs, torchvision's among them, decoded once.

    Inputs are tensors, arrays or PIL images, all of one shape; transforms of the data set are applied once. Mean
    and std are of the whole of `train`: under the split ``holdout``, where clients' test samples are cut out of it,
    too, they have a share in these. Classes go by the names in its `classes`, as torchvision's sets have them, where
    these are as many as its labels and no `target_transform` stands between; else by their numbers.

    Args:
        train: the official training part, or everything.
        test: the official test part; None for none.
        normalize: ``standard``, ``half`` (images) or ``none``.
    """

    def __init__(self, train: TorchBase, test: TorchBase | None = None, normalize: Normalize = "standard") -> None:
        require_normalize(normalize)
        self.train = train
        self.test = test
        self.normalize = normalize

    def arrays(self) -> Arrays:
        """Take every sample, once.

        Raises:
            ConfigError: if a part is empty, or samples are no pairs or differ in shape; it says which one.
        """
        rule = "must be another set than train, or null: test parts are split off then"
        require(self.test is not self.train, f"{KEY}.test", rule, type(self.test).__name__)
        parts = {"train": self.train} | ({} if self.test is None else {"test": self.test})
        pairs = [self._pairs(part, name) for name, part in parts.items()]
        shapes = [list(part[0][0].shape) for part in pairs]
        rule = f"inputs must have the shape of those of train, {shapes[0]}"
        require(shapes[-1] == shapes[0], f"{KEY}.test", rule, shapes[-1])
        kinds = [part[0][0].dtype for part in pairs]
        rule = f"inputs must be of the type of those of train, {kinds[0]}, and on their scale"
        require(on_one_scale(kinds[-1], kinds[0]), f"{KEY}.test", rule, str(kinds[-1]))
        names = [_class_names(part) for part in parts.values()]
        _require_same_classes("train", names[0], names[-1])
        x = np.stack([sample for part in pairs for sample, _ in part])
        given = [label for part in pairs for _, label in part]
        labels, classes = as_labels(given, "TorchDataset", are_places=names[0] is not None)
        inputs = as_inputs(x, "TorchDataset")
        return arrays_of(inputs, labels, len(pairs[0]), _by_name(classes, parts.values()), self.normalize)

    def pictures(self, paths: Sequence[Path], shape: Sequence[int]) -> Tensor | None:
        """By the loader and the transform of `train`, where it is a folder's of torchvision.

        Raises:
            ConfigError: for transforms of another one, and for what is none of torchvision's.
        """
        from torchvision.datasets import DatasetFolder

        part: Any = self.train
        while isinstance(part, Subset | ConcatDataset):
            part = part.dataset if isinstance(part, Subset) else part.datasets[0]
        if not isinstance(part, DatasetFolder) or type(part).__getitem__ is not DatasetFolder.__getitem__:
            theirs = type(part).__module__.startswith("torchvision.") and getattr(part, "transform", None) is None
            rule = f"only {type(part).__name__} itself can read its pictures; give an array as .npz or .pt"
            require(theirs, "DATA", rule, str(paths[0]))
            return None

        def read(path: Path) -> Any:
            sample = part.loader(str(path))
            return _of_size(sample, shape) if part.transform is None else part.transform(sample)

        return _read_pictures(paths, read)

    def _pairs(self, part: TorchBase[Any], name: str) -> list[tuple[np.ndarray, Any]]:
        found: list[tuple[np.ndarray, Any]] = []
        for index in range(_length(part, name)):
            rule = f"sample {index} of {type(part).__name__} must be (input, label)"
            try:
                pair = part[index]
                named = isinstance(pair, (Mapping, str))  # of which the two names would be taken, or two letters
                require(not named, f"{KEY}.{name}", rule, type(pair).__name__)
                sample, label = pair
            except ConfigError:
                raise
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{KEY}.{name}", f"{rule} ({error})") from error
            except Exception as error:  # whatever it raises: a file that cannot be read, a column that is not there
                said = f"sample {index} of {type(part).__name__} raises {type(error).__name__}: {error}"
                raise ConfigError(f"{KEY}.{name}", said) from error
            values = _values(sample, name, index)
            if found and values.shape != found[0][0].shape:
                shapes = f"{list(values.shape)}, sample 0 {list(found[0][0].shape)}"
                raise ConfigError(f"{KEY}.{name}", f"inputs must have one shape: sample {index} is {shapes}")
            if found and not on_one_scale(values.dtype, found[0][0].dtype):
                kinds = f"{values.dtype}, sample 0 {found[0][0].dtype}"
                raise ConfigError(f"{KEY}.{name}", f"inputs must be of one type: sample {index} is {kinds}")
            if isinstance(label, Tensor | np.ndarray):
                rule = f"label of sample {index} must be one class, is of shape"
                require(label.reshape(-1).shape[0] == 1, f"{KEY}.{name}", rule, list(label.shape))
            found.append((values, label.item() if isinstance(label, Tensor | np.ndarray | np.generic) else label))
        require(bool(found), f"{KEY}.{name}", "is empty", type(part).__name__)
        if _draws(part, [values for values, _ in found[:_ASKED_TWICE]], name):
            said = "gives a sample otherwise when it is asked again, and is asked once: transforms that draw are frozen"
            say(f"fl-lightning: {KEY}.{name}: {type(part).__name__} {said}; data.augmentation draws in every epoch")
        return found


def _length(part: Any, name: str) -> int:
    try:
        return len(part)
    except Exception as error:  # there is none, or whatever somebody's own raises
        said = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        rule = f"must have a length; a stream has none ({said})"
        raise ConfigError(f"{KEY}.{name}", rule, type(part).__name__) from error


def _values(sample: Any, name: str, index: int) -> np.ndarray:
    return as_array(sample) if isinstance(sample, Tensor) else _pixels(sample, f"{KEY}.{name}", index)


def _draws(part: TorchBase[Any], first: Sequence[np.ndarray], name: str) -> bool:
    """Whether a data set gives its first samples otherwise when it is asked again, as random transforms do."""
    with suppress(Exception), kept_streams():  # whatever it raises a second time: it was asked
        again = [_values(part[index][0], name, index) for index in range(len(first))]
        return any(one.tobytes() != other.tobytes() for one, other in zip(first, again, strict=True))
    return False


def _class_names(part: Any) -> list[str] | None:
    """What torchvision's data sets, and those made like them, call their classes; None where they do not say.

    Those of a part of one (`Subset`), or of several in a row that agree, are its own.
    """
    names = getattr(part, "classes", None)
    if isinstance(names, Sequence) and not isinstance(names, str):
        return [str(name) for name in names]
    inner = [part.dataset] if hasattr(part, "dataset") else getattr(part, "datasets", None)
    if not isinstance(inner, list) or not inner:
        return None
    found = [_class_names(own) for own in inner]
    first = next((own for own in found if own is not None), None)
    for other in found:
        rule = "data sets in a row must have the same classes: a class is its place there"
        require(first is None or other in (None, first), f"{KEY}.train", rule, ", ".join(other or ()))
    return first


def _by_name(classes: tuple[str, ...], parts: Iterable[TorchBase]) -> tuple[str, ...]:
    """Classes by the names that all parts have for them; by their numbers where those may be of other labels."""
    said = {_said_names(part) for part in parts}
    names = said.pop() if len(said) == 1 else ()
    counted = classes == tuple(map(str, range(len(names))))
    return names if counted and len(set(names)) == len(names) else classes


def _said_names(part: Any) -> tuple[str, ...]:
    """The names of labels 0, 1 and so on; none where labels are transformed, or come through code of one's own."""
    if type(part) is Subset:
        return _said_names(part.dataset)
    if type(part) is ConcatDataset:
        inner = {_said_names(own) for own in part.datasets}
        return inner.pop() if len(inner) == 1 else ()
    of_inputs = getattr(part, "transform", None)
    as_they_are = getattr(part, "target_transform", None) is None
    as_they_are &= of_inputs is not None or getattr(part, "transforms", None) is None  # torchvision's, of both
    names = getattr(part, "classes", ())
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    said = as_they_are and listed and all(isinstance(own, str) and own.strip() for own in names)
    return tuple(names) if said else ()


def _require_same_classes(train: str, names: list[str] | None, others: list[str] | None) -> None:
    """Refuse a test part whose classes have other places than those of the training part, where both say."""
    if names is not None and others is not None:
        rule = f"must have the classes of {train}, {', '.join(names)}, in their order: a class is its place there"
        require(others == names, f"{KEY}.test", rule, ", ".join(others))


def _read_pictures(paths: Sequence[Path], read: Callable[[Path], Any]) -> Tensor:
    """Pictures as a data set reads its own, one after another.

    Raises:
        ConfigError: about ``DATA``, naming the first that cannot be read, or has another shape than those before.
    """
    found: list[np.ndarray] = []
    for index, path in enumerate(paths):
        try:
            sample = read(path)
        except Exception as error:  # whatever a loader raises
            said = " ".join(str(error).split())[:120]
            raise ConfigError("DATA", f"{path} cannot be read ({type(error).__name__}: {said})") from error
        values = as_array(sample) if isinstance(sample, Tensor) else _pixels(sample, "DATA", index)
        found.append(values)
        shapes = list(values.shape), list(found[0].shape)
        rule = f"{path} must have the shape of those before it, {shapes[1]}"
        require(shapes[0] == shapes[1], "DATA", rule, shapes[0])
    return as_inputs(np.stack(found), "DATA")


def _of_size(image: Any, shape: Sequence[int]) -> Any:
    """A PIL image scaled to the rows and columns of samples [C, H, W], and of their channels; all else as it is."""
    if not hasattr(image, "convert") or len(shape) != 3:
        return image
    from PIL.Image import Resampling

    image = as_bytes(image)
    if len(image.getbands()) != shape[0]:
        image = image.convert("L" if shape[0] == 1 else "RGB")
    size = (shape[2], shape[1])
    return image if image.size == size else image.resize(size, Resampling.BILINEAR)


def _pixels(sample: Any, key: str, index: int) -> np.ndarray:
    """A sample as an array; a PIL image has its channels first, of which there may be as many as rows or columns."""
    is_image = hasattr(sample, "mode") and hasattr(sample, "convert")  # Pillow itself need not be there
    try:
        array = np.asarray(as_bytes(sample) if is_image else sample)
    except ValueError as error:
        raise ConfigError(key, f"sample {index}: {error}") from error
    return array.transpose(2, 0, 1) if is_image and array.ndim == 3 else array  # [H, W, C] -> [C, H, W]


def _column(part: Any, name: str) -> Any:
    """A column; lists of numbers that are declared as arrays (`Array3D`) have the declared type, bytes, say."""
    feature = part.features[name]
    declared = hasattr(feature, "shape") and hasattr(feature, "dtype")
    return (np.asarray(value, feature.dtype) for value in part[name]) if declared else part[name]


def _read_in(parts: Sequence[Any], name: str) -> list[Any]:
    """A column of all parts, of which images are decoded here.

    Raises:
        ConfigError: naming the first sample that cannot be read.
    """
    found: list[Any] = []
    try:
        for part in parts:
            for value in _column(part, name):
                found.append(value)  # one by one: how many there are says which one it was
    except Exception as error:  # of images that are cut short, or whose files have gone, and arrays that are None
        said = " ".join(f"{type(error).__name__}: {said_of(error)}".split())[:120]
        raise ConfigError(f"{KEY}.input", f"sample {len(found)} (from 0) cannot be read ({said})") from error
    return found


class HuggingFace(Dataset):
    """A data set of Hugging Face's `datasets`: images, features or texts. Needs ``pip install datasets``.

    A text that is None is one without a word: a single unknown word. Vocabulary, mean and std are of the whole of
    `train`: under ``data.split: holdout``, where clients' test samples are cut out of it, too, they have a share in
    these.

    Args:
        path: a folder that `save_to_disk` wrote, or a name on the hub.
        input: the column of images, texts or lists of numbers.
        label: the column of classes.
        group: the column that says who or where a sample is from.
        name: the configuration, for names on the hub.
        train: the split that is the official training part.
        test: the split that is the official test part; None for none.
        normalize: ``standard``, ``half`` (images) or ``none``.
        vocabulary: word numbers of texts, padding and unknown included.
        length: words of a text that are kept.
    """

    def __init__(
        self,
        path: str,
        input: str = "image",
        label: str = "label",
        group: str | None = None,
        name: str | None = None,
        train: str = "train",
        test: str | None = "test",
        normalize: Normalize = "standard",
        vocabulary: int = 10000,
        length: int = 200,
    ) -> None:
        require_normalize(normalize)
        self.path = path
        self.input = input
        self.label = label
        self.group = group
        self.name = name
        self.train = train
        self.test = test
        self.normalize = normalize
        self.vocabulary = vocabulary
        self.length = length
        self._words = Words(vocabulary, length)
        self._loaded: list[Any] | None = None  # of a set on the hub, which is asked about it once

    def sources(self) -> list[Path] | None:
        """The folder's files; of a set on the hub, those in which the library keeps this revision of it, if it does."""
        folder = expanded(self.path)
        if folder.is_dir():
            return sorted(path for path in folder.rglob("*") if path.is_file())
        files = [[Path(file["filename"]) for file in part.cache_files] for part in self._parts()]
        return [path for own in files for path in own] if all(files) else None

    def arrays(self) -> Arrays:
        """Load and decode the splits.

        Raises:
            ConfigError: if the library, the data set, a split or a column is missing.
        """
        require_another(f"{KEY}.test", self.test, self.train, "train")
        parts = self._parts()
        size = len(parts[0])
        names, *others = (getattr(part.features[self.label], "names", None) or None for part in parts)
        for other in others:
            _require_same_classes(self.train, names, other)
        given = [v for part in parts for v in part[self.label]]
        labels, classes = as_labels(given, "HuggingFace", names or (), are_places=names is not None)
        groups = None if self.group is None else [v for part in parts for v in part[self.group]]
        grouped = None if groups is None else as_groups(groups, "HuggingFace")
        values = _read_in(parts, self.input)
        if _are_texts(values):
            x = self._words.tokens(values, size)
            return arrays_of(x, labels, size, classes, groups=grouped, vocabulary_size=self.vocabulary)
        pixels = [_pixels(value, f"{KEY}.input", index) for index, value in enumerate(values)]
        odd = next((n for n, image in enumerate(pixels) if image.shape != pixels[0].shape), None)
        require(odd is None, f"{KEY}.input", "samples must have one shape; resize them before", odd)
        stacked = np.stack(pixels)
        kind = type(values[0]).__name__ if stacked.ndim == 1 else f"{stacked.dtype} {list(stacked.shape[1:])}"
        require(stacked.dtype.kind in "buif", f"{KEY}.input", "must be images, texts or lists of numbers", kind)
        stacked = stacked if stacked.dtype == np.uint8 else stacked.astype(np.float64)
        return arrays_of(as_inputs(stacked, "HuggingFace"), labels, size, classes, self.normalize, grouped)

    @property
    def text_column(self) -> str:
        """The column of inputs."""
        return self.input

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """New texts in the numbers of the training split's words."""
        require(self.input in columns, "DATA", f"must have the column {self.input!r} of texts")
        training = list(self._parts()[0][self.input])
        texts = _are_texts(training)
        require(texts, "DATA", "this data set holds no texts; give an array as .npz or .pt, or a folder of images")
        return self._words.encode([as_text(text) for text in columns[self.input]], training)

    def pictures(self, paths: Sequence[Path], shape: Sequence[int]) -> Tensor | None:
        """As the library decodes them, scaled to the data set's size and channels."""
        feature = self._parts()[0].features[self.input]
        if not hasattr(feature, "decode_example"):
            return None

        def read(path: Path) -> Any:
            return _of_size(feature.decode_example({"path": str(path), "bytes": None}), shape)

        return _read_pictures(paths, read)

    def _parts(self) -> list[Any]:
        if self._loaded is not None:
            return self._loaded
        with importing("datasets", KEY, "HuggingFace needs the package `datasets`: pip install datasets"):
            import datasets
        try:
            local = expanded(self.path).is_dir()
            found = datasets.load_from_disk(self.path) if local else datasets.load_dataset(self.path, self.name)
        except Exception as error:  # no network, no such set, damaged files: whatever it is, it is reported
            said = " ".join(str(error).split())[:150]
            raise ConfigError(
                f"{KEY}.path", f"{self.path} cannot be loaded ({type(error).__name__}: {said})"
            ) from error
        splits = found if isinstance(found, dict) else {self.train: found}
        wanted: Sequence[str] = [self.train] if self.test is None or len(splits) == 1 else [self.train, self.test]
        for split in wanted:
            key = "test" if split == self.test else "train"
            require(split in splits, f"{KEY}.{key}", f"splits are {', '.join(splits)}", split)
        for key, column in (("input", self.input), ("label", self.label), ("group", self.group)):
            for names in (splits[split].column_names for split in wanted):
                require(column is None or column in names, f"{KEY}.{key}", f"columns are {', '.join(names)}", column)
        parts = [splits[split].with_format(None) for split in wanted]  # what it is shown as may round, and hide columns
        self._loaded = None if local else parts
        return parts


def _are_texts(values: Sequence[Any]) -> bool:
    """Whether a column is one of texts, of which some may be None."""
    return isinstance(next((value for value in values if value is not None), None), str)
