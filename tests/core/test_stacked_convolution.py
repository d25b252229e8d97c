"""Convolutions of several clients as products of matrices: torch's own numbers."""

import pytest
import torch
from torch.func import vmap
from torch.nn.functional import conv2d

from fl_lightning.core.stacked_convolution import MOST, WindowedConvolutions, windowed


@pytest.mark.parametrize("stride", [1, (2, 3)])
@pytest.mark.parametrize("padding", [0, (2, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_several_clients_filters_give_what_each_gives_alone(stride, padding, biased):
    clients, x = 3, torch.randn(3, 4, 2, 9, 11, dtype=torch.float64)
    weight = torch.randn(clients, 5, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(clients, 5, dtype=torch.float64, requires_grad=True) if biased else None

    def one(x, weight, bias):
        with WindowedConvolutions():
            return conv2d(x, weight, bias, stride, padding)

    found = vmap(one, in_dims=(0, 0, 0 if biased else None))(x, weight, bias)
    expected = torch.stack(
        [conv2d(x[i], weight[i], None if bias is None else bias[i], stride, padding) for i in range(clients)]
    )
    torch.testing.assert_close(found, expected)
    given = [weight] if bias is None else [weight, bias]
    direction = torch.randn_like(expected)
    both = [torch.autograd.grad((out * direction).sum(), given) for out in (found, expected)]
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("channels", "options"),
    [(2, {"groups": 2}), (2, {"dilation": 2}), (2, {"padding": "same"}), (MOST, {}), (2, {"learns": True})],
)
def test_other_convolutions_are_torchs(channels, options, monkeypatch):
    learns, options = options.get("learns", False), {k: v for k, v in options.items() if k != "learns"}
    monkeypatch.setattr("fl_lightning.core.stacked_convolution.windowed", lambda *_: pytest.fail("not here"))
    x = torch.randn(1, channels, 6, 6, requires_grad=learns)
    weight = torch.randn(4, channels // options.get("groups", 1), 3, 3)
    with WindowedConvolutions():
        found = conv2d(x, weight, **options)
    assert torch.equal(found, conv2d(x, weight, **options))


def test_dilation_and_groups_stay_at_one():
    x, weight = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
    torch.testing.assert_close(windowed(x, weight), conv2d(x, weight))


def test_what_has_a_gradient_is_left_to_torch(monkeypatch):
    seen = []
    monkeypatch.setattr("fl_lightning.core.stacked_convolution.windowed", lambda *own: seen.append(own) or conv2d(*own))
    filters = [torch.randn(3, 2, 2, 3, 3, requires_grad=True) for _ in range(2)]

    def two(x, first, second):
        with WindowedConvolutions():
            return conv2d(conv2d(x, first), second).sum()

    vmap(two)(torch.randn(3, 1, 2, 7, 7), *filters)
    assert len(seen) == 1  # the first one's
