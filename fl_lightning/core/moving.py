"""Many tensors from one device to another, in one transfer a type: each by itself would wait for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same values on a device.

    To a GPU nobody waits; to the CPU once a type of those that come from elsewhere.

    Args:
        tensors: by name, wherever each is.
        device: where all shall be.

    Returns:
        By name, in the same order: those that are there already themselves, the others views of one block a type.
    """
    apart: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.device != device:
            apart.setdefault((tensor.device, tensor.dtype), []).append(name)
    found = dict(tensors)
    for names in apart.values():
        own = [tensors[name].detach() for name in names]
        block = _gathered(own, device).to(device, non_blocking=device.type == "cuda")
        parts = block.split([tensor.numel() for tensor in own])
        found |= {n: part.view(tensor.shape) for n, part, tensor in zip(names, parts, own, strict=True)}
    return found


def _gathered(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The values as one vector where they are; on the CPU in memory that a GPU reads by itself, if they go to one."""
    rows = [tensor.reshape(-1) for tensor in tensors]
    first = rows[0]
    if first.device.type != "cpu" or device.type != "cuda":
        return torch.cat(rows)
    size = sum(row.numel() for row in rows)
    return torch.cat(rows, out=torch.empty(size, dtype=first.dtype, pin_memory=True))
