"""Robust rules that bound how far a client can pull: by its distance from a centre."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregator import KEY, Aggregator
from fl_lightning.core.coordinate_rules import median
from fl_lightning.core.vectors import WEIGHTS, Vectors
from fl_lightning.errors import require

_SETTLED = 1e-9  # of itself a share may move: of a client that is far enough away the least one pulls


class GeometricMedian(Aggregator):
    """RFA: the point whose distances to all clients add up to the least, by Weiszfeld's steps, smoothed.

        z ← Σ_i β_i x_i / Σ_i β_i,  β_i = 1 / max(ν, ‖x_i − z‖),  from the mean

    Args:
        smoothing: ν, > 0, the distance below which all count alike.
        iterations: steps at most, >= 1; they end where no client's share moves by 10^-9 of itself any more. The more
            hostile clients there are, the more steps it takes until they are passed over.

    Reference: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
    Processing 70, 2022, algorithm 2.
    """

    paper = "Pillutla et al., IEEE TSP 2022"

    def __init__(self, smoothing: float = 1e-6, iterations: int = 1000) -> None:
        super().__init__()
        require(0 < smoothing < float("inf"), f"{KEY}.smoothing", "must be > 0 and finite", smoothing)
        require(iterations >= 1, f"{KEY}.iterations", "must be >= 1", iterations)
        self.smoothing = smoothing
        self.iterations = iterations

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        return vectors.weighted(weiszfeld(vectors.products(vectors.each(median)), self.smoothing, self.iterations))


def weiszfeld(products: Tensor, smoothing: float, iterations: int) -> Tensor:
    """[n] what share each point has in the geometric median, by the smoothed Weiszfeld steps.

    Every step's point is z = Σ_i w_i x_i, so that products are all that is needed:
    ‖x_j − z‖² = G_jj − 2 Σ_i w_i G_ij + Σ_ik w_i w_k G_ik. A difference that is below what rounding leaves of it counts
    as 0.

    Args:
        products: [n, n] G, (x_i − c)ᵀ(x_j − c), float64, of a c that no few points can move far: around another one
            rounding would hide how far apart the others are, once one is 10^10 times as far away.
        smoothing: ν.
        iterations: steps at most.

    >>> import torch
    >>> line = torch.tensor([0.0, 1.0, 10.0]) - 1
    >>> weiszfeld(line.outer(line), 1e-6, 100).round().tolist()
    [0.0, 1.0, 0.0]
    """
    lengths = products.diagonal()
    shares = products.new_full((len(products),), 1 / len(products))
    rounding = len(products) * torch.finfo(products.dtype).eps
    for _ in range(iterations):
        to_all = products @ shares
        whole = lengths + shares @ to_all
        found = whole - 2 * to_all
        distances = torch.where(found <= rounding * whole, 0, found).sqrt()  # NaN stays: nothing else would tell of it
        pulls = 1 / distances.clamp(min=smoothing)
        before, shares = shares, pulls / pulls.sum()
        if not ((shares - before).abs() > _SETTLED * shares).any():
            break
    return shares


class NormClipping(Aggregator):
    """The mean of updates none of which is longer than C.

        x = r + 1/n Σ_i (x_i − r) min(1, C / ‖x_i − r‖),  r what the clients had received

    Batch norm's statistics, every artifact and every class's row are clipped by themselves; where nothing had been
    received, r is the coordinates' median. Of an artifact that is added up (SCAFFOLD's control) r is 0.

    Args:
        clip: C of the weights' update, > 0; null takes the median length of the round's updates.
        clip_artifacts: the same of statistics and artifacts. SCAFFOLD's clients add to their own control variates what
            they send, unclipped: a C below most lengths keeps the server's behind their mean for good, and little
            is learnt.

    Reference: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", arXiv:1911.07963, 2019,
    section 4; the median length: Nguyen et al., "FLAME", USENIX Security 2022, section 4.3.
    """

    paper = "Sun et al., arXiv:1911.07963, 2019"

    def __init__(self, clip: float | None = None, clip_artifacts: float | None = None) -> None:
        super().__init__()
        self.radii = _radii(clip, clip_artifacts)

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        return pulled(vectors, _centre(vectors), self.radii[vectors.name != WEIGHTS])


class CentredClipping(Aggregator):
    """Updates clipped around the last round's, which pulls along what is steady and leaves out what jumps.

        v ← v + 1/n Σ_i (Δ_i − v) min(1, τ / ‖Δ_i − v‖),  Δ_i = x_i − r;  x = r + v;  v starts from the last round's

    v is kept from round to round for trained weights; 0 at first. Batch norm's statistics, artifacts and class's rows
    are clipped around what the clients had received, which is the last aggregate; where nothing had been, around the
    coordinates' median. An artifact that is added up (SCAFFOLD's control) is clipped around 0.

    Args:
        clip: τ of the weights, > 0; null takes the median of the distances.
        clip_artifacts: the same of statistics and artifacts; on SCAFFOLD see `NormClipping`.
        iterations: L, steps a round, >= 1; one is the paper's.

    Reference: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, section 4.
    """

    paper = "Karimireddy et al., ICML 2021"

    def __init__(self, clip: float | None = None, clip_artifacts: float | None = None, iterations: int = 1) -> None:
        super().__init__()
        require(iterations >= 1, f"{KEY}.iterations", "must be >= 1", iterations)
        self.radii = _radii(clip, clip_artifacts)
        self.iterations = iterations
        self.last: Tensor | None = None
        """[P] v of the trained weights."""

    @override
    def start(self, trained: Any) -> None:
        super().start(trained)
        self.last = None

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        received = _centre(vectors)
        moves = vectors.name == WEIGHTS and vectors.reference is not None
        carried = self.last if moves and self.last is not None and self.last.shape == received.shape else None
        centre = received if carried is None else received + carried.to(received)
        for _ in range(self.iterations):
            centre = pulled(vectors, centre, self.radii[vectors.name != WEIGHTS])
        if moves:
            self.last = centre - received
        return centre

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.last is None else {"last": self.last}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last = state.get("last")


def pulled(vectors: Vectors, centre: Tensor, radius: float | None) -> Tensor:
    """[P] c + 1/n Σ_i (x_i − c) min(1, C / ‖x_i − c‖).

    Args:
        vectors: [n, P].
        centre: [P] c.
        radius: C; None takes the median distance.
    """
    lengths = vectors.lengths(centre)
    bound = float(median(lengths)) if radius is None else radius
    shares = (bound / lengths.clamp(min=1e-300)).clamp(max=1) / len(lengths)
    rest = max(0.0, 1 - float(shares.sum()))  # no rounding error may turn a variance negative
    return centre * rest + vectors.weighted(shares)


def _centre(vectors: Vectors) -> Tensor:
    return vectors.each(median) if vectors.reference is None else vectors.reference


def _radii(clip: float | None, clip_artifacts: float | None) -> tuple[float | None, float | None]:
    for name, radius in (("clip", clip), ("clip_artifacts", clip_artifacts)):
        allowed = radius is None or 0 < radius < float("inf")
        require(allowed, f"{KEY}.{name}", "must be > 0 and finite", radius)
    return clip, clip_artifacts
