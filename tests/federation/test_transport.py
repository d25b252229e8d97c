"""What processes hand each other: nested containers of tensors, whose kinds stay."""

from typing import NamedTuple

import torch

from fl_lightning.federation.transport import pack, unpack


class Sums(NamedTuple):
    total: torch.Tensor
    count: int


def test_what_is_packed_comes_out_as_it_was():
    """A tuple with names ended in a TypeError."""
    state = {"mean": Sums(torch.arange(3.0), 2), "pair": (torch.ones(2, dtype=torch.int64), [None, "x"])}
    skeleton, tensors, size = pack(state)
    parts = [own.contiguous().view(-1).view(torch.uint8) for own in tensors]
    buffer = torch.cat(parts)
    assert len(buffer) == size
    found = unpack(skeleton, buffer)
    assert type(found["mean"]) is Sums
    assert (found["mean"].count, found["mean"].total.tolist()) == (2, [0.0, 1.0, 2.0])
    assert (type(found["pair"]), found["pair"][0].tolist(), found["pair"][1]) == (tuple, [1, 1], [None, "x"])
