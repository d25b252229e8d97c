"""FedGen: heads that learn from generated embeddings, and the generator that learns from heads."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.generating import label_shares, stacked_heads
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.losses.generated_features import Generator
from fl_lightning.losses.generator_consensus import HeardGenerator
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedgen import FedGen, Training
from fl_lightning.models.generator import generate

SMALL = Generator(noise_size=3, hidden=4)
FEW = Training(server_steps=3, server_batch=6)


def test_rounds_are_those_of_the_paper(mlp, make_data, set_up_federation, sgd, train_by_hand, monkeypatch):
    """Two rounds; noise is what the classes say, so that the order of draws does not matter."""
    monkeypatch.setattr(HeardGenerator, "draw_classes", lambda self, size: torch.arange(size) % 2)
    monkeypatch.setattr(HeardGenerator, "draw_noise", lambda self, y: noise_of(y))
    data = make_data(((12, 8, 0), (10, 9, 0)))
    method = lambda: FedGen(mlp(num_classes=3), 5.0, 2.0, generator=SMALL, training=FEW)  # noqa: E731
    loop = set_up_federation(method, data=data, rounds=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    first, second = (loop.diary.received[round, 0] for round in (1, 2))
    assert first.artifacts == {}
    assert (second.artifacts["class_counts"] > 0).tolist() == [True, True, False]
    model.load_state_dict({n.removeprefix("model."): t for n, t in second.weights.items()})
    vector = second.artifacts["generator"]

    def told(y):
        return model.head(generate(vector, noise_of(y), y, 3, 5))

    def loss(x, y):
        logits, other = model(x), torch.arange(len(y)) % 2
        p = told(y).softmax(1).detach()
        latent = (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
        plain = F.cross_entropy(logits, y)
        return plain + 0.98 * (5 * F.cross_entropy(told(other), other) + 2 * latent)

    train_by_hand(model, data.clients[0], sgd(), 2, loss=loss)
    for name, tensor in model.state_dict().items():
        sent = loop.diary.sent[2, 0].weights[f"model.{name}"]
        torch.testing.assert_close(sent, tensor, rtol=1e-4, atol=1e-5)


def noise_of(y):
    return torch.stack([y, y + 1, 0.5 * y], 1).float()


@pytest.mark.parametrize("ensemble", ["logits", "losses"])
def test_generators_loss_by_hand(ensemble, mlp, make_client):
    training = Training(diversity=0.5, ensemble=ensemble)
    server = make_client(FedGen(mlp(), generator=SMALL, training=training)).make_server(Facts())
    server.setup(Facts())
    weights = [{f"model.{n}": t for n, t in mlp().state_dict().items()} for _ in range(2)]
    counts = torch.tensor([[3, 0, 1, 0], [1, 2, 0, 0]])
    messages = {k: Message(own, {"class_counts": counts[k].float()}, 4) for k, own in enumerate(weights)}
    assert torch.equal(server.counts(messages), counts)
    features, noise, y = torch.rand(3, 5), torch.rand(3, 3), torch.tensor([0, 1, 0])
    loss = server.generator_loss(features, noise, y, stacked_heads(messages), label_shares(counts))
    logits = [features @ own["model.head.weight"].T + own["model.head.bias"] for own in weights]
    expected = F.cross_entropy((logits[0] + logits[1]) / 2, y)
    if ensemble == "losses":
        shares = ((4 / 6, 1 / 4, 4 / 6), (2 / 6, 3 / 4, 2 / 6))
        each = [F.cross_entropy(own, y, reduction="none") for own in logits]
        expected = sum((torch.tensor(w) * ce).mean() for w, ce in zip(shares, each, strict=True))
    apart = 0.0
    for a in range(3):
        for b in range(3):
            apart += float((features[a] - features[b]).abs().mean() * (noise[a] - noise[b]).square().mean())
    torch.testing.assert_close(loss, expected + 0.5 * math.exp(-apart / 9))


def test_first_round_is_fedavg_and_so_is_every_one_without_weights(mlp, run_federation, assert_identical):
    options = {"generator": SMALL, "training": FEW}
    plain = run_federation(lambda: FedAvg(mlp()), 2).diary
    without = run_federation(lambda: FedGen(mlp(), 0.0, 0.0, **options), 2).diary
    told = run_federation(lambda: FedGen(mlp(), **options), 2).diary
    for client in range(4):
        assert_identical(told.sent[1, client].weights, plain.sent[1, client].weights)
        assert_identical(without.sent[2, client].weights, plain.sent[2, client].weights)
    assert told.rows[1]["loss/generated"] > 0
    assert told.rows[1]["loss/latent"] > 0
    assert told.rows[1]["loss"] != plain.rows[1]["loss"]


def test_ranges_are_checked(mlp):
    for options in ({"weight": -1.0}, {"latent_weight": -1.0}, {"generated_batch": 0}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be >="):
            FedGen(mlp(), **options)
    for options in ({"diversity": -1.0}, {"server_steps": 0}, {"ensemble": "heads"}):
        with pytest.raises(ConfigError, match=rf"method\.training\.{next(iter(options))}: must be"):
            Training(**options)


def test_classes_of_clients_that_are_out_are_remembered_and_unheard_ones_left_alone(mlp, make_data, set_up_federation):
    data = make_data(((12, 0, 0, 0), (0, 12, 0, 0), (0, 0, 12, 0), (0, 0, 0, 12)))
    make = lambda: FedGen(mlp(num_classes=4), generator=SMALL, training=FEW)  # noqa: E731
    loop = set_up_federation(make, data=data, rounds=6, participation=0.5)
    heard = set()
    for round in range(1, 7):
        loop.advance()
        part = {client for number, client in loop.diary.sent if number == round}
        if heard and part.isdisjoint(heard):
            assert loop.diary.rows[-1]["loss/latent"] == 0
        heard |= part
        counts = loop.exchange.global_message().artifacts["class_counts"]
        assert set(counts.nonzero().flatten().tolist()) == heard
