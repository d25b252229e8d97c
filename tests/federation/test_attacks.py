"""Hostile clients: what they send, worked out by hand; who they are, and in which figures they do not count."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_optimizers import adam

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.attacks import Attack, Attackers
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import TopK
from fl_lightning.federation.graphs import DirectedGraph
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.runner import Runner
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.sickness import ClientError
from fl_lightning.identity import identity
from fl_lightning.methods.dispfl import DisPFL, MaskedWeights
from fl_lightning.methods.drdfl import DRDFL, Latents
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fedfomo import FedFomo
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.seeding import torch_generator

WEIGHT = "model.body.stages.0.1.weight"


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.fixture
def forge(data):
    """What client 1 sends in round 2 of what it should send: weights, artifacts, where it started, what it received."""

    def make(kind, weights=None, artifacts=None, start=None, received=None, strength=None, client=1):
        attackers = Attackers(Attack(clients=[1], kind=kind, strength=strength), data, seed=0)
        honest = Message(weights or {}, artifacts or {}, 5)
        before = honest.clone()
        sent = attackers.forge(honest, start or {}, Message({}, received or {}), {"w"}, 2, client)
        assert all(torch.equal(honest.weights[name], value) for name, value in before.weights.items())
        assert sent.num_samples == 5
        return sent

    return make


def test_an_attack_turns_what_the_fit_has_moved_not_what_the_method_keeps(set_up_federation, mlp):
    """FedAMP begins its fits from its own weights, not from those that came in."""
    attack = Attack(clients=[1], kind="sign_flip", strength=4.0)
    loop = set_up_federation(lambda: FedAMP(mlp()), rounds=2, attack=attack)
    loop.advance()
    before = {name: value.clone() for name, value in loop.runner.pool.get(1).items()}
    loop.advance()
    after, sent, came = loop.runner.pool.get(1), loop.diary.sent[2, 1].weights, loop.diary.received[2, 1].weights
    assert not torch.equal(before[WEIGHT], came[WEIGHT])
    torch.testing.assert_close(sent[WEIGHT], before[WEIGHT] - 4 * (after[WEIGHT] - before[WEIGHT]))


def test_an_attack_turns_what_the_fit_has_moved_where_the_message_holds_no_weights(set_up_federation, mlp, monkeypatch):
    """FedFomo hears others' models as an artifact: what its receive made of them was boosted with the update."""
    seen, fit = {}, Runner.fit

    def noting(runner, module, data, round):
        before = {name: value.clone() for name, value in module.entries.items()}
        fit(runner, module, data, round)
        seen[round, data.client] = before, {name: value.clone() for name, value in module.entries.items()}

    monkeypatch.setattr(Runner, "fit", noting)
    attack = Attack(clients=[1], kind="scale", strength=10.0)
    loop = set_up_federation(lambda: FedFomo(mlp()), rounds=3, attack=attack)
    loop.run()
    (began, after), sent = seen[3, 1], loop.diary.sent[3, 1].weights
    torch.testing.assert_close(sent[WEIGHT], began[WEIGHT] + 10 * (after[WEIGHT] - began[WEIGHT]))


def test_what_is_an_update_itself_is_not_one_of_what_was_received(data):
    """SCAFFOLD sends what its control has moved by: its sign is flipped around 0, not around the control."""
    attackers = Attackers(Attack(clients=[1], kind="sign_flip", strength=4.0), data, seed=0)
    attackers.increments = frozenset({"control"})
    honest = Message({}, {"control": tensor(0.1, 0.2), "other": tensor(0.1, 0.2)}, 5)
    received = Message({}, {"control": tensor(1.0, 1.0), "other": tensor(1.0, 1.0)})
    sent = attackers.forge(honest, {}, received, set(), 2, 1)
    torch.testing.assert_close(sent.artifacts["control"], tensor(-0.4, -0.8))
    torch.testing.assert_close(sent.artifacts["other"], tensor(4.6, 4.2))


def test_scaffolds_control_is_known_to_be_one(mlp, set_up_federation):
    loop = set_up_federation(lambda: SCAFFOLD(mlp()), attack=Attack(clients=[1], kind="sign_flip"))
    assert loop.runner.attackers.increments == {"control"}


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "strength", "expected"),
    [
        ("sign_flip", None, (-7.0, 2.0)),  # r − 4 (x − r), x − r = (2, 0)
        ("sign_flip", 1.0, (-1.0, 2.0)),
        ("scale", None, (21.0, 2.0)),
        ("scale", 0.5, (2.0, 2.0)),
        ("same_value", None, (1.0, 1.0)),
        ("same_value", -3.0, (-3.0, -3.0)),
        ("label_flip", None, (3.0, 2.0)),  # not by its message
        ("inner_product", None, (3.0, 2.0)),  # not here
    ],
)
def test_weights(kind, strength, expected, forge):
    weights = {"w": tensor(3, 2), "running_var": tensor(4, 4), "seen": torch.tensor(7)}
    sent = forge(kind, weights, start={"w": tensor(1, 2), "running_var": tensor(1, 1)}, strength=strength)
    assert sent.weights["w"].tolist() == list(expected)
    assert sent.weights["running_var"].tolist() == [4, 4]  # no negative variances
    assert sent.weights["seen"] == 7


def test_noise_has_the_size_of_the_update_and_is_the_clients_own(forge):
    weights, start = {"w": tensor(3, 2)}, {"w": tensor(1, 2)}
    drawn = torch.randn(2, generator=torch_generator(0, "attack", 2, 1))
    expected = tensor(1, 2) + 0.5 * 2**0.5 * drawn  # RMS of (2, 0) is the root of 2
    assert torch.allclose(forge("noise", weights, start=start, strength=0.5).weights["w"], expected)
    assert not torch.equal(drawn, torch.randn(2, generator=torch_generator(0, "attack", 3, 1)))
    still = forge("noise", {"w": tensor(1, 2)}, start=start)
    assert still.weights["w"].tolist() == [1, 2]


@pytest.mark.parametrize("held", [1, 2, 4])
def test_noise_on_class_means_has_the_size_of_what_is_sent(held, forge):
    """Classes that a client does not hold are zeros beside the others' means, which were counted: 90 times the size."""
    torch.manual_seed(0)
    came, counts = torch.randn(4, 500), torch.tensor([9] * held + [0] * (4 - held))
    own = torch.where(counts[:, None] > 0, came + 0.01 * torch.randn(4, 500), 0.0)
    artifacts = {"prototypes": ClassMeans(own, counts)}
    received = {"prototypes": ClassMeans(came, torch.ones(4, dtype=torch.int64))}
    sent = forge("noise", artifacts=artifacts, received=received, strength=10.0).artifacts["prototypes"].mean
    assert (sent - came)[:held].square().mean().sqrt().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(sent[held:], own[held:])


def test_others_send_what_they_should(forge):
    assert forge("scale", {"w": tensor(3, 2)}, start={"w": tensor(1, 2)}, client=0).weights["w"].tolist() == [3, 2]


def test_class_means_are_attacked_where_the_client_holds_the_class(forge):
    own = ClassMeans(torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), torch.tensor([3, 0, 1]))
    there = ClassMeans(torch.tensor([[1.0, 1.0], [5.0, 5.0], [0.0, 0.0]]), torch.tensor([9, 9, 0]))
    sent = forge("sign_flip", artifacts={"prototypes": own}, received={"prototypes": there}, strength=1.0)
    assert sent.artifacts["prototypes"].mean.tolist() == [[0, 2], [0, 0], [-1, -1]]
    assert sent.artifacts["prototypes"].count.tolist() == [3, 0, 1]
    first = forge("sign_flip", artifacts={"prototypes": own}, strength=2.0).artifacts["prototypes"]
    assert first.mean.tolist() == [[-4, 0], [0, 0], [-2, -2]]


def test_soft_labels_stay_distributions(forge):
    own = ClassMeans(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([2, 2]), relates_classes=True)
    there = replace(own, mean=torch.tensor([[0.75, 0.25], [0.0, 1.0]]))
    sent = forge("sign_flip", artifacts={"s": own}, received={"s": there}, strength=1.0).artifacts["s"]
    assert sent.mean.tolist() == [[1, 0], [0, 1]]  # from (1, 0) and (−1, 2)
    assert forge("sign_flip", artifacts={"s": own}).artifacts["s"].mean.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert forge("same_value", artifacts={"s": own}, strength=7.0).artifacts["s"].mean.tolist() == [[0.5, 0.5]] * 2


def test_tensors_and_registered_kinds_are_attacked_and_single_numbers_are_not(forge):
    sparse = MaskedWeights.from_dense(tensor(1, 2, 3), torch.tensor([True, False, True]))
    artifacts = {"sparse": sparse, "plain": tensor(1, -1), "mass": tensor(0.5), "labels": torch.tensor([1, 2])}
    sent = forge("scale", artifacts=artifacts, strength=2.0).artifacts
    assert sent["sparse"].values.tolist() == [2, 6]
    assert sent["sparse"].mask.tolist() == [True, False, True]
    assert sent["plain"].tolist() == [2, -2]
    assert sent["mass"].tolist() == [0.5]
    assert sent["labels"].tolist() == [1, 2]


def test_type_of_a_tensor_stays(forge):
    for kind in ("noise", "sign_flip", "scale", "same_value"):
        sent = forge(kind, {"w": tensor(3, 2).bfloat16()}, start={"w": tensor(1, 2).bfloat16()})
        assert sent.weights["w"].dtype == torch.bfloat16


# --- in a federation --------------------------------------------------------------------------------------------------


def first_round(set_up, method, **options):
    loop = set_up(method, rounds=2, **options)
    loop.start = {name: value.clone() for name, value in loop.exchange.inbox(0).weights.items()}
    loop.advance()
    return loop


@pytest.mark.parametrize("exchange", [None, Ring()], ids=["star", "ring"])
def test_attacker_sends_away_from_where_it_started(exchange, mlp, set_up_federation):
    honest = first_round(set_up_federation, lambda: FedRep(mlp()), exchange=exchange)
    hostile = first_round(set_up_federation, lambda: FedRep(mlp()), exchange=exchange, attack=Attack(clients=[1]))
    start = set_up_federation(lambda: FedRep(mlp())).exchange.inbox(0).weights  # a ring's clients have it, too
    for client in range(4):
        for name, sent in hostile.diary.sent[1, client].weights.items():
            x, r = honest.diary.sent[1, client].weights[name], start[name]
            assert torch.equal(sent, r - 4 * (x - r) if client == 1 else x), (client, name)
    assert hostile.diary.reports[1, 1].scores == honest.diary.reports[1, 1].scores  # its own model is that of its fit


def test_without_a_server_an_attackers_own_share_is_what_it_has_sent(mlp, set_up_federation):
    attack = Attack(clients=[1], kind="same_value", strength=1.0)
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=2, exchange=Ring(), attack=attack)
    loop.run()
    heard, neighbour = loop.diary.received[2, 1], loop.diary.sent[1, 0]
    torch.testing.assert_close(heard.weights[WEIGHT], (1 + neighbour.weights[WEIGHT]) / 2)


def test_label_flip_adapts_on_the_other_labels_too(make_data, mlp, run_federation):
    seen = {}

    class Adapts(FedAvg):
        def adapt(self, data):
            seen[data.client] = data.class_counts.tolist()

        def predictors(self):
            return {"": replace(super().predictors()[""], adapts=True)}

    data = make_data()
    run_federation(lambda: Adapts(mlp()), rounds=1, data=data, attack=Attack(clients=[1], kind="label_flip"))
    counts = {client: own.class_counts.tolist() for client, own in enumerate(data.clients)}
    assert seen == {**counts, 1: counts[1][::-1]}


def test_label_flip_is_training_on_the_other_labels_and_nothing_else(make_data, mlp, set_up_federation):
    def flip_of_client_1(arrays):
        part = slice(20, 37)  # its samples; client 0 holds 20
        arrays.y[part] = 3 - arrays.y[part]

    flipped = set_up_federation(lambda: FedProto(mlp()), data=make_data(edit=flip_of_client_1))
    pairs = zip(flipped.data.clients, make_data().clients, strict=True)
    assert all(torch.equal(own.train, other.train) for own, other in pairs), "the split depends on labels here"
    hostile = set_up_federation(lambda: FedProto(mlp()), attack=Attack(clients=[1], kind="label_flip"))
    plain = set_up_federation(lambda: FedProto(mlp()))
    for loop in (flipped, hostile, plain):
        loop.advance()
    for client in range(4):
        own = hostile.diary.sent[1, client].artifacts["prototypes"]
        other = (flipped if client == 1 else plain).diary.sent[1, client].artifacts["prototypes"]
        assert torch.equal(own.mean, other.mean)
        assert torch.equal(own.count, other.count)
    assert hostile.data.clients[1].class_counts.tolist() == plain.data.clients[1].class_counts.tolist()
    assert torch.equal(hostile.data.store.y, plain.data.store.y)


def test_colluding_attackers_send_against_the_honest_mean(mlp, set_up_federation):
    """The server's mean, weighted by samples, of two honest x and twice r − s · mean(x − r)."""
    attack = Attack(clients=[1, 2], kind="inner_product", strength=2.0)
    loop = first_round(set_up_federation, lambda: FedAvg(mlp()), attack=attack)
    n = [float(client.num_train) for client in loop.data.clients]
    for name, after in loop.exchange.inbox(0).weights.items():
        r = loop.start[name].double()
        updates = [loop.diary.sent[1, client].weights[name].double() - r for client in range(4)]
        against = -2.0 * (updates[0] + updates[3]) / 2
        expected = r + (n[0] * updates[0] + (n[1] + n[2]) * against + n[3] * updates[3]) / sum(n)
        assert torch.allclose(after.double(), expected, atol=1e-6)


def test_colluding_attackers_know_class_means_by_who_holds_the_class(mlp, set_up_federation):
    """Class 3 is held by attacker 3 and honest 2, class 0 by honest 0 and 1 alone."""
    attack = Attack(clients=[3], kind="inner_product", strength=1.0)
    loop = set_up_federation(lambda: FedProto(mlp()), rounds=2, attack=attack)
    posted = {}
    post = loop.exchange.post
    loop.exchange.post = lambda client, message: (posted.update({client: message}), post(client, message))
    loop.advance()
    assert list(posted) == [0, 1, 2, 3]
    honest = loop.diary.sent[1, 2].artifacts["prototypes"]
    forged = posted[3].artifacts["prototypes"]
    assert torch.allclose(forged.mean[3], -honest.mean[3])
    assert forged.count.tolist() == loop.diary.sent[1, 3].artifacts["prototypes"].count.tolist()
    assert forged.mean[0].abs().sum() == 0


METHODS = {
    "FedRep": FedRep,
    "FedProto": FedProto,
    "FedCPD": FedCPD,
    "FedDW": FedDW,
    "FedNova": FedNova,
    "DisPFL": DisPFL,
    "DRDFL": lambda model: DRDFL(model, latents=Latents(3, 2)),
}


@pytest.mark.parametrize("kind", ["noise", "sign_flip", "inner_product"])
@pytest.mark.parametrize("name", METHODS)
def test_every_kind_of_message_can_be_attacked(name, kind, conv_net, run_federation):
    make = lambda: METHODS[name](conv_net())  # noqa: E731
    hostile = run_federation(make, rounds=2, optimizer=adam, attack=Attack(clients=[1], kind=kind))
    for row in hostile.diary.rows:
        assert np.isfinite(row["loss"])
    variances = [v for n, v in hostile.diary.sent[2, 1].weights.items() if n.endswith("running_var")]
    assert all((value >= 0).all() for value in variances)


@pytest.mark.parametrize("kind", ["noise", "inner_product"])
def test_run_resumes_exactly(kind, mlp, assert_resumes):
    attack = Attack(share=0.5, kind=kind)
    assert_resumes(lambda: FedProto(mlp()), 1, rounds=2, attack=attack, exchange=DirectedGraph(2))


def test_attackers_know_the_start_of_who_heard_nothing(conv_net, set_up_federation, tmp_path, assert_identical):
    """On a ring a client is alone in round 2, and starts from what it kept: wherever the pool keeps that."""
    attack = Attack(clients=[0], kind="inner_product", strength=5.0)
    failures = Failures(schedule={"2": [0, 2, 3]})
    make = lambda: DRDFL(conv_net(), latents=Latents(3, 2))  # noqa: E731
    ends = []
    for pool in ("memory", "disk"):
        options = {"optimizer": adam, "pool": pool, "folder": tmp_path / pool, "failures": failures}
        loop = set_up_federation(make, 3, attack=attack, **options)
        ends.append(loop.run())
    assert_identical(*ends)


def test_wire_works_on_what_attackers_send(mlp, set_up_federation):
    """Clipping bounds how far a boosted update goes: 1e3 times as far is as far."""
    clip = lambda: [ClipAndNoise(clip=0.01, noise_multiplier=0.0)]  # noqa: E731
    after = []
    for strength in (1e2, 1e3):
        attack = Attack(clients=[1], kind="scale", strength=strength)
        after.append(first_round(set_up_federation, lambda: FedAvg(mlp()), attack=attack, wire=clip()))
    first, second = (loop.exchange.inbox(0).weights[WEIGHT] for loop in after)
    assert torch.allclose(first, second, atol=1e-6)
    sparse = first_round(set_up_federation, lambda: FedAvg(mlp()), attack=Attack(clients=[1]), wire=[TopK(0.1)])
    update = sparse.diary.sent[1, 1].weights[WEIGHT] - sparse.start[WEIGHT]
    assert (update != 0).float().mean() < 0.2


def test_colluding_attackers_work_behind_a_private_mean(mlp, set_up_federation):
    """With s = 1 each of two attackers sends minus the mean of two honest, clipped vectors: nothing is left."""
    attack = Attack(clients=[1, 2], kind="inner_product", strength=1.0)
    wire = [ClipAndNoise(clip=0.01, noise_multiplier=0.0)]
    loop = first_round(set_up_federation, lambda: FedAvg(mlp()), attack=attack, wire=wire)
    assert torch.allclose(loop.exchange.inbox(0).weights[WEIGHT], loop.start[WEIGHT], atol=1e-7)


# --- who counts -------------------------------------------------------------------------------------------------------


class Says(FedAvg):
    """Logs who it is."""

    def local_step(self, step):
        super().local_step(step)
        step.log({"square": torch.tensor(self.facts.client**2.0)})


def test_attackers_count_in_no_mean_and_are_marked(mlp, set_up_federation, tmp_path):
    recorder = Recorder(tmp_path, {})
    options = {"attack": Attack(clients=[0, 3]), "callbacks": [recorder], "newcomers": Newcomers(1, 1)}
    loop = set_up_federation(lambda: Says(mlp()), rounds=2, **options)
    with recorder:
        final = loop.run()
    for row in loop.diary.rows:
        for column in ("Local-T", "Global-T", "Local-T_received"):
            own = [loop.diary.reports[row["round"], client].scores[column] for client in (1, 2)]
            assert row[column] == pytest.approx(np.mean(own))
            assert row[f"{column}_min"] == pytest.approx(min(own))
        losses = [loop.diary.reports[row["round"], client].losses["loss"] for client in (1, 2)]
        assert row["loss"] == pytest.approx(np.mean(losses))
        assert row["log/square"] == 2.5
        assert "Local-T_newcomers" not in row  # the only one attacks
        assert "loss_newcomers" not in row
    assert loop.diary.rows[1]["receive_drop"] == pytest.approx(
        loop.diary.rows[0]["Local-T"] - loop.diary.rows[1]["Local-T_received"]
    )
    assert final["Local-T_received"] == pytest.approx(np.mean(loop.final_scores["Local-T_received"][[1, 2]]))
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert [row["attacker"] for row in rows] == ["1", "0", "0", "1"] * 2


def test_run_without_an_attack_says_nothing_of_it(mlp, set_up_federation, tmp_path):
    recorder = Recorder(tmp_path, {})
    with recorder:
        set_up_federation(lambda: FedAvg(mlp()), rounds=1, callbacks=[recorder]).run()
    assert "attacker" not in (tmp_path / "clients.csv").read_text()


def test_attackers_are_drawn_from_the_seed():
    drawn = [Attack(share=0.2).attackers(20, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {len(own) for own in drawn} == {4}
    assert len(Attack(share=0.01).attackers(20, 0)) == 1


def test_attack_is_part_of_what_makes_a_run_this_run():
    federation = {"attack": {"clients": [1, 2], "share": None, "kind": "scale", "strength": None}}
    with_it, without = identity({"federation": federation}), identity({"federation": {"attack": None}})
    assert without == {}
    assert with_it["federation.attack.kind"] == "scale"
    assert with_it["federation.attack.clients.1"] == 2


def test_boosted_update_beyond_max_growth_is_a_sick_client(mlp, set_up_federation):
    attack = Attack(clients=[1], kind="scale", strength=1e9)
    loop = set_up_federation(lambda: FedAvg(mlp()), attack=attack)
    with pytest.raises(ClientError, match=r"round 1, client 1, send: weight .*federation\.max_growth"):
        loop.run()
    loop = set_up_federation(lambda: FedAvg(mlp()), attack=attack, on_client_error="skip", rounds=1)
    loop.run()
    assert loop.diary.rows[0]["skipped"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "federation.attack: needs either clients or share"),
        ({"clients": [1], "share": 0.2}, "federation.attack: needs either clients or share"),
        ({"share": 0.0}, r"federation.attack.share: must be in \(0, 1\)"),
        ({"share": 1.0}, r"federation.attack.share: must be in \(0, 1\)"),
        ({"clients": [1], "kind": "shout"}, "federation.attack.kind"),
        ({"clients": [1], "strength": 0.0}, "federation.attack.strength: must be > 0 and finite"),
        ({"clients": [1], "strength": float("inf")}, "federation.attack.strength: must be > 0 and finite"),
        ({"clients": [1], "kind": "same_value", "strength": float("nan")}, "federation.attack.strength: must be fin"),
        ({"clients": [1], "kind": "label_flip", "strength": 2.0}, "federation.attack.strength: must be null"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Attack(**options)


@pytest.mark.parametrize(
    ("attack", "options", "message"),
    [
        ({"clients": [4]}, {}, "federation.attack.clients: must be clients from 0 to 3"),
        ({"clients": []}, {}, "federation.attack.clients: must name at least one"),
        ({"clients": [0, 1, 2, 3]}, {}, "federation.attack.clients: must leave at least one of the 4 clients honest"),
        ({"share": 0.99}, {}, "federation.attack.share: must leave at least one"),
        ({"clients": [0, 1, 2]}, {"newcomers": Newcomers(1, 1)}, "federation.attack.clients: must leave at least one"),
        (
            {"clients": [0], "kind": "inner_product"},
            {"exchange": Ring("sequential")},
            "federation.attack.kind: must be",
        ),
    ],
)
def test_attack_must_fit_the_federation(attack, options, message, mlp, set_up_federation):
    with pytest.raises(ConfigError, match=message):
        set_up_federation(lambda: FedAvg(mlp()), attack=Attack(**attack), **options)
