"""Clients that join a running federation."""

import csv
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_optimizers import adam

from fl_lightning.errors import ConfigError
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.settings import Newcomers
from fl_lightning.methods.drdfl import DRDFL, Latents
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.report.columns import may_exist

LAST_JOINS = {"newcomers": Newcomers(clients=1, after=2)}


def test_newcomers_stay_out_until_their_round(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4, **LAST_JOINS)
    assert [row["participants"] for row in loop.diary.rows] == [3, 3, 4, 4]
    assert {client for round, client in loop.diary.sent if round <= 2} == {0, 1, 2}


HELD = ((6, 6, 5, 0), (0, 5, 9, 5), (12, 8, 0, 0), (0, 0, 1, 13))


@pytest.mark.parametrize("method", [FedAvg, FedDyn, SCAFFOLD])
def test_rounds_before_anybody_joins_are_those_of_the_founders_alone(method, mlp, run_federation, make_data):
    alone = run_federation(lambda: method(mlp()), rounds=2, data=make_data(counts=HELD[:2]))
    joined = run_federation(lambda: method(mlp()), data=make_data(counts=HELD), newcomers=Newcomers(2, 2))
    losses = [{key: loop.diary.reports[key].losses for key in alone.diary.reports} for loop in (alone, joined)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_what_a_server_sums_up_is_the_mean_over_all_who_have_joined(sampling, mlp, run_federation):
    share = 1.0 if sampling == "fixed" else 0.4
    options = {"rounds": 5, "newcomers": Newcomers(2, 2), "sampling": sampling, "participation": share}
    scaffold = run_federation(lambda: SCAFFOLD(mlp()), **options)
    kept = [scaffold.runner.pool.get(client) or {"own_control": torch.zeros(())} for client in range(4)]
    found = scaffold.exchange.global_message().artifacts["control"]
    torch.testing.assert_close(found, sum(own["own_control"] for own in kept) / 4)
    dynamic = run_federation(lambda: FedDyn(mlp()), **options)
    kept = [dynamic.runner.pool.get(client) or {"moved": torch.zeros(())} for client in range(4)]
    state = dynamic.exchange.server.optimizer.state["moved"]
    found = torch.cat([moved.reshape(-1) for name, moved in state.items()]).float()
    torch.testing.assert_close(found, sum(own["moved"] for own in kept) / 4, rtol=1e-4, atol=1e-6)


def test_columns_are_the_founders_and_the_newcomers_have_their_own(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4, **LAST_JOINS)
    for row in loop.diary.rows:
        joined = row["round"] > 2
        for column in ("Local-T", "Global-T", "Local-T_received", "Global-T_received"):
            moment = [loop.diary.reports[row["round"], client].scores[column] for client in range(3)]
            assert row[column] == pytest.approx(np.mean(moment))
            assert row[f"{column}_std"] == pytest.approx(np.std(moment))
            assert (f"{column}_newcomers" in row) == joined
            if joined:
                newcomer = loop.diary.reports[row["round"], 3].scores[column]
                assert row[f"{column}_newcomers"] == pytest.approx(newcomer)
    assert "Local-T_newcomers" in loop.row_columns
    assert "Local-T_received_newcomers" in loop.final


def test_losses_are_the_founders_and_the_newcomers_have_their_own(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=4, **LAST_JOINS)
    for row in loop.diary.rows:
        losses = [loop.diary.reports[row["round"], client].losses for client in range(3)]
        assert row["loss"] == pytest.approx(np.mean([own["loss"] for own in losses]))
        assert row["loss/cross_entropy"] == pytest.approx(np.mean([own["cross_entropy"] for own in losses]))
        assert ("loss_newcomers" in row) == (row["round"] > 2)
        if row["round"] > 2:
            assert row["loss_newcomers"] == pytest.approx(loop.diary.reports[row["round"], 3].losses["loss"])
    assert set(loop.diary.rows[-1]) <= set(loop.row_columns)
    assert all(map(may_exist, loop.row_columns))


def test_round_of_newcomers_alone_has_no_founders_loss(mlp, set_up_federation, tmp_path):
    recorder = Recorder(tmp_path, {})
    options = {"failures": Failures(schedule={"3": [0, 1, 2]}), "callbacks": [recorder], **LAST_JOINS}
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=4, **options)
    with recorder:
        loop.run()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [bool(row["loss"]) for row in rows] == [True, True, False, True]
    assert [bool(row["loss/cross_entropy"]) for row in rows] == [True, True, False, True]
    assert [bool(row["loss_newcomers"]) for row in rows] == [False, False, True, True]
    assert all(math.isfinite(float(row["Local-T"])) for row in rows)


def test_federation_without_newcomers_has_no_column_for_them(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2)
    assert [name for name in (*loop.row_columns, *loop.diary.rows[-1], *loop.final) if "newcomers" in name] == []


def test_receive_drop_is_the_founders(mlp, run_federation):
    rows = run_federation(lambda: FedAvg(mlp()), rounds=4, **LAST_JOINS).diary.rows
    for before, row in itertools.pairwise(rows):
        assert row["receive_drop"] == pytest.approx(before["Local-T"] - row["Local-T_received"])


def test_newcomer_that_was_not_drawn_yet_counts_with_its_initial_model(mlp, run_federation, set_up_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=3, participation=0.3, **LAST_JOINS)
    assert 3 not in loop.calendar.participants(3)
    fresh = set_up_federation(lambda: FedAvg(mlp()))
    initial = fresh.runner.evaluator.client(fresh.runner.load(3), 3, "trained")
    assert loop.diary.rows[-1]["Local-T_newcomers"] == initial["Local-T"]
    assert "Local-T_newcomers" not in loop.diary.rows[1]


@pytest.mark.parametrize(("kind", "killed_after"), [("FedAvg", 1), ("FedAvg", 2), ("FedAvg", 3), ("DRDFL", 2)])
def test_run_resumes_exactly_across_the_joining_round(kind, killed_after, mlp, make_data, assert_resumes):
    make = {"FedAvg": lambda: FedAvg(mlp()), "DRDFL": lambda: DRDFL(mlp(), latents=Latents(3, 2))}[kind]
    assert_resumes(make, killed_after, rounds=4, optimizer=adam, data=make_data(batch_size=32), **LAST_JOINS)


def test_drdfl_newcomer_starts_from_its_predecessor_s_learngene_and_gaussians(mlp, make_data, set_up_federation):
    """A plain copy; founders average."""
    make = lambda: DRDFL(mlp(), latents=Latents(3, 2))  # noqa: E731
    loop = set_up_federation(make, rounds=4, data=make_data(batch_size=32), optimizer=adam, **LAST_JOINS)
    for _ in range(2):
        loop.advance()
    for client, copies in ((3, True), (1, False)):
        sent = loop.diary.sent[2, client - 1]
        module = loop.runner.load(client)
        module.method.facts = replace(loop.runner.facts, round=3, client=client)
        module.receive(loop.exchange.inbox(client), loop.data.clients[client])
        assert all(torch.equal(module.entries[n], w) == copies for n, w in sent.weights.items() if "weight" in n)
        assert torch.equal(module.method.mixture[0].class_mean, sent.artifacts["class_mean"]) == copies
    loop.advance()
    loop.advance()
    for name, weight in loop.diary.sent[3, 3].weights.items():  # and its successor hears the newcomer
        assert torch.equal(loop.diary.received[4, 0].weights[name], weight)


def test_fedproto_newcomer_hears_prototypes(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=3, **LAST_JOINS)
    heard = loop.diary.received[3, 3].artifacts["prototypes"]
    assert heard.valid[:3].all()
    assert loop.diary.reports[3, 3].losses["prototype_alignment"] > 0
    assert math.isfinite(loop.diary.rows[-1]["Local-T_newcomers"])


def test_clients_are_told_who_joins_later(mlp, run_federation):
    """A method with a rule of its own for newcomers asks its facts."""

    class Listening(FedAvg):
        def receive(self, message, data):
            super().receive(message, data)
            told[self.facts.client, self.facts.round] = self.facts

    told = {}
    run_federation(lambda: Listening(mlp()), rounds=4, **LAST_JOINS)
    assert {client: facts.is_newcomer for (client, _), facts in told.items()} == {0: False, 1: False, 2: False, 3: True}
    assert {(facts.num_clients, facts.newcomers) for facts in told.values()} == {(4, 1)}


def test_federation_of_newcomers_alone_is_refused(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"federation\.newcomers\.clients: must be < data\.num_clients \(4\), got 4"):
        set_up_federation(lambda: FedAvg(mlp()), newcomers=Newcomers(4, 1))


def test_who_has_never_joined_has_no_figure_after_the_last_receive(set_up_federation, mlp):
    """An early end left newcomers outside, and `final_received` said how well they were."""
    loop = set_up_federation(lambda: FedAvg(mlp()), 6, newcomers=Newcomers(clients=1, after=3))
    for _ in range(2):
        loop.advance()
    early = loop.receive_once_more()
    assert early
    assert not [name for name in early if name.endswith("_newcomers")]
    loop.advance()
    assert [name for name in loop.receive_once_more() if name.endswith("_newcomers")]  # the next round is its first
