"""FedFomo: every client weighs the models of others by how much better than its own they do on its own data.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.
Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.division import keeps_all
from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.lending import WISH, Lending, LendingServer, as_vector, lent_models, shared_entries
from fl_lightning.core.method import Facts, Message, Method, OwnData, Predictor, Term, personal_only
from fl_lightning.errors import require_choices
from fl_lightning.losses.better_models import Baseline, move_towards_better
from fl_lightning.models.split import SplitModel


class FedFomo(Method):
    """Personal models θ_i, which start each fit from a combination of models that do better than a baseline θ⁰_i.

        θ_i ← θ⁰_i + Σ_n w_n (θ_n − θ⁰_i),  w_n ∝ max(0, g_n),  g_n = (L_i(θ⁰_i) − L_i(θ_n)) / ‖θ_n − θ⁰_i‖,  Σ w_n = 1

    n runs over the client's own trained model and those that the server lends it: of the models that others have sent
    last, the M of the largest sums of g_n so far, or, each with probability ε, random ones. If none is better, it is
    θ⁰_i. L_i is the cross-entropy on the client's validation part (`data.validation_fraction`), or without one on its
    training part, or where clients are tested on it (`data.evaluate_on`). `Local-V` is thus on samples by which models
    were weighed. The model and the g_n go up, M models come down. (One public code evaluates models in train mode.)

    Args:
        lending: M and ε.
        baseline: θ⁰_i: the model from which the client's last fit started (``start``, the authors' code), or the one
            with which it ended (``last``, as one public code has it; for what terms share of their own in any case).
        extra_terms: terms added to the loss of the fit.
    """

    shared = ("model",)
    paper = "Zhang et al., ICLR 2021"
    is_kept = keeps_all
    gains: Tensor  # g, [N]

    def __init__(
        self,
        model: SplitModel,
        lending: Lending = Lending(),
        baseline: Baseline = "start",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_choices("method", baseline=(baseline, Baseline))
        super().__init__(model, extra_terms=extra_terms)
        self.lending, self.baseline = lending, baseline
        self.register_buffer("has_begun", torch.zeros((), dtype=torch.bool))  # before, θ⁰ is nobody's

    @override
    def setup(self) -> None:
        self.start = frozen_copy(self.model)  # θ⁰
        self.register_buffer("gains", torch.zeros(self.facts.num_clients), persistent=False)

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        self.gains.zero_()
        models, weights, start = lent_models(message), shared_entries(self), self.start.state_dict()
        if models:
            own = models[data.client] = as_vector(weights)
            begun = as_vector({name: start.get(name.removeprefix("model."), now) for name, now in weights.items()})
            base = begun if self.baseline == "start" and self.get_buffer("has_begun") else own
            move_towards_better(weights, base, models, data.risk, self.model.parameters(), self.gains)
        super().receive(message.without_weights(), data)  # last: terms compare with what the fit starts from

    @override
    def on_fit_start(self) -> None:
        self.start.load_state_dict(self.model.state_dict())
        self.get_buffer("has_begun").fill_(True)

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        message.artifacts[WISH] = self.gains.clone()
        return message

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(self.model)

    @override
    def make_server(self, initial: Message, facts: Facts) -> LendingServer:
        return LendingServer(initial, self.lending, adds=True)
