"""How samples are dealt out: classes drawn, pieces cut, shares rounded."""

from __future__ import annotations

import numpy as np

from fl_lightning.errors import ConfigError, require


def require_enough_samples(labels: np.ndarray, num_clients: int, at_least: int = 1) -> None:
    """Refuse more clients than there are samples for."""
    if num_clients * at_least > len(labels):
        why = "the number of samples" if at_least == 1 else f"{at_least} each of {len(labels)} samples"
        raise ConfigError("data.num_clients", f"must be at most {len(labels) // at_least}, {why}", num_clients)


def require_class_size(label: int, available: int, needed: int, key: str, value: int) -> None:
    """Refuse a class with fewer samples than holders."""
    if available < needed:
        raise ConfigError(
            key,
            f"class {label} is too small: {needed} clients hold it and it has {available} samples; "
            f"lower {key.rpartition('.')[2]} or num_clients",
            value,
        )


def draw_classes(
    labels: np.ndarray, num_clients: int, num_classes: int, per_client: int, key: str, rng: np.random.Generator
) -> np.ndarray:
    """Draw `per_client` distinct classes for each client, bool [K, C]; the numbers of holders differ by at most one.

    Each client takes the classes that the fewest clients hold so far, ties drawn at random. Classes without a sample
    are out.
    """
    present = present_classes(labels, num_classes, per_client, key)
    held = np.zeros((num_clients, num_classes), dtype=bool)
    holders = np.zeros(len(present), dtype=np.int64)
    for client in range(num_clients):
        chosen = np.lexsort((rng.random(len(present)), holders))[:per_client]
        holders[chosen] += 1
        held[client, present[chosen]] = True
    return held


def draw_classes_in_turn(
    labels: np.ndarray, num_clients: int, num_classes: int, per_client: int, key: str, rng: np.random.Generator
) -> np.ndarray:
    """Give each client the next class, and others that are drawn for it alone; as `draw_classes` otherwise."""
    present = present_classes(labels, num_classes, per_client, key)
    held = np.zeros((num_clients, num_classes), dtype=bool)
    for client in range(num_clients):
        own = present[client % len(present)]
        held[client, own] = True
        held[client, rng.choice(present[present != own], per_client - 1, replace=False)] = True
    return held


def present_classes(labels: np.ndarray, num_classes: int, wanted: int, key: str) -> np.ndarray:
    """The classes with samples, of which there must be as many as are wanted."""
    present = np.flatnonzero(np.bincount(labels, minlength=num_classes))
    most = f"must be at most {len(present)}, the number of classes with samples"
    require(wanted <= len(present), key, most, wanted)
    return present


def by_class(labels: np.ndarray, num_classes: int, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Indices of each class, in order, or shuffled where a generator is given."""
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])
    return groups if rng is None else [rng.permutation(group) for group in groups]


def deal(indices: np.ndarray, shares: np.ndarray, parts: list[list[np.ndarray]]) -> None:
    """Give the first `shares[0]` indices to client 0, the next `shares[1]` to client 1, and so on."""
    for client, piece in enumerate(np.split(indices, np.cumsum(shares)[:-1])):
        if len(piece):
            parts[client].append(piece)


def largest_remainders(total: int, weights: np.ndarray) -> np.ndarray:
    """Share `total` out in proportion to `weights` as whole numbers.

    Of equal remainders, as floating point has them, the earlier wins.

    >>> largest_remainders(7, np.array([1, 1, 2])).tolist()
    [2, 2, 3]
    """
    exact = total * weights / weights.sum()
    shares = np.floor(exact).astype(np.int64)
    left = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    return shares


def joined(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Each client's pieces as one, sorted."""
    return [np.sort(np.concatenate(pieces)) if pieces else np.empty(0, dtype=np.int64) for pieces in parts]


def without_empty(parts: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Each empty part gets one sample, drawn from the largest part."""
    for client, part in enumerate(parts):
        if len(part) == 0:
            largest = int(np.argmax([len(other) for other in parts]))
            place = int(rng.integers(len(parts[largest])))
            parts[client] = parts[largest][place : place + 1]
            parts[largest] = np.delete(parts[largest], place)
    return parts
