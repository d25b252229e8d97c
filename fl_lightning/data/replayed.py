"""Splits of public code drawn again, number for number: NIID-Bench's, those of Flower's baseline of it, PFLlib's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import numpy as np

from fl_lightning.data.dealing import joined, require_enough_samples
from fl_lightning.data.partitions import KEY, Partition
from fl_lightning.errors import ConfigError, require

MAX_DRAWS = 1_000
MIN_SAMPLES = 10
"""Fewest samples of a client, in NIID-Bench's code and in Flower's."""
PFLLIB_MIN_SAMPLES = 40
"""Fewest samples of a client in PFLlib's, a batch of ten in a test quarter; half a fair share where that is less."""

Code = Literal["niid_bench", "flower"]
Generator = np.random.Generator | np.random.RandomState


def _dirichlet(
    labels: np.ndarray, num_clients: int, num_classes: int, beta: float, min_samples: int, generator: Generator
) -> list[np.ndarray]:
    """The first draw in which every client has `min_samples`: one rule in all of these codes."""
    require_enough_samples(labels, num_clients, at_least=min_samples)
    for _ in range(MAX_DRAWS):
        parts = _draw(labels, num_clients, num_classes, beta, generator)
        if parts is not None and min(map(len, parts)) >= min_samples:
            return parts
    rule = f"no draw of {MAX_DRAWS} gives each of {num_clients} clients {min_samples} samples; raise it"
    raise ConfigError(f"{KEY}.beta", rule, beta)


def _draw(
    labels: np.ndarray, num_clients: int, num_classes: int, beta: float, generator: Generator
) -> list[np.ndarray] | None:
    """One draw; None where all the mass of a class fell on clients that are full, which none of the codes expects."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    held = np.zeros(num_clients, dtype=np.int64)
    for label in range(num_classes):
        indices = np.flatnonzero(labels == label)
        generator.shuffle(indices)
        shares = generator.dirichlet(np.repeat(beta, num_clients)) * (held < len(labels) / num_clients)
        if not shares.sum() > 0:
            if len(indices):
                return None
            continue
        edges = (np.cumsum(shares / shares.sum()) * len(indices)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(indices, edges)):
            pieces[client].append(piece)
            held[client] += len(piece)
    return joined(pieces)


def _require_beta(beta: float) -> None:
    require(0 < beta <= 1e9, f"{KEY}.beta", "must be above 0, and at most 1e9, which is even shares", beta)


def _require_seed(seed: int) -> None:
    require(0 <= seed < 2**32, f"{KEY}.seed", "must be from 0 to 4294967295", seed)


class _NIIDBench(Partition):
    """What the two have in common: whose code, and its seed."""

    paper = "Li, Diao, Chen, He, ICDE 2022, Federated Learning on Non-IID Data Silos: An Experimental Study"

    def __init__(self, code: Code, seed: int | None) -> None:
        seed = {"niid_bench": 0, "flower": 42}[code] if seed is None else seed
        _require_seed(seed)
        self.code = code
        self.seed = seed

    def _generator(self) -> Generator:
        return np.random.RandomState(self.seed) if self.code == "niid_bench" else np.random.default_rng(self.seed)


class NIIDBenchDirichlet(_NIIDBench):
    """The very split that NIID-Bench's code draws under ``noniid-labeldir``, or Flower's baseline under ``dirichlet``.

    `Dirichlet` is the same rule with this library's own random numbers, under the run's seed. This one draws what the
    public code draws, under its seed, whatever the run's seed is: the paper's three runs are ``niid_bench`` with the
    seeds 0, 1 and 2. All of Flower's published runs are on its seed 42, because its option ``dataset_seed`` is never
    read.

    Args:
        beta: concentration β, > 0 and at most 1e9.
        code: ``niid_bench`` or ``flower``.
        seed: the code's seed, below 2³²; by default 0 for NIID-Bench, 42 for Flower.
    """

    def __init__(self, beta: float = 0.5, code: Code = "niid_bench", seed: int | None = None) -> None:
        super().__init__(code, seed)
        _require_beta(beta)
        self.beta = beta

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share every sample out; `rng` is not used.

        Raises:
            ConfigError: if there are fewer than ten samples a client, or no draw of 1,000 gives everybody ten.
        """
        return _dirichlet(labels, num_clients, num_classes, self.beta, MIN_SAMPLES, self._generator())


class NIIDBenchClasses(_NIIDBench):
    """The very split of NIID-Bench's ``noniid-#label2`` (or another number), or of Flower's ``label_quantity``.

    Client k holds the class k (modulo C) and others that are drawn; the holders of a class share it evenly.
    `ClassesPerClient` with ``even: false`` is the same rule with this library's own random numbers; see
    `NIIDBenchDirichlet`.

    Args:
        classes: classes of each client, from 1 to C.
        code: ``niid_bench`` or ``flower``.
        seed: the code's seed, below 2³²; by default 0 for NIID-Bench, 42 for Flower.
    """

    def __init__(self, classes: int = 2, code: Code = "niid_bench", seed: int | None = None) -> None:
        super().__init__(code, seed)
        require(classes >= 1, f"{KEY}.classes", "must be at least 1", classes)
        self.classes = classes

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share out every class that somebody holds; `rng` is not used.

        Raises:
            ConfigError: if there are fewer classes than `classes`, or fewer samples than clients.
        """
        require(self.classes <= num_classes, f"{KEY}.classes", f"must be at most {num_classes}", self.classes)
        require_enough_samples(labels, num_clients)
        generator = self._generator()
        held = self._held(num_clients, num_classes, generator)
        pieces: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        for label in range(num_classes):
            indices = np.flatnonzero(labels == label)
            generator.shuffle(indices)
            holders = np.flatnonzero(held[:, label])
            if len(holders):
                for client, piece in zip(holders, np.array_split(indices, len(holders)), strict=True):
                    pieces[client].append(piece)
        return joined(pieces)

    def _held(self, num_clients: int, num_classes: int, generator: Generator) -> np.ndarray:
        """Who holds which class, bool [K, C]; NIID-Bench draws classes from Python's generator, Flower from NumPy's."""
        draw: Callable[[], int]
        if isinstance(generator, np.random.Generator):
            numpys = generator
            draw = lambda: int(numpys.choice(num_classes, 1)[0])  # noqa: E731
        else:
            pythons = random.Random(self.seed)
            draw = lambda: pythons.randint(0, num_classes - 1)  # noqa: E731
        held = np.zeros((num_clients, num_classes), dtype=bool)
        for client in range(num_clients):
            held[client, client % num_classes] = True
            while held[client].sum() < self.classes:
                held[client, draw()] = True
        return held


class PFLlibDirichlet(Partition):
    """The very clients that PFLlib's ``generate_*.py noniid - dir`` makes, without running it.

    `Dirichlet` is the same rule under the run's seed. PFLlib shares official training and test parts out together,
    training part first: say ``data.split: holdout``. Which of a client's samples are its test part is this library's
    own draw.

    Args:
        beta: concentration β, > 0 and at most 1e9, PFLlib's ``alpha``.
        seed: NumPy's seed, below 2³², which is 1 in PFLlib's scripts.
    """

    paper = (
        "Zhang et al., JMLR 2025, PFLlib: A Beginner-Friendly and Comprehensive Personalized FL Library and Benchmark"
    )

    def __init__(self, beta: float = 0.1, seed: int = 1) -> None:
        _require_beta(beta)
        _require_seed(seed)
        self.beta = beta
        self.seed = seed

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Share every sample out; `rng` is not used.

        Raises:
            ConfigError: if there are too few samples, or no draw of 1,000 gives everybody enough.
        """
        require_enough_samples(labels, num_clients)
        least = min(PFLLIB_MIN_SAMPLES, len(labels) // num_clients // 2)
        return _dirichlet(labels, num_clients, num_classes, self.beta, least, np.random.RandomState(self.seed))
