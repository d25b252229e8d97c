"""Convolutions on maps smaller than their kernels: what torch's own come to, without what meets padding alone."""

import pytest
import torch
from torch import nn

from fl_lightning.losses.distillation import CrossLayerFusion
from fl_lightning.models.small_maps import convolved, reached


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (2, 3), (4, 4), (6, 6)])
def test_maps_and_gradients_are_those_of_the_whole_convolution(kernel, size):
    layer = nn.Conv2d(3, 4, kernel, padding=kernel // 2, dtype=torch.float64)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    inputs = [x, layer.weight, layer.bias]
    ours, theirs = convolved(layer, x), layer(x)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("size", "left"), [((1, 1), (1, 1)), ((1, 9), (1, 7)), ((2, 3), (3, 5)), ((4, 4), (7, 7))])
def test_what_never_meets_the_map_is_left_out(size, left):
    weight = torch.arange(49.0).view(1, 1, 7, 7)
    cut = reached(weight, torch.empty(1, 1, *size))
    assert cut.shape[2:] == left
    assert cut[0, 0, left[0] // 2, left[1] // 2] == 24  # the middle stays the middle


def test_a_module_that_is_no_convolution_is_called_as_it_is():
    assert torch.equal(convolved(nn.ReLU(), -torch.ones(1, 1, 1, 1)), torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize("options", [{}, {"recursive": True}, {"smooth_convs": 2}])
def test_vectors_are_fused_by_the_middles_of_the_kernels(options):
    fusion = CrossLayerFusion([5, 6], 4, **options).double()
    vectors = [torch.randn(2, size, 1, 1, dtype=torch.float64) for size in (5, 6)]
    small = fusion(vectors)
    for layer in fusion.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
            middle = torch.zeros(3, 3)
            middle[1, 1] = 1
            layer.weight.data *= middle
    large = fusion([own.expand(-1, -1, 2, 2) for own in vectors])  # whose positions see nothing of each other
    for own, other in zip(small, large, strict=True):
        torch.testing.assert_close(own.expand(-1, -1, 2, 2), other)
