"""The numbers and invariants that the specification of FedDW promises (FedDW.md, section 8): loss, rule and term."""

import math
from types import SimpleNamespace

import pytest
import torch
from sections import sectioned
from torch import nn

from fl_lightning.building import build
from fl_lightning.core.facts import Facts, Fit
from fl_lightning.core.forward import Forward
from fl_lightning.core.host import Collected
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.server import Server
from fl_lightning.core.term import CrossEntropy
from fl_lightning.errors import ConfigError
from fl_lightning.federation.graphs import DirectedGraph
from fl_lightning.federation.peers import Ring
from fl_lightning.losses.class_relation import ClassRelation, Relation, SoftLabelRule, SoftLabels, class_relation_loss
from fl_lightning.methods.fedavg import FedAvg

PUBLIC_CODE = {"soft_labels_init": "identity", "momentum": 0.5, "history": "all", "missing": "one_hot"}
W = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
SL = torch.tensor([[0.8, 0.1, 0.1], [0.05, 0.9, 0.05], [0.2, 0.2, 0.6]])
EYE = torch.eye(3)


def near(expected):
    return pytest.approx(expected, abs=5.1e-5)


def random_case(seed, classes=6, size=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, size, generator=generator, dtype=dtype)
    return weight, torch.rand(classes, classes, generator=generator, dtype=dtype).mul(4).softmax(1)


def gradient(weight, *options, **named):
    weight = weight.clone().requires_grad_()
    class_relation_loss(weight, *options, **named).backward()
    return weight.grad


# --- the loss ----------------------------------------------


@pytest.mark.parametrize(
    ("weight", "soft_labels", "value", "slope"),
    [
        (torch.eye(2), torch.tensor([[0.9, 0.1], [0.2, 0.8]]), 0.0166, [[-0.0664, 0.0468], [0.0468, -0.0271]]),
        (W, SL, 0.0191, [[-0.0231, 0.0212], [-0.0139, 0.0156], [0.0415, 0.0074]]),
    ],
)
def test_loss_and_gradient_match_the_specification(weight, soft_labels, value, slope):
    assert class_relation_loss(weight, soft_labels).item() == near(value)
    assert gradient(weight, soft_labels).flatten().tolist() == near([g for row in slope for g in row])


def test_gradient_is_the_closed_form():
    """With A = σ(W Wᵀ) and g = 2 (A − SL) / C²: dG = A (g − Σ_k g_k A_k) and dW = (dG + dGᵀ) W."""
    weight, soft_labels = random_case(0)
    a = (weight @ weight.t()).softmax(1)
    g = 2 * (a - soft_labels) / 36
    d = a * (g - (g * a).sum(1, keepdim=True))
    torch.testing.assert_close(gradient(weight, soft_labels), (d + d.t()) @ weight)


def test_masked_rows_add_nothing_and_stay_in_the_divisor():
    assert class_relation_loss(W, SL, torch.tensor([True, True, False])).item() == near(0.0051)


@pytest.mark.parametrize("garbage", [7.0, math.nan, math.inf])
def test_what_an_invalid_row_holds_does_not_matter(garbage):
    valid, other = torch.tensor([True, True, False]), SL.clone()
    other[2] = garbage
    assert class_relation_loss(W, other, valid) == class_relation_loss(W, SL, valid)
    assert torch.equal(gradient(W, other, valid), gradient(W, SL, valid))


def test_weights_of_zero():
    weight = torch.zeros(4, 3)
    assert class_relation_loss(weight, torch.full((4, 4), 0.25)).item() == 0
    assert class_relation_loss(weight, torch.eye(4)).item() == 0.1875
    assert torch.equal(gradient(weight, torch.eye(4)), weight)  # a stationary point


def test_row_of_zeros_has_a_finite_gradient():
    weight = W.clone()
    weight[1] = 0
    assert gradient(weight, SL).isfinite().all()


def test_nothing_valid_is_zero_without_a_nan():
    nobody = torch.zeros(3, dtype=torch.bool)
    assert class_relation_loss(W, SL, nobody).item() == 0
    assert torch.equal(gradient(W, SL, nobody), torch.zeros_like(W))


def test_extreme_weights_reach_the_bound_and_no_more():
    weight = torch.tensor([[6.0, 0.0], [0.0, 6.0], [-6.0, -6.0]])
    value = class_relation_loss(weight, EYE.roll(1, 1)).item()
    assert value == near(0.6667)
    assert value <= 2 / 3 + 1e-6
    assert class_relation_loss(1e6 * weight, EYE).isfinite()


@pytest.mark.parametrize("seed", range(5))
def test_loss_is_bounded(seed):
    weight, soft_labels = random_case(seed)
    for scale in (0.1, 1, 10):
        assert 0 <= class_relation_loss(scale * weight, soft_labels).item() <= 2 / 6


def test_consistent_labels_give_zero_and_no_gradient():
    target = (W @ W.t()).softmax(1)
    assert class_relation_loss(W, target).item() == 0
    assert torch.equal(gradient(W, target), torch.zeros_like(W))


def test_rotating_the_weights_or_permuting_the_classes_changes_nothing():
    weight, soft_labels = random_case(1, dtype=torch.float64)
    value = class_relation_loss(weight, soft_labels)
    rotation = torch.linalg.qr(random_case(2, classes=4, dtype=torch.float64)[0]).Q
    torch.testing.assert_close(class_relation_loss(weight @ rotation, soft_labels), value)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(class_relation_loss(weight[order], soft_labels[order][:, order]), value)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"exclude_diagonal": True}])
@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True])])
def test_gradient_matches_finite_differences_in_float64(options, valid):
    weight = W.double().requires_grad_()
    assert class_relation_loss(weight, SL, valid, **options).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda w: class_relation_loss(w, SL, valid, **options), (weight,))
    assert torch.autograd.gradgradcheck(lambda w: class_relation_loss(w, SL, valid, **options), (weight,))


def test_soft_labels_are_constants():
    soft_labels = SL.clone().requires_grad_()
    class_relation_loss(W.clone().requires_grad_(), soft_labels).backward()
    assert soft_labels.grad is None


def test_mixed_precision_narrows_neither_the_loss_nor_its_gradient():
    """The gradient is taken outside the autocast, as `ClientModule.optimize` does."""
    weight, soft_labels = random_case(3, classes=20, size=64)
    weight = (weight / 4).requires_grad_()
    (exact,) = torch.autograd.grad(class_relation_loss(weight, soft_labels), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = class_relation_loss(weight, soft_labels)
    (slope,) = torch.autograd.grad(value, weight)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, class_relation_loss(weight, soft_labels), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope, exact, rtol=1e-5, atol=1e-8)


def test_half_precision_weights_give_a_float32():
    value = class_relation_loss((200 * W).half(), SL)  # 400² is more than a float16 holds
    assert value.dtype == torch.float32
    assert value.isfinite()


def test_temperature_divides_the_relation():
    expected = class_relation_loss(W / math.sqrt(2), SL)
    torch.testing.assert_close(class_relation_loss(W, SL, temperature=2.0), expected)


def test_without_the_diagonal_both_are_distributions_over_the_other_classes():
    """CR without its diagonal is ((·, 0, −1), (0, ·, 2), (−1, 2, ·)), SL ((·, ½, ½), (½, ·, ½), (½, ½, ·))."""
    one, two, three = (1 / (1 + math.exp(-d)) for d in (1, 2, 3))
    expected = 2 * ((one - 0.5) ** 2 + (two - 0.5) ** 2 + (three - 0.5) ** 2) / 9
    assert class_relation_loss(W, SL, exclude_diagonal=True).item() == pytest.approx(expected)
    assert class_relation_loss(W, EYE, exclude_diagonal=True).item() == 0  # rows that say nothing beside the diagonal
    assert class_relation_loss(W[:1], EYE[:1, :1], exclude_diagonal=True).item() == 0


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"`weight` is \(3, 2\) but `soft_labels` is \(4, 4\)"):
        class_relation_loss(W, torch.eye(4))


# --- the server's rule ----------------------------------------------


def soft(rows, count):
    return ClassMeans(torch.tensor(rows), torch.tensor(count))


ONE = soft([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.0, 0.0, 0.0]], [10, 5, 0])
TWO = soft([[0.5, 0.3, 0.2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [30, 0, 0])


def server_of(**options):
    return Server(Message(), {"soft_labels": lambda: SoftLabelRule(SoftLabels(**options))})


def after(server, *uploads):
    messages = {client: Message({}, {"soft_labels": value}, 1) for client, value in enumerate(uploads)}
    return server.aggregate(messages).artifacts["soft_labels"]


def test_rows_are_weighted_by_the_samples_of_their_class():
    merged = after(server_of(), ONE, TWO)
    assert merged.mean[:2].flatten().tolist() == pytest.approx([0.55, 0.275, 0.175, 0.1, 0.8, 0.1])
    assert merged.valid.tolist() == [True, True, False]
    assert merged.num_params == 6  # valid rows, and no counts on the way down


@pytest.mark.parametrize(("missing", "valid"), [("keep", [True, True, False]), ("drop", [True, False, False])])
def test_row_that_the_round_lacks_is_kept_or_dropped(missing, valid):
    server = server_of(missing=missing, momentum=0.5)
    after(server, ONE)
    merged = after(server, TWO)
    assert merged.valid.tolist() == valid
    assert merged.mean[0].tolist() == pytest.approx([0.6, 0.25, 0.15])
    assert merged.mean[1].tolist() == pytest.approx([0.1, 0.8, 0.1] if missing == "keep" else [0, 0, 0])


def test_dropped_row_starts_anew():
    server = server_of(missing="drop", momentum=0.5)
    after(server, ONE)
    after(server, TWO)
    other = soft([[1.0, 0, 0], [0.0, 1.0, 0.0], [0, 0, 0]], [1, 1, 0])
    assert after(server, other).mean[1].tolist() == [0, 1, 0]


def test_momentum_starts_with_the_first_mean_where_there_is_no_initial_row():
    server = server_of(momentum=0.9)
    assert after(server, ONE).mean[0].tolist() == pytest.approx([0.7, 0.2, 0.1])
    assert after(server, TWO).mean[0].tolist() == pytest.approx([0.68, 0.21, 0.11])


@pytest.mark.parametrize(("initial", "row"), [("identity", [0, 0, 1]), ("uniform", [1 / 3] * 3)])
def test_initial_rows_stand_until_a_class_is_held(initial, row):
    merged = after(server_of(soft_labels_init=initial), ONE)
    assert merged.valid.all()
    assert merged.mean[2].tolist() == pytest.approx(row)
    assert merged.mean[0].tolist() == pytest.approx([0.7, 0.2, 0.1])


def test_public_code_matches_the_specification():
    server = server_of(**PUBLIC_CODE)
    first = after(server, ONE, TWO)
    assert first.mean[0].tolist() == pytest.approx([0.775, 0.1375, 0.0875])
    assert first.mean[1].tolist() == pytest.approx([0.05, 0.9, 0.05])
    assert first.mean[2].tolist() == [0, 0, 1]
    later = soft([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.2, 0.4, 0.4]], [0, 0, 8])
    second = after(server, later)
    assert second.mean[0].tolist() == pytest.approx([0.6625, 0.20625, 0.13125])  # towards the pool, though not held
    assert second.mean[2].tolist() == pytest.approx([0.1, 0.2, 0.7])


def test_history_of_all_rounds_is_the_mean_of_the_pool():
    server = server_of(history="all")
    after(server, ONE)
    merged = after(server, TWO)
    assert merged.mean[:2].flatten().tolist() == pytest.approx([0.55, 0.275, 0.175, 0.1, 0.8, 0.1])
    assert merged.valid.tolist() == [True, True, False]


def test_one_hot_stands_until_a_class_was_held_once():
    server = server_of(missing="one_hot")
    assert after(server, TWO).mean[1].tolist() == [0, 1, 0]
    assert after(server, ONE).mean[1].tolist() == pytest.approx([0.1, 0.8, 0.1])
    assert after(server, TWO).mean[1].tolist() == pytest.approx([0.1, 0.8, 0.1])


@pytest.mark.parametrize("options", [PUBLIC_CODE, {"missing": "one_hot"}, {"history": "all"}, {"momentum": 0.3}])
def test_server_goes_on_exactly_from_its_state(options, assert_identical):
    straight, first, second = (server_of(**options) for _ in range(3))
    for uploads in ((ONE,), (TWO, ONE)):
        after(straight, *uploads)
        after(first, *uploads)
    second.load_state_dict(first.state_dict())
    for server in (straight, second):
        after(server, TWO)
    assert_identical(second.state_dict(), straight.state_dict())


def test_rule_does_not_depend_on_the_order_of_clients():
    one, two, three = (ClassMeans(random_case(s, classes=3)[1], torch.tensor([s + 1, 3, 7 * s])) for s in range(3))
    results = [after(server_of(**PUBLIC_CODE), *order).mean for order in ((one, two, three), (three, one, two))]
    assert torch.equal(*results)


def test_soft_labels_of_different_sizes_are_refused():
    rule = SoftLabelRule()
    rule.add(ONE, 1)
    with pytest.raises(ValueError, match="same number of classes, got 3 and 2"):
        rule.add(soft([[1.0, 0.0], [0.0, 1.0]], [1, 1]), 1)


# --- the term ----------------------------------------------


def host_of(mlp, num_classes=3):
    """What a term sees of a method, in the last epoch of a fit."""
    return SimpleNamespace(model=mlp(hidden=(), shape=(2,), num_classes=num_classes), fit=Fit(epochs=1))


def fitted(host, term):
    """The term as a client would have it."""
    term.alter(host.model)
    term.setup(host)
    return term


class Adapted(nn.Module):
    """A linear layer and a low-rank change of it."""

    def __init__(self, rests):
        super().__init__()
        self.base = nn.Linear(2, 3).requires_grad_(not rests)
        self.down, self.up = nn.Linear(2, 1, bias=False), nn.Linear(1, 3, bias=False)
        self.change = nn.Parameter(torch.zeros(3, 2)) if not rests else None

    def forward(self, z):
        return self.base(z) + (self.up(self.down(z)) if self.change is None else z @ self.change.t())


@pytest.mark.parametrize("rests", [True, False])
def test_a_layer_that_is_not_all_of_a_class_is_refused(mlp, rests):
    """The term pulled at a frozen matrix, which is to say at nothing."""
    host = host_of(mlp)
    host.model.head = Adapted(rests)
    if not rests:
        del host.model.head.down, host.model.head.up
    with pytest.raises(ConfigError, match=r"^model\.head: ClassRelation needs the linear layer of one output a class"):
        ClassRelation().setup(host)
    parametrized = host_of(mlp)
    nn.utils.parametrizations.weight_norm(parametrized.model.head)
    with torch.no_grad():
        ClassRelation().setup(parametrized)


@pytest.fixture
def spec_batch():
    """Test 5: two samples of class 0, one of class 1."""
    return torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([0, 0, 1])


@pytest.mark.parametrize("source", ["post", "running"])
def test_local_soft_labels_match_the_specification(mlp, spec_batch, source):
    logits, y = spec_batch
    host = host_of(mlp)
    term = fitted(host, ClassRelation(soft_labels=SoftLabels(source=source)))
    term.receive(host, Message())
    for part in (slice(0, 2), slice(2, 3)):
        term.observe(host, Forward(logits[part], y[part], [], logits[part], logits[part]))
    data = SimpleNamespace(collected=lambda: Collected(logits, logits, y))
    sent = term.send(host, data)["soft_labels"]
    assert sent.mean.flatten().tolist() == near([0.4995, 0.3413, 0.1592, 0.5761, 0.2119, 0.2119, 0, 0, 0])
    assert (sent.count.tolist(), sent.mean.dtype) == ([2, 1, 0], torch.float32)  # though sums are wider
    assert sent.num_params == 2 * (3 + 1)
    assert CrossEntropy()(None, Forward(logits, y, [], logits, logits)).item() == near(1.1141)


def test_running_soft_labels_forget_the_client_before_and_all_but_the_last_epoch(mlp, spec_batch):
    logits, y = spec_batch
    host = host_of(mlp)
    host.fit = Fit(epochs=2)
    term = fitted(host, ClassRelation(soft_labels=SoftLabels(source="running")))
    out = Forward(logits, y, [], logits, logits.clone().requires_grad_())
    host.fit.epoch = 1
    term.observe(host, out)
    term.receive(host, Message())
    assert not term.send(host, None)["soft_labels"].valid.any()
    for epoch in (0, 1):
        host.fit.epoch = epoch
        term.observe(host, out)
    sent = term.send(host, None)["soft_labels"]
    assert sent.count.tolist() == [2, 1, 0]
    assert not sent.mean.requires_grad


def test_term_is_the_loss_of_what_it_received(mlp):
    host = host_of(mlp)
    term = fitted(host, ClassRelation(relation=Relation(temperature=2.0)))
    weight = host.model.classification_layer.weight
    out = SimpleNamespace(z=torch.zeros(1, 2))
    for count in ([1, 1, 1], [1, 0, 1]):
        received = ClassMeans(SL.clone(), torch.tensor(count))
        term.receive(host, Message({}, {"soft_labels": received}))
        assert term(host, out) == class_relation_loss(weight, SL, received.valid, temperature=2.0)
        term.soft_labels.zero_()
        assert torch.equal(received.mean, SL)
    term.receive(host, Message())
    assert term(host, out).item() == 0
    assert not term(host, out).requires_grad
    assert list(term.state_dict()) == []


@pytest.mark.parametrize(("initial", "rows"), [("identity", EYE), ("uniform", torch.full((3, 3), 1 / 3))])
def test_term_has_initial_soft_labels_from_the_first_round(mlp, initial, rows):
    host = host_of(mlp)
    term = fitted(host, ClassRelation(soft_labels=SoftLabels(initial)))
    term.receive(host, Message())
    weight = host.model.classification_layer.weight
    assert term(host, SimpleNamespace(z=weight)) == class_relation_loss(weight, rows)


def test_weight_is_divided_by_ten_at_the_start_of_the_rounds_asked_for():
    term = ClassRelation(0.1, decay_rounds=[9, 18, 27, 36, 45])
    weights = [term.weight_at(Facts(round=round)) for round in (1, 8, 9, 17, 18, 45, 50)]
    assert weights == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 1e-6, 1e-6], rel=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.1])
@pytest.mark.parametrize("bias", ["remove", "keep", "always"])
def test_last_bias_is_removed_or_kept(mlp, weight, bias):
    """At weight 0 the model stays as it is, unless the control is asked for."""
    host = host_of(mlp)
    before = set(host.model.state_dict())
    fitted(host, ClassRelation(weight, relation=Relation(bias=bias)))
    removed = bias == "always" or (bias == "remove" and weight > 0)
    assert before - set(host.model.state_dict()) == ({"head.bias"} if removed else set())


def test_at_weight_0_it_changes_nothing_and_the_control_is_the_model_without_the_bias(
    mlp, run_federation, outcome, assert_identical
):
    def without_bias():
        model = mlp()
        model.head.bias = None
        return model

    def run(model, **options):
        terms = [ClassRelation(0.0, relation=Relation(**options))] if options else None
        return outcome(run_federation(lambda: FedAvg(model(), extra_terms=terms), rounds=2))

    assert_identical(run(mlp, bias="remove"), run(mlp))
    assert_identical(run(mlp, bias="always"), run(without_bias))


@pytest.mark.parametrize("exchange", [Ring, lambda: Ring("sequential"), lambda: DirectedGraph(2)])
def test_it_runs_without_a_server(mlp, run_federation, exchange):
    method = lambda: FedAvg(mlp(), extra_terms=[ClassRelation(5.0)])  # noqa: E731
    loop = run_federation(method, rounds=3, exchange=exchange())
    assert loop.diary.rows[-1]["loss/class_relation"] > 0
    heard = loop.exchange.inbox(0).artifacts["soft_labels"]
    assert heard.valid[loop.data.clients[0].held_classes].all()
    torch.testing.assert_close(heard.mean[heard.valid].sum(1), torch.ones(int(heard.valid.sum())))


def test_in_a_ring_own_soft_labels_and_the_predecessors_are_merged_by_samples(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp(), extra_terms=[ClassRelation(5.0)]), rounds=1, exchange=Ring())
    own, other = (loop.diary.sent[1, client].artifacts["soft_labels"] for client in (0, 3))
    heard = loop.exchange.inbox(0).artifacts["soft_labels"]
    count = own.count + other.count
    assert torch.equal(heard.valid, count > 0)
    sums = own.mean * own.count[:, None] + other.mean * other.count[:, None]
    torch.testing.assert_close(heard.mean[heard.valid], (sums / count[:, None])[heard.valid])


@pytest.mark.parametrize("options", [{"history": "all"}, {"missing": "one_hot"}])
def test_memory_of_all_rounds_needs_a_server(mlp, set_up_federation, options):
    terms = [ClassRelation(soft_labels=SoftLabels(**options))]
    rule = r"^federation\.exchange: .* cannot do without its server, which must remember soft_labels"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedAvg(mlp(), extra_terms=terms), exchange=Ring())


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "to be the head's last; after it comes ReLU"),
        (nn.Conv1d(2, 3, 1), "head must end in a linear layer of one output a class"),
        (nn.Linear(2, 7), "head must end in a linear layer of one output a class"),
    ],
)
def test_head_whose_last_layer_has_no_class_vectors_is_refused(mlp, head, says):
    host = host_of(mlp)
    host.model.head = head
    with pytest.raises(ConfigError, match=f"^model.head: .*{says}$"):
        fitted(host, ClassRelation())


def test_head_with_dropout_in_front_is_accepted(mlp):
    host = host_of(mlp)
    host.model.head = nn.Sequential(nn.Dropout(), nn.Linear(2, 3), nn.Identity())
    fitted(host, ClassRelation())
    assert host.model.head[1].bias is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight", -1.0),
        ("soft_labels_init", "eye"),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("history", "some"),
        ("missing", "zero"),
        ("decay_rounds", [0]),
        ("source", "pre"),
        ("temperature", 0.0),
        ("bias", "no"),
    ],
)
def test_term_rejects_values_out_of_range(option, value):
    owner = next((kind for kind in (SoftLabels, Relation) if option in kind.__annotations__), ClassRelation)
    with pytest.raises(ConfigError, match=rf"^{owner.__name__}\.{option}: must be"):
        ClassRelation(**sectioned(ClassRelation, **{option: value}))


def test_configured_option_is_refused_where_it_is_written():
    node = {"class_path": "fl_lightning.losses.class_relation.ClassRelation", "init_args": {}}
    for section, option, value in (("soft_labels", "momentum", 1.0), ("relation", "bias", "no")):
        node["init_args"] = {section: {option: value}}
        key = rf"method\.extra_terms\.0\.init_args\.{section}\.{option}"
        with pytest.raises(ConfigError, match=rf"^{key}: must be .*, got {value!r}$"):
            build([node], "method.extra_terms")
