"""Per-FedAvg: the federation learns a model from which one gradient step makes each client's own.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, with its two approximations, FO and HF (section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.freezing import keeping_statistics, training
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase, Predictor
from fl_lightning.core.server import Server, Weighting
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

Approximation = Literal["FO", "HF"]


class PerFedAvg(Method):
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

    def remark(self, precision: str) -> str:
        """See `federation.remarks.Remarking`."""
        if self.batches_a_step == 3 and self.delta < 0.01 and precision.startswith(("bf16", "16")):
            return f"HF's difference of gradients drowns in {precision}'s rounding; take FO, delta: 0.01 or 32-true"
        if precision in ("bf16-true", "16-true") and self.alpha:
            return f"the step of alpha, in a fit and in what is tested, is rounded to {precision}; take bf16-mixed"
        return ""

    # --- the local fit ------------------------------------------------------------------------------------------------

    def phases(self) -> list[Phase]:
        """The configured optimizer, or plain SGD(β), for w."""
        if self.beta is None:
            return [Phase("all")]
        return [Phase("all", optimizer=partial(torch.optim.SGD, lr=self.beta))]

    @override
    def on_fit_start(self) -> None:
        self._w = [parameter for parameter in self.parameters() if parameter.requires_grad]

    def local_step(self, step: Step) -> None:
        """One mini-batch: it waits until there are enough for a meta-step.

        A client with too few batches for one meta-step goes through them again; then the rest of the epoch.
        """
        if step.is_first:
            self._waiting: list[Step] = []
            self._meta_steps = 0
        self._waiting.append(step)
        if len(self._waiting) == self.batches_a_step:
            self._meta_step(step, self._waiting)
            self._waiting = []
        elif step.is_last and self._meta_steps == 0:
            self._meta_step(step, [self._waiting[i % len(self._waiting)] for i in range(self.batches_a_step)])
        elif step.is_last and self._meta_steps % self.fit.accumulate:
            step.follow([], [], steps_now=True)

    def _meta_step(self, step: Step, steps: Sequence[Step]) -> None:
        """Step w ← w − βg; with accumulation, on the mean of so many g."""
        gradients, values = self.meta_gradient(self._w, steps)
        step.log(values, len(steps[1].y) if steps[1].part.counts else 0)
        self._meta_steps += 1
        accumulate = self.fit.accumulate
        shares = [gradient / accumulate if accumulate > 1 else gradient for gradient in gradients]
        step.follow(shares, self._w, steps_now=step.is_last or self._meta_steps % accumulate == 0)

    # --- the meta-gradient --------------------------------------------------------------------------------------------

    def meta_gradient(self, w: Sequence[Tensor], steps: Sequence[Step]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The meta-gradient g at the present weights, which are left as they are, and the terms' values at w′.

        Args:
            w: the parameters that the meta-loss is differentiated by.
            steps: of D and D′ for FO; of D, D′ and D″ for HF. One that comes again is observed once.
        """
        new = [all(own is not earlier for earlier in steps[:place]) for place, own in enumerate(steps)]
        with self._moved(w, -self.alpha, self._gradient(w, steps[0])[0]):
            u, values = self._gradient(w, steps[1], observe=new[1])
        if len(steps) == 2:
            return u, values
        devices = [self.facts.device] if self.facts.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._moved(w, self.delta, u):  # both see the same dropout masks
            plus, _ = self._gradient(w, steps[2], observe=new[2])
        with self._moved(w, -self.delta, u):
            minus, _ = self._gradient(w, steps[2], observe=False)
        factor = self.alpha / (2 * self.delta)
        return [g - factor * (p - m) for g, p, m in zip(u, plus, minus, strict=True)], values

    def _gradient(
        self, w: Sequence[Tensor], step: Step, observe: bool = True
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """∇f at the present weights, and the terms' values."""
        out = step.forward()
        values = step.values(out)
        gradient = step.gradients(step.total(values), w)
        if observe:
            step.observe(out)
        return gradient, values

    @contextmanager
    def _moved(self, w: Sequence[Tensor], step: float, direction: Sequence[Tensor]) -> Iterator[None]:
        """Be at w + step · direction for a block, which leaves no trace in batch norm's statistics either."""
        before = [parameter.detach().clone() for parameter in w]
        with torch.no_grad():
            for parameter, own in zip(w, direction, strict=True):
                parameter.add_(own, alpha=step)
        with keeping_statistics(self):
            yield
        with torch.no_grad():
            for parameter, own in zip(w, before, strict=True):
                parameter.copy_(own)

    # --- the personal model, and the server ---------------------------------------------------------------------------

    @override
    def predictors(self) -> dict[str, Predictor]:
        return {"": Predictor(lambda seen: seen.logits(self.model), adapts=True)}

    def adapt(self, data: OwnData) -> None:
        """Step to w − α ∇f(w; D), on the cross-entropy of a training batch; this state is thrown away."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with training(self):
            for _ in range(self.adapt_steps):
                step = data.steps()[0]
                with torch.enable_grad():
                    loss = step.values(step.forward(), [self.terms.cross_entropy])["cross_entropy"]
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, step.gradients(loss, parameters), strict=True):
                        parameter.sub_(gradient, alpha=self.alpha)

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return Server(initial, weighting=self.weighting)
