"""Clients whose samples look, or mean, something else: feature skew and concept shift."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import ConfigError, require

KEY = "data.shift"


class Shift(ABC):
    """Changes each client's samples, once, after they were shared out: training and test parts alike.

    A sample belongs to one client, so a union of clients' test parts holds every sample as its owner sees it. Samples
    that nobody holds (an official test part on the server) stay as they are.
    """

    paper: str = ""
    """One line saying whom to cite."""

    @abstractmethod
    def apply(
        self, x: Tensor, y: Tensor, client: int, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """A client's samples as it sees them.

        Args:
            x: [n, …] inputs as they are stored; images are uint8 [n, C, H, W].
            y: [n] int64 classes.
            client: 0-based.
            num_clients: K.
            num_classes: C.
            rng: the client's own stream.

        Returns:
            Inputs and classes of the same shapes and types.

        Raises:
            ConfigError: for inputs that it cannot change.
        """

    def labels(self, client: int, num_classes: int) -> tuple[int, ...] | None:
        """[C] the label that a client gives to class 0, 1 and so on; None where it names all as the data set does.

        Args:
            client: 0-based.
            num_classes: C.

        Raises:
            ConfigError: if so many classes cannot be renamed that way.
        """
        return None


class NoiseSkew(Shift):
    """Gaussian noise that grows from client to client: client i adds N(0, std · i / K) to inputs on the [0, 1] scale.

    Features of a table get it on the scale that they are learned on; images of floats must be from 0 to 1.

    Args:
        std: σ of the paper, > 0 and at most 1e6, towards which the variance grows; the last client, K − 1, has
            σ (K − 1) / K.
    """

    paper = "Li, Diao, Chen, He, ICDE 2022, Federated Learning on Non-IID Data Silos: An Experimental Study"

    def __init__(self, std: float = 0.1) -> None:
        require(0 < std <= 1e6, f"{KEY}.std", "must be above 0, and at most 1e6", std)
        self.std = std

    def apply(
        self, x: Tensor, y: Tensor, client: int, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Add noise of variance std · client / K."""
        _require_numbers(x, self)
        deviation = math.sqrt(self.std * client / num_clients)
        noise = torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32)) * deviation
        if x.dtype == torch.uint8:
            return (x.float() + 255 * noise).round_().clamp_(0, 255).to(torch.uint8), y
        inside = x.ndim != 4 or not x.numel() or (float(x.min()) >= 0 and float(x.max()) <= 1)
        rule = "NoiseSkew adds noise on the [0, 1] scale, and images lie outside it: give bytes, or normalize: none"
        require(inside, KEY, rule)
        return x + noise, y


class RotationSkew(Shift):
    """Images turned by an angle of the client's own: client i has the (i mod n)-th of n angles.

    Args:
        angles: in degrees; multiples of 90 move pixels of square images and change none. What turns out of the image is
            lost, and what turns in is black.
    """

    paper = "Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, An Efficient Framework for Clustered Federated Learning"

    def __init__(self, angles: Sequence[float] = (0.0, 90.0, 180.0, 270.0)) -> None:
        finite = len(angles) > 0 and all(math.isfinite(angle) for angle in angles)
        require(finite, f"{KEY}.angles", "must be a list of degrees", list(angles))
        self.angles = tuple(angles)

    def apply(
        self, x: Tensor, y: Tensor, client: int, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Turn counter-clockwise."""
        _require_images(x, self)
        angle = self.angles[client % len(self.angles)]
        if angle % 90 == 0 and x.shape[-1] == x.shape[-2]:
            return torch.rot90(x, int(angle // 90) % 4, dims=(-2, -1)).contiguous(), y
        from torchvision.transforms.v2 import functional  # late, because it takes seconds

        return functional.rotate(x, angle, functional.InterpolationMode.BILINEAR), y


class ColourSkew(Shift):
    """A gain and an offset of each colour channel, drawn once a client: other cameras, other light.

    Args:
        strength: gains are uniform in [1 − s, 1 + s], offsets in [−s/2, s/2] of the full scale; in (0, 1].
    """

    def __init__(self, strength: float = 0.3) -> None:
        require(0 < strength <= 1, f"{KEY}.strength", "must be in (0, 1]", strength)
        self.strength = strength

    def apply(
        self, x: Tensor, y: Tensor, client: int, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Scale and move each channel."""
        _require_images(x, self)
        s, channels = self.strength, x.shape[1]
        gain = torch.from_numpy(rng.uniform(1 - s, 1 + s, channels)).float().view(1, -1, 1, 1)
        offset = torch.from_numpy(rng.uniform(-s / 2, s / 2, channels)).float().view(1, -1, 1, 1)
        return (x.float() * gain + 255 * offset).round_().clamp_(0, 255).to(torch.uint8), y


class ConceptShift(Shift):
    """The same inputs mean other classes: labels are permuted, by one of several concepts.

    Client i follows concept i mod n; concept 0 leaves labels as they are, the others permute `permuted` classes in a
    cycle, so that none of those keeps its name.

    Args:
        concepts: how many there are, >= 1.
        permuted: classes that change their names, >= 2; None for all.
    """

    paper = "Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, An Efficient Framework for Clustered Federated Learning"

    def __init__(self, concepts: int = 2, permuted: int | None = None) -> None:
        require(concepts >= 1, f"{KEY}.concepts", "must be at least 1", concepts)
        require(permuted is None or permuted >= 2, f"{KEY}.permuted", "must be at least 2", permuted)
        self.concepts = concepts
        self.permuted = permuted

    def apply(
        self, x: Tensor, y: Tensor, client: int, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Rename classes; clients of one concept agree."""
        renamed = self.labels(client, num_classes)
        return x, torch.tensor(renamed, dtype=torch.int64)[y]

    def labels(self, client: int, num_classes: int) -> tuple[int, ...]:
        """[C] what a client's concept calls the classes."""
        permuted = num_classes if self.permuted is None else self.permuted
        require(permuted <= num_classes, f"{KEY}.permuted", f"must be at most {num_classes}, the classes", permuted)
        concept = client % self.concepts
        if concept == 0:
            return tuple(range(num_classes))
        require(num_classes >= 2, KEY, "ConceptShift needs at least two classes, and there is one")
        cycles = math.comb(num_classes, permuted) * math.factorial(permuted - 1)
        rule = f"must be at most {1 + cycles}: there are no more for {permuted} of {num_classes} classes"
        require(self.concepts <= 1 + cycles, f"{KEY}.concepts", rule, self.concepts)
        return _concepts(self.concepts, num_classes, permuted)[concept]


@lru_cache(maxsize=8)
def _concepts(count: int, num_classes: int, permuted: int) -> tuple[tuple[int, ...], ...]:
    """What each concept calls the classes, all of them different."""
    found = [tuple(range(num_classes))]
    for concept in range(1, count):
        draws = np.random.default_rng(concept)
        while len(found) == concept:
            chosen = draws.permutation(num_classes)[:permuted]
            renamed = np.arange(num_classes)
            renamed[chosen] = np.roll(chosen, 1)
            if (names := tuple(renamed.tolist())) not in found:
                found.append(names)
    return tuple(found)


def _require_images(x: Tensor, shift: Shift) -> None:
    if x.dtype != torch.uint8 or x.ndim != 4:
        raise ConfigError(KEY, f"{type(shift).__name__} needs images, and inputs are {x.dtype} {list(x.shape[1:])}")


def _require_numbers(x: Tensor, shift: Shift) -> None:
    if x.dtype == torch.int64:
        raise ConfigError(KEY, f"{type(shift).__name__} needs images or numbers, and inputs are tokens")
