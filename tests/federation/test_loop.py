import itertools
import signal

import numpy as np
import pytest
import torch

from fl_lightning.core.method import Method, Predictor
from fl_lightning.errors import ConfigError
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.federation.sickness import ClientError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.report.record import num_evaluated

MANY = tuple((4, 4, 3, 3) for _ in range(10))


def numbers(row):
    return {name: value for name, value in row.items() if not name.startswith("seconds")}


def test_pool_on_disk_needs_a_folder(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"federation\.pool"):
        set_up_federation(lambda: FedRep(mlp()), pool="disk")


def test_a_loop_that_is_set_up_again_runs_all_its_rounds_again(mlp, set_up_federation, sgd):
    """It took the rounds before for done, and gave the figures of models that nobody had trained."""
    loop = set_up_federation(lambda: FedRep(mlp()))
    final = loop.run()
    loop.stop()
    loop.setup(lambda _: FedRep(mlp()), loop.data, sgd(), 0, trainer={"accelerator": "cpu"})
    assert loop.run() == final
    first, again = loop.diary.rows[:3], loop.diary.rows[3:]
    assert list(map(numbers, again)) == list(map(numbers, first))


# --- participants -------------------------------------------------------------------------------------------------


def test_only_participants_are_trained_and_only_they_communicate(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4, participation=0.5)
    size = sum(p.numel() for p in mlp().parameters())
    for row in loop.diary.rows:
        drawn = loop.calendar.participants(row["round"])
        assert [client for round, client in loop.diary.sent if round == row["round"]] == drawn
        assert (row["participants"], row["uplink_params"], row["downlink_params"]) == (2, 2 * size, 2 * size)
        assert row["uplink_bytes"] == 4 * row["uplink_params"]
    assert loop.traffic["uplink_params"] == 4 * 2 * size


# --- when clients are evaluated -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "rounds"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (7, [5])])
def test_rounds_that_are_evaluated(mlp, run_federation, every, rounds):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=5, evaluate_every=every)
    for name in ("Local-T", "Local-T_received", "Global-T", "Server-T"):
        assert [row["round"] for row in loop.diary.rows if row.get(name) is not None] == rounds


@pytest.mark.parametrize("method", [FedAvg, FedRep, FedProto, Local])
def test_rounds_that_are_evaluated_say_what_they_say_when_all_are(mlp, make_data, run_federation, method):
    """Clients that sit out until the next evaluated round are evaluated when they are last fitted."""

    def rows(every):
        data = make_data(counts=MANY[:6])
        loop = run_federation(
            lambda: method(mlp()), rounds=7, data=data, participation=0.34, evaluate_every=every, optimizer=None
        )
        return {row["round"]: row for row in loop.diary.rows}, loop.final

    (all_rows, all_final), (some_rows, some_final) = rows(1), rows(3)
    for round in (3, 6, 7):
        for name in ("Local-T", "Local-T_std", "Local-T_min", "Local-T_weighted", "Global-T"):
            assert some_rows[round][name] == all_rows[round][name]
        assert some_rows[round]["Server-T"] == all_rows[round]["Server-T"]
    assert some_rows[7]["Local-T_received"] == all_rows[7]["Local-T_received"]
    only = {name for name in all_final if name.endswith("_hurt")}  # against round 1, which was not evaluated
    assert some_final == {name: value for name, value in all_final.items() if name not in only}


def test_client_that_sat_out_counts_with_its_last_own_state(mlp, run_federation):
    loop = run_federation(lambda: FedRep(mlp()), rounds=8, participation=0.5)
    last = {}
    for row in loop.diary.rows:
        for client in loop.calendar.participants(row["round"]):
            last[client] = loop.diary.reports[row["round"], client].scores["Local-T"]
        if len(last) == 4:
            assert row["Local-T"] == pytest.approx(np.mean(list(last.values())))
    assert len(last) == 4


def test_newcomers_count_with_the_initial_model(mlp, run_federation, set_up_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1, participation=0.25)
    (fitted,) = loop.calendar.participants(1)
    untouched = set_up_federation(lambda: FedAvg(mlp()))
    for client in set(range(4)) - {fitted}:
        initial = untouched.runner.evaluator.client(untouched.runner.load(client), client, "trained")
        assert loop.scores["Local-T"][client] == initial["Local-T"]
        assert loop.scores["Global-T"][client] == initial["Global-T"]
    assert loop.diary.rows[0]["Local-T"] == pytest.approx(loop.scores["Local-T"].mean())


# --- receive drop -------------------------------------------------------------------------------------------------


def test_receive_drop_is_what_the_receive_costs(mlp, run_federation):
    """Local-T of round t - 1 less Local-T_received of round t; round 1 has none."""
    rows = run_federation(lambda: FedAvg(mlp()), rounds=4).diary.rows
    assert rows[0]["receive_drop"] is None
    for before, row in itertools.pairwise(rows):
        assert row["receive_drop"] == pytest.approx(before["Local-T"] - row["Local-T_received"])


def test_receive_drop_needs_the_round_before(mlp, run_federation):
    rows = run_federation(lambda: FedAvg(mlp()), rounds=5, evaluate_every=2).diary.rows
    assert [row.get("receive_drop") is not None for row in rows] == [False, False, False, False, True]
    drop = rows[3]["Local-T"] - rows[4]["Local-T_received"]
    assert rows[4]["receive_drop"] == pytest.approx(drop)


def test_receive_drop_needs_both_moments(mlp, run_federation):
    for policy in (EvaluationPolicy(received=False), EvaluationPolicy(trained=False)):
        rows = run_federation(lambda: FedAvg(mlp()), rounds=2, evaluate=policy).diary.rows
        assert [row["receive_drop"] for row in rows] == [None, None]


# --- the start ----------------------------------------------------------------------------------------------------


def test_common_start_gives_all_clients_the_same_private_weights(mlp, set_up_federation, assert_identical):
    loop = set_up_federation(lambda: FedRep(mlp()))
    states = [{n: t.clone() for n, t in loop.runner.load(client).state_dict().items()} for client in range(4)]
    for state in states[1:]:
        assert_identical(state, states[0])


def test_own_start_gives_every_client_its_own_private_weights(mlp, set_up_federation, assert_identical):
    first, second = (set_up_federation(lambda: FedRep(mlp()), init="own") for _ in range(2))
    heads = [first.runner.load(client).method.model.head.weight.detach().clone() for client in range(4)]
    for i in range(4):
        assert torch.equal(second.runner.load(i).method.model.head.weight, heads[i])
        assert all(not torch.equal(heads[i], heads[j]) for j in range(i))


def test_own_start_does_not_change_what_is_shared(mlp, run_federation, assert_identical):
    loops = [run_federation(lambda: FedRep(mlp()), rounds=1, init=init) for init in ("common", "own")]
    for client in range(4):
        assert_identical(*(loop.diary.received[1, client].weights for loop in loops))


def test_own_start_of_local_clients_is_a_start_of_all_weights(mlp, run_federation):
    loop = run_federation(lambda: Local(mlp()), rounds=1, init="own", optimizer=lambda p: torch.optim.SGD(p, lr=1e-9))
    first = "model.body.stages.0.1.weight"
    weights = [loop.runner.pool.get(client)[first] for client in range(4)]
    assert not torch.allclose(weights[0], weights[1], atol=1e-3)


# --- the learning rate --------------------------------------------------------------------------------------------


def test_statistics_of_batch_norm_stay_with_clients_that_do_not_share_them(conv_net, run_federation):
    statistics = lambda names: {name for name in names if "running_" in name or "num_batches" in name}  # noqa: E731
    shared = run_federation(lambda: FedAvg(conv_net()), rounds=2)
    apart = run_federation(lambda: FedAvg(conv_net()), rounds=2, share_buffers=False)
    whole, parameters = shared.diary.sent[1, 0].weights, apart.diary.sent[1, 0].weights
    assert statistics(whole)
    assert parameters.keys() == whole.keys() - statistics(whole)
    kept = [apart.runner.pool.get(client) for client in range(4)]
    assert all(state.keys() == statistics(whole) for state in kept)
    means = [next(value for name, value in state.items() if "running_mean" in name) for state in kept]
    assert not torch.equal(means[0], means[3])
    assert shared.diary.rows[-1]["Server-T"] is not None
    assert apart.diary.rows[-1]["Server-T"] is None


def test_learning_rate_decays_from_round_to_round(mlp, run_federation):
    rates = []

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
        return made

    run_federation(lambda: Local(mlp()), rounds=3, lr_decay=0.5, optimizer=optimizer)
    assert sorted(set(rates), reverse=True) == pytest.approx([0.1, 0.05, 0.025])
    assert rates == sorted(rates, reverse=True)


# --- callbacks ----------------------------------------------------------------------------------------------------


class Listener(FederationCallback):
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def on_run_start(self, loop):
        self.calls.append((self.name, "run start", loop.round))

    def on_round_start(self, loop, round, participants):
        self.calls.append((self.name, "round start", round, tuple(participants)))

    def on_client_fit_end(self, loop, report):
        self.calls.append((self.name, "fit end", loop.round + 1, report.client))

    def on_round_end(self, loop, row):
        self.calls.append((self.name, "round end", row["round"], loop.round))

    def on_run_end(self, loop, summary):
        self.calls.append((self.name, "run end", loop.round, "Local-T_received" in summary))


def test_callbacks_are_called_in_order(mlp, run_federation):
    calls = []
    listeners = [Listener("a", calls), Listener("b", calls)]
    run_federation(lambda: FedAvg(mlp()), rounds=2, participation=0.5, callbacks=listeners)
    assert [call[0] for call in calls] == ["a", "b"] * (len(calls) // 2)
    own = [call[1:] for call in calls if call[0] == "a"]
    assert own == [call[1:] for call in calls if call[0] == "b"]
    expected = [("run start", 0)]
    calendar = Calendar(Federation(participation=0.5), num_clients=4, seed=0)
    for round in (1, 2):
        drawn = calendar.participants(round)
        expected += [("round start", round, tuple(drawn)), *(("fit end", round, client) for client in drawn)]
        expected.append(("round end", round, round))
    assert own == [*expected, ("run end", 2, True)]


class Stops(FederationCallback):
    def __init__(self, *arguments):
        self.arguments = arguments

    def on_client_fit_end(self, loop, report):
        if loop.round + 1 == 2:
            loop.stop(*self.arguments)


def test_signal_stops_the_run_after_a_round(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=5, callbacks=[Stops(signal.SIGINT)])
    assert loop.round == 2
    assert loop.done
    assert (loop.final, loop.ended) == (None, "")
    assert [row["participants"] for row in loop.diary.rows] == [4, 4]


def test_callback_ends_the_run_as_a_whole_one(mlp, run_federation, outcome, assert_identical):
    """As if this had been its last round, one more receive among it."""
    loop = run_federation(lambda: FedAvg(mlp()), rounds=5, callbacks=[Stops()])
    short = run_federation(lambda: FedAvg(mlp()), rounds=2)
    assert (loop.round, loop.ended, loop.agreement.asked_by) == (2, "a callback asked for it", 0)
    assert_identical(outcome(loop), outcome(short))
    assert_identical(loop.final, short.final)


def test_request_that_comes_after_the_others_were_asked_waits_for_the_next_round(mlp, set_up_federation, tmp_path):
    """As a Ctrl-C during a save: a worker that stopped alone would leave the others waiting for it."""
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=5, folder=tmp_path)
    save = loop.checkpoints.save

    def save_and_stop(*arguments):
        save(*arguments)
        loop.stop(signal.SIGINT)

    loop.checkpoints.save = save_and_stop
    assert loop.run() is None
    assert loop.round == 2


# --- failures -----------------------------------------------------------------------------------------------------


def failing(step):
    class Fails(Method):
        def receive(self, message, data):
            if step == "receive" and data.client == 2:
                raise ValueError("went wrong")
            super().receive(message, data)

        def local_step(self, mini_batch):
            if step == "fit" and self.facts.client == 2:
                raise ValueError("went wrong")
            super().local_step(mini_batch)

        def predictors(self):
            return {"": Predictor(self.scores)}

        def scores(self, seen):
            if step == "evaluation" and self.facts.client == 2:
                raise ValueError("went wrong")
            return seen.logits(self.model)

        def send(self, data):
            if step == "send" and data.client == 2:
                raise ValueError("went wrong")
            return super().send(data)

    return Fails


@pytest.mark.parametrize("step", ["receive", "fit", "evaluation", "send"])
def test_failure_of_a_client_names_round_client_and_step(mlp, set_up_federation, step):
    loop = set_up_federation(lambda: failing(step)(mlp()))
    with pytest.raises(ClientError, match=rf"round 1, client 2, {step}.*: ValueError: went wrong") as caught:
        loop.run()
    assert isinstance(caught.value.__cause__, ValueError)


def test_ctrl_c_in_a_fit_is_no_failure_of_a_client(mlp, set_up_federation):
    class Interrupted(Method):
        def send(self, data):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        set_up_federation(lambda: Interrupted(mlp())).run()


# --- the result depends on nothing that it should not -------------------------------------------------------------


def test_result_does_not_depend_on_the_pool(mlp, run_federation, tmp_path, outcome, assert_identical):
    options = {"rounds": 3, "participation": 0.5}
    memory = outcome(run_federation(lambda: FedRep(mlp()), **options))
    disk = outcome(run_federation(lambda: FedRep(mlp()), pool="disk", folder=tmp_path, **options))
    assert_identical(memory, disk)


def test_rows_hold_every_announced_column_in_evaluated_rounds(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=2)
    assert set(loop.diary.rows[-1]) == set(loop.row_columns)


def test_checkpoint_of_another_configuration_is_refused_naming_the_key(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(mlp()))
    state = {**loop.state_dict(), "round": 1, "clients": {}}
    loop.identity = {"seed": 0, "optimizer.init_args.lr": 0.1}
    state["identity"] = {"seed": 0, "optimizer.init_args.lr": 0.5}
    with pytest.raises(ConfigError, match=r"--resume.*optimizer\.init_args\.lr is 0\.5 there, 0\.1 here"):
        loop.load_state_dict(state)


def test_checkpoint_of_another_partition_is_refused(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(mlp()))
    with pytest.raises(ConfigError, match=r"--resume.*partition"):
        loop.load_state_dict({**loop.state_dict(), "partition": "another", "round": 1, "clients": {}})


def test_heterogeneous_clients_keep_their_architectures(mlp, run_federation):
    loop = run_federation(
        lambda architecture: FedProto(mlp(hidden=((8, 5), (6, 5))[architecture])), architecture=[0, 1, 0, 1], rounds=2
    )
    widths = [len(loop.runner.pool.get(client)["model.body.stages.0.1.bias"]) for client in range(4)]
    assert widths == [8, 6, 8, 6]


class Keeps(FederationCallback):
    """Wants to keep something from round to round."""

    def __init__(self, what):
        self.what = what

    def state_dict(self):
        return {"what": self.what}


@pytest.mark.parametrize("what", [lambda: 1, Keeps(1)], ids=["cannot be pickled", "cannot be read again"])
def test_a_callback_whose_state_is_not_plain_is_named(mlp, run_federation, tmp_path, what):
    said = r"^federation\.callbacks: Keeps\.state_dict\(\) must give plain containers of numbers, texts and tensors"
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: FedAvg(mlp()), rounds=1, callbacks=[Keeps(what)], folder=tmp_path)
    plain = {"a": [1, 2.0, None, "b", torch.zeros(2)], "c": (True, {3})}
    run_federation(lambda: FedAvg(mlp()), rounds=1, callbacks=[Keeps(plain)], folder=tmp_path / "plain")


def test_rounds_in_which_nobody_was_tested_are_not_evaluated_ones(run_federation, mlp):
    """That no value was undefined there was a figure of the round."""
    policy = EvaluationPolicy(clients="participants", server=False)
    options = {"participation": 0.2, "sampling": "poisson", "evaluate": policy}
    rows = run_federation(lambda: FedAvg(mlp()), 8, **options).diary.rows
    tested = [row for row in rows if row.get("Local-T") is not None]
    assert 0 < len(tested) < len(rows)
    assert num_evaluated(rows) == len(tested)
