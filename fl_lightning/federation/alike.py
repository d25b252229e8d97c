"""What is the same for all clients though it does not travel: a fixed random head, a frame of classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule


@torch.no_grad()
def make_alike(modules: Sequence[ClientModule]) -> None:
    """Give all architectures what the first one drew of what clients neither send nor keep, where the shapes allow it.

    What comes frozen with a model stays its own, and layers of another width use up other random numbers before the
    method draws.

    Args:
        modules: one of each architecture, newly made.
    """
    first = _made_anew(modules[0])
    for module in modules[1:]:
        for name, own in _made_anew(module).items():
            if name in first and first[name].shape == own.shape:
                own.copy_(first[name])


def _made_anew(module: ClientModule) -> dict[str, Tensor]:
    method, entries = module.method, module.entries
    loose = {name: method._buffers[name] for name in method._non_persistent_buffers_set}
    found = {**{name: entries[name] for name in module.division.anew}, **loose}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
