import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fl_lightning.core.aggregation import (
    ArtifactRule,
    ClassMeanRule,
    KindRule,
    RunningSum,
    TensorMean,
    WeightedMean,
    default_rule,
)
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.message import ClassMeans, Flat, Message, Structured, artifact
from fl_lightning.core.server import Server
from fl_lightning.errors import ConfigError


@artifact
@dataclass(frozen=True)
class Chain(Structured):
    """A kind that is merged by its own word: all links, in the order of clients, behind last round's."""

    links: torch.Tensor

    @classmethod
    def merge(cls, values, previous):
        before = [] if previous is None else [previous.links]
        return cls(torch.cat([*before, *(torch.cat([value.links, torch.tensor([size])]) for value, size in values)]))


def weighted_mean(*parts):
    mean = WeightedMean()
    for weights, num_samples in parts:
        mean.add(weights, num_samples)
    return mean.result()


def merge(*means, previous=None, **options):
    rule = ClassMeanRule(**options)
    for value in means:
        rule.add(value, int(value.count.sum()))
    return rule.result(previous)


def random_weights(generator):
    """Tensors whose entries differ by twelve orders of magnitude."""
    scale = 10 ** torch.empty(40).uniform_(-6, 6, generator=generator)
    values = torch.randn(40, generator=generator) * scale
    return {"a": values[:30].reshape(5, 6), "b": values[30:]}


# --- sums ----------------------------------------------


def test_exact_sum_keeps_what_float64_rounds_away():
    """1e30 + 1 - 1e30 is 0 in float64; the two-sum remembers the 1."""
    total = ExactSum()
    for value in (1e30, 1.0, -1e30):
        total.add(torch.tensor([value], dtype=torch.float64), 1.0)
    assert total.value(1.0).item() == 1.0


def test_exact_sum_covers_tensors_larger_than_one_block():
    total = ExactSum()
    values = torch.arange((1 << 16) + 3, dtype=torch.float32)
    total.add(values, 2.0)
    total.add(values, 1.0)
    assert torch.equal(total.value(3.0), values.double())


def test_exact_sum_of_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="nothing was added"):
        ExactSum().value(1.0)


def test_exact_sum_leaves_its_inputs_alone():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    ExactSum().add(values, 5.0)
    assert values.tolist() == [1.0, 2.0]


# --- weights ----------------------------------------------


def test_weighted_mean_matches_hand_computed_value():
    """(1·[1, 3] + 3·[5, -1]) / 4 = [16, 0] / 4."""
    mean = weighted_mean(({"w": torch.tensor([1.0, 3.0])}, 1), ({"w": torch.tensor([5.0, -1.0])}, 3))
    assert mean["w"].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("counts", [(1, 3), (7, 11, 13), (1, 1, 1), (12_345, 1, 999_999, 3), (49,) * 10])
def test_mean_of_equal_weights_is_the_weights_bit_for_bit(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    for _ in range(20):
        weights = random_weights(generator)
        mean = weighted_mean(*((weights, count) for count in counts))
        assert all(torch.equal(mean[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mean_of_equal_weights_is_the_weights_in_other_dtypes(dtype):
    weights = {"w": torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)}
    mean = weighted_mean((weights, 7), (weights, 11), (weights, 13))
    assert mean["w"].dtype == dtype
    assert torch.equal(mean["w"], weights["w"])


def test_mean_by_fractions_depends_neither_on_the_order_nor_on_workers():
    generator = torch.Generator().manual_seed(0)
    parts = [({"w": torch.randn(20_000, generator=generator)}, weight) for weight in (0.1, 0.7, 0.3, 1e-3, 2.2)]
    results = []
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        whole, first, second = WeightedMean(), WeightedMean(), WeightedMean()
        for place, index in enumerate(order):
            whole.add(*parts[index])
            (first if place < 2 else second).add(*parts[index])
        second.merge(first.partial())
        results += [whole.result()["w"], second.result()["w"]]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_worker_whose_clients_weigh_nothing_still_counts_what_is_counted():
    a, b = WeightedMean(), WeightedMean()
    a.add({"w": torch.ones(2), "n": torch.tensor(3)}, 2.0)
    b.add({"w": torch.zeros(2), "n": torch.tensor(9)}, 0.0)
    a.merge(b.partial())
    assert (a.result()["w"].tolist(), int(a.result()["n"])) == ([1.0, 1.0], 9)


def test_weighted_mean_does_not_depend_on_client_order():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        parts = [(random_weights(generator), 1 + int(torch.randint(999, (), generator=generator))) for _ in range(6)]
        first = weighted_mean(*parts)
        for _ in range(5):
            order = torch.randperm(6, generator=generator).tolist()
            again = weighted_mean(*(parts[i] for i in order))
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_weighted_mean_goes_by_names_and_not_by_their_order():
    """Two clients of different architectures may register what they share in another order."""
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([10.0])}
    two = {"b": torch.tensor([30.0]), "a": torch.tensor([3.0])}
    mean = weighted_mean((one, 1), (two, 1))
    assert (mean["a"].item(), mean["b"].item()) == (2.0, 20.0)


def test_batch_norm_buffers_are_averaged_and_their_counter_takes_the_maximum():
    """running_var: (1·2 + 3·6) / 4 = 5; the counter stays int64."""

    def state(variance, seen):
        return {"running_var": torch.tensor([variance]), "num_batches_tracked": torch.tensor(seen)}

    mean = weighted_mean((state(2.0, 4), 1), (state(6.0, 9), 3), (state(6.0, 5), 0))
    assert mean["running_var"].tolist() == [5.0]
    assert mean["num_batches_tracked"].dtype == torch.int64
    assert mean["num_batches_tracked"].item() == 9


def test_weighted_mean_keeps_names_shapes_and_dtypes():
    weights = {"z": torch.randn(2, 3, 4), "n": torch.tensor([3, 4]), "a": torch.tensor(1.5), "e": torch.zeros(0)}
    mean = weighted_mean((weights, 3), (weights, 4))
    assert list(mean) == list(weights)
    assert {n: (t.shape, t.dtype) for n, t in mean.items()} == {n: (t.shape, t.dtype) for n, t in weights.items()}


def test_weighted_mean_of_integers_only():
    assert weighted_mean(({"n": torch.tensor(3)}, 1), ({"n": torch.tensor(2)}, 5))["n"].item() == 3


def test_weighted_mean_changes_no_message():
    weights = {"w": torch.tensor([1.0]), "n": torch.tensor(3)}
    weighted_mean((weights, 3), ({"w": torch.tensor([9.0]), "n": torch.tensor(8)}, 4))
    assert (weights["w"].item(), weights["n"].item()) == (1.0, 3)


def test_weighted_mean_rejects_other_names():
    mean = WeightedMean()
    mean.add({"a": torch.zeros(2), "b": torch.zeros(2)}, 1)
    with pytest.raises(ValueError, match=r"same names.*'c'"):
        mean.add({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}, 1)


def test_weighted_mean_rejects_other_shapes_of_the_same_size():
    mean = WeightedMean()
    mean.add({"a": torch.zeros(2, 3)}, 1)
    with pytest.raises(ValueError, match=r"same shapes.*'a'.*\(2, 3\) and \(3, 2\)"):
        mean.add({"a": torch.zeros(3, 2)}, 1)


def test_weighted_mean_is_empty_until_samples_came_in():
    mean = WeightedMean()
    assert mean.empty
    mean.add({"a": torch.zeros(1)}, 0)
    assert mean.empty
    mean.add({"a": torch.zeros(1)}, 2)
    assert not mean.empty


# --- artifacts ----------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("count", [1.5, 1.0]), ("uniform", [1.0, 2.0]), ("count_over_holders", [0.75, 0.5])],
)
def test_class_means_merge_to_hand_computed_value(weighting, expected):
    """(2, 0) from 30 samples and (0, 4) from 10: weights 3/4 and 1/4, or 1/2 each, or 3/8 and 1/8."""
    one = ClassMeans(torch.tensor([[2.0, 0.0]]), torch.tensor([30]))
    two = ClassMeans(torch.tensor([[0.0, 4.0]]), torch.tensor([10]))
    assert merge(one, two, weighting=weighting).mean.tolist() == [expected]


def test_class_held_by_one_client_keeps_its_mean_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 50, generator=generator)
    holder = ClassMeans(rows, torch.tensor([7, 13, 999]))
    other = ClassMeans(torch.zeros(3, 50), torch.zeros(3, dtype=torch.long))
    for weighting in ("count", "uniform", "count_over_holders"):
        assert torch.equal(merge(other, holder, weighting=weighting).mean, rows)


def test_weighting_by_equal_counts_is_uniform():
    generator = torch.Generator().manual_seed(0)
    parts = [ClassMeans(torch.randn(2, 5, generator=generator), torch.tensor([6, 6])) for _ in range(4)]
    torch.testing.assert_close(merge(*parts, weighting="count").mean, merge(*parts, weighting="uniform").mean)


def test_count_over_holders_is_the_weighted_mean_over_the_number_of_holders():
    generator = torch.Generator().manual_seed(1)
    parts = [ClassMeans(torch.randn(2, 5, generator=generator), torch.tensor([n, 3 * n])) for n in (2, 5, 9)]
    torch.testing.assert_close(
        merge(*parts, weighting="count_over_holders").mean, merge(*parts, weighting="count").mean / 3
    )


def test_merging_means_of_parts_gives_the_mean_of_the_whole():
    generator = torch.Generator().manual_seed(2)
    z, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    parts = [ClassMeans.from_samples(z[s], y[s], 3) for s in (slice(0, 7), slice(7, 30), slice(30, 60))]
    torch.testing.assert_close(merge(*parts).mean, ClassMeans.from_samples(z, y, 3).mean)


@pytest.mark.parametrize("weighting", ["count", "uniform", "count_over_holders"])
def test_merged_class_means_do_not_depend_on_client_order(weighting):
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 50, (4, 3), generator=generator)
    scale = 10 ** torch.empty(4, 3, 8).uniform_(-5, 5, generator=generator)
    parts = [ClassMeans(m, c) for m, c in zip(torch.randn(4, 3, 8, generator=generator) * scale, counts, strict=True)]
    results = [merge(*order, weighting=weighting).mean for order in itertools.permutations(parts)]
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_rows_of_absent_classes_do_not_count(garbage):
    bad = ClassMeans(torch.tensor([[1.0], [garbage]]), torch.tensor([2, 0]))
    good = ClassMeans(torch.tensor([[4.0], [5.0]]), torch.tensor([1, 1]))
    assert merge(bad, good).mean.tolist() == [[2.0], [5.0]]


def test_class_that_nobody_held_keeps_its_previous_mean():
    previous = ClassMeans(torch.tensor([[8.0], [9.0], [0.0]]), torch.tensor([1, 1, 0]))
    now = ClassMeans(torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([4, 0, 0]))
    kept = merge(now, previous=previous, missing="keep")
    assert kept.mean.tolist() == [[1.0], [9.0], [0.0]]
    assert kept.valid.tolist() == [True, True, False]


def test_class_that_nobody_held_is_dropped_if_asked_for():
    previous = ClassMeans(torch.tensor([[8.0], [9.0]]), torch.tensor([1, 1]))
    now = ClassMeans(torch.tensor([[1.0], [0.0]]), torch.tensor([4, 0]))
    assert merge(now, previous=previous, missing="drop").valid.tolist() == [True, False]


def test_merging_nothing_keeps_or_drops_the_previous_means():
    previous = ClassMeans(torch.tensor([[8.0]]), torch.tensor([1]))
    assert merge(previous=previous, missing="keep") is previous
    assert merge(previous=previous, missing="drop") is None
    assert merge() is None


def test_merged_means_carry_no_counts():
    means = ClassMeans(torch.ones(2, 3), torch.tensor([4, 0]))
    assert merge(means).num_params == 3


def test_class_mean_rule_rejects_other_shapes():
    rule = ClassMeanRule()
    rule.add(ClassMeans(torch.ones(2, 3), torch.tensor([1, 1])), 2)
    with pytest.raises(ValueError, match="same shape"):
        rule.add(ClassMeans(torch.ones(2, 4), torch.tensor([1, 1])), 2)


@pytest.mark.parametrize("option", [{"weighting": "counts"}, {"missing": "forget"}])
def test_class_mean_rule_rejects_unknown_options(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        ClassMeanRule(**option)


@pytest.mark.parametrize("value", [2**24 + 1, -(2**24) - 1, -(2**63)])
def test_whole_numbers_that_float32_would_round_are_refused(value):
    rule = TensorMean()
    with pytest.raises(ValueError, match=rf"whole numbers above 2\*\*24, as {abs(value)}, are rounded in float32"):
        rule.add(torch.tensor([1, value]), 1)
    for fine in (torch.tensor([2**24]), torch.tensor([True, False]), torch.empty(0, dtype=torch.int32)):
        one = TensorMean()
        one.add(fine, 3)
        assert one.result(None).tolist() == fine.float().tolist()


def test_tensors_are_averaged_by_samples():
    rule = TensorMean()
    rule.add(torch.tensor([1.0, 3.0]), 1)
    rule.add(torch.tensor([5.0, -1.0]), 3)
    assert rule.result(None).tolist() == [4.0, 0.0]


def test_tensor_mean_of_nothing_is_the_previous_value():
    previous = torch.tensor([2.0])
    assert TensorMean().result(previous) is previous
    assert TensorMean().result(None) is None


def test_running_sum_adds_to_what_there_was_all_clients_alike():
    """(1 + 5)/4, then 1.5 + 2/4; who sent before and is out now still counts."""
    server = Server(Message(), {"control": partial(RunningSum, 4)})
    first = {0: Message({}, {"control": torch.tensor([1.0])}, 1), 3: Message({}, {"control": torch.tensor([5.0])}, 99)}
    assert server.aggregate(first).artifacts["control"].tolist() == [1.5]
    second = server.aggregate({1: Message({}, {"control": torch.tensor([2.0])}, 7)}).artifacts["control"]
    assert (second.tolist(), second.dtype) == ([2.0], torch.float32)
    assert server.aggregate({}).artifacts["control"] is second
    assert RunningSum(4).remembers
    assert server.mixer() is None


# --- kinds of one's own ----------------------------------------------


def chain(*links):
    return Message(artifacts={"chain": Chain(torch.tensor(links))}, num_samples=len(links))


def test_default_rule_goes_by_kind():
    assert isinstance(default_rule("Tensor")(), TensorMean)
    assert isinstance(default_rule("ClassMeans")(), ClassMeanRule)
    assert isinstance(default_rule("Chain")(), KindRule)


def test_a_kind_is_merged_as_it_says_with_samples_and_what_there_was():
    server = Server(Message())
    out = server.aggregate({0: chain(7), 1: chain(8, 9)})
    assert out.artifacts["chain"].links.tolist() == [7, 1, 8, 9, 2]
    out = server.aggregate({1: chain(3)})
    assert out.artifacts["chain"].links.tolist() == [7, 1, 8, 9, 2, 3, 1]


def test_nothing_to_merge_of_a_kind_keeps_what_there_was():
    previous = Chain(torch.tensor([1]))
    assert KindRule("Chain").result(previous) is previous
    assert KindRule("Chain").result(None) is None


def test_a_kind_is_merged_in_the_order_of_clients_however_they_are_spread_over_workers(assert_identical):
    uploads = {client: chain(10 * client) for client in range(5)}
    whole = Server(Message()).aggregate(uploads)
    main, other = Server(Message()), Server(Message())
    assert main.works_in_parts
    for client in (4, 1):
        main.collect(client, uploads[client])
    for client in (3, 0, 2):
        other.collect(client, uploads[client])
    main.merge(other.partial())
    main.close_round()
    assert_identical(main.message.state_dict(), whole.state_dict())


def test_unregistered_kind_is_refused_by_the_server_in_words():
    @dataclass(frozen=True)
    class Stranger(Structured):
        links: torch.Tensor

    with pytest.raises(TypeError, match=r"^Stranger is no registered kind of artifact"):
        Server(Message()).collect(0, Message(artifacts={"x": Stranger(torch.zeros(1))}))


def test_a_rule_that_works_in_no_parts_says_so():
    class Last(ArtifactRule):
        def add(self, value, num_samples):
            self.value = value

        def result(self, previous):
            return self.value

    assert not Last.in_parts
    assert not Last().remembers
    for part in (Last().partial, lambda: Last().merge({})):
        with pytest.raises(NotImplementedError, match="Last cannot be worked out in parts"):
            part()
    assert not Server(Message(), {"x": Last}).works_in_parts
    assert Server(Message(), {"x": TensorMean, "y": ClassMeanRule}).works_in_parts


@pytest.mark.parametrize("rule", [TensorMean, ClassMeanRule])
def test_rules_worked_out_in_parts_are_those_of_the_whole(rule):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 3, 2, generator=generator)
    values = list(rows) if rule is TensorMean else [ClassMeans(row, torch.tensor([1, 0, 5])) for row in rows]
    whole, one, other, nothing = rule(), rule(), rule(), rule()
    for client, value in enumerate(values):
        whole.add(value, 1 + client)
        (one if client % 2 else other).add(value, 1 + client)
    for part in (other, nothing):
        one.merge(part.partial())
    nothing.merge(one.partial())
    found = [made.result(None) for made in (whole, one, nothing)]
    found = found if rule is TensorMean else [means.mean for means in found]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_vector_of_a_message_is_taken_for_its_weights_until_one_is_changed():
    weights = {"a": torch.randn(3, 2), "steps": torch.tensor(4), "b": torch.randn(5)}
    flat = Flat(weights)
    assert flat.holds(weights, ["a", "b"])
    assert not flat.holds(weights, ["b", "a"])
    assert not flat.holds({**weights, "b": weights["b"].clone()}, ["a", "b"])
    mean = WeightedMean()
    mean.add(weights, 3, flat)
    weights["b"].mul_(2)
    assert not flat.holds(weights, ["a", "b"])
    mean.add(weights, 3, flat)
    halfway = (weights["b"].double() / 2 + weights["b"].double()) / 2
    assert torch.equal(mean.result()["b"], halfway.float())


@pytest.mark.parametrize("largest", [1e-30, 1e-3, 1.0, 1e15])
def test_known_square_changes_no_bit_of_a_sum(largest):
    parts = [largest * torch.randn(1000) for _ in range(9)]
    one, other = ExactSum(), ExactSum()
    for values in parts:
        one.add(values, 17)
        other.add(values, 17, Flat({"a": values}).square)
    assert torch.equal(one.value(9.0), other.value(9.0))


def test_artifact_of_whole_numbers_or_truths_is_averaged_and_no_maximum():
    """A state's counter takes the maximum; a histogram of classes does not."""
    for values, mean in (((torch.tensor([2, 8]), torch.tensor([4, 0])), [3.0, 4.0]), (torch.eye(2).bool(), [0.5, 0.5])):
        rule = TensorMean()
        for value in values:
            rule.add(value, 10)
        assert rule.result(None).tolist() == mean
