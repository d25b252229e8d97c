import math

import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.forward import Forward
from fl_lightning.core.term import CrossEntropy, Term, Terms
from fl_lightning.errors import ConfigError


def forward(logits, y):
    logits = torch.as_tensor(logits)
    return Forward(torch.zeros(len(y), 1), torch.tensor(y), [], torch.zeros(len(y), 1), logits)


class HTMLPage2Term(Term):
    pass


def test_cross_entropy_matches_hand_computed_value():
    """log(1 + e^-1) for logits (1, 0) and class 0, and log 2 for equal logits; the mean of both."""
    term = CrossEntropy()
    assert term(None, forward([[1.0, 0.0]], [0])).item() == pytest.approx(0.3133, abs=5e-5)
    both = term(None, forward([[1.0, 0.0], [3.0, 3.0]], [0, 1])).item()
    assert both == pytest.approx((math.log1p(math.exp(-1)) + math.log(2)) / 2)


def test_cross_entropy_of_half_precision_logits_is_float32():
    assert CrossEntropy()(None, forward(torch.zeros(2, 3, dtype=torch.bfloat16), [0, 1])).dtype == torch.float32


def test_a_terms_name_is_its_class_in_snake_case():
    assert CrossEntropy().name == "cross_entropy"
    assert HTMLPage2Term().name == "htmlpage2_term"


@pytest.mark.parametrize("weight", [-1.0, -1e-9, float("nan")])
def test_a_terms_weight_must_not_be_negative(weight):
    with pytest.raises(ConfigError, match=r"CrossEntropy.weight.*>= 0"):
        CrossEntropy(weight)


def test_a_term_that_says_nothing_more_has_no_artifact_and_keeps_its_weight():
    term = HTMLPage2Term(0.5)
    assert (term.exchanges, HTMLPage2Term(0.0).exchanges) == (True, False)
    assert term.weight_at(Facts(round=7)) == 0.5
    assert (term.rules(), term.interface(None), term.send(None, None), term.drawn(None, None)) == ({}, {}, {}, {})
    with pytest.raises(NotImplementedError):
        term(None, None)


class Nameless(Term):
    def send(self, host, data):
        return torch.ones(2)


def test_what_a_term_sends_without_a_name_is_said_of_the_term():
    """The line of the method's file that sends was named."""
    with pytest.raises(ConfigError, match=r"^method: Nameless\.send\(\) must give .* \{name: artifact\}, got 'Tensor'"):
        Terms([Nameless()]).send(None, None)


def test_terms_are_the_cross_entropy_the_methods_and_the_extra_ones():
    class Own(Term):
        pass

    terms = Terms([Own(0.0)], [HTMLPage2Term(2.0)])
    assert [term.name for term in terms] == ["cross_entropy", "own", "htmlpage2_term"]
    assert terms.cross_entropy is terms[0]
    assert terms.exchanging == [terms[0], terms[2]]
    assert terms.extra == [terms[2]]
    assert Terms().extra == []


def test_a_term_in_the_cross_entropys_place_comes_last_and_is_no_extra_one():
    """So that the others keep their places, and their names in a state dict."""

    class Own(Term):
        pass

    terms = Terms([Own()], [HTMLPage2Term(2.0)], instead=Term())
    assert [term.name for term in terms] == ["cross_entropy", "own", "htmlpage2_term", "term"]
    assert terms.extra == [terms[2]]
    assert (terms.has_instead, Terms().has_instead) == (True, False)
    with pytest.raises(ConfigError, match="each term may occur once only"):
        Terms(extra=[Own()], instead=Own())


# --- forward ----------------------------------------------


def test_wide_pass_is_in_float32_and_remembers_what_layers_take():
    narrow = forward(torch.zeros(2, 3, dtype=torch.bfloat16), [0, 1])
    narrow.z = narrow.z.bfloat16()
    wide = narrow.wide()
    assert (wide.z.dtype, wide.logits.dtype, wide.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert wide.wide() is wide
    for dtype in (torch.float32, torch.float64):
        same = forward(torch.zeros(2, 3, dtype=dtype), [0, 1])
        assert same.wide() is same


def test_further_passes_take_the_type_and_the_precision_of_the_first():
    """Floating-point inputs are narrowed; classes and what is no tensor are not."""
    seen = []

    def network(*inputs):
        seen.extend([*(getattr(x, "dtype", None) for x in inputs), torch.is_autocast_enabled("cpu")])

    out = forward(torch.zeros(2, 3), [0, 1])
    out.z = out.z.bfloat16()
    out.precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    out.wide().through(network, torch.zeros(2), torch.tensor([1]), 7)
    assert seen == [torch.bfloat16, torch.int64, None, True]
