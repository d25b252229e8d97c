"""Data sets in files of a user's own: arrays, tables of features, texts, and other benchmarks' folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.archives import check_room
from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.cells import (
    are_numbers,
    labels_of,
    nothing_in,
    one_hot,
    require_few,
    require_filled,
    require_one_kind,
)
from fl_lightning.data.dataset import Dataset, require_another
from fl_lightning.data.delimited import numbered_columns
from fl_lightning.data.normalising import (
    arrays_of,
    as_array,
    as_groups,
    as_inputs,
    as_labels,
    class_names,
    on_one_scale,
    require_one_way,
)
from fl_lightning.data.normalization import Normalize, require_normalize
from fl_lightning.data.pickles import read_pickled_npz
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, expanded, plain_json


class ArrayFile(Dataset):
    """Arrays in one `.npz` or `.pt` file: ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    ``groups`` (or ``groups_train`` and ``groups_test``) say who or where a sample is from, ``classes`` how the classes
    are called. Bytes [N, C, H, W], [N, H, W, C] of 1, 3 or 4 channels or [N, H, W] are images, whole numbers [N, L]
    tokens, anything else features, which are scaled by the official training part: all rows where there is no other.
    Under the split ``holdout`` clients' test samples are cut out of both parts, and have a share in that.

    Args:
        path: the file.
        num_train: with ``x`` and ``y``: so many first rows are the official training part; None for all.
        normalize: ``standard``, ``half`` (images) or ``none``.
    """

    def __init__(self, path: str, num_train: int | None = None, normalize: Normalize = "standard") -> None:
        require_normalize(normalize)
        self.path = path
        require(
            num_train is None or num_train >= 1, f"{KEY}.num_train", "must be >= 1 rows, or null for all", num_train
        )
        self.num_train = num_train
        self.normalize = normalize

    def sources(self) -> list[Path]:
        """The file."""
        return [expanded(self.path)]

    def arrays(self) -> Arrays:
        """Read the file; nothing in it is run.

        Raises:
            ConfigError: if it is missing, damaged, or lacks an array.
        """
        found = self._read()
        whole = "x" in found and "y" in found
        names = ["x", "y"] if whole else ["x_train", "y_train"]
        parts = [f"{name}_{part}" for name in ("x", "y", "groups") for part in ("train", "test")]
        beside = [name for name in (parts if whole else ("x", "y", "groups")) if name in found]
        rule = f"{self.path} must hold x, y and groups, or these with _train and _test, and not some of both"
        require(not beside or not set(names) <= found.keys(), f"{KEY}.path", rule, ", ".join(found))
        rule = "must be null where the file has parts of its own, x_train and x_test"
        require(whole or self.num_train is None or "x_train" not in found, f"{KEY}.num_train", rule, self.num_train)
        for name in names:
            rule = f"{self.path} must hold x and y, or x_train, y_train, x_test and y_test"
            require(name in found, f"{KEY}.path", rule, ", ".join(found) or "nothing")
        for part in () if whole else ("train", "test"):
            own = [f"{name}_{part}" for name in ("x", "y", "groups") if f"{name}_{part}" in found]
            lengths = {name: len(array) for name in own if (array := as_array(found[name])).ndim}
            rule = f"{self.path} must have as many of {', '.join(own)}: its samples are those of one place in each"
            require(len({*lengths.values()}) < 2, f"{KEY}.path", rule, ", ".join(map(str, lengths.values())))
        x, y, groups = (self._joined(found, name, whole) for name in ("x", "y", "groups"))
        names = class_names(found["classes"], "ArrayFile") if found.get("classes") is not None else []
        labels, classes = as_labels(y, "ArrayFile", names)
        num_train = (self.num_train or len(labels)) if whole else len(found["x_train"])
        grouped = None if groups is None else as_groups(groups, "ArrayFile")
        return arrays_of(as_inputs(x, "ArrayFile"), labels, num_train, classes, self.normalize, grouped)

    @staticmethod
    def _joined(found: Mapping[str, Any], name: str, whole: bool) -> Any:
        if whole:
            return found.get(name)
        parts = [as_array(found[part]) for part in (f"{name}_train", f"{name}_test") if part in found]
        kinds = [part.dtype.name for part in parts]
        alike = "f" if name == "x" else "US"  # as floats, or as names
        same = len({part.dtype.kind in alike for part in parts}) < 2
        if name == "x" and {part.dtype.kind for part in parts} == {
            "i",
            "u",
        }:  # of int64 beside uint64 NumPy makes floats
            same = np.result_type(*parts).kind == "i"
        require(same, f"{KEY}.path", f"{name}_train and {name}_test must be of one type", ", ".join(kinds))
        shapes = [list(part.shape) for part in parts]
        same = all(len(shape) > 0 and shape[1:] == shapes[0][1:] for shape in shapes)
        require(same, f"{KEY}.path", f"{name}_train and {name}_test must have samples of one shape", shapes)
        return np.concatenate(parts) if parts else None

    def _read(self) -> dict[str, Any]:
        return read_arrays(expanded(self.path), f"{KEY}.path")


def read_arrays(path: Path, key: str) -> dict[str, Any]:
    """The arrays of an `.npz` or `.pt` file by name; nothing in it is run.

    Raises:
        ConfigError: about `key`, if the file is missing, damaged, or holds something else.
    """
    require(path.is_file(), key, "there is no such file", str(path))
    check_room(path, path, key)
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's words are of how to run what is in it
        said = "it is no .pt file of tensors alone; NumPy's arrays belong in an .npz, by numpy.savez"
        raise ConfigError(key, f"{path} cannot be read ({said})") from error
    except Exception as error:  # numpy and torch raise a dozen types for damaged files
        said = " ".join(str(error).split())[:120]
        raise ConfigError(key, f"{path} cannot be read ({said})") from error
    fits = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(fits, key, f"{path} must hold a dict of tensors by their names", type(found).__name__)
    return dict(found)


class CSVTable(Dataset):
    """A CSV table of features, one sample a line; the first line names the columns.

    Columns of numbers are features as they are, others have one feature for each of their values (one-hot), those of
    test samples among them. Empty cells are refused, and so are a few names in a column that is mostly numbers.

    Args:
        path: the file.
        label: the column of the classes.
        test_path: a file of the same columns that is the official test part.
        group: the column that says who or where a sample is from; no feature.
        leave_out: columns that are no features.
        names: columns of names, though some or all of them look like numbers: codes, say; null for none.
        normalize: ``standard`` scales features to mean 0 and std 1 by the official training part, ``none`` does not.
            That part is the whole file `path`: under the split ``holdout``, where clients' test samples are cut out of
            it, too, they have a share in these numbers.
    """

    def __init__(
        self,
        path: str,
        label: str,
        test_path: str | None = None,
        group: str | None = None,
        leave_out: Sequence[str] = (),
        normalize: Normalize = "standard",
        names: Sequence[str] | None = None,
    ) -> None:
        require_normalize(normalize)
        self.path = path
        self.label = label
        self.test_path = test_path
        self.group = group
        self.leave_out = list(leave_out)
        self.names = list(names or ())
        self.normalize = normalize

    def sources(self) -> list[Path]:
        """The files."""
        return [expanded(path) for path in (self.path, self.test_path) if path is not None]

    def arrays(self) -> Arrays:
        """Read the table.

        Raises:
            ConfigError: if a file or a column is missing, or a cell is empty; it says which.
        """
        columns, num_train, places = self._columns()
        for key, name in (("label", self.label), ("group", self.group)):
            require(name is None or name in columns, f"{KEY}.{key}", f"must be one of {', '.join(columns)}", name)
        features = self._features(columns)
        for name in features:
            cells, numbers = columns[name], self._are_numbers(name, columns[name])
            nothing = {""} if name in self.names else nothing_in(cells)
            require_filled(name, cells, nothing, places, "leave the column out")
            if not numbers:
                if name not in self.names:
                    require_one_kind(name, cells, places)
                require_few(name, cells)
                require_one_way(np.unique(np.array(cells)), f"names under {name!r},", "CSVTable")
        for name in filter(None, (self.label, self.group)):
            require_filled(name, columns[name], nothing_in(columns[name]), places, "take the line out")
        x = np.concatenate([self._feature(name, columns[name]) for name in features], axis=1)
        labels, classes = as_labels(labels_of(columns[self.label]), "CSVTable")
        groups = None if self.group is None else as_groups(labels_of(columns[self.group]), "CSVTable")
        return arrays_of(torch.from_numpy(x), labels, num_train, classes, self.normalize, groups)

    def _columns(self) -> tuple[dict[str, list[str]], int, list[tuple[str, int]]]:
        """The columns of both files, how many rows are the training part's, and each row's file and line."""
        require_another(f"{KEY}.test_path", self.test_path, self.path, "path")
        train, lines = numbered_columns(expanded(self.path), f"{KEY}.path")
        places = [(self.path, line) for line in lines]
        if self.test_path is None:
            return train, len(lines), places
        test, test_lines = numbered_columns(expanded(self.test_path), f"{KEY}.test_path")
        same = list(test) == list(train)
        require(same, f"{KEY}.test_path", f"must have the columns of {self.path}", self.test_path)
        places += [(self.test_path, line) for line in test_lines]
        return {name: [*train[name], *test[name]] for name in train}, len(lines), places

    def _features(self, columns: Mapping[str, Sequence[str]]) -> list[str]:
        unknown = next((name for name in self.leave_out if name not in columns), None)
        require(unknown is None, f"{KEY}.leave_out", f"columns are {', '.join(columns)}", unknown)
        features = [name for name in columns if name not in (self.label, self.group, *self.leave_out)]
        require(bool(features), f"{KEY}.leave_out", "leaves no feature", self.leave_out)
        unknown = next((name for name in self.names if name not in features), None)
        require(unknown is None, f"{KEY}.names", f"columns that are features are {', '.join(features)}", unknown)
        return features

    def _are_numbers(self, name: str, cells: Sequence[str]) -> bool:
        return name not in self.names and are_numbers(cells)

    def _feature(self, name: str, cells: Sequence[str]) -> np.ndarray:
        """A column as features, float64 [N, 1] of numbers, or [N, values] of names."""
        if self._are_numbers(name, cells):
            return np.array([float(cell) for cell in cells], dtype=np.float64)[:, None]
        return one_hot(cells)

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """New lines of the table, as numbers; a name that the table does not have is refused.

        Raises:
            ConfigError: if a column is missing, a cell is empty, or a value is new.
        """
        known = self._columns()[0]
        parts = []
        for name in self._features(known):
            require(name in columns, "DATA", f"must have the column {name!r}, as {self.path} has")
            parts.append(self._as(name, known[name], [str(cell) for cell in columns[name]]))
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def _as(self, name: str, known: Sequence[str], cells: Sequence[str]) -> np.ndarray:
        """New cells of a column as `_feature` gives the known ones."""
        numbers, values = self._are_numbers(name, known), set(known)
        new = (n for n, cell in enumerate(cells) if not (are_numbers([cell]) if numbers else cell in values))
        odd = next(new, None)
        what = "a number" if numbers else f"one of the names that {self.path} has there"
        require(odd is None, "DATA", f"{name!r} of sample {odd} (from 0) must be {what}", cells[odd or 0])
        return self._feature(name, cells) if numbers else one_hot([*sorted(values), *cells])[len(values) :]


class LEAF(Dataset):
    """A LEAF benchmark's folder: ``train/*.json`` and ``test/*.json`` with users and their samples as numbers.

    Every user is a group (`ByGroup` gives each client its own). Sets of texts are for `TextFile`.

    Args:
        root: the folder, LEAF's ``data``.
        shape: of a sample, e.g. [1, 28, 28]; by default the flat list of its numbers.
        normalize: ``standard`` or ``none``; FEMNIST's pixels are in [0, 1] already.
    """

    paper = "Caldas et al., 2018, LEAF: A Benchmark for Federated Settings"

    def __init__(self, root: str, shape: Sequence[int] | None = None, normalize: Normalize = "none") -> None:
        require_normalize(normalize)
        self.root = root
        self.shape = None if shape is None else list(shape)
        self.normalize = normalize

    def sources(self) -> list[Path]:
        """All JSON files but hidden ones."""
        return [path for part in ("train", "test") for path in self._files(part)]

    def arrays(self) -> Arrays:
        """Read all users' samples.

        Raises:
            ConfigError: if there are no such files, or one of them is none of LEAF's.
        """
        x: list[Any] = []
        y: list[Any] = []
        users: list[str] = []
        sizes = []
        for part in ("train", "test"):
            for user, data in self._users(part):
                x += data["x"]
                y += data["y"]
                users += [user] * len(data["y"])
            sizes.append(len(y))
        require(sizes[0] > 0, f"{KEY}.root", "must hold samples in train/*.json", self.root)
        try:
            inputs = np.array(x, dtype=np.float64)
            if inputs.size and np.abs(inputs).max() > np.finfo(np.float32).max:
                raise OverflowError("a number is too large")
            inputs = inputs if self.shape is None else inputs.reshape(len(y), *self.shape)
        except (ValueError, TypeError, ArithmeticError) as error:
            shape = "" if self.shape is None else f", of the shape {self.shape}"
            rule = f"samples must be lists of equally many numbers{shape}; texts are for TextFile"
            raise ConfigError(f"{KEY}.shape", rule) from error
        labels, classes = as_labels(y, "LEAF")
        return arrays_of(as_inputs(inputs, "LEAF"), labels, sizes[0], classes, self.normalize, as_groups(users, "LEAF"))

    def _files(self, part: str) -> list[Path]:
        return sorted((expanded(self.root) / part).glob("[!.]*.json"))

    def _users(self, part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        files = self._files(part)
        require(bool(files) or part == "test", f"{KEY}.root", "must hold train/*.json, as LEAF writes them", self.root)
        for path in files:
            try:
                content = plain_json(content_of(path))
                users, held = content["users"], content["user_data"]
                twice = [user for user, times in Counter(users).items() if times > 1]
                missing = sorted({*held}.symmetric_difference(users))
                if twice:
                    raise ValueError(f"user {twice[0]} is listed twice")
                if missing:
                    raise ValueError(f"user {missing[0]} is in one of users and user_data alone")
                for user, said in zip(users, content.get("num_samples") or [None] * len(users), strict=True):
                    self._check_user(user, held[user], said)
                    yield str(user), held[user]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{KEY}.root", f"{path} is no file of LEAF's ({error})") from error

    @staticmethod
    def _check_user(user: str, data: Mapping[str, Any], said: int | None) -> None:
        x, y = data["x"], data["y"]
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise ValueError(f"user {user} must have lists of as many samples as labels")
        if said is not None and said != len(y):
            raise ValueError(f"user {user} has {len(y)} samples, and num_samples says {said}")


class PFLlibFolder(Dataset):
    """A data set as PFLlib wrote it: ``train/0.npz``, ``test/0.npz`` and so on, one of each a client.

    Client i is group i; with the partition `ByGroup` and the split ``matched`` every client has what it has in PFLlib.
    Inputs stay as PFLlib has scaled them. The files are pickles of arrays; they are read without running anything else
    that they may name.

    Args:
        root: the folder that holds ``train`` and ``test``.
    """

    paper = (
        "Zhang et al., JMLR 2025, PFLlib: A Beginner-Friendly and Comprehensive Personalized FL Library and Benchmark"
    )

    def __init__(self, root: str) -> None:
        self.root = root

    def sources(self) -> list[Path]:
        """All clients' files."""
        return [path for part in ("train", "test") for path in self._files(part)]

    def arrays(self) -> Arrays:
        """Read all clients' samples.

        Raises:
            ConfigError: if there are no such files, or one of them is none of PFLlib's.
        """
        x: list[np.ndarray] = []
        y: list[np.ndarray] = []
        groups: list[int] = []
        sizes = []
        for part in ("train", "test"):
            for path in self._files(part):
                data = read_pickled_npz(path, "data", f"{KEY}.root")
                both = isinstance(data, Mapping) and {"x", "y"} <= set(data)
                own = [as_array(data[name]) for name in ("x", "y")] if both else []
                fits = both and all(each.ndim for each in own) and len(own[0]) == own[1].size
                require(fits, f"{KEY}.root", f"{path} must hold data with x and y of one length")
                if not own[1].size:  # of nothing the shape is anything
                    continue
                x.append(own[0])
                y.append(own[1].reshape(-1))
                rule = f"{path}: samples must have the shape of the others, {list(x[0].shape[1:])}"
                require(x[-1].shape[1:] == x[0].shape[1:], f"{KEY}.root", rule, list(x[-1].shape[1:]))
                rule = f"{path}: samples must be of one type with the others, {x[0].dtype}"
                require(on_one_scale(x[-1].dtype, x[0].dtype), f"{KEY}.root", rule, str(x[-1].dtype))
                groups += [int(path.stem)] * len(y[-1])
            sizes.append(sum(map(len, y)))
        require(sizes[0] > 0, f"{KEY}.root", "must hold train/0.npz, train/1.npz, … as PFLlib writes them", self.root)
        labels, classes = as_labels(np.concatenate(y), "PFLlibFolder")
        inputs = as_inputs(np.concatenate(x), "PFLlibFolder")
        grouped = as_groups(groups, "PFLlibFolder")
        return arrays_of(inputs, labels, sizes[0], classes, "none", grouped)

    def _files(self, part: str) -> list[Path]:
        found = (expanded(self.root) / part).glob("*.npz")
        return sorted((path for path in found if path.stem.isdecimal()), key=lambda path: int(path.stem))
