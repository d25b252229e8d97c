"""FedNTD: the model that came in teaches the classes that are not the true one."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedntd import FedNTD


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedNTD(mlp(), beta=0.7, temperature=2.0), data=data, rounds=2)
    loop.run()
    model = mlp()
    for round in (1, 2):
        received = loop.diary.received[round, 2].weights
        model.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})
        teacher = copy.deepcopy(model)

        def loss(x, y, teacher=teacher):
            logits, others = model(x), F.one_hot(y, 4) == 0
            p, q = (F.softmax(t[others].view(-1, 3) / 2, 1) for t in (teacher(x).detach(), logits))
            return F.cross_entropy(logits, y) + 0.7 * 4 * (p * (p / q).log()).sum(1).mean()

        train_by_hand(model, data.clients[2], sgd(), round, loss=loss)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(loop.diary.sent[round, 2].weights[f"model.{name}"], tensor, rtol=1e-5, atol=1e-6)


def test_without_distillation_it_is_fedavg(conv_net, run_federation, assert_identical):
    one, other = run_federation(lambda: FedNTD(conv_net(), 0.0), 2), run_federation(lambda: FedAvg(conv_net()), 2)
    assert_identical(one.exchange.global_message().weights, other.exchange.global_message().weights)


def test_the_teacher_neither_stays_nor_travels(mlp, run_federation):
    loop = run_federation(lambda: FedNTD(mlp()), 1)
    assert {name.split(".")[0] for name in loop.diary.sent[1, 0].weights} == {"model"}
    assert not loop.runner.pool.get(0)


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.beta: must be >= 0"):
        FedNTD(mlp(), beta=-1.0)
    with pytest.raises(ConfigError, match=r"method\.temperature: must be > 0"):
        FedNTD(mlp(), temperature=0.0)
