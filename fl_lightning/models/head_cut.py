"""A module of a user's own that is split at its head, the layer that gives the logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self, override

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.split import Body


class Joined:
    """A module and the head that was taken out of it, which is back in its place for the length of a ``with`` block.

    Weights that stood in both parts would be exchanged twice, or exchanged though private; but the module's own methods
    expect the head where it was.

    Args:
        module: the whole module; loses its head.
        head: its name.
    """

    def __init__(self, module: L.LightningModule, head: str) -> None:
        parent, _, self.child = head.rpartition(".")
        self.module, self.name = module, head
        self.head = module.get_submodule(head)
        self.parent = module.get_submodule(parent)
        self.depth = 1
        self.__exit__()

    def embed(self, x: Tensor) -> Tensor:
        """What the head would be given of inputs [B, …]: z [B, D].

        Raises:
            ConfigError: if the module does not come to its head.
        """
        found: list[Tensor] = []

        def stop(head: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            found.append(first_of(args, named))
            raise _ReachedHead

        with self:
            # Before the head's own pre-hooks, which see z once the head itself is asked.
            handle = self.head.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
            try:
                self.module(x)
            except _ReachedHead:
                pass
            finally:
                handle.remove()
        rule = f'"{self.name}" gives {type(self.module).__name__}\'s logits in eval mode'
        require(bool(found), "model.head", f"{rule}, and forward must come to it in training, too")
        return found[0]

    def __enter__(self) -> Self:
        self.depth += 1
        self.parent._modules[self.child] = self.head
        return self

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.parent._modules[self.child] = nn.Identity()


class CutBody(Body):
    """A module up to its head: what the head would be given.

    Args:
        joined: the module.
    """

    def __init__(self, joined: Joined) -> None:
        super().__init__(stages=[], neck=joined.module)
        self._joined = joined

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._joined.embed(x)

    @override
    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [], self(x)

    @override
    def append(self, *layers: nn.Module) -> None:
        rule = "cannot put layers between body and head of a LightningModule, whose training step knows nothing of them"
        raise ConfigError("method", rule)


class _ReachedHead(Exception):
    """Ends a pass at the head."""


def _candidates(module: nn.Module, num_classes: int) -> Iterator[str]:
    """Linear layers of one output a class, the last first."""
    found = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    yield from (name for name in reversed(found) if module.get_submodule(name).out_features == num_classes)


def head_of(module: L.LightningModule, num_classes: int, x: Tensor, out: Tensor) -> str:
    """The last linear layer that gives a module's logits.

    Args:
        module: the whole module.
        num_classes: C.
        x: samples [B, …].
        out: what the module makes of them: logits [B, C], their softmax, or its logarithm.

    Raises:
        ConfigError: if there is none.
    """
    for name in _candidates(module, num_classes):
        if are_same(reached(module, name, x)[1], out):
            return name
    rule = f"name the layer of {type(module).__name__} that gives the logits; no linear layer of its own does"
    rule += said_of_compiled(module)
    raise ConfigError("model.head", rule)


def said_of_compiled(module: nn.Module) -> str:
    """What an error adds where a part is compiled by itself; empty where none is."""
    names = (name.split(".") for name, _ in module.named_modules())
    compiled = next((name[:-1] for name in names if name[-1] == "_orig_mod"), None)
    if compiled is None:
        return ""
    part = ".".join(compiled) or "it"
    return f"; what {part} calls cannot be seen, as torch.compile has made it: leave that to federation.compile: true"


def first_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The first of what a layer was called with, by its place or by its name."""
    return args[0] if args else next(iter(named.values()), None)


def watched(layer: nn.Module, seen: list[tuple[Any, Any]]) -> RemovableHandle:
    """Let a layer put down what it takes and what it gives, until the handle is removed."""
    return layer.register_forward_hook(
        lambda layer, args, named, out: seen.append((first_of(args, named), out)), with_kwargs=True
    )


@torch.no_grad()
def reached(module: nn.Module, head: str, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a submodule takes and gives in a pass in evaluation mode; None where it is not called."""
    seen: list[tuple[Any, Any]] = []
    handle = watched(module.get_submodule(head), seen)
    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.eval()
        module(x)
    finally:
        handle.remove()
        for layer, training in modes.items():
            layer.training = training
    z, logits = seen[0] if seen else (None, None)
    return (z if isinstance(z, Tensor) else None), (logits if isinstance(logits, Tensor) else None)


def are_same(logits: Tensor | None, out: Tensor) -> bool:
    """Whether an output is the logits, their softmax, or its logarithm."""
    if logits is None or logits.shape != out.shape:
        return False
    forms = (logits, logits.log_softmax(1), logits.softmax(1))
    return any(torch.allclose(form, out, rtol=1e-3, atol=1e-5, equal_nan=True) for form in forms)
