import pytest
import torch
from tiny_models import count_parameters

from fl_lightning.errors import ConfigError
from fl_lightning.models.cbam import CBAM


def ones_mlp():
    """CBAM of one channel: MLP weights 1, biases 0, spatial convolution 0 (specification, test 4)."""
    cbam = CBAM(1)
    with torch.no_grad():
        for name, parameter in cbam.named_parameters():
            parameter.fill_(1.0 if name.startswith("mlp") and name.endswith("weight") else 0.0)
    return cbam


@pytest.mark.parametrize(("channels", "expected"), [(32, 260), (64, 678), (1, 2 * 1 + 1 + 1 + 98)])
def test_parameter_count_matches_the_specification(channels, expected):
    assert count_parameters(CBAM(channels)) == expected


def test_refined_map_matches_hand_computed_value():
    x = torch.tensor([[[[0.0, 0.0], [0.0, 4.0]]]])
    cbam = ones_mlp()
    assert cbam.channel_gate(x).item() == pytest.approx(0.9933, abs=1e-4)  # sigmoid(mean 1 + max 4)
    assert cbam(x)[0, 0, 1, 1].item() == pytest.approx(1.9866, abs=1e-4)
    assert cbam(x).count_nonzero() == 1


def test_all_zero_parameters_give_a_quarter_of_the_map():
    cbam = CBAM(8)
    for parameter in cbam.parameters():
        parameter.data.zero_()
    x = torch.randn(2, 8, 5, 4)
    assert torch.equal(cbam(x), 0.25 * x)


def test_gates_have_the_shape_of_what_they_gate_and_lie_between_0_and_1():
    x = 3 * torch.randn(4, 8, 5, 6)
    cbam = CBAM(8)
    channel, spatial = cbam.channel_gate(x), cbam.spatial_gate(x)
    assert channel.shape == (4, 8, 1, 1)
    assert spatial.shape == (4, 1, 5, 6)
    for gate in (channel, spatial):
        assert ((gate > 0) & (gate < 1)).all()
    assert torch.equal(cbam(x), (x * channel) * cbam.spatial_gate(x * channel))


def test_a_sample_does_not_depend_on_the_others_of_its_batch():
    x = torch.randn(3, 8, 5, 5)
    cbam = CBAM(8)
    assert torch.allclose(cbam(x)[1:2], cbam(x[1:2]), atol=1e-6)


def test_gradients_match_finite_differences():
    cbam = CBAM(3, reduction=1, kernel_size=3).double()
    assert torch.autograd.gradcheck(cbam, torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("x", [torch.zeros(1, 8, 4, 4), torch.full((1, 8, 4, 4), 1e4), torch.zeros(1, 8, 1, 1)])
def test_edges_stay_finite(x):
    x.requires_grad_()
    out = CBAM(8)(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 0}, r"CBAM.channels: must be >= 1, got 0"),
        ({"channels": 4, "reduction": 0}, r"CBAM.reduction: must be >= 1, got 0"),
        ({"channels": 4, "kernel_size": 4}, r"CBAM.kernel_size: must be odd, got 4"),
    ],
)
def test_bad_values_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CBAM(**arguments)
