"""Many tensors from one place to another, in one transfer a type: each by itself costs a GPU's time, or a wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


@torch.no_grad()
def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors of the same shapes, on one device: a GPU starts one operation for those of one type and order.

    Args:
        into: where they go.
        values: what goes there.
    """
    if not into or into[0].device.type == "cpu":
        torch._foreach_copy_(list(into), list(values))
        return
    alike: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for own, value in zip(into, values, strict=True):
        both = alike.setdefault((own.dtype, value.dtype, own.stride() == value.stride()), ([], []))
        both[0].append(own)
        both[1].append(value)
    for owns, of in alike.values():
        torch._foreach_copy_(owns, of)


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


@torch.no_grad()
def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values in memory of their own: those of one type in one block, one after another.

    Args:
        tensors: by name; strided.

    Returns:
        By name, in the same order; a change to one is not counted as one to its neighbours.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        by_type.setdefault((tensor.dtype, tensor.device), []).append(name)
    found = dict(tensors)
    for names in by_type.values():
        own = [tensors[name] for name in names]
        block = together(own) if len(own) > 1 else torch.cat([own[0].reshape(-1)])
        parts = _unflatten_dense_tensors(block, own)
        found |= {name: part.data for name, part in zip(names, parts, strict=True)}
    return found


def together(tensors: Sequence[Tensor]) -> Tensor:
    """The values of tensors of one type as one vector [P], one after another; one of them alone is a view.

    Torch's own word for it, which its public ones (a `reshape` each, then `cat`) take three times as long for.
    """
    return _flatten_dense_tensors(list(tensors)).detach()


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """The same without a copy where the tensors stand one after another in memory, as `copies` leaves them."""
    if not tensors:
        return torch.empty(0)
    block = _block_of(tensors) if all(tensor.layout is torch.strided for tensor in tensors) else None
    return together(tensors) if block is None else block


def _block_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """[P] the memory of tensors that stand in it one after another; None where they do not."""
    first, size = tensors[0], 0
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for own in filter(Tensor.numel, tensors):
        follows = own.storage_offset() == start + size and own.untyped_storage().data_ptr() == memory
        if not follows or own.dtype != first.dtype or not own.is_contiguous():
            return None
        size += own.numel()
    return first.detach().as_strided((size,), (1,), start)
