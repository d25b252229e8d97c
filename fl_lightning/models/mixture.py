"""A model whose weights are made of those of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.models.split import SplitModel

Mixed = Literal["weights", "logits"]
Model = TypeVar("Model", bound=nn.Module)


def mixed_logits(
    personal: SplitModel, other: SplitModel, alpha: Tensor, x: Tensor, others: Tensor, mixed: Mixed = "weights"
) -> Tensor:
    """What the mixture αv + (1 − α)w makes of inputs; gradients reach v and α alone.

    Args:
        personal: v; batch norm's statistics are its own.
        other: w, of the same architecture.
        alpha: α, [], in [0, 1].
        x: [B, …] inputs.
        others: w's logits of them, [B, C], constants.
        mixed: what is mixed, both models' ``weights`` or ``logits``.

    Returns:
        Logits, [B, C].
    """
    if mixed == "logits":
        return torch.lerp(others, personal(x), alpha.to(others.dtype))
    return functional_call(personal, mixed_weights(personal, other, alpha), x)


def mixed_weights(personal: nn.Module, other: nn.Module, alpha: Tensor) -> dict[str, Tensor]:
    """Parameters αv + (1 − α)w by name; gradients reach v and α alone."""
    w = dict(other.named_parameters())
    return {n: torch.lerp(w[n].detach(), v, alpha.to(v.dtype)) for n, v in personal.named_parameters()}


@torch.no_grad()
def with_parameters(model: Model, parameters: Mapping[str, Tensor]) -> Model:
    """A copy of a model with other parameters, by name."""
    own = copy.deepcopy(model)
    for name, parameter in own.named_parameters():
        parameter.copy_(parameters[name])
    return own


@torch.no_grad()
def move_towards(module: nn.Module, other: nn.Module, keep: Tensor) -> None:
    """Move a module's state to k p + (1 − k) w, in float32 or wider; counters become the other's.

    Args:
        module: p.
        other: w, of the same architecture.
        keep: k, [], in [0, 1].
    """
    for p, w in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        wide = torch.promote_types(p.dtype, torch.float32)
        p.copy_(torch.lerp(w.to(wide), p.to(wide), keep.to(wide)) if p.is_floating_point() else w)


class _Calls(nn.Module):
    """A split model, of which a call gives what a function makes of it and the inputs."""

    def __init__(self, model: SplitModel, way: Callable[[SplitModel, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.way = model, way

    def forward(self, x: Tensor) -> Any:
        return self.way(self.model, x)


def _with(model: SplitModel, parameters: Mapping[str, Tensor], x: Tensor, way: Callable[..., Any]) -> Any:
    """What a function makes of a model with other parameters."""
    named = {f"model.{name}": tensor for name, tensor in parameters.items()}
    return functional_call(_Calls(model, way), named, (x,))


def _whole(model: SplitModel, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    features, z = model.forward_features(x)
    return features, z, model.head(z)


def pass_with(model: SplitModel, parameters: Mapping[str, Tensor], x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Feature maps, embedding [B, D] and logits [B, C] of a model with other parameters.

    Args:
        model: batch norm's statistics are its own, and move with it.
        parameters: by name; gradients reach what they were made of.
        x: [B, …] inputs.
    """
    return _with(model, parameters, x, _whole)  # type: ignore[no-any-return]


class Lent(NamedTuple):
    """A split model with other parameters, for a step's pass `through` it.

    Args:
        model: batch norm's statistics are its own, and move with it.
        parameters: by name; gradients reach what they were made of.
    """

    model: SplitModel
    parameters: Mapping[str, Tensor]

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Feature maps and embedding [B, D] of inputs [B, …]."""
        return _with(self.model, self.parameters, x, lambda model, x: model.forward_features(x))  # type: ignore[no-any-return]

    def head(self, z: Tensor) -> Tensor:
        """Logits [B, C] of embeddings [B, D]."""
        return head_with(self.model, self.parameters, z)


def head_with(model: SplitModel, parameters: Mapping[str, Tensor], z: Tensor) -> Tensor:
    """Logits [B, C] of embeddings [B, D] by a model's head with other parameters.

    Args:
        model: as before.
        parameters: the whole model's, by name.
        z: [B, D].
    """
    return _with(model, parameters, z, lambda model, z: model.head(z))  # type: ignore[no-any-return]


def summed(model: SplitModel, share: Tensor, others: Tensor) -> dict[str, Tensor]:
    """Parameters p w + s by name, where w are the model's own.

    Args:
        model: any.
        share: p, [].
        others: s, [P], in the order of the parameters' names, in float32 or wider.
    """
    own = sorted(model.named_parameters())
    whole = others + share * torch.cat([w.to(others.dtype).reshape(-1) for _, w in own])
    parts = whole.split([w.numel() for _, w in own])
    return {name: part.view_as(w).to(w.dtype) for (name, w), part in zip(own, parts, strict=True)}
