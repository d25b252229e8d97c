"""A data set as tensors: what every data set decodes to and everything after it works on."""

from __future__ import annotations

import hashlib
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import ConfigError, require

KEY = "data.dataset"
_LISTS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    *((name, (str, int, float), "names") for name in ("classes", "group_names")),
    *((name, (int, float), "numbers") for name in ("mean", "std")),
)
"""What a data set says in lists, of which types, and what these are called."""


@dataclass(frozen=True)
class DataSpec:
    """What a model must know of the data.

    Args:
        input_shape: shape of one sample, ``(C, H, W)`` for images and ``(L,)`` for tokens.
        num_classes: number of classes C.
        vocabulary_size: number of token ids, pad and unknown included; 0 where inputs are no tokens.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocabulary_size: int = 0


@dataclass
class Arrays:
    """A whole data set in memory, official training part first.

    Args:
        x: inputs; images uint8 [N, C, H, W], tokens int64 [N, L], anything else float32 [N, ...].
        y: labels, int64 [N], in [0, C).
        num_train: the first `num_train` rows are the official training part, the rest the official test part;
            equal to N where there is no official test part.
        classes: the names of the C classes.
        mean: mean per channel on the [0, 1] scale; used for uint8 images only, empty for none.
        std: standard deviation per channel on the [0, 1] scale; used for uint8 images only, empty for none.
        vocabulary_size: number of token ids, pad and unknown included; 0 where inputs are no tokens.
        groups: who or where each sample is from (a user, a writer, a site), int64 [N], >= 0; None where that is not
            known.
        group_names: what the groups are called, in the order of their numbers; empty where they have no names.
        digest: SHA-256 of all that but the groups' names; filled in when the data set is loaded.
    """

    x: Tensor
    y: Tensor
    num_train: int
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary_size: int = 0
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    digest: str = ""

    @property
    def spec(self) -> DataSpec:
        """Shape of one sample, number of classes and size of the vocabulary."""
        return DataSpec(tuple(self.x.shape[1:]), len(self.classes), self.vocabulary_size)

    @property
    def labels_hash(self) -> str:
        """SHA-256 over the labels: which sample an index means, wherever images are decoded a little otherwise."""
        return hashlib.sha256(self.y.numpy().astype("<i8").tobytes()).hexdigest()

    def hold_plainly(self, name: str) -> None:
        """Hold plain tensors on the CPU, without gradients, and Python's own names and numbers, whatever they come as.

        Args:
            name: the data set's, for messages.

        Raises:
            ConfigError: for what cannot be held so.
        """
        for own in ("x", "y", "groups"):
            value = getattr(self, own)
            if isinstance(value, Tensor):
                rule = f"{name}: {own} must hold its numbers one by one, is {value.layout}; say to_dense()"
                require(value.layout == torch.strided, KEY, rule)
                setattr(self, own, value.detach().cpu().as_subclass(Tensor))
        for own, kinds, what in _LISTS:
            try:
                values = tuple(map(_plain, getattr(self, own)))
            except (RuntimeError, TypeError, ValueError):  # one number, a tensor of several axes
                values = (None,)
            fits = all(isinstance(value, kinds) for value in values)
            require(fits, KEY, f"{name}: {own} must be a tuple of {what}", getattr(self, own))
            setattr(self, own, values)
        self.vocabulary_size = _plain(self.vocabulary_size)

    def validate(self, name: str) -> None:
        """Check that shapes, types and values agree; what is held otherwise than plainly is from here on held so.

        Args:
            name: the data set's name, for messages.

        Raises:
            ConfigError: naming the data set and the offending value or sample.
        """

        def check(condition: bool, problem: str) -> None:
            if not condition:
                raise ConfigError(KEY, f"{name}: {problem}")

        check(isinstance(self.x, Tensor) and isinstance(self.y, Tensor), "x and y must be torch tensors")
        self.hold_plainly(name)
        check(self.y.dtype == torch.int64 and self.y.ndim == 1, f"y must be int64 [N], is {_kind(self.y)}")
        check(len(self.y) > 0, "there is not a single sample")
        check(self.x.ndim >= 2, f"x must be [N, ...] with at least one axis for the sample, is {_kind(self.x)}")
        check(len(self.x) == len(self.y), f"x has {len(self.x)} samples but y has {len(self.y)} labels")
        try:
            self.num_train = operator.index(self.num_train)  # a tensor's number, too
        except TypeError:
            check(False, f"num_train must be a whole number; it is {self.num_train!r}")
        check(
            1 <= self.num_train <= len(self.y),
            f"num_train must be in [1, {len(self.y)}], the samples; it is {self.num_train}",
        )
        num_classes = len(self.classes)
        check(num_classes > 0, "classes must name at least one class")
        self._check_range(name, self.y, num_classes, "label")
        if self.groups is not None:
            whole = isinstance(self.groups, Tensor) and self.groups.dtype == torch.int64
            check(whole and self.groups.shape == self.y.shape, f"groups must be int64 [{len(self.y)}], as y")
            check(int(self.groups.min()) >= 0, "groups must be >= 0")
            named = not self.group_names or int(self.groups.max()) < len(self.group_names)
            check(named, f"group_names must name all {int(self.groups.max()) + 1} groups, not {len(self.group_names)}")
        if self.x.ndim == 4:
            channels, height, width = self.x.shape[1:]
            narrow = width <= 4 or 2 * width <= min(height, 32)  # of square images as NumPy and PIL hold them
            last = channels == height > width and narrow
            check(not last, f"images must be [N, C, H, W], are {_kind(self.x)}: permute(0, 3, 1, 2)")
        if self.x.dtype == torch.uint8:
            check(self.x.ndim == 4, f"uint8 images must be [N, C, H, W], are {_kind(self.x)}")
            channels = self.x.shape[1]
            check(
                len(self.mean) == len(self.std) and len(self.mean) in (0, channels),
                f"mean and std need {channels} values, one a channel; they have {len(self.mean)} and {len(self.std)}",
            )
            check(all(map(math.isfinite, self.mean)), f"mean must be finite, is {self.mean}")
            check(all(math.isfinite(s) and s > 0 for s in self.std), f"std must be above 0, is {self.std}")
        elif self.x.dtype == torch.int64:
            check(self.x.ndim == 2, f"int64 tokens must be [N, L], are {_kind(self.x)}")
            check(self.vocabulary_size > 0, "int64 inputs are tokens and need a vocabulary_size above 0")
            self._check_range(name, self.x, self.vocabulary_size, "token")
        else:
            check(self.x.dtype == torch.float32, f"x must be uint8, int64 or float32, is {self.x.dtype}; convert it")
            require_finite(self.x, f"{name}: ")

    @staticmethod
    def _check_range(name: str, values: Tensor, limit: int, what: str) -> None:
        """Require all values in [0, limit); name the first sample that breaks it."""
        if int(values.min()) >= 0 and int(values.max()) < limit:
            return
        bad = (values < 0) | (values >= limit)
        index = bad.nonzero()[0].tolist()
        value = values[tuple(index)].item()
        raise ConfigError(
            KEY, f"{name}: {what} {value} of sample {index[0]} is out of range; allowed are 0 to {limit - 1}"
        )


def _plain(value: Any) -> Any:
    """A number, or a text, of NumPy's or torch's as Python's own."""
    return value.item() if hasattr(value, "item") else value


def require_finite(x: Tensor, owner: str = "") -> None:
    """Refuse inputs [N, …] of which one is no number, or infinite; the first such sample is named.

    Args:
        x: floating-point inputs.
        owner: what the message begins with.

    Raises:
        ConfigError: naming the sample and the value.
    """
    for start in range(0, len(x), 4096):
        bad = ~torch.isfinite(x[start : start + 4096].flatten(1)).all(1)
        if bad.any():
            sample = start + int(bad.nonzero()[0])
            values = x[sample].flatten()
            value = values[~torch.isfinite(values)][0].item()
            raise ConfigError(KEY, f"{owner}sample {sample} holds {value}; inputs must be finite")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
