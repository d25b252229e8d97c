"""Every file of experiments/ parses, and the README shows the files and commands that exist."""

import re
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import config_parser, parse_config, plain_config
from fl_lightning.precheck import FILLED_IN, given_keys, precheck

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_experiment_parses(path):
    argv = ["--config", str(path)]
    precheck(argv)
    config = plain_config(parse_config(config_parser("fit", ""), argv))
    assert config["method"]["class_path"].startswith("fl_lightning.methods.")
    assert config["federation"]["rounds"] >= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_experiment_types_nothing_that_follows_from_the_data(path):
    members = {key.rpartition(".")[2] for key in given_keys(["--config", str(path)]) if "." in key}
    assert members.isdisjoint(FILLED_IN)


def test_readme_shows_the_quickstart_file():
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert yaml.safe_load((ROOT / "experiments/quickstart.yaml").read_text()) in [
        yaml.safe_load(text) for text in shown
    ]


def test_readme_names_pictures_and_targets_that_exist():
    readme = (ROOT / "README.md").read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme):
        assert (ROOT / picture).is_file(), picture
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", readme, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
