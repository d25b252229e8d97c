"""LG-FedAvg: the head travels, the body stays."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.lgfedavg import LGFedAvg


def by_hand(models, data, sgd, train_by_hand):
    """Two rounds: everybody trains all of it, then all heads become their mean by samples. Returns that mean."""
    sizes = torch.tensor([float(client.num_train) for client in data.clients])
    for round in (1, 2):
        for model, client in zip(models, data.clients, strict=True):
            train_by_hand(model, client, sgd(), round)
        heads = [model.head.state_dict() for model in models]
        mean = {name: torch.stack([head[name] for head in heads], -1) @ (sizes / sizes.sum()) for name in heads[0]}
        for model in models:
            model.head.load_state_dict(mean)
    return mean


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: LGFedAvg(mlp()), data=data, rounds=2)
    models = [mlp() for _ in data.clients]
    for model in models:
        model.load_state_dict(loop.runner.modules[0].method.model.state_dict())
    loop.run()
    head = by_hand(models, data, sgd, train_by_hand)
    torch.testing.assert_close(
        loop.exchange.global_message().weights, {f"model.head.{n}": t for n, t in head.items()}, rtol=1e-5, atol=1e-6
    )
    for client, model in enumerate(models):
        body = {f"model.body.{n}": t for n, t in model.body.state_dict().items()}
        torch.testing.assert_close(dict(loop.runner.pool.get(client)), body, rtol=1e-5, atol=1e-6)


def test_with_all_layers_it_is_fedavg(mlp, run_federation, assert_identical):
    all_of_it, fedavg = run_federation(lambda: LGFedAvg(mlp(), 3)), run_federation(lambda: FedAvg(mlp()))
    for client in range(4):
        assert_identical(all_of_it.diary.sent[3, client].weights, fedavg.diary.sent[3, client].weights)
    assert all_of_it.diary.rows[-1]["Server-T"] == fedavg.diary.rows[-1]["Server-T"]


def test_clients_bodies_may_differ(mlp, run_federation):
    loop = run_federation(lambda a: LGFedAvg(mlp(hidden=((8, 5), (11, 5))[a])), architecture=[0, 1, 0, 1], rounds=2)
    assert loop.done
    assert loop.diary.sent[1, 0].weights.keys() == loop.diary.sent[1, 1].weights.keys()


def test_number_of_layers_is_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.global_layers: must be >= 1 or null"):
        LGFedAvg(mlp(), 0)
    with pytest.raises(ConfigError, match=r"method\.global_layers: must be from 0 to 3"):
        LGFedAvg(mlp(), 4)
