"""FedPA's generator (BASELINES-B.md, section 3)."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.models.generator import FeatureGenerator, generate, num_generator_values


@pytest.mark.parametrize(("sizes", "count"), [((10, 32, 32, 256), 19_744), ((10, 512, 32, 256), 143_104)])
def test_generator_has_the_published_size(sizes, count):
    generator = FeatureGenerator(*sizes)
    assert sum(p.numel() for p in generator.parameters()) == count
    assert generator.flattened().numel() == count == num_generator_values(*sizes)


def test_flattened_generator_is_the_generator_in_eval_mode():
    generator = FeatureGenerator(num_classes=3, embedding_size=4, noise_size=2, hidden=5)
    for _ in range(9):  # moves the running statistics
        generator(3 * torch.rand(6, 2), torch.randint(3, (6,)))
    generator.norm.weight.data.uniform_(-2, 2)
    generator.norm.bias.data.uniform_(-2, 2)
    noise, y = torch.rand(8, 2), torch.randint(3, (8,))
    values = generator.flattened()
    assert not values.requires_grad
    torch.testing.assert_close(generate(values, noise, y, 3, 4), generator.eval()(noise, y).detach())


def test_generator_refuses_an_empty_layer():
    with pytest.raises(ConfigError, match="noise_size: must be >= 1"):
        FeatureGenerator(10, 32, noise_size=0)
