"""Whatever clients send: means do not depend on order or on workers, and robust rules keep within what was sent."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import class_means, leaves, same, tensors

from fl_lightning.core.aggregation import ClassMeanRule, TensorMean, WeightedMean
from fl_lightning.core.aggregator import byzantine
from fl_lightning.core.centre_rules import CentredClipping, GeometricMedian, NormClipping
from fl_lightning.core.coordinate_rules import CoordinateMedian, TrimmedMean
from fl_lightning.core.message import Message
from fl_lightning.core.selection_rules import Bulyan, Krum

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
RULES = {
    "median": CoordinateMedian,
    "trimmed": lambda: TrimmedMean(0.2),
    "krum": lambda: Krum(0.2),
    "multi_krum": lambda: Krum(1, None),
    "bulyan": lambda: Bulyan(0.2),
    "geometric": GeometricMedian,
    "clipping": NormClipping,
    "centred": lambda: CentredClipping(iterations=2),
}
WITHIN = ("median", "trimmed", "krum", "multi_krum", "bulyan", "geometric")
"""Rules whose every value lies between the least and the largest that was sent."""


@st.composite
def rounds(draw, fewest=1, most=9, dtypes=(torch.float32,), spread=12, odd=False):
    """What clients send in a round: messages of the same names and shapes, with sample counts."""
    shapes = {name: draw(st.sampled_from([(), (3,), (2, 4), (0,)])) for name in "abc"[: draw(st.integers(1, 3))]}
    kinds = {name: draw(st.sampled_from(dtypes)) for name in shapes}
    found = []
    for _ in range(draw(st.integers(fewest, most))):
        weights = {name: draw(tensors([kinds[name]], [shape], odd, spread)) for name, shape in shapes.items()}
        found.append(Message(weights, {}, draw(st.integers(1, 10**6))))
    return found


def shuffled(values, seed):
    values = list(values)
    random.Random(seed).shuffle(values)
    return values


def mean_of(messages, parts=1):
    """The mean, folded in by so many workers."""
    means = [WeightedMean() for _ in range(parts)]
    for place, message in enumerate(messages):
        means[place % parts].add(message.weights, message.num_samples)
    for other in means[1:]:
        means[0].merge(other.partial())
    return means[0].result()


def equal(a, b):
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


# --- means ----------------------------------------------------------------------------------------------------------


@QUICK
@given(
    rounds(dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.int64)), st.integers(0, 2**32), st.integers(1, 4)
)
def test_mean_has_the_same_bits_in_any_order_and_on_any_number_of_workers(messages, seed, workers):
    once = mean_of(messages)
    assert equal(mean_of(shuffled(messages, seed)), once)
    assert equal(mean_of(shuffled(messages, seed + 1), workers), once)


@QUICK
@given(rounds(dtypes=(torch.float32,)))
def test_mean_is_the_weighted_mean_and_lies_within_what_was_sent(messages):
    total = sum(message.num_samples for message in messages)
    for name, mean in mean_of(messages).items():
        stacked = torch.stack([message.weights[name].double() for message in messages])
        shares = torch.tensor([message.num_samples / total for message in messages], dtype=torch.float64)
        wanted = (stacked * shares.view(-1, *[1] * mean.ndim)).sum(0)
        size = stacked.abs().amax(0) if mean.numel() else stacked.sum(0)
        assert ((mean.double() - wanted).abs() <= 1e-6 * size).all()
        if mean.numel():
            assert (mean.double() <= stacked.amax(0)).all()
            assert (mean.double() >= stacked.amin(0)).all()


@QUICK
@given(
    tensors([torch.float32, torch.float16, torch.bfloat16], odd=False, spread=40),
    st.lists(st.integers(1, 10**6), min_size=1),
)
def test_mean_of_equal_messages_is_that_message_bit_for_bit(tensor, samples):
    result = mean_of([Message({"w": tensor}, {}, count) for count in samples])["w"]
    assert same(result, tensor)


@QUICK
@given(st.data(), st.integers(0, 2**32), st.integers(1, 3))
def test_class_means_merge_alike_in_any_order_and_within_what_was_held(data, seed, workers):
    values = data.draw(st.lists(class_means(odd=False), min_size=1, max_size=6))
    weighting = data.draw(st.sampled_from(["count", "uniform"]))
    previous = data.draw(st.none() | class_means(odd=False))

    def merged(values, parts=1):
        rules = [ClassMeanRule(weighting, data_missing) for _ in range(parts)]
        for place, value in enumerate(values):
            rules[place % parts].add(value, 1)
        for other in rules[1:]:
            rules[0].merge(other.partial())
        return rules[0].result(previous)

    data_missing = data.draw(st.sampled_from(["keep", "drop"]))
    once = merged(values)
    for other in (merged(shuffled(values, seed)), merged(values, workers)):
        assert same(other.mean, once.mean)
        assert same(other.count, once.count)
    for row in range(4):
        held = (
            torch.stack([value.mean[row].double() for value in values if value.valid[row]])
            if any(value.valid[row] for value in values)
            else None
        )
        if held is not None:
            slack = 1e-6 * held.abs().amax(0)
            assert bool(once.valid[row])
            assert (once.mean[row] <= held.amax(0) + slack).all()
            assert (once.mean[row] >= held.amin(0) - slack).all()
        elif data_missing == "keep" and previous is not None:
            assert same(once.mean[row], previous.mean[row].float())
            assert bool(once.valid[row]) == bool(previous.valid[row])
        else:
            assert not bool(once.valid[row])


@QUICK
@given(
    st.lists(tensors([torch.float32], [(3,)], odd=False), min_size=1, max_size=6), st.integers(0, 2**32), st.booleans()
)
def test_tensor_means_do_not_depend_on_order(values, seed, uniform):
    pairs = [(value, place + 1) for place, value in enumerate(values)]
    results = []
    for order in (pairs, shuffled(pairs, seed)):
        rule = TensorMean(uniform)
        for value, samples in order:
            rule.add(value, samples)
        results.append(rule.result(None))
    assert same(*results)


# --- robust rules ---------------------------------------------------------------------------------------------------


def treated(name, messages):
    previous = Message({name: torch.zeros_like(tensor) for name, tensor in messages[0].weights.items()})
    made = RULES[name]().treat(messages, previous)
    assert len(made) == len(messages)
    return made[0].weights


@pytest.mark.parametrize("name", RULES)
@settings(QUICK, max_examples=8)
@given(messages=rounds(spread=4), seed=st.integers(0, 2**32))
def test_rule_does_not_depend_on_order_and_keeps_within_what_was_sent(name, messages, seed):
    least = RULES[name]().least(len(messages))
    if len(messages) < least:
        messages = [messages[place % len(messages)] for place in range(least)]
    once, other = treated(name, messages), treated(name, shuffled(messages, seed))
    assert once.keys() == messages[0].weights.keys()
    for key, value in once.items():
        stacked = torch.stack([message.weights[key].double() for message in messages])
        assert value.dtype == messages[0].weights[key].dtype
        assert value.shape == messages[0].weights[key].shape
        if not value.numel():
            continue
        slack = 1e-5 * stacked.abs().amax(0) + 1e-12
        if name not in ("krum", "multi_krum", "bulyan"):  # of clients with equal scores the first counts
            assert ((other[key].double() - value.double()).abs() <= slack).all()
        if name in WITHIN:
            assert (value.double() <= stacked.amax(0) + slack).all()
            assert (value.double() >= stacked.amin(0) - slack).all()
        if name == "median":
            assert same(value, other[key])  # no sum is taken over clients


@pytest.mark.parametrize("name", RULES)
@settings(QUICK, max_examples=6)
@given(message=rounds(fewest=1, most=1, spread=4), copies=st.integers(1, 12))
def test_one_client_or_many_equal_ones_are_themselves(name, message, copies):
    copies = max(copies, RULES[name]().least(copies))
    made = treated(name, message * copies)
    for key, value in made.items():
        tensor = message[0].weights[key]
        assert torch.allclose(value, tensor, rtol=1e-6, atol=0), (value, tensor)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("untrimmed", "clipping", "centred")])
@settings(QUICK, max_examples=8)
@given(messages=rounds(fewest=11, most=11, spread=2), size=st.sampled_from([1e3, 1e6, -1e30]), seed=st.integers(0, 99))
def test_one_client_that_lies_cannot_pull_a_value_out_of_what_the_others_sent(name, messages, size, seed):
    liar = Message({key: torch.full_like(tensor, size) for key, tensor in messages[0].weights.items()}, {}, 10**6)
    honest, place = messages[1:], seed % 11
    made = treated(name, [*honest[:place], liar, *honest[place:]])
    for key, value in made.items():
        if value.numel():
            stacked = torch.stack([message.weights[key].double() for message in honest])
            reach = 1e-3 * (stacked.amax(0) - stacked.amin(0)) + 1e-3 * stacked.abs().amax(0) + 1e-6
            assert (value.double() <= stacked.amax(0) + reach).all()
            assert (value.double() >= stacked.amin(0) - reach).all()


@QUICK
@given(st.lists(class_means(odd=False), min_size=1, max_size=7), st.sampled_from(sorted(RULES)), st.integers(0, 2**32))
def test_class_means_through_a_rule_hold_the_classes_that_were_held(values, name, seed):
    least = RULES[name]().least(len(values))
    values = [values[place % len(values)] for place in range(max(len(values), least))]
    messages = [Message({}, {"means": value}, 1) for value in values]
    made = RULES[name]().treat(messages, Message())
    holders = torch.stack([value.valid for value in values]).sum(0)
    after = torch.stack([message.artifacts["means"].valid for message in made]).sum(0)
    if name not in ("krum", "multi_krum", "bulyan"):  # those leave clients out
        assert after.tolist() == holders.tolist()
    assert all(torch.isfinite(tensor).all() for message in made for tensor in leaves(message).values())


@QUICK
@given(st.floats(0, 0.499), st.integers(0, 1000))
def test_so_many_may_lie_is_a_share_rounded_up(share, participants):
    number = byzantine(share, participants)
    assert number - 1 < share * participants <= number + 1e-6
