"""Walks are torch's, whatever is shared, tied, missing or told by a module itself."""

import pytest
from torch import nn

from fl_lightning.core.walking import parameters_of, parts_of


class Hides(nn.Module):
    """Says by itself what it holds."""

    def __init__(self):
        super().__init__()
        self.hidden, self.shown = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield f"{prefix}.shown", self.shown


class Odd(nn.Module):
    """A layer twice, a weight tied, a child that is none."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
        self.none = None
        self.register_module("nothing", None)
        self.again = nn.ModuleList([self.one[1], nn.Linear(2, 2)])
        self.again[1].weight = self.one[0].weight
        self.last = nn.Parameter(self.one[0].bias.detach().clone())


@pytest.mark.parametrize("module", [Odd(), Hides(), nn.Sequential(nn.Linear(2, 2), Hides(), Odd()), nn.ReLU()])
def test_parts_and_parameters_are_torchs_in_their_order(module):
    assert [id(part) for part in parts_of(module)] == [id(part) for part in module.modules()]
    assert [id(parameter) for parameter in parameters_of(module)] == [id(own) for own in module.parameters()]
