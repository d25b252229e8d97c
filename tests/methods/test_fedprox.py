"""The tests that the specification of FedProx promises (BASELINES-A.md, section 3)."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedprox import FedProx

ALTERED = [("conv_net", {"attention": "inline"}), ("mlp", {"tap": "preact"})]
"""A model, and what makes another term alter it."""


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def model_state(loop):
    weights = loop.exchange.global_message().weights
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("optimizer", [None, adam], ids=["SGD", "Adam"])
def test_fedprox_without_a_term_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical, optimizer):
    options = {"rounds": 2, "participation": 0.5, "local_epochs": 2, "optimizer": optimizer}
    plain = run_federation(lambda: FedAvg(conv_net()), **options)
    assert_identical(outcome(run_federation(lambda: FedProx(conv_net(), mu=0), **options)), outcome(plain))


def test_fedprox_steps_match_hand_computed_values(on_a_parabola, number, sgd, make_data, run_federation):
    """f = ½ (w − 1)² from 0, η = 0.1, μ = 1: 0.1, then 0.1 + 0.1 (0.9 − 0.1) = 0.18; FedAvg 0.19."""
    data = make_data(counts=((12, 8, 5, 4),), batch_size=100)
    for method, options, expected in ((FedProx, {"mu": 1.0}, (0.1, 0.18)), (FedAvg, {}, (0.1, 0.19))):
        for epochs, value in zip((1, 2), expected, strict=True):
            client = on_a_parabola(method, 0, 1, **options)
            loop = run_federation(client, rounds=1, data=data, optimizer=sgd(0.1), local_epochs=epochs)
            assert number(loop) == pytest.approx(value, abs=1e-7)


def test_fedprox_of_single_steps_is_fedavg_for_any_mu(mlp, make_data, run_federation, assert_identical):
    """The term's gradient is 0 at the anchor, and the anchor moves with every receive."""
    data = make_data(batch_size=100)
    plain = run_federation(lambda: FedAvg(mlp()), rounds=3, data=data)
    assert_identical(
        model_state(run_federation(lambda: FedProx(mlp(), mu=7.0), rounds=3, data=data)), model_state(plain)
    )


@pytest.mark.parametrize("optimizer", [None, adam], ids=["SGD with momentum", "Adam"])
def test_fedprox_is_training_with_the_term_in_the_loss(
    conv_net, sgd, make_data, set_up_federation, train_by_hand, optimizer
):
    """Momentum and Adam's moments see it; the running statistics are in no penalty."""
    optimizer = optimizer or sgd(0.05, momentum=0.9)
    data = make_data(counts=((12, 8, 5, 5),), test_fraction=0.2)  # 24 samples: no batch of one
    without_dropout = lambda model: model.body.neck.__setitem__(1, torch.nn.Identity()) or model  # noqa: E731
    client = lambda: FedProx(without_dropout(conv_net()), mu=0.5)  # noqa: E731
    loop = set_up_federation(client, rounds=3, data=data, optimizer=optimizer, local_epochs=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    for round in (1, 2, 3):
        anchor = [parameter.detach().clone() for parameter in model.parameters()]

        def loss(x, y, anchor=anchor):
            drift = sum((p - w).square().sum() for p, w in zip(model.parameters(), anchor, strict=True))
            return F.cross_entropy(model(x), y) + 0.5 / 2 * drift

        train_by_hand(model, data.clients[0], optimizer, round, epochs=2, loss=loss)
    for name, tensor in model_state(loop).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_fedprox_is_fedavg_with_an_extra_term_bit_for_bit(mlp, run_federation, outcome, assert_identical):
    added = run_federation(lambda: FedAvg(mlp(), extra_terms=[Proximal(0.3)]))
    assert_identical(outcome(run_federation(lambda: FedProx(mlp(), mu=0.3))), outcome(added))


@pytest.mark.parametrize(("net", "options"), ALTERED, ids=str)
@pytest.mark.parametrize("kind", [FedProx, FedNova])
def test_every_tensor_is_held_of_a_model_that_another_term_alters(request, data, make_client, kind, net, options):
    made = request.getfixturevalue(net)()
    client = make_client(kind(made, mu=0.5, extra_terms=[FeatureDistillation(distillation=Distillation(**options))]))
    model = client.method.model
    assert len(model.body.stages) == 2  # more than the one it was made of
    (term,) = (term for term in client.method.terms if isinstance(term, Proximal))
    assert term.names == [f"model.{name}" for name, _ in model.named_parameters()]
    client.receive(client.initial_message(), data.clients[0])
    size = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    step = client.step(*next(data.clients[0].batches("train")))
    values = step.values(step.forward())
    assert values["proximal"].item() == pytest.approx(0.5 * 0.01 * size, rel=1e-4)
    assert client.method.term_weights()["proximal"] == 0.5
    values["proximal"].backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(("net", "options"), ALTERED, ids=str)
@pytest.mark.parametrize("kind", [FedProx, FedNova])
def test_model_that_another_term_alters_is_trained(request, run_federation, kind, net, options):
    make = request.getfixturevalue(net)
    loop = run_federation(
        lambda: kind(make(), mu=0.5, extra_terms=[FeatureDistillation(distillation=Distillation(**options))]), rounds=2
    )
    assert loop.diary.rows[1]["loss/proximal"] > 0
    assert loop.diary.rows[1]["loss/feature_distillation"] > 0


def test_fedprox_sends_what_fedavg_sends_and_keeps_nothing(conv_net, run_federation):
    loop = run_federation(lambda: FedProx(conv_net(), mu=0.1), rounds=2, participation=0.5)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for row in loop.diary.rows:
        assert row["uplink_params"] == row["downlink_params"] == 2 * size
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


def test_fedprox_stays_nearer_to_the_global_model_than_fedavg(mlp, run_federation):
    def drift(client):
        loop = run_federation(client, rounds=1, local_epochs=4)
        sent, received = loop.diary.sent[1, 0].weights, loop.diary.received[1, 0].weights
        return sum((sent[name] - received[name]).square().sum().item() for name in sent)

    assert drift(lambda: FedProx(mlp(), mu=5.0)) < 0.3 * drift(lambda: FedAvg(mlp()))


@pytest.mark.parametrize("mu", [-1.0, float("nan")])
def test_fedprox_rejects_a_bad_mu(mlp, mu):
    with pytest.raises(ConfigError, match=r"method\.mu: must be >= 0 .*got"):
        FedProx(mlp(), mu=mu)
