"""FedNova: every client's progress counts per step that it made, so that who works more does not pull the optimum away.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, equations 5 and 6. Checked against the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.aggregation import WeightedMean, accumulation_dtype
from fl_lightning.core.facts import Facts, OptimizerFactory
from fl_lightning.core.message import Artifact, Message
from fl_lightning.core.method import Method
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.proximal import Proximal
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData

EffectiveSteps = Literal["auto", "normaliser", "steps"]
SCALARS = ("normaliser", "steps", "lr_factor")
"""What may travel beside the model: a_i, τ_i and η."""


class FedNova(Method):
    """FedAvg whose server averages normalised differences.

        θ^t = θ^{t−1} − τ_eff Σ p_i d_i,  d_i = (θ^{t−1} − θ_i)/a_i

    a_i is how far a constant gradient of 1 would have brought the client's optimizer, in units of its learning rate,
    in the τ_i optimizer steps that it really made: τ_i for plain SGD and Adam, (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) for
    momentum ρ, (1 − (1 − ημ)^τ)/(ημ) for the proximal term; it is read off the optimizer itself, on a scalar, so that
    all of them mix. The message is the model and a_i. With equal a_i and the ``normaliser`` it is FedAvg, bit for bit.
    The paper's theory is for SGD; for Adam this is an extension. Batch norm's statistics are averaged plainly:
    normalising them can make a variance negative. So are weights of terms beside a proximal one.

    Args:
        mu: μ of FedProx's term, >= 0; a `Proximal` among the extra terms does the same.
        effective_steps: τ_eff: ``normaliser`` is Σ p_i a_i, ``steps`` the paper's Σ p_i τ_i; ``auto`` is the authors'
            code: ``steps`` with a proximal term, else ``normaliser``.
        server_momentum: γ, in [0, 1), of u ← γu + (θ^{t−1} − θ^t)/η, θ^t ← θ^{t−1} − ηu, with η the round's learning
            rate in units of the first one's; where that is not 1 it is sent beside a_i.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Wang et al., NeurIPS 2020"

    def __init__(
        self,
        model: SplitModel,
        mu: float = 0.0,
        effective_steps: EffectiveSteps = "auto",
        server_momentum: float = 0.0,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(mu >= 0, "method.mu", "must be >= 0", mu)
        require_choices("method", effective_steps=(effective_steps, EffectiveSteps))
        require(0 <= server_momentum < 1, "method.server_momentum", "must be in [0, 1)", server_momentum)
        super().__init__(model, terms=[Proximal(mu)] if mu else [], extra_terms=extra_terms)
        self.mu = sum(term.weight for term in self.terms if isinstance(term, Proximal))
        by_code = "steps" if self.mu else "normaliser"
        self.effective_steps = by_code if effective_steps == "auto" else effective_steps
        self.server_momentum = server_momentum
        self._walks: dict[float, UnitWalk] = {}
        self._make: OptimizerFactory | None = None

    def on_fit_start(self) -> None:
        """Learn what the fit steps with: of a LightningModule, its own optimizer."""
        own = self.model.own.one_optimizer()
        if own is not None:
            options = {key: own.param_groups[0][key] for key in own.defaults}
            self._make = lambda parameters: type(own)(parameters, **options)

    def normaliser(self, steps: int) -> float:
        """a_i = ‖a_i‖₁ of so many steps."""
        strength = self.mu * self.fit.lr if self.mu else 0.0  # ημ
        if strength not in self._walks:
            self._walks[strength] = UnitWalk(self._make or self.fit.make_optimizer, strength)
        return self._walks[strength].distance(steps)

    @record_safe()
    def send(self, data: OwnData) -> Message:
        """The model, a_i, and beside it τ_i and η where the server needs them."""
        message, made = super().send(data), self.fit.num_steps
        scalars = {"normaliser": self.normaliser(made)}
        if self.effective_steps == "steps" and scalars["normaliser"] != made:
            scalars["steps"] = float(made)
        if self.server_momentum and self.fit.lr_factor != 1:
            scalars["lr_factor"] = self.fit.lr_factor
        for name, value in scalars.items():
            message.artifacts[name] = torch.tensor([value], dtype=accumulation_dtype(self.facts.device))
        return message

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        held = "model." if self.mu else ""  # no proximal term holds back what terms share, and a_i is not theirs
        trained = {n for n, _ in self.named_parameters() if n.startswith(held)} & initial.weights.keys()
        return NormalisedServer(initial, trained, self.server_momentum)


class UnitWalk:
    """How far an optimizer gets from 0 under a constant gradient of 1, in units of its learning rate.

    Args:
        optimizer: makes the optimizer; its weight decay is left out.
        pull: ημ: the gradient is 1 − ημ · (distance in those units), FedProx's term towards where it started.
    """

    def __init__(self, optimizer: OptimizerFactory, pull: float = 0.0) -> None:
        self.place = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.pull = pull
        self.optimizer = optimizer([self.place])
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0
            group["weight_decay"] = 0.0
        self.distances = [0.0]

    def distance(self, steps: int) -> float:
        """Distance after so many steps; those taken once are remembered."""
        while len(self.distances) <= steps:
            self.place.grad = 1 + self.pull * self.place.detach()
            self.optimizer.step()
            self.distances.append(-float(self.place.detach()))
        return self.distances[steps]


class NormalisedServer(Server):
    """θ^t = θ^{t−1} + κ (M − θ^{t−1}): M is the mean of the models by n_i/a_i, κ = (Σ p_i τ_eff,i)(Σ p_i/a_i).

    The sum of the paper's formula in another order: with equal a_i, M is FedAvg's mean; κ is 1 exactly where
    τ_eff,i is a_i, and ≥ 1 where it is for unequal ones.

    Args:
        initial: as the base's.
        trained: names of the weights that are normalised; the others, batch norm's statistics, are averaged plainly.
        momentum: γ.
    """

    sees_messages = True
    takes_noise = False  # a client counts by the steps that it made

    def __init__(self, initial: Message, trained: set[str], momentum: float = 0.0) -> None:
        super().__init__(initial)
        self.trained = trained
        self.momentum = momentum
        self.velocity: dict[str, Tensor] = {}

    @override
    def open_round(self) -> None:
        super().open_round()
        self._mean = WeightedMean()
        self._reference: float | None = None  # the first client's a; relative to it, equal ones are exactly 1
        self._inverse = 0.0  # Σ n_i / r_i, r_i = a_i / reference
        self._effective = 0.0  # Σ n_i τ_eff,i / reference
        self._lr_factor = 1.0  # η

    def see(self, client: int, message: Message) -> Message | None:
        """Take the trained weights; a client that made no step is left out."""
        artifacts = dict(message.artifacts)
        sent = {name: float(_tensor(artifacts.pop(name))) for name in SCALARS if name in artifacts}
        normaliser = sent["normaliser"]
        if normaliser == 0:
            return None
        self._lr_factor = sent.get("lr_factor", 1.0)
        if self._reference is None:
            self._reference = normaliser
        weight = message.num_samples * (self._reference / normaliser)
        self._mean.add({name: tensor for name, tensor in message.weights.items() if name in self.trained}, weight)
        self._inverse += weight
        self._effective += message.num_samples * (sent.get("steps", normaliser) / self._reference)
        others = {name: tensor for name, tensor in message.weights.items() if name not in self.trained}
        return Message(others, artifacts, message.num_samples)

    def close_round(self) -> None:
        """Turn what came in into the next message. If nothing came in, the old one stays."""
        before, moved = self.message.weights, {}
        began = self.started.weights
        if not self._mean.empty:
            factor = (self._effective / self.num_samples) * (self._inverse / self.num_samples)
            moved = {name: self._moved(name, began[name], m, factor) for name, m in self._mean.result().items()}
        super().close_round()
        weights = {name: moved.get(name, self.message.weights.get(name, before[name])) for name in before}
        self.message = replace(self.message, weights=weights)

    def _moved(self, name: str, before: Tensor, mean: Tensor, factor: float) -> Tensor:
        wide = accumulation_dtype(before.device)
        after = torch.lerp(before.to(wide), mean.to(wide), factor)  # exactly the mean at a factor of 1
        if self.momentum:
            step = (before.to(wide) - after) / self._lr_factor
            self.velocity[name] = self.momentum * self.velocity[name] + step if name in self.velocity else step
            after = before.to(wide) - self._lr_factor * self.velocity[name]
        return after.to(before.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "velocity": dict(self.velocity)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.velocity = dict(state["velocity"])


def _tensor(artifact: Artifact) -> Tensor:
    assert isinstance(artifact, Tensor)
    return artifact
