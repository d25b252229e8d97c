"""The tests that the specification of FedDistill and FedDistill+ promises (BASELINES-B.md, section 1)."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.host import Collected
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import EvaluationPolicy, Newcomers
from fl_lightning.federation.wire import Wire
from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.losses.label_distillation import LabelDistillation, label_distillation_loss
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddistill import FedDistill
from fl_lightning.methods.feddistillplus import FedDistillPlus
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import CNN
from fl_lightning.sealed import load_tensors


def client_data(shape, num_classes, classes, per_class=2):
    y = torch.tensor(list(classes)).repeat(per_class)
    x = torch.rand(len(y), *shape, generator=torch.Generator().manual_seed(0))
    store = TensorStore(Arrays(x, y, len(y), tuple(map(str, range(num_classes)))))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(0, store, num_classes, np.arange(len(y)), nothing, nothing)


def server_of(client):
    return client.make_server(Facts())


class Own:
    """A client's own data, seen by its model: given logits of given classes."""

    def __init__(self, logits, classes):
        self.seen = Collected(torch.zeros(len(logits), 2), logits, torch.tensor(classes, dtype=torch.long))

    def collected(self):
        return self.seen


class Round:
    """Clients of two classes that send given soft labels through a server, without any training."""

    def __init__(self, make_client, mlp, clients=3, **options):
        made = [make_client(FedDistill(mlp(shape=(2,), num_classes=2), **options)) for _ in range(clients)]
        self.clients = made
        self.server = server_of(made[0])
        self.facts = Facts(num_clients=clients)

    def send(self, soft_labels):
        """`soft_labels`: client -> class -> probability of class 0."""
        self.facts = replace(self.facts, round=self.facts.round + 1, participants=tuple(soft_labels))
        self.server.facts = self.facts
        self.server.open_round()
        for index, of_class in soft_labels.items():
            p = torch.tensor([[share, 1 - share] for share in of_class.values()]).reshape(-1, 2)
            method = self.clients[index].method
            method.facts = replace(self.facts, client=index)
            sent = distillation(method).send(method, Own(p.log(), list(of_class)))
            self.server.collect(index, Message({}, dict(sent), len(p)))
        self.server.close_round()

    def teacher(self, index):
        term = distillation(self.clients[index].method)
        term.receive(self.clients[index].method, self.server.message_for(index))
        return term.teacher, term.valid.tolist()


@pytest.fixture
def make_round(make_client, mlp):
    return lambda **options: Round(make_client, mlp, **options)


def distillation(method):
    """The method's term."""
    return next(term for term in method.terms if isinstance(term, LabelDistillation))


def teachers_of(loop):
    term = distillation(loop.runner.modules[0].method)
    return term.teacher, term.valid


def count_passes(client):
    """Forward passes of the body by mode, and backward passes through it."""
    counts = {"train": 0, "eval": 0, "backward": 0}

    def forward(body, args, output):
        counts["train" if body.training else "eval"] += 1

    def backward(gradient):
        counts["backward"] += 1

    def before(body, args):
        if body.training:
            args[0].requires_grad_()  # so that a backward pass reaches it
            args[0].register_hook(backward)

    stage = client.method.model.body.stages[0]
    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(forward)
    return counts


# --- what travels ----------------------------------------------


@pytest.mark.parametrize(("classes", "num_classes", "up"), [(range(10), 10, 110), ([1, 4, 9], 10, 33), ([7], 100, 101)])
def test_feddistill_sends_a_soft_label_and_a_count_for_each_class_held(mlp, make_client, classes, num_classes, up):
    client = make_client(FedDistill(mlp(num_classes=num_classes)))
    message = client.send(client_data((1, 8, 8), num_classes, classes))
    assert message.num_params == up
    assert message.weights == {}
    sent = message.artifacts["label_distillation"]
    torch.testing.assert_close(sent.mean[sent.valid].sum(1), torch.ones(len(classes)))


@pytest.mark.parametrize("num_classes", [10, 100])
def test_feddistill_receives_sums_and_rounds_of_all_classes(mlp, make_client, num_classes):
    client = make_client(FedDistill(mlp(num_classes=num_classes)))
    server = server_of(client)
    assert server.message_for(0).num_params == 0
    server.aggregate({0: client.send(client_data((1, 8, 8), num_classes, [1, 2]))})
    assert server.message_for(0).num_params == num_classes * (num_classes + 1)


def test_feddistillplus_sends_its_weights_too(make_client):
    message = make_client(FedDistillPlus(CNN((1, 28, 28), 10))).send(client_data((1, 28, 28), 10, range(10)))
    assert message.num_params == 582_136


def test_feddistill_sends_means_of_probabilities_not_of_logits(mlp, make_client):
    data = client_data((1, 8, 8), 4, [0, 2], per_class=20)
    client = make_client(FedDistill(mlp()))
    sent = client.send(data).artifacts["label_distillation"]
    x, y = next(data.batches("train"))
    with torch.no_grad():
        logits = client.method.model(x)
    expected = ClassMeans.from_samples(logits.softmax(1), y, 4)
    assert torch.equal(sent.count, expected.count)
    torch.testing.assert_close(sent.mean, expected.mean)
    assert (sent.mean[0] - logits[y == 0].mean(0).softmax(0)).abs().max() > 1e-6


def test_feddistill_running_averages_are_those_of_the_whole_fit(mlp, sgd, set_up_federation, train_by_hand):
    loop = set_up_federation(lambda: FedDistill(mlp(), averages="running"), rounds=1, local_epochs=2)
    model, seen = copy.deepcopy(loop.runner.modules[0].method.model), []
    loop.run()

    def loss(x, y):
        logits = model(x)
        seen.append((logits.detach().softmax(1), y))
        return F.cross_entropy(logits, y)

    train_by_hand(model, loop.data.clients[0], sgd(), 1, epochs=2, loss=loss)
    expected = ClassMeans.from_samples(torch.cat([p for p, _ in seen]), torch.cat([y for _, y in seen]), 4)
    sent = loop.diary.sent[1, 0].artifacts["label_distillation"]
    assert torch.equal(sent.count, 2 * loop.data.clients[0].class_counts)
    torch.testing.assert_close(sent.mean, expected.mean)


# --- the teacher ----------------------------------------------


def test_feddistill_teacher_is_the_mean_of_the_others(make_round):
    made = make_round()
    made.send({0: {0: 0.8}, 1: {0: 0.6}, 2: {1: 0.5}})
    for index, expected in enumerate([[0.6, 0.4], [0.8, 0.2], [0.7, 0.3]]):
        torch.testing.assert_close(made.teacher(index)[0][0], torch.tensor(expected))


def test_feddistill_teacher_may_include_the_own_soft_labels(make_round):
    made = make_round(include_self=True)
    made.send({0: {0: 0.8, 1: 0.5}, 1: {0: 0.6}})
    for index in range(3):
        torch.testing.assert_close(made.teacher(index)[0], torch.tensor([[0.7, 0.3], [0.5, 0.5]]))
    remembered = {"terms.1.own", "terms.1.sent_round"}
    assert not set(made.clients[0].entries) & remembered
    assert set(make_round().clients[0].entries) >= remembered


def test_feddistill_client_that_sat_out_gets_the_mean_of_all(make_round):
    made = make_round()
    made.send({0: {0: 0.8}, 1: {0: 0.6}, 2: {0: 0.1}})
    made.send({1: {0: 0.9}, 2: {0: 0.5}})
    torch.testing.assert_close(made.teacher(0)[0][0], torch.tensor([0.7, 0.3]))
    torch.testing.assert_close(made.teacher(1)[0][0], torch.tensor([0.5, 0.5]))


def test_feddistill_knows_that_older_sums_still_hold_its_own_soft_labels(make_round):
    """Class 1 was last sent in round 1, by clients 0 and 1; class 0 since then by others."""
    made = make_round()
    made.send({0: {0: 0.8, 1: 0.2}, 1: {1: 0.4}})
    made.send({2: {0: 0.5}})
    teacher, valid = made.teacher(0)
    assert valid == [True, True]
    torch.testing.assert_close(teacher, torch.tensor([[0.5, 0.5], [0.4, 0.6]]))
    torch.testing.assert_close(made.teacher(2)[0][1], torch.tensor([0.3, 0.7]))


def test_feddistill_knows_in_which_round_it_sent_each_class(make_round):
    """Its fits of rounds 2 and 3 see class 0 alone; class 1's sums of round 1 still hold what it sent then."""
    made = make_round()
    made.send({0: {0: 0.8, 1: 0.2}, 1: {1: 0.4}, 2: {1: 0.6}})
    made.send({0: {0: 0.7}, 1: {0: 0.5}})
    made.send({0: {0: 0.6}, 1: {0: 0.1}})
    teacher, valid = made.teacher(0)
    assert valid == [True, True]
    torch.testing.assert_close(teacher, torch.tensor([[0.1, 0.9], [0.5, 0.5]]))


@pytest.mark.parametrize("sits_out", [False, True])
def test_feddistill_class_of_one_client_has_no_teacher_there(make_round, sits_out):
    made = make_round()
    made.send({0: {0: 0.8, 1: 0.3}, 1: {0: 0.6}})
    if sits_out:
        made.send({1: {0: 0.6}})
    assert made.teacher(0)[1] == [True, False]
    assert made.teacher(1)[1] == [sits_out is False, True]


def test_feddistill_gradient_without_a_teacher_is_that_of_cross_entropy(make_round):
    made = make_round()
    made.send({0: {0: 0.8, 1: 0.3}, 1: {0: 0.6}})
    client = made.clients[0]
    made.teacher(0)
    out = client.step(torch.randn(5, 2), torch.ones(5, dtype=torch.long)).forward()
    value = distillation(client.method)(client.method, out)
    assert value.item() == 0
    plain = torch.autograd.grad(F.cross_entropy(out.logits, out.y), out.logits, retain_graph=True)[0]
    both = torch.autograd.grad(F.cross_entropy(out.logits, out.y) + value, out.logits)[0]
    assert torch.equal(plain, both)


def test_feddistill_equal_clients_are_taught_their_own_average(make_round):
    made = make_round()
    made.send({index: {0: 0.8, 1: 0.3} for index in range(3)})
    teacher, valid = made.teacher(1)
    own = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    torch.testing.assert_close(teacher, own)
    loss = label_distillation_loss(own.log(), torch.tensor([0, 1]), teacher, torch.tensor(valid))
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_feddistill_teacher_is_a_constant_distribution(mlp, run_federation):
    loop = run_federation(lambda: FedDistill(mlp()), rounds=2)
    for client in range(4):
        loop.runner.load(client).receive(loop.exchange.inbox(client), loop.data.clients[client])
        teacher, valid = teachers_of(loop)
        assert not teacher.requires_grad
        assert valid.any()
        torch.testing.assert_close(teacher[valid].sum(1), torch.ones(int(valid.sum())))
        assert not teacher[~valid].any()


# --- without a server ----------------------------------------------


def taught(loop, client):
    """A client's teacher after one more receive, and which classes have one."""
    loop.runner.load(client).receive(loop.exchange.inbox(client), loop.data.clients[client])
    return teachers_of(loop)


def mean_of_senders(loop, client, round):
    """By hand: the mean over the neighbours that hold a class, and where there is one."""
    senders = {hop.sender for hop in loop.diary.hops[round] if hop.receiver == client}
    sent = [loop.diary.sent[round, sender].artifacts["label_distillation"] for sender in senders]
    holders = sum(part.valid.long() for part in sent)
    return sum(part.mean for part in sent) / holders.clamp(min=1)[:, None], holders > 0


@pytest.mark.parametrize("directions", ["one", "both"])
@pytest.mark.parametrize("method", [FedDistill, FedDistillPlus])
def test_feddistill_on_a_ring_is_taught_by_its_neighbours_alone(method, directions, mlp, run_federation):
    loop = run_federation(lambda: method(mlp(), stale="drop"), rounds=2, exchange=Ring(directions=directions))
    for client in range(4):
        teacher, valid = taught(loop, client)
        expected, held = mean_of_senders(loop, client, 2)
        assert torch.equal(valid, held)
        torch.testing.assert_close(teacher[valid], expected[valid])


@pytest.mark.parametrize("stale", ["keep", "drop"])
def test_feddistill_class_that_no_neighbour_holds_has_no_teacher(stale, mlp, make_data, run_federation):
    data = make_data(counts=((8, 8, 0, 0), (8, 0, 0, 0), (8, 0, 8, 0)))
    options = {"rounds": 3, "data": data, "participation": 0.7}
    for exchange in (Ring(), Ring("sequential"), DirectedGraph(2), RandomPeers(2)):
        loop = run_federation(lambda: FedDistill(mlp(), stale=stale), exchange=exchange, **options)
        assert not taught(loop, 0)[1][1]  # class 1 is client 0's alone, class 3 nobody's
        assert not taught(loop, 2)[1][2]
        assert not any(taught(loop, client)[1][3] for client in range(3))


def test_feddistill_keeps_older_soft_labels_of_neighbours_without_its_own(mlp, make_data, set_up_federation):
    """Client 0 hears 2 in round 1 and 1, who lacks class 2, in round 2."""
    data = make_data(counts=((8, 8, 8, 0), (8, 0, 0, 8), (8, 0, 8, 0)))
    loop = set_up_federation(lambda: FedDistill(mlp()), rounds=3, data=data, exchange=Ring())
    loop.calendar.participants = lambda round: [[0, 2], [0, 1], [0]][round - 1]
    loop.run()
    first, second = (loop.diary.sent[at].artifacts["label_distillation"] for at in ((1, 2), (2, 1)))
    teacher, valid = taught(loop, 0)
    assert valid.tolist() == [True, False, True, True]
    torch.testing.assert_close(teacher[2], first.mean[2])
    torch.testing.assert_close(teacher[[0, 3]], second.mean[[0, 3]])


def test_feddistill_newcomer_on_a_ring_is_taught_by_its_predecessor(mlp, run_federation):
    joining = Newcomers(clients=1, after=1)
    for exchange in (Ring(), Ring("sequential")):
        loop = run_federation(lambda: FedDistill(mlp()), rounds=2, exchange=exchange, newcomers=joining)
        assert loop.diary.reports[2, 3].losses["label_distillation"] > 0


def test_feddistill_on_a_ring_may_include_the_own_soft_labels(mlp, run_federation):
    loop = run_federation(lambda: FedDistill(mlp(), include_self=True), rounds=1, exchange=Ring())
    own, other = (loop.diary.sent[1, client].artifacts["label_distillation"] for client in (0, 3))
    teacher, valid = taught(loop, 0)
    assert torch.equal(valid, own.valid | other.valid)
    expected = (own.mean + other.mean) / (own.valid.long() + other.valid.long()).clamp(min=1)[:, None]
    torch.testing.assert_close(teacher, expected)


def test_feddistill_that_includes_the_own_soft_labels_hands_none_on_to_the_next_client(mlp, run_federation, tmp_path):
    run_federation(lambda: FedDistill(mlp(), include_self=True), rounds=1, folder=tmp_path)
    for client in range(4):
        state = load_tensors(tmp_path / "models" / f"{client:05d}.pt", "test")
        assert not state["terms.1.own"].any()
        assert not state["terms.1.sent_round"].any()


# --- degenerate cases ----------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddistill_equals_local_and_plus_equals_fedavg_when_weight_is_zero(
    conv_net, run_federation, outcome, assert_identical, participation
):
    for method, plain in ((FedDistill, Local), (FedDistillPlus, FedAvg)):
        without = run_federation(lambda m=method: m(conv_net(), weight=0.0), participation=participation)
        other = run_federation(lambda m=plain: m(conv_net()), participation=participation)
        assert_identical(outcome(without), outcome(other))


def test_feddistillplus_is_fedavg_with_the_term(mlp, run_federation, outcome, assert_identical):
    plus = run_federation(lambda: FedDistillPlus(mlp(), weight=3.0))
    mixed = run_federation(lambda: FedAvg(mlp(), extra_terms=[LabelDistillation(3.0)]))
    assert_identical(outcome(mixed), outcome(plus))


def test_feddistill_first_round_has_no_teacher_and_the_second_has(mlp, run_federation, assert_identical):
    plain = run_federation(lambda: Local(mlp()), rounds=2)
    distilled = run_federation(lambda: FedDistill(mlp(), weight=3.0), rounds=2)
    rows = distilled.diary.rows
    assert rows[0]["Local-T"] == plain.diary.rows[0]["Local-T"]
    assert [row["loss/label_distillation"] > 0 for row in rows] == [False, True]
    total = rows[1]["loss/cross_entropy"] + 3 * rows[1]["loss/label_distillation"]
    assert rows[1]["loss"] == pytest.approx(total, rel=1e-5)


def test_feddistill_pulls_predictions_towards_the_teachers(mlp, run_federation):
    loose, tight = (
        run_federation(lambda w=w: FedDistill(mlp(), weight=w), rounds=5).diary.rows[-1]["loss/label_distillation"]
        for w in (1e-6, 10.0)
    )
    assert tight < loose


# --- running ----------------------------------------------


@pytest.mark.parametrize(("averages", "extra"), [("post", 1), ("running", 0)])
def test_feddistill_costs_one_forward_pass_over_the_data_or_none(mlp, set_up_federation, averages, extra):
    """One forward and one backward pass a step; averages after the fit add a forward pass without a graph."""
    off = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
    loop = set_up_federation(lambda: FedDistillPlus(mlp(), averages=averages), rounds=2, evaluate=off)
    counts = count_passes(loop.runner.modules[0])
    loop.advance()
    loop.advance()
    steps = sum(report.num_steps for report in loop.diary.reports.values())
    assert counts == {"train": steps, "backward": steps, "eval": 2 * 4 * extra}


def test_feddistill_mixes_architectures(mlp, run_federation):
    sizes = ((8, 5), (11, 7))
    loop = run_federation(lambda a: FedDistill(mlp(hidden=sizes[a])), architecture=[0, 1, 0, 1], rounds=2)
    assert loop.diary.rows[-1]["loss/label_distillation"] > 0


def test_feddistillplus_has_a_global_model_and_feddistill_none(mlp, run_federation):
    assert run_federation(lambda: FedDistillPlus(mlp()), rounds=1).diary.rows[0]["Server-T"] is not None
    assert run_federation(lambda: FedDistill(mlp()), rounds=1).diary.rows[0]["Server-T"] is None


def test_feddistillplus_mixes_with_the_class_relation(mlp, run_federation):
    """FedDW's Table IV, FedDistill+ +DW."""
    loop = run_federation(lambda: FedDistillPlus(mlp(), extra_terms=[ClassRelation(10.0)]), rounds=2)
    assert set(loop.diary.sent[2, 0].artifacts) == {"label_distillation", "soft_labels"}
    row = loop.diary.rows[-1]
    parts = row["loss/cross_entropy"] + row["loss/label_distillation"] + 10 * row["loss/class_relation"]
    assert row["loss"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_feddistill_trains_in_other_precisions(conv_net, run_federation, precision):
    for averages in ("post", "running"):
        method = lambda a=averages: FedDistill(conv_net(), averages=a)  # noqa: E731
        loop = run_federation(method, rounds=2, trainer={"precision": precision})
        sums = loop.exchange.global_message().artifacts["label_distillation"].sums
        assert sums.dtype == (torch.float64 if precision == "64-true" else torch.float32)
        assert sums.isfinite().all()
        assert loop.diary.rows[-1]["loss/label_distillation"] > 0


@pytest.mark.parametrize(
    ("option", "value"), [("weight", -1.0), ("temperature", 0.0), ("averages", "some"), ("stale", "some")]
)
def test_feddistill_rejects_bad_options(mlp, option, value):
    for method in (FedDistill, FedDistillPlus):
        with pytest.raises(ConfigError, match=rf"^method\.{option}: must be .*got"):
            method(mlp(), **{option: value})


@pytest.mark.parametrize("bits", [8, 16])
def test_rounds_of_soft_labels_cross_a_lossy_wire_as_they_are(bits, mlp, run_federation):
    """Or a client could not tell its own labels in the sums, which the number of a late round would drown."""
    exact = run_federation(lambda: FedDistill(mlp()), rounds=2).exchange.global_message().artifacts
    late = replace(exact["label_distillation"], rounds=torch.tensor([1000, 7, 999, 1000], dtype=torch.int32))
    wire = Wire([Quantize(bits)], Star())
    heard = wire.up(Message(artifacts={"label_distillation": late}), Message(), {}).artifacts["label_distillation"]
    assert torch.equal(heard.rounds, late.rounds)
    assert (heard.sums - late.sums).abs().max() <= late.sums.max() / (2**bits - 1)
    loop = run_federation(lambda: FedDistill(mlp()), rounds=3, wire=[Quantize(bits)])
    received = loop.diary.received[3, 0].artifacts["label_distillation"]
    assert received.rounds.tolist() == [2, 2, 2, 2]
