"""FedGH: private bodies under one classifier, which the server trains on the clients' class means.

Yi, Wang, Liu, Shi, Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023,
Algorithm 1. In the authors' public code no optimizer holds the server's head, which stays as it was drawn, and class
means are means of batch means; another public code lets the server train client 0's head in place. Here the server
trains a head of its own, on means over samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server, TrainingServer
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.models.copying import copied
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData

SampleWeighting = Literal["uniform", "count"]
UPLOAD = "class_means"


class FedGH(Method):
    """Each fit starts from the server's head on the client's own body; class means of embeddings go up.

        clients: min L_ce over body and head,  server: min_h Σ_{i,c} CE(h(v_{i,c}), c)

    v_{i,c} are the class means that came in; the server sends its head h to all. Bodies may differ, if their
    embeddings have one size. `Local-T` is the own body under the head as the client trained it (the paper's
    figure), `Local-T_received` the own body under the server's.

    Args:
        server_lr: learning rate of the server's SGD, > 0.
        server_momentum: its momentum, in [0, 1); kept from round to round.
        server_epochs: passes over the round's class means, >= 0; 0 leaves the head as it was drawn.
        server_batch_size: class means a step, >= 1.
        weighting: all class means count alike (``uniform``) or by the samples behind them (``count``).
        extra_terms: terms added to the loss.
    """

    shared = ()
    paper = "Yi et al., ACM MM 2023"

    def __init__(
        self,
        model: SplitModel,
        server_lr: float = 0.01,
        server_momentum: float = 0.0,
        server_epochs: int = 1,
        server_batch_size: int = 10,
        weighting: SampleWeighting = "uniform",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(server_lr > 0, "method.server_lr", "must be > 0", server_lr)
        require(0 <= server_momentum < 1, "method.server_momentum", "must be in [0, 1)", server_momentum)
        require(server_epochs >= 0, "method.server_epochs", "must be >= 0", server_epochs)
        require(server_batch_size >= 1, "method.server_batch_size", "must be >= 1", server_batch_size)
        require_choices("method", weighting=(weighting, SampleWeighting))
        super().__init__(model, extra_terms=extra_terms)
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.server_epochs = server_epochs
        self.server_batch_size = server_batch_size
        self.weighting: SampleWeighting = weighting

    def send(self, data: OwnData) -> Message:
        """The mean embedding of each class that the client holds, over its training part in eval mode."""
        message, seen = super().send(data), data.collected()
        means = ClassMeans.from_samples(seen.z, seen.y, self.model.num_classes)
        return replace(message, artifacts={**message.artifacts, UPLOAD: means})

    def interface(self) -> dict[str, tuple[int, ...]]:
        """The head and the class means must have one shape everywhere."""
        head = {f"model.head.{name}": tuple(tensor.shape) for name, tensor in self.model.head.state_dict().items()}
        return {**super().interface(), **head, UPLOAD: (self.model.num_classes, self.model.embedding_size)}

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return HeadServer(
            initial,
            copied(self.model.head),
            self.server_lr,
            self.server_momentum,
            self.server_epochs,
            self.server_batch_size,
            self.weighting,
        )


class HeadServer(TrainingServer):
    """Trains one head on the class means of a round and sends it to everybody.

    Args:
        initial: the first message, without the head.
        head: the head as it was drawn; the server's own copy.
        lr: learning rate.
        momentum: of SGD.
        epochs: passes over the class means of a round.
        batch_size: class means a step.
        weighting: whether class means count alike or by samples.
    """

    hears_mean = True
    trains_on = (UPLOAD,)

    def __init__(
        self,
        initial: Message,
        head: nn.Module,
        lr: float,
        momentum: float,
        epochs: int,
        batch_size: int,
        weighting: SampleWeighting,
    ) -> None:
        super().__init__(initial)
        self.head = head
        self.dtypes = {name: tensor.dtype for name, tensor in head.state_dict().items()}  # the clients'
        self.lr = lr
        self.momentum = momentum
        self.epochs = epochs
        self.batch_size = batch_size
        self.weighting = weighting

    def build(self) -> nn.Module:
        """The head that all clients start from."""
        return self.head

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """SGD; its momentum crosses rounds."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)

    def train(self, messages: Mapping[int, Message]) -> None:
        """`epochs` passes of mini-batch SGD over all (class mean, class) that came in."""
        v, y, n = pooled(messages.values())
        v = v.to(next(self.network.parameters()).dtype)  # the server's, whatever the clients'
        for _ in range(self.epochs):
            for batch in torch.randperm(len(y)).to(y.device, non_blocking=True).split(self.batch_size):
                self.network.train(len(batch) > 1)  # batch norm cannot normalise a batch of one
                losses = F.cross_entropy(self.network(v[batch]), y[batch], reduction="none")
                self.network_optimizer.zero_grad()
                weighted_mean(losses, n[batch] if self.weighting == "count" else None).backward()
                self.network_optimizer.step()

    def publish(self, message: Message) -> Message:
        """The head goes down, the class means do not."""
        own = self.network.state_dict()
        head = {f"model.head.{name}": tensor.to(self.dtypes[name], copy=True) for name, tensor in own.items()}
        artifacts = {name: artifact for name, artifact in message.artifacts.items() if name != UPLOAD}
        return replace(message, weights={**message.weights, **head}, artifacts=artifacts)


def pooled(messages: Iterable[Message]) -> tuple[Tensor, Tensor, Tensor]:
    """All class means of a round: v [M, D], their classes [M] int64, and the samples behind each [M] int64."""
    uploads = [message.artifacts[UPLOAD] for message in messages]
    means = [upload for upload in uploads if isinstance(upload, ClassMeans)]
    rows = [(m.mean[m.valid], m.valid.nonzero().flatten(), m.count[m.valid]) for m in means]
    v, y, n = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return v, y, n


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Mean of losses [M], weighted by `weights` [M] where they are given."""
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
