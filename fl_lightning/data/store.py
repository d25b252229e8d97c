"""The data set on one device, and each client's view of it: a batch is an index and a normalise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import Arrays
from fl_lightning.seeding import derive_seed

_LARGEST_BATCH, _SMALLEST_BATCH = 512, 16
_VALUES = 1 << 18  # of inputs a batch on a CPU


class TensorStore:
    """Inputs and labels of the whole data set, once, on one device.

    Args:
        arrays: the decoded data set.
        channels_last: whether 4-d outputs are laid out channels last, which convolutions under mixed precision like.
    """

    def __init__(self, arrays: Arrays, channels_last: bool = False) -> None:
        self.x = arrays.x
        self.y = arrays.y
        self.channels_last = channels_last
        self._scale: Tensor | None = None
        self._shift: Tensor | None = None
        self.target: torch.device | None = None
        self.dtype = torch.float32
        if self.x.dtype == torch.uint8:
            channels = self.x.shape[1]
            mean = torch.tensor(arrays.mean or (0.0,) * channels, dtype=torch.float64)
            std = torch.tensor(arrays.std or (1.0,) * channels, dtype=torch.float64)
            self._scale = (1 / (255 * std)).float().view(1, channels, 1, 1)
            self._shift = (-mean / std).float().view(1, channels, 1, 1)

    def pixel_mean_and_std(self) -> tuple[Tensor, Tensor]:
        """What takes a batch of images back to [0, 1], as ``x * std + mean``: [1, C, 1, 1] each.

        Inputs that come as floats are given as they are: mean 0, std 1.
        """
        if self._scale is None or self._shift is None:
            mean = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device=self.device)
            return mean, torch.ones_like(mean)
        std = 1 / (255 * self._scale)
        return -self._shift * std, std

    def bounds(self) -> tuple[Tensor, Tensor]:
        """What black and white are in a batch of images: [1, C, 1, 1] each; of floats their least and largest value."""
        if self._scale is None:
            return self.x.min().view(1, 1, 1, 1), self.x.max().view(1, 1, 1, 1)
        mean, std = self.pixel_mean_and_std()
        return (0 - mean) / std, (1 - mean) / std

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """What normalises a batch of images as they are stored, ``x * scale + shift``: [1, C, 1, 1] each.

        Inputs that come as floats or tokens are not normalised here: 1 and 0.
        """
        if self._scale is None or self._shift is None:
            return torch.ones(1), torch.zeros(1)
        return self._scale, self._shift

    @property
    def device(self) -> torch.device:
        """Where the data are."""
        return self.x.device

    @property
    def num_bytes(self) -> int:
        """Size of inputs and labels in bytes."""
        return self.x.nbytes + self.y.nbytes

    @property
    def fitting_batch(self) -> int:
        """Samples a batch of a pass without gradients: 512, on a CPU fewer of large inputs.

        256 of 28×28, 64 of 3×32×32: there a batch of 512 takes a third longer a sample, because what its convolutions
        make is too large for the allocator to keep from batch to batch.
        """
        device = self.target or self.device
        if device.type != "cpu" or not len(self.x):
            return _LARGEST_BATCH
        fitting = max(_VALUES // max(self.x[0].numel(), 1), 1)
        return min(max(1 << fitting.bit_length() - 1, _SMALLEST_BATCH), _LARGEST_BATCH)

    def fits(self, device: torch.device | str, share: float = 0.5) -> bool:
        """Whether the data take at most `share` of what is free on a CUDA device; True for any other device."""
        device = torch.device(device)
        return device.type != "cuda" or self.num_bytes <= share * torch.cuda.mem_get_info(device)[0]

    def to(self, device: torch.device | str) -> TensorStore:
        """Move the data to a device, in place, and return self."""
        self.x, self.y = self.x.to(device), self.y.to(device)
        if self._scale is not None and self._shift is not None:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        return self

    def serve(self, device: torch.device | str) -> TensorStore:
        """Give batches on `device`: the data move there once if they fit, else batch by batch. Returns self."""
        self.target = torch.device(device)
        return self.to(device) if self.fits(device) else self

    def gather(self, indices: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Pick samples and normalise them.

        Args:
            indices: int64 [B], on any device.
            augment: from inputs as they are stored to inputs of the same shape and type, before they are normalised.

        Returns:
            Inputs [B, ...] (images: float32, ``(x / 255 - mean) / std``; tokens and floats as they are) and labels [B].
        """
        indices = indices.to(self.device, non_blocking=True)
        x = self.x.index_select(0, indices)
        if augment is not None:
            x = augment(x)
        if self._scale is not None and self._shift is not None:
            x = x.float().mul_(self._scale).add_(self._shift)
        if x.is_floating_point():
            x = x.to(self.dtype)
        if self.channels_last and x.ndim == 4:
            # Last, on purpose: torch permutes float32 four times faster than uint8 (160 CIFAR images: 0.3 against 1.3
            # ms).
            x = x.contiguous(memory_format=torch.channels_last)
        y = self.y.index_select(0, indices)
        if self.target is not None and self.target != self.device:
            x, y = x.to(self.target, non_blocking=True), y.to(self.target, non_blocking=True)
        return x, y


class Bundle(NamedTuple):
    """Several consecutive local mini-batches, gathered and normalised at once.

    Args:
        x: inputs [B1 + B2 + …, ...].
        y: labels [B1 + B2 + …].
        batch_size: size of each mini-batch, of which the last one may be smaller; or all their sizes.
        is_last: whether none follows in its pass.
        rows: int64, on the CPU: each sample's place in the training part; None where samples do not come as they are.
        num_rows: samples in the training part.
        version: of `x`, as torch counts writes.
    """

    x: Tensor
    y: Tensor
    batch_size: int | list[int]
    is_last: bool = False
    rows: Tensor | None = None
    num_rows: int = 0
    version: int = 0

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches in order, as views."""
        return zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)

    def as_batch(self) -> Bundle | Batch:
        """The same, as ``[x, y]`` where it holds one mini-batch."""
        return Batch(self) if len(self.y.split(self.batch_size)) == 1 else self

    def step_rows(self) -> Sequence[Tensor | None]:
        """The places of each mini-batch's samples; None where they are not known, or a callback has changed inputs."""
        if self.rows is None or self.x._version != self.version:
            return [None] * len(self.y.split(self.batch_size))
        return self.rows.split(self.batch_size)


class Batch(list[Tensor]):
    """A bundle of one mini-batch, as callbacks of Lightning's know a batch: ``[x, y]``.

    Args:
        bundle: the bundle.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__([bundle.x, bundle.y])
        self.is_last, self.num_rows = bundle.is_last, bundle.num_rows
        self._bundle = bundle

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The one mini-batch, as a callback left it."""
        yield self[0], self[1]

    def step_rows(self) -> Sequence[Tensor | None]:
        """The places of its samples; None where they are not known, or a callback has changed inputs."""
        return self._bundle.step_rows() if self[0] is self._bundle.x else [None]


class Epoch(Sequence[Bundle]):
    """The bundles of one shuffled pass over a client's training samples; gathered when they are asked for.

    Args:
        store: the data.
        order: int64 indices into the store, in the order of the pass.
        batch_size: size of a mini-batch.
        steps_per_bundle: mini-batches in a bundle.
        augment: from a mini-batch's inputs as they are stored, and a seed, to the augmented ones; None for as they are.
        seed: the pass's seed; each mini-batch has one of its own.
        rows: int64, on the CPU, the places of `order` in the training part; None if nobody asks for them.
        num_rows: samples in the training part.
    """

    def __init__(
        self,
        store: TensorStore,
        order: Tensor,
        batch_size: int,
        steps_per_bundle: int,
        augment: Callable[[Tensor, int], Tensor] | None = None,
        seed: int = 0,
        rows: Tensor | None = None,
        num_rows: int = 0,
    ) -> None:
        self._store = store
        self.order = order
        size = max(min(batch_size * steps_per_bundle, len(order)), 1)
        self._chunks = order.split(size) if len(order) else ()
        self._rows = rows.split(size) if rows is not None and augment is None else None
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._steps_per_bundle = steps_per_bundle
        self._augment = augment
        self._seed = seed

    @property
    def store(self) -> TensorStore:
        """The data."""
        return self._store

    @property
    def augments(self) -> bool:
        """Whether mini-batches are changed before they are normalised."""
        return self._augment is not None

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> Bundle: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Bundle]: ...
    def __getitem__(self, index: int | slice) -> Bundle | Sequence[Bundle]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        augment = None if self._augment is None else partial(self._augmented, index)
        is_last = index == len(self) - 1
        x, y = self._store.gather(self._chunks[index], augment)
        if self._rows is None or x.is_inference():
            return Bundle(x, y, self._sizes(index), is_last)
        return Bundle(x, y, self._sizes(index), is_last, self._rows[index], self._num_rows, x._version)

    def _sizes(self, bundle: int) -> int | list[int]:
        """Sizes of a bundle's mini-batches."""
        return self._batch_size

    def _augmented(self, bundle: int, x: Tensor) -> Tensor:
        """Augment mini-batch by mini-batch, so that it does not matter how many are gathered at once."""
        assert self._augment is not None
        batches = enumerate(x.split(self._sizes(bundle)), bundle * self._steps_per_bundle)
        seeded = [(batch, derive_seed(self._seed, "augment", step)) for step, batch in batches if len(batch)]
        return torch.cat([self._augment(*own) for own in seeded]) if seeded else x


class PoissonEpoch(Epoch):
    """The bundles of as many mini-batches as a pass has, which take each training sample by a chance of its own.

    A mini-batch may be empty, and a sample may be in several or in none: what record-level privacy accounts for.

    Args:
        store: the data.
        train: [n] int64 indices of the training part.
        batch_size: samples that a mini-batch holds in the mean; all of them, if there are fewer.
        steps_per_bundle: mini-batches in a bundle.
        augment: as an `Epoch` has it.
        seed: of the draws and of the augmentation.
        limit: only so many of the mini-batches, the first ones; None takes all.
    """

    def __init__(
        self,
        store: TensorStore,
        train: Tensor,
        batch_size: int,
        steps_per_bundle: int,
        augment: Callable[[Tensor, int], Tensor] | None = None,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        num_steps, rate = -(-len(train) // batch_size), min(1.0, batch_size / len(train))
        draws = torch.rand(num_steps, len(train), generator=torch.Generator().manual_seed(seed)) < rate
        drawn = [train[taken].to(store.device, non_blocking=True) for taken in draws[:limit]]
        together = [drawn[start : start + steps_per_bundle] for start in range(0, len(drawn), steps_per_bundle)]
        super().__init__(store, train[:0], batch_size, steps_per_bundle, augment, seed)
        self._chunks = tuple(torch.cat(own) for own in together)
        self._batch_sizes = [[len(batch) for batch in own] for own in together]

    def _sizes(self, bundle: int) -> list[int]:
        return self._batch_sizes[bundle]


class ClientData:
    """One client's samples.

    Args:
        client: 0-based index of the client.
        store: the whole data set; the client holds indices into it.
        num_classes: number of classes C.
        train: indices of the training part, int64.
        validation: indices of the validation part, int64; may be empty.
        test: indices of the client's own test part, int64; may be empty.
        batch_size: samples in a mini-batch of the federation, for methods that draw some of their own.
        augment: what local fits do to mini-batches of the training part (see `Epoch`); nothing else sees it.
    """

    def __init__(
        self,
        client: int,
        store: TensorStore,
        num_classes: int,
        train: np.ndarray,
        validation: np.ndarray,
        test: np.ndarray,
        batch_size: int = 10,
        augment: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self.client = client
        self.batch_size = batch_size
        self.store = store
        self.num_classes = num_classes
        self.train = torch.from_numpy(train)
        self.validation = torch.from_numpy(validation)
        self.test = torch.from_numpy(test)
        self.augment = augment
        self.class_counts = torch.bincount(store.y.cpu()[self.train], minlength=num_classes)
        """Training samples of each class, int64 [C]."""

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        return self.train.shape[0]

    @property
    def num_test(self) -> int:
        """Number of test samples of its own."""
        return self.test.shape[0]

    @property
    def held_classes(self) -> Tensor:
        """Which classes occur in the training part, bool [C]."""
        return self.class_counts > 0

    def num_steps(self, batch_size: int, drop_last: bool = False, drop_single: bool = False) -> int:
        """Number of mini-batches in one epoch; the rules are those of `bundles`."""
        return -(-_num_used(self.num_train, batch_size, drop_last, drop_single) // batch_size)

    def bundles(
        self,
        epoch_seed: int,
        batch_size: int,
        steps_per_bundle: int = 1,
        drop_last: bool = False,
        drop_single: bool = False,
        share: float = 1.0,
        limit: int | None = None,
    ) -> Epoch:
        """One epoch over the training part in an order, and augmented in a way, that depends on `epoch_seed` only.

        Every sample is used and a smaller last batch is a batch, unless:

        Args:
            epoch_seed: seed of the shuffle and of the augmentation.
            batch_size: samples in a mini-batch, at least 1.
            steps_per_bundle: mini-batches gathered at once, at least 1; it changes no mini-batch.
            drop_last: drop a smaller last batch, but never the client's only one.
            drop_single: drop a last batch of one sample (batch norm cannot train on it), but never the client's only
                one.
            share: take only so much of the training part, in (0, 1], drawn at random; at least one sample.
            limit: take only so many mini-batches, the first ones; None takes all.

        Returns:
            The bundles; a sequence that gathers each one when it is asked for.
        """
        order = torch.randperm(self.num_train, generator=torch.Generator().manual_seed(epoch_seed))
        taken = self.num_train if share == 1 else max(1, round(share * self.num_train))
        used = _num_used(taken, batch_size, drop_last, drop_single)
        rows = order[: used if limit is None else min(used, limit * batch_size)]
        own = self.store, self.train[rows].to(self.store.device, non_blocking=True), batch_size, steps_per_bundle
        return Epoch(*own, self.augment, epoch_seed, rows, self.num_train)

    def poisson_bundles(
        self, epoch_seed: int, batch_size: int, steps_per_bundle: int = 1, limit: int | None = None
    ) -> PoissonEpoch:
        """As many mini-batches as `bundles` gives, each of samples taken by chance (see `PoissonEpoch`).

        Args:
            epoch_seed: seed of the draws and of the augmentation.
            batch_size: samples in a mini-batch in the mean, at least 1.
            steps_per_bundle: mini-batches gathered at once, at least 1; it changes no mini-batch.
            limit: only so many of them, the first ones; None takes all.
        """
        return PoissonEpoch(self.store, self.train, batch_size, steps_per_bundle, self.augment, epoch_seed, limit)

    def batches(
        self, split: Literal["train", "validation", "test"], batch_size: int = 512
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of one part, in fixed order and as they are; nothing where the part is empty."""
        indices: Tensor = getattr(self, split)
        for start in range(0, len(indices), batch_size):
            yield self.store.gather(indices[start : start + batch_size])

    def passes(self, split: Literal["train", "validation", "test"]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same in batches that suit the device, for passes that draw nothing."""
        return self.batches(split, self.store.fitting_batch)


def _num_used(samples: int, batch_size: int, drop_last: bool, drop_single: bool) -> int:
    """How many of so many samples an epoch uses."""
    full, rest = divmod(samples, batch_size)
    dropped = full > 0 and (drop_last or (drop_single and rest == 1))
    return full * batch_size if dropped else samples
