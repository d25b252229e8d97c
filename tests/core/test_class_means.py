import pytest
import torch

from fl_lightning.core.aggregation import ClassMeanRule
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.mixing import Heard, MeanMixer
from fl_lightning.losses.class_relation import SoftLabelRule, SoftLabels


@pytest.fixture
def means():
    """Classes 0 and 2 of three, D = 2."""
    return ClassMeans.from_samples(
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, -1.0]]), torch.tensor([0, 0, 2]), num_classes=3
    )


def test_class_means_match_hand_computed_values(means):
    """Class 0: ((1 + 3) / 2, (2 + 4) / 2) from two samples; class 1: nothing; class 2: its one sample."""
    assert means.mean.tolist() == [[2.0, 3.0], [0.0, 0.0], [10.0, -1.0]]
    assert means.count.tolist() == [2, 0, 1]
    assert means.mean.dtype == torch.float32
    assert means.count.dtype == torch.int64
    assert means.valid.tolist() == [True, False, True]


def test_class_means_of_matrices_keep_their_shape():
    values = torch.arange(8.0).reshape(2, 2, 2)
    means = ClassMeans.from_samples(values, torch.tensor([1, 1]), num_classes=2)
    assert means.mean.tolist() == [[[0.0, 0.0], [0.0, 0.0]], [[2.0, 3.0], [4.0, 5.0]]]


def test_class_means_of_no_samples_are_all_absent():
    means = ClassMeans.from_samples(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), num_classes=3)
    assert means.mean.shape == (3, 4)
    assert not means.valid.any()
    assert (means.num_params, means.num_bytes) == (0, 0)


def test_class_means_of_half_precision_are_averaged_in_more_bits():
    """4,096 + 1 is not a bfloat16: a mean taken in bfloat16 would lose the ones."""
    values = torch.tensor([[4096.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    means = ClassMeans.from_samples(values, torch.zeros(4, dtype=torch.long), num_classes=1)
    assert means.mean.dtype == torch.float32
    assert means.mean.item() == 4099 / 4


def test_class_means_count_rows_of_held_classes_and_their_counts(means):
    """Two rows of two float32 and two int64."""
    assert means.num_params == 2 * 2 + 2
    assert means.num_bytes == 2 * 2 * 4 + 2 * 8


def test_class_means_without_counts_send_rows_only(means):
    bare = means.without_counts()
    assert bare.num_params == 2 * 2
    assert bare.num_bytes == 2 * 2 * 4
    assert bare.count.tolist() == [1, 0, 1]
    assert torch.equal(bare.mean, means.mean)


def test_filled_from_takes_absent_rows_with_their_counts_and_no_others(means):
    previous = ClassMeans(torch.full((3, 2), 7.0), torch.tensor([5, 4, 0]))
    filled = means.filled_from(previous)
    assert filled.mean.tolist() == [[2.0, 3.0], [7.0, 7.0], [10.0, -1.0]]
    assert filled.count.tolist() == [2, 4, 1]


def test_filled_from_nothing_changes_nothing(means):
    assert means.filled_from(None) is means


def test_class_that_was_never_held_stays_absent(means):
    previous = ClassMeans(torch.full((3, 2), 7.0), torch.tensor([5, 0, 0]))
    assert means.filled_from(previous).valid.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("mean", "count"), [((3, 2), (2,)), ((2,), (3,)), ((3, 2), (3, 1)), ((3, 2), ())], ids=lambda shape: str(shape)
)
def test_class_means_reject_sizes_that_do_not_fit(mean, count):
    with pytest.raises(ValueError, match="same first size"):
        ClassMeans(torch.zeros(mean), torch.zeros(count, dtype=torch.long))


def test_clone_shares_no_memory(means):
    copy = means.clone()
    copy.mean.zero_()
    copy.count.zero_()
    assert means.mean[0].tolist() == [2.0, 3.0]
    assert means.count.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "rule", [lambda: ClassMeanRule(missing="keep"), lambda: SoftLabelRule(SoftLabels(missing="keep"))]
)
def test_who_hears_itself_alone_keeps_what_it_knew(rule):
    """With a neighbour that lacks the same classes it did; alone, others' classes were gone."""
    knew = ClassMeans(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1]), sends_count=False)
    own = Message({}, {"means": ClassMeans(torch.tensor([[5.0, 6.0], [0.0, 0.0]]), torch.tensor([7, 0]))}, 7)
    for alone in (True, False):
        others = [] if alone else [Heard(1, own, 0.5)]
        mixed = MeanMixer({"means": rule}).mix(Heard(0, own, 0.5 + alone / 2), others, Message({}, {"means": knew}, 1))
        assert mixed.artifacts["means"].mean.tolist() == [[5.0, 6.0], [3.0, 4.0]]
        assert mixed.artifacts["means"].valid.tolist() == [True, True]
    dropping = MeanMixer({"means": lambda: ClassMeanRule(missing="drop")})
    mixed = dropping.mix(Heard(0, own, 1.0), [], Message({}, {"means": knew}, 1))
    assert mixed.artifacts["means"].valid.tolist() == [True, False]
