"""From numbers as users keep them to `Arrays`."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays, require_finite
from fl_lightning.data.cells import are_numbers
from fl_lightning.data.normalization import Normalize, constants, mean_and_std
from fl_lightning.errors import ConfigError, require

_KEEPS_WIDE = ContextVar("keeps_wide", default=False)
_IGNORED = -100  # torch's ignore_index


@contextmanager
def wide() -> Iterator[None]:
    """Under ``normalize: none`` `arrays_of` leaves float64 as it is: what others are scaled by must not be rounded."""
    token = _KEEPS_WIDE.set(True)
    try:
        yield
    finally:
        _KEEPS_WIDE.reset(token)


def as_array(x: Any) -> np.ndarray:
    """A tensor, a list of them, or what NumPy takes, as an array; it has no bfloat16, which float32 holds."""
    if isinstance(x, list | tuple) and any(isinstance(value, Tensor) for value in x):
        x = [as_array(value) for value in x]
    if not isinstance(x, Tensor):
        return _as_array(x)
    x = x.detach().cpu()
    try:
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantized, nested ones
        raise ConfigError(KEY, f"a tensor must hold its numbers one by one ({str(error).splitlines()[0]})") from error


def on_one_scale(kind: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether numbers of two types can be on one scale: bytes from 0 to 255 and shares of 1 are not."""
    return (kind.kind in "bf") == (other.kind in "bf")


def as_inputs(x: Any, name: str) -> Tensor:
    """Inputs as they came: uint8 [N, C, H, W], int64 [N, L], or float32 or float64 [N, …], which `arrays_of` narrows.

    Bytes of three axes are grey images; bytes of four are channels last where only their last axis has 1, 3 or 4.

    Raises:
        ConfigError: naming the data set, for anything that is no array of numbers.
    """
    array = as_array(x)
    _require_one_shape(array, name)
    if array.dtype.kind not in "buif" or array.ndim < 2:
        raise ConfigError(KEY, f"{name}: x must be numbers [N, …], is {array.dtype} {list(array.shape)}")
    if array.dtype == np.uint8:
        if array.ndim == 3:
            array = array[:, None]
        if array.ndim == 4 and array.shape[-1] in (1, 3, 4) and array.shape[1] not in (1, 3, 4):
            array = array.transpose(0, 3, 1, 2)
        if array.ndim == 4:
            return torch.from_numpy(np.ascontiguousarray(array))
    if array.dtype.kind in "iu" and array.ndim == 2 and array.dtype != np.uint8:
        return torch.from_numpy(array.astype(np.int64))
    fits = array.dtype.itemsize <= (4 if array.dtype.kind in "bf" else 2)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32 if fits else np.float64))


def _require_one_shape(array: np.ndarray, name: str) -> None:
    """Refuse samples of several shapes, sequences of several lengths among them, of which NumPy makes objects."""
    shapes = [list(value.shape) for value in array.flat if isinstance(value, np.ndarray)]
    odd = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None and array.ndim == 1:
        found = f"sample {odd} is {shapes[odd]}, sample 0 {shapes[0]}"
        raise ConfigError(KEY, f"{name}: inputs must have one shape, padded or cut: {found}")


def as_labels(
    y: Any, name: str, classes: Sequence[str] = (), are_places: bool = False
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels [N] in [0, C), and the classes' names.

    Whole numbers stay where names are known for them, and small ones always (up to twice as many as there are different
    ones, for a class may be missing); all else is numbered in sorted order.

    Args:
        y: names or whole numbers.
        name: the data set's, for errors.
        classes: the name of class 0, 1 and so on, where they are known.
        are_places: whether whole numbers are places in `classes`, so that a negative one is none: it marks, as -1 does
            in many data sets, samples that have no label.

    Raises:
        ConfigError: for anything that is no list of names or whole numbers, for measured values, and for names of other
            classes.
    """
    missing = _first_missing(y)
    require(missing is None, KEY, f"{name}: sample {missing} (from 0) has no class; name one, or take it out")
    array = as_array(y)
    array = array.reshape(len(array)) if array.ndim == 2 and array.shape[1] == 1 else array
    flat = array.ndim == 1 and array.dtype.kind in "iubUS"
    require(flat, KEY, f"{name}: y must be names or whole numbers [N], is {array.dtype} {list(array.shape)}")
    array = _decoded(array)
    names, numbers = np.unique(array, return_inverse=True)
    odd = next((own for own in names.tolist() if isinstance(own, str) and not _is_text(own)), None)
    require(odd is None, KEY, f"{name}: the label {odd!a} is no text, but half of a letter of UTF-16")
    rule = f"{name}: the labels are {len(names)} different numbers in {len(array)} samples; cut what is measured into"
    require(not _are_measured(array, names), KEY, f"{rule} classes")
    require_one_way(names, "classes", name)
    if are_places and array.dtype.kind == "i" and len(names) and int(names[0]) < 0:
        rule = f"{name}: sample {int(numbers.argmin())} (from 0) has {names[0]}, which stands for no class; take it out"
        raise ConfigError(KEY, rule)
    if not classes and array.dtype.kind == "i" and _marks_none(names):
        rule = f"{name}: sample {int(numbers.argmin())} (from 0) has {names[0]}, which marks samples without a class"
        raise ConfigError(KEY, f"{rule} in many data sets; take it out, or give the classes names")
    if classes:
        if not are_places and array.dtype.kind in "iu":
            _require_one_reading(names.tolist(), tuple(classes), name)
        return _named(array, names, numbers, tuple(classes), name)
    if array.dtype.kind in "iu" and len(names) and names[0] >= 0 and names[-1] < 2 * len(names):
        return torch.from_numpy(array.astype(np.int64)), tuple(str(label) for label in range(int(names[-1]) + 1))
    return torch.from_numpy(numbers.astype(np.int64)), tuple(str(label) for label in names.tolist())


def _marks_none(names: np.ndarray) -> bool:
    """Whether the least of some numbers stands for no class: -100, or a negative one beside 0, 1, 2 and so on."""
    counted = len(names) > 3 and names[0] < 0 and bool((names[1:] == np.arange(len(names) - 1)).all())
    return len(names) > 0 and (counted or names[0] == _IGNORED)


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: None, or NaN, which tables hold where there is none, and JSON lines made of them.

    Among names `numpy` makes the name ``nan`` of it.
    """
    return value is None or (isinstance(value, float) and math.isnan(value))


def _first_missing(values: Any) -> int | None:
    """The first place of a flat list, or array of objects or floats, that holds nothing."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "Of":
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return None
    return next((place for place, value in enumerate(values) if is_missing(value)), None)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def class_names(names: Any, name: str) -> list[str]:
    """What classes are called, of numbers, texts or their bytes.

    Raises:
        ConfigError: naming the data set, if they are no flat list.
    """
    array = as_array(names)
    require(array.ndim == 1 and array.dtype.kind in "iufbUS", KEY, f"{name}: classes must be a flat list of names")
    return [str(each) for each in _decoded(array).tolist()]


_GRADES = 20
"""So many classes may be numbers with a point, as school's grades are, or have a sample each."""


def require_one_way(names: np.ndarray, kind: str, name: str) -> None:
    """Refuse ``0`` beside ``0.0``, which some programs write of a column of whole numbers in which one was missing.

    So are names refused that differ in the spaces around them alone, as behind the commas of some lines of a table, or
    in their Unicode form; a space and an end of line are two letters that a text may go on with.

    Args:
        names: each once.
        kind: what they are: ``classes``.
        name: the data set's.
    """
    known: dict[float, str] = {}
    bare: dict[str, str] = {}
    for own in names.tolist() if names.dtype.kind == "U" else ():
        alike = bare.setdefault(unicodedata.normalize("NFC", own.strip() or own), own)
        if alike.strip() != own.strip():
            rule = f"{name}: the {kind} {alike!a} and {own!a} are one but for their Unicode form"
            raise ConfigError(KEY, f"{rule}; write it in one way everywhere")
        rule = f"{name}: the {kind} {alike!r} and {own!r} are one but for spaces; write it in one way everywhere"
        require(alike == own, KEY, rule)
        if not are_numbers([own]):
            continue
        other = known.setdefault(float(own), own)
        apart = other == own or not any(sign in text.lower() for text in (own, other) for sign in ".e")
        require(apart, KEY, f"{name}: the {kind} {other!r} and {own!r} are one number; write it in one way everywhere")


def _are_measured(labels: np.ndarray, names: np.ndarray) -> bool:
    """Whether labels are values on a scale: many with a point, or mostly different numbers."""
    if labels.dtype.kind == "U" and not are_numbers(names.tolist()):
        return False
    numbers = names.astype(np.float64)
    many, mostly_other = len(names) > _GRADES, len(names) > len(labels) / 2
    with_a_point = labels.dtype.kind == "U" and not np.array_equal(numbers, np.round(numbers))
    return (many or mostly_other) if with_a_point else many and mostly_other


def _require_one_reading(labels: Sequence[int], classes: tuple[str, ...], name: str) -> None:
    """Refuse whole numbers that are names of classes as well as places of other ones, from 0 on."""
    both = all(0 <= label < len(classes) and str(label) in classes for label in labels)
    odd = next((label for label in labels if both and classes[label] != str(label)), None)
    if odd is not None:
        rule = (
            f"the label {odd} is the name of class {classes.index(str(odd))}, and the place of class {classes[odd]!r}"
        )
        cure = "give labels as texts where they are names, and classes other names than numbers where they are places"
        raise ConfigError(KEY, f"{name}: {rule}; {cure}")


def _named(
    array: np.ndarray, found: np.ndarray, numbers: np.ndarray, classes: tuple[str, ...], name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels of classes whose names are known: numbers that index these, names among them, or as many other numbers."""
    if array.dtype.kind in "iu" and len(found) and found[0] >= 0 and found[-1] < len(classes):
        return torch.from_numpy(array.astype(np.int64)), classes
    said = [str(label) for label in found.tolist()]  # numbers are names where the classes' are
    if set(said) <= set(classes):
        twice = next((label for label in said if classes.count(label) > 1), None)
        require(twice is None, KEY, f"{name}: two classes are called {twice!r}: which one a label is, its number says")
        order = np.array([classes.index(label) for label in said], dtype=np.int64)
        return torch.from_numpy(order[numbers]), classes
    of = f"{found[0]} to {found[-1]}" if len(found) else "nothing"
    rule = f"{name}: names {len(classes)} classes, but y holds {len(found)} others ({of})"
    require(len(found) == len(classes) and array.dtype.kind != "U", KEY, rule)
    return torch.from_numpy(numbers.astype(np.int64)), classes


class Groups(NamedTuple):
    """Who or where samples are from.

    Args:
        numbers: [N] int64, from 0 on.
        names: what they are called.
    """

    numbers: Tensor
    names: tuple[str, ...]


def as_groups(groups: Any, name: str) -> Groups:
    """Users or sites [N] as numbers from 0 on, by sorted names.

    Raises:
        ConfigError: if they are no flat list of names or numbers, or one of them is missing.
    """
    array = as_array(groups)
    require(array.ndim == 1, KEY, f"{name}: groups must be a flat list, are {list(array.shape)}")
    nobody = _first_missing(groups if isinstance(groups, list | tuple) else array)
    require(nobody is None, KEY, f"{name}: sample {nobody} (from 0) is of no group; name one, or take it out")
    array = _decoded(array)
    try:
        names, numbers = np.unique(array, return_inverse=True)
    except (TypeError, ValueError) as error:  # names beside numbers, lists, mappings, arrays
        kinds = ", ".join(sorted({type(value).__name__ for value in array.tolist()}))
        raise ConfigError(KEY, f"{name}: groups must be names or numbers, all of one type; are {kinds}") from error
    require_one_way(names, "groups", name)
    return Groups(torch.from_numpy(numbers.astype(np.int64)), tuple(str(own) for own in names.tolist()))


def _decoded(names: np.ndarray) -> np.ndarray:
    """Names that are bytes, as HDF5 and MATLAB files give them, as text; all else as it is."""
    return np.char.decode(names, "utf-8", "backslashreplace") if names.dtype.kind == "S" else names


def _as_array(values: Any) -> np.ndarray:
    """An array of a type; of objects, one a value, where lists of several lengths are in each other."""
    try:
        return np.asarray(values)
    except ValueError:
        found = np.empty(len(values), dtype=object)
        for place, value in enumerate(values):  # at once NumPy tries to make one of those whose first axes agree
            found[place] = value
        return found


def arrays_of(
    x: Tensor,
    y: Tensor,
    num_train: int,
    classes: Sequence[str],
    normalize: Normalize = "standard",
    groups: Groups | None = None,
    vocabulary_size: int = 0,
) -> Arrays:
    """Put a data set together; numbers are scaled here, images when batches are gathered.

    Args:
        x: inputs, as `as_inputs` gives them.
        y: [N] labels.
        num_train: rows of the official training part.
        classes: names.
        normalize: see `Normalize`; of no meaning to tokens.
        groups: as `as_groups` gives them, or None.
        vocabulary_size: of tokens; 0 takes the largest token and one.

    Raises:
        ConfigError: for ``normalize: half`` of what is neither bytes nor tokens, and for a feature that is not finite.
    """
    numbers, names = (None, ()) if groups is None else groups
    if x.dtype == torch.int64:
        size = vocabulary_size or (int(x.max()) + 1 if x.numel() else 0)
        return Arrays(x, y, num_train, tuple(classes), vocabulary_size=size, groups=numbers, group_names=names)
    if x.dtype == torch.uint8:
        mean, std = constants(normalize, x, lambda: mean_and_std(x[:num_train]))
        return Arrays(x, y, num_train, tuple(classes), mean, std, groups=numbers, group_names=names)
    rule = "is for images of bytes; numbers with a point take standard or none"
    require(normalize != "half", f"{KEY}.normalize", rule, normalize)
    if normalize != "none":
        require_finite(x)  # before one of them makes all of its feature NaN
        x = scaled(x, x[:num_train])
    elif not _KEEPS_WIDE.get():
        x = x.float()
    return Arrays(x, y, num_train, tuple(classes), groups=numbers, group_names=names)


def scaled(x: Tensor, training: Tensor) -> Tensor:
    """Features [N, …] scaled to mean 0 and std 1 of the training part, in float64 on the way; a constant one to 0.

    Images [N, C, H, W] have one mean and std a channel, as those of bytes have.

    Raises:
        ConfigError: for numbers so large that their squares are none.
    """
    mean, deviation = mean_and_deviation(training)
    return ((x.double() - mean) / deviation).float()


def mean_and_deviation(training: Tensor) -> tuple[Tensor, Tensor]:
    """What `scaled` takes off and divides by, float64 [1, …]; a constant feature's deviation is 1.

    Raises:
        ConfigError: as `scaled`.
    """
    require(len(training) > 0, KEY, "there is no training sample to scale by")
    over, wide = ((0, 2, 3) if training.dim() == 4 else (0,)), training.double()
    mean, deviation = wide.mean(over, keepdim=True), wide.std(over, correction=0, keepdim=True)
    finite = bool(torch.isfinite(mean).all() and torch.isfinite(deviation).all())
    require(finite, KEY, "its numbers are too large to be scaled: give them in a larger unit, or say normalize: none")
    constant = deviation <= 1e-14 * wide.abs().amax(over, keepdim=True)  # in whatever unit: what rounding leaves of 0
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)
