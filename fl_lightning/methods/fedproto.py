"""FedProto: clients exchange class prototypes instead of weights.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, Algorithm 1. Where the paper's formulas and its public code differ, each form is a switch. By default prototypes
are the appendix's, with weights that sum to one, and their distance is the public code's: a mean over features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Figure, Method, Predictor, Seen
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require_choices
from fl_lightning.losses.prototype import Distance, PrototypeAlignment, Prototypes, prototype_distances
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData

Candidates = Literal["global", "local"]
Inference = Literal["prototype", "classifier"]
Download = Literal["all", "local"]


class FedProto(Method):
    """Prototypes on the wire, models at home: embeddings are pulled towards the global prototype of their class.

        L = L_ce + λ · mean over samples of d(f(x), C_y),  C_c = Σ_i n_{i,c}/n_c · mean of f_i(x) over class c

    Prediction takes the nearest prototype; the classifier's accuracy is logged beside it. Until a prototype was
    received the classifier predicts. The prototypes that evaluation uses are the last received ones, so the public
    code's figure (own model, prototypes aggregated in the same round; the paper names no moment) is `Local-T_received`
    of the next round, and `final_received` at the end of a run.

    Args:
        weight: λ of the prototype term, >= 0; the paper's: 1 (MNIST, FEMNIST), 0.1 (CIFAR-10).
        distance: form of the prototype term: ``sample_mse``, the public code's, whose λ are the paper's;
            ``batch_proto_l2``, the main text's L2 distance of class means, summed over classes; or ``sample_sq``, the
            appendix's squared norm, D times the first.
        prototypes: how prototypes are made and averaged.
        download: ``all`` valid prototypes, or only those of classes the client uploaded (``local``).
        candidates: what nearest-prototype inference may predict on the client's own test split: all valid classes
            (``global``) or those of its training part (``local``, the public code; use it for n-way k-shot tasks).
        inference: which prediction is the headline; both are logged.
        extra_terms: terms added to the loss.
    """

    shared = ()
    paper = "Tan et al., AAAI 2022"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        distance: Distance = "sample_mse",
        prototypes: Prototypes = Prototypes(),
        download: Download = "all",
        candidates: Candidates = "global",
        inference: Inference = "prototype",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_choices(
            "method",
            download=(download, Download),
            candidates=(candidates, Candidates),
            inference=(inference, Inference),
        )
        alignment = PrototypeAlignment(weight, distance, **vars(prototypes))
        alignment.predicts = True  # at weight 0 there is no pull, but still the nearest prototype
        super().__init__(model, terms=[alignment], extra_terms=extra_terms)
        self.alignment = [alignment]  # in a list, so that it is not registered a second time
        self.download = download
        self.candidates = candidates
        self.inference = inference
        self.register_buffer("held", torch.zeros(model.num_classes, dtype=torch.bool), persistent=False)

    held: Tensor  # [C] bool, classes of the client's training part

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.held.copy_(data.held_classes)

    def predictors(self) -> dict[str, Predictor]:
        """By the nearest prototype of all, or of the classes that the client holds, and by the classifier."""
        figures: tuple[Figure, ...] = ("Local-T", "Global-T", "Server-T")
        by_class, held = self.inference == "classifier", self.candidates == "local"
        own = figures[:1] if held and not by_class else ()
        ways = {"prototype": Predictor(self._of_all, () if by_class else tuple(f for f in figures if f not in own))}
        if held:
            ways["prototype_held"] = Predictor(self._of_held, own)
        return {**ways, "classifier": Predictor(lambda seen: seen.logits(self.model), figures if by_class else ())}

    def _of_all(self, seen: Seen) -> Tensor:
        return self._nearest(seen, self.alignment[0].valid)

    def _of_held(self, seen: Seen) -> Tensor:
        return self._nearest(seen, self.alignment[0].valid & self.held)

    def _nearest(self, seen: Seen, candidates: Tensor) -> Tensor:
        if not candidates.any():
            return seen.logits(self.model)
        return -prototype_distances(seen.z(self.model), self.alignment[0].prototypes, candidates)

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        server = HeldClassesServer if self.download == "local" else Server
        return server(initial)


class HeldClassesServer(Server):
    """Sends each client the prototypes of the classes that it uploaded, and no others."""

    sees_messages = True

    def __init__(self, initial: Message) -> None:
        super().__init__(initial)
        self.held: dict[int, Tensor] = {}

    def see(self, client: int, message: Message) -> Message:
        """Remember which classes the client holds."""
        prototypes = message.artifacts["prototypes"]
        assert isinstance(prototypes, ClassMeans)
        self.held[client] = prototypes.valid
        return message

    def message_for(self, client: int) -> Message:
        """The global prototypes of the client's classes; all of them before its first upload."""
        prototypes = self.message.artifacts.get("prototypes")
        if client not in self.held or not isinstance(prototypes, ClassMeans):
            return self.message
        count = torch.where(self.held[client].to(prototypes.count.device), prototypes.count, 0)
        own = ClassMeans(prototypes.mean, count, prototypes.sends_count)
        return Message(self.message.weights, {**self.message.artifacts, "prototypes": own}, self.message.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """The base's state and the classes held."""
        return {**super().state_dict(), "held": dict(self.held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.held = dict(state["held"])
