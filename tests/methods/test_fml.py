"""FML: two models that teach each other on the same mini-batches."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fml import FML
from fl_lightning.methods.local import Local


def taught(student, teacher):
    """KL(teacher ‖ student), as it is defined."""
    p, q = F.softmax(teacher, 1).detach(), F.softmax(student, 1)
    return (p * (p / q).log()).sum(1).mean()


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FML(mlp(), alpha=0.3, beta=0.6), data=data, rounds=2)
    pair = nn.ModuleList(copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(2))
    loop.run()
    own, meme = pair
    for round in (1, 2):
        received = loop.diary.received[round, 0].weights
        meme.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})

        def loss(x, y):
            v, w = own(x), meme(x)
            mine = 0.3 * F.cross_entropy(v, y) + 0.7 * taught(v, w)
            return mine + 0.6 * F.cross_entropy(w, y) + 0.4 * taught(w, v)

        train_by_hand(pair, data.clients[0], sgd(), round, loss=loss)
        for name, tensor in meme.state_dict().items():
            torch.testing.assert_close(loop.diary.sent[round, 0].weights[f"model.{name}"], tensor, rtol=1e-4, atol=1e-6)
    kept = {f"personal.{name}": tensor for name, tensor in own.state_dict().items()}
    torch.testing.assert_close(dict(loop.runner.pool.get(0)), kept, rtol=1e-4, atol=1e-6)


def test_without_teaching_it_is_local_beside_fedavg(mlp, run_federation):
    """Under clipping, too: each model's gradients are clipped by themselves."""
    makes = (lambda: FML(mlp(), alpha=1.0, beta=1.0)), (lambda: Local(mlp())), (lambda: FedAvg(mlp()))
    loop, local, fedavg = (run_federation(make, rounds=2, trainer={"gradient_clip_val": 0.5}) for make in makes)
    torch.testing.assert_close(loop.exchange.global_message().weights, fedavg.exchange.global_message().weights)
    alone = {name.replace("model.", "personal.", 1): tensor for name, tensor in local.runner.pool.get(0).items()}
    torch.testing.assert_close(dict(loop.runner.pool.get(0)), alone)
    assert [row["Local-T"] for row in loop.diary.rows] == [row["Local-T"] for row in local.diary.rows]
    assert [row["Server-T"] for row in loop.diary.rows] == [row["Server-T"] for row in fedavg.diary.rows]
    assert loop.diary.rows[1]["Local-T"] == loop.diary.rows[1]["Local-T/personal"]


def test_shares_are_checked(mlp):
    for name in ("alpha", "beta"):
        with pytest.raises(ConfigError, match=rf"method\.{name}: must be in \[0, 1\]"):
            FML(mlp(), **{name: 1.5})
