"""What a beginner mistypes or misplaces is answered with what to do instead, and nothing is left behind."""

import inspect
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelSummary

from fl_lightning.cli import main
from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError, chosen_names, is_near, listed_names, suggest
from fl_lightning.federation.flags import check_flags
from fl_lightning.federation.trainers import UNFIT, check_callbacks, check_kinds, make_trainer, report_profile

QUICK = ["fit", "--config", "quickstart", "--federation.rounds", "1"]
NETWORK = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(64, hidden)
"""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--trainer.callbacks", "EarlyStoping"], ["trainer.callbacks", "did you mean EarlyStopping?"]),
        (["--model", "mine.Net"], ["subclass of SplitModel", "WrappedModel", "LibraryModel", "mine.Net"]),
        (["--data.num_clients", "5000"], ["data.num_clients", "at most 89", "min_samples 20", "1797", "5000"]),
        (["--method", "nowhere.Mine"], ["there is no module nowhere in", "in the folder where it lies", "PYTHONPATH"]),
        (["--method", "pFedHN"], ["there is no method of that name", "fl-lightning list methods", "pFedHN"]),
        (["--optimizer.lr", "fast"], ["optimizer.lr", "must be float", "fast"]),
        (["--trainer.callbacks", "LearningRateMonitor"], ["LearningRateMonitor", "needs a logger", "lr_decay"]),
        (
            ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "los"],
            ["trainer.callbacks", "EarlyStopping can watch", "loss, loss/cross_entropy", "'los'"],
        ),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else None,
)
def test_mistake_is_answered_with_what_to_do(tmp_path, monkeypatch, capsys, argv, said):
    (tmp_path / "mine.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([*QUICK, *argv])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert [part for part in said if part not in line] == [], line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1"], "lr: there is no such section; did you mean optimizer.lr?"),
        (["--rounds", "3"], "rounds: there is no such section; did you mean federation.rounds?"),
        (["--num_clients", "3"], "num_clients: there is no such section; did you mean data.num_clients?"),
        (["--gpu", "0"], "gpu: there is no such section; did you mean trainer.accelerator?"),
        (["--overwrit"], "overwrit: there is no such section or option; did you mean overwrite?"),
        (["--config="], "config: needs a file: --config FILE"),
        (["-gr", "10"], "-gr: there is no such option; did you mean --federation.rounds?"),
        (["method=fedrep"], "method=fedrep: an option begins with two dashes: --method fedrep"),
        (
            ["--config", "quickstrat"],
            "--config: there is no such file, nor one of ours; did you mean quickstart?",
        ),
        (
            ["--config", "tables/quickstart"],
            "title: belongs to the file of a table or a search: fl-lightning table",
        ),
    ],
)
def test_a_key_without_its_section_is_told_where_it_belongs(words, said, capsys):
    """Nothing was near, or `logger` for `lr`."""
    with pytest.raises(SystemExit) as stopped:
        main([*QUICK, *words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_key_is_not_blamed_for_having_the_value_of_another():
    """It was `federation.checkpoint.every: keys must begin within federation.rounds (1), got 2`."""
    failures = ["--federation.failures", "{2: [0]}", "--federation.rounds", "1"]
    for words, key, value in [
        ([*failures, "--federation.checkpoint.every", "2"], "federation.failures.schedule", 2),
        (["--federation.newcomers", "2", "--federation.checkpoint.every", "0"], "federation.newcomers.after", 0),
        (["--method", "FedProx", "--method.mu", "-1"], "method.weight", -1),
    ]:
        said = CommandLine(words).as_written(ConfigError(key, "must be another", value)).key
        assert said == ("method.mu" if key == "method.weight" else key)


@pytest.mark.parametrize("command", ["table", "tune"])
def test_a_runs_file_is_none_of_a_tables(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "quickstart"])
    assert stopped.value.code == 2
    said = "seed: belongs to a run's file: fl-lightning fit --config FILE runs it"
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_callbacks_that_would_fail_in_every_fit_are_refused_and_own_ones_are_not():
    given = {"StochasticWeightAveraging": {"swa_lrs": 0.1}, "ThroughputMonitor": {"batch_size_fn": len}}
    given |= {
        "GradientAccumulationScheduler": {"scheduling": {0: 2}},
        "ModelPruning": {"pruning_fn": "l1_unstructured"},
    }
    given |= {"OnExceptionCheckpoint": {"dirpath": "."}}
    for name in (name for names in UNFIT for name in names if hasattr(callbacks, name)):
        class_ = getattr(callbacks, name)
        with pytest.raises(ConfigError, match=rf"trainer\.callbacks: {name} (needs|searches)"):
            check_callbacks(SimpleNamespace(callbacks=[class_(**given.get(name, {}))]), ["loss"])
    for base in (callbacks.ModelCheckpoint, callbacks.ProgressBar):  # these Lightning refuses whosever they are
        own = type("Own", (base,), {"__module__": "mine"})
        with pytest.raises(ConfigError, match=r"^trainer\.callbacks: Own needs a (fit that is saved|single fit)"):
            make_trainer({"callbacks": own()})
    own = type("Own", (callbacks.BackboneFinetuning,), {"__module__": "mine"})
    check_callbacks(SimpleNamespace(callbacks=[own(), callbacks.Timer(), callbacks.LambdaCallback()]), ["loss"])


@pytest.mark.parametrize(
    ("name", "given", "rule"),
    [
        ("EarlyStopping", {"monitor": "loss", "check_on_train_epoch_end": False}, "EarlyStopping would never look"),
        ("Timer", {"duration": "00:00:00:00"}, "Timer leaves a fit no time"),
        (
            "LambdaCallback",
            {"on_validation_end": print, "on_save_checkpoint": print},
            "LambdaCallback does something in on_validation_end, on_save_checkpoint alone, which no client's fit calls",
        ),
    ],
)
def test_callbacks_that_do_nothing_or_let_nobody_train_are_refused(name, given, rule):
    own = getattr(callbacks, name)(**given)
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {rule}"):
        check_callbacks(SimpleNamespace(callbacks=[own]), ["loss"])


class Validates(callbacks.Callback):
    """Does what no fit asks for."""

    def state_dict(self):
        return {"seen": 0}

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("own", 1.0)


class Trains(Validates):
    """As well as what one does."""

    def on_train_end(self, trainer, pl_module):
        self.on_validation_epoch_end(trainer, pl_module)


def test_callback_of_ones_own_that_no_fit_calls_is_refused():
    """It was never called, without a word."""
    with pytest.raises(
        ConfigError, match=r"^trainer\.callbacks: Validates does something in on_validation_epoch_end alo"
    ):
        check_callbacks(SimpleNamespace(callbacks=[Validates()]), ["loss"])
    check_callbacks(SimpleNamespace(callbacks=[Trains()]), ["loss"])


@pytest.mark.parametrize("name", ["WeightAveraging", "SpikeDetection", "DeviceStatsMonitor", "LearningRateFinder"])
def test_classes_of_ones_own_are_what_they_derive_from(name):
    """They failed in the first fit, in other words."""
    base = getattr(callbacks, name, None)
    if base is None:
        pytest.skip(f"this Lightning has no {name}")
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: Mine (needs|searches)"):
        check_kinds([object.__new__(type("Mine", (base,), {}))])


def test_epochs_between_validations_are_refused():
    """Early stopping, which Lightning lets look at validations then, never looked."""
    with pytest.raises(ConfigError, match=r"^trainer\.check_val_every_n_epoch: a fit validates nothing"):
        check_flags({"check_val_every_n_epoch": 2})


UNHEEDED = [
    ("limit_val_batches", 2), ("limit_test_batches", 1), ("limit_predict_batches", 0.5), ("num_sanity_val_steps", 2),
    ("inference_mode", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNHEEDED)
def test_flags_of_what_no_fit_does_are_refused_with_what_there_is_instead(name, value):
    """They were taken, and did nothing."""
    said = rf"^trainer\.{name}: must be left out: .*(federat|validat).*, got {value!r}$"
    with pytest.raises(ConfigError, match=said):
        check_flags({name: value})


def test_lightnings_own_defaults_are_no_such_flags():
    usual = inspect.signature(L.Trainer.__init__).parameters
    check_flags({name: usual[name].default for name, _ in UNHEEDED if name in usual})  # of this Lightning
    check_flags({"limit_val_batches": 0, "limit_test_batches": 1.0, "num_sanity_val_steps": 0, "log_every_n_steps": 1})


def test_batch_norm_is_not_synchronised_on_cpus():
    """It ended in the first round, its folder begun."""
    with pytest.raises(ConfigError, match=r"^trainer\.sync_batchnorm: needs GPUs"):
        make_trainer({"accelerator": "cpu", "devices": 2, "sync_batchnorm": True})


def test_partition_without_its_argument_is_told_where_it_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["partition", "--data.dataset", "Digits", "--data.partition", "Dirichlet"])
    line = capsys.readouterr().err
    assert "data.partition.init_args.beta: must be given" in line
    assert "--data.partition.beta VALUE" in line


def test_partition_needs_neither_method_nor_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["partition", "--data.dataset", "Digits", "--data.partition", "IID", "--data.num_clients", "3"])
    assert stopped.value.code == 0
    assert "total" in capsys.readouterr().out
    assert (tmp_path / "partition.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "other", "near"),
    [
        ("fedrap", "fedrep", True),
        ("sdg", "sgd", True),
        ("recieved", "received", True),
        ("clients", "num_clients", True),
        ("houldout", "holdout", True),
        ("pfedme", "fedrep", False),
        ("los", "name", False),
    ],
)
def test_only_what_could_be_meant_is_suggested(name, other, near):
    assert is_near(name, other) is near
    assert ("did you mean" in suggest(name, [other, "zzzzzzzzz"])) is near


def test_models_summary_is_printed_once_for_all_fits(monkeypatch):
    printed = []
    monkeypatch.setattr(ModelSummary, "on_fit_start", lambda *arguments: printed.append(arguments))
    trainer = make_trainer({"accelerator": "cpu", "callbacks": [ModelSummary()]})
    for _ in range(3):
        trainer.callbacks[0].on_fit_start(trainer, None)
    assert len(printed) == 1


def test_profiler_reports_once_for_all_fits(caplog):
    trainer = make_trainer({"accelerator": "cpu", "profiler": "simple"})
    for _ in range(3):
        trainer.profiler.describe()  # as Lightning does after every fit
    assert caplog.text == ""
    with trainer.profiler.profile("step"):
        pass
    report_profile(trainer)
    assert caplog.text.count("Profiler Report") == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("FedAvg,FedProx", ("FedAvg", "FedProx")),
        (" MNIST, 2 classes , FedAvg ,", ("MNIST, 2 classes", "FedAvg")),
        ("MNIST,2 classes,a,b", ("MNIST, 2 classes", "a,b")),
        ("MNIST", ("MNIST",)),  # for the caller to refuse
        ("", ()),
        (None, ()),
    ],
)
def test_a_list_of_names_knows_names_with_commas(text, names):
    assert listed_names(text, ["FedAvg", "FedProx", "MNIST, 2 classes", "a,b"]) == names


@pytest.mark.parametrize("text", ["", " , "])
def test_a_choice_that_names_nothing_is_not_all(text):
    """A script whose variable was not set ran the whole table."""
    with pytest.raises(ConfigError, match=r"^--only: names nothing; leave it out for all"):
        chosen_names("--only", text, ["FedAvg"])
    assert chosen_names("--only", None, ["FedAvg"]) == ()
