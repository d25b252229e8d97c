import math

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from fl_lightning.data.arrays import Arrays, DataSpec
from fl_lightning.errors import ConfigError

IMAGES = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
FLOATS = torch.zeros(4, 5)
LABELS = torch.tensor([0, 1, 0, 1])


def arrays(x=FLOATS, y=LABELS, num_train=3, classes=("a", "b"), **kwargs):
    return Arrays(x, y, num_train, classes, **kwargs)


def test_spec_says_what_a_model_must_know():
    assert arrays(IMAGES).spec == DataSpec((3, 2, 2), 2, 0)
    assert arrays(torch.zeros(4, 7, dtype=torch.int64), vocabulary_size=9).spec == DataSpec((7,), 2, 9)


@pytest.mark.parametrize(
    "good",
    [
        arrays(),
        arrays(IMAGES),
        arrays(IMAGES, mean=(0.5,) * 3, std=(0.5,) * 3),
        arrays(torch.zeros(4, 7, dtype=torch.int64), vocabulary_size=1),
        arrays(num_train=4),
    ],
)
def test_validate_accepts_good_arrays(good):
    good.validate("Good")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (arrays(y=torch.tensor([0, 1, 2, 1])), r"Bad: label 2 of sample 2 is out of range; allowed are 0 to 1"),
        (arrays(y=torch.tensor([0, -1, 0, 1])), r"label -1 of sample 1 is out of range"),
        (arrays(torch.tensor([[0.0], [1.0], [0.0], [math.nan]])), r"Bad: sample 3 holds nan; inputs must be finite"),
        (arrays(torch.tensor([[0.0], [math.inf], [0.0], [0.0]])), r"sample 1 holds inf"),
        (arrays(y=LABELS[:3]), r"x has 4 samples but y has 3 labels"),
        (arrays(y=LABELS.int()), r"y must be int64 \[N\], is int32 \[4\]"),
        (arrays(FLOATS.double()), r"x must be uint8, int64 or float32, is torch.float64"),
        (arrays(FLOATS[:0], LABELS[:0]), r"not a single sample"),
        (arrays(num_train=5), r"num_train must be in \[1, 4\], the samples; it is 5"),
        (arrays(num_train=0), r"num_train must be in"),
        (arrays(num_train=3.0), r"num_train must be a whole number; it is 3\.0"),
        (arrays(classes=()), r"at least one class"),
        (arrays(IMAGES[:, 0]), r"uint8 images must be \[N, C, H, W\], are uint8 \[4, 2, 2\]"),
        (arrays(torch.zeros(4, 8, 8, 3, dtype=torch.uint8)), r"are uint8 \[4, 8, 8, 3\]: permute\(0, 3, 1, 2\)"),
        (arrays(torch.zeros(4, 8, 8, 1)), r"images must be \[N, C, H, W\], are float32 .*: permute\(0, 3, 1, 2\)"),
        (arrays(torch.zeros(4, 32, 32, 12, dtype=torch.uint8)), r"are uint8 \[4, 32, 32, 12\]: permute"),  # of 12 bands
        (arrays(IMAGES, mean=(0.5,), std=(0.5,)), r"need 3 values, one a channel; they have 1 and 1"),
        (arrays(IMAGES, mean=(0.5,) * 3, std=(0.5, 0.0, 0.5)), r"std must be above 0"),
        (arrays(torch.zeros(4, 7, dtype=torch.int64)), r"need a vocabulary_size"),
        (arrays(torch.full((4, 7), 9), vocabulary_size=9), r"token 9 of sample 0 is out of range; allowed are 0 to 8"),
        (arrays(torch.zeros(4)), r"x must be \[N, ...\]"),
        (arrays([1, 2]), r"must be torch tensors"),
        (arrays(FLOATS.to_sparse()), r"Bad: x must hold its numbers one by one, is torch.sparse_coo; say to_dense\(\)"),
        (arrays(classes=2), r"Bad: classes must be a tuple of names, got 2"),
        (arrays(classes=(b"a", b"b")), r"classes must be a tuple of names, got "),
        (arrays(IMAGES[:, :1], mean=0.5, std=0.5), r"Bad: mean must be a tuple of numbers, got 0\.5"),
        (arrays(IMAGES, mean=torch.zeros(1, 3), std=(0.5,) * 3), r"mean must be a tuple of numbers, got "),
    ],
)
def test_validate_names_what_is_wrong(bad, message):
    with pytest.raises(ConfigError, match=message) as caught:
        bad.validate("Bad")
    assert caught.value.key == "data.dataset"


def test_a_tensors_number_of_training_samples_is_a_number():
    own = arrays(num_train=torch.tensor(3))
    own.validate("Own")
    assert type(own.num_train) is int
    assert own.num_train == 3


@pytest.mark.parametrize(
    "x",
    [torch.nn.Linear(5, 5)(FLOATS), torch.nn.Parameter(FLOATS), tv_tensors.wrap(FLOATS, like=tv_tensors.Image(IMAGES))],
)
def test_inputs_are_held_as_plain_tensors_without_gradients(x):
    """Features that a network had given under gradients made every fit fail: all steps went back through it."""
    own = arrays(x)
    own.validate("Own")
    assert type(own.x) is torch.Tensor
    assert not own.x.requires_grad
    assert torch.equal(own.x, x.detach())


def test_names_and_numbers_of_numpys_and_torchs_are_held_as_pythons_own():
    """No JSON can be written of them, and `torch.load` reads none."""
    own = arrays(
        IMAGES,
        classes=np.unique(LABELS.numpy()),
        mean=torch.full((3,), 0.5),
        std=np.full(3, 0.25),
        groups=LABELS,
        group_names=tuple(np.array(["u", "v"])),
        vocabulary_size=np.int64(0),
    )
    own.validate("Own")
    told = (own.classes, own.mean, own.std, own.group_names, own.vocabulary_size)
    assert told == ((0, 1), (0.5,) * 3, (0.25,) * 3, ("u", "v"), 0)
    assert {type(each) for part in told[:4] for each in part} == {int, float, str}
    assert type(own.vocabulary_size) is int
