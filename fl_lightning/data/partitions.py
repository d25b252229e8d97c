"""Who holds which samples: the ways to share a data set out among clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dealing import (
    by_class,
    deal,
    draw_classes,
    draw_classes_in_turn,
    joined,
    largest_remainders,
    present_classes,
    require_class_size,
    require_enough_samples,
    without_empty,
)
from fl_lightning.errors import ConfigError, require

KEY = "data.partition"
MAX_DRAWS = 10_000


class Partition(ABC):
    """A rule that shares samples out among clients by their labels."""

    paper: str = ""
    """One line saying whom to cite."""

    @abstractmethod
    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share the samples out.

        Args:
            labels: int64 [N], in [0, num_classes); they are the run's own, and cannot be written to.
            num_clients: number of clients K.
            num_classes: number of classes C.
            rng: the only source of randomness.

        Returns:
            For each client its indices into `labels`, int64, sorted; no index occurs twice.

        Raises:
            ConfigError: if these labels cannot be shared out that way.
        """

    def share(self, arrays: Arrays, num_samples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The same for a rule that looks at more than labels; by default `assign`.

        Args:
            arrays: the data set.
            num_samples: the first so many samples are shared out.
            num_clients: number of clients K.
            rng: the only source of randomness.
        """
        return self.assign(_labels(arrays)[:num_samples], num_clients, len(arrays.classes), rng)

    def share_tests(self, arrays: Arrays, parts: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Share official test samples out for the split ``matched``; by default `match`, by classes.

        Args:
            arrays: the data set.
            parts: each client's training samples.
            rng: the only source of randomness.

        Returns:
            For each client its indices into the test part.
        """
        labels, num_classes = _labels(arrays), len(arrays.classes)
        counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
        return self.match(labels[arrays.num_train :], counts, rng)

    def match(self, test_labels: np.ndarray, train_counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Share official test samples out so that each client's follow its training samples.

        Each class's shuffled test samples are dealt in proportion to the clients' training samples of that class
        (largest remainders): of a class that somebody holds every test sample is used once, of other classes none.

        Args:
            test_labels: int64 [M], which cannot be written to.
            train_counts: training samples of each client and class, int64 [K, C].
            rng: the only source of randomness.

        Returns:
            For each client its indices into `test_labels`, int64, sorted; no index occurs twice.

        Raises:
            ConfigError: if these labels cannot be shared out that way.
        """
        num_clients, num_classes = train_counts.shape
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for indices, held in zip(by_class(test_labels, num_classes, rng), train_counts.T, strict=True):
            if held.sum() > 0:
                deal(indices, largest_remainders(len(indices), held), parts)
        return joined(parts)


def _labels(arrays: Arrays) -> np.ndarray:
    """The labels [N] without a copy; they cannot be written to, for they are those that the run trains on."""
    labels = arrays.y.numpy()
    labels.flags.writeable = False
    return labels


class IID(Partition):
    """Shuffled and cut into equal parts: every client sees the same mix of classes."""

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share the samples out; sizes differ by at most one."""
        require_enough_samples(labels, num_clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), num_clients)]


class Dirichlet(Partition):
    """Each class is shared out in proportions drawn from a symmetric Dirichlet(β); small β means few classes a client.

    The draw is repeated until every client has `min_samples`. As in the public code of NIID-Bench and PFLlib, a client
    that already has its fair share N/K takes nothing of the classes that follow (`balance`).

    Args:
        beta: concentration β, > 0 and at most 1e9; 0.1 is strongly heterogeneous, 100 is nearly IID.
        min_samples: fewest samples a client may get, test part included where the split merges it.
        balance: whether a client with its fair share takes no more; this keeps clients' sizes near each other.
        fill_empty: whether a client that the draw left without a sample gets one from the client that has most, so that
            no draw is thrown away with `min_samples` 0. FedDW's public code gives it a copy of the set's first sample.
    """

    paper = (
        "Hsu et al., 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
    )

    def __init__(self, beta: float, min_samples: int = 10, balance: bool = True, fill_empty: bool = False) -> None:
        require(0 < beta <= 1e9, f"{KEY}.beta", "must be above 0, and at most 1e9, which is even shares", beta)
        require(min_samples >= 0, f"{KEY}.min_samples", "must be at least 0", min_samples)
        self.beta = beta
        self.min_samples = min_samples
        self.balance = balance
        self.fill_empty = fill_empty

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share every sample out.

        Raises:
            ConfigError: if there are too few samples for `min_samples`, or no draw of 10,000 gives them to every
                client.
        """
        require_enough_samples(labels, num_clients, at_least=int(self.fill_empty))
        if self.min_samples > 0:
            most = len(labels) // self.min_samples
            some = f"must be at most {most} with min_samples {self.min_samples}: there are {len(labels)} samples"
            require(num_clients <= len(labels), "data.num_clients", some, num_clients)
        require(
            num_clients * self.min_samples <= len(labels),
            f"{KEY}.min_samples",
            f"{num_clients} clients cannot have that many each of {len(labels)} samples; "
            f"at most {len(labels) // num_clients}",
            self.min_samples,
        )
        class_sizes = np.bincount(labels, minlength=num_classes)
        counts = self._draw_counts(class_sizes, num_clients, rng)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for indices, shares in zip(by_class(labels, num_classes, rng), counts.T, strict=True):
            deal(indices, shares, parts)
        return without_empty(joined(parts), rng) if self.fill_empty else joined(parts)

    def _draw_counts(self, class_sizes: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Counts [K, C] of the first draw in which every client has `min_samples`; only counts, many draws at once."""
        num_classes, num_samples = len(class_sizes), int(class_sizes.sum())
        at_once = int(np.clip(2**20 // (num_classes * num_clients), 1, 50))
        drawn = 0
        smallest = 0
        while drawn < MAX_DRAWS:
            proportions = rng.dirichlet(np.full(num_clients, self.beta), size=(at_once, num_classes))
            counts = np.zeros((at_once, num_clients, num_classes), dtype=np.int64)
            held = np.zeros((at_once, num_clients), dtype=np.int64)
            for c, size in enumerate(class_sizes):
                if size == 0:  # there may be nobody left who takes more
                    continue
                p = proportions[:, c]
                if self.balance:
                    open_ = held * num_clients < num_samples
                    p = p * open_
                    # All the mass may lie on clients that are full: then the others share equally.
                    p = np.where(p.sum(1, keepdims=True) > 0, p, open_)
                # The small number keeps a client with share 0 at 0 where the sum stops just below 1.
                edges = (np.cumsum(p / p.sum(1, keepdims=True), axis=1) * size + 1e-6).astype(np.int64)
                edges[:, -1] = size
                counts[:, :, c] = np.diff(edges, axis=1, prepend=0)
                held += counts[:, :, c]
            fewest = held.min(1)
            accepted = np.flatnonzero(fewest >= self.min_samples)
            if len(accepted):
                return counts[accepted[0]]
            smallest = max(smallest, int(fewest.max()))
            drawn += at_once
        raise ConfigError(
            f"{KEY}.min_samples",
            f"Dirichlet(beta={self.beta}) gave {num_clients} clients at least {self.min_samples} samples in none of "
            f"{drawn} draws (best: {smallest}); lower min_samples or num_clients, or raise beta",
        )


class ClassesPerClient(Partition):
    """Each client holds exactly so many classes, drawn at random ("pathological" heterogeneity).

    All samples of a class are shared out among its holders.

    Args:
        classes: distinct classes of each client, from 1 to C.
        balanced: whether the holders of a class get equal shares of it; otherwise the shares are random (uniform on the
            simplex, at least one sample each).
        even: whether every class is held by as nearly the same number of clients as can be. Otherwise client i holds
            class i mod C, and what else it holds is drawn whoever holds it, too: NIID-Bench's "#C".
    """

    paper = "McMahan et al., AISTATS 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data"

    def __init__(self, classes: int, balanced: bool = True, even: bool = True) -> None:
        require(classes >= 1, f"{KEY}.classes", "must be at least 1", classes)
        self.classes = classes
        self.balanced = balanced
        self.even = even

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share out every sample of every class that somebody holds.

        Raises:
            ConfigError: if there are fewer classes than `classes`, or a class has fewer samples than holders.
        """
        draw = draw_classes if self.even else draw_classes_in_turn
        held = draw(labels, num_clients, num_classes, self.classes, f"{KEY}.classes", rng)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for c, indices in enumerate(by_class(labels, num_classes, rng)):
            holders = rng.permutation(np.flatnonzero(held[:, c]))
            if len(holders) == 0:
                continue
            require_class_size(c, len(indices), len(holders), f"{KEY}.classes", self.classes)
            weights = np.ones(len(holders)) if self.balanced else rng.dirichlet(np.ones(len(holders)))
            shares = np.zeros(num_clients, dtype=np.int64)
            shares[holders] = 1 + largest_remainders(len(indices) - len(holders), weights)
            deal(indices, shares, parts)
        return joined(parts)


class Shards(Partition):
    """Shards of one size, the same number for every client: few classes a client, and equally many samples of each.

    With `distinct`, DRDFL's setting: each client holds `shards` different classes, every class is held by as nearly the
    same number of clients as can be, and one shard has the same number of samples for all classes and clients (the
    largest that works; samples beyond it are not used). Without, McMahan's: sorted by label, cut into K * shards pieces
    and dealt at random, so that a piece may span two classes and a client may hold several pieces of one; every sample
    is used.

    Args:
        shards: shards of each client; the number s of its classes where `distinct`.
        distinct: whether a client's shards are of different classes.
    """

    paper = "McMahan et al., AISTATS 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data"

    def __init__(self, shards: int, distinct: bool = True) -> None:
        require(shards >= 1, f"{KEY}.shards", "must be at least 1", shards)
        self.shards = shards
        self.distinct = distinct

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share shards out.

        Raises:
            ConfigError: if there are fewer classes than `shards` (`distinct`) or fewer samples than shards.
        """
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        if not self.distinct:
            total = num_clients * self.shards
            require(
                total <= len(labels),
                f"{KEY}.shards",
                f"{num_clients} clients need {total} shards but there are {len(labels)} samples; "
                f"at most {len(labels) // num_clients}",
                self.shards,
            )
            pieces = np.array_split(np.argsort(labels, kind="stable"), total)
            for position, piece in enumerate(rng.permutation(total)):
                parts[position // self.shards].append(pieces[piece])
            return joined(parts)

        held = draw_classes(labels, num_clients, num_classes, self.shards, f"{KEY}.shards", rng)
        holders = held.sum(0)
        sizes = np.bincount(labels, minlength=num_classes)
        for c in range(num_classes):
            require_class_size(c, int(sizes[c]), int(holders[c]), f"{KEY}.shards", self.shards)
        shard_size = int((sizes[holders > 0] // holders[holders > 0]).min())
        for c, indices in enumerate(by_class(labels, num_classes, rng)):
            deal(indices[: shard_size * holders[c]], held[:, c] * shard_size, parts)
        return joined(parts)


class NWayKShot(Partition):
    """FedProto's: about n classes a client and about k training samples of each.

    n_i is uniform in [max(2, n - std_n), min(C - 1, n + std_n)], k_i in [k - std_k + 1, k + std_k]; with a std of 0
    they are n and k. Client i's samples of a class are the slice that starts at i * stride of that class's training
    samples, and its test samples the slice of `test_shots` that starts at i * test_shots of the official test samples:
    no two clients share one. With ``slots: holder`` i is the client's rank among the holders of the class, so that a
    class need only be as large as its holders take, not as all clients could.

    Args:
        n: mean number of classes of a client.
        k: mean number of training samples of each held class.
        std_n: half width of the range of n_i.
        std_k: half width of the range of k_i.
        stride: distance between two clients' slices; at least k + std_k (under `tight` k + std_k - 2).
        test_shots: test samples of each held class under the split `matched` (FedProto's public code: 40 for MNIST, 15
            for FEMNIST and CIFAR-10).
        tight: whether k_i is uniform in [k - std_k + 1, k + std_k - 2], as the authors' code does for MNIST; k where
            that range is empty.
        slots: whose number starts a slice: the ``client``'s (the authors' code), or its rank among the ``holder``s.
    """

    paper = "Tan et al., AAAI 2022, FedProto: Federated Prototype Learning across Heterogeneous Clients"

    def __init__(
        self,
        n: int,
        k: int,
        std_n: int = 0,
        std_k: int = 0,
        stride: int = 110,
        test_shots: int = 40,
        tight: bool = False,
        slots: Literal["client", "holder"] = "client",
    ) -> None:
        require(n >= 1, f"{KEY}.n", "must be at least 1", n)
        require(k >= 1, f"{KEY}.k", "must be at least 1", k)
        require(std_n >= 0, f"{KEY}.std_n", "must be at least 0", std_n)
        require(0 <= std_k <= k, f"{KEY}.std_k", f"must be from 0 to k = {k}", std_k)
        require(test_shots >= 1, f"{KEY}.test_shots", "must be at least 1", test_shots)
        require(slots in ("client", "holder"), f"{KEY}.slots", "must be client or holder", slots)
        self.slots = slots
        self.n = n
        self.k = k
        self.std_n = std_n
        self.std_k = std_k
        self.stride = stride
        self.test_shots = test_shots
        self.tight = tight
        most = self.k_range()[1]
        require(
            stride >= most,
            f"{KEY}.stride",
            f"must be at least {most}, the most samples a client takes of a class",
            stride,
        )

    def n_range(self, num_classes: int) -> tuple[int, int]:
        """Fewest and most classes of a client, both inclusive."""
        if self.std_n == 0:
            return self.n, self.n
        low, high = max(2, self.n - self.std_n), min(num_classes - 1, self.n + self.std_n)
        return (low, high) if low <= high else (self.n, self.n)

    def k_range(self) -> tuple[int, int]:
        """Fewest and most training samples of a held class, both inclusive."""
        if self.std_k == 0:
            return self.k, self.k
        low, high = self.k - self.std_k + 1, self.k + self.std_k - (2 if self.tight else 0)
        return (low, high) if low <= high else (self.k, self.k)

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Draw n_i, k_i and the classes, and cut the slices.

        Raises:
            ConfigError: if there are fewer than n classes, or a class is too small for a client's slice.
        """
        present = present_classes(labels, num_classes, self.n, f"{KEY}.n")
        n_low, n_high = self.n_range(len(present))
        k_low, k_high = self.k_range()
        ways = rng.integers(n_low, n_high, size=num_clients, endpoint=True)
        shots = rng.integers(k_low, k_high, size=num_clients, endpoint=True)
        groups = by_class(labels, num_classes)
        held = np.zeros((num_clients, num_classes), dtype=bool)
        for client in range(num_clients):
            held[client, rng.choice(present, size=ways[client], replace=False)] = True
        slots = self._slots(held)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for client, c in np.argwhere(held):
            start = slots[client, c] * self.stride
            parts[client].append(self._slice(groups[c], start, int(shots[client]), int(c), int(client), "stride"))
        return joined(parts)

    def _slots(self, held: np.ndarray) -> np.ndarray:
        """Number of each client's slice of each class, int64 [K, C], from who holds what, bool [K, C]."""
        if self.slots == "holder":
            return np.cumsum(held, axis=0) - 1
        return np.broadcast_to(np.arange(len(held))[:, None], held.shape)

    def match(self, test_labels: np.ndarray, train_counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Cut each client's slices of `test_shots` official test samples for each class that it holds.

        Raises:
            ConfigError: if a class has too few test samples for a client's slice.
        """
        num_clients, num_classes = train_counts.shape
        groups = by_class(test_labels, num_classes)
        slots = self._slots(train_counts > 0)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for client, c in np.argwhere(train_counts > 0):
            start = slots[client, c] * self.test_shots
            parts[client].append(self._slice(groups[c], start, self.test_shots, int(c), int(client), "test_shots"))
        return joined(parts)

    def _slice(self, indices: np.ndarray, start: int, size: int, label: int, client: int, setting: str) -> np.ndarray:
        what = "training" if setting == "stride" else "test"
        if start + size > len(indices):
            raise ConfigError(
                f"{KEY}.{setting}",
                f"class {label} is too small: client {client} needs {what} samples up to number {start + size} "
                f"of it and it has {len(indices)}; lower {setting} or num_clients",
                getattr(self, setting),
            )
        return indices[start : start + size]
