"""More ways to share samples out: PFLlib's pathological one, unequal sizes, power laws, and by user or site."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dealing import by_class, deal, joined, largest_remainders, present_classes
from fl_lightning.data.partitions import KEY, Partition
from fl_lightning.errors import ConfigError, require


class Pathological(Partition):
    """A few classes a client, as PFLlib deals them: neighbours hold the same classes, in unequal shares.

    Class by class, the first ⌈K/C · classes⌉ clients that still lack a class take it. All but the last of them draw
    their number of samples uniformly between a tenth of an equal share and an equal share; the last takes the rest, and
    so the largest part. Every sample of a class that somebody holds is used.

    Args:
        classes: classes of each client, from 1 to C; clients that come last may have fewer.
        balanced: equal shares instead.
    """

    paper = (
        "Zhang et al., JMLR 2025, PFLlib: A Beginner-Friendly and Comprehensive Personalized FL Library and Benchmark"
    )

    def __init__(self, classes: int, balanced: bool = False) -> None:
        require(classes >= 1, f"{KEY}.classes", "must be at least 1", classes)
        self.classes = classes
        self.balanced = balanced

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Deal class by class.

        Raises:
            ConfigError: if there are fewer classes than `classes`, a class has too few samples for its holders, or a
                client would be left without a class.
        """
        present = present_classes(labels, num_classes, self.classes, f"{KEY}.classes")
        lacks = np.full(num_clients, self.classes)
        at_once = math.ceil(num_clients / len(present) * self.classes)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for label in present:
            holders = np.flatnonzero(lacks)[:at_once]
            indices = rng.permutation(np.flatnonzero(labels == label))
            if len(holders) == 0:
                break
            if len(indices) < len(holders):
                rule = f"class {label} has {len(indices)} samples for {len(holders)} clients; lower classes"
                raise ConfigError(f"{KEY}.classes", f"{rule} or data.num_clients", self.classes)
            edges = np.cumsum(self._sizes(len(indices), len(holders), rng))[:-1]
            for client, piece in zip(holders, np.split(indices, edges), strict=True):
                parts[client].append(piece)
            lacks[holders] -= 1
        without = [client for client, pieces in enumerate(parts) if not pieces]
        rule = f"leaves client {without[0] if without else 0} without a class; lower data.num_clients or raise classes"
        require(not without, f"{KEY}.classes", rule, self.classes)
        return [np.sort(np.concatenate(pieces)) for pieces in parts]

    def _sizes(self, total: int, holders: int, rng: np.random.Generator) -> np.ndarray:
        equal = total / holders
        if self.balanced or holders == 1 or int(equal) <= max(1, int(equal / 10)):
            sizes = np.full(holders - 1, int(equal))
        else:
            sizes = rng.integers(max(1, int(equal / 10)), int(equal), size=holders - 1)
        return np.append(sizes, total - sizes.sum())


class QuantitySkew(Partition):
    """Clients of very different sizes with the same mix of classes: sizes follow a symmetric Dirichlet(β).

    Args:
        beta: concentration β, > 0 and at most 1e9; small β makes a few clients large.
        min_samples: fewest samples a client gets, >= 1.
    """

    paper = "Li, Diao, Chen, He, ICDE 2022, Federated Learning on Non-IID Data Silos: An Experimental Study"

    def __init__(self, beta: float = 0.5, min_samples: int = 10) -> None:
        require(0 < beta <= 1e9, f"{KEY}.beta", "must be above 0, and at most 1e9, which is even shares", beta)
        require(min_samples >= 1, f"{KEY}.min_samples", "must be at least 1", min_samples)
        self.beta = beta
        self.min_samples = min_samples

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share every sample out: `min_samples` each, the others in the proportions that were drawn.

        Raises:
            ConfigError: if there are too few samples.
        """
        left = len(labels) - num_clients * self.min_samples
        most = f"{len(labels)} samples are for at most {len(labels) // self.min_samples} clients of that many"
        require(left >= 0, f"{KEY}.min_samples", most, self.min_samples)
        edges = np.floor(np.cumsum(rng.dirichlet(np.full(num_clients, self.beta)))[:-1] * left).astype(np.int64)
        sizes = self.min_samples + np.diff(edges, prepend=0, append=left)
        return [np.sort(part) for part in np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])]


class PowerLaw(Partition):
    """A few neighbouring classes a client, and sizes that follow a power law: FedProx's MNIST of 1,000 clients.

    Client u holds the classes u, u + 1, … (modulo C) and gets `min_samples` of each; what is left of a class is shared
    out among its holders in proportions drawn from a log-normal distribution. Every sample of a class that somebody
    holds is used (the published script rounds down, and leaves out whom the rest does not suffice for).

    Args:
        classes: classes of each client, from 1 to C.
        min_samples: fewest samples that a client has of each of its classes, >= 1.
        sigma: standard deviation of the proportions' logarithms, in [0, 100]; 0 is even shares.
    """

    paper = "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, Federated Optimization in Heterogeneous Networks"

    def __init__(self, classes: int = 2, min_samples: int = 5, sigma: float = 2.0) -> None:
        require(classes >= 1, f"{KEY}.classes", "must be at least 1", classes)
        require(min_samples >= 1, f"{KEY}.min_samples", "must be at least 1", min_samples)
        require(0 <= sigma <= 100, f"{KEY}.sigma", "must be from 0 to 100", sigma)
        self.classes = classes
        self.min_samples = min_samples
        self.sigma = sigma

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share every class out among its holders.

        Raises:
            ConfigError: if there are fewer classes than `classes`, or a class has too few samples for its holders.
        """
        present = present_classes(labels, num_classes, self.classes, f"{KEY}.classes")
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        groups = by_class(labels, num_classes, rng)
        for place, label in enumerate(present):
            indices = groups[label]
            holders = np.flatnonzero((place - np.arange(num_clients)) % len(present) < self.classes)
            if len(holders) == 0:
                continue
            least = len(holders) * self.min_samples
            few = f"class {label} has {len(indices)} samples for {len(holders)} clients; lower it or data.num_clients"
            require(least <= len(indices), f"{KEY}.min_samples", few, self.min_samples)
            log_shares = self.sigma * rng.standard_normal(len(holders))
            shares = largest_remainders(len(indices) - least, np.exp(log_shares - log_shares.max()))
            sizes = np.zeros(num_clients, dtype=np.int64)
            sizes[holders] = self.min_samples + shares
            deal(indices, sizes, parts)
        return joined(parts)


class ByGroup(Partition):
    """By who or where samples are from (`Arrays.groups`): users, writers, sites; no group is torn apart.

    FEMNIST by writer is this. Under the split ``matched`` a client's test samples are those of its own groups.

    Args:
        per_client: groups of each client, drawn at random; None deals all of them out, as evenly as can be.
        min_samples: groups with fewer samples are left out, >= 1.
    """

    paper = "Caldas et al., 2018, LEAF: A Benchmark for Federated Settings"

    def __init__(self, per_client: int | None = None, min_samples: int = 1) -> None:
        require(per_client is None or per_client >= 1, f"{KEY}.per_client", "must be at least 1", per_client)
        require(min_samples >= 1, f"{KEY}.min_samples", "must be at least 1", min_samples)
        self.per_client = per_client
        self.min_samples = min_samples

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """There are no groups among labels alone."""
        raise ConfigError(KEY, "ByGroup needs a data set with groups (users, writers, sites), and labels are none")

    def share(self, arrays: Arrays, num_samples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal groups out.

        Raises:
            ConfigError: if the data set has no groups, or too few.
        """
        require(arrays.groups is not None, KEY, "ByGroup needs a data set with groups (users, writers, sites)")
        assert arrays.groups is not None
        groups = arrays.groups.numpy()[:num_samples]
        names, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        kept = np.flatnonzero(sizes >= self.min_samples)  # by place: names may be any numbers
        wanted = num_clients * (self.per_client or 1)
        rule = f"the data set has {len(kept)} groups of at least {self.min_samples} samples, and {wanted} are needed"
        require(wanted <= len(kept), "data.num_clients", rule, num_clients)
        if len(kept) > num_clients:  # else client i has the i-th group
            kept = rng.permutation(kept)[: wanted if self.per_client else None]
        owner = np.full(len(names), -1)
        owner[kept] = np.arange(len(kept)) % num_clients
        return [np.flatnonzero(owner[place] == client) for client in range(num_clients)]

    def share_tests(self, arrays: Arrays, parts: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """The test samples of each client's own groups."""
        assert arrays.groups is not None
        groups = arrays.groups.numpy()
        tests = groups[arrays.num_train :]
        return [np.flatnonzero(np.isin(tests, np.unique(groups[part]))) for part in parts]
