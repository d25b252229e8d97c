"""The tests that the specification of FedALA promises (BASELINES-A.md, section 10)."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.methods.fedala import FedALA
from fl_lightning.methods.fedavg import FedAvg

HEAD = ["model.head.weight", "model.head.bias"]


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def assert_same_federation(one, other, assert_identical):
    """Everything but what only one of them keeps private."""
    assert_identical(one.exchange.state_dict(), other.exchange.state_dict())
    for row, same in zip(one.diary.rows, other.diary.rows, strict=True):
        assert_identical(without(row, *COLUMNS), without(same, *COLUMNS))


def at_home(loop, index):
    """A client with its kept state, as it is before a receive."""
    return loop.runner.load(index)


def receive(client, loop, index, message=None):
    client.receive(loop.exchange.inbox(index) if message is None else message, loop.data.clients[index])
    return client


# --- where it is FedAvg ----------------------------------------------


@pytest.mark.parametrize("options", [{"layers": 0}, {"mixing_lr": 0.0}], ids=str)
def test_fedala_that_mixes_nothing_is_fedavg_bit_for_bit(conv_net, run_federation, assert_identical, options):
    plain = run_federation(lambda: FedAvg(conv_net()), rounds=4, participation=0.75)
    loop = run_federation(lambda: FedALA(conv_net(), **options), rounds=4, participation=0.75)
    assert len(loop.diary.sent) == 12  # so that some took part more than once
    assert_same_federation(loop, plain, assert_identical)


def test_fedala_first_participation_is_fedavgs(conv_net, run_federation, assert_identical):
    plain = run_federation(lambda: FedAvg(conv_net()), rounds=2)
    loop = run_federation(lambda: FedALA(conv_net()), rounds=2)
    first, second = zip(loop.diary.rows, plain.diary.rows, strict=True)
    assert_identical(*(without(row, *COLUMNS) for row in first))
    assert second[0]["loss"] != pytest.approx(second[1]["loss"], rel=1e-6)
    for client in range(4):
        assert_identical(loop.diary.sent[1, client].weights, plain.diary.sent[1, client].weights)


def test_fedala_of_no_layers_mixes_none(mlp, make_client):
    """In Python, the last 0 of a list are all of it."""
    assert make_client(FedALA(mlp(), layers=0)).method.mixed_names == []


# --- the mixture ----------------------------------------------


@pytest.mark.parametrize(("mixing_lr", "weight", "place"), [(1.0, 0.0, 0.0), (0.25, 0.5, 1.0), (0.1, 0.8, 1.6)])
def test_fedala_mixing_step_matches_hand_computed_value(
    on_a_parabola, make_client, make_data, mixing_lr, weight, place
):
    """½ (θ̂ − 1)², θ_i = 0, θ = 2, W = 1: ∇ = 1, so W = clip(1 − 2 η_w), θ̂ = 2 W."""
    data = make_data(counts=((12, 8, 5, 4),), batch_size=100)
    client = make_client(on_a_parabola(FedALA, 0, 1, mixing_lr=mixing_lr)())
    method = client.method
    method.has_own_model.fill_(True)
    method.has_mixing.fill_(True)  # so that there is one epoch of one batch
    client.receive(Message({"model.head.w": torch.tensor(2.0)}), data.clients[0])
    assert method.mixing[0].item() == pytest.approx(weight)
    assert method.model.head.w.item() == pytest.approx(place)


def test_fedala_learns_value_by_value_in_the_last_layers(mlp, make_data, run_federation):
    """One epoch of one batch, by hand on a copy, from a W that is not 1."""
    data = make_data(batch_size=100)
    loop = run_federation(lambda: FedALA(mlp(), share=1.0, mixing_lr=3.0), rounds=2, data=data)
    client = at_home(loop, 0)
    method = client.method
    for w in method.mixing:
        w.copy_(torch.rand(w.shape, generator=torch.Generator().manual_seed(1)))
    weights = [w.clone() for w in method.mixing]
    own = [parameter.detach().clone() for parameter in method.mixed]
    receive(client, loop, 0)
    received = loop.exchange.inbox(0).weights
    model = copy.deepcopy(method.model)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in received.items()})
    new = [received[name] for name in method.mixed_names]
    with torch.no_grad():
        for p, a, b, w in zip(model.head.parameters(), own, new, weights, strict=True):
            p.copy_(a + (b - a) * w)
    x, y = data.store.gather(data.clients[0].train)
    F.cross_entropy(model(x), y).backward()
    for p, w, a, b, learnt in zip(model.head.parameters(), weights, own, new, method.mixing, strict=True):
        expected = (w - 3.0 * p.grad * (b - a)).clamp(0, 1)
        torch.testing.assert_close(learnt, expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(learnt, w)
    for name, tensor in received.items():
        if name not in HEAD:
            assert torch.equal(client.entries[name], tensor)
    for parameter, a, b, w in zip(method.mixed, own, new, method.mixing, strict=True):
        torch.testing.assert_close(parameter.detach(), a + (b - a) * w)


def test_fedala_weights_stay_in_the_unit_interval_and_at_home(conv_net, run_federation):
    loop = run_federation(lambda: FedALA(conv_net(), mixing_lr=50.0), rounds=3, local_epochs=2)
    names = [f"mixing_{index}" for index in range(2)]
    for client in range(4):
        kept = loop.runner.pool.get(client)
        weights = torch.cat([kept[name].flatten() for name in names])
        assert weights.min() >= 0
        assert weights.max() <= 1
        assert weights.min() < 0.9  # some were learnt
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for message in (*loop.diary.sent.values(), *loop.diary.received.values()):
        assert set(message.weights) == {f"model.{name}" for name in conv_net().state_dict()}
        assert message.num_params == size


def test_fedala_keeps_its_own_last_layers_and_no_more_of_the_model(conv_net, run_federation):
    loop = run_federation(lambda: FedALA(conv_net()), rounds=2)
    for client in range(4):
        kept = loop.runner.pool.get(client)
        assert set(kept) == {*HEAD, "mixing_0", "mixing_1", "has_own_model", "has_mixing"}
        assert torch.equal(kept["model.head.weight"], loop.diary.sent[2, client].weights["model.head.weight"])


def test_fedala_of_an_unchanged_global_model_learns_nothing(mlp, run_federation):
    """θ = θ_i: there is nothing to mix."""
    loop = run_federation(lambda: FedALA(mlp()), rounds=3)
    client = at_home(loop, 0)
    before = [w.clone() for w in client.method.mixing]
    own = {name: client.entries[name].clone() for name in HEAD}
    receive(client, loop, 0, Message({**loop.exchange.inbox(0).weights, **own}))
    assert all(torch.equal(w, old) for w, old in zip(client.method.mixing, before, strict=True))
    assert all(torch.equal(client.entries[name], tensor) for name, tensor in own.items())


def test_fedala_takes_the_received_statistics_and_leaves_them(conv_net, run_federation):
    loop = run_federation(lambda: FedALA(conv_net()), rounds=2)
    client = receive(at_home(loop, 0), loop, 0)
    for name, tensor in loop.exchange.inbox(0).weights.items():
        if name.startswith("model.body."):
            assert torch.equal(client.entries[name], tensor)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in client.parameters())


# --- how long, and at what cost ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "epochs"),
    [({"threshold": 1e9}, 11), ({"threshold": 1e-12}, 15), ({"num_losses": 3, "threshold": 1e9}, 4)],
    ids=str,
)
def test_fedala_start_phase_ends_when_losses_settle_or_at_the_cap_and_later_it_is_one_epoch(
    mlp, make_data, run_federation, count_passes, options, epochs
):
    """More than `num_losses` records are needed; the passes go through the head alone on the way back."""
    data = make_data(counts=((12, 8, 5, 5),), test_fraction=0.0)  # 30 samples, of which 80 % are 24
    method = lambda: FedALA(mlp(), max_epochs=15, **options)  # noqa: E731
    loop = run_federation(method, rounds=1, data=data, evaluate_every=1)
    client = at_home(loop, 0)
    model = client.method.model
    head, body = count_passes(model.head), count_passes(model.body.neck)
    message = Message({name: tensor + 0.1 for name, tensor in loop.exchange.inbox(0).weights.items()})
    receive(client, loop, 0, message)
    assert bool(client.method.has_mixing)
    assert head.forward == head.backward == body.forward == 24 * epochs
    assert body.backward == 0
    receive(client, loop, 0, Message({name: tensor + 0.1 for name, tensor in client.division.weights().items()}))
    assert head.forward - 24 * epochs == 24


def test_fedala_learns_on_a_random_share_of_its_samples(mlp, make_client, make_data):
    """Not a window of consecutive ones, which in sorted data is one class."""
    data = make_data(counts=((20, 20),), test_fraction=0.0)
    client = make_client(FedALA(mlp(num_classes=2), share=0.5))
    method, seen = client.method, []
    method.has_own_model.fill_(True)
    method.terms.cross_entropy.register_forward_hook(lambda term, args, value: seen.append(args[1].y))
    method.has_mixing.fill_(True)  # so that a receive is one epoch
    drawn = []
    for _ in range(2):
        weights = {name: tensor + 0.1 for name, tensor in client.division.weights().items()}
        client.receive(Message(weights), data.clients[0])
        drawn.append(torch.cat(seen))
        seen.clear()
    assert [len(y) for y in drawn] == [20, 20]
    assert all(0 < y.sum() < 20 for y in drawn)
    assert not torch.equal(*drawn)


def test_fedala_client_that_sat_out_mixes_with_its_own_last_model(mlp, run_federation):
    """Each client's W and own model are its own, whoever was trained before it."""
    loop = run_federation(lambda: FedALA(mlp()), rounds=4, participation=0.5)
    last = {}
    for round, client in sorted(loop.diary.sent):
        last[client] = loop.diary.sent[round, client].weights["model.head.bias"]
    for client, bias in last.items():
        assert torch.equal(loop.runner.pool.get(client)["model.head.bias"], bias)
        turns = sum(other == client for _, other in loop.diary.sent)
        assert bool(loop.runner.pool.get(client)["has_mixing"]) == (turns > 1)


def test_fedala_has_a_server_accuracy_of_the_plain_mean(mlp, run_federation):
    """Which is not what a client predicts by that has received it."""
    loop = run_federation(lambda: FedALA(mlp()), rounds=2)
    assert 0 <= loop.diary.rows[-1]["Server-T"] <= 1
    assert loop.examiner.has_global_model
    known = loop.examiner.global_scores(0)
    assert known(receive(at_home(loop, 0), loop, 0)) is None


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_fedala_learns_in_every_precision(conv_net, run_federation, precision):
    loop = run_federation(lambda: FedALA(conv_net()), rounds=2, trainer={"precision": precision})
    assert all(loop.runner.pool.get(client)["mixing_0"].isfinite().all() for client in range(4))


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"layers": -1}, r"method\.layers: must be from 0 to 3"),
        ({"layers": 4}, r"method\.layers: must be from 0 to 3"),
        ({"share": 0.0}, r"method\.share: must be in \(0, 1\], got 0\.0"),
        ({"mixing_lr": -1.0}, r"method\.mixing_lr: must be >= 0"),
        ({"threshold": 0.0}, r"method\.threshold: must be > 0, got 0\.0"),
        ({"num_losses": 1}, r"method\.num_losses: must be >= 2, got 1"),
        ({"max_epochs": 0}, r"method\.max_epochs: must be >= 1, got 0"),
    ],
    ids=str,
)
def test_fedala_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        FedALA(mlp(), **option)
