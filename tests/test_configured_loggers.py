"""Which versions the loggers of a resumed run go on under."""

import warnings

import pytest
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.configured_loggers import FILE, build_loggers, keep_versions
from fl_lightning.sealed import read_json, write_json

CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {}}
ELSEWHERE = {**CSV, "init_args": {"name": "other"}}
TENSORBOARD = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {}}
WANDB = {"class_path": "fl_lightning.report.wandb.WandbLogger", "init_args": {}}


def run(folder, *nodes, resumed=True):
    """A process of a run with some loggers; returns their versions."""
    loggers = build_loggers(nodes, folder, resumed)
    loggers.reserve()
    keep_versions(nodes, loggers, folder)
    return loggers.versions


@pytest.fixture
def begun(tmp_path):
    """A run's folder whose CSVLogger has version 1."""
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    assert run(tmp_path, CSV, resumed=False) == {0: 1}
    return tmp_path


def test_logger_goes_on_under_its_version_wherever_it_stands(begun):
    pytest.importorskip("tensorboard")
    assert run(begun, CSV) == {0: 1}
    assert run(begun, TENSORBOARD, CSV) == {0: 2, 1: 1}
    assert run(begun, CSV, resumed=False) == {0: 3}


@pytest.mark.parametrize("other", [ELSEWHERE, TENSORBOARD])
def test_another_logger_at_its_place_has_a_version_of_its_own(begun, other):
    if other is TENSORBOARD:
        pytest.importorskip("tensorboard")
    assert run(begun, other) == ({0: 0} if other is ELSEWHERE else {0: 2})


@pytest.mark.parametrize("node", [CSV, TENSORBOARD])
@pytest.mark.parametrize("said", ["$LOGS/own", "${LOGS}/own", "~/own"])
def test_versions_are_looked_for_where_the_logger_writes(tmp_path, monkeypatch, node, said):
    """Every run's TensorBoard in "$LOGS" had version 0, in one another's folder; a CSVLogger's folder was "$LOGS"."""
    if node is TENSORBOARD:
        pytest.importorskip("tensorboard")
    for name in ("LOGS", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    own = {**node, "init_args": {"save_dir": said, "name": ""}}
    for version in (0, 1):
        run_folder = tmp_path / f"run{version}"
        run_folder.mkdir()
        assert run(run_folder, own, resumed=False) == {0: version}
        assert (tmp_path / "own" / f"version_{version}").is_dir()
    assert not [*tmp_path.glob("$*")]


@pytest.mark.parametrize("old", [False, True])
def test_wandb_takes_no_version_of_another_logger(begun, old):
    """W&B refused the number, which it takes for its id, in this resumption and all later ones."""
    pytest.importorskip("wandb")
    if old:
        write_json(begun / FILE, {"0": 1})
    (logger,) = build_loggers([WANDB], begun, resumed=True).present
    assert logger._id is None
    assert run(begun, WANDB) == {}
    assert read_json(begun / FILE, "file") == {"loggers": []}


def test_file_of_an_older_version_is_read(begun):
    write_json(begun / FILE, {"0": 1})
    assert run(begun, CSV) == {0: 1}


def test_nothing_alarms_where_a_logger_goes_on(begun, monkeypatch):
    """Lightning says that files will be deleted, whose rows are all written again."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # a test of several processes may have left another
    (begun / "lightning_logs" / "version_1" / "hparams.yaml").touch()

    def warned(node, resumed):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            build_loggers([node], begun, resumed).log_hyperparams({"a": 1})
        return [each for each in said if "will be deleted" in str(each.message)]

    assert warned(CSV, resumed=True) == []
    assert len(warned({**CSV, "init_args": {"version": 1}}, resumed=False)) == 1  # somebody else's files
