"""Configurations that come with the package are found by name, away from the repository, too."""

import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning import catalog, shipped
from fl_lightning.command_line import CommandLine
from fl_lightning.table.definition import read_definition

ROOT = Path(__file__).parents[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("quickstart", "quickstart.yaml"),
        ("experiments/quickstart.yaml", "quickstart.yaml"),
        ("fedcpd/cifar10_dirichlet01", "fedcpd/cifar10_dirichlet01.yaml"),
        ("tables/quickstart.yaml", "tables/quickstart.yaml"),
    ],
)
def test_name_means_the_packages_file(elsewhere, given, file):
    assert shipped.path_of(Path(given)) == ROOT / "experiments" / file


@pytest.mark.parametrize("given", ["nothing", "../experiments/quickstart", "/quickstart", ".", "a\0b", "x" * 5000])
def test_other_names_stay_what_they_are(elsewhere, given):
    assert shipped.path_of(Path(given)) == Path(given)


def test_users_own_file_comes_first(elsewhere):
    (elsewhere / "quickstart").write_text("seed: 7\n")
    assert CommandLine(["--config", "quickstart"]).tree["seed"] == 7


def test_configurations_and_tables_are_read_by_name(elsewhere):
    assert CommandLine(["--config", "quickstart"]).tree["name"] == "quickstart"
    table = read_definition(Path("tables/quickstart"))
    assert [row.name for row in table.rows][-1] == "FedCPD"
    assert table.base.files == (ROOT / "experiments" / "quickstart.yaml",)


def test_package_that_is_built_in_its_own_place_keeps_its_sources(tmp_path):
    """What an earlier build has left is taken away before a build; there it is the clone itself."""
    (tmp_path / "fl_lightning").mkdir()
    (tmp_path / "fl_lightning" / "__init__.py").write_text("edited = True\n")
    (tmp_path / "setup.py").write_text(
        (ROOT / "setup.py").read_text().replace("setup(", "setup(packages=['fl_lightning'],")
    )
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build", "--build-lib", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fl_lightning" / "__init__.py").read_text() == "edited = True\n"


def test_package_that_is_built_holds_what_there_is_now(tmp_path, monkeypatch):
    built = tmp_path / "lib" / "fl_lightning"
    for left in ("experiments/moved.yaml", "methods/moved.py"):  # `pip install .` of an earlier version
        (built / left).parent.mkdir(parents=True)
        (built / left).touch()
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build", "--build-base", str(tmp_path), "--build-lib"]
    done = subprocess.run([*command, str(built.parent)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for folder, kind in (("experiments", "yaml"), ("fl_lightning", "py")):
        names = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob(f"*.{kind}")}
        there = built / "experiments" if folder == "experiments" else built
        assert {path.relative_to(there) for path in there.rglob(f"*.{kind}")} == names
    monkeypatch.setattr(catalog, "ROOT", built)
    monkeypatch.chdir(tmp_path)
    assert shipped.path_of(Path("quickstart")) == built / "experiments" / "quickstart.yaml"
