"""Embeddings near those of the received model and away from those of the client's own last one.

Li, He, Song, "Model-Contrastive Federated Learning" (MOON), CVPR 2021, equation 3. Checked against the authors' code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import frozen_copy, set_modes
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.prototype import directions
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host
    from fl_lightning.core.message import Message


@checked
def model_contrast_loss(
    z: Float[Tensor, "B D"],
    z_global: Float[Tensor, "B D"],
    z_previous: Sequence[Float[Tensor, "B D"]],
    temperature: float,
) -> Float[Tensor, ""]:
    """Cross-entropy of telling the received model's embedding from those of the client's own earlier models.

    ℓ = 1/B Σ_b −log( exp(s_g/τ) / (exp(s_g/τ) + Σ_k exp(s_k/τ)) ), s_g = cos(z, z_global), s_k = cos(z, z_previous_k);
    with one earlier model softplus((s_1 − s_g)/τ). It is computed from differences, so a small τ does not overflow. A
    vector shorter than 1e-6 has similarity 0 with everything.

    Args:
        z: [B, D] embeddings of the model in training.
        z_global: [B, D] of the received model, constants.
        z_previous: [B, D] each, of earlier own models, constants; none gives 0.
        temperature: τ > 0.

    Returns:
        Scalar, float32; log 2 where z_global is the one z_previous.

    Raises:
        ValueError: if sizes do not fit, or for a temperature that is not positive.

    >>> z = torch.tensor([[3., 4.]])
    >>> round(float(model_contrast_loss(z, z, [-z], temperature=0.5)), 6)
    0.01815
    """
    if not temperature > 0:
        raise ValueError(f"model_contrast_loss: `temperature` must be > 0, got {temperature}")
    shapes = [tuple(other.shape) for other in (z_global, *z_previous)]
    if any(shape != tuple(z.shape) for shape in shapes):
        raise ValueError(f"model_contrast_loss: `z` is {tuple(z.shape)}, the others must be, too, got {shapes}")
    with torch.autocast(z.device.type, enabled=False):
        own = directions(widened(z))
        others = [directions(widened(other.detach())).to(own.dtype) for other in (z_global, *z_previous)]
        scores = torch.stack([(own * other).sum(1) for other in others], 1) / temperature  # [B, 1 + K]
        return (scores.logsumexp(1) - scores[:, 0]).mean()


class ModelContrast(Term):
    """Compare embeddings with the received model's (alike) and the client's own last model's (different).

    The received body is frozen for the round; the own last body, as the last local fit left it, is private and stays
    from round to round. Both are in eval mode and get no gradient. Before a client's first fit the two are taken to be
    the same: the term is the constant log 2, and costs no pass. Where they always are, it is refused: a method whose
    model goes on from the client's own, whatever comes in, says so with ``takes_weights = False``.

    Args:
        weight: μ, >= 0.
        temperature: τ, > 0.
        previous_models: how many own last models are kept, from 1 to 64.
    """

    paper = "Li et al., CVPR 2021"
    sees = "sample"
    reaches = ("model.body",)

    def __init__(self, weight: float = 1.0, temperature: float = 0.5, previous_models: int = 1) -> None:
        super().__init__(weight)
        require(temperature > 0, "ModelContrast.temperature", "must be > 0", temperature)
        require(1 <= previous_models <= 64, "ModelContrast.previous_models", "must be from 1 to 64", previous_models)
        self.temperature = temperature
        self.previous_models = previous_models
        self._known = 0

    num_known: Tensor  # int64, own last models there are

    @override
    def setup(self, host: Host) -> None:
        if not self.weight:  # the method without the term: no state
            return
        body = host.model.body
        owners = dict(host.named_modules())
        travels = any(
            host.is_shared(f"model.body.{name}", owners[f"model.body.{name}".rpartition(".")[0]])
            for name, _ in body.named_parameters()
        )
        rule = f"ModelContrast compares with the body that came in, and {type(host).__name__} {{}}: leave it out"
        require(travels, "method.extra_terms", rule.format("shares none"))
        require(getattr(host, "takes_weights", True), "method.extra_terms", rule.format("keeps its own"))
        self.received = _constant_copy(body)
        self.previous = nn.ModuleList(frozen_copy(body) for _ in range(self.previous_models))  # the last one first
        self.register_buffer("num_known", torch.zeros((), dtype=torch.long))

    def train(self, mode: bool = True) -> ModelContrast:
        """The frozen models stay in eval mode."""
        set_modes(self, mode, (self.received, self.previous) if self.weight else ())
        return self

    @torch.no_grad()
    @override
    def receive(self, host: Host, message: Message) -> None:
        self._known = int(self.num_known)  # once a round: reading it in every step would wait for the device
        own = dict(self.received.named_buffers(remove_duplicate=False))
        _copy_state(host.model.body, own)  # or the client before's stayed here

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self._known:
            return widened(out.z).new_full((), 2.0).log()
        z_global = out.told(self.received)
        z_previous = [out.told(body) for body in list(self.previous)[: self._known]]
        return model_contrast_loss(out.z, z_global, z_previous, self.temperature)

    @torch.no_grad()
    def after_fit(self, host: Host) -> None:
        """Remember the body for the next round, and forget the oldest."""
        bodies = [host.model.body, *self.previous]
        for newer, older in reversed(list(itertools.pairwise(bodies))):
            _copy_state(newer, older.state_dict())
        self.num_known.add_(1).clamp_(max=self.previous_models)


def _constant_copy(module: nn.Module) -> nn.Module:
    """A copy that every receive overwrites: its tensors are in no state dict, no optimizer and no count."""
    constant = frozen_copy(module).eval()
    for part in constant.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach(), persistent=False)
        part._non_persistent_buffers_set.update(part._buffers)
    return constant


def _copy_state(module: nn.Module, into: dict[str, Tensor]) -> None:
    for name, tensor in module.state_dict().items():
        into[name].copy_(tensor)
