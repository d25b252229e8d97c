"""`data.augmentation` and `trainer.precision` from the command line and from files."""

import pytest
import yaml

AUGMENTED = """\
data:
  augmentation:
  - {class_path: RandomCrop, init_args: {size: 8, padding: 1}}
  - RandomHorizontalFlip
"""


@pytest.fixture(scope="module")
def augmented(make_workplace):
    """A finished run with augmentation."""
    place = make_workplace("augmented")
    place.draws = False
    place.write("augmented.yaml", AUGMENTED)
    place.fit("--config", "augmented.yaml", "--federation.rounds", "1")
    return place


def test_augmentation_is_in_the_runs_configuration_with_full_names(augmented):
    config = yaml.safe_load((augmented.run / "config.yaml").read_text())
    assert config["data"]["augmentation"] == [
        {"class_path": "torchvision.transforms.v2.RandomCrop", "init_args": {"size": 8, "padding": 1}},
        {"class_path": "torchvision.transforms.v2.RandomHorizontalFlip"},
    ]


def test_runs_configuration_runs_again_to_the_same_numbers(augmented, assert_same_run):
    augmented.fit("--name", "again", config="runs/run/config.yaml")
    assert_same_run(augmented.run, augmented.run.parent / "again")


def test_augmentation_belongs_to_a_runs_identity(augmented):
    code, _, err = augmented.call("fit", "--config", "exp.yaml", "--resume", "auto", "--federation.rounds", "2")
    assert code == 2
    assert "the checkpoint belongs to another configuration: data.augmentation.0.class_path" in err


def test_misspelt_transform_is_one_line(workplace):
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--data.augmentation", "[RandomHorizontalFlop]")
    assert code == 2
    assert err.startswith("fl-lightning: error: data.augmentation.0: there is no transform of that name; did you mean ")
    assert err.count("\n") == 1
    assert not workplace.run.exists()


def test_transform_that_changes_an_images_shape_is_one_line(workplace):
    crop = "[{class_path: RandomCrop, init_args: {size: 4}}]"
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--data.augmentation", crop)
    assert code == 2
    assert err.startswith("fl-lightning: error: data.augmentation: must keep an image's shape and type")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("16-mixed", "trainer.precision: float16 needs a GPU, and this run has none; use bf16-mixed, got '16-mixed'"),
        ("bf16_mixed", "trainer.precision: must be "),
    ],
)
def test_precision_that_cannot_be_is_one_line_before_anything_is_written(workplace, precision, message):
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--trainer.precision", precision)
    assert code == 2
    assert err.startswith(f"fl-lightning: error: {message}")
    assert err.count("\n") == 1
    assert not workplace.run.exists()
