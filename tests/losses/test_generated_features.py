"""FedPA's terms and the parts of its server loss (BASELINES-B.md, section 3)."""

import math

import pytest
import torch
from sections import sectioned

from fl_lightning.core.facts import Facts
from fl_lightning.core.generating import label_shares
from fl_lightning.errors import ConfigError
from fl_lightning.losses.generated_features import (
    EarlyAlignment,
    GeneratedFeatures,
    diversity_loss,
    faded,
)
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedrep import FedRep


@pytest.mark.parametrize(("y", "expected"), [([0, 1], math.exp(-0.5)), ([1, 1], 1.0)])
def test_diversity_matches_hand_computed_value(y, expected):
    """b = 2, G = (0), (1), ε = (0), (1): exp(−(1 + 1)/4) = 0.60653; within a class nothing counts."""
    one = torch.tensor([[0.0], [1.0]])
    assert float(diversity_loss(one, one, torch.tensor(y))) == pytest.approx(expected, abs=1e-6)


def test_diversity_takes_means_over_values_and_pairs():
    """Three samples, classes 0, 0, 1; D = E = 2: 4 of 9 ordered pairs count, each 1 · 4."""
    features = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    value = diversity_loss(features, 2 * features, torch.tensor([0, 0, 1]))
    assert float(value) == pytest.approx(math.exp(-4 * 4 / 9), abs=1e-6)


def test_label_shares_sum_to_one_for_every_class():
    shares = label_shares(torch.tensor([[30, 0, 0], [9, 0, 5], [0, 0, 1]]))
    torch.testing.assert_close(shares.sum(0), torch.ones(3))
    assert shares[:, 0].tolist() == pytest.approx([31 / 42, 10 / 42, 1 / 42])
    assert shares[:, 1].tolist() == pytest.approx([1 / 3] * 3)


def test_weights_fade_by_2_percent_a_round_to_their_floor():
    rounds = [Facts(round=round) for round in (1, 2, 1000)]
    assert [EarlyAlignment().weight_at(facts) for facts in rounds] == [5.0, 5.0 * 0.98, 0.15]
    assert [GeneratedFeatures().weight_at(facts) for facts in rounds] == [25.0, 25.0 * 0.98, 1e-4]


def test_a_weight_of_zero_has_no_floor():
    assert faded(0.0, 0.15, 7) == 0.0
    assert EarlyAlignment(0.0).weight_at(Facts(round=3)) == 0.0


@pytest.mark.parametrize(
    ("term", "options", "key"),
    [
        (EarlyAlignment, {"weight": -1}, "weight"),
        (EarlyAlignment, {"steps": 0}, "steps"),
        (EarlyAlignment, {"collection": "never"}, "collection"),
        (GeneratedFeatures, {"noise_size": 0}, "noise_size"),
        (GeneratedFeatures, {"hidden": 0}, "hidden"),
        (GeneratedFeatures, {"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_values_are_refused(term, options, key):
    owner = "Generator" if key in ("noise_size", "hidden") else term.__name__
    with pytest.raises(ConfigError, match=rf"^{owner}\.{key}: must be"):
        term(**sectioned(term, **options))


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", [FedRep, Ditto])
def test_first_steps_are_those_of_the_phase_in_which_the_term_counts(mlp, run_federation, method, cohort):
    """A phase before it, of more mini-batches than the term counts in, takes none of them away."""
    terms = [EarlyAlignment(0.1, steps=1)]
    loop = run_federation(lambda: method(mlp(), extra_terms=terms), 3, cohort=cohort)
    assert loop.diary.rows[-1]["loss/early_alignment"] > 0
