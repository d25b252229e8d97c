"""FedCPD's prototype contrast: the specification's numbers (section 8) and edges."""

import math

import pytest
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Method
from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import PrototypeAlignment, PrototypeContrast, prototype_contrast_loss

PROTOTYPES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]])


def contrast(z, y, prototypes=PROTOTYPES, temperature=0.5, valid=None):
    valid = None if valid is None else torch.tensor(valid)
    return prototype_contrast_loss(torch.as_tensor(z), torch.tensor(y), prototypes, temperature, valid)


@pytest.mark.parametrize(
    ("z", "y", "valid", "expected"),
    [
        ([[3.0, 4.0]], [0], None, 0.9296),
        ([[3.0, 4.0]], [1], None, 0.5296),
        ([[3.0, 4.0]], [2], None, 4.1095),
        ([[3.0, 4.0]], [1], [True, True, False], 0.5130),
    ],
)
def test_contrast_matches_hand_computed_value(z, y, valid, expected):
    assert contrast(z, y, valid=valid).item() == pytest.approx(expected, abs=1e-4)


def test_contrast_of_two_orthogonal_prototypes():
    assert contrast([[1.0, 0.0]], [0], torch.eye(2)).item() == pytest.approx(0.1269, abs=1e-4)


def test_gradient_matches_hand_computed_value_and_is_orthogonal_to_z():
    z = torch.tensor([[3.0, 4.0]], requires_grad=True)
    contrast(z, [1]).backward()
    assert z.grad[0].tolist() == pytest.approx([0.1792, -0.1344], abs=1e-4)
    assert (z.grad * z.detach()).sum().item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("valid", [None, [True, False, True], [False, True, False], [False] * 3])
def test_gradients_match_finite_differences(valid):
    z = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    y = [0, 1, 2, 1]
    assert torch.autograd.gradcheck(lambda v: contrast(v, y, PROTOTYPES.double(), 0.3, valid), z)


def test_only_directions_count():
    z, y = torch.randn(5, 2), [0, 1, 2, 1, 0]
    scaled = PROTOTYPES * torch.tensor([[3.0], [0.1], [7.0]])
    assert contrast(4.0 * z, y, scaled).item() == pytest.approx(contrast(z, y).item(), abs=1e-5)


def test_range_with_ten_classes():
    """The best case is one direction against nine opposite ones, the worst the reverse."""
    prototypes = torch.tensor([[1.0, 0.0]] + [[-1.0, 0.0]] * 9)
    assert contrast([[1.0, 0.0]], [0], prototypes).item() == pytest.approx(0.1526, abs=1e-4)
    assert contrast([[-1.0, 0.0]], [0], prototypes).item() == pytest.approx(6.1993, abs=1e-4)
    random = torch.randn(200, 6)
    losses = [contrast(random[i : i + 1], [i % 10], torch.randn(10, 6)).item() for i in range(200)]
    assert min(losses) >= 0.1526
    assert max(losses) <= 6.1993


def test_vector_without_direction_costs_the_log_of_the_valid_classes_and_has_no_gradient():
    z = torch.tensor([[0.0, 0.0], [1e-9, 0.0]], requires_grad=True)
    loss = contrast(z, [0, 1], valid=[True, True, False])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert torch.equal(z.grad, torch.zeros(2, 2))


def test_prototype_without_direction_is_orthogonal_to_all():
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert contrast([[1.0, 0.0]], [1], prototypes).item() == pytest.approx(math.log(1 + math.exp(2.0)))


def test_sample_of_an_invalid_class_adds_nothing_and_stays_in_the_denominator():
    both = contrast([[3.0, 4.0], [3.0, 4.0]], [1, 2], valid=[True, True, False])
    assert both.item() == pytest.approx(0.5130 / 2, abs=1e-4)


def test_stored_vectors_of_invalid_classes_mean_nothing():
    other = PROTOTYPES.clone()
    other[2] = torch.tensor([torch.nan, torch.inf])
    z = torch.randn(4, 2, requires_grad=True)
    y, valid = [0, 1, 1, 0], [True, True, False]
    loss = contrast(z, y, other, valid=valid)
    assert torch.equal(loss, contrast(z, y, valid=valid))
    loss.backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("valid", [[False] * 3, [True, False, False]])
def test_none_or_one_valid_class_costs_nothing_and_keeps_the_graph(valid):
    z = torch.randn(2, 2, requires_grad=True)
    loss = contrast(z, [0, 0], valid=valid)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-7)
    assert z.grad.abs().max().item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contrast_is_computed_in_float32_under_autocast(dtype):
    z = torch.tensor([[300.0, 400.0]], dtype=dtype, requires_grad=True)  # its squared norm is beyond float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrast(z, [1])
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.5296, abs=1e-4)
    assert z.grad.isfinite().all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"`z` is \(1, 3\) but `prototypes` is \(3, 2\)"):
        contrast([[1.0, 2.0, 3.0]], [0])
    with pytest.raises(ValueError, match="`temperature` must be > 0, got 0"):
        contrast([[1.0, 2.0]], [0], temperature=0)
    with pytest.raises(ConfigError, match=r"PrototypeContrast.temperature: must be > 0, got 0"):
        PrototypeContrast(temperature=0)


# --- the term -------------------------------------------------------------------------------------------------------


def test_term_applies_the_loss_to_what_it_received(mlp, make_client):
    term = PrototypeContrast(temperature=0.5)
    client = make_client(Method(mlp(hidden=(2,), num_classes=3), extra_terms=[term]))
    term.receive(client.method, Message({}, {"prototypes": ClassMeans(PROTOTYPES, torch.tensor([4, 1, 0]))}))
    out = client.step(torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])).forward()
    expected = prototype_contrast_loss(out.z, out.y, PROTOTYPES, 0.5, torch.tensor([True, True, False]))
    assert torch.equal(term(client.method, out), expected)


def test_terms_that_share_prototypes_must_agree_on_how_they_are_made(mlp, make_client):
    with pytest.raises(ConfigError, match=r"method.extra_terms.weighting: prototype_alignment and prototype_contrast"):
        make_client(Method(mlp(), extra_terms=[PrototypeAlignment(weighting="uniform"), PrototypeContrast()]))
    make_client(Method(mlp(), extra_terms=[PrototypeAlignment(0.0, weighting="uniform"), PrototypeContrast()]))


def test_terms_that_share_prototypes_send_them_once(mlp, run_federation):
    both = run_federation(lambda: Method(mlp(), extra_terms=[PrototypeAlignment(), PrototypeContrast(0.1)]), rounds=1)
    one = run_federation(lambda: Method(mlp(), extra_terms=[PrototypeContrast(0.1)]), rounds=1)
    assert both.traffic == one.traffic
    assert set(both.diary.sent[1, 0].artifacts) == {"prototypes"}
