"""Fine-tuning before an evaluation, for any method: what its clients reach if each goes on by itself for a while.

FedAvg with fine-tuning is the baseline that personalised methods are compared with least and lose to most: Cheng,
Chadha, Duchi, "Federated Asymptotics: a model to compare federated learning algorithms", AISTATS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.core.freezing import batch_norms, only, single_sample, trainable, training
from fl_lightning.core.method import Method, Predictor, Seen, headline
from fl_lightning.core.precision import widened
from fl_lightning.core.steps import WideCopies
from fl_lightning.errors import require

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

KEY = "federation.evaluate.fine_tune"
NAME = "fine_tuned"


@dataclass(frozen=True)
class FineTune:
    """Test every client once more after local epochs on a throw-away copy, beside the method's own figures.

    The copy is trained on the client's training part, on the cross-entropy of what the method predicts by for Local-T
    (a personal model, the sum of two heads, …), after any adaptation of the method's own; masks and the like do not
    bind it. Nothing that a run goes on with changes. Columns: `Local-T/fine_tuned`, `Local-T_received/fine_tuned` (from
    what was received: for FedAvg the fine-tuned global model), `Global-T/fine_tuned` and so on; the last ones are under
    `final_received` in `summary.json`. Costs its epochs for every client and moment of every evaluated round.

    Args:
        epochs: passes over the training part, >= 1.
        lr: learning rate, > 0; null takes the optimizer's own, before any decay from round to round.
    """

    epochs: int = 1
    lr: float | None = None

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"{KEY}.epochs", "must be >= 1", self.epochs)
        require(self.lr is None or self.lr > 0, f"{KEY}.lr", "must be > 0 or null", self.lr)

    def wrap(self, ways: Mapping[str, Predictor]) -> dict[str, Predictor]:
        """A method's ways to predict, and the fine-tuned one beside them."""
        best = headline(ways, "Local-T")
        return dict(ways) if best is None else {**ways, NAME: Predictor(ways[best].scores, (), fine_tunes=True)}

    def tune(self, method: Method, data: OwnData) -> None:
        """Train the client on its own samples; its state is thrown away afterwards."""
        ways = method.predictors()
        way = ways[str(headline(ways, "Local-T"))]
        if way.adapts:
            method.adapt(data)
        copies = WideCopies(trainable(method), partial(method.fit.make_optimizer, decays=False, lr=self.lr))
        layers = batch_norms(method)
        with training(method), torch.enable_grad():
            for _ in range(self.epochs):
                for step in data.steps():
                    with single_sample(layers, len(step.y)):
                        loss = _loss(step.through(way.scores, Seen(step.x)), step.y)
                    if loss is not None:
                        copies.step(step.gradients(loss, copies.own))


def check_tunable(method: Method, x: Tensor) -> None:
    """Refuse to fine-tune what predicts by networks that never learn.

    Args:
        method: any client's.
        x: [1, …] an input.

    Raises:
        ConfigError: if there is no gradient.
    """
    ways = method.predictors()
    with training(method, False), torch.enable_grad():
        learns = ways[str(headline(ways, "Local-T"))].scores(Seen(x)).requires_grad
    require(learns, KEY, f"{type(method).__name__}'s predictions have no gradient to fine-tune by: must be null")


def train_copy(
    method: Method, data: OwnData, parameters: list[nn.Parameter], epochs: int, lr: float | None = None
) -> None:
    """Train some parameters of a throw-away copy on the method's cross-entropy, for `Method.adapt`.

    Args:
        method: the client's.
        data: its samples.
        parameters: what is trained; none is nothing to do.
        epochs: passes over the training part.
        lr: learning rate; None takes the optimizer's own, before any decay.
    """
    make_optimizer = partial(method.fit.make_optimizer, decays=False, lr=lr)
    train_outside(method, data, parameters, epochs, lambda step: step.task_loss(step.forward()), make_optimizer)


def train_outside(
    method: Method,
    data: OwnData,
    parameters: list[nn.Parameter],
    epochs: int,
    loss: Callable[[Step], Tensor],
    make_optimizer: Callable[[Any], Optimizer],
) -> None:
    """Train some parameters outside the local fit, in train mode.

    Args:
        method: the client's.
        data: its samples.
        parameters: what is trained; none is nothing to do.
        epochs: passes over the training part.
        loss: of a mini-batch.
        make_optimizer: makes the optimizer, of a list of parameters.
    """
    if not parameters or epochs == 0:
        return
    copies = WideCopies(parameters, make_optimizer)
    with training(method), torch.enable_grad(), only(method, parameters):
        for _ in range(epochs):
            for step in data.steps():
                copies.step(step.gradients(loss(step), parameters))


def _loss(scores: Tensor, y: Tensor) -> Tensor | None:
    """The cross-entropy over samples whose class may be predicted at all; None where there is none."""
    counts = scores.detach().gather(1, y[:, None])[:, 0].isfinite()
    return F.cross_entropy(widened(scores[counts]), y[counts]) if counts.any() else None
