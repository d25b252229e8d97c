"""Robust rules inside a federation: whom they suit, and what they go together with."""

import sys
from functools import partial

import pytest
import torch
from tiny_models import TinyConvNet

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.centre_rules import CentredClipping, GeometricMedian, NormClipping
from fl_lightning.core.coordinate_rules import CoordinateMedian, TrimmedMean
from fl_lightning.core.message import Message
from fl_lightning.core.selection_rules import Bulyan, Krum
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerAdam, ServerMomentum
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import Quantize, TopK
from fl_lightning.federation.launch import launch
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.team import Team
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.feddistill import FedDistill
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.methods.scaffold import SCAFFOLD

FOUR = {
    "median": CoordinateMedian,
    "trimmed": TrimmedMean,
    "krum": lambda: Krum(0),
    "bulyan": lambda: Bulyan(0),
    "geometric": GeometricMedian,
    "clipping": NormClipping,
    "centred": CentredClipping,
}
"""The rules, for four clients."""


class Mean(Aggregator):
    """What the rules do to messages, without any robustness."""

    def combine(self, vectors):
        return vectors.each(lambda values: values.mean(0))


class Liar(FederationCallback):
    """One client that sends something else than it has trained."""

    def __init__(self, client, change):
        self.client, self.change = client, change

    def on_run_start(self, loop):
        post = loop.exchange.post

        def lie(client, message):
            post(client, self.change(message) if client == self.client else message)

        loop.exchange.post = lie


def turned(message):
    """Everything with the other sign, ten times as large."""
    weights = {name: -10 * value if value.is_floating_point() else value for name, value in message.weights.items()}
    artifacts = {
        name: -10 * value if isinstance(value, torch.Tensor) else value.map(lambda mean: -10 * mean, "mean")
        for name, value in message.artifacts.items()
    }
    return Message(weights, artifacts, message.num_samples)


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_no_rule_leaves_the_exchange_as_it_was(run_federation, mlp):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1)
    assert loop.exchange.door is None
    assert "aggregator" not in loop.exchange.state_dict()


@pytest.mark.parametrize("method", [FedRep, SCAFFOLD, FedProto, FedCPD])
def test_plain_mean_as_a_rule_is_the_mean_of_all_alike(run_federation, conv_net, method):
    """SCAFFOLD's control is a sum over participants, FedProto sends no weights, FedCPD soft labels beside weights."""
    loop = run_federation(lambda: method(conv_net()), rounds=1, aggregator=Mean())
    alike = Server(Message(), loop.exchange.server.rules, weighting="uniform")
    sent = [loop.diary.sent[1, client] for client in range(4)]
    for message in sent:
        message.num_samples = 1
        message.artifacts = {
            name: value if isinstance(value, torch.Tensor) else value.without_counts()
            for name, value in message.artifacts.items()
        }
    wanted, found = alike.aggregate(dict(enumerate(sent))), loop.exchange.global_message()
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], tensor)
    assert found.artifacts.keys() == wanted.artifacts.keys()
    for name, value in wanted.artifacts.items():
        other = found.artifacts[name]
        tensors = (
            {"": (value, other)}
            if isinstance(value, torch.Tensor)
            else {field: (tensor, other.tensors()[field]) for field, tensor in value.tensors().items()}
        )
        for one, two in tensors.values():
            torch.testing.assert_close(two, one)


@pytest.mark.parametrize("rule", FOUR)
@pytest.mark.parametrize("method", [FedAvg, FedProto])
def test_rule_keeps_a_liar_from_the_others(run_federation, mlp, make_data, rule, method):
    """With the mean, one of four that sends −10 x moves what all hear further than without it by far."""
    counts = ((9, 9, 9, 9),) * 7
    make = {"krum": lambda: Krum(1), "bulyan": lambda: Bulyan(1)}.get(rule, FOUR[rule])

    def heard(aggregator, *callbacks):
        data = make_data(counts)
        loop = run_federation(
            lambda: method(mlp()), rounds=1, data=data, aggregator=aggregator, callbacks=list(callbacks)
        )
        message = loop.exchange.global_message()
        tensors = list(message.weights.values()) or [message.artifacts["prototypes"].mean]
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    honest = heard(None)
    fooled, guarded = heard(None, Liar(2, turned)), heard(make(), Liar(2, turned))
    assert (guarded - honest).norm() < 0.5 * (fooled - honest).norm()


def test_median_of_a_round_is_the_median_of_what_was_sent(run_federation, conv_net):
    loop = run_federation(lambda: FedAvg(conv_net()), rounds=1, aggregator=CoordinateMedian())
    sent = [loop.diary.sent[1, client].weights for client in range(4)]
    for name, tensor in loop.exchange.global_message().weights.items():
        values = torch.stack([own[name] for own in sent])
        wanted = values.double().sort(0).values[1:3].mean(0) if tensor.is_floating_point() else values.amax(0)
        assert torch.equal(tensor, wanted.to(tensor.dtype))


# --- what it goes together with ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["krum", "centred"])
def test_run_resumes_bit_for_bit(assert_resumes, conv_net, sgd, rule):
    loop = assert_resumes(lambda: FedCPD(conv_net()), aggregator=FOUR[rule](), optimizer=sgd(0.01))
    assert bool(loop.exchange.state_dict()["aggregator"]) == (rule == "centred")


def test_order_of_fits_changes_no_bit(set_up_federation, outcome, assert_identical, conv_net):
    runs = []
    for order in (list, lambda clients: clients[::-1]):
        loop = set_up_federation(lambda: FedCPD(conv_net()), 2, aggregator=Krum(0))
        loop.fit_order = order
        loop.run()
        runs.append(outcome(loop))
    assert_identical(*runs)


@pytest.mark.skipif(sys.platform != "linux", reason="functions are handed to forked processes")
def test_result_does_not_depend_on_the_number_of_workers(run_federation, assert_identical, tmp_path):
    methods = {"krum": FedProto, "geometric": FedAvg, "centred": FedAvg}

    def run(file):
        for rule, method in methods.items():
            make = lambda method=method: method(TinyConvNet((1, 8, 8), 4))  # noqa: E731
            loop = run_federation(make, rounds=2, aggregator=FOUR[rule]())
            if loop.workers.is_main:
                torch.save(loop.state_dict()["exchange"], f"{file}{rule}")
        return 0

    run(tmp_path / "one")
    assert launch(run, Team(2, threads=1), tmp_path / "two") == 0
    for rule in methods:
        assert_identical(*(torch.load(tmp_path / f"{size}{rule}") for size in ("one", "two")))


def test_server_optimizer_follows_the_rule(run_federation, outcome, assert_identical, conv_net):
    plain = outcome(run_federation(lambda: FedAvg(conv_net()), aggregator=CoordinateMedian()))
    unit = ServerMomentum(momentum=0.0)
    same = outcome(run_federation(lambda: FedAvg(conv_net()), aggregator=CoordinateMedian(), server_optimizer=unit))
    assert same["exchange"]["server"].pop("server_optimizer")
    assert_identical(same, plain)


@pytest.mark.parametrize("rule", ["krum", "centred"])
def test_rule_runs_with_filters_optimizer_and_participation(run_federation, conv_net, make_data, rule):
    loop = run_federation(
        lambda: FedAvg(conv_net()),
        data=make_data(((6, 6, 6, 6),) * 6),
        participation=0.7,
        aggregator=FOUR[rule](),
        server_optimizer=ServerAdam(0.01),
        wire=[TopK(0.3), Quantize(8)],
    )
    assert all(tensor.isfinite().all() for tensor in loop.exchange.global_message().weights.values())


@pytest.mark.parametrize("rule", [NormClipping, CentredClipping])
def test_updates_are_from_what_clients_received(run_federation, mlp, rule):
    """Rounding on the way down was in all clients' updates, and used up what a rule lets through.

    Clients that learn nothing send what they received, and that is what the rule makes of it.
    """
    wire, still = [Quantize(8, ways="down")], partial(torch.optim.SGD, lr=0.0)
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1, aggregator=rule(clip=1e-5), wire=wire, optimizer=still)
    sent, server = loop.diary.sent[1, 0].weights, loop.exchange.global_message().weights
    for name, tensor in sent.items():
        torch.testing.assert_close(server[name], tensor, rtol=0, atol=1e-6)
    before = loop.diary.received[1, 0].weights  # of the server, as nothing is lost yet
    assert not torch.allclose(before["model.head.weight"], sent["model.head.weight"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", [NormClipping, CentredClipping])
def test_updates_that_are_sent_as_such_are_clipped_around_nothing_from_the_first_round_on(set_up_federation, mlp, rule):
    """The server sends no control before round 1 is over: it was clipped around the clients' median, however long."""
    bound = 0.01
    loop = set_up_federation(lambda: SCAFFOLD(mlp()), rounds=2, aggregator=rule(clip_artifacts=bound))
    before = 0.0
    for round in (1, 2):
        loop.advance()
        sent = [loop.diary.sent[round, client].artifacts["control"].double() for client in range(4)]
        assert all(own.norm() > bound for own in sent)
        moved = sum(own * bound / own.norm() for own in sent) / 4
        control = loop.exchange.global_message().artifacts["control"].double()
        torch.testing.assert_close(control - before, moved, rtol=0, atol=1e-7)
        before = control


def test_noise_of_clients_may_be_treated(run_federation, mlp):
    pytest.importorskip("opacus")
    loop = run_federation(lambda: FedAvg(mlp()), aggregator=CoordinateMedian(), wire=[ClipAndNoise(1.0, 0.1, "client")])
    assert all(tensor.isfinite().all() for tensor in loop.exchange.global_message().weights.values())


def test_round_that_is_too_small_keeps_what_is_shared(run_federation, assert_identical, mlp, capfd):
    """Rounds 2 and 3 have two of four left, and Krum needs three."""
    failures = Failures(schedule={"2-3": [0, 3]})
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4, aggregator=Krum(0), failures=failures)
    received = [loop.diary.received[round, 1].weights for round in (2, 3, 4)]
    assert_identical(received[0], received[1])
    assert_identical(received[0], received[2])
    assert not torch.equal(
        loop.exchange.global_message().weights["model.head.weight"], received[2]["model.head.weight"]
    )
    said = [line for line in capfd.readouterr().err.splitlines() if "Krum" in line]
    assert said == [
        "fl-lightning: round 2: Krum needs 3 participants, and 2 sent something; what is shared stays as it was, in "
        "later rounds like it, too"
    ]


class Failing(FederationCallback):
    """Client 1's message of round 2 holds a number that is none."""

    def on_run_start(self, loop):
        up = loop.wire.up

        def broken(message, *arguments, **options):
            sent = up(message, *arguments, **options)
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 7:
                next(iter(sent.weights.values())).fill_(float("nan"))
            return sent

        loop.wire.up = broken


def test_sick_client_is_left_out(run_federation, mlp, make_data):
    counts = ((6, 6, 6, 6),) * 5
    loop = run_federation(
        lambda: FedAvg(mlp()), data=make_data(counts), aggregator=Krum(1), on_client_error="skip", callbacks=[Failing()]
    )
    assert [row["skipped"] for row in loop.diary.rows] == [0, 1, 0]
    assert all(tensor.isfinite().all() for tensor in loop.exchange.global_message().weights.values())


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(set_up_federation, method, **options):
    with pytest.raises(ConfigError) as refused:
        set_up_federation(method, **options)
    assert len(str(refused.value)) <= 300
    return str(refused.value)


def test_server_that_makes_something_else_of_messages_is_refused(set_up_federation, conv_net):
    assert refusal(set_up_federation, lambda: FedNova(conv_net()), aggregator=Krum(0)) == (
        "federation.aggregator: needs a server for which one mean can stand for all messages, which FedNova's is not: "
        "must be null, got 'Krum'"
    )


def test_sums_from_which_clients_take_their_own_are_refused(set_up_federation, conv_net):
    assert "FedDistill's artifact" in refusal(set_up_federation, lambda: FedDistill(conv_net()), aggregator=Krum(0))


def test_exchange_without_a_server_is_refused(set_up_federation, conv_net):
    assert refusal(set_up_federation, lambda: FedAvg(conv_net()), exchange=Ring(), aggregator=Bulyan(0)) == (
        "federation.aggregator: needs a server, which a federation on a Ring has not: must be null, got 'Bulyan'"
    )


def test_method_that_sends_nothing_is_refused(set_up_federation, conv_net):
    assert "Local sends none" in refusal(set_up_federation, lambda: Local(conv_net()), aggregator=Krum(0))


def test_too_few_participants_are_refused(set_up_federation, conv_net):
    make = lambda: FedAvg(conv_net())  # noqa: E731
    assert refusal(set_up_federation, make, aggregator=Krum(1)) == (
        "federation.aggregator: needs at least 5 participants a round, and there are 4, got 'Krum'"
    )
    for rule in (Krum(0), CoordinateMedian(), TrimmedMean(0.2)):
        assert "at least 3" in refusal(set_up_federation, make, aggregator=rule, participation=0.5)


def test_noise_at_the_server_is_refused(set_up_federation, mlp):
    pytest.importorskip("opacus")
    said = refusal(
        set_up_federation,
        lambda: FedAvg(mlp()),
        aggregator=CoordinateMedian(),
        wire=[ClipAndNoise(1.0, 1.0, "server")],
    )
    assert said.startswith("federation.aggregator: ClipAndNoise at the server")
