"""DisPFL: every client trains a sparse model of its own, and neighbours average where their masks meet.

Dai, Shen, He, Tian, Tao, "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022. The authors' code mixes by masks that buffers do not have, so that batch norm fails there,
and its shipped scripts regrow at random where the paper describes gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.aggregation import ArtifactRule
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.facts import Facts, PlansRounds
from fl_lightning.core.freezing import only, training
from fl_lightning.core.message import Artifact, Message, Structured, artifact
from fl_lightning.core.method import Method, Predictor
from fl_lightning.core.mixing import Heard, MeanMixer
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.models.sparsity import erdos_renyi_kernel, random_mask, regrown_mask
from fl_lightning.models.split import SplitModel
from fl_lightning.seeding import torch_generator

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

Regrow = Literal["gradient", "random"]


@artifact
@dataclass(frozen=True)
class MaskedWeights(Structured):
    """The active entries of one weight tensor, and where they belong: what a sparse model sends of it.

    Values are counted without the mask, because published figures of sparse methods leave it out (106.65 for DisPFL in
    DRDFL's tables); bytes are counted with it, one bit an entry.

    Args:
        values: [M] the active entries, in the mask's row-major order.
        mask: […] bool, True at the M active entries.
    """

    values: Tensor
    mask: Tensor
    lossy = ("values",)

    def __post_init__(self) -> None:
        count = int(self.mask.sum())
        if self.values.shape != (count,):
            shape = tuple(self.values.shape)
            raise ValueError(f"MaskedWeights: `values` is {shape} but `mask` has {count} active entries")

    @classmethod
    def from_dense(cls, weights: Tensor, mask: Tensor) -> MaskedWeights:
        """Pick the active entries out of a tensor of the mask's shape; shares no memory with either.

        >>> mask = torch.tensor([[True, False], [False, True]])
        >>> sent = MaskedWeights.from_dense(torch.tensor([[1., 2.], [3., 4.]]), mask)
        >>> sent.values.tolist(), sent.num_params, sent.num_bytes
        ([1.0, 4.0], 2, 9)
        """
        return cls(weights.detach()[mask], mask.clone())

    def dense(self) -> Tensor:
        """The whole tensor, in a new one: 0 where the mask is False."""
        whole = torch.zeros(self.mask.shape, dtype=self.values.dtype, device=self.values.device)
        whole[self.mask] = self.values
        return whole

    @property
    def num_params(self) -> int:
        """Values really sent: the active entries, without the mask."""
        return self.values.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the active entries, and of the mask at one bit an entry."""
        return self.values.nbytes + -(-self.mask.numel() // 8)


class DisPFL(PlansRounds, Method):
    """Sparse personal models that keep their number of active weights and move them to better places.

    Client i holds weights w_i and a mask m_i over the parameters of its model. A round: w_i = w̄ · m_i with, value by
    value, w̄ = Σ_j w_j / Σ_j s_j over itself and its neighbours (0 where no s_j is active); train under s_i = m_i, with
    w ← w · s_i after every step; evaluate; send the active values and s_i. Then look for the next mask: in every tensor
    drop the share r_t of active weights that are smallest, and regrow as many of those that are inactive then,

        r_t = (a/2) (1 + cos(π t/T)), t = 0, 1, …, and 0 from T on.

    What was regrown gets its values from the next exchange, so until then w_i stays as it was trained. Batch norm's
    statistics, and parameters that do not train, are sent whole and averaged plainly.

    By default neighbours are drawn as `RandomPeers` does, and around a server all participants are each other's. The
    authors let every client draw k others a round, from which it hears: that is
    ``exchange: {class_path: DirectedGraph, init_args: {degree: k, mixing: uniform}}``.

    Args:
        density: active share of the model's trainable parameters, in (0, 1]; shared out over the tensors by
            Erdős-Rényi-Kernel, which leaves small ones dense.
        anneal: a, share of a tensor's active weights that is replaced after the first round, in [0, 1]; 0 keeps the
            first masks.
        anneal_rounds: T, >= 1; null takes all rounds of the run.
        regrow: where to regrow: the largest ``gradient`` of the dense model's cross-entropy on one training batch (the
            paper), or at ``random`` (the authors' shipped scripts).
        different_initial: give every client a first mask of its own; false gives all the same.
        extra_terms: terms added to the loss; their own parameters have no masks.
    """

    shared = ("model",)
    exchange = "RandomPeers"
    paper = "Dai et al., ICML 2022"

    def __init__(
        self,
        model: SplitModel,
        density: float = 0.5,
        anneal: float = 0.5,
        anneal_rounds: int | None = None,
        regrow: Regrow = "gradient",
        different_initial: bool = True,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(0 < density <= 1, "method.density", "must be in (0, 1]", density)
        require(0 <= anneal <= 1, "method.anneal", "must be in [0, 1] (0 keeps the first masks)", anneal)
        some = anneal_rounds is None or anneal_rounds >= 1
        require(some, "method.anneal_rounds", "must be >= 1 or null", anneal_rounds)
        require_choices("method", regrow=(regrow, Regrow))
        super().__init__(model, extra_terms=extra_terms)
        self.density = density
        self.anneal = anneal
        self.anneal_rounds, self.plans_rounds = anneal_rounds, anneal_rounds is None
        self.regrow = regrow
        self.different_initial = different_initial

    has_masks: Tensor  # bool, whether the client has drawn its first masks

    @override
    def setup(self) -> None:
        self.masked_names = [f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad]
        self.num_active = erdos_renyi_kernel([p.shape for p in self.masked.values()], self.density)
        for index, parameter in enumerate(self.masked.values()):
            self.register_buffer(f"mask_{index}", torch.zeros(parameter.shape, dtype=torch.bool))
        self.register_buffer("has_masks", torch.zeros((), dtype=torch.bool))
        # The run's, and the same for all clients: no first mask may depend on when it is drawn.
        self.mask_seed = int(torch.randint(2**62, ()))

    @property
    def masked(self) -> dict[str, nn.Parameter]:
        """The parameters that have masks, by their names in the state dict."""
        return {name: self.get_parameter(name) for name in self.masked_names}

    @property
    def masks(self) -> dict[str, Tensor]:
        """Their masks, bool: s_i from a receive to the next send, then m_i."""
        return {name: self.get_buffer(f"mask_{index}") for index, name in enumerate(self.masked_names)}

    # --- what is exchanged --------------------------------------------------------------------------------------------

    @override
    def predictors(self) -> dict[str, Predictor]:
        """By the own sparse model; there is no other."""
        return {"": Predictor(lambda seen: seen.logits(self.model), ("Local-T", "Global-T"))}

    def parameter_counts(self) -> tuple[int, int]:
        """The active parameters are counted twice: every client has a model of its own, and all of it travels."""
        personal, shared = super().parameter_counts()
        active = sum(self.num_active)
        return personal + active, shared - sum(p.numel() for p in self.masked.values()) + active

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        """The mean of the active, by no other shares than equal ones, which is also the rule without a server."""
        return Server(initial, dict.fromkeys(self.masked_names, ActiveMean), "uniform", EqualMixer)

    # --- the start of a round -----------------------------------------------------------------------------------------

    def receive(self, message: Message, data: OwnData) -> None:
        """Take the neighbourhood's mean, or keep the own weights where nothing came; either under the own mask."""
        if not self.has_masks:
            self._draw_masks(data.client)
        _prune(self._sparse())
        came = {name: _dense(message.artifacts[name]) for name in self.masked_names if name in message.artifacts}
        weights, masks = {**message.weights, **came}, self.masks
        sparse = {name: tensor * masks[name] if name in masks else tensor for name, tensor in weights.items()}
        super().receive(replace(message, weights=sparse), data)

    def _draw_masks(self, client: int) -> None:
        generator = torch_generator(self.mask_seed, "masks", client=client if self.different_initial else -1)
        for mask, active in zip(self.masks.values(), self.num_active, strict=True):
            mask.copy_(random_mask(mask.shape, active, generator))
        self.has_masks.fill_(True)

    # --- the local fit ------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """What must be masked after every step."""
        self._pruned = self._sparse()

    def local_step(self, step: Step) -> None:
        """A plain step, and mask what it has revived: gradients are dense, and so is momentum."""
        super().local_step(step)
        _prune(self._pruned)

    def _sparse(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that are not dense, with their masks."""
        masked = zip(self.masked.values(), self.masks.values(), self.num_active, strict=True)
        return [(parameter, mask) for parameter, mask, active in masked if active < mask.numel()]

    # --- the end of a round -------------------------------------------------------------------------------------------

    def send(self, data: OwnData) -> Message:
        """The active values with the mask they were trained under; then the next mask."""
        message = super().send(data)
        masked = zip(self.masked.items(), self.masks.values(), strict=True)
        own = {name: MaskedWeights.from_dense(parameter, mask) for (name, parameter), mask in masked}
        self._search_masks(data)
        whole = {name: tensor for name, tensor in message.weights.items() if name not in own}
        return replace(message, weights=whole, artifacts={**message.artifacts, **own})

    def _search_masks(self, data: OwnData) -> None:
        """m_i ← s_i less its smallest weights, plus as many of the most promising places; w_i stays as it is."""
        rounds = self.facts.rounds if self.anneal_rounds is None else self.anneal_rounds
        rate = replaced_share(self.facts.round - 1, self.anneal, rounds)
        if rate == 0:
            return
        promises = self._gradient_sizes(data) if self.regrow == "gradient" else self._random_sizes()
        for weights, mask, promise in zip(self.masked.values(), self.masks.values(), promises, strict=True):
            count = math.ceil(rate * int(mask.sum()))
            mask.copy_(regrown_mask(mask, weights.detach(), promise, count))

    def _gradient_sizes(self, data: OwnData) -> list[Tensor]:
        """|∇ CE| of all weights, active or not, on one batch in eval mode."""
        parameters, step = list(self.masked.values()), data.steps()[0]
        with training(self, False), torch.enable_grad(), only(self, parameters):
            loss = step.values(step.forward(), [self.terms.cross_entropy])["cross_entropy"]
            return [gradient.abs() for gradient in step.gradients(loss, parameters)]

    def _random_sizes(self) -> list[Tensor]:
        return [torch.rand(p.shape).to(p.device) for p in self.masked.values()]  # the CPU's stream, on any device


@torch.no_grad()
def _prune(sparse: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, mask in sparse:
        parameter.mul_(mask)


def replaced_share(t: int, start: float, rounds: int) -> float:
    """r_t = (a/2) (1 + cos(π t/T)), and 0 from T on.

    Args:
        t: 0-based round.
        start: a.
        rounds: T.

    >>> [replaced_share(t, start=0.5, rounds=500) for t in (0, 250, 500, 501)]
    [0.5, 0.25, 0.0, 0.0]
    """
    return start / 2 * (1 + math.cos(math.pi * t / rounds)) if t < rounds else 0.0


def _dense(value: Artifact) -> Tensor:
    """A mean, or the own message of a client that heard nobody."""
    assert isinstance(value, (Tensor, MaskedWeights))
    return value if isinstance(value, Tensor) else value.dense()


class ActiveMean(ArtifactRule):
    """Σ_j w_j / Σ_j s_j, value by value over those in whose masks it is active; 0 where it is in nobody's."""

    takes_noise = hears_alike = False  # masks travel

    def __init__(self) -> None:
        self._sum = ExactSum()
        self._count: Tensor | None = None
        self._dtype = torch.float32

    @override
    def add(self, value: MaskedWeights, num_samples: int) -> None:
        if self._count is None:
            self._count, self._dtype = torch.zeros_like(value.mask, dtype=torch.int32), value.values.dtype
        self._sum.add(value.dense().reshape(-1), 1.0)
        self._count += value.mask

    @override
    def result(self, previous: Artifact | None) -> Tensor | None:
        if self._count is None:
            return None
        return (self._sum.value(1.0).view(self._count.shape) / self._count.clamp(min=1)).to(self._dtype)


class EqualMixer(MeanMixer):
    """A mean in which the own and every neighbour's message count alike."""

    takes_shares = False

    @override
    def mix(self, own: Heard | None, neighbours: Sequence[Heard], previous: Message | None) -> Message:
        alike = [heard._replace(share=1.0) for heard in neighbours]
        return super().mix(None if own is None else own._replace(share=1.0), alike, previous)
