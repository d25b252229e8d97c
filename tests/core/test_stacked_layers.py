"""Layers of several clients at once: torch's own numbers."""

import pytest
import torch
from torch.func import vmap
from torch.nn.functional import batch_norm, conv2d

from fl_lightning.core.stacked_layers import MixedPrecision, WindowedConvolutions, windowed


@pytest.mark.parametrize("stride", [1, (2, 3)])
@pytest.mark.parametrize("padding", [0, (2, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_several_clients_filters_give_what_each_gives_alone(stride, padding, biased):
    clients, x = 3, torch.randn(3, 4, 2, 9, 11, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(clients, 5, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(clients, 5, dtype=torch.float64, requires_grad=True) if biased else None

    def one(x, weight, bias):
        with WindowedConvolutions(clients, 1 << 20):
            return conv2d(x, weight, bias, stride, padding)

    found = vmap(one, in_dims=(0, 0, 0 if biased else None))(x, weight, bias)
    expected = torch.stack(
        [conv2d(x[i], weight[i], None if bias is None else bias[i], stride, padding) for i in range(clients)]
    )
    torch.testing.assert_close(found, expected)
    given = [x, weight] if bias is None else [x, weight, bias]
    direction = torch.randn_like(expected)
    both = [torch.autograd.grad((out * direction).sum(), given) for out in (found, expected)]
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("options", [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"most": 200}, {"room": 500}])
def test_other_and_larger_convolutions_are_torchs(options, monkeypatch):
    options = dict(options)
    monkeypatch.setattr("fl_lightning.core.stacked_layers.windowed", lambda *_, **__: pytest.fail("not here"))
    monkeypatch.setattr("fl_lightning.core.stacked_layers.MOST", options.pop("most", 1 << 20))
    room = options.pop("room", 1 << 20)
    x, weight = torch.randn(1, 2, 6, 6), torch.randn(4, 2 // options.get("groups", 1), 3, 3)
    with WindowedConvolutions(2, room):
        found = conv2d(x, weight, **options)
    assert torch.equal(found, conv2d(x, weight, **options))


def test_windows_of_a_step_share_one_room(monkeypatch):
    seen = []
    monkeypatch.setattr("fl_lightning.core.stacked_layers.windowed", lambda *own: seen.append(own) or conv2d(*own))
    filters = [torch.randn(3, 2, 2, 3, 3) for _ in range(2)]  # 25 windows of 18 numbers, then 9

    def two(x, first, second):
        with WindowedConvolutions(3, 3 * 18 * 25 + 3 * 18 * 9 - 1):
            return conv2d(conv2d(x, first), second).sum()

    vmap(two)(torch.randn(3, 1, 2, 7, 7), *filters)
    assert len(seen) == 1


def test_dilation_and_groups_stay_at_one():
    x, weight = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
    torch.testing.assert_close(windowed(x, weight), conv2d(x, weight))


def test_mixed_precision_knows_stacked_convolutions_and_batch_norm():
    x, weight = torch.randn(3, 4, 2, 6, 6), torch.randn(3, 5, 2, 3, 3)
    mean, variance = torch.zeros(3, 5), torch.ones(3, 5)

    def one(x, weight, mean, variance):
        with torch.autocast("cpu", dtype=torch.bfloat16), MixedPrecision("cpu"):
            out = conv2d(x, weight)
            with torch.autocast("cpu", enabled=False):  # as somebody's step may say
                exact = conv2d(x, weight)
            return out, batch_norm(out, mean, variance, training=True), exact

    out, normed, exact = vmap(one)(x, weight, mean, variance)
    assert (out.dtype, normed.dtype, exact.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(out[1], conv2d(x[1].bfloat16(), weight[1].bfloat16()))
    torch.testing.assert_close(normed[1].mean((0, 2, 3)), torch.zeros(5), atol=1e-2, rtol=0)
    torch.testing.assert_close(mean[1], 0.1 * out[1].float().mean((0, 2, 3)))
