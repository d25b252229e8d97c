"""The tests and invariants that the specification of FedDW promises (FedDW.md, section 8)."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sections import sectioned

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.term import counts
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.losses.class_relation import ClassRelation, Relation, SoftLabels
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import FedDWCNN

PUBLIC_CODE = {
    "decay_rounds": [2, 3],
    "soft_labels": SoftLabels("identity", momentum=0.5, history="all", missing="one_hot"),
    "relation": Relation(bias="keep"),
}
RUNNING = {"soft_labels": SoftLabels(source="running")}
CONTROL = {"relation": Relation(bias="always")}


def without_bias(model):
    model.head.bias = None
    return model


def soft_labels_of(loop):
    return loop.exchange.global_message().artifacts["soft_labels"]


def mean_predictions(model, loop, indices):
    x, y = loop.data.store.gather(indices)
    with torch.no_grad():
        return ClassMeans.from_samples(model(x).softmax(1), y, 4)


def with_soft_labels(client, classes=4):
    rows = torch.rand(classes, classes, generator=torch.Generator().manual_seed(0)).softmax(1)
    message = Message({}, {"soft_labels": ClassMeans(rows, torch.ones(classes).long())})
    client.method.terms[1].receive(client.method, message)
    return client


# --- what travels ----------------------------------------------


@pytest.mark.parametrize(("shape", "size"), [((1, 28, 28), 121_632), ((3, 32, 32), 139_704)])
@pytest.mark.parametrize(("classes", "extra"), [(range(10), 110), ([1, 4, 9], 33)])
def test_feddw_sends_its_weights_and_the_soft_labels_of_held_classes(make_client, shape, size, classes, extra):
    y = torch.tensor(list(classes)).repeat(2)
    x = torch.rand(len(y), *shape, generator=torch.Generator().manual_seed(0))
    store = TensorStore(Arrays(x, y, len(y), tuple(map(str, range(10)))))
    nothing = np.empty(0, dtype=np.int64)
    message = make_client(FedDW(FedDWCNN(shape, 10))).send(
        ClientData(0, store, 10, np.arange(len(y)), nothing, nothing)
    )
    assert message.num_params == size + extra
    assert set(message.artifacts) == {"soft_labels"}
    assert "model.head.weight" in message.weights
    assert "model.head.bias" not in message.weights
    sent = message.artifacts["soft_labels"]
    assert sent.valid.nonzero().flatten().tolist() == list(classes)
    torch.testing.assert_close(sent.mean[sent.valid].sum(1), torch.ones(len(classes)))


def test_feddw_traffic_is_that_of_fedavg_and_the_soft_labels(mlp, run_federation):
    """C = 4; counts go up only, and nothing comes down before the first aggregation."""
    plain = run_federation(lambda: FedAvg(without_bias(mlp())), rounds=2).diary.rows
    rows = run_federation(lambda: FedDW(mlp()), rounds=2)
    held = sum(int(client.held_classes.sum()) for client in rows.data.clients)
    for before, row, down in zip(plain, rows.diary.rows, (0, 4 * 4 * 4), strict=True):
        assert row["uplink_params"] - before["uplink_params"] == held * (4 + 1)
        assert row["downlink_params"] - before["downlink_params"] == down


def test_feddw_declares_its_soft_labels_and_has_a_global_model(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedDW(mlp()))
    method = loop.runner.modules[0].method
    assert method.interface()["soft_labels"] == (4, 4)
    assert method.terms[1].reaches == ("model.head",)
    assert loop.examiner.has_global_model
    assert loop.examiner.may_predict_as_global(0)


# --- soft labels ----------------------------------------------


def test_feddw_soft_labels_of_equal_models_are_those_of_the_pooled_data(mlp, sgd, run_federation):
    loop = run_federation(lambda: FedDW(mlp()), rounds=1, optimizer=sgd(0.0))
    pooled = mean_predictions(loop.runner.load(0).method.model, loop, torch.cat([c.train for c in loop.data.clients]))
    torch.testing.assert_close(soft_labels_of(loop).mean, pooled.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(soft_labels_of(loop).mean.sum(1), torch.ones(4))


def test_feddw_collects_after_the_fit_in_eval_mode(conv_net, run_federation):
    loop = run_federation(lambda: FedDW(conv_net()), rounds=2)
    module = loop.runner.modules[0]
    for client in loop.data.clients:
        module.load(loop.diary.sent[2, client.client].weights)
        expected = mean_predictions(module.method.model.eval(), loop, client.train)
        sent = loop.diary.sent[2, client.client].artifacts["soft_labels"]
        torch.testing.assert_close(sent.mean, expected.mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(sent.count, client.class_counts)


def test_feddw_collects_over_the_last_epoch_of_the_moving_model(mlp, sgd, set_up_federation, train_by_hand):
    loop = set_up_federation(lambda: FedDW(mlp(), **RUNNING), rounds=1, local_epochs=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    client, seen = loop.data.clients[0], []

    def loss(x, y):
        logits = model(x)
        seen.append((logits.detach().softmax(1), y))
        return F.cross_entropy(logits, y)

    train_by_hand(model, client, sgd(), 1, epochs=2, loss=loss)
    last = seen[len(seen) // 2 :]
    expected = ClassMeans.from_samples(torch.cat([p for p, _ in last]), torch.cat([y for _, y in last]), 4)
    sent = loop.diary.sent[1, 0].artifacts["soft_labels"]
    assert torch.equal(sent.count, expected.count)
    torch.testing.assert_close(sent.mean, expected.mean, rtol=1e-6, atol=1e-7)
    after = mean_predictions(model.eval(), loop, client.train)
    assert not torch.allclose(sent.mean, after.mean, atol=1e-4)


def test_feddw_averages_over_participants_only(mlp, run_federation):
    loop = run_federation(lambda: FedDW(mlp()), rounds=4, participation=0.5)
    last = [m.artifacts["soft_labels"] for (round, _), m in loop.diary.sent.items() if round == 4]
    assert len(last) == 2
    count = sum(means.count for means in last)
    sums = sum(means.mean.double() * means.count[:, None] for means in last)
    held = count > 0
    torch.testing.assert_close(soft_labels_of(loop).mean[held], (sums[held] / count[held, None]).float())
    valid = soft_labels_of(loop).valid
    torch.testing.assert_close(soft_labels_of(loop).mean[valid].sum(1), torch.ones(int(valid.sum())))


@pytest.mark.parametrize(("missing", "valid"), [("keep", False), ("drop", False), ("one_hot", True)])
def test_feddw_class_that_nobody_holds(mlp, make_data, run_federation, missing, valid):
    data = make_data(counts=((9, 8, 0), (8, 9, 0)))
    loop = run_federation(lambda: FedDW(mlp(num_classes=3), soft_labels=SoftLabels(missing=missing)), data=data)
    assert soft_labels_of(loop).valid.tolist() == [True, True, valid]
    assert soft_labels_of(loop).mean[2].tolist() == [0, 0, float(valid)]
    assert loop.diary.rows[-1]["loss/class_relation"] > 0
    assert loop.exchange.global_message().weights["model.head.weight"].isfinite().all()


@pytest.mark.parametrize("options", [{}, PUBLIC_CODE, RUNNING], ids=["paper", "public", "running"])
def test_feddw_clients_of_one_class_and_of_one_sample_survive(conv_net, make_data, run_federation, options):
    data = make_data(counts=((9, 0, 0, 0), (0, 1, 0, 0), (6, 6, 6, 0)))
    loop = run_federation(lambda: FedDW(conv_net(), **options), data=data)
    assert [int(loop.diary.sent[3, c].artifacts["soft_labels"].valid.sum()) for c in range(3)] == [1, 1, 3]
    assert all(t.isfinite().all() for t in loop.exchange.global_message().weights.values())


# --- loss ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "model"), [({}, lambda model: model), (CONTROL, without_bias)], ids=["as it is", "control"]
)
def test_feddw_equals_fedavg_when_weight_is_zero(conv_net, run_federation, outcome, assert_identical, options, model):
    """The last bias goes only where the control without it is asked for."""
    plain = run_federation(lambda: FedAvg(model(conv_net())), participation=0.5)
    dw = run_federation(lambda: FedDW(conv_net(), weight=0.0, **options), participation=0.5)
    assert_identical(outcome(dw), outcome(plain))


@pytest.mark.parametrize("options", [{"weight": 5.0}, {"weight": 5.0, **PUBLIC_CODE}], ids=["paper", "public"])
def test_feddw_is_fedavg_with_the_term(mlp, run_federation, outcome, assert_identical, options):
    dw = run_federation(lambda: FedDW(mlp(), **options))
    mixed = run_federation(lambda: FedAvg(mlp(), extra_terms=[ClassRelation(**options)]))
    assert_identical(outcome(mixed), outcome(dw))


def test_feddw_first_round_has_no_regulariser_and_the_second_has(mlp, run_federation, assert_identical):
    plain = run_federation(lambda: FedAvg(without_bias(mlp())), rounds=2)
    dw = run_federation(lambda: FedDW(mlp(), weight=5.0), rounds=2)
    for client in range(4):
        assert_identical(dw.diary.sent[1, client].weights, plain.diary.sent[1, client].weights)
        assert not torch.equal(*(r.diary.sent[2, client].weights["model.head.weight"] for r in (dw, plain)))
    assert dw.diary.rows[0]["loss/class_relation"] == 0
    assert dw.diary.rows[1]["loss/class_relation"] > 0


def test_feddw_regulariser_reaches_the_classification_layer_alone_and_ignores_the_batch(conv_net, data, make_client):
    client = with_soft_labels(make_client(FedDW(conv_net())))
    method = client.method
    slopes = []
    for own in data.clients[:2]:
        client.zero_grad()
        method.terms[1](method, client.step(*next(own.batches("train"))).forward()).backward()
        reached = [name for name, p in method.named_parameters() if p.grad is not None and p.grad.any()]
        assert reached == ["model.head.weight"]
        slopes.append(method.model.head.weight.grad.clone())
    assert torch.equal(*slopes)


def test_feddw_loss_is_cross_entropy_plus_the_weighted_term(mlp, run_federation):
    rows = run_federation(lambda: FedDW(mlp(), weight=30.0, decay_rounds=[3]), rounds=3).diary.rows
    for row, weight in zip(rows, (30.0, 30.0, 3.0), strict=True):
        total = row["loss/cross_entropy"] + weight * row["loss/class_relation"]
        assert row["loss"] == pytest.approx(total, rel=1e-5)


def test_feddw_pulls_the_relation_towards_the_soft_labels(mlp, run_federation):
    loose, tight = (
        run_federation(lambda w=w: FedDW(mlp(), weight=w), rounds=4).diary.rows[-1]["loss/class_relation"]
        for w in (0.001, 30.0)
    )
    assert tight < 0.8 * loose


def test_feddw_embedding_of_zero_costs_the_log_of_the_number_of_classes(mlp, make_client):
    client = make_client(FedDW(mlp(hidden=(), shape=(2,))))
    step = client.step(torch.zeros(3, 2), torch.tensor([0, 1, 3]))
    assert step.values(step.forward())["cross_entropy"].item() == pytest.approx(np.log(4))


# --- running ----------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *(sectioned(FedDW, **own) for own in ({"momentum": 0.5}, {"history": "all"}, {"missing": "one_hot"})),
        RUNNING,
        PUBLIC_CODE,
    ],
    ids=["momentum", "history", "one_hot", "running", "public"],
)
def test_feddw_resumes_exactly(mlp, assert_resumes, options):
    assert_resumes(lambda: FedDW(mlp(), weight=5.0, **options), rounds=4, participation=0.5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_feddw_trains_in_other_precisions(conv_net, run_federation, precision):
    for options in ({}, RUNNING):
        method = lambda o=options: FedDW(conv_net(), **o)  # noqa: E731
        loop = run_federation(method, rounds=2, trainer={"precision": precision})
        kind = torch.float64 if precision == "64-true" else torch.float32
        assert soft_labels_of(loop).mean.dtype == kind
        torch.testing.assert_close(soft_labels_of(loop).mean.sum(1), torch.ones(4, dtype=kind))
        assert loop.diary.rows[-1]["loss/class_relation"] > 0
        assert all(t.isfinite().all() for t in loop.exchange.global_message().weights.values())


class TestElsewhere:
    """The term in methods that do not share the whole model."""

    def test_in_fedrep_it_counts_in_the_head_phase_only(self, mlp, run_federation):
        method = lambda w: FedRep(mlp(), extra_terms=[ClassRelation(w)])  # noqa: E731
        loop = run_federation(lambda: method(30.0), rounds=2)
        assert set(loop.diary.sent[2, 0].artifacts) == {"soft_labels"}
        assert "model.head.weight" not in loop.diary.sent[2, 0].weights
        module = loop.runner.modules[0]
        head, body = module.plan()
        term = module.method.terms[1]
        assert [counts(term, planned.phase, term.weight_at(Facts(round=2))) for planned in (head, body)] == [
            True,
            False,
        ]
        assert loop.diary.rows[1]["loss/class_relation"] > 0

    @pytest.mark.parametrize(("initial", "regularised"), [("none", False), ("identity", True)])
    def test_in_local_nothing_travels_and_only_initial_soft_labels_count(
        self, mlp, run_federation, initial, regularised
    ):
        terms = lambda: [ClassRelation(soft_labels=SoftLabels(initial))]  # noqa: E731
        loop = run_federation(lambda: Local(mlp(), extra_terms=terms()), rounds=2)
        assert [m.num_params for m in loop.diary.sent.values()] == [0] * 8
        assert (loop.diary.rows[-1]["loss/class_relation"] > 0) == regularised


def test_feddw_rejects_a_second_relation_term(mlp):
    with pytest.raises(ConfigError, match="class_relation"):
        FedDW(mlp(), extra_terms=[ClassRelation()])
