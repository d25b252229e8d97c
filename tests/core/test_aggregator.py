"""Robust rules against numbers computed by hand, and what becomes of whole messages."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from fl_lightning.core.aggregation import RunningSum
from fl_lightning.core.aggregator import byzantine
from fl_lightning.core.centre_rules import CentredClipping, GeometricMedian, NormClipping
from fl_lightning.core.coordinate_rules import CoordinateMedian, TrimmedMean
from fl_lightning.core.message import ClassMeans, Message, Structured, artifact
from fl_lightning.core.selection_rules import Bulyan, Krum
from fl_lightning.core.server import Server
from fl_lightning.core.vectors import WEIGHTS, Unsuited, Vectors, squared_distances
from fl_lightning.errors import ConfigError

RULES = {
    "median": CoordinateMedian,
    "trimmed": lambda: TrimmedMean(0.2),
    "krum": lambda: Krum(1),
    "multi_krum": lambda: Krum(1, None),
    "bulyan": lambda: Bulyan(1),
    "geometric": GeometricMedian,
    "clipping": NormClipping,
    "centred": CentredClipping,
}


@artifact
@dataclass(frozen=True)
class Gauss(Structured):
    """A kind of a user's own."""

    mean: Tensor
    spread: Tensor
    name: str = "g"


@artifact
@dataclass(frozen=True)
class Bits(Structured):
    """A kind of which no vectors can be made."""

    bits: Tensor


def of(*rows):
    """One message a row of numbers."""
    return [Message({"w": torch.tensor(row)}, num_samples=10 * place + 1) for place, row in enumerate(rows)]


def treated(rule, messages, previous=None):
    """What the mean of the treated messages says; all of them are alike."""
    made = rule.treat(messages, previous or Message({n: torch.zeros_like(t) for n, t in messages[0].weights.items()}))
    assert len(made) == len(messages)
    assert {message.num_samples for message in made} == {1}
    return made[0]


def weight(rule, *rows, previous=None):
    before = None if previous is None else Message({"w": torch.tensor(previous)})
    return treated(rule, of(*rows), before).weights["w"].tolist()


# --- the seven rules --------------------------------------------------------------------------------------------------


def test_coordinate_median_matches_hand_computed_values():
    assert weight(CoordinateMedian(), [1.0, 9.0], [2.0, 8.0], [50.0, -7.0]) == [2.0, 8.0]
    assert weight(CoordinateMedian(), [1.0], [9.0], [2.0], [4.0]) == [3.0]


def test_trimmed_mean_matches_hand_computed_values():
    """Of five, ⌈0.2 · 5⌉ = 1 is cut off at each end: (2 + 3 + 4)/3; of four ⌈0.8⌉ = 1, too: (2 + 4)/2."""
    assert weight(TrimmedMean(0.2), [1.0], [2.0], [3.0], [4.0], [99.0]) == [3.0]
    assert weight(TrimmedMean(0.2), [1.0], [9.0], [2.0], [4.0]) == [3.0]
    assert weight(TrimmedMean(0.49), [1.0], [5.0], [90.0]) == [5.0]


def test_krum_matches_hand_computed_values():
    """n = 5, f = 1: n − f − 2 = 2 nearest. Of 0, 1, 3, 4.5, 100: 1 + 9, 1 + 4, 2.25 + 4, 2.25 + 12.25, far."""
    rows = [0.0], [1.0], [3.0], [4.5], [100.0]
    assert weight(Krum(1), *rows) == [1.0]
    assert weight(Krum(1, 2), *rows) == [2.0]  # scores 5 and 6.25
    assert weight(Krum(1, None), *rows) == [2.125]  # n − f = 4
    assert weight(Krum(0.2), *rows) == [1.0]


def test_krum_takes_the_first_of_equal_clients():
    made = Krum(1).selected(of([1.0], [1.0], [1.0], [1.0], [7.0]))
    assert made == [0]


def test_bulyan_matches_hand_computed_values():
    """n = 7, f = 1: θ = 5 by Krum without 100 and one more, then of each coordinate the 3 nearest to the median."""
    rows = [0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [100.0]
    chosen = Bulyan(1).selected(of(*rows))
    # 4 neighbours: 2 has 1+1+4+4, 3 the same: 2 goes first; then 3 neighbours of 0 1 3 4 5: 4 has 1+1+9, 3 has 1+4+4;
    # 3 goes; then 2 neighbours of 0 1 4 5: 0 has 1+16, 1 has 1+9, 4 has 1+9: 1 goes; one of 0 4 5: 4 goes; one of 0 5:
    # 0 has 25, 5 has 25: 0 goes.
    assert chosen == [0, 1, 2, 3, 4]
    assert weight(Bulyan(1), *rows) == [2.0]  # the median is 2; 1, 2, 3


def test_bulyan_takes_every_coordinate_by_itself():
    """The six that Krum's distance leaves may still lie in one coordinate, which the second step cuts off."""
    rows = [[0.0, 0.1 * i, 0.0] for i in range(5)] + [[0.0, 0.2, 3.0], [90.0, 90.0, 90.0]]
    assert weight(Bulyan(1), *rows) == pytest.approx([0.0, 0.2, 0.0], abs=0.11)


def test_geometric_median_matches_known_points():
    """Of three on a line the middle one; of a square's corners its centre; of a triangle over 120° that corner."""
    assert weight(GeometricMedian(iterations=200), [0.0], [1.0], [10.0]) == pytest.approx([1.0], abs=1e-4)
    square = [0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]
    assert weight(GeometricMedian(), *square) == pytest.approx([1.0, 1.0])
    flat = [-5.0, 0.0], [5.0, 0.0], [0.0, 0.5]
    assert weight(GeometricMedian(iterations=300), *flat) == pytest.approx([0.0, 0.5], abs=1e-2)


@pytest.mark.parametrize("place", [0, 4, 8])
def test_one_client_however_far_away_does_not_pull_the_geometric_median(place):
    """What rounding left of the others' distances gave it a share of 10^-18."""
    rows = [[1.0]] * 10
    rows.insert(place, [-1e30])
    assert weight(GeometricMedian(), *rows) == pytest.approx([1.0])


def test_geometric_median_passes_over_many_who_are_far_away():
    """After 32 steps 16 of 40 clients still pulled it a million times as far as the others lie apart."""
    rows = torch.randn(24, 20, generator=torch.Generator().manual_seed(0)).tolist()
    found = torch.tensor(weight(GeometricMedian(), *rows, *[[1e12] * 20] * 16))
    assert (found - torch.tensor(rows).mean(0)).norm() < 20**0.5


@pytest.mark.parametrize("far", [1e12, 1e20, 1e30, 1e37])
@pytest.mark.parametrize("other", [1e2, 1e4, 1e8])
def test_a_client_far_away_hides_no_other_from_the_geometric_median(far, other):
    """Rounding of the first one's distances let the second count as one of those in the middle: 10^7 of 1."""
    rows = [[0.9], [0.95], [1.0], [1.0], [1.05], [1.1]]
    assert weight(GeometricMedian(), *rows, [far], [other]) == pytest.approx([1.0], abs=0.11)


def test_what_is_no_number_shows_in_the_geometric_median():
    """Squares of 1e200 are infinite: it counted as one of those in the middle, as far as anybody could see."""
    rows = torch.tensor([[1.0], [1.1], [0.9], [1e200]], dtype=torch.float64)
    assert GeometricMedian().combine(Vectors(WEIGHTS, rows)).isnan().all()


def test_geometric_median_is_a_point_of_no_force():
    """Where it is no client's own point, the unit vectors towards all clients add up to zero."""
    torch.manual_seed(0)
    rows = torch.randn(7, 5)
    found = torch.tensor(weight(GeometricMedian(iterations=200), *rows.tolist()))
    pulls = rows - found
    assert (pulls / pulls.norm(dim=1, keepdim=True)).sum(0).norm() < 1e-4


def test_one_step_of_weiszfeld_matches_hand_computed_values():
    """From the mean 3 of 0, 1, 8 by 1/3, 1/2, 1/5: (1/2 + 8/5)/(31/30)."""
    assert weight(GeometricMedian(iterations=1), [0.0], [1.0], [8.0]) == pytest.approx([2.1 * 30 / 31])


def test_norm_clipping_matches_hand_computed_values():
    """From (1, 0): updates (3, 4), (0, 1), (0, 0) of lengths 5, 1, 0; C = 2 shortens the first to (1.2, 1.6)."""
    rows = [4.0, 4.0], [1.0, 1.0], [1.0, 0.0]
    assert weight(NormClipping(2.0), *rows, previous=[1.0, 0.0]) == pytest.approx([1 + 1.2 / 3, 2.6 / 3])
    # the median length is 1: (0.6, 0.8)
    assert weight(NormClipping(), *rows, previous=[1.0, 0.0]) == pytest.approx([1 + 0.2, 1.8 / 3])
    assert weight(NormClipping(50.0), *rows, previous=[1.0, 0.0]) == pytest.approx([2.0, 5 / 3])


def test_centred_clipping_matches_hand_computed_values():
    """τ = 1 from r = 0: v = (1 + 1 + 1)/3 = 1. From r = 1, of 2, 3, 9: Δ = 1, 2, 8 around v = 1: 0, 1, 1 → v = 5/3."""
    rule = CentredClipping(1.0)
    assert weight(rule, [1.0], [1.0], [5.0]) == [1.0]
    assert weight(rule, [2.0], [3.0], [9.0], previous=[1.0]) == pytest.approx([1 + 5 / 3])
    assert rule.state_dict()["last"].tolist() == pytest.approx([5 / 3])


def test_centred_clipping_goes_on_from_its_state_and_starts_anew():
    first, second = CentredClipping(1.0), CentredClipping(1.0)
    weight(first, [1.0], [1.0], [5.0])
    second.load_state_dict(first.state_dict())
    assert weight(first, [2.0], [3.0], [9.0]) == weight(second, [2.0], [3.0], [9.0])
    first.start(["w"])
    assert first.state_dict() == {}


# --- all rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_equal_messages_come_back_as_they_are(make):
    rows = [[0.1, -3.0, 7.0]] * 7
    assert weight(make(), *rows, previous=[0.1, 2.0, -1.0]) == pytest.approx(rows[0])


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
@pytest.mark.parametrize("far", [1e3, 1e6, -1e6])
def test_one_of_seven_that_is_far_away_hardly_moves_the_result(make, far):
    torch.manual_seed(1)
    honest = torch.randn(6, 20)
    messages = of(*honest.tolist(), [far] * 20)
    found = treated(make(), messages).weights["w"]
    spread = (honest - honest.mean(0)).norm(dim=1).max()
    assert (found - honest.mean(0)).norm() <= 1.5 * spread


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_counters_take_the_maximum_and_variances_stay_positive(make):
    torch.manual_seed(2)
    rule = make()
    rule.start(["w"])
    before = Message({"w": torch.zeros(3), "running_var": torch.full((2,), 5.0), "batches": torch.tensor(0)})
    for _ in range(2):
        sent = [
            Message({"w": torch.randn(3), "running_var": torch.rand(2) * 1e-3, "batches": torch.tensor(4)}, {}, 1)
            for _ in range(7)
        ]
        weights = treated(rule, sent, before).weights
        assert list(weights) == ["w", "running_var", "batches"]
        assert weights["batches"].dtype == torch.int64
        assert weights["batches"] == 4
        assert (weights["running_var"] >= 0).all()
        before = Message(weights)


def prototypes(value, *held, width=2):
    count = torch.tensor([5 if row in held else 0 for row in range(3)])
    return ClassMeans(torch.where(count[:, None] > 0, torch.full((3, width), float(value)), 0.0), count)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_class_means_are_treated_row_by_row_over_those_who_hold_it(make):
    held = [(0, 1), (0, 1), (0, 1), (0, 1), (0,), (0,), (0,)]
    sent = [Message({}, {"prototypes": prototypes(2.0, *own)}, 1) for own in held]
    made = make().treat(sent, Message())
    means = [message.artifacts["prototypes"] for message in made]
    holders = torch.stack([own.count for own in means]).sum(0).tolist()
    assert holders[2] == 0
    assert holders[0] >= 1
    assert means[0].mean[2].tolist() == [0.0, 0.0]
    assert means[0].mean[0].tolist() == pytest.approx([2.0, 2.0])


def test_as_many_hold_a_class_as_before():
    sent = [Message({}, {"p": prototypes(v, *own)}, 1) for v, own in [(1, (0,)), (2, (0, 1)), (9, (0,))]]
    made = [message.artifacts["p"] for message in CoordinateMedian().treat(sent, Message())]
    assert torch.stack([own.count for own in made]).sum(0).tolist() == [3, 1, 0]
    assert made[0].mean.tolist() == [[2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]


def test_clipping_of_class_means_is_around_what_was_received():
    """Row 0 from 1: 2 and 11 are 1 and 10 away (of one number); C = 1 gives 1 + (1 + 1)/2."""
    sent = [Message({}, {"p": prototypes(v, 0, width=1)}, 1) for v in (2, 11)]
    before = Message({}, {"p": prototypes(1, 0, 2, width=1)})
    assert treated(NormClipping(None, 1.0), sent, before).artifacts["p"].mean[0].tolist() == [2.0]
    assert treated(CentredClipping(None, 1.0), sent, before).artifacts["p"].mean[0].tolist() == [2.0]


def test_clipping_without_anything_received_is_around_the_median():
    sent = [Message({}, {"p": prototypes(v, 0, width=1)}, 1) for v in (1, 2, 3, 4, 90)]
    assert treated(NormClipping(None, 2.0), sent, Message()).artifacts["p"].mean[0].tolist() == [
        3 + (-2 - 1 + 1 + 2) / 5
    ]


def test_krum_leaves_out_the_artifacts_of_whom_it_leaves_out():
    values = (1.0, 1.1, 1.2, 1.3, 50.0)
    sent = [Message({"w": torch.tensor([v])}, {"p": prototypes(100 * v, 0, 1)}, 1) for v in values]
    made = treated(Krum(1, None), sent)
    assert made.artifacts["p"].mean[0].tolist() == pytest.approx([115.0, 115.0])


def test_without_weights_distances_are_those_of_common_rows():
    """Mean squares over common values: 0-1 share row 0: 1; 0-2 share row 1: 9; 1-2 share nothing: as the farthest."""

    def means(*rows):
        return Message(
            {},
            {
                "p": ClassMeans(
                    torch.tensor([[float(r or 0)] for r in rows]), torch.tensor([int(r is not None) for r in rows])
                )
            },
        )

    found = squared_distances([means(1, 5), means(2, None), means(None, 8)])
    assert found.tolist() == [[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]]


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_tensors_and_kinds_of_ones_own_are_treated(make):
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1e5]
    sent = [
        Message({}, {"t": torch.tensor([v, -v]), "g": Gauss(torch.tensor([v]), torch.tensor([[v]]))}, 1) for v in values
    ]
    made = treated(make(), sent)
    for found in (made.artifacts["t"][0], made.artifacts["g"].mean[0], made.artifacts["g"].spread[0, 0]):
        assert 0.9 <= float(found) <= 1.6
    assert made.artifacts["g"].name == "g"


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
@pytest.mark.parametrize("value", [torch.tensor([1]), Bits(torch.tensor([True]))], ids=["integers", "bits"])
def test_what_has_no_vectors_is_refused(make, value):
    with pytest.raises(Unsuited, match=r"^artifact b \("):
        make().treat([Message({}, {"b": value}, 1) for _ in range(7)], Message())


def test_weights_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="weight w: clients' shapes differ"):
        CoordinateMedian().treat(of([1.0], [1.0, 2.0]), Message())


def test_many_coordinates_are_the_same_block_by_block():
    torch.manual_seed(3)
    rows = torch.randn(7, 70_000)
    found = treated(CoordinateMedian(), [Message({"w": row}, num_samples=1) for row in rows]).weights["w"]
    assert torch.equal(found, rows.median(0).values)


def test_krum_of_half_precision_keeps_the_type():
    sent = [Message({"w": torch.full((4,), float(v), dtype=torch.bfloat16)}, num_samples=1) for v in range(5)]
    assert treated(Krum(1), sent).weights["w"].dtype == torch.bfloat16


# --- how many may lie -------------------------------------------------------------------------------------------------


def test_share_of_liars_is_rounded_up():
    assert [byzantine(0.2, n) for n in (4, 5, 6, 10, 20)] == [1, 1, 2, 2, 4]
    assert byzantine(3, 20) == 3
    assert byzantine(0, 20) == 0


def test_least_number_of_participants():
    assert [Krum(2).least(20), Krum(0.2).least(20), Krum(1, 6).least(20)] == [7, 11, 7]
    assert [Bulyan(2).least(20), Bulyan(0.2).least(20)] == [11, 19]
    assert [CoordinateMedian().least(n) for n in (1, 20)] == [3, 3]
    assert [TrimmedMean(0.2).least(n) for n in (1, 2, 3, 6, 20)] == [3, 3, 3, 5, 9]
    assert GeometricMedian().least(20) == 1


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: TrimmedMean(0.5), "share: must be in"),
        (lambda: TrimmedMean(0.0), "share: must be in"),  # the plain mean
        (lambda: Krum(0.5), "num_byzantine: must be a whole number"),
        (lambda: Krum(1.5), "num_byzantine: must be a whole number"),
        (lambda: Bulyan(-1), "num_byzantine: must be a whole number"),
        (lambda: Bulyan(math.nan), "num_byzantine: must be a whole number"),
        (lambda: Krum(1, 0), "select: must be >= 1"),
        (lambda: NormClipping(0.0), "clip: must be > 0"),
        (lambda: NormClipping(1.0, math.inf), "clip_artifacts: must be > 0"),
        (lambda: CentredClipping(-1.0), "clip: must be > 0"),
        (lambda: CentredClipping(iterations=0), "iterations: must be >= 1"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing: must be > 0"),
        (lambda: GeometricMedian(iterations=0), "iterations: must be >= 1"),
    ],
)
def test_bad_argument_is_refused(make, rule):
    with pytest.raises(ConfigError, match=f"^federation.aggregator.{rule}"):
        make()


@pytest.mark.parametrize("rule", [Krum(), Krum(select=None), Bulyan(0.1), CoordinateMedian()])
def test_a_sum_has_as_many_terms_whoever_is_chosen(rule):
    """SCAFFOLD's control is previous + Σ increments / N: of equal increments each rule gives the same."""
    messages = [Message({"w": torch.ones(3)}, {"control": torch.ones(2)}, 1) for _ in range(10)]
    server = Server(
        Message({"w": torch.zeros(3)}, {"control": torch.zeros(2)}, 1), {"control": partial(RunningSum, 10)}
    )
    server.aggregate(dict(enumerate(rule.treat(messages, server.message))))
    torch.testing.assert_close(server.message.artifacts["control"], torch.ones(2))
    torch.testing.assert_close(server.message.weights["w"], torch.ones(3))
