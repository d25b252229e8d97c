"""The data of a whole federation: loaded, shared out, and handed to clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import Arrays, DataSpec
from fl_lightning.data.augmentation import build_augmentation
from fl_lightning.data.cache import content_hash, load
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.listed import ListedPartition
from fl_lightning.data.partitions import Partition
from fl_lightning.data.population import LISTED, LazyClients, Population
from fl_lightning.data.shifts import KEY as SHIFT
from fl_lightning.data.shifts import Shift
from fl_lightning.data.splits import ClientIndices, from_file, holdout, matched, server_only
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError, own_code, require
from fl_lightning.seeding import isolated_streams, numpy_generator


@dataclass(eq=False)
class FederatedData:
    """The data of a federation: one data set, shared out among clients.

    Who holds what depends on `dataset`, `partition`, `num_clients`, `split`, the two fractions and the seed, and on
    nothing else, so that every method of a comparison sees the same clients.

    Args:
        dataset: the data set.
        partition: how its samples are shared out among clients.
        num_clients: number of clients K.
        split: where test samples come from. ``holdout``: official parts merged, then each client's samples are cut at
            random; ``matched``: official test samples in each client's own class mix; ``global``: the official test
            part stays on the server and clients have none; ``file``: as the partition's file lists them.
        test_fraction: each client's share of test samples under ``holdout``, from 0 to below 1.
        validation_fraction: share cut from each client's training part for validation, from 0 to below 1.
        batch_size: samples in a mini-batch.
        drop_last: drop a smaller last mini-batch, but never a client's only one. (One of a single sample is
            dropped, too, where the model has batch norm.)
        evaluate_on: ``test``; or ``validation``, to choose hyperparameters: every accuracy of the run is then one on
            the validation parts, at which no method looks, and the test parts are not looked at.
        shift: what makes clients' samples look, or mean, something else; null for nothing.
        augmentation: transforms of training images, one after another: classes of torchvision.transforms.v2 (class_path
            and init_args, or names alone, e.g. ``[RandomHorizontalFlip]``), drawn anew for every image of every local
            mini-batch. Evaluations and prototypes see images as they are.
        cache: folder for decoded data sets; by default ``$FL_LIGHTNING_CACHE``, else ``~/.cache/fl-lightning/arrays``.
    """

    dataset: Dataset
    partition: Partition
    num_clients: int = 20
    split: Literal["holdout", "matched", "global", "file"] = "holdout"
    test_fraction: float = 0.25
    validation_fraction: float = 0.0
    batch_size: int = 10
    drop_last: bool = False
    evaluate_on: Literal["test", "validation"] = "test"
    shift: Shift | None = None
    augmentation: list[Any] | None = None
    cache: str | None = None

    arrays: Arrays = field(init=False, repr=False)
    """The decoded data set."""
    store: TensorStore = field(init=False, repr=False)
    """The same on the training device."""
    clients: Sequence[ClientData] = field(init=False, repr=False)
    """Each client's samples; those of a `Population` are drawn when they are asked for."""
    num_train: np.ndarray = field(init=False, repr=False)
    """Training samples of each client, int64 [K]; likewise `num_validation` and `num_test`.

    Under `evaluate_on` ``validation`` what is called test here, `server_test` too, is the validation part.
    """
    num_validation: np.ndarray = field(init=False, repr=False)
    num_test: np.ndarray = field(init=False, repr=False)
    server_test: Tensor = field(init=False, repr=False)
    """Indices of the union of all clients' test parts, or of the official test part under ``global``; of a `Population`
    the whole of what its test parts are drawn from."""
    validation_union: Tensor = field(init=False, repr=False)
    """Indices of the union of all clients' validation parts."""
    partition_hash: str = field(init=False, repr=False)
    """SHA-256 over who holds what."""
    former_hash: str = field(init=False, repr=False)
    """The same as it was once taken, which runs of then have in their checkpoints: another of a `Population` alone."""

    def __post_init__(self) -> None:
        fractions = {"test_fraction": self.test_fraction, "validation_fraction": self.validation_fraction}
        for name, value in fractions.items():
            require(0 <= value < 1, f"data.{name}", "must be from 0 to below 1", value)
        require(self.num_clients >= 1, "data.num_clients", "must be at least 1", self.num_clients)
        require(self.batch_size >= 1, "data.batch_size", "must be at least 1", self.batch_size)
        known = self.split in ("holdout", "matched", "global", "file")
        require(known, "data.split", "must be holdout, matched, global or file", self.split)
        known = self.evaluate_on in ("test", "validation")
        require(known, "data.evaluate_on", "must be test or validation", self.evaluate_on)
        listed = self.split == "global" and isinstance(self.partition, ListedPartition)
        cut = self.evaluate_on == "test" or self.validation_fraction > 0 or self.split == "file" or listed
        require(cut, "data.evaluate_on", "validation needs data.validation_fraction > 0", self.evaluate_on)
        require(self.cache != "", "data.cache", "must be a folder, or null for the usual one", self.cache)
        self._augment = build_augmentation(self.augmentation)
        self._held: Sequence[ClientIndices] = ()  # all parts, those that are laid aside, too; empty of a Population
        self._seed: int | None = None

    @property
    def spec(self) -> DataSpec:
        """Shape of a sample, number of classes and size of the vocabulary."""
        return self.arrays.spec

    @property
    def content_hash(self) -> str:
        """SHA-256 over the data set: samples, labels, classes, scale, official part and groups."""
        return self.arrays.digest

    @property
    def samples_hash(self) -> str:
        """The same of samples and labels as clients see them, after a shift."""
        return self.content_hash if self.shift is None else content_hash(self.arrays)

    @property
    def local_test(self) -> bool:
        """Whether clients have test samples of their own."""
        return self.split != "global"

    def setup(self, seed: int) -> None:
        """Load the data set and share it out; a second call with the same seed does nothing.

        Raises:
            ConfigError: if the data set is missing or broken, or cannot be shared out that way.
        """
        if self._seed == seed:
            return
        if self._seed is None:
            self._decoded = self.arrays = load(self.dataset, None if self.cache is None else Path(self.cache))
            if self._augment is not None:
                self._augment.check(self.arrays.x[:3])  # an odd number: what alternates shows
            self.store = TensorStore(self.arrays)
        if isinstance(self.partition, Population):
            self._populate(self.partition, seed)
        else:
            self._deal(seed)
        if self._augment is not None:
            self._augment.check_scale(self.arrays.x)  # as a shift has left them
        some = self.evaluate_on == "test" or bool(self.num_test.any())
        require(
            some, "data.evaluate_on", f"no client has a validation sample: {self.more_validation}", self.evaluate_on
        )
        self._seed = seed

    @property
    def more_validation(self) -> str:
        """What gives clients validation samples."""
        if isinstance(self.partition, ListedPartition) and self.split in ("file", "global"):
            return "list some under validation"
        if self.validation_fraction == 0:
            return "set data.validation_fraction above 0"
        larger = "take a larger data.validation_fraction"
        return f"{larger}, or {'partition.samples' if isinstance(self.partition, Population) else 'fewer clients'}"

    def _deal(self, seed: int) -> None:
        """Set up clients that share the data set out among them."""
        with isolated_streams(seed, "partition"):  # a rule of the user's own may draw from the global streams
            parts = self._split(seed)
        if self.shift is not None:
            with isolated_streams(seed, "shift"):
                self.arrays = shifted(self.shift, self._decoded, parts, seed)
            self.store = TensorStore(self.arrays)
        for client, part in enumerate(parts):
            if len(part.train) == 0:
                listed = isinstance(self.partition, ListedPartition)
                cure = "list some" if listed else "use fewer clients or, with Dirichlet, min_samples of 1 or more"
                rule = f"{type(self.partition).__name__} leaves client {client} without a training sample; {cure}"
                raise ConfigError("data.partition", rule)
        self._held = parts
        if self.evaluate_on == "validation":  # the test parts are laid aside, so that nothing is chosen on them
            parts = [ClientIndices(part.train, part.validation, part.validation) for part in parts]
        self.clients = [self._client(client, part) for client, part in enumerate(parts)]
        self.num_train, self.num_validation, self.num_test = (
            np.array([len(own) for own in parts_of_one_kind])
            for parts_of_one_kind in zip(*((part.train, part.validation, part.test) for part in parts), strict=True)
        )
        if self.local_test or self.evaluate_on == "validation":
            self.server_test = torch.from_numpy(np.sort(np.concatenate([part.test for part in parts])))
        else:
            self.server_test = torch.arange(self.arrays.num_train, len(self.arrays.y))
        self.validation_union = torch.from_numpy(np.sort(np.concatenate([part.validation for part in parts])))
        self.partition_hash = self.former_hash = _hash(parts, self.server_test)

    def _populate(self, population: Population, seed: int) -> None:
        """Set up clients of which nothing is computed before they are looked at."""
        require(self.shift is None, "data.shift", "must be null where data.partition is Population: clients overlap")
        draw = population.drawn(self.arrays, seed, self.split, self.test_fraction, self.validation_fraction)
        (_, validation, test), sizes = draw.pools, list(draw.sizes)
        tests_validation = self.evaluate_on == "validation"
        if tests_validation:
            test, sizes[2] = validation, sizes[1]

        def make(client: int) -> ClientData:
            own = draw(client)
            return self._client(client, replace(own, test=own.validation) if tests_validation else own)

        self.clients = LazyClients(make, self.num_clients)
        self.num_train, self.num_validation, self.num_test = (np.broadcast_to(n, self.num_clients) for n in sizes)
        official = np.arange(self.arrays.num_train, len(self.arrays.y))
        self.server_test = torch.from_numpy(test if self.local_test or tests_validation else official)
        self.validation_union = torch.from_numpy(validation)
        self.partition_hash = draw.hash(self.num_clients)
        self.former_hash = draw.hash(self.num_clients, labels=False)

    def _client(self, client: int, part: ClientIndices) -> ClientData:
        # Where clients are tested on their validation parts, no method may look at those, as FedFomo would.
        known = part.validation[: 0 if self.evaluate_on == "validation" else None]
        parts = part.train, known, part.test
        num_classes, size = len(self.arrays.classes), self.batch_size
        return ClientData(client, self.store, num_classes, *parts, batch_size=size, augment=self._augment)

    def _split(self, seed: int) -> list[ClientIndices]:
        if self.split == "holdout":
            return holdout(
                self.partition, self._decoded, self.num_clients, seed, self.test_fraction, self.validation_fraction
            )
        split = {"matched": matched, "global": server_only, "file": from_file}[self.split]
        return split(self.partition, self._decoded, self.num_clients, seed, self.validation_fraction)

    @property
    def overlaps(self) -> bool:
        """Whether clients may hold the same samples, so that nobody lists them."""
        return isinstance(self.clients, LazyClients)

    def class_counts(self) -> np.ndarray:
        """Training samples of each client and class, int64 [K, C]; of a `Population` those of the first 1,000."""
        shown = self.clients[:LISTED] if self.overlaps else self.clients
        return np.stack([client.class_counts.numpy() for client in shown])

    @property
    def only_tested(self) -> list[str]:
        """Classes of samples in the official test part that its training part has no sample of."""
        y, size = self._decoded.y, self._decoded.num_train
        new = {*y[size:].unique().tolist()} - {*y[:size].unique().tolist()}
        return [self.arrays.classes[label] for label in sorted(new)]

    @property
    def left_out(self) -> int:
        """Samples that nobody holds, neither a client, be it in a part that is laid aside, nor the server."""
        if self.overlaps:
            return 0  # any of them may be drawn
        held = sum(len(own.train) + len(own.validation) + len(own.test) for own in self._held)
        official = 0 if self.local_test else len(self.arrays.y) - self.arrays.num_train
        return len(self.arrays.y) - held - official

    def title(self, seed: int) -> str:
        """What a picture of who holds what is called: the data set, the partition with its numbers, and the seed."""
        own = vars(self.partition).items()
        numbers = [f"{k}={v}" for k, v in own if type(v) in (int, float) and not k.startswith("_")]
        partition = type(self.partition).__name__ + (f"({', '.join(numbers)})" if numbers else "")
        inside = [type(value).__name__ for value in vars(self.dataset).values() if isinstance(value, Dataset)]
        dataset = type(self.dataset).__name__ + (f"({', '.join(inside)})" if inside else "")
        lazy = isinstance(self.partition, Population)
        shown = f" ({LISTED:,} shown)" if lazy and self.num_clients > LISTED else ""
        return f"{dataset}, {partition}, {self.num_clients} clients{shown}, seed {seed}"

    def partition_record(self) -> dict[str, Any]:
        """Who holds what, in plain lists and numbers, for ``partition.json``; not of a `Population`.

        Test parts are listed where they are laid aside, too, so that the file serves for either `evaluate_on`; the hash
        is over what is trained and tested on.
        """
        return {
            "hash": self.partition_hash,
            "samples": self.samples_hash,
            "labels": self._decoded.labels_hash,
            "dataset": type(self.dataset).__name__,
            "partition": type(self.partition).__name__,
            "split": self.split,
            "evaluate_on": self.evaluate_on,
            "seed": self._seed,
            "classes": list(self.arrays.classes),
            "num_clients": self.num_clients,
            "left_out": self.left_out,
            "class_counts": self.class_counts().tolist(),
            **self._group_record(),
            "clients": [
                {"train": own.train.tolist(), "validation": own.validation.tolist(), "test": own.test.tolist()}
                for own in self._held
            ],
        }

    def _group_record(self) -> dict[str, Any]:
        """The groups of each client, by name, where none is torn apart."""
        if self._decoded.groups is None or self.overlaps:
            return {}
        groups, names = self._decoded.groups.numpy(), self._decoded.group_names
        own = [np.unique(groups[np.concatenate([part.train, part.validation, part.test])]) for part in self._held]
        if len(np.unique(np.concatenate(own))) < sum(map(len, own)):
            return {}
        return {"groups": [[names[group] if names else str(group) for group in each] for each in own]}


def is_recorded(record: Mapping[str, Any], data: FederatedData) -> bool:
    """Whether a `partition.json` is of such clients and samples; runs of earlier versions wrote down no samples."""
    same = record.get("hash") in (data.partition_hash, data.former_hash)
    return same and record.get("samples", data.samples_hash) == data.samples_hash


def shifted(shift: Shift, arrays: Arrays, parts: Sequence[ClientIndices], seed: int) -> Arrays:
    """The data set with every client's samples as it sees them.

    Args:
        shift: what changes them.
        arrays: the data set.
        parts: who holds what.
        seed: the run's; a client's own stream comes from it.

    Raises:
        ConfigError: if what comes out are no samples as the data set's: of another shape, type or range.
    """
    x, y = arrays.x.clone(), arrays.y.clone()
    for client, part in enumerate(parts):
        own = torch.from_numpy(np.concatenate([part.train, part.validation, part.test]))
        rng = numpy_generator(seed, "shift", client=client)
        with own_code(SHIFT, shift, "apply()"):
            new_x, new_y = shift.apply(x[own], y[own], client, len(parts), len(arrays.classes), rng)
            for name, values, new in (("x", x, new_x), ("y", y, new_y)):
                given, got = (values.dtype, len(own), *values.shape[1:]), (new.dtype, *new.shape)
                rule = f"{type(shift).__name__}.apply() must give {name} the type and shape that it had, {given}"
                require(got == given, SHIFT, rule, got)
                values[own] = new
    made = replace(arrays, x=x, y=y)
    try:
        made.validate(type(shift).__name__)
    except ConfigError as error:
        raise error.at(SHIFT) from error
    return made


def _hash(parts: list[ClientIndices], server_test: Tensor) -> str:
    """SHA-256 over all index lists and their lengths."""
    digest = hashlib.sha256()
    for indices in [*(a for part in parts for a in (part.train, part.validation, part.test)), server_test.numpy()]:
        digest.update(len(indices).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(indices, dtype="<i8").tobytes())
    return digest.hexdigest()
