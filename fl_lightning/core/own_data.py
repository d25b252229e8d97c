"""A client's own data, as its method sees them in one receive, send or adaptation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.core.devices import Part
from fl_lightning.core.freezing import training
from fl_lightning.core.host import Collected
from fl_lightning.core.precision import widened
from fl_lightning.core.step import Bench, Step


class BoundData:
    """The client's samples together with its method and what steps stand on.

    Args:
        source: the client's samples (`data/store.py`).
        bench: makes what steps outside the fit have in common; called if it is needed.
        drop_last: whether a smaller last mini-batch is dropped.
    """

    def __init__(self, source: Any, bench: Callable[[], Bench], drop_last: bool = False) -> None:
        self.client: int = source.client
        self.num_train: int = source.num_train
        self.class_counts: Tensor = source.class_counts
        self.held_classes: Tensor = source.held_classes
        self._source = source
        self._make_bench = bench
        self._drop_last = drop_last
        self._collected: Collected | None = None

    @cached_property
    def _bench(self) -> Bench:
        return self._make_bench()

    def batches(self, split: Literal["train", "validation"] = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of one part, in fixed order and as they are."""
        return self._source.batches(split)

    def steps(self, share: float = 1.0) -> Sequence[Step]:
        """Mini-batches of one shuffled pass over the training part, as steps outside the fit.

        Drawn from the global stream, which the runner seeds for every receive, fit and adaptation. The sequence may be
        gone through again: it stays the same.

        Args:
            share: take only so much of the training part, in (0, 1], drawn at random.
        """
        seed = int(torch.randint(2**62, ()))
        single = bool(self._bench.layers)
        size = self._source.batch_size
        bundles = self._source.bundles(seed, size, drop_last=self._drop_last, drop_single=single, share=share)
        return _Steps(self._bench, bundles)

    def collected(self) -> Collected:
        """The whole training part through the method's `network`, in eval mode; once for all that ask."""
        if self._collected is None:
            method = self._bench.method
            with training(method, False), torch.no_grad():
                network = method.network()
                rows = [(network.embed(x), y) for x, y in self._source.passes("train")]
                z = torch.cat([z for z, _ in rows])
                self._collected = Collected(z, network.head(z), torch.cat([y for _, y in rows]))
        return self._collected

    def risk(self) -> Tensor:
        """The model's mean cross-entropy on the validation part, or where there is none on the training part."""
        method = self._bench.method
        part: Literal["train", "validation"] = "validation"
        if next(self.batches("validation"), None) is None:
            part = "train"
        with training(method, False), torch.no_grad():
            losses = [
                F.cross_entropy(widened(method.model(x)), y, reduction="none") for x, y in self._source.passes(part)
            ]
        return torch.cat(losses).mean()

    def pixel_mean_and_std(self) -> tuple[Tensor, Tensor]:
        """What takes a batch of images back to [0, 1], as ``x * std + mean``: [1, C, 1, 1] each.

        Inputs that come as floats are taken as they are: mean 0, std 1.
        """
        return self._source.store.pixel_mean_and_std()

    @property
    def are_floats(self) -> bool:
        """Whether inputs come as floats, of any range, and not as bytes."""
        return self._source.store.x.is_floating_point()


class _Steps(Sequence[Step]):
    """Steps that are gathered when they are asked for."""

    def __init__(self, bench: Bench, bundles: Sequence[Any]) -> None:
        self._bench = bench
        self._bundles = bundles

    def __len__(self) -> int:
        return len(self._bundles)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        bundle = self._bundles[index]
        return Step(self._bench, Part.whole(bundle.x, bundle.y))
