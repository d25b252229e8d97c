"""FedCP: a policy takes each sample's features apart, for a head that all share and a head of the client's own.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy", KDD 2023. Checked against the authors' code.
"""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Message, Method, OwnData, Parts, Predictor, Step, Term, personal_only
from fl_lightning.errors import require
from fl_lightning.losses.discrepancy import fixed_discrepancy
from fl_lightning.models.conditional import ConditionalPolicy, class_direction
from fl_lightning.models.split import SplitModel


class FedCP(Method):
    """A body f, a policy and a head g are shared, where g stands still in the fit; a head p stays.

        L = CE(p(r ⊙ z) + g(s ⊙ z), y) + λ MMD(z, f⁰(x)),  z = f(x),  (r, s) = softmax of policy(z ⊙ v/‖v‖),  r + s = 1

    f⁰ is the body as it came in, v the sum of the classes' weight vectors in p at that moment (of several layers'
    product); in place of g each client sends (p + g)/2. `Local-T` and `Global-T` are by both heads. (The authors' code
    has a random v in the first round, and draws the policy's Gumbel noise when it predicts, too.)

    Args:
        weight: λ, >= 0.
        noisy: whether the policy's softmax has Gumbel noise in the fit.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body", "generic.head", "policy")
    paper = "Zhang et al., KDD 2023"
    context: Tensor  # v, [D]

    def __init__(
        self, model: SplitModel, weight: float = 5.0, noisy: bool = True, extra_terms: list[Term] | None = None
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.noisy = weight, noisy

    @override
    def setup(self) -> None:
        self.generic = frozen_copy(nn.ModuleDict({"body": self.model.body, "head": self.model.head}))  # f⁰, g
        self.policy = ConditionalPolicy(self.model.embedding_size, self.noisy)
        self.register_buffer("context", class_direction(self.model), persistent=False)

    @override
    def is_kept(self, name: str, module: nn.Module) -> bool:
        return super().is_kept(name, module) and not name.startswith("generic.body.")

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.generic["body"].load_state_dict(self.model.body.state_dict())
        self.context.copy_(class_direction(self.model))

    @override
    def losses(self) -> dict[str, float]:
        return {"discrepancy": self.weight}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        out = out.predicting(step.through(self._classify, out.z))
        values = step.values(out)
        if self.weight:
            values["discrepancy"] = fixed_discrepancy(out.z, step.told(self.generic["body"]))
        step.descend(values)
        step.observe(out)

    def _classify(self, z: Tensor) -> Tensor:
        """Both heads' logits [B, C], each of its part of embeddings [B, D]."""
        r, s = self.policy(z, self.context)
        return self.model.head(r * z) + self.generic["head"](s * z)

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        for name, own in self.model.head.named_parameters():
            message.weights[f"generic.head.{name}"].lerp_(own.detach(), 0.5)
        return message

    @override
    def network(self) -> Parts:
        return Parts(self.model.embed, self._classify)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(lambda seen: self._classify(seen.z(self.model)))
