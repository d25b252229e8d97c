"""What is the same for all clients though it does not travel, where their models differ."""

import pytest
import torch
from tiny_models import frozen_first

from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedetf import FedETF


@pytest.mark.parametrize(("kind", "alike"), [(FedBABU, "model.head."), (FedETF, "model.head.frame")])
def test_different_models_have_one_head_or_frame(kind, alike, run_federation):
    """Frozen layers of another width use up other random numbers before it is drawn."""
    loop = run_federation(lambda a: kind(frozen_first((6, 9)[a])), architecture=[0, 1, 0, 1], rounds=2)
    first, other = (dict(module.method.named_parameters()) for module in loop.runner.modules)
    held = [name for name in first if name.startswith(alike)]
    assert held
    for client in range(4):
        module = loop.runner.load(client)
        module.receive(loop.exchange.inbox(client), loop.data.clients[client])
        own = dict(module.method.named_parameters())
        assert all(torch.equal(own[name], first[name]) for name in held)
    assert first["model.body.neck.first.0.weight"].shape != other["model.body.neck.first.0.weight"].shape
