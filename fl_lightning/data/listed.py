"""A partition that stands in a file: lists of indices, by client."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from fl_lightning.archives import check_room
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.partitions import KEY, Partition
from fl_lightning.data.pickles import read_pickle
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, expanded, plain_json
from fl_lightning.sealed import fits_checksum

PARTS = ("train", "validation", "test")
Listed = tuple[Any, Any, Any]
"""A client's indices for training, validation and test."""


class ListedPartition(Partition, ABC):
    """A partition that can say each client's training, validation and test samples (``file``, and ``global``)."""

    @abstractmethod
    def listed(self, num_clients: int) -> list[Listed]:
        """Each client's indices into the whole data set, training part first.

        Raises:
            ConfigError: if they are not known for so many clients.
        """

    def check(self, arrays: Arrays) -> None:
        """Refuse a data set that the lists are not of, where that can be known.

        Raises:
            ConfigError: if they are of another one.
        """

    @override
    def share(self, arrays: Arrays, num_samples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        self.check(arrays)
        return super().share(arrays, num_samples, num_clients, rng)


class FromFile(ListedPartition):
    """Who holds what, from a file of indices into the data set (official training part first).

    JSON: a list with an entry a client, or an object with clients' numbers as names, or either of them under
    ``clients``, as in a run's own ``partition.json``. An entry is a list of indices, or an object with ``train`` and
    perhaps ``validation`` and ``test``. npz: arrays named ``0``, ``1``, … or ``0/train``, ``0/test``, …. A pickle is
    FL-bench's ``partition.pkl``; of it, too, nothing is run. A run's own file is verified by its ``checksum``, and the
    data set by the file's ``classes`` and ``labels``: take those out of a copy that you edit or mean for other data.

    With the split ``file`` the parts are taken as they are, and with ``global`` if they are of the official training
    part and none is a test part: the official one is the server's. With another split only lists of indices will do, or
    ``train`` where that is the only part: the split cuts them.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """The file's lists.

        Raises:
            ConfigError: if the file is missing or of another kind, or lists more than one part.
        """
        clients = self._entries(num_clients)
        tests = any(lists_any(parts.get("test", ())) for parts in clients)
        ways = "file" if tests else "file, or global where the server alone has tests"
        for client, parts in enumerate(clients):
            others = (own for name, own in parts.items() if name != "train")
            rule = f"{self.path} lists several parts of client {client}; say data.split: {ways}"
            require(not any(map(lists_any, others)), "data.split", rule)
        return [parts["train"] for parts in clients]

    def listed(self, num_clients: int) -> list[Listed]:
        """Each client's three parts; a list alone is for training."""
        found = []
        for client, parts in enumerate(self._entries(num_clients)):
            test, validation = parts.get("test"), parts.get("validation")
            rule = (
                f"{self.path}, client {client}: its test part is its validation part; runs on validation parts wrote "
                "such files before, which lack the test parts: run it again"
            )
            lost = type(test) is type(validation) is list and test and test == validation
            require(not lost, f"{KEY}.path", rule)
            found.append(tuple(parts.get(name, []) for name in PARTS))
        return found  # type: ignore[return-value]

    @override
    def check(self, arrays: Arrays) -> None:
        content = self._read()
        if not isinstance(content, Mapping):
            return
        classes = content.get("classes", list(arrays.classes))
        same = classes == list(arrays.classes) and content.get("labels", arrays.labels_hash) == arrays.labels_hash
        source = f" ({content['dataset']})" if isinstance(content.get("dataset"), str) else ""
        rule = f"{self.path} is of a run on other data{source}: its classes or labels are not those of data.dataset"
        require(same, f"{KEY}.path", f"{rule}; in a copy for other data, leave out checksum, classes and labels")

    def _entries(self, num_clients: int) -> list[Mapping[str, Any]]:
        """Each client's parts by name; a list alone is for training."""
        found = []
        for client, entry in enumerate(self._clients(num_clients)):
            parts = entry if isinstance(entry, Mapping) else {"train": entry}
            odd = next((name for name in parts if name not in PARTS), None)
            rule = f"{self.path}, client {client}: parts are {', '.join(PARTS)}"
            require(odd is None, f"{KEY}.path", rule, odd)
            rule = f"{self.path}, client {client}: must list train"
            require("train" in parts, f"{KEY}.path", rule, ", ".join(parts) or None)
            found.append(parts)
        return found

    def _clients(self, num_clients: int) -> list[Any]:
        content = self._read()
        if isinstance(content, Mapping) and "clients" in content:
            content = content["clients"]
        if isinstance(content, Mapping):
            numbers = sorted((str(name) for name in content), key=lambda name: (len(name), name))
            rule = f"{self.path}: clients must be numbered from 0 to {len(numbers) - 1}"
            require(numbers == [str(n) for n in range(len(numbers))], f"{KEY}.path", rule)
            content = [content[name] for name in numbers]
        require(isinstance(content, list), f"{KEY}.path", f"{self.path} must list clients", type(content).__name__)
        rule = f"must be {len(content)}, as many as {self.path} lists"
        require(len(content) == num_clients, "data.num_clients", rule, num_clients)
        return list(content)

    def _read(self) -> Any:
        path = expanded(self.path)
        require(path.is_file(), f"{KEY}.path", "there is no such file", self.path)
        if path.suffix.lower() in (".pkl", ".pickle"):
            return _of_fl_bench(read_pickle(path, f"{KEY}.path"))
        try:
            if path.suffix.lower() == ".npz":
                check_room(path, path, f"{KEY}.path")
                with np.load(io.BytesIO(content_of(path)), allow_pickle=False) as file:
                    return _nested({name: file[name] for name in file.files})
            content = plain_json(content_of(path))
        except ConfigError:
            raise
        except Exception as error:  # a damaged archive raises a dozen types
            said = " ".join(str(error).split())[:120] or type(error).__name__
            raise ConfigError(f"{KEY}.path", f"{self.path} is no JSON or npz file of indices ({said})") from error
        rule = f"{self.path} is damaged: its checksum does not fit its content; a copy that you edit goes without one"
        require(not isinstance(content, dict) or fits_checksum(content), f"{KEY}.path", rule)
        return content


def lists_any(part: Any) -> bool:
    """Whether a part lists anything, be it nothing that an index may be: lists of several lengths are no array."""
    if isinstance(part, np.ndarray):
        return part.size > 0
    return not isinstance(part, Sequence) or len(part) > 0


def _of_fl_bench(content: Any) -> Any:
    """FL-bench's ``partition.pkl``: its ``data_indices``, with our word for validation."""
    if isinstance(content, Mapping) and "data_indices" in content:
        content = content["data_indices"]

    def named(entry: Any) -> Any:
        parts = entry.items() if isinstance(entry, Mapping) else ()
        return {{"val": "validation"}.get(name, name): part for name, part in parts} if parts else entry

    if isinstance(content, Mapping):
        return {str(number): named(entry) for number, entry in content.items()}
    return list(map(named, content)) if isinstance(content, list) else content


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"0/train": a}`` -> ``{"0": {"train": a}}``.

    Raises:
        ValueError: for a client that has a list of its own beside its parts.
    """
    found: dict[str, Any] = {name: value for name, value in flat.items() if "/" not in name}
    for name, value in flat.items():
        client, slash, part = name.partition("/")
        if slash and client in flat:
            raise ValueError(f"it says {client!r} beside {name!r}")
        if slash:
            found.setdefault(client, {})[part] = value
    return found
