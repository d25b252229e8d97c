"""FeSEM: several global models; every client is averaged with those whose weights lie near its own.

Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-Center Federated Learning", arXiv:2005.01026, 2020; Long et al.,
"Multi-center federated learning: clients clustering for better personalization", World Wide Web 26, 2023, Algorithm 1.
The authors' public code compares the last dense kernel alone (`compare: head`), re-clusters every 150 rounds of a run
of 60, leaves clusters of one client out, and has the names of weighted and unweighted averages swapped. Centres that
start from the same weights would never part, so how they start is a switch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import WeightedMean
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message, accumulation_dtype
from fl_lightning.core.method import Figure, Method, Predictor
from fl_lightning.core.server import Server, Weighting
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.proximal import Proximal
from fl_lightning.models.copying import copied
from fl_lightning.models.split import SplitModel
from fl_lightning.seeding import derive_seed, isolated_streams, numpy_generator

Start = Literal["kmeans++", "random", "assign"]
Compared = Literal["all", "head"]
Weights = Mapping[str, Tensor]


class FeSEM(Method):
    """K global models (centres); a client trains the one that its own last weights were nearest to.

        min Σ_i ‖W_i − W̃_{r_i}‖² over centres W̃_1 … W̃_K and assignments r

    It takes turns with the clients' own risks: after the local fits r_i = argmin_k ‖W_i − W̃_k‖² for all participants
    (E-step), then W̃_k is the mean of the W_i with r_i = k (M-step). A tie keeps the client where it is; a centre
    without clients stays as it was; who sits out keeps its r_i. There is no single global model, unless K = 1,
    which under ``samples`` is FedAvg.

    `Local-T` is a client's own model after its fit, `Local-T_received` its centre. A client that has no r_i yet gets
    the centre of most clients, or a random one where centres start at random.

    Args:
        num_centres: K, >= 1.
        start: first centres: uploads of the first round, which starts from common weights, drawn as k-means++ does
            (``kmeans++``); K models drawn apart, each layer as it initialises itself, over which clients are spread at
            random (``random``); or the means of a random partition of the first round's uploads (``assign``).
        compare: parameters whose distance counts: ``all``, or the classification layer's weight (``head``). Running
            statistics never count.
        weighting: clients of a centre count alike (``uniform``, the paper's) or by samples (``samples``).
        mu: μ of the pull μ/2 ‖W − W̃_{r_i}‖² in the local fit, >= 0; not the paper's (0).
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Xie et al., arXiv:2005.01026, 2020"

    def __init__(
        self,
        model: SplitModel,
        num_centres: int = 3,
        start: Start = "kmeans++",
        compare: Compared = "all",
        weighting: Weighting = "uniform",
        mu: float = 0.0,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(num_centres >= 1, "method.num_centres", "must be >= 1", num_centres)
        require(mu >= 0, "method.mu", "must be >= 0", mu)
        require_choices("method", start=(start, Start), compare=(compare, Compared), weighting=(weighting, Weighting))
        super().__init__(model, terms=[Proximal(mu)], extra_terms=extra_terms)
        self.num_centres = num_centres
        self.start: Start = start
        self.compare = compare
        self.weighting: Weighting = weighting

    def predictors(self) -> dict[str, Predictor]:
        """By the own centre; there is no single global model, unless there is one centre."""
        single: tuple[Figure, ...] = ("Server-T",) if self.num_centres == 1 else ()
        return {"": Predictor(lambda seen: seen.logits(self.model), ("Local-T", "Global-T", *single))}

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        parameters = {name: p for name, p in self.named_parameters() if name in initial.weights}
        if self.compare == "head":
            layer = self.model.classification_layer
            last = {id(p) for name, p in layer.named_parameters() if "bias" not in name}
            parameters = {name: p for name, p in parameters.items() if id(p) in last}
            rule = "must be all: the head's last linear layer has no weight that travels"
            require(bool(parameters), "method.compare", rule, self.compare)
        template = copied(self.model)
        return CentresServer(
            initial, self.num_centres, self.start, tuple(parameters), self.weighting, partial(redrawn, template)
        )


class CentresServer(Server):
    """Keeps K centres and who belongs to which.

    Args:
        initial: the common first weights.
        num_centres: K.
        start: how the centres start.
        compared: names of the entries whose distance counts.
        weighting: how clients of a centre count.
        redraw: gives the weights of a freshly initialised model.
    """

    sees_messages = True

    def __init__(
        self,
        initial: Message,
        num_centres: int,
        start: Start,
        compared: tuple[str, ...],
        weighting: Weighting,
        redraw: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.num_centres = num_centres
        self.start = start
        self.compared = compared
        self.redraw = redraw
        self.centres: list[dict[str, Tensor]] = []  # none before the first uploads, unless they start at random
        self.assignment: dict[int, int] = {}
        super().__init__(initial, weighting=weighting)

    def setup(self, facts: Facts) -> None:
        """Draw the centres that start at random; the first is the common initial model."""
        super().setup(facts)
        if self.start == "random":
            self.centres = [dict(self.message.weights)]
            while len(self.centres) < self.num_centres:
                with isolated_streams(facts.seed, f"server/centre/{len(self.centres)}"):
                    drawn = self.redraw()
                self.centres.append({name: drawn.get(name, same) for name, same in self.message.weights.items()})

    # --- what goes out ----------------------------------------------

    def message_for(self, client: int) -> Message:
        """The client's centre, and its number."""
        if not self.centres:
            return self.message
        centre = self.centre_of(client)
        number = {"centre": torch.tensor(centre, device=self.device)}
        return Message(self.centres[centre], {**self.message.artifacts, **number}, self.message.num_samples)

    def centre_of(self, client: int) -> int:
        """r_i; for a client that has none yet the centre of most clients, or a random one where centres are random."""
        if client in self.assignment:
            return self.assignment[client]
        if not self.assignment or self.start == "random":
            return self._random_centre(client)
        sizes = [list(self.assignment.values()).count(k) for k in range(self.num_centres)]
        return sizes.index(max(sizes))

    def _random_centre(self, client: int) -> int:
        return derive_seed(self.facts.seed, "server/centre of", 0, client) % self.num_centres

    # --- what comes in ----------------------------------------------

    def open_round(self) -> None:
        """Start a round: forget what came in."""
        super().open_round()
        self._waiting: dict[int, Message] = {}  # uploads of the first round, from which the centres are made
        self._chosen: dict[int, int] = {}
        self._means = [WeightedMean() for _ in range(self.num_centres)]

    def see(self, client: int, message: Message) -> Message:
        """E-step for one client; its weights go into its new centre's mean, all else as on every server."""
        if self.centres:
            self._join(client, self.nearest(client, message.weights), message)
        else:
            self._waiting[client] = message
        return replace(message, weights={})

    def nearest(self, client: int, weights: Weights) -> int:
        """argmin_k ‖W_i − W̃_k‖²; of equally near centres the client's own, else the lowest."""
        distances = [self.distance(weights, centre) for centre in self.centres]
        least = min(distances)
        own = self.assignment.get(client)
        return own if own is not None and distances[own] == least else distances.index(least)

    def distance(self, one: Weights, other: Weights) -> float:
        """Squared distance over the compared entries, summed in double precision."""
        return sum(
            float((one[name].to(accumulation_dtype(self.device)) - other[name]).square().sum())
            for name in self.compared
        )

    def _join(self, client: int, centre: int, message: Message) -> None:
        self._chosen[client] = centre
        self._means[centre].add(message.weights, 1 if self.mean_weighting == "uniform" else message.num_samples)

    def close_round(self) -> None:
        """M-step: each centre becomes the mean of its clients."""
        if self._waiting:
            self._start_from(dict(sorted(self._waiting.items())))
        if self.centres:
            pairs = zip(self.centres, self._means, strict=True)
            self.centres = [centre if mean.empty else mean.result() for centre, mean in pairs]
        self.assignment = {**self.assignment, **self._chosen}
        super().close_round()
        if self.num_centres == 1 and self.centres:
            self.message = replace(self.message, weights=self.centres[0])

    def _start_from(self, uploads: Mapping[int, Message]) -> None:
        """Make the first centres, and the first assignment, from the first round's uploads."""
        if self.start == "assign":
            self.centres = [dict(self.message.weights) for _ in range(self.num_centres)]
            choice = {client: self._random_centre(client) for client in uploads}
        else:
            self.centres = self._plus_plus([message.weights for message in uploads.values()])
            choice = {client: self.nearest(client, message.weights) for client, message in uploads.items()}
        for client, message in uploads.items():
            self._join(client, choice[client], message)

    def _plus_plus(self, uploads: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """K uploads, each drawn with a probability proportional to its squared distance to the nearest drawn before.

        Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007. Where all distances are 0
        (there are fewer different uploads than centres) any upload may be drawn again.
        """
        rng = numpy_generator(self.facts.seed, "server/kmeans++", self.round)
        drawn = [uploads[rng.integers(len(uploads))]]
        gaps = [float("inf")] * len(uploads)
        while len(drawn) < self.num_centres:
            gaps = [min(gap, self.distance(upload, drawn[-1])) for gap, upload in zip(gaps, uploads, strict=True)]
            shares = [gap / sum(gaps) for gap in gaps] if sum(gaps) > 0 else None
            drawn.append(uploads[rng.choice(len(uploads), p=shares)])
        return drawn

    # --- state ----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base's state, the centres and the assignment."""
        centres = {str(k): centre for k, centre in enumerate(self.centres)}
        return {**super().state_dict(), "centres": centres, "assignment": dict(self.assignment)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.centres = [dict(centre) for _, centre in sorted(state["centres"].items(), key=lambda item: int(item[0]))]
        self.assignment = dict(state["assignment"])


def redrawn(model: SplitModel) -> dict[str, Tensor]:
    """The entries of a model whose layers have initialised themselves anew, from the global streams."""
    fresh = copy.deepcopy(model)
    for layer in fresh.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    return {f"model.{name}": tensor.detach().clone() for name, tensor in fresh.state_dict().items()}
