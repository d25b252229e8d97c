"""Clients that fall sick: errors, losses and models that are no numbers, messages that are not what they say."""

import re
from dataclasses import replace
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch

from fl_lightning.core.message import ClassMeans
from fl_lightning.core.method import Method, Predictor
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerAdam
from fl_lightning.errors import ConfigError
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import TopK
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.recorder import communication
from fl_lightning.federation.reexamination import reexamine
from fl_lightning.federation.sickness import ClientError, ServerError, at, at_server
from fl_lightning.federation.signals import StoppedAtOnce
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.feddistill import FedDistill
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fedgen import FedGen, Generator, Training
from fl_lightning.methods.fedgh import FedGH
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.scaffold import SCAFFOLD

WEIGHT = "model.body.stages.0.1.weight"
SICK = (2, 1)
"""Round and client."""


def filled(value):
    def spoil(message):
        message.weights[WEIGHT].view(-1)[3] = value
        return message

    return spoil


def reshaped(message):
    message.weights[WEIGHT] = message.weights[WEIGHT][:-1]
    return message


def renamed(message):
    message.weights["model.stranger"] = message.weights.pop(WEIGHT)
    return message


def cut(message):
    del message.weights[WEIGHT]
    return message


def widened(message):
    message.weights[WEIGHT] = message.weights[WEIGHT].double()
    return message


def miscounted(message):
    return replace(message, num_samples=-3)


def boastful(message):
    return replace(message, num_samples=10**9)


SPOILS = {
    "nan": (filled(float("nan")), rf"send: weight {re.escape(WEIGHT)} holds nan"),
    "inf": (filled(float("-inf")), "send: weight .* holds -inf"),
    "1e30": (filled(1e30), r"send: weight .* holds 1e\+30, above 10000 \(federation.max_growth is 10000\)"),
    "shape": (reshaped, r"send: weight .* is \[7, 64\] and should be \[8, 64\]"),
    "name": (renamed, "send: weight 'model.stranger' is none of those that travel"),
    "missing": (cut, f"send: weight '{re.escape(WEIGHT)}' is missing"),
    "type": (widened, "send: weight .* is float64 and should be float32"),
    "samples": (miscounted, r"send: num_samples is -3, and it has 13 training samples"),
    "too many samples": (boastful, "send: num_samples is 1000000000, and it has 13"),
}


def ill(kind, spoil=None, fails="", when=SICK):
    """A method one of whose clients sends something spoilt in one round, or raises an error in one of its steps."""

    class Ill(kind):
        def _falls(self, step):
            if step == fails and (self.facts.round, self.facts.client) == when:
                raise ValueError("went\nwrong")

        def receive(self, message, data):
            self._falls("receive")
            super().receive(message, data)

        def local_step(self, step):
            if step.is_last:
                self._falls("fit")
            super().local_step(step)

        def predictors(self):
            if fails != "evaluation":
                return super().predictors()

            def scores(seen):
                self._falls("evaluation")
                return seen.logits(self.model)

            return {"": Predictor(scores)}

        def losses(self):
            return super().losses() | ({"own": 1.0} if fails == "loss" else {})

        def send(self, data):
            self._falls("send")
            message = super().send(data)
            return spoil(message) if spoil and (self.facts.round, data.client) == when else message

    return Ill


class LosesItself(Method):
    """The loss's term `own` is infinite from the second step of one fit on, the sum is then, too."""

    def losses(self):
        return {"own": 1.0}

    def local_step(self, step):
        out = step.forward()
        broken = (self.facts.round, self.facts.client) == SICK and not step.is_first
        own = out.logits.square().mean() * (float("inf") if broken else 1.0)
        step.descend({**step.values(out), "own": own})


class LosesItselfSending(FedRep):
    """Writes NaN to its own head as it sends, past what counts a tensor's changes."""

    def send(self, data):
        self.model.head.bias.data.fill_(float("nan"))
        return super().send(data)


def test_what_a_client_keeps_is_looked_at_after_its_send_too(run_federation, mlp):
    """It came into the checkpoint that was said to be the last good one."""
    with pytest.raises(ClientError, match=r"^round 1, client 0, send: model\.head\.bias holds nan"):
        run_federation(lambda: LosesItselfSending(mlp()), 1)


class Overflows(Method):
    """Scores are NaN in one round, though all weights are finite."""

    def predictors(self):
        return {"": Predictor(self.scores)}

    def scores(self, seen):
        logits = seen.logits(self.model)
        return logits * float("nan") if (self.facts.round, self.facts.client) == SICK else logits


# --- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPOILS)
def test_message_that_is_not_what_it_should_be_ends_the_run(name, mlp, set_up_federation, tmp_path):
    spoil, rule = SPOILS[name]
    loop = set_up_federation(lambda: ill(FedAvg, spoil)(mlp()), folder=tmp_path)
    with pytest.raises(ClientError, match=rf"^round 2, client 1, {rule}"):
        loop.run()
    assert [row["round"] for row in loop.diary.rows] == [1]
    assert loop.checkpoints.load(loop.checkpoints.find("auto"))["round"] == 1


@pytest.mark.parametrize(("make", "rule"), [(LosesItself, "term own is inf at step 2 of 4"), (Overflows, "are nan")])
def test_what_is_no_number_is_found_where_it_begins(make, rule, mlp, set_up_federation):
    loop = set_up_federation(lambda: make(mlp()), evaluate_every=1)
    with pytest.raises(ClientError, match=rf"^round 2, client 1, .*{rule}"):
        loop.run()


def test_rate_under_which_training_diverges_names_the_loss_and_the_step(mlp, sgd, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(mlp()), optimizer=sgd(1e6))
    with pytest.raises(
        ClientError, match=r"^round 1, client 0, fit: the loss's term cross_entropy is (nan|inf) at step \d"
    ):
        loop.run()


@pytest.mark.parametrize("kind", [FedProto, FedDW])
def test_private_model_that_explodes_without_a_nan_is_found(kind, mlp, set_up_federation):
    loop = set_up_federation(lambda: kind(mlp()), optimizer=lambda p: torch.optim.Adam(p, lr=1e5))
    with pytest.raises(ClientError, match=r"^round 1, client 0, (fit|send): "):
        loop.run()


def test_error_is_one_line_with_its_type(mlp, set_up_federation):
    loop = set_up_federation(lambda: ill(FedAvg, fails="send")(mlp()))
    with pytest.raises(ClientError) as caught:
        loop.run()
    said, line = str(caught.value).removesuffix(")").rsplit(":", 1)
    assert said == "round 2, client 1, send: ValueError: went wrong (test_sickness.py"  # whose file it is of
    assert 0 < int(line) - ill.__code__.co_firstlineno < 40


def test_artifacts_are_looked_at_too(mlp, set_up_federation):
    def spoil(message):
        means = message.artifacts["prototypes"]
        message.artifacts["prototypes"] = ClassMeans(means.mean[:, :-1], means.count)
        return message

    with pytest.raises(ClientError, match=r"artifact prototypes is \[4, 4\] and should be \[4, 5\]"):
        set_up_federation(lambda: ill(FedProto, spoil)(mlp())).run()

    def uncount(message):
        message.artifacts["prototypes"].count[0] = -5
        return message

    with pytest.raises(ClientError, match="artifact prototypes counts -5 samples of a class"):
        set_up_federation(lambda: ill(FedProto, uncount)(mlp())).run()


class Mad(Server):
    """Makes NaN of a round."""

    def close_round(self):
        super().close_round()
        if self.round == 2:
            self.message.weights[WEIGHT] = self.message.weights[WEIGHT] * float("nan")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_server_that_makes_nan_ends_the_run_before_the_round_is_logged(policy, mlp, set_up_federation, tmp_path):
    class Served(FedAvg):
        def make_server(self, initial, facts):
            return Mad(initial)

    loop = set_up_federation(lambda: Served(mlp()), folder=tmp_path, on_client_error=policy)
    with pytest.raises(
        ServerError, match=rf"^round 2, the server: weight {re.escape(WEIGHT)} holds nan in what it sends"
    ):
        loop.run()
    assert [row["round"] for row in loop.diary.rows] == [1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(lambda model: FedGH(model, server_lr=1e5), {}), (FedAvg, {"server_optimizer": ServerAdam(lr=1e5)})],
    ids=["FedGH", "ServerAdam"],
)
def test_step_of_the_servers_own_that_explodes_without_a_nan_ends_the_run(kind, options, mlp, set_up_federation):
    """The clients would go on at chance."""
    with pytest.raises(ServerError, match=r"^round 1, the server: weight model\.\S+ holds \S+, above 10000 "):
        set_up_federation(lambda: kind(mlp()), **options).run()


def test_failure_of_the_server_ends_the_run_in_one_line(mlp, set_up_federation):
    """A number that float32 cannot hold is found out in the server's first step."""
    with pytest.raises(ServerError, match=r"^round 1, the server: RuntimeError: value cannot be converted to type"):
        set_up_federation(lambda: FedGen(mlp(), training=Training(server_lr=1e308))).run()


def test_size_that_no_tensor_can_have_is_refused_before_training(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"^method: cannot be made: .*Overflow when unpacking long"):
        set_up_federation(lambda: FedGen(mlp(), generator=Generator(noise_size=2**62)))


def test_reason_is_short_enough_for_one_line(mlp, set_up_federation):
    class Talks(FedAvg):
        def receive(self, message, data):
            raise RuntimeError("so it is\n" * 500)

    with pytest.raises(ClientError) as caught:
        set_up_federation(lambda: Talks(mlp())).run()
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


# --- skip -------------------------------------------------------------------------------------------------------------


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


@pytest.fixture
def assert_like_a_failure(run_federation, outcome, assert_identical):
    """A client that is left out of a round leaves the federation as if it had been out of it by plan."""

    def check(sick, well, **options):
        loop = run_federation(sick, on_client_error="skip", **options)
        plan = run_federation(well, failures=Failures(schedule={"2": [1]}), **options)
        columns = ("missing", "skipped", "downlink_params", "downlink_bytes")
        left, right = outcome(loop), outcome(plan)
        for end in (left, right):
            end["rows"] = {round: without(row, *columns) for round, row in end["rows"].items()}
            end["traffic"] = without(end["traffic"], *columns)
        assert_identical(left, right)
        assert_identical(loop.final, plan.final)
        assert [row["skipped"] for row in loop.diary.rows] == [0, 1, 0]
        return loop, plan

    return check


@pytest.mark.parametrize("name", SPOILS)
def test_client_that_sends_rubbish_is_left_out(name, mlp, assert_like_a_failure, capsys):
    loop, plan = assert_like_a_failure(lambda: ill(FedRep, SPOILS[name][0])(mlp()), lambda: FedRep(mlp()))
    assert re.search(rf"round 2, client 1, {SPOILS[name][1]}.*; left out of the round\n", capsys.readouterr().err)
    heard = plan.diary.rows[1]["downlink_params"] // 3  # it was sent its message all the same
    assert loop.diary.rows[1]["downlink_params"] == 4 * heard


def test_client_that_is_left_out_of_an_evaluated_round_counts_with_its_fit_before(mlp, assert_like_a_failure):
    name = next(iter(SPOILS))
    assert_like_a_failure(lambda: ill(FedRep, SPOILS[name][0])(mlp()), lambda: FedRep(mlp()), evaluate_every=2)


@pytest.mark.parametrize("step", ["receive", "fit", "evaluation", "send"])
def test_client_that_raises_is_left_out(step, conv_net, assert_like_a_failure):
    """Batch norm, dropout and two phases: what a broken fit leaves in the resident module must not reach the next."""
    sick, well = ill(FedRep, fails=step), ill(FedRep, fails="evaluation" if step == "evaluation" else "", when=None)
    assert_like_a_failure(lambda: sick(conv_net()), lambda: well(conv_net()))


class Refuses(L.Callback):
    """Refuses one client's gradients, where its parameters stand ready for the step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        facts = pl_module.method.facts
        if (facts.round, facts.client) == SICK:
            raise ValueError("gradients")


def test_client_that_breaks_off_in_a_step_leaves_half_precision_to_the_next(mlp, assert_like_a_failure):
    """Its parameters stayed as the step had them, in float32, and all clients after it fell sick."""
    trainer = {"precision": "bf16-true", "callbacks": [Refuses()]}
    assert_like_a_failure(lambda: FedRep(mlp()), lambda: FedRep(mlp()), trainer=trainer)


@pytest.mark.parametrize("kind", [FedProto, FedCPD, FedDW, FedDistill, SCAFFOLD])
def test_methods_with_artifacts_and_own_states_leave_it_out(kind, mlp, assert_like_a_failure):
    assert_like_a_failure(lambda: ill(kind, fails="fit")(mlp()), lambda: kind(mlp()))


@pytest.mark.parametrize(
    "make",
    [Ring, lambda: Ring("sequential"), lambda: DirectedGraph(2), lambda: RandomPeers(2)],
    ids=["ring", "sequential ring", "push-sum", "random peers"],
)
def test_neighbours_close_ranks(make, mlp, assert_like_a_failure):
    loop, plan = assert_like_a_failure(lambda: ill(FedAvg, fails="fit")(mlp()), lambda: FedAvg(mlp()), exchange=make())
    assert loop.diary.hops[2] == plan.diary.hops[2]
    assert loop.traffic == plan.traffic
    if isinstance(loop.exchange, DirectedGraph):
        assert sum(loop.exchange.mass.get(client, 1.0) for client in range(4)) == pytest.approx(4)


@pytest.mark.parametrize("make", [Ring, lambda: DirectedGraph(2), lambda: RandomPeers(2)])
def test_client_that_falls_sick_as_it_joins_is_brought_in_again(make, mlp, run_federation, assert_identical):
    """It took part with what it was sent in the round in which it fell sick, however long ago."""
    sick, plan = (
        run_federation(
            lambda own=own: own(mlp()),
            rounds=4,
            on_client_error="skip",
            exchange=make(),
            failures=Failures(schedule={key: [1] for key in out}),
        )
        for own, out in ((ill(FedAvg, fails="fit"), ("1", "3")), (FedAvg, ("1", "2", "3")))
    )
    assert [row["skipped"] for row in sick.diary.rows] == [0, 1, 0, 0]
    assert_identical(sick.diary.received[4, 1].weights, plan.diary.received[4, 1].weights)
    assert_identical(sick.final, plan.final)
    assert sick.diary.hops[4] == plan.diary.hops[4]
    came, heard = (sum(row[f"{way}_params"] for row in sick.diary.rows) for way in ("uplink", "downlink"))
    waits = sum(hop.num_params for hop in sick.diary.hops[4]) - sick.exchange.pulled().num_params
    assert heard == came - waits  # what came down to it in vain counts once it takes part


def test_error_feedback_keeps_what_it_owes(mlp, assert_like_a_failure):
    options = {"wire": [TopK(0.2)]}
    assert_like_a_failure(
        lambda: ill(FedRep, fails="evaluation")(mlp()),
        lambda: ill(FedRep, fails="evaluation", when=None)(mlp()),
        **options,
    )


def test_round_of_which_nobody_is_left_changes_nothing(mlp, run_federation, capsys, assert_identical):
    class Epidemic(FedAvg):
        def send(self, data):
            if self.facts.round == 2:
                raise ValueError("went wrong")
            return super().send(data)

    loop = run_federation(lambda: Epidemic(mlp()), on_client_error="skip", evaluate_every=1)
    rows = loop.diary.rows
    cost, size = communication(loop.traffic, rows), loop.diary.reports[1, 0].uplink.num_params
    assert (cost["uplink_params_per_client"], cost["downlink_params_per_client"]) == (size, size)  # the sick heard, too
    assert [(row["participants"], row["skipped"]) for row in rows] == [(4, 0), (0, 4), (4, 0)]
    assert rows[1]["Local-T"] == rows[0]["Local-T"]
    assert_identical(loop.diary.received[3, 0].weights, loop.diary.received[2, 0].weights)
    assert "round 2: all 4 participants are left out; what is shared stays as it was" in capsys.readouterr().err


def test_run_with_a_sick_client_resumes_exactly(mlp, assert_resumes):
    assert_resumes(lambda: ill(FedRep, fails="fit")(mlp()), rounds=4, on_client_error="skip")


@pytest.mark.parametrize("sick", [3, 6])
def test_what_was_not_tested_is_not_made_up_without_the_sick(sick, mlp, set_up_federation, tmp_path):
    """Under `stop` nobody is tested who takes part again before the next evaluation: an older fit's figures stood."""

    def set_up(rounds=6, policy="stop"):
        kind = ill(FedRep, fails="fit", when=(sick, 1))
        options = {"evaluate_every": 3, "on_client_error": policy, "folder": tmp_path}
        return set_up_federation(lambda: kind(mlp()), rounds=rounds, **options)

    broken = set_up()
    with pytest.raises(ClientError):
        broken.run()
    goes_on = set_up(policy="skip")
    goes_on.load_state_dict(goes_on.checkpoints.load(goes_on.checkpoints.find("auto")))
    assert goes_on.round == sick - 1
    while goes_on.round < sick:
        goes_on.advance()
    known = goes_on.scores["Local-T"]
    assert np.isnan(known).tolist() == [client == 1 for client in range(4)]
    assert goes_on.diary.rows[-1]["Local-T"] == pytest.approx(float(np.delete(known, 1).mean()))


def test_client_that_is_sick_at_once_starts_when_it_is_well(mlp, run_federation):
    loop = run_federation(lambda: ill(FedRep, fails="fit", when=(1, 1))(mlp()), on_client_error="skip")
    assert [row["skipped"] for row in loop.diary.rows] == [1, 0, 0]
    assert loop.diary.rows[0]["Local-T"] is not None
    assert loop.board.took_part.all()


def test_client_that_is_only_tested_was_sent_nothing(mlp, set_up_federation, monkeypatch):
    """What it would hear is not at hand on a worker that fits it in no round yet."""
    loop = set_up_federation(lambda: FedAvg(mlp()), on_client_error="skip")
    test = loop.runner.evaluate_resting

    def evaluate(client):
        if client == 2:
            raise ValueError("went wrong")
        return test(client)

    monkeypatch.setattr(loop.exchange, "inbox", {}.__getitem__)
    monkeypatch.setattr(loop.runner, "evaluate_resting", evaluate)
    loop.examiner.test_strangers(1)
    assert np.isnan(loop.scores["Local-T"]).tolist() == [False, False, True, False]


def taken_down(wish):
    """What a Trainer does with somebody's wish as it sets a fit up: it raises an error of its own."""
    try:
        raise wish
    finally:
        raise RuntimeError("Please call `iter(combined_loader)` first.")


@pytest.mark.parametrize("place", [lambda: at(1, 0, "fit"), lambda: at_server(1)])
@pytest.mark.parametrize("wish", [StoppedAtOnce(2), KeyboardInterrupt()])
def test_a_wish_to_stop_passes_whatever_it_meets_on_its_way_out(place, wish):
    """The run ended as if a client were sick."""
    with pytest.raises(type(wish)), place():
        taken_down(wish)


@pytest.mark.parametrize("bound", [1.3, 2.0])
def test_a_healthy_run_goes_on_under_a_tight_bound(run_federation, mlp, bound):
    """What clients heard was held to the bound's third power, whatever it had been the round before."""

    def method():
        model = mlp()
        with torch.no_grad():
            model.head.weight.mul_(30 / model.head.weight.abs().max())
        return FedAvg(model)

    loop = run_federation(method, 3, max_growth=bound, optimizer=partial(torch.optim.SGD, lr=1e-5))
    assert [row["round"] for row in loop.diary.rows] == [1, 2, 3]
    assert float(loop.exchange.global_message().weights["model.head.weight"].abs().max()) > bound**3


@pytest.mark.parametrize(
    ("make", "exchange"), [(FedProto, None), (FedProto, Ring()), (FedAvg, DirectedGraph(degree=1))]
)
def test_what_is_heard_for_the_first_time_may_be_large_under_a_tight_bound(run_federation, mlp, make, exchange):
    """Clients may send it; the server's mean of it, and whatever a neighbour said, was held to the bound's power."""

    def method():
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(30 / parameter.abs().max())
        return make(model)

    options = {"max_growth": 2.0, "exchange": exchange, "optimizer": partial(torch.optim.SGD, lr=1e-9)}
    assert len(run_federation(method, 2, **options).diary.rows) == 2


def test_a_statistic_of_the_servers_may_grow_from_where_it_was(run_federation, conv_net):
    def method():
        model = conv_net()
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.fill_(20.0)
        return FedAvg(model)

    loop = run_federation(method, 2, max_growth=2.0)
    assert len(loop.diary.rows) == 2


class Masks(FedAvg):
    """Its server sends truths, too."""

    def make_server(self, initial, facts):
        return Server(replace(initial, artifacts={"mask": torch.tensor([True, False])}))


def test_truths_of_a_server_have_no_size(run_federation, mlp):
    assert len(run_federation(lambda: Masks(mlp()), 2).diary.rows) == 2


# --- computed again ---------------------------------------------------------------------------------------------------


class NeverWell(Method):
    """Scores of one client are NaN."""

    def predictors(self):
        return {"": Predictor(self.scores)}

    def scores(self, seen):
        return seen.logits(self.model) * (float("nan") if self.facts.client == 1 else 1.0)


def test_who_is_sick_in_a_test_is_left_out_again_where_a_run_is_evaluated(mlp, set_up_federation, tmp_path):
    """It ended in a traceback, where the run had gone on without the client."""
    options = {"rounds": 2, "folder": tmp_path, "on_client_error": "skip", "failures": Failures(clients=[1])}
    ran = set_up_federation(lambda: NeverWell(mlp()), **options)
    final = ran.run()
    again = set_up_federation(lambda: NeverWell(mlp()), **options)
    found = {name: value for name, _, value in reexamine(again, tmp_path)}
    assert found.items() <= {**ran.diary.rows[-1], **final}.items()
    assert {"Local-T", "Local-T_received"} <= found.keys()
