"""Models that no machine can hold are refused before they take any memory."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.sizes import check_memory, largest


def test_largest_number_counts_lengths_and_whole_numbers():
    assert largest({"a": [1, [7, 3]], "b": {"c": 5.5, "d": "9", "e": None}}) == 7
    assert largest([1] * 20) == 20
    assert largest({}) == 0


def test_model_that_the_machine_cannot_hold_is_refused_at_once():
    rule = r"^model: needs 12,3\d\d GiB for a client, and this machine has \S+; make it smaller$"
    with pytest.raises(ConfigError, match=rule):
        check_memory(lambda: nn.Linear(2**20, 2**20 + 2**13), {"hidden": [2**20]}, "model")


def test_rest_is_not_even_made(monkeypatch):
    check_memory(lambda: 1 / 0, {"hidden": [128, 64]}, "model")  # small
    check_memory(lambda: nn.Linear(4096, 8), {"hidden": 4096}, "model")  # fits
    check_memory(lambda: nn.Linear(int(torch.ones(1).item()), 8), {"hidden": 4096}, "model")  # looks at values
