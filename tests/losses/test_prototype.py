import math
from types import SimpleNamespace

import pytest
import torch

from fl_lightning.core.descent import Machine
from fl_lightning.core.devices import Part
from fl_lightning.core.facts import Phase
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.step import Bench, Step
from fl_lightning.core.term import CrossEntropy
from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import (
    PrototypeAlignment,
    batch_prototype_distance,
    prototype_alignment_loss,
    prototype_contrast_loss,
    prototype_distances,
)

Y = torch.tensor([0, 0, 1, 2])
PROTOTYPES = torch.tensor([[1.0, 1.0], [2.0, -2.0], [0.0, 0.0]])
VALID = torch.tensor([True, True, False])
ROOT = 1e-6  # what 1e-12 under a root of nothing leaves


@pytest.fixture
def z():
    return torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [5.0, 1.0]], requires_grad=True)


def host_of(classes, size):
    return SimpleNamespace(model=SimpleNamespace(num_classes=classes, embedding_size=size), terms=[])


def fitting(in_last_epoch):
    return SimpleNamespace(fit=SimpleNamespace(in_last_epoch=in_last_epoch))


def alignment(mean=PROTOTYPES, count=(1, 1, 0), **options):
    """A term that has received prototypes."""
    term = PrototypeAlignment(**options)
    term.setup(host_of(*mean.shape))
    term.receive(None, Message({}, {"prototypes": ClassMeans(mean, torch.tensor(count))}))
    return term


def forward(z, y=Y):
    return Forward(z, y, [], z, torch.zeros(len(y), 3))


# --- values of FedProto.md, section 8 ----------------------------------------------


def test_mean_square_matches_hand_computed_value(z):
    """Squared distances 1, 13, 8 and nothing for the invalid class: 22 over B·D = 8."""
    assert prototype_alignment_loss(z, Y, PROTOTYPES, VALID).item() == 2.75


def test_sum_of_squares_is_the_mean_times_the_size_of_an_embedding(z):
    assert prototype_alignment_loss(z, Y, PROTOTYPES, VALID, "sum").item() == 5.5


def test_gradient_of_mean_square_matches_hand_computed_value(z):
    """2 (z - P) / 8 for samples of valid classes."""
    prototype_alignment_loss(z, Y, PROTOTYPES, VALID).backward()
    assert z.grad.tolist() == [[0.0, 0.25], [0.5, 0.75], [-0.5, 0.5], [0.0, 0.0]]


def test_batch_prototype_distance_matches_hand_computed_value(z):
    """Batch means (2, 3) and (0, 0): √5 + √8 = 2.2361 + 2.8284."""
    value = batch_prototype_distance(z, Y, PROTOTYPES, VALID).item()
    assert value == pytest.approx(5.0645, abs=5e-5)


def test_gradient_of_batch_prototype_distance_matches_hand_computed_value(z):
    """Unit vector from prototype to batch mean, over the number of the class's samples in the batch."""
    batch_prototype_distance(z, Y, PROTOTYPES, VALID).backward()
    first = torch.tensor([1.0, 2.0]) / math.sqrt(5) / 2
    second = torch.tensor([-2.0, 2.0]) / math.sqrt(8)
    torch.testing.assert_close(z.grad, torch.stack([first, first, second, torch.zeros(2)]))


def test_nearest_prototype_matches_hand_computed_distances():
    z = torch.tensor([[1.4, 1.5]])
    prototypes = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    everything = prototype_distances(z, prototypes, torch.tensor([True, True, True]))
    assert everything[0].tolist() == pytest.approx([2.0518, 2.1932, 2.8653], abs=5e-5)
    assert everything.argmin(1).item() == 0
    some = prototype_distances(z, prototypes, torch.tensor([False, True, True]))
    assert some[0, 0] == math.inf
    assert some.argmin(1).item() == 1


def test_nearest_of_equally_far_prototypes_is_the_lowest_class():
    z = torch.zeros(1, 2)
    prototypes = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]])
    distances = prototype_distances(z, prototypes, torch.ones(3, dtype=torch.bool))
    assert distances.argmin(1).item() == 0
    assert (-distances).argmax(1).item() == 0


def test_mean_over_valid_samples_leaves_the_others_out_of_the_denominator(z):
    """The sample of class 2, which has no prototype, counts among the batch and not among the valid: ·4/3."""
    valid = torch.tensor([True, True, False])
    for loss in (
        lambda **how: prototype_alignment_loss(z, Y, PROTOTYPES, valid, **how),
        lambda **how: prototype_alignment_loss(z, Y, PROTOTYPES, valid, "sum", **how),
        lambda **how: prototype_contrast_loss(z, Y, PROTOTYPES, 0.5, valid, **how),
    ):
        torch.testing.assert_close(loss(average="valid"), loss() * 4 / 3)
        torch.testing.assert_close(loss(average="batch"), loss())
    nothing = torch.zeros(3, dtype=torch.bool)
    assert prototype_alignment_loss(z, Y, PROTOTYPES, nothing, average="valid").item() == 0


@pytest.mark.parametrize(("weight", "total"), [(1.0, 3.0633), (0.1, 0.5883), (0.0, 0.3133)])
def test_total_is_cross_entropy_plus_the_weighted_term(z, weight, total):
    """L_S = log(1 + e^-1) = 0.3133 and L_R = 2.75."""
    logits = torch.tensor([[1.0, 0.0]])
    values = {
        "cross_entropy": CrossEntropy()(None, Forward(z, torch.tensor([0]), [], z, logits)),
        "prototype_alignment": alignment()(None, forward(z)),
    }
    weights = {"cross_entropy": 1.0, "prototype_alignment": weight}
    step = Step(Bench(None, Machine(), (), Phase("all"), (), weights), Part.whole(z, Y))
    assert step.total(values).item() == pytest.approx(total, abs=5e-5)


# --- gradients and edge cases ----------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y, p, v: prototype_alignment_loss(z, y, p, v),
        lambda z, y, p, v: prototype_alignment_loss(z, y, p, v, "sum"),
        batch_prototype_distance,
    ],
    ids=["mean", "sum", "batch"],
)
class TestEveryForm:
    def test_gradient_matches_finite_differences(self, loss):
        """Central differences with a step that float32, in which the losses work, can resolve."""
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(6, 3, generator=generator, dtype=torch.float64).requires_grad_()
        prototypes = torch.randn(4, 3, generator=generator)
        y = torch.tensor([0, 1, 1, 2, 3, 0])
        valid = torch.tensor([True, True, False, True])
        torch.autograd.gradcheck(
            lambda z: loss(z, y, prototypes, valid).double(), (z,), eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0
        )

    @pytest.mark.parametrize("garbage", [123.0, math.inf, math.nan])
    def test_vector_of_an_invalid_class_changes_neither_loss_nor_gradient(self, loss, z, garbage):
        prototypes = PROTOTYPES.clone()
        prototypes[2] = garbage
        plain = loss(z, Y, PROTOTYPES, VALID)
        (gradient,) = torch.autograd.grad(plain, z)
        other = loss(z, Y, prototypes, VALID)
        (other_gradient,) = torch.autograd.grad(other, z)
        assert torch.equal(plain, other)
        assert torch.equal(gradient, other_gradient)

    def test_no_valid_class_gives_a_zero_with_a_graph(self, loss, z):
        value = loss(z, Y, PROTOTYPES, torch.zeros(3, dtype=torch.bool))
        assert value.item() == 0.0
        value.backward()
        assert torch.equal(z.grad, torch.zeros_like(z))

    def test_all_classes_are_valid_by_default(self, loss, z):
        assert torch.equal(loss(z, Y, PROTOTYPES, None), loss(z, Y, PROTOTYPES, torch.ones(3, dtype=torch.bool)))

    def test_zero_embedding_on_its_prototype_has_a_finite_gradient(self, loss):
        z = torch.zeros(2, 3, requires_grad=True)
        value = loss(z, torch.tensor([0, 1]), torch.zeros(2, 3), None)
        value.backward()
        assert value.item() == pytest.approx(0.0, abs=3 * ROOT)
        assert torch.equal(z.grad, torch.zeros_like(z))

    def test_prototypes_get_no_gradient_when_they_are_buffers(self, loss, z):
        assert not PROTOTYPES.requires_grad
        assert loss(z, Y, PROTOTYPES, VALID).requires_grad

    def test_half_precision_embeddings_give_a_finite_float32(self, loss, z):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(z.bfloat16(), Y, PROTOTYPES, VALID)
        value.backward()
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert z.grad.isfinite().all()

    def test_large_half_precision_embeddings_do_not_overflow(self, loss):
        """300² is more than a float16 holds."""
        z = torch.full((2, 4), 300.0, dtype=torch.float16)
        assert loss(z, torch.tensor([0, 0]), torch.zeros(1, 4), None).isfinite()

    def test_batch_of_one(self, loss):
        assert loss(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), torch.zeros(1, 2), None) > 0

    def test_rejects_sizes_that_do_not_fit(self, loss, z):
        with pytest.raises(ValueError, match=r"`z` is \(4, 2\) but `prototypes` is \(3, 5\)"):
            loss(z, Y, torch.zeros(3, 5), VALID)


def test_unknown_reduction_is_refused(z):
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'max'"):
        prototype_alignment_loss(z, Y, PROTOTYPES, VALID, "max")


def test_distances_under_autocast_are_float32_and_exact():
    """bfloat16 would not tell 256 from 257."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        distances = prototype_distances(torch.tensor([[0.0]]), torch.tensor([[257.0], [256.0]]), torch.ones(2).bool())
    assert distances.tolist() == [[257.0, 256.0]]


# --- the term ----------------------------------------------


@pytest.mark.parametrize(
    ("distance", "value"), [("sample_mse", 2.75), ("sample_sq", 5.5), ("batch_proto_l2", math.sqrt(5) + math.sqrt(8))]
)
def test_term_takes_the_form_that_was_asked_for(z, distance, value):
    assert alignment(distance=distance)(None, forward(z)).item() == pytest.approx(value)


def test_term_without_prototypes_is_zero(z):
    term = alignment()
    term.receive(None, Message())
    assert term(None, forward(z)).item() == 0.0


def test_term_receives_a_copy(z):
    means = ClassMeans(PROTOTYPES.clone(), torch.tensor([1, 1, 0]))
    term = PrototypeAlignment()
    term.setup(host_of(3, 2))
    term.receive(None, Message({}, {"prototypes": means}))
    term.prototypes.zero_()
    assert torch.equal(means.mean, PROTOTYPES)


def test_what_a_term_received_is_not_part_of_a_clients_state():
    assert list(alignment().state_dict()) == []


def test_term_forgets_the_embeddings_of_the_fit_before_when_it_receives(z):
    """One resident module serves all clients: the fit before was another client's."""
    term = alignment(collection="running")
    host = fitting(in_last_epoch=True)
    term.observe(host, forward(z + 100))
    term.receive(None, Message())
    assert not term.send(host, None)["prototypes"].valid.any()
    term.observe(host, forward(z))
    sent = term.send(host, None)["prototypes"]
    assert sent.count.tolist() == [2, 1, 1]
    assert sent.mean.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 1.0]]


def test_running_means_are_over_the_last_epoch_only(z):
    term = alignment(collection="running")
    term.observe(fitting(in_last_epoch=False), forward(z + 100))
    term.observe(fitting(in_last_epoch=True), forward(z))
    sent = term.send(None, None)["prototypes"]
    assert sent.mean.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 1.0]]
    assert not sent.mean.requires_grad


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"weight": -1.0}, "weight"),
        ({"distance": "l1"}, "distance"),
        ({"collection": "pre"}, "collection"),
        ({"weighting": "equal"}, "weighting"),
        ({"missing": "zero"}, "missing"),
    ],
)
def test_term_rejects_unknown_options(option, named):
    with pytest.raises(ConfigError, match=f"PrototypeAlignment.{named}"):
        PrototypeAlignment(**option)
