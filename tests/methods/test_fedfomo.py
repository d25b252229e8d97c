"""FedFomo, beside its rule written out here, and whom a server lends to whom."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.lending import Lending, LendingServer, as_vector, lent_models, put_vector, shared_entries
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.losses.model_contrast import ModelContrast
from fl_lightning.methods.fedfomo import FedFomo
from fl_lightning.methods.local import Local

COUNTS = ((12, 8, 0), (10, 9, 1), (0, 4, 16))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def risk(model, data):
    x, y = next(data.batches("validation"))
    return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("baseline", ["start", "last"])
def test_three_rounds_are_those_of_the_paper(baseline, mlp, make_data, set_up_federation, sgd, train_by_hand):
    data = make_data(COUNTS, validation_fraction=0.3)
    make = lambda: FedFomo(mlp(num_classes=3), Lending(models=None), baseline)  # noqa: E731
    loop = set_up_federation(make, data=data, rounds=3)
    models = [copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(3)]
    loop.run()
    starts, gains = copy.deepcopy(models), torch.zeros(3, 3)
    for round in (1, 2, 3):
        sent = copy.deepcopy(models)
        for i, (model, client) in enumerate(zip(models, data.clients, strict=True)):
            base = starts[i] if baseline == "start" else sent[i]
            if round > 1:
                for n, other in enumerate(sent):
                    better = risk(base, client) - risk(other, client)
                    gains[i, n] = better / ((flat(other) - flat(base)).norm() + 1e-5)
                w = gains[i].clamp(min=0)
                w = w / w.sum() if w.sum() else w
                mixed = flat(base) + sum(
                    share * (flat(other) - flat(base)) for share, other in zip(w, sent, strict=True)
                )
                torch.nn.utils.vector_to_parameters(mixed, model.parameters())
            starts[i] = copy.deepcopy(model)
            train_by_hand(model, client, sgd(), round)
            message = loop.diary.sent[round, i]
            torch.testing.assert_close(message.artifacts["wish"], gains[i], rtol=1e-3, atol=1e-5)
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(message.weights[f"model.{name}"], tensor, rtol=1e-4, atol=1e-5)
    assert (gains.clamp(min=0).sum(1) > gains.clamp(min=0).diag()).any()  # somebody took another's model


def test_alone_it_is_local_and_training_samples_judge_without_validation_parts(mlp, make_data, run_federation):
    one, other = (run_federation(lambda k=k: k(mlp()), 2, data=make_data(((6, 6, 6, 6),))) for k in (FedFomo, Local))
    assert [row["loss"] for row in one.diary.rows] == [row["loss"] for row in other.diary.rows]
    together = run_federation(lambda: FedFomo(mlp()), 2)
    assert together.diary.sent[2, 0].artifacts["wish"].abs().max() > 0


@torch.no_grad()
def test_whoever_has_not_begun_starts_from_its_own_weights(mlp, make_data, set_up_federation):
    """Under `init: own` the weights that a method was built with are nobody's, and no start of an earlier fit."""
    data = make_data(COUNTS, validation_fraction=0.3)
    make = lambda: FedFomo(mlp(num_classes=3), Lending(models=None))  # noqa: E731
    loop = set_up_federation(make, data=data, init="own", participation=1 / 3)
    loop.advance()
    (first,) = {client for _, client in loop.diary.sent}
    late = (first + 1) % 3
    client = loop.runner.load(late)
    model, weights = client.method.model, shared_entries(client.method)
    own = as_vector(weights)
    before = risk(model, data.clients[late])
    assert not torch.equal(flat(model), flat(client.method.start))
    put_vector(as_vector(loop.diary.sent[1, first].weights), weights)
    other, better = as_vector(weights), before - risk(model, data.clients[late])
    put_vector(own, weights)
    client.receive(loop.exchange.inbox(late), data.clients[late])
    gain = better / ((other - own).norm() + 1e-5)
    torch.testing.assert_close(client.method.gains[first], gain, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(as_vector(weights), other if better > 0 else own)


def served(lending, wishes, round=1):
    """A server that four clients have sent the model (client, client), and what they wish."""
    server = LendingServer(Message({"w": torch.zeros(2), "steps": torch.tensor(3)}), lending, adds=True)
    server.setup(Facts(num_clients=4, seed=1))
    server.facts = Facts(num_clients=4, seed=1, round=round, participants=(0, 1, 2, 3))
    for client, wish in enumerate(wishes):
        weights = {"w": torch.full((2,), float(client)), "steps": torch.tensor(5)}
        server.collect(client, Message(weights, {"wish": torch.tensor(wish)}, 2))
        assert server.message_for(client).artifacts == {}  # until the round closes
    server.close_round()
    return server


def test_most_wanted_models_are_lent():
    server = served(
        Lending(2, 0.0, 0.0), [[9.0, -1.0, 3.0, 2.0], [0.0, 9.0, 0.0, 1.0], [0.0] * 4, [1.0, 2.0, 3.0, 0.0]]
    )
    assert [server.lenders(client) for client in range(4)] == [[2, 3], [0, 3], [0, 1], [1, 2]]
    message = server.message_for(0)
    assert (message.weights, message.num_params) == ({}, 2 * 2 + 2)
    assert {n: own.tolist() for n, own in lent_models(message).items()} == {2: [2.0, 2.0], 3: [3.0, 3.0]}
    server.open_round()
    server.collect(
        0, Message({"w": torch.ones(2), "steps": torch.tensor(1)}, {"wish": torch.tensor([0.0, 9, 0, 0])}, 2)
    )
    server.close_round()
    assert server.lenders(0) == [1, 2]  # -1 + 9 and 3 against 2
    again = LendingServer(Message(), Lending(2, 0.0, 0.0), adds=True)
    again.load_state_dict(server.state_dict())
    assert again.lenders(0) == [1, 2]


def test_exploration_is_by_chance_and_fades():
    """At ε = 1 all pairs of the three others come up, about equally; after four rounds at a decay of 1/4 the best."""
    wishes = [[0.0, 3.0, 2.0, 1.0]] * 4
    drawn = [tuple(served(Lending(2, 1.0, 0.0), wishes, round).lenders(0)) for round in range(1, 121)]
    assert all(25 <= drawn.count(pair) <= 60 for pair in ((1, 2), (1, 3), (2, 3)))
    assert all(served(Lending(2, 1.0, 0.25), wishes, round).lenders(0) == [1, 2] for round in range(4, 12))


def test_a_restored_server_lends_what_it_would_have_lent():
    server = served(Lending(2, 1.0, 0.0), [[0.0] * 4] * 4, round=3)
    again = LendingServer(Message(), server.lending, adds=True)
    again.setup(Facts(num_clients=4, seed=1))
    again.load_state_dict(server.state_dict())
    assert [again.lenders(client) for client in range(4)] == [server.lenders(client) for client in range(4)]


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.baseline: must be"):
        FedFomo(mlp(), baseline="best")
    for options in ({"models": 0}, {"exploration": 1.5}, {"exploration_decay": -1.0}):
        with pytest.raises(ConfigError, match=rf"method\.lending\.{next(iter(options))}: must be"):
            Lending(**options)


def test_terms_compare_with_what_the_fit_starts_from(mlp, run_federation):
    """Not with the client's own last model: then MOON's term is log 2 in every round, and teaches nothing."""
    loop = run_federation(lambda: FedFomo(mlp(), extra_terms=[ModelContrast(5.0)]), 5)
    losses = [row["loss/model_contrast"] for row in loop.diary.rows]
    assert losses[0] == pytest.approx(math.log(2))
    assert min(abs(loss - math.log(2)) for loss in losses[1:]) > 1e-4


def test_what_a_term_shares_is_mixed_too(mlp, run_federation):
    """The model that a fit started from has no weights of terms: the second round ended in a KeyError."""
    term = lambda: FeatureDistillation(distillation=Distillation(parameters="shared", mid_channels=2))  # noqa: E731
    loop = run_federation(lambda: FedFomo(mlp(), extra_terms=[term()]), 3)
    name = next(name for name in loop.diary.sent[3, 0].weights if name.startswith("terms."))
    assert loop.diary.sent[3, 0].weights[name].isfinite().all()
    assert loop.diary.rows[-1]["loss/feature_distillation"] > 0
