"""pFedMe: personal models through Moreau envelopes of the clients' risks, whose gradients move the global one.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. Checked against
the authors' code.
"""

from __future__ import annotations

from typing_extensions import override

from fl_lightning.core.freezing import trainable
from fl_lightning.core.method import Method, Phase, Predictor, Step, Term, uniform_mean
from fl_lightning.core.personal import personal_and_global, personal_copy
from fl_lightning.errors import require
from fl_lightning.losses.moreau_envelope import PULL, MoreauEnvelope
from fl_lightning.models.split import SplitModel


class pFedMe(Method):
    """Each mini-batch D moves a personal model θ near the local one w, then w towards θ.

        θ ← θ − η_p (∇f(θ; D) + λ(θ − w)), K times,  w ← w − ηλ (w − θ),  w^{t+1} = mean_i w_i

    The K steps are plain ones; λ(w − θ) goes to the configured optimizer, of rate η. θ starts a fit from the w that
    came in, and goes on from mini-batch to mini-batch, as in the authors' code. `Local-T` and `Global-T` are θ's,
    `Server-T` is w's. The paper's β, the server's step from w^t towards the mean, is `federation.server_optimizer:
    ServerMomentum` with that rate and momentum 0. (The authors' code also decays θ, by 0.001, and weighs by samples.)

    Args:
        weight: λ, > 0; the paper's: 15, with η = 0.005.
        inner_steps: K, >= 1.
        personal_lr: η_p, > 0 and below 2/λ, from where on θ runs away; 0.09 in the authors' code, which overshoots.
        extra_terms: terms added to f.
    """

    shared = ("model",)
    paper = "Dinh et al., NeurIPS 2020"
    setup = personal_copy
    make_server = uniform_mean
    personal: SplitModel  # θ

    def __init__(
        self,
        model: SplitModel,
        weight: float = 15.0,
        inner_steps: int = 5,
        personal_lr: float = 0.03,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight > 0, "method.weight", "must be > 0", weight)
        require(inner_steps >= 1, "method.inner_steps", "must be >= 1", inner_steps)
        rule = f"must be > 0 and below 2 / weight ({2 / weight:g}), from where on θ runs away from w"
        require(0 < personal_lr < 2 / weight, "method.personal_lr", rule, personal_lr)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.envelope = weight, MoreauEnvelope(weight, personal_lr, inner_steps)

    @override
    def phases(self) -> list[Phase]:
        parts = {"local": ("model", "terms"), "personal": ("personal",)}  # of which the second steps by itself
        return [Phase("all", through="personal", parts=parts)]

    @override
    def losses(self) -> dict[str, float]:
        return {PULL: self.weight}

    @override
    def on_fit_start(self) -> None:
        self.personal.load_state_dict(self.model.state_dict())
        self.envelope.begin(trainable(self.personal))

    @override
    def local_step(self, step: Step) -> None:
        theta, w, of_terms = trainable(self.personal), trainable(self.model), trainable(self.terms)
        slopes = self.envelope.gradients(step, theta, w, of_terms)
        step.follow([slope / self.fit.accumulate for slope in slopes], [*w, *of_terms])

    @override
    def on_fit_end(self) -> None:
        for own, near in zip(self.model.buffers(), self.personal.buffers(), strict=True):
            own.copy_(near)  # w makes no pass

    @override
    def network(self) -> SplitModel:
        return self.personal

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self.personal, self.model)
