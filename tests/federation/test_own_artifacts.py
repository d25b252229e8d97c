"""Artifacts of a kind of one's own, and what servers are told: nothing but the class itself has to be written."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.checkup import Unsound
from fl_lightning.core.message import KINDS, ClassMeans, Message, Structured, artifact
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.graphs import RandomPeers
from fl_lightning.federation.launch import launch
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.sickness import ClientError, ServerError
from fl_lightning.federation.team import Team
from fl_lightning.federation.wire import MessageFilter, Wire, WireFilter
from fl_lightning.methods.fedavg import FedAvg


@artifact
@dataclass(frozen=True)
class Extremes(Structured):
    """The least and the largest value of each of a client's logits, how often it was merged, and by whom."""

    low: Tensor
    high: Tensor
    merges: int = 0
    by: str = "client"

    @classmethod
    def merge(cls, values, previous):
        low = torch.stack([value.low for value, _ in values]).amin(0)
        high = torch.stack([value.high for value, _ in values]).amax(0)
        before = 0 if previous is None else previous.merges
        return cls(low, high, before + sum(samples for _, samples in values), "server")


@artifact
@dataclass(frozen=True)
class Roll(Structured):
    """Who sent something, in the order in which it was merged."""

    clients: Tensor

    @classmethod
    def merge(cls, values, previous):
        return cls(torch.cat([value.clients for value, _ in values]))


class KeepsBetween(Term):
    """Sends the range of the client's logits and pulls logits into the range that it hears."""

    def setup(self, host):
        classes = host.model.num_classes
        self.register_buffer("low", torch.full((classes,), -torch.inf), persistent=False)
        self.register_buffer("high", torch.full((classes,), torch.inf), persistent=False)

    def receive(self, host, message):
        heard = message.artifacts.get("extremes")
        if heard is not None:
            assert isinstance(heard, Extremes)
            self.low.copy_(heard.low / 2)
            self.high.copy_(heard.high / 2)

    def forward(self, host, out):
        return ((out.logits - self.high).relu() + (self.low - out.logits).relu()).mean()

    def send(self, host, data):
        logits = data.collected().logits
        return {"extremes": Extremes(logits.amin(0), logits.amax(0))}

    def interface(self, host):
        return {"extremes": (host.model.num_classes,)}


class SendsByItself(FedAvg):
    """The same by the method, without a term."""

    def receive(self, message, data):
        super().receive(message, data)
        self.heard = message.artifacts.get("extremes")

    def local_step(self, step):
        out = step.forward()
        values = step.values(out)
        if self.heard is not None:
            values["between"] = (out.logits - self.heard.high / 2).relu().mean()
        step.descend(values)

    def losses(self):
        return {"between": 1.0}

    def send(self, data):
        message = super().send(data)
        logits = data.collected().logits
        return Message(message.weights, {"extremes": Extremes(logits.amin(0), logits.amax(0))}, message.num_samples)


MAKERS = {
    "term": lambda model: FedAvg(model, extra_terms=[KeepsBetween()]),
    "method": SendsByItself,
}


@pytest.mark.parametrize("sender", MAKERS)
def test_server_merges_it_as_the_kind_says(sender, mlp, run_federation):
    loop = run_federation(lambda: MAKERS[sender](mlp()), rounds=2)
    for round in (1, 2):
        sent = [loop.diary.sent[round, client].artifacts["extremes"] for client in range(4)]
        heard = loop.exchange if round == 2 else loop.diary
        message = heard.global_message() if round == 2 else heard.received[2, 0]
        merged = message.artifacts["extremes"]
        assert torch.equal(merged.low, torch.stack([own.low for own in sent]).amin(0))
        assert torch.equal(merged.high, torch.stack([own.high for own in sent]).amax(0))
        assert (merged.merges, merged.by) == (round * int(loop.num_train.sum()), "server")
        assert {(own.merges, own.by) for own in sent} == {(0, "client")}
    assert any("between" in name for name in loop.diary.rows[-1])


@pytest.mark.parametrize("sender", MAKERS)
def test_its_values_are_counted(sender, mlp, run_federation):
    plain, loop = (run_federation(lambda make=make: make(mlp()), rounds=1) for make in (FedAvg, MAKERS[sender]))
    for name, size in (("uplink_params", 8), ("uplink_bytes", 32)):
        assert loop.diary.rows[0][name] == plain.diary.rows[0][name] + 4 * size


@pytest.mark.parametrize("sender", MAKERS)
@pytest.mark.parametrize("options", [{}, {"participation": 0.5, "exchange": RandomPeers(2)}])
def test_run_resumes_exactly(sender, options, mlp, assert_resumes):
    loop = assert_resumes(lambda: MAKERS[sender](mlp()), rounds=3, **options)
    heard = loop.exchange.inbox(0).artifacts["extremes"]
    assert isinstance(heard, Extremes)
    assert heard.by == "server"


def test_resuming_without_the_class_says_what_is_missing(mlp, set_up_federation, tmp_path, monkeypatch):
    loop = set_up_federation(lambda: MAKERS["term"](mlp()), rounds=2, folder=tmp_path)
    loop.advance()
    state = loop.checkpoints.load(loop.checkpoints.find("auto"))
    monkeypatch.delitem(KINDS, f"{__name__}.Extremes")
    with pytest.raises(ValueError, match=r"'extremes' is of a kind that is not registered.*\.Extremes'"):
        loop.load_state_dict(state)


def test_values_are_merged_in_the_order_of_clients(mlp, set_up_federation):
    """Whoever is ready first."""

    class SendsItsNumber(FedAvg):
        def send(self, data):
            message = super().send(data)
            return Message(message.weights, {"roll": Roll(torch.tensor([data.client]))}, message.num_samples)

    loop = set_up_federation(lambda: SendsItsNumber(mlp()), rounds=1)
    loop.fit_order = lambda clients: clients[::-1]
    loop.run()
    assert loop.exchange.global_message().artifacts["roll"].clients.tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="the functions below are handed to forked processes")
@pytest.mark.parametrize("sender", MAKERS)
def test_two_workers_make_the_run_of_one(sender, mlp, set_up_federation, outcome, tmp_path, assert_identical):
    options = {"rounds": 3, "participation": 0.75}

    def run(folder):
        loop = set_up_federation(lambda: MAKERS[sender](mlp()), folder=folder, **options)
        final = loop.run()
        if loop.workers.is_main:
            left = {"rows": outcome(loop)["rows"], "exchange": loop.exchange.state_dict(), "final": final}
            torch.save(left, folder / "left.pt")
        return 0

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "one") == launch(run, Team(2, threads=1), tmp_path / "two") == 0
    one, two = (torch.load(tmp_path / name / "left.pt", weights_only=False) for name in ("one", "two"))
    assert "extremes" in one["exchange"]["message"]["artifacts"]
    assert_identical(two, one)


# --- what a server is told --------------------------------------------------------------------------------------------


class Told(Server):
    """Writes down the facts at every call."""

    only_averages = True
    sees_messages = True

    def __init__(self, initial, made_with, notes):
        self.notes = notes
        super().__init__(initial)
        self.note("made", made_with)

    def note(self, call, facts):
        self.notes.append((call, facts.round, facts.participants, facts.num_clients, facts.rounds, facts.newcomers))
        assert (facts.seed, facts.client) == (7, -1)

    def setup(self, facts):
        super().setup(facts)
        self.note("setup", self.facts)

    def open_round(self):
        super().open_round()
        if self.facts.round:
            self.note("open", self.facts)

    def see(self, client, message):
        assert client in self.facts.participants
        self.note("see", self.facts)
        return message

    def close_round(self):
        self.note("close", self.facts)
        super().close_round()


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"newcomers": 1}])
def test_servers_are_told_of_the_federation_and_the_round(options, mlp, run_federation):
    class Method(FedAvg):
        def make_server(self, initial, facts):
            return Told(initial, facts, notes)

    notes, late = [], options.pop("newcomers", 0)
    newcomers = Newcomers(late, after=1) if late else Newcomers()
    loop = run_federation(lambda: Method(mlp()), rounds=2, seed=7, newcomers=newcomers, **options)
    known = (4, 2, late)
    expected = [("made", 0, (), *known), ("setup", 0, (), *known)]
    for round in (1, 2):
        there = tuple(loop.calendar.participants(round))
        calls = ["open", *(["see"] * len(there)), "close", "open"]  # a round that is closed is opened anew
        expected += [(call, round, there, *known) for call in calls]
    assert notes == expected


@pytest.mark.skipif(sys.platform != "linux", reason="the functions below are handed to forked processes")
def test_servers_on_two_workers_are_told_the_same(mlp, set_up_federation, tmp_path):
    def run(folder):
        class Method(FedAvg):
            def make_server(self, initial, facts):
                return Told(initial, facts, notes)

        notes = []
        loop = set_up_federation(lambda: Method(mlp()), rounds=2, seed=7, participation=0.5)
        loop.run()
        if loop.workers.is_main:
            torch.save(notes, folder / "notes.pt")
        return 0

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "one") == launch(run, Team(2, threads=1), tmp_path / "two") == 0
    one, two = (torch.load(tmp_path / name / "notes.pt") for name in ("one", "two"))
    assert one == two
    assert len(one) == 2 + 2 * 5


def test_clients_are_told_of_the_round_and_of_themselves(mlp, run_federation):
    class Listening(FedAvg):
        def receive(self, message, data):
            assert self.facts.client == data.client
            super().receive(message, data)

        def send(self, data):
            told.append(self.facts)
            return super().send(data)

    told = []
    loop = run_federation(lambda: Listening(mlp()), rounds=3, participation=0.5, seed=7)
    assert [(facts.round, facts.client) for facts in told] == list(loop.diary.sent)
    for facts in told:
        assert facts.participants == tuple(loop.calendar.participants(facts.round))
        assert (facts.num_clients, facts.rounds, facts.seed, facts.newcomers) == (4, 3, 7, 0)


class SendsLess(KeepsBetween):
    """Has what it hears from the same `send`: the two may share it."""


class SendsOtherwise(Term):
    """Sends something else by the name that `KeepsBetween` uses."""

    def forward(self, host, out):
        return out.logits.square().mean()

    def send(self, host, data):
        return {"extremes": torch.zeros(3)}


def test_terms_of_one_send_share_an_artifact(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp(), extra_terms=[KeepsBetween(), SendsLess()]), rounds=1)
    assert set(loop.exchange.global_message().artifacts) == {"extremes"}


def test_terms_that_would_take_each_others_artifact_are_named(mlp, set_up_federation):
    rule = "TypeError: KeepsBetween and SendsOtherwise both send an artifact extremes, and one would"
    with pytest.raises(ClientError, match=rf"^round 1, client 0, send: {rule}"):
        set_up_federation(lambda: FedAvg(mlp(), extra_terms=[KeepsBetween(), SendsOtherwise()]), rounds=1).run()


@artifact
@dataclass(frozen=True)
class Pair(Structured):
    """Keeps its tensors where nobody looks."""

    parts: object


@pytest.mark.parametrize("parts", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2)}, [1]])
def test_a_kind_that_hides_its_tensors_is_refused(parts, mlp, set_up_federation):
    """They were neither copied, so that all were the last client's, nor counted, nor looked at."""

    class Sends(FedAvg):
        def send(self, data):
            message = super().send(data)
            message.artifacts["pair"] = Pair(parts)
            return message

    said = rf"artifact pair\.parts is {type(parts).__name__}: its fields are tensors, numbers, texts and truths"
    with pytest.raises(ClientError, match=said):
        set_up_federation(lambda: Sends(mlp()), rounds=1).run()


class Chooses(Aggregator):
    """Says who counts, and makes something of their vectors."""

    def __init__(self, chosen=None, made=None):
        super().__init__()
        self.chosen, self.made = chosen, made

    def selected(self, messages):
        return super().selected(messages) if self.chosen is None else self.chosen

    def combine(self, vectors):
        mean = vectors.points.mean(0)
        return mean if self.made is None else self.made(mean)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"chosen": []}, r"Chooses\.selected\(\) must give the positions, from 0 to 3, of clients .*; got \[\]"),
        ({"chosen": [True] * 4}, r"Chooses\.selected\(\) must give the positions"),
        ({"chosen": [0, 0]}, r"Chooses\.selected\(\) must give the positions"),
        ({"chosen": [-1]}, r"Chooses\.selected\(\) must give the positions"),
        (
            {"made": lambda mean: mean.long()},
            r"Chooses\.combine\(\) must give a floating-point tensor \[\d+\], gives to",
        ),
        ({"made": lambda mean: mean[None]}, r"Chooses\.combine\(\) must give a floating-point tensor"),
        ({"made": float}, r"Chooses\.combine\(\) must give"),
        ({"made": lambda mean: None}, r"Chooses\.combine\(\) must give a .*, gives NoneType"),
    ],
)
def test_a_rule_of_ones_own_that_gives_no_vector_is_named(rule, said, run_federation, mlp):
    """Truths were places, nobody was everybody, and whole numbers were all 0, in silence."""
    made = rule.get("made")
    rule = {**rule, "made": (lambda mean: made(mean.sum())) if made is float else made}
    with pytest.raises(ConfigError, match=rf"^federation\.aggregator: FedAvg: {said}"):
        run_federation(lambda: FedAvg(mlp()), rounds=1, aggregator=Chooses(**rule))


def test_a_rule_of_ones_own_is_taken(run_federation, mlp):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1, aggregator=Chooses([3, 1]))
    sent, heard = loop.diary.sent, loop.exchange.inbox(0).weights
    for name, tensor in heard.items():
        torch.testing.assert_close(tensor, (sent[1, 3].weights[name] + sent[1, 1].weights[name]) / 2)


class Gives(WireFilter):
    def __init__(self, gives):
        self.gives = gives

    def apply(self, packet, memory):
        return self.gives(packet)


class GivesWhole(MessageFilter):
    def change(self, message, received):
        received.weights.clear()
        return


@pytest.mark.parametrize("value", [torch.ones(3), ClassMeans(torch.ones(2, 3), torch.tensor([1, 2]))])
def test_a_filter_of_ones_own_that_leaves_an_artifact_out_is_named(value):
    """A tensor crossed as it was, and counted as no byte; of class means there was a KeyError."""
    wire = Wire([Gives(lambda packet: replace(packet, artifacts={}))], Star())
    with pytest.raises(ValueError, match=r"^a filter leaves artifact own out of its packet: hand it on"):
        wire.up(Message({"w": torch.ones(2)}, {"own": value}), Message(), {})


class Writes(WireFilter):
    """Changes in place what it is given."""

    def __init__(self, ways, change):
        self.ways = ways
        self.change = change

    def apply(self, packet, memory):
        self.change(packet.weights["w"])
        return packet


class WritesWhole(MessageFilter):
    def change(self, message, received):
        received.weights["w"].mul_(0)
        return message


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Writes("down", lambda packed: packed.values.mul_(0)), r"Writes\.apply\(\) changes the weight w"),
        (Writes("up", lambda packed: packed.known.mul_(0)), r"Writes\.apply\(\) changes the weight w"),
        (Writes("down", lambda packed: packed.values.data.mul_(0)), r"Writes\.apply\(\) changes the weight w"),
        (WritesWhole(), r"WritesWhole\.change\(\) changes the weight w"),
    ],
)
def test_a_filter_of_ones_own_that_writes_to_what_others_hear_is_named(own, said):
    """The server's own weights were changed with what one client was sent, in silence."""
    wire, shared = Wire([own], Star()), Message({"w": torch.ones(2)})
    with pytest.raises(Unsound, match=f"^{said} that it received in place, and others hear it, too: clone it first"):
        wire.down(shared) if own.ways == "down" else wire.up(Message({"w": torch.zeros(2)}), shared, {})


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Gives(lambda packet: None), r"Gives\.apply\(\) gives NoneType, and must give a Packet"),
        (
            Gives(lambda packet: replace(packet, weights={})),
            r"a filter leaves weight \S+ out of its packet: send none of",
        ),
        (GivesWhole(), r"GivesWhole\.change\(\) gives NoneType, and must give a Message"),
    ],
)
def test_a_filter_of_ones_own_that_gives_no_packet_is_named(own, said, run_federation, mlp):
    """A weight that it left out crossed as it was, and counted as no byte."""
    with pytest.raises((ClientError, ServerError), match=said):  # whoever comes first on its way
        run_federation(lambda: FedAvg(mlp()), rounds=1, wire=[own])


def test_a_filter_of_ones_own_that_goes_no_known_way_is_refused(set_up_federation, mlp):
    """It passed both."""
    own = Gives(lambda packet: packet)
    own.ways = "upwards"
    with pytest.raises(ConfigError, match=r"^federation\.wire\.0\.ways: must be one of up, down, both, got 'upwards'$"):
        set_up_federation(lambda: FedAvg(mlp()), wire=[own])


class SendsTurned(FedAvg):
    """Sends a matrix whose columns are its rows."""

    def send(self, data):
        message = super().send(data)
        message.artifacts["turned"] = torch.arange(6.0).view(2, 3).t()
        return message


def test_artifacts_lie_as_they_arrive_from_another_worker(run_federation, mlp):
    """A sum over another order rounds otherwise: two workers had other last bits than one."""
    loop = run_federation(lambda: SendsTurned(mlp()), rounds=1)
    for message in loop.diary.sent.values():
        assert message.artifacts["turned"].is_contiguous()
        assert message.artifacts["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
