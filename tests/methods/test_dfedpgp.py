"""DFedPGP: FedRep's alternation on bodies that are averaged by push-sum."""

import pytest
import torch
from torch.optim import SGD, Adam

from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.graphs import DirectedGraph
from fl_lightning.federation.peers import Ring
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.methods.dfedpgp import DFedPGP
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.resnet import ResNet18


@pytest.fixture
def client(mlp, data, set_up_federation):
    """A client whose push-sum weight is μ, ready to be fitted."""

    def make(mu, optimizer=lambda parameters: SGD(parameters, lr=0.1), **options):
        loop = set_up_federation(lambda: DFedPGP(mlp(), **options), optimizer=optimizer)
        module = loop.runner.load(0)
        module.receive(Message({}, {"push_weight": torch.tensor(mu)}), loop.data.clients[0])
        return module

    return make


def rates(module):
    return [optimizer.param_groups[0]["lr"] for optimizer in module.configure_optimizers()]


def test_body_steps_at_the_rate_over_mu_and_the_head_at_its_own(client):
    assert rates(client(1.0)) == pytest.approx([0.1, 0.1])
    assert rates(client(0.5)) == pytest.approx([0.1, 0.2])
    assert rates(client(0.5, chain_rule=True)) == pytest.approx([0.1, 0.4])
    assert rates(client(2.0, head_lr=0.001)) == pytest.approx([0.001, 0.05])
    assert rates(client(0.5, body_epochs=0)) == pytest.approx([0.1])


def test_what_a_term_keeps_to_itself_is_trained_at_its_own_rate(client):
    """It is not pushed, and has no μ."""
    assert rates(client(0.5, extra_terms=[FeatureDistillation()])) == pytest.approx([0.1, 0.2, 0.1])
    shared = FeatureDistillation(distillation=Distillation(parameters="shared"))
    assert rates(client(0.5, extra_terms=[shared])) == pytest.approx([0.1, 0.2])


def test_optimizers_that_scale_gradients_keep_their_rate(client):
    assert rates(client(0.5, lambda parameters: Adam(parameters, lr=0.1))) == pytest.approx([0.1, 0.1])


def test_head_rate_follows_the_decay(client):
    module = client(1.0, head_lr=0.01)
    module.lr_factor = 0.5
    assert rates(module) == pytest.approx([0.005, 0.05])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_on_z_over_mu_is_sgd_on_u(momentum):
    """Three steps of u ← u − η ∇f(u/μ) by hand, f = ½ z²; z = u/μ after each is what SGD on z at η/μ gives."""
    mu, rate, z = 0.5, 0.1, torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = SGD([z], lr=rate / mu, momentum=momentum)
    u, velocity = 2.0 * mu, 0.0
    for _ in range(3):
        gradient = u / mu
        velocity = momentum * velocity + gradient
        u -= rate * velocity
        optimizer.zero_grad()
        (0.5 * z**2).backward()
        optimizer.step()
        assert z.item() == pytest.approx(u / mu)


def test_on_a_ring_push_sum_and_uniform_mixing_are_the_same(mlp, run_federation, outcome, assert_identical):
    """As many hear as are heard: μ stays 1."""
    circle = [[client, (client + 1) % 4] for client in range(4)]
    exchanges = [Ring(), DirectedGraph(edges=circle), DirectedGraph(edges=circle, mixing="uniform")]
    ring, pushed, uniform = (run_federation(lambda: DFedPGP(mlp()), rounds=3, exchange=e) for e in exchanges)
    assert set(pushed.exchange.mass.values()) == {1.0}
    for client in range(4):
        for other in (pushed, uniform):
            assert_identical(other.exchange.inbox(client).weights, ring.exchange.inbox(client).weights)
            assert_identical(other.runner.pool.get(client), ring.runner.pool.get(client))


def test_alone_it_is_fedreps_alternation(mlp, make_data, run_federation, assert_identical):
    data = make_data(counts=((6, 6, 6, 6),))
    alone = run_federation(lambda: DFedPGP(mlp()), rounds=3, data=data)
    fedrep = run_federation(lambda: FedRep(mlp()), rounds=3, data=data, exchange=Ring())
    weights = alone.diary.sent[3, 0].weights
    assert_identical(weights, fedrep.diary.sent[3, 0].weights)
    assert alone.diary.rows[-1]["uplink_params"] == 0


def test_mu_reaches_its_client_and_is_kept(mlp, run_federation):
    edges = [[0, 1], [0, 2], [1, 2], [2, 0], [3, 0], [0, 3]]
    loop = run_federation(lambda: DFedPGP(mlp()), rounds=3, exchange=DirectedGraph(edges=edges))
    heard = [loop.diary.received[3, client].artifacts["push_weight"].item() for client in range(4)]
    assert [loop.runner.pool.get(client)["mass"].item() for client in range(4)] == pytest.approx(heard)
    assert sum(heard) == pytest.approx(4)
    assert len(set(heard)) > 1


def test_messages_hold_the_body_and_cost_one_more_value(mlp, run_federation):
    loop = run_federation(lambda: DFedPGP(mlp()), rounds=1, exchange=DirectedGraph(2))
    size = sum(p.numel() for p in loop.runner.modules[0].method.model.body.parameters())
    for message in loop.diary.sent.values():
        assert all(name.startswith("model.body.") for name in message.weights)
        assert message.num_params == size
    assert loop.diary.rows[0]["uplink_params"] == 4 * 2 * (size + 1)


def test_counted_message_is_the_published_one(make_client):
    """DRDFL's Tables I and II: 213.36 for 20 clients without output layer and push-sum weight."""
    entries = make_client(DFedPGP(ResNet18((3, 32, 32), 10, stem="imagenet"))).initial_message().num_params
    assert entries == 11_186_132
    assert round(20 * entries / 2**20, 2) == 213.36


def test_bad_head_rate_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"method\.head_lr: must be > 0 or null, got 0\.0"):
        DFedPGP(mlp(), head_lr=0.0)
