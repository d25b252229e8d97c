import numpy as np
import pytest
import torch

from fl_lightning.data.module import shifted
from fl_lightning.data.partitions import IID
from fl_lightning.data.shifts import ColourSkew, ConceptShift, NoiseSkew, RotationSkew, Shift
from fl_lightning.data.splits import holdout
from fl_lightning.errors import ConfigError


def apply(shift, x, client, y=None, clients=4, classes=3, seed=0):
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return shift.apply(x, y, client, clients, classes, np.random.default_rng(seed))


def images(n=6, channels=3, size=8):
    return torch.randint(
        0, 256, (n, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_noise_is_not_put_on_another_scale_than_it_is_said_on():
    """Standardised images had it in units of their own deviation."""
    x = images().float() / 255
    assert apply(NoiseSkew(0.01), x, 1)[0].shape == x.shape
    with pytest.raises(ConfigError, match=r"NoiseSkew adds noise on the \[0, 1\] scale, and images lie outside it"):
        apply(NoiseSkew(0.01), (x - 0.5) / 0.25, 1)


def test_noise_grows_from_client_to_client():
    x = torch.full((20, 1, 16, 16), 128, dtype=torch.uint8)
    spread = [apply(NoiseSkew(0.01), x, client)[0].float().std().item() / 255 for client in range(4)]
    assert spread[0] == 0
    assert spread == sorted(spread)
    assert spread[3] == pytest.approx((0.01 * 3 / 4) ** 0.5, rel=0.05)
    floats = apply(NoiseSkew(1.0), torch.zeros(500, 40), 2)[0]
    assert floats.std().item() == pytest.approx(0.5**0.5, rel=0.05)


def test_quarter_turns_move_pixels_and_change_none():
    x = images()
    shift = RotationSkew()
    assert torch.equal(apply(shift, x, 0)[0], x)
    assert torch.equal(apply(shift, x, 1)[0][..., 0, 0], x[..., 0, -1])  # counter-clockwise: the right end comes up
    assert torch.equal(apply(shift, apply(shift, x, 1)[0], 3)[0], x)
    assert torch.equal(apply(shift, x, 5)[0], apply(shift, x, 1)[0])
    turned = apply(RotationSkew([45.0]), x, 0)[0]
    assert turned.dtype == torch.uint8
    assert not torch.equal(turned, x)


def test_all_angles_turn_the_same_way():
    x = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    x[..., 4, 7] = 255
    quarter, nearly = (apply(RotationSkew([angle]), x, 0)[0] for angle in (90.0, 89.0))
    assert quarter.argmax() == nearly.argmax()


def test_colours_are_one_draw_a_client():
    x = images()
    x = x // 4 + 96  # away from both ends
    first, again = (apply(ColourSkew(0.2), x, 0)[0] for _ in range(2))
    assert torch.equal(first, again)
    other = apply(ColourSkew(0.2), x, 0, seed=1)[0]
    assert not torch.equal(first, other)
    gains = [np.polyfit(x[:, c].flatten().float(), first[:, c].flatten().float(), 1)[0] for c in range(3)]
    assert all(0.8 - 0.02 <= gain <= 1.2 + 0.02 for gain in gains)


def test_offsets_of_colours_are_on_the_full_scale():
    x = torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)
    made, draw = apply(ColourSkew(0.5), x, 0)[0], np.random.default_rng(0)
    gain, offset = draw.uniform(0.5, 1.5, 3), draw.uniform(-0.25, 0.25, 3)
    assert made[0, :, 0, 0].tolist() == np.clip(np.round(128 * gain + 255 * offset), 0, 255).tolist()


def test_clients_of_one_concept_agree_and_the_others_rename_classes():
    y = torch.arange(5)
    x = torch.zeros(5, 2)
    shift = ConceptShift(concepts=3)
    assert torch.equal(apply(shift, x, 0, y, classes=5)[1], y)
    first = apply(shift, x, 1, y, classes=5, seed=1)[1]
    assert torch.equal(first, apply(shift, x, 4, y, classes=5, seed=2)[1])
    assert (first != y).all()
    assert torch.equal(first.sort().values, y)
    assert not torch.equal(first, apply(shift, x, 2, y, classes=5)[1])
    two = apply(ConceptShift(2, permuted=2), x, 1, y, classes=5)[1]
    assert int((two != y).sum()) == 2
    with pytest.raises(ConfigError, match="at most 3"):
        apply(ConceptShift(2, permuted=4), x, 1, y[:3])


def test_concepts_differ_and_no_more_are_taken_than_there_are():
    x, y = images(3), torch.arange(3)
    named = [tuple(apply(ConceptShift(4, permuted=2), x, client, y, clients=6)[1].tolist()) for client in range(4)]
    assert len(set(named)) == 4  # of the identity and three transpositions
    both = [apply(ConceptShift(3), x, client, y)[1] for client in (1, 2)]
    assert not torch.equal(*both)
    with pytest.raises(ConfigError, match=r"data.shift.concepts: must be at most 2: .* for 2 of 2 classes, got 3"):
        apply(ConceptShift(3), images(2), 1, torch.arange(2), classes=2)
    with pytest.raises(
        ConfigError, match=r"^data\.shift: ConceptShift needs at least two classes"
    ):  # it went on for ever
        apply(ConceptShift(2), images(2), 1, torch.zeros(2, dtype=torch.int64), classes=1)


def test_every_sample_is_changed_once_by_its_owner_and_nothing_else(make_arrays):
    arrays = make_arrays([20, 20], [10, 10])
    before = arrays.x.clone()
    parts = holdout(IID(), arrays, 4, seed=0)
    made = shifted(RotationSkew(), arrays, parts, seed=0)
    assert torch.equal(arrays.x, before)  # the cache's
    for client, part in enumerate(parts):
        for own in (part.train, part.test):
            assert torch.equal(made.x[own], torch.rot90(before[own], client, dims=(-2, -1)))
    renamed = shifted(ConceptShift(2), arrays, parts, seed=0)
    assert torch.equal(renamed.y[parts[1].test], 1 - arrays.y[parts[1].test])
    assert torch.equal(renamed.y[parts[2].train], arrays.y[parts[2].train])


class Mine(Shift):
    """A shift of somebody's own."""

    def __init__(self, rule):
        self.rule = rule

    def apply(self, x, y, client, num_clients, num_classes, rng):
        return self.rule(x, y)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda x, y: (x.float(), y), r"data\.shift: Mine\.apply\(\) must give x the type and shape that it had"),
        (
            lambda x, y: (x[:1], y),
            r"data\.shift: Mine\.apply\(\) must give x the type and shape .*, got \(torch.uint8, 1",
        ),
        (lambda x, y: (x, y + 1), r"^data\.shift: Mine: label 2 of sample .* is out of range; allowed are 0 to 1"),
        (lambda x, y: x, r"data\.shift: Mine\.apply\(\) raises ValueError: too many values"),
    ],
)
def test_what_a_shift_of_ones_own_gives_is_checked(make_arrays, rule, said):
    """A label beyond the classes was a class more, and one image stood for all of a client's."""
    arrays = make_arrays([20, 20], [10, 10])
    with pytest.raises(ConfigError, match=said):
        shifted(Mine(rule), arrays, holdout(IID(), arrays, 4, seed=0), seed=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NoiseSkew(0.0), "data.shift.std"),
        (lambda: RotationSkew([]), "data.shift.angles"),
        (lambda: ColourSkew(2.0), "data.shift.strength"),
        (lambda: ConceptShift(0), "data.shift.concepts"),
        (lambda: ConceptShift(2, 1), "data.shift.permuted"),
        (lambda: apply(RotationSkew(), torch.zeros(2, 5), 1), "RotationSkew needs images"),
        (lambda: apply(NoiseSkew(), torch.zeros(2, 5, dtype=torch.int64), 1), "inputs are tokens"),
    ],
)
def test_refusals(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
