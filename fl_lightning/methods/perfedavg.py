"""Per-FedAvg: the federation learns a model from which one gradient step makes each client's own.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, with its two approximations, FO and HF (section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server, Weighting
from fl_lightning.core.term import Term, term_sum
from fl_lightning.errors import require, require_choices
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.data.store import ClientData as LocalData

Approximation = Literal["FO", "HF"]


class Batch(NamedTuple):
    """A mini-batch that waits for its meta-step; on several devices this one's part of it, and what that is worth."""

    x: Tensor
    y: Tensor
    factor: float


class PerFedAvg(ClientModule):
    """FedAvg on the meta-loss F(w) = f(w − α ∇f(w)), f being the composite loss.

    A meta-step takes fresh mini-batches D, D′ (and D″ for HF) and steps from w itself:

        w′ = w − α ∇f(w; D),  u = ∇f(w′; D′),
        FO: g = u;  HF: g = u − α/(2δ) [∇f(w + δu; D″) − ∇f(w − δu; D″)],  w ← w − β g.

    An epoch has one meta-step for every two (HF: three) of its mini-batches and leaves over what does not suffice for
    another; a client with fewer goes through what it has again. At α = 0 it is FedAvg on the batches D′. Batch norm's
    statistics are those of the pass at w on D. FO costs two forward and backward passes a meta-step, HF four.

    An evaluation first takes a step of size α on one training batch, on a throw-away copy; Server-T is the model itself
    without that step. (Public codes adapt on test batches, or step from w′.)

    Args:
        alpha: α, size of the inner step, always plain SGD, >= 0.
        beta: β, size of the outer step as plain SGD, > 0; null hands g to the configured optimizer.
        approximation: ``FO`` leaves the second derivative out, ``HF`` takes it from a difference of gradients.
        delta: δ of that difference, > 0.
        adapt_steps: steps before an evaluation, >= 0.
        weighting: ``uniform`` is the plain mean over participants (the paper), ``samples`` weighs by samples.
        extra_terms: terms added to f.
    """

    shared = ("model",)
    paper = "Fallah et al., NeurIPS 2020"

    def __init__(
        self,
        model: SplitModel,
        alpha: float = 0.01,
        beta: float | None = None,
        approximation: Approximation = "FO",
        delta: float = 1e-3,
        adapt_steps: int = 1,
        weighting: Weighting = "uniform",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(alpha >= 0, "method.alpha", "must be >= 0 (0 is FedAvg)", alpha)
        require(beta is None or beta > 0, "method.beta", "must be > 0 or null", beta)
        require(delta > 0, "method.delta", "must be > 0", delta)
        require(adapt_steps >= 0, "method.adapt_steps", "must be >= 0", adapt_steps)
        require_choices("method", approximation=(approximation, Approximation), weighting=(weighting, Weighting))
        super().__init__(model, extra_terms=extra_terms)
        self.alpha = alpha
        self.beta = beta
        self.delta = delta
        self.adapt_steps = adapt_steps
        self.weighting = weighting
        self.batches_a_step = 2 if approximation == "FO" else 3

    # --- the local fit ------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        """The configured optimizer, or plain SGD(β), for w."""
        if self.beta is None:
            return super().configure_optimizers()
        self._plan = self.plan()
        return [torch.optim.SGD(plan.parameters, lr=self.beta * self.lr_factor) for plan in self._plan]

    def on_train_epoch_start(self) -> None:
        """Start an epoch with no batch waiting."""
        super().on_train_epoch_start()
        self._w = self._plan[0].parameters
        self._batches: list[Batch] = []
        self._meta_steps = 0

    def local_step(self, x: Tensor, y: Tensor) -> None:
        """One mini-batch: it waits until there are enough for a meta-step."""
        self._batches.append(Batch(x, y, 1.0 if self._devices is None else self._devices.factor))
        if len(self._batches) == self.batches_a_step:
            self._meta_step(self._batches)
            self._batches = []

    def on_train_epoch_end(self) -> None:
        """A client with too few batches for one meta-step goes through them again; then the rest of the epoch."""
        if self._meta_steps == 0 and self._batches:
            batches = [self._batches[index % len(self._batches)] for index in range(self.batches_a_step)]
            with self.trainer.precision_plugin.train_step_context():
                self._meta_step(batches)
        self._batches = []
        self._finish_accumulation()
        super().on_train_epoch_end()

    def _meta_step(self, batches: Sequence[Batch]) -> None:
        """Step w ← w − βg; with accumulation, on the mean of so many g."""
        assert self.settings is not None
        accumulate = self.settings.accumulate
        gradients = self.meta_gradient(self._w, batches)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        for parameter, gradient in zip(self._w, gradients, strict=True):
            gradient = gradient / accumulate if accumulate > 1 else gradient
            gradient = gradient if scaler is None else scaler.scale(gradient)  # its step divides again
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._meta_steps += 1
        if self._meta_steps % accumulate == 0:
            self.step(self.optimizer)

    def _finish_accumulation(self) -> None:
        assert self.settings is not None
        if self._meta_steps % self.settings.accumulate:
            self.step(self.optimizer)

    # --- the meta-gradient --------------------------------------------------------------------------------------------

    def meta_gradient(self, w: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
        """The meta-gradient g at the present weights, which are left as they are.

        On several devices g is the average of what they return, as with every gradient that an optimizer is given; what
        w is moved by on the way is averaged here, so that all are at the same w′ and w ± δu.

        Args:
            w: the parameters that the meta-loss is differentiated by.
            batches: D and D′ for FO; D, D′ and D″ for HF.
        """
        inner = self._averaged(self._gradient(w, batches[0], log=False))
        with self._moved(w, -self.alpha, inner):
            u = self._gradient(w, batches[1], log=True)
        if len(batches) == 2:
            return u
        u = self._averaged(u)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._moved(w, self.delta, u):  # both see the same dropout masks
            plus = self._gradient(w, batches[2], log=False)
        with self._moved(w, -self.delta, u):
            minus = self._gradient(w, batches[2], log=False, observe=False)
        factor = self.alpha / (2 * self.delta)
        return [g - factor * (p - m) for g, p, m in zip(u, plus, minus, strict=True)]

    def _gradient(self, w: Sequence[Tensor], batch: Batch, log: bool, observe: bool = True) -> list[Tensor]:
        """∇f at the present weights, or this device's share of it; the logged losses are those at w′."""
        x, y, factor = batch
        if self._devices is not None:
            self._devices.counts = factor > 0  # of this batch, not of the one that came in last
        with self._single_sample(len(y)):
            out = self.forward_pass(x, y)
        values = self.term_values(out, self._active)
        total = term_sum(values, self._term_weights)
        if log:
            self.log_losses({"loss": total, **values}, len(y))
        gradient = self.gradients(total if factor == 1 else total * factor, w)
        if observe:
            self.observe(out)
        return gradient

    def _averaged(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients if self._devices is None else self._devices.average(gradients)

    @contextmanager
    def _moved(self, w: Sequence[Tensor], step: float, direction: Sequence[Tensor]) -> Iterator[None]:
        """Be at w + step · direction for a block, which leaves no trace in batch norm's statistics either."""
        before = [parameter.detach().clone() for parameter in w]
        with torch.no_grad():
            for parameter, own in zip(w, direction, strict=True):
                parameter.add_(own, alpha=step)
        with self.keeping_statistics():
            yield
        with torch.no_grad():
            for parameter, own in zip(w, before, strict=True):
                parameter.copy_(own)

    # --- the personal model, and the server ---------------------------------------------------------------------------

    def adapt(self, data: LocalData) -> None:
        """Step to w − α ∇f(w; D), on the cross-entropy of a training batch; this state is thrown away."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        was_training = self.training
        self.train()
        for _ in range(self.adapt_steps):
            x, y, _size = self.own_batches(data)[0]
            with torch.enable_grad(), self._single_sample(len(y)):
                loss = self.all_terms[0](self, self.forward_pass(x, y))
            with torch.no_grad():
                for parameter, gradient in zip(parameters, self.gradients(loss, parameters), strict=True):
                    parameter.sub_(gradient, alpha=self.alpha)
        self.train(was_training)

    def make_server(self, initial: Message) -> Server:  # noqa: D102
        return Server(initial, self.artifact_rules(), self.weighting)
