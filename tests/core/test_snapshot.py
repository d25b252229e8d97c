"""What tensors were."""

import torch
from torch import nn

from fl_lightning.core.snapshot import Snapshot


def test_a_snapshot_stays_as_the_tensors_were_when_it_was_taken():
    layer = nn.Linear(2, 1)
    snapshot, first = Snapshot(layer.parameters()), [p.detach().clone() for p in layer.parameters()]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    assert all(map(torch.equal, snapshot, first))
    snapshot.take(layer.parameters())
    assert all(map(torch.equal, snapshot, layer.parameters()))


def test_a_snapshot_is_wide_and_in_no_state_dict():
    snapshot = Snapshot([torch.ones(3, dtype=torch.bfloat16)])
    assert [tensor.dtype for tensor in snapshot] == [torch.float32]
    assert snapshot.state_dict() == {}
