"""The tests that the specification of FedNova promises (BASELINES-A.md, section 4)."""

import pytest
import torch
from torch import nn

from fl_lightning.core.message import Message
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova, NormalisedServer


@pytest.fixture
def method_with(mlp, make_client):
    """A method that is about to be fitted with an optimizer."""

    def make(optimizer, lr_factor=1.0, **options):
        client = make_client(FedNova(mlp(), **options), optimizer)
        client.lr_factor = lr_factor
        client.configure_optimizers()
        return client.method

    return make


def sent(weights, normaliser, num_samples=1, **more):
    """A message of one tensor a name; `more` holds other artifacts' values."""
    artifacts = {name: torch.tensor([value], dtype=torch.float64) for name, value in more.items()}
    artifacts["normaliser"] = torch.tensor([normaliser], dtype=torch.float64)
    return Message({name: torch.tensor(value) for name, value in weights.items()}, artifacts, num_samples)


def server_at(**weights):
    initial = Message({name: torch.tensor(value) for name, value in weights.items()})
    return lambda momentum=0.0: NormalisedServer(initial, {"w"}, momentum)


# --- the server ----------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    ],
    ids=["SGD", "Nesterov", "Adam"],
)
def test_fednova_of_equal_steps_is_fedavg_bit_for_bit(conv_net, make_data, run_federation, assert_identical, optimizer):
    """Full batches: as many steps for everybody, whatever the number of samples. Batch norm included."""
    options = {"rounds": 2, "data": make_data(batch_size=100), "local_epochs": 3, "optimizer": optimizer}
    nova, plain = (
        run_federation(lambda: FedNova(conv_net()), **options),
        run_federation(lambda: FedAvg(conv_net()), **options),
    )
    assert_identical(nova.exchange.global_message().weights, plain.exchange.global_message().weights)
    assert_identical(
        {n: torch.from_numpy(v) for n, v in nova.scores.items()},
        {n: torch.from_numpy(v) for n, v in plain.scores.items()},
    )


def test_fednova_server_matches_hand_computed_value():
    """p = (½, ½), a = (1, 3), τ_eff = 2: 0 − 2 (½ · 0.1/1 − ½ · 0.3/3) = 0, where FedAvg gives 0.1."""
    messages = {0: sent({"w": [-0.1]}, 1.0), 1: sent({"w": [0.3]}, 3.0)}
    assert server_at(w=[0.0])().aggregate(messages).weights["w"].item() == pytest.approx(0.0, abs=1e-8)


def test_fednova_of_unequal_steps_matches_the_formula(mlp, run_federation):
    loop = run_federation(lambda: FedNova(mlp()), rounds=2)
    before, after = loop.diary.received[2, 0].weights, loop.exchange.global_message().weights
    messages = [loop.diary.sent[2, client] for client in range(4)]
    a = [message.artifacts["normaliser"].item() for message in messages]
    assert a == [client.num_steps(4) for client in loop.data.clients]
    assert len(set(a)) > 1
    total = sum(message.num_samples for message in messages)
    p = [message.num_samples / total for message in messages]
    effective = sum(weight * steps for weight, steps in zip(p, a, strict=True))
    for name, old in before.items():
        change = sum(
            weight * (old.double() - message.weights[name]) / steps
            for weight, message, steps in zip(p, messages, a, strict=True)
        )
        torch.testing.assert_close(after[name].double(), old.double() - effective * change, rtol=1e-6, atol=1e-8)


def test_fednova_leaves_what_all_send_back_unchanged_bit_for_bit():
    """Whatever the normalisers; weights that do not sum to 1 would scale it by 1.33 here."""
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).tolist()
    messages = {0: sent({"w": values}, 1.0, 7), 1: sent({"w": values}, 3.0, 3), 2: sent({"w": values}, 5.61, 11)}
    assert torch.equal(server_at(w=values)().aggregate(messages).weights["w"], torch.tensor(values))


def test_fednova_averages_running_statistics_plainly():
    """p = (½, ½), a = (1, 9), a variance of 1 that became (0.4, 1): 0.7; normalised it would be −0.5."""
    server = server_at(w=[0.0], running_var=[1.0], num_batches_tracked=3)()
    one = sent({"w": [1.0], "running_var": [0.4], "num_batches_tracked": 5}, 1.0)
    two = sent({"w": [1.0], "running_var": [1.0], "num_batches_tracked": 9}, 9.0)
    weights = server.aggregate({0: one, 1: two}).weights
    assert weights["running_var"].item() == pytest.approx(0.7)
    assert weights["num_batches_tracked"].item() == 9
    assert list(weights) == ["w", "running_var", "num_batches_tracked"]


def test_fednova_leaves_out_a_client_that_made_no_step():
    messages = {0: sent({"w": [5.0]}, 0.0, 100), 1: sent({"w": [3.0]}, 2.0, 1)}
    assert server_at(w=[0.0])().aggregate(messages).weights["w"].item() == 3.0
    server = server_at(w=[4.0])()
    assert server.aggregate({0: messages[0]}).weights["w"].item() == 4.0


def test_fednova_takes_the_mean_of_steps_where_they_are_sent():
    """a = (2, 2), τ = (4, 8): θ = 0 − 6 · mean(−1/2) = 3."""
    messages = {0: sent({"w": [1.0]}, 2.0, steps=4.0), 1: sent({"w": [1.0]}, 2.0, steps=8.0)}
    assert server_at(w=[0.0])().aggregate(messages).weights["w"].item() == pytest.approx(3.0)


def test_fednova_server_momentum_matches_hand_computed_value_and_is_saved():
    """Every round moves by 1; with γ = ½: 1, 1 + ½, 1 + ¾."""
    first = server_at(w=[0.0])(0.5)
    place = 0.0
    for step in (1.0, 1.5, 1.75):
        server = server_at(w=[0.0])(0.5)
        server.load_state_dict(first.state_dict())
        place += step
        now = server.message.weights["w"].item()
        assert server.aggregate({0: sent({"w": [now + 1.0]}, 3.0)}).weights["w"].item() == pytest.approx(place)
        first = server


def test_fednova_server_momentum_follows_the_rounds_learning_rate():
    """γ = ½, η = 1, ½, ¼, and every round moves by η: u = 1, 1 + ½, 1 + ¾, and θ by η u."""
    server, place = server_at(w=[0.0])(0.5), 0.0
    for eta, u in ((1.0, 1.0), (0.5, 1.5), (0.25, 1.75)):
        now = server.message.weights["w"].item()
        place += eta * u
        message = sent({"w": [now + eta]}, 3.0, lr_factor=eta)
        assert server.aggregate({0: message}).weights["w"].item() == pytest.approx(place)


@pytest.mark.parametrize(("momentum", "lr_decay", "more"), [(0.5, 0.5, 1), (0.5, 1.0, 0), (0.0, 0.5, 0)])
def test_fednova_sends_the_learning_rate_where_the_server_needs_it(mlp, run_federation, momentum, lr_decay, more):
    """In a run: θ^t = θ^{t−1} − η u, u ← γu + (θ^{t−1} − plain)/η, and from the second round on one value more."""
    method = lambda: FedNova(mlp(), server_momentum=momentum)  # noqa: E731
    loop = run_federation(method, rounds=3, lr_decay=lr_decay)
    size, name, u = sum(p.numel() for p in mlp().parameters()), "model.head.weight", 0.0
    assert [row["uplink_params"] for row in loop.diary.rows] == [4 * (size + 1 + extra) for extra in (0, more, more)]
    after = [loop.diary.received[round, 0].weights[name] for round in (1, 2, 3)]
    after.append(loop.exchange.global_message().weights[name])
    for round in (1, 2, 3):
        before, plain = loop.diary.received[round, 0], NormalisedServer(loop.diary.received[round, 0], {name})
        messages = {client: loop.diary.sent[round, client] for client in range(4)}
        for message in messages.values():
            message.artifacts.pop("lr_factor", None)
        eta = lr_decay ** (round - 1)
        u = momentum * u + (before.weights[name] - plain.aggregate(messages).weights[name]) / eta
        torch.testing.assert_close(after[round], before.weights[name] - eta * u, rtol=1e-4, atol=1e-6)


# --- the normaliser ----------------------------------------------


def test_fednova_normaliser_of_plain_steps_and_of_momentum(method_with, sgd):
    assert [method_with(sgd()).normaliser(steps) for steps in (0, 1, 7)] == [0.0, 1.0, 7.0]
    momentum = method_with(sgd(momentum=0.9, weight_decay=0.1))  # weight decay is no progress
    assert [momentum.normaliser(steps) for steps in (1, 2, 3)] == pytest.approx([1.0, 2.9, 5.61])


@pytest.mark.parametrize("as_extra_term", [False, True])
def test_fednova_normaliser_with_the_proximal_term(method_with, sgd, as_extra_term):
    """ημ = 0.1, τ = 3: (1 − 0.9³)/0.1 = 2.71. With ρ = 0.9: 1; 1 + 1.8; 2.8 + 2.34: the public code says 7.417."""
    options = {"extra_terms": [Proximal(1.0)]} if as_extra_term else {"mu": 1.0}
    assert method_with(sgd(0.1), **options).normaliser(3) == pytest.approx(2.71)
    assert method_with(sgd(0.1, momentum=0.9), **options).normaliser(3) == pytest.approx(5.14)


def test_fednova_normaliser_follows_the_rounds_learning_rate(method_with, sgd):
    assert method_with(sgd(0.2), lr_factor=0.5, mu=1.0).normaliser(3) == pytest.approx(2.71)


def test_fednova_normaliser_of_adam_and_of_no_learning_rate_is_the_number_of_steps(method_with, sgd):
    adam = method_with(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1))
    assert [adam.normaliser(steps) for steps in (1, 10)] == pytest.approx([1.0, 10.0], rel=1e-6)
    assert method_with(sgd(0.0)).normaliser(5) == 5.0


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_fednova_counts_the_steps_that_were_made(mlp, run_federation, accumulate):
    loop = run_federation(
        lambda: FedNova(mlp()), rounds=2, local_epochs=2, trainer={"accumulate_grad_batches": accumulate}
    )
    for (_, client), message in loop.diary.sent.items():
        batches = loop.data.clients[client].num_steps(4)
        assert message.artifacts["normaliser"].item() == 2 * -(-batches // accumulate)


# --- what travels ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, 1), ({"mu": 0.1}, 2), ({"effective_steps": "steps"}, 1), ({"mu": 0.1, "effective_steps": "normaliser"}, 1)],
    ids=str,
)
def test_fednova_sends_the_model_and_its_normaliser(conv_net, run_federation, options, more):
    """τ rides along only where the server needs it and it is not the normaliser: never for plain SGD without a term."""
    loop = run_federation(lambda: FedNova(conv_net(), **options), rounds=2)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    steps = [client.num_steps(4, drop_single=True) for client in loop.data.clients]
    single = sum(count == 1 for count in steps) if more == 2 else 0  # of one step a = τ = 1
    for row in loop.diary.rows:
        assert row["uplink_params"] == 4 * (size + more) - single
        assert row["downlink_params"] == 4 * size


def test_fednova_merges_the_artifacts_of_extra_terms_as_ever(mlp, run_federation):
    loop = run_federation(lambda: FedNova(mlp(), extra_terms=[PrototypeAlignment(0.1)]), rounds=2)
    artifacts = loop.exchange.global_message().artifacts
    assert set(artifacts) == {"prototypes"}
    assert artifacts["prototypes"].valid.all()


def test_fednova_has_a_global_model(mlp, run_federation):
    """Which is what every client predicts by that has received it."""
    loop = run_federation(lambda: FedNova(mlp()), rounds=1)
    assert loop.examiner.has_global_model
    client = loop.runner.load(0)
    client.receive(loop.exchange.inbox(0), loop.data.clients[0])
    assert loop.examiner.global_scores(0)(client) is not None


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"mu": -1.0}, r"method\.mu: must be >= 0"),
        ({"effective_steps": "tau"}, r"method\.effective_steps: must be one of auto, normaliser, steps, got 'tau'"),
        ({"server_momentum": 1.0}, r"method\.server_momentum: must be in \[0, 1\), got 1\.0"),
    ],
    ids=str,
)
def test_fednova_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        FedNova(mlp(), **option)


class Draws(Term):
    """Draws a weight that it shares to 1."""

    shared = ("own",)
    reaches = ()

    def setup(self, host):
        self.own = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.own.weight)

    def forward(self, host, out):
        return 0.5 * (self.own.weight - 1).square().sum()


def test_the_proximal_terms_factor_is_not_for_what_a_term_shares(mlp, run_federation, sgd):
    """No pull holds it back: at 0.8 after the first fits, the server put it at 2.5, and further off in every round."""
    loop = run_federation(
        lambda: FedNova(mlp(), mu=2.0, extra_terms=[Draws()]), rounds=4, optimizer=sgd(0.1), local_epochs=4
    )
    server, name = loop.exchange.global_message().weights, "terms.2.own.weight"
    sent = [loop.diary.sent[4, client] for client in range(4)]
    total = sum(message.num_samples for message in sent)
    mean = sum(message.weights[name] * message.num_samples for message in sent) / total
    torch.testing.assert_close(server[name], mean, rtol=0, atol=1e-6)
    assert 0.9 < server[name].item() <= 1
