"""FedTGP: FedProto whose global prototypes are trained on the server, with a margin between classes.

Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1; checked against the authors' code. That code
also sends the untrained prototypes of classes that nobody ever held; here these do not exist yet. Its authors say that
the prototypes need more than 1,000 rounds to converge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Method, Predictor, Seen
from fl_lightning.core.server import Server, TrainingServer
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.prototype import PrototypeAlignment, prototype_distances
from fl_lightning.losses.prototype_margin import Gap, prototype_gap, prototype_margin_loss
from fl_lightning.models.split import SplitModel

Inference = Literal["prototype", "classifier"]


class FedTGP(Method):
    """Private models, whose embeddings are pulled towards prototypes that the server trains.

        clients: L_ce + λ MSE(f(x), T_y),  server: −log softmax_k( −(‖u − T_k‖ + δ [k = c]) )_c

    Clients send the mean embedding u of each class c that they hold; on these the server trains T_c = TGP(c), with
    δ = min(gap, τ), the gap being that of the round's class means. Prediction takes the nearest prototype; the
    classifier's accuracy is logged beside it, and predicts until prototypes were received. Clients' models may
    differ, if their embeddings have one size. At λ = 0 clients train as Local's.

    Args:
        weight: λ, >= 0.
        server_lr: learning rate of the server's SGD, > 0; its optimizer is made anew for every round.
        server_epochs: S, passes over the round's class means, >= 0.
        server_batch_size: class means a step, >= 1.
        max_margin: τ, the largest margin δ, >= 0.
        gap: ``nearest``, the largest distance of a class to its nearest neighbour (the authors' code), or ``pairwise``,
            the largest distance of all.
        inference: which prediction is the headline; both are logged.
        extra_terms: terms added to the loss.
    """

    shared = ()
    paper = "Zhang et al., AAAI 2024"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 10.0,
        server_lr: float = 0.01,
        server_epochs: int = 100,
        server_batch_size: int = 10,
        max_margin: float = 100.0,
        gap: Gap = "nearest",
        inference: Inference = "prototype",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        require(server_lr > 0, "method.server_lr", "must be > 0", server_lr)
        require(server_epochs >= 0, "method.server_epochs", "must be >= 0", server_epochs)
        require(server_batch_size >= 1, "method.server_batch_size", "must be >= 1", server_batch_size)
        require(max_margin >= 0, "method.max_margin", "must be >= 0", max_margin)
        require_choices("method", gap=(gap, Gap), inference=(inference, Inference))
        alignment = PrototypeAlignment(weight, average="valid")
        alignment.predicts = True  # at weight 0 there is no pull, but still the nearest prototype
        super().__init__(model, terms=[alignment], extra_terms=extra_terms)
        self.server_lr = server_lr
        self.server_epochs = server_epochs
        self.server_batch_size = server_batch_size
        self.max_margin = max_margin
        self.gap: Gap = gap
        self.inference = inference

    @property
    def alignment(self) -> PrototypeAlignment:
        """The pull towards the prototypes, which holds those that were received."""
        return next(term for term in self.terms if isinstance(term, PrototypeAlignment))

    def predictors(self) -> dict[str, Predictor]:
        """By the nearest prototype, and by the classifier; one of them gives the headline figures."""
        ways = {"prototype": Predictor(self._nearest), "classifier": Predictor(lambda seen: seen.logits(self.model))}
        return {name: way if name == self.inference else replace(way, figures=()) for name, way in ways.items()}

    def _nearest(self, seen: Seen) -> Tensor:
        alignment = self.alignment
        if not alignment.valid.any():
            return seen.logits(self.model)
        return -prototype_distances(seen.z(self.model), alignment.prototypes, alignment.valid)

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return PrototypeServer(
            initial,
            self.model.num_classes,
            self.model.embedding_size,
            self.server_lr,
            self.server_epochs,
            self.server_batch_size,
            self.max_margin,
            self.gap,
        )


class PrototypeNetwork(nn.Module):
    """TGP: Embedding(C, D) → Linear(D, D) → ReLU → Linear(D, D), one prototype a class.

    Args:
        num_classes: C.
        size: D.
    """

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(num_classes, size)
        self.layers = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))

    def forward(self) -> Tensor:
        """The prototypes of all classes [C, D]."""
        return self.layers(self.classes.weight)


class PrototypeServer(TrainingServer):
    """Trains the prototypes on the class means of a round; the network persists, its optimizer does not.

    Args:
        initial: the first message.
        num_classes: C.
        size: D.
        lr: learning rate.
        epochs: S, passes over the class means of a round.
        batch_size: class means a step.
        max_margin: τ.
        gap: how the margin follows the class means.
    """

    hears_mean = True
    trains_on = ("prototypes",)

    def __init__(
        self,
        initial: Message,
        num_classes: int,
        size: int,
        lr: float,
        epochs: int,
        batch_size: int,
        max_margin: float,
        gap: Gap,
    ) -> None:
        super().__init__(initial)
        self.num_classes = num_classes
        self.size = size
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.max_margin = max_margin
        self.gap: Gap = gap

    def setup(self, facts: Facts) -> None:
        """No class has been uploaded yet."""
        self.uploaded = torch.zeros(self.num_classes, dtype=torch.long, device=facts.device)
        super().setup(facts)

    def build(self) -> nn.Module:
        """The prototype network."""
        return PrototypeNetwork(self.num_classes, self.size)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """SGD, as in the authors' code."""
        return SGD(parameters, lr=self.lr)

    def train(self, messages: Mapping[int, Message]) -> None:
        """S passes of mini-batch SGD over all uploaded class means, in a new order each."""
        uploads = [message.artifacts["prototypes"] for message in messages.values()]
        means = [upload for upload in uploads if isinstance(upload, ClassMeans)]
        kind = next(self.network.parameters()).dtype  # the server's, whatever the clients'
        u = torch.cat([m.mean[m.valid] for m in means]).to(self.device, kind)
        y = torch.cat([m.valid.nonzero().flatten() for m in means]).to(self.device)
        by_class = ClassMeans.from_samples(u, y, self.num_classes)
        self.uploaded = self.uploaded | by_class.valid
        margin = min(prototype_gap(by_class.mean[by_class.valid], self.gap), self.max_margin)
        self.network_optimizer = self.make_optimizer(self.network.parameters())
        for _ in range(self.epochs):
            for batch in torch.randperm(len(y)).to(self.device, non_blocking=True).split(self.batch_size):
                self.network_optimizer.zero_grad()
                prototype_margin_loss(u[batch], y[batch], self.network(), margin).backward()
                self.network_optimizer.step()

    @torch.no_grad()
    def publish(self, message: Message) -> Message:
        """The trained prototypes, in the place of the averages, of the classes that somebody has uploaded."""
        if not self.uploaded.any():
            return message
        prototypes = ClassMeans(self.network(), self.uploaded.clone(), sends_count=False)
        return replace(message, artifacts={**message.artifacts, "prototypes": prototypes})

    def state_dict(self) -> dict[str, Any]:
        """The base's state, and which classes have been uploaded."""
        return {**super().state_dict(), "uploaded": self.uploaded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.uploaded = state["uploaded"]
