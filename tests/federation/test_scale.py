"""Memory and files grow neither with the participants of a round nor with clients that nobody has seen."""

import json
import math
import weakref
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from fl_lightning.data.module import FederatedData
from fl_lightning.data.population import Population
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.loggers import Loggers
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.settings import EvaluationPolicy, Newcomers
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.report.record import read_rows
from fl_lightning.report.run_logger import RunLogger

PARTICIPANTS = EvaluationPolicy(clients="participants")


class Alive(FederationCallback):
    """Counts, as each participant has sent, how many messages of the round are still held by anybody."""

    def __init__(self) -> None:
        self.messages, self.most = [], 0

    def on_client_fit_end(self, loop, report):
        tensors = [*report.message.weights.values(), *(a.mean for a in report.message.artifacts.values())]
        assert tensors
        self.messages.append(weakref.ref(tensors[0]))
        self.most = max(self.most, sum(reference() is not None for reference in self.messages))


@pytest.mark.parametrize("method", [FedAvg, FedProto])
def test_message_is_dropped_once_it_is_posted(method, mlp, set_up_federation):
    alive = Alive()
    loop = set_up_federation(lambda: method(mlp()), callbacks=[alive])
    loop.callbacks.remove(loop.diary)  # it keeps the reports
    loop.run()
    assert alive.most == 1


def test_method_without_private_state_keeps_nothing_of_its_clients(mlp, run_federation, tmp_path):
    loop = run_federation(lambda: FedAvg(mlp()), folder=tmp_path)
    assert loop.runner.pool.flush(3) == {}
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


# --- figures of participants alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"newcomers": Newcomers(1, after=2)}, {"evaluate_every": 2}])
def test_where_all_take_part_their_figures_are_those_of_all(options, mlp, run_federation, outcome, assert_identical):
    runs = [
        run_federation(lambda: FedRep(mlp()), rounds=4, evaluate=replace(PARTICIPANTS, clients=whose), **options)
        for whose in ("all", "participants")
    ]
    assert_identical(outcome(runs[1]), outcome(runs[0]))
    assert_identical(runs[1].final, runs[0].final)


def test_who_has_no_test_samples_is_named_though_it_was_out_last(mlp, set_up_federation, tmp_path):
    """A summary named those alone who took part in the last round."""
    recorder = Recorder(tmp_path, {})
    options = {"evaluate": PARTICIPANTS, "failures": Failures(schedule={2: [0]}), "callbacks": [recorder]}
    loop = set_up_federation(lambda: FedAvg(mlp()), 2, **options)
    loop.num_test = loop.num_test * (loop.num_test.cumsum() > loop.num_test[0])
    loop.run()
    assert json.loads((tmp_path / "summary.json").read_text())["clients_without_test"] == [0]


def test_who_was_out_is_named_without_figures(mlp, run_federation, tmp_path):
    """`failed` and `skipped` were there, and nobody who was."""

    class Ill(FedRep):
        def local_step(self, step):
            if (self.facts.round, self.facts.client) == (2, 2):
                raise ValueError
            super().local_step(step)

    options = {"evaluate": PARTICIPANTS, "folder": tmp_path, "callbacks": [Recorder(tmp_path, {})]}
    failures = Failures(schedule={2: [0], 3: [1]})
    loop = run_federation(lambda: Ill(mlp()), rounds=3, failures=failures, on_client_error="skip", **options)
    rows = read_rows(tmp_path / "clients.csv")
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in (1, 2, 3) for c in range(4)]
    out = {(row["round"], row["client"]): (row["failed"], row["skipped"]) for row in rows if not row["participated"]}
    assert out == {(2, 0): (1, 0), (2, 2): (0, 1), (3, 1): (1, 0)}
    figures = {*loop.scores, "loss"}
    assert all((row[name] is None) == (not row["participated"]) for row in rows for name in figures)
    assert all(row["num_train"] > 0 for row in rows)
    for row in loop.diary.rows:
        own = [each["Local-T"] for each in rows if each["round"] == row["round"] and each["participated"]]
        assert row["Local-T"] == pytest.approx(sum(own) / len(own))


def test_row_and_table_are_of_the_participants_alone(mlp, run_federation, tmp_path):
    recorder = Recorder(tmp_path, {})
    options = {"participation": 0.5, "evaluate": PARTICIPANTS, "folder": tmp_path, "callbacks": [recorder]}
    loop = run_federation(lambda: FedRep(mlp()), rounds=3, **options)
    seen = [(row["round"], row["client"]) for row in read_rows(tmp_path / "clients.csv")]
    assert seen == sorted(loop.diary.reports)
    assert len(seen) == 6
    for row in loop.diary.rows:
        for column in ("Local-T", "Local-T_received", "Global-T"):
            own = [r.scores[column] for (round, _), r in loop.diary.reports.items() if round == row["round"]]
            assert row[column] == pytest.approx(sum(own) / len(own))
    before, last = loop.diary.rows[-2:]
    assert last["receive_drop"] == pytest.approx(before["Local-T"] - last["Local-T_received"])
    assert loop.board.clients.tolist() == loop.participants


def test_run_of_participants_alone_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedRep(mlp()), rounds=4, participation=0.5, evaluate=PARTICIPANTS)


def test_clients_of_the_rounds_before_are_read_for_loggers_that_take_them_alone(
    mlp, run_federation, tmp_path, monkeypatch
):
    """A run of a million rows that was resumed took seconds and half a gigabyte for them, and let them go."""

    class Told(RunLogger):
        def begin(self, start):
            self.rows = start.client_rows

        wants_shared = log_round = end = print

    loop = run_federation(lambda: FedRep(mlp()), rounds=1, folder=tmp_path, callbacks=[Recorder(tmp_path, {})])
    told = Told()
    Recorder(tmp_path, {}, Loggers([told])).on_run_start(loop)
    monkeypatch.setattr("fl_lightning.federation.recorder.read_packed", None)
    Recorder(tmp_path, {}, Loggers([DummyLogger()])).on_run_start(loop)
    assert [row["client"] for row in told.rows] == list(range(4))


# --- a million registered clients -------------------------------------------------------------------------------------


@pytest.fixture
def population(make_data):
    def make(clients=1_000_000, beta=None):
        data = FederatedData(make_data(((60, 40, 50, 50),)).dataset, Population(12, beta), clients, batch_size=4)
        data.setup(0)
        return data

    return make


def test_nothing_is_made_kept_or_written_of_clients_that_sit_out(population, mlp, set_up_federation, tmp_path):
    options = {"participation": 3e-6, "evaluate": PARTICIPANTS, "pool": "disk", "attack": None}
    options |= {"callbacks": [Recorder(tmp_path, {})], "folder": tmp_path}
    data = population()
    drawn, make = [], data.clients._make
    data.clients._make = lambda client: drawn.append(client) or make(client)
    loop = set_up_federation(lambda: FedRep(mlp()), data=data, **options)
    assert set(drawn) <= {0}
    loop.run()
    seen = {client for _, client in loop.diary.reports}
    assert len(loop.diary.reports) == 9
    assert set(drawn) - seen <= set(range(1000))  # the first ones are shown to loggers
    assert len(read_rows(tmp_path / "clients.csv")) == 9
    assert all(math.isfinite(row["Local-T"]) for row in loop.diary.rows)
    (newest,) = (tmp_path / "checkpoints").glob("round-0003.ckpt")
    assert newest.stat().st_size < 100_000
    kept = [*loop.scores.values(), loop.board.losses, loop.board.last_trained, loop.board.clients]
    assert max(map(len, kept)) == 3
    resumed = set_up_federation(lambda: FedRep(mlp()), data=data, **options | {"rounds": 4, "callbacks": []})
    resumed.load_state_dict(resumed.checkpoints.load(newest))
    assert resumed.board.took_part.nonzero()[0].tolist() == sorted(seen)
    resumed.run()
    assert resumed.round == 4


def test_run_from_before_labels_counted_in_the_hash_goes_on(population, mlp, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(mlp()), data=population(10, beta=0.5), rounds=1)
    loop.run()
    assert loop.data.former_hash != loop.data.partition_hash
    loop.load_state_dict({**loop.state_dict(), "partition": loop.data.former_hash, "round": 1, "clients": {}})
    assert loop.round == 1


def test_looking_at_all_of_too_many_drawn_clients_is_refused(population, mlp, set_up_federation):
    rule = r"^federation\.evaluate\.clients: must be participants where data\.partition draws more than 10000 clients"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedAvg(mlp()), data=population(10_001))
    set_up_federation(lambda: FedAvg(mlp()), data=population(10_000))


def test_flipped_labels_are_made_for_drawn_clients_too(population, mlp, set_up_federation):
    from fl_lightning.federation.attacks import Attack

    attack = Attack(kind="label_flip", clients=[5])
    loop = set_up_federation(lambda: FedAvg(mlp()), data=population(), evaluate=PARTICIPANTS, attack=attack)
    own, flipped = loop.data.clients[5], loop.runner.attackers.samples[5]
    assert torch.equal(flipped.class_counts, own.class_counts.flip(0))
    assert torch.equal(loop.runner.attackers.samples[6].class_counts, loop.data.clients[6].class_counts)
