"""Augmentation of training images: drawn for every image, from the seed, and seen by local fits only."""

import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.augmentation import Augmentation, build_augmentation, described
from fl_lightning.data.shifts import NoiseSkew
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.models.mlp import MLP

CROP = {"class_path": "RandomCrop", "init_args": {"size": 6, "padding": 2}}


def images(count, channels=3, size=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def make_uint8(arrays):
    """The shared world's images as uint8 pictures of 8x8."""
    arrays.x = (arrays.x * 40 + 128).clamp(0, 255).to(torch.uint8)
    arrays.mean, arrays.std = (0.5,), (0.25,)


# --- what is drawn ----------------------------------------------


@pytest.mark.parametrize(("cls", "flipped"), [("RandomHorizontalFlip", -1), ("RandomVerticalFlip", -2)])
def test_every_image_is_flipped_or_not_by_a_draw_of_its_own(cls, flipped):
    x = images(400)
    out = build_augmentation([cls])(x, 7)
    turned = (out == x.flip(flipped)).flatten(1).all(1)
    assert torch.equal(out[~turned], x[~turned])
    assert 150 < turned.sum() < 250
    assert torch.equal(build_augmentation([{"class_path": cls, "init_args": {"p": 1.0}}])(x, 7), x.flip(flipped))


PADDINGS = [
    {},
    {"padding": 2},
    {"padding": [1, 2]},
    {"padding": [0, 1, 2, 3], "fill": 9},
    {"padding": [0, 1, 2, 3], "padding_mode": "reflect"},
]


@pytest.mark.parametrize("options", PADDINGS)
@pytest.mark.parametrize("size", [6, [6, 5]])
def test_crops_are_those_of_torchvision_one_draw_an_image(options, size):
    """Each image is one of the crops that torchvision could have given, and all of these occur."""
    transform = v2.RandomCrop(size, **options)
    x = images(600)
    out = Augmentation([transform])(x, 3)
    padding = options.get("padding", 0)  # as given: what the transform keeps is in another order
    padded = functional.pad(x, padding, options.get("fill", 0), options.get("padding_mode", "constant"))
    height, width = transform.size
    tops, lefts = padded.shape[2] - height + 1, padded.shape[3] - width + 1
    crops = torch.stack(
        [functional.crop(padded, top, left, height, width) for top in range(tops) for left in range(lefts)]
    )
    matches = (crops == out).flatten(2).all(2)  # [offsets, B]
    assert matches.any(0).all()
    chosen = matches.float().argmax(0)
    assert len(chosen.unique()) == tops * lefts
    theirs = torch.stack([transform(x[0]) for _ in range(50)])
    assert (crops[:, 0, None] == theirs).flatten(2).all(2).any(0).all()


@pytest.mark.parametrize(
    "transform",
    [v2.RandomRotation(30), v2.RandomCrop(6, padding=1, padding_mode="reflect"), v2.RandomErasing(1.0)],
    ids=lambda transform: type(transform).__name__,
)
def test_other_transforms_are_called_image_by_image(transform):
    one = images(1).expand(40, -1, -1, -1).contiguous()
    out = Augmentation([transform])(one, 0)
    assert out.shape == one.shape
    assert out.dtype == torch.uint8
    assert len(out.flatten(1).unique(dim=0)) > 5


def test_result_depends_on_the_seed_and_leaves_the_global_streams_alone():
    x = images(8)
    both = build_augmentation(
        [CROP, "RandomHorizontalFlip", {"class_path": "RandomRotation", "init_args": {"degrees": 20}}]
    )
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = both(x, 11)
    assert torch.equal(torch.rand(3), expected)
    torch.rand(100)
    np.random.rand(3)
    assert torch.equal(both(x, 11), first)
    assert not torch.equal(both(x, 12), first)


def test_transforms_are_applied_in_their_order():
    def double(image):
        return (image * 2).clamp(max=255)

    def add(image):
        return image + 1

    x = torch.full((2, 1, 4, 4), 3, dtype=torch.uint8)
    flip = v2.RandomHorizontalFlip(1.0)
    assert (Augmentation([double, flip, add])(x, 0) == 7).all()
    assert (Augmentation([add, double, flip])(x, 0) == 8).all()


# --- who sees it ----------------------------------------------


@pytest.fixture
def augmented(make_data):
    """The four clients with pictures; flips always, so that it can be seen."""

    def make(**options):
        given = {"augmentation": [v2.RandomHorizontalFlip(1.0)], **options}
        return make_data(edit=make_uint8, **given)

    return make


def test_local_batches_are_augmented_and_nothing_else(augmented):
    data, client = augmented(), 0
    own, store = data.clients[client], data.store
    plain, _ = store.gather(own.train)
    seen = torch.cat([bundle.x for bundle in own.bundles(3, 4, 2)])
    order = torch.randperm(own.num_train, generator=torch.Generator().manual_seed(3))
    assert torch.equal(seen, plain[order].flip(-1))
    for split in ("train", "validation", "test"):
        for x, _ in own.batches(split):
            assert torch.equal(x, store.gather(getattr(own, split))[0])


def test_mini_batches_do_not_depend_on_how_many_are_gathered_at_once_nor_on_the_order_of_asking(make_data):
    given = [
        CROP | {"init_args": {"size": 8, "padding": 2}},
        {"class_path": "RandomRotation", "init_args": {"degrees": 9}},
    ]
    data = make_data(edit=make_uint8, augmentation=given)
    own = data.clients[2]
    one = [step for bundle in own.bundles(5, 4, 1) for step in bundle.steps()]
    many = [step for bundle in own.bundles(5, 4, 3) for step in bundle.steps()]
    backwards = [own.bundles(5, 4, 1)[-1 - index] for index in range(len(one))][::-1]
    assert len(one) == len(many) > 3
    for (x, y), (other_x, other_y), bundle in zip(one, many, backwards, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
        assert torch.equal(x, bundle.x)
    assert not torch.equal(one[0][0], next(iter(own.bundles(6, 4, 1))).x)


def options(data, **more):
    return {"rounds": 3, "data": data, **more}


def test_run_depends_on_neither_bundles_nor_order_and_resumes_exactly(
    make_data, run_federation, set_up_federation, outcome, assert_identical, tmp_path
):
    def fresh():
        crop = {"class_path": "RandomCrop", "init_args": {"size": 8, "padding": 1}}
        return make_data(edit=make_uint8, augmentation=[crop, "RandomHorizontalFlip", v2.ColorJitter(0.3)])

    method = lambda: FedAvg(MLP((1, 8, 8), 4, (8, 5)))  # noqa: E731
    straight = run_federation(method, **options(fresh(), local_epochs=2))
    bundles = run_federation(method, **options(fresh(), local_epochs=2, steps_per_bundle=1))
    assert_identical(outcome(bundles), outcome(straight))
    order = set_up_federation(method, **options(fresh(), local_epochs=2))
    order.fit_order = lambda clients: clients[::-1]
    order.run()
    assert_identical(outcome(order), outcome(straight))
    first = set_up_federation(method, folder=tmp_path, **options(fresh(), local_epochs=2))
    first.advance()
    second = set_up_federation(method, folder=tmp_path, **options(fresh(), local_epochs=2))
    second.load_state_dict(second.checkpoints.load(tmp_path / "checkpoints" / "round-0001.ckpt"))
    second.run()
    second.diary.rows = first.diary.rows[:1] + second.diary.rows
    assert_identical(outcome(second), outcome(straight))
    plain = run_federation(method, **options(make_data(edit=make_uint8), local_epochs=2))
    assert plain.diary.rows[0]["loss"] != straight.diary.rows[0]["loss"]


def test_prototypes_and_accuracies_are_of_images_as_they_are(
    make_data, augmented, sgd, run_federation, assert_identical
):
    """At learning rate 0 a fit changes nothing, so that only what is measured can differ."""
    method = lambda: FedProto(MLP((1, 8, 8), 4, (8, 5)))  # noqa: E731
    with_it = run_federation(method, **options(augmented(), optimizer=sgd(0.0)))
    without = run_federation(method, **options(make_data(edit=make_uint8), optimizer=sgd(0.0)))
    assert_identical(with_it.exchange.state_dict(), without.exchange.state_dict())
    assert with_it.diary.rows[-1]["Local-T"] == without.diary.rows[-1]["Local-T"]
    assert with_it.diary.rows[0]["loss"] != without.diary.rows[0]["loss"]


# --- what is refused ----------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["RandomHorizontalFlop"], "there is no transform of that name; did you mean RandomHorizontalFlip?"),
        ([{"class_path": "RandomCrop", "init_args": {"size": 6, "pading": 2}}], "did you mean padding?"),
        ([{"class_path": "RandomHorizontalFlip", "init_args": {"p": 2.0}}], "RandomHorizontalFlip: "),
        ([{"class_path": "no.such.Module"}], "cannot import no.such.Module"),
        ([{"class": "RandomCrop"}], "must be a name, or hold one under class_path"),
        ([{"class_path": "RandomCrop", "args": {}}], "there is no such key"),
        ("RandomHorizontalFlip", "must be a list"),
    ],
)
def test_what_is_no_transform_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        described(given)
    assert str(caught.value).startswith("data.augmentation")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"class_path": "RandomCrop", "init_args": {"size": 6}}], r"uint8 \[1, 8, 8\] into uint8 \[1, 6, 6\]"),
        ([{"class_path": "RandomCrop", "init_args": {"size": 9}}], "larger than the padded image"),
        (
            [{"class_path": "FiveCrop", "init_args": {"size": 8}}],
            "RuntimeError|one image must come out|fails on images",
        ),
        ([{"class_path": "Normalize", "init_args": {"mean": [0.5], "std": [0.5]}}], "Normalize fails on images"),
        ([{"class_path": "ToDtype", "init_args": {"dtype": torch.float32}}], "must keep an image's shape and type"),
    ],
)
def test_what_does_not_keep_an_image_is_refused_before_training(make_data, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_data(edit=make_uint8, augmentation=given)
    assert "\n" not in str(caught.value)


class Noisy:
    """Noise from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, image):
        return image + torch.from_numpy(self.rng.integers(0, 9, image.shape, dtype=np.uint8))


def test_draws_that_no_seed_reaches_are_refused(make_data):
    with pytest.raises(ConfigError, match=r"^data\.augmentation: Noisy gives other images the second time: .*seeded"):
        make_data(edit=make_uint8, augmentation=[Noisy()])


class Warming:
    """Begins to do something after so many images, which another worker reaches at another client."""

    def __init__(self):
        self.calls = 0

    def __call__(self, image):
        self.calls += 1
        return image if self.calls < 200 else image.flip(-1)


class Remembering(Warming):
    """Has a number that it does not change."""

    def __call__(self, image):
        return image


@pytest.mark.parametrize("kind", [Warming, Remembering])
def test_a_transform_that_counts_on_is_said(make_data, kind, capsys):
    make_data(edit=make_uint8, augmentation=[kind()])
    said = "Warming.calls runs on from one client to the next and is saved nowhere"
    assert (said in capsys.readouterr().err) == (kind is Warming)


def test_data_without_images_is_refused(make_data):
    def tokens(arrays):
        arrays.x, arrays.vocabulary_size = (arrays.x.flatten(1) > 0).long(), 2

    with pytest.raises(ConfigError, match=r"^data.augmentation: needs images .* is int64 \[64\]$"):
        make_data(edit=tokens, augmentation=["RandomHorizontalFlip"])


def test_descriptions_are_complete_and_build_the_same():
    given = [
        "RandomHorizontalFlip",
        {"class_path": "RandomApply", "init_args": {"transforms": ["RandomVerticalFlip", CROP], "p": 0.3}},
        {
            "class_path": "torchvision.transforms.v2.RandomRotation",
            "init_args": {"degrees": 15, "interpolation": "bilinear"},
        },
    ]
    nodes = described(given)
    assert [node["class_path"].rpartition(".")[0] for node in nodes] == ["torchvision.transforms.v2"] * 3
    assert nodes[2]["init_args"] == {"degrees": 15, "interpolation": "bilinear"}
    interpolation = build_augmentation([nodes[2]]).transforms[0].interpolation
    assert getattr(interpolation, "value", interpolation) == "bilinear"
    explicit = {"padding_mode": "constant", "pad_if_needed": False, "fill": 0}
    assert described([{**CROP, "init_args": CROP["init_args"] | explicit}]) == described([CROP])
    assert nodes[1]["init_args"]["transforms"][1] == {**CROP, "class_path": "torchvision.transforms.v2.RandomCrop"}
    assert described(nodes) == nodes
    x = images(6)
    assert torch.equal(build_augmentation(nodes)(x, 1), build_augmentation(given)(x, 1))
    assert build_augmentation([]) is None
    assert build_augmentation(None) is None


def test_arrays_are_not_touched(augmented):
    data = augmented()
    before = data.arrays.x.clone()
    list(data.clients[0].bundles(0, 4))
    assert isinstance(data.arrays, Arrays)
    assert torch.equal(data.arrays.x, before)


def test_a_transform_with_weights_leaves_no_gradients_behind():
    """All steps of a bundle went back through it, of which the second one failed."""

    class Brighter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.by = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, image):
            return image * self.by

    x = images(3) / 255
    own = Augmentation([Brighter()])(x, 0)
    assert not own.requires_grad
    assert torch.equal(own, x * 0.5)


def test_trying_transforms_out_leaves_the_images_as_they_are():
    """The first three of the data set, test samples among them, were erased for the length of the run."""
    x = images(3)
    before = x.clone()
    Augmentation([v2.RandomErasing(1.0, scale=(0.5, 0.5), inplace=True)]).check(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("value", ["random", 300, -3.5, [0.5, 0.25, 0.125]])
@pytest.mark.parametrize("inside", [False, True])
def test_bytes_are_not_erased_with_what_is_no_byte(value, inside):
    """Noise around 0 became 0, 1 and 255, 300 became 44, half a grey black."""
    erasing = {"class_path": "RandomErasing", "init_args": {"value": value}}
    given = {"class_path": "RandomApply", "init_args": {"transforms": [erasing]}} if inside else erasing
    own = build_augmentation(["RandomHorizontalFlip", given])
    with pytest.raises(ConfigError, match=r"^data\.augmentation: RandomErasing on images of bytes .* 0 to 255"):
        own.check(images(3))
    own.check(images(3).float() / 127.5 - 1)


@pytest.mark.parametrize("value", [0, 124, [124, 116, 104]])
def test_bytes_are_erased_with_bytes(value):
    erasing = {"class_path": "RandomErasing", "init_args": {"p": 1.0, "scale": [0.3, 0.3], "value": value}}
    own, x = build_augmentation([erasing]), images(4)
    own.check(x)
    out = own(x, 0)
    channels = value if isinstance(value, list) else [value] * 3
    assert [out[:, c][out[:, c] != x[:, c]].unique().tolist() for c in range(3)] == [[each] for each in channels]


def test_noise_where_bytes_become_floats_before_is_taken():
    turned = [v2.ToDtype(torch.float32), v2.RandomErasing(value="random"), v2.ToDtype(torch.uint8)]
    Augmentation(turned).check(images(3))
    one_by_one = [v2.ToPILImage(), transforms.ToTensor(), transforms.RandomErasing(value="random")]
    Augmentation([*one_by_one, v2.ToDtype(torch.uint8, scale=True)]).check(images(3))
    Augmentation([v2.RandomErasing(p=0.0, value="random")]).check(images(3))


# --- images of floats -------------------------------------------


@pytest.mark.parametrize(
    "transform", [v2.ColorJitter(0.1), v2.RandomApply([v2.RandomInvert()]), v2.RandomSolarize(0.5)]
)
def test_colours_of_images_beyond_0_and_1_are_refused(transform):
    """torchvision cuts floats off at 0 and 1: of what was standardised training saw other images than tests."""
    standardised, given = images(3).float() / 127.5 - 1, images(3).float() / 255
    own = Augmentation([v2.RandomHorizontalFlip(), transform])
    with pytest.raises(
        ConfigError, match=r"^data\.augmentation: \w+ takes images of floats from 0 to 1, and these go from -"
    ):
        own.check(standardised)
    own.check(given)
    build_augmentation([CROP, "RandomHorizontalFlip"]).check(standardised)


def test_colours_are_refused_where_a_shift_leads_images_of_floats_beyond_0_and_1(make_data):
    """Three images were looked at, before the shift: training was cut off at 0 and 1, tests were not."""
    edit = lambda arrays: arrays.x.copy_(torch.rand(arrays.x.shape))  # noqa: E731
    own = {"edit": edit, "augmentation": [v2.ColorJitter(brightness=0.1)]}
    make_data(**own)
    with pytest.raises(ConfigError, match=r"^data\.augmentation: ColorJitter .* and no data\.shift that leads beyond$"):
        make_data(**own, shift=NoiseSkew(0.5))
