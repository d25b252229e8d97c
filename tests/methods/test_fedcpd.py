"""The tests that the specification of FedCPD promises (FedCPD.md, section 8)."""

from itertools import pairwise

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from sections import sectioned

from fl_lightning.building import build
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.losses.prototype import PrototypeAlignment, PrototypeContrast, Prototypes
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD, Reading
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.cnn import CNN

PUBLISHED = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}
OFF = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0}


def cnn(shape=(1, 16, 16), num_classes=4):
    return CNN(shape, num_classes, channels=(4, 6), hidden=8)


@pytest.fixture
def images(make_data):
    """The usual four clients with images large enough for the CNN."""
    return lambda **options: make_data(shape=(1, 16, 16), **options)


@pytest.fixture(scope="module")
def set_up_federation(set_up_federation, sgd):
    """At a learning rate at which distillation on these noisy images does not diverge."""
    return lambda method, rounds=3, **options: set_up_federation(method, rounds, **{"optimizer": sgd(0.02), **options})


@pytest.fixture(scope="module")
def run_federation(set_up_federation):
    """Set a federation up, run it, return the loop."""

    def run(method, rounds=3, **options):
        loop = set_up_federation(method, rounds, **options)
        loop.final = loop.run()
        return loop

    return run


class Epochs(L.Callback):
    """The state at the start and at the end of every epoch."""

    def __init__(self):
        self.starts, self.ends = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.starts.append({name: tensor.clone() for name, tensor in pl_module.entries.items()})

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append({name: tensor.clone() for name, tensor in pl_module.entries.items()})


def moved(one, two, prefix):
    names = [name for name in one if name.startswith(prefix)]
    assert names
    return any(not torch.equal(one[name], two[name]) for name in names)


def without_terms(outcome):
    """A run's outcome less what only the terms of a method hold."""
    clients = {c: {n: t for n, t in s.items() if not n.startswith("terms")} for c, s in outcome["clients"].items()}
    return {**outcome, "clients": clients}


def test_fedcpd_without_its_terms_is_fedrep_bit_for_bit(images, run_federation, outcome, assert_identical):
    cpd = run_federation(lambda: FedCPD(cnn(), **OFF), data=images())
    rep = run_federation(lambda: FedRep(cnn()), data=images())
    assert_identical(outcome(cpd), outcome(rep))
    assert_identical(cpd.final, rep.final)


@pytest.mark.parametrize("left", sorted(OFF))
def test_fedcpd_with_one_term_is_fedrep_with_that_term_bit_for_bit(
    left, images, run_federation, outcome, assert_identical
):
    term = {
        "alpha": lambda: PrototypeAlignment(0.5),
        "beta": lambda: PrototypeContrast(0.5, temperature=0.5),
        "gamma": lambda: FeatureDistillation(0.5),
    }[left]
    cpd = run_federation(lambda: FedCPD(cnn(), **{**OFF, left: 0.5}), data=images())
    rep = run_federation(lambda: FedRep(cnn(), extra_terms=[term()]), data=images())
    ours, theirs = outcome(cpd), outcome(rep)
    for mine in (ours, theirs):  # the terms' places differ
        mine["clients"] = without_terms(mine)["clients"]
    assert_identical(ours, theirs)
    rows = [row for row in cpd.diary.rows if row["round"] > 1]
    assert len([name for name in rows[0] if name.startswith("loss/")]) == 2


def test_first_round_is_fedreps(images, run_federation, assert_identical):
    """No teacher and no prototypes yet."""
    cpd = run_federation(lambda: FedCPD(cnn(), **PUBLISHED), rounds=2, data=images())
    rep = run_federation(lambda: FedRep(cnn()), rounds=2, data=images())
    for client in range(4):
        ours, theirs = cpd.diary.sent[1, client], rep.diary.sent[1, client]
        assert_identical(ours.weights, theirs.weights)
        later, other = cpd.diary.sent[2, client].weights, rep.diary.sent[2, client].weights
        assert any(not torch.equal(later[name], other[name]) for name in later)


def test_phases_move_what_they_train_and_nothing_else(images, sgd, run_federation):
    seen = Epochs()
    run_federation(
        lambda: FedCPD(cnn(), **PUBLISHED, head_epochs=2),
        rounds=2,
        data=images(),
        optimizer=sgd(0.01, momentum=0.9, weight_decay=0.01),
        trainer={"callbacks": [seen]},
    )
    for first in range(12, len(seen.starts), 3):  # second round: there is a teacher, there are prototypes
        start, between, end = seen.starts[first], seen.ends[first + 1], seen.ends[first + 2]
        assert moved(start, between, "model.head")
        assert not moved(start, between, "model.body")
        assert not moved(start, between, "terms")
        assert not moved(between, end, "model.head")
        assert moved(between, end, "model.body")
        for part in ("cbam", "attention_fusion", "feature_fusion"):
            assert moved(between, end, f"terms.3.{part}")
        for part in ("teacher", "teacher_cbam", "has_teacher"):
            assert not moved(start, end, f"terms.3.{part}")


def test_head_phase_leaves_the_bodys_statistics_as_they_are(conv_net, run_federation):
    """Batch norm's running statistics move in the body phase only, which starts from those that were received."""
    seen = Epochs()
    run_federation(
        lambda: FedCPD(conv_net(), **OFF, head_epochs=2), rounds=2, trainer={"callbacks": [seen]}, participation=0.25
    )
    assert len(seen.ends) == 2 * 3
    for first in (0, 3):
        start, between, end = seen.starts[first], seen.ends[first + 1], seen.ends[first + 2]
        statistics = [name for name in start if "running" in name or "num_batches" in name]
        assert len(statistics) == 3
        for name in statistics:
            assert torch.equal(start[name], between[name])
            assert not torch.equal(between[name], end[name])
        assert moved(start, between, "model.head")


def test_head_gradient_is_that_of_cross_entropy_alone(make_client):
    client = ready(make_client(FedCPD(cnn(), **PUBLISHED)))
    model = client.method.model
    x, y = torch.randn(5, 1, 16, 16), torch.tensor([0, 1, 2, 3, 0])
    out = client.step(x, y).forward()
    sum(term(client.method, out) for term in client.method.terms).backward()
    own = [p.grad.clone() for p in model.head.parameters()]
    client.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(map(torch.equal, own, [p.grad for p in model.head.parameters()]))


def ready(client):
    """The client with a teacher and prototypes."""
    for parameter in client.parameters():
        parameter.data.add_(0.01)
    method = client.method
    _, *terms = method.terms
    terms[-1].after_fit(method)
    means = ClassMeans(torch.rand(method.model.num_classes, method.model.embedding_size), torch.tensor([2, 1, 3, 1]))
    for term in terms:
        term.receive(method, Message({}, {"prototypes": means}))
    for parameter in method.model.parameters():
        parameter.data.add_(0.02)
    return client


def test_total_is_the_weighted_sum_of_appendix_b(make_client):
    client = ready(make_client(FedCPD(cnn(), alpha=0.5, beta=2.0, gamma=0.1)))
    step = client.step(torch.randn(5, 1, 16, 16), torch.tensor([0, 1, 2, 3, 0]))
    values = step.values(step.forward())
    assert list(values) == ["cross_entropy", "prototype_alignment", "prototype_contrast", "feature_distillation"]
    ce, align, contrast, distillation = (value.item() for value in values.values())
    assert min(ce, align, contrast, distillation) > 0
    assert step.total(values).item() == pytest.approx(ce + 0.5 * align + 2 * contrast + 0.1 * distillation)
    by_hand = 0.3133 + 0.5 * 6.5 + 2 * 0.5296 + 0.1 * 25.5  # the specification's example
    assert by_hand == pytest.approx(7.1724, abs=2e-4)


def test_messages_hold_body_and_prototypes_and_nothing_else(images, run_federation):
    loop = run_federation(lambda: FedCPD(cnn(), **PUBLISHED), rounds=2, data=images())
    body = {f"model.{name}" for name in cnn().state_dict() if name.startswith("body")}
    size = sum(t.numel() for n, t in cnn().state_dict().items() if n.startswith("body"))
    for (_, client), message in loop.diary.sent.items():
        held = int(loop.data.clients[client].held_classes.sum())
        assert set(message.weights) == body
        assert set(message.artifacts) == {"prototypes"}
        assert message.num_params == size + held * (8 + 1)
    down = loop.diary.received[2, 0]
    assert down.num_params == size + 4 * 8  # counts are needed upwards only


def test_message_sizes_match_the_specification(make_client):
    """CIFAR, 10 classes held: 878,538 values up, 878,528 down; 924,708 up with 100 classes."""
    for classes, up, down in ((10, 878_538, 878_528), (100, 924_708, 924_608)):
        client = make_client(FedCPD(CNN((3, 32, 32), classes)))
        prototypes = ClassMeans(torch.zeros(classes, 512), torch.ones(classes, dtype=torch.long))
        sent = Message(client.division.weights(), {"prototypes": prototypes})
        assert sent.num_params == up
        assert Message(sent.weights, {"prototypes": prototypes.without_counts()}).num_params == down


def test_shared_distillation_parameters_add_235114_values(make_client):
    private, shared = (
        make_client(FedCPD(CNN((3, 32, 32), 10), distillation=Distillation(parameters=where))).initial_message()
        for where in ("private", "shared")
    )
    assert shared.num_params - private.num_params == 235_114


def test_shared_distillation_parameters_are_averaged_and_private_ones_stay(images, run_federation):
    options = Distillation(parameters="shared")
    shared = run_federation(lambda: FedCPD(cnn(), distillation=options), rounds=2, data=images())
    names = [name for name in shared.exchange.global_message().weights if name.startswith("terms")]
    assert names
    assert not any("teacher" in name for name in names)
    private = run_federation(lambda: FedCPD(cnn()), rounds=2, data=images())
    kept = [private.runner.pool.get(client)["terms.3.cbam.0.mlp.0.weight"] for client in range(2)]
    assert not torch.equal(*kept)


def test_prototypes_are_merged_by_counts_or_uniformly(make_client):
    first = ClassMeans(torch.tensor([[2.0, 0.0]]), torch.tensor([30]))
    second = ClassMeans(torch.tensor([[0.0, 4.0]]), torch.tensor([10]))
    for weighting, expected in (("count", [1.5, 1.0]), ("uniform", [1.0, 2.0])):
        client = make_client(FedCPD(cnn(), prototypes=Prototypes(weighting=weighting)))
        rule = client.make_server(client.method.facts).rules["prototypes"]()
        for means in (first, second):
            rule.add(means, 1)
        assert rule.result(None).mean[0].tolist() == expected


def test_teacher_is_the_clients_own_last_extractor(images, run_federation):
    loop = run_federation(lambda: FedCPD(cnn()), rounds=3, participation=0.5, data=images())
    for client in range(4):
        last = max((round for round, c in loop.diary.sent if c == client), default=None)
        if last is not None:
            state = loop.runner.pool.get(client)
            sent = loop.diary.sent[last, client].weights
            assert bool(state["terms.3.has_teacher"])
            for name in ("stages.0.0.weight", "stages.1.0.bias"):
                assert torch.equal(state[f"terms.3.teacher.{name}"], sent[f"model.body.{name}"])


@pytest.mark.parametrize("alternation", ["epoch", "batch"])
def test_both_alternations_train_both_parts(alternation, images, run_federation):
    loop = run_federation(lambda: FedCPD(cnn(), reading=Reading(alternation=alternation)), rounds=3, data=images())
    losses = [row["loss/cross_entropy"] for row in loop.diary.rows]
    assert losses[-1] < losses[0]
    steps = loop.data.clients[0].num_steps(4)
    assert loop.diary.reports[1, 0].num_steps == (2 * steps if alternation == "epoch" else steps)


def test_batch_alternation_takes_a_head_step_then_a_body_step(images, sgd, set_up_federation):
    """One batch by hand: the head moves on the old body, then the body under the new head."""
    data = images(counts=((3, 2, 2, 1),), batch_size=100)
    loop = set_up_federation(lambda: FedCPD(cnn(), **OFF, reading=Reading(alternation="batch")), rounds=1, data=data)
    model = cnn()
    model.load_state_dict({n.removeprefix("model."): t for n, t in loop.runner.modules[0].entries.items()})
    loop.advance()
    x, y = data.store.gather(data.clients[0].train)
    for part in (model.head, model.body):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(part.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                parameter.sub_(0.02 * gradient)
    trained = {**loop.diary.sent[1, 0].weights, **loop.runner.pool.get(0)}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[f"model.{name}"], tensor, rtol=1e-4, atol=1e-6)


class Pull(Term):
    """Draws the whole model to 0."""

    reaches = ("model",)

    def forward(self, host, out):
        return sum(own.square().sum() for own in host.model.parameters())


def test_batch_alternation_has_all_terms_that_reach_the_head_in_its_step(images, set_up_federation):
    method = lambda: FedCPD(cnn(), **OFF, reading=Reading(alternation="batch"), extra_terms=[Pull(25.0)])  # noqa: E731
    data = images(counts=((3, 2, 2, 1),), batch_size=100)
    loop = set_up_federation(method, rounds=1, data=data)
    before = loop.runner.modules[0].entries["model.head.weight"].norm()
    loop.advance()
    assert loop.runner.pool.get(0)["model.head.weight"].norm() < 0.2 * before  # 1 − 0.02 · 2 · 25 = 0


def test_receive_drop_is_logged_every_round(images, run_federation):
    rows = run_federation(lambda: FedCPD(cnn()), rounds=3, data=images()).diary.rows
    assert rows[0]["receive_drop"] is None
    for before, row in pairwise(rows):
        assert row["receive_drop"] == pytest.approx(before["Local-T"] - row["Local-T_received"])


def test_class_absent_everywhere_has_no_prototype_and_is_no_negative(images, run_federation):
    data = images(counts=((6, 6, 0, 0), (4, 6, 0, 3)))
    loop = run_federation(lambda: FedCPD(cnn(), **PUBLISHED), data=data)
    assert loop.exchange.global_message().artifacts["prototypes"].valid.tolist() == [True, True, False, True]
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in loop.diary.rows)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fedcpd_trains_in_bfloat16(precision, images, run_federation):
    loop = run_federation(lambda: FedCPD(cnn()), rounds=4, data=images(), trainer={"precision": precision})
    losses = [row["loss/cross_entropy"] for row in loop.diary.rows]
    assert losses[-1] < losses[0]
    assert loop.diary.rows[-1]["loss/feature_distillation"] > 0
    assert all(t.isfinite().all() for c in range(4) for t in loop.runner.pool.get(c).values())


@pytest.mark.parametrize("attention", ["side", "inline"])
def test_run_resumes_exactly_with_teacher_and_prototypes(
    attention, images, run_federation, set_up_federation, outcome, assert_identical, tmp_path
):
    options = {"rounds": 4, "participation": 0.5, "data": images()}
    shared = Distillation(attention=attention, parameters="shared")
    method = lambda: FedCPD(cnn(), distillation=shared)  # noqa: E731
    straight = run_federation(method, **options)
    first = set_up_federation(method, folder=tmp_path, **options)
    for _ in range(3):
        first.advance()
    second = set_up_federation(method, folder=tmp_path, **options)
    second.load_state_dict(second.checkpoints.load(tmp_path / "checkpoints" / "round-0002.ckpt"))
    second.final = second.run()
    second.diary.rows = first.diary.rows[:2] + second.diary.rows
    assert_identical(outcome(second), outcome(straight))


def test_figure_2_terms_on_fedavg_run(images, run_federation):
    terms = lambda: [PrototypeAlignment(1.0), PrototypeContrast(0.01), FeatureDistillation(1.0)]  # noqa: E731
    loop = run_federation(lambda: FedAvg(cnn(), extra_terms=terms()), data=images())
    assert loop.diary.rows[-1]["Server-T"] is not None
    assert loop.diary.rows[-1]["loss/feature_distillation"] > 0
    assert not any("terms" in name for name in loop.exchange.global_message().weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, "method.alpha: must be >= 0, got -1"),
        ({"beta": -0.1}, "method.beta: must be >= 0"),
        ({"gamma": -2}, "method.gamma: must be >= 0"),
        ({"temperature": 0}, "method.reading.temperature: must be > 0, got 0"),
        ({"head_epochs": -1}, "method.head_epochs: must be >= 0, got -1"),
        ({"body_epochs": -1}, "method.body_epochs: must be >= 0 or null, got -1"),
        ({"alternation": "step"}, "method.reading.alternation: must be one of epoch, batch, got 'step'"),
        ({"align_reduction": "max"}, "method.reading.align_reduction: must be one of mean, sum"),
        ({"mid_channels": 0}, "Distillation.mid_channels: must be >= 1, got 0"),
        ({"weighting": "none"}, "Prototypes.weighting: must be one of count"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        FedCPD(cnn(), **sectioned(FedCPD, **options))


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("prototypes", "collection", "never"),
        ("prototypes", "missing", "zero"),
        ("distillation", "feature_target", "flat"),
        ("distillation", "smooth_convs", 3),
        ("distillation", "reduction", "median"),
        ("reading", "alternation", "step"),
    ],
)
def test_configured_option_is_refused_where_it_is_written(section, option, value):
    node = {"class_path": "fl_lightning.methods.fedcpd.FedCPD", "init_args": {section: {option: value}}}
    with pytest.raises(ConfigError, match=rf"^method\.init_args\.{section}\.{option}: must be .*, got {value!r}$"):
        build(node, "method", model=cnn())


def test_prototypes_of_the_last_epoch_are_an_option_too(images, run_federation):
    options = Prototypes(collection="running")
    loop = run_federation(lambda: FedCPD(cnn(), prototypes=options), rounds=2, data=images(), local_epochs=2)
    for (_, client), message in loop.diary.sent.items():
        assert torch.equal(message.artifacts["prototypes"].count, loop.data.clients[client].class_counts)
    assert loop.diary.rows[-1]["loss/prototype_alignment"] > 0
