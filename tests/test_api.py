"""Experiments from Python: configuration, fit, what a run gives, and the process that is left as it was."""

import gc
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fl_lightning
from fl_lightning import ConfigError, Experiment, Run
from fl_lightning.api import _handing_over, _take_back
from fl_lightning.command_line import CommandLine
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.parser import resolve
from fl_lightning.reading import dump_yaml
from fl_lightning.table.overlays import option
from fl_lightning.trust import Trust


def resolved(*argv):
    return resolve(CommandLine(argv).tree, Trust())


def test_an_error_that_is_said_as_it_is_has_no_cause_that_is_itself():
    """Who follows causes would never come to an end."""
    with pytest.raises(ConfigError) as raised:
        Experiment("quickstart", federation__rounds=-1)
    seen = error = raised.value
    while (error := error.__cause__) is not None:
        assert error is not seen


def test_what_is_no_data_set_hears_how_to_bring_one():
    with pytest.raises(ConfigError, match="subclass of Dataset; bring a torch data set, a LightningDataModule"):
        Experiment("quickstart", {"data": {"dataset": {"class_path": "lightning.LightningDataModule"}}})


@pytest.mark.parametrize("text", ["[cat]", "a: b", "{x}", "plain", "1e3"])
def test_a_text_of_python_stays_a_text_where_the_key_takes_one(text):
    """A column's name in brackets was read as a list of it."""
    data = {"dataset": "CSVTable", "partition": "IID", "num_clients": 2, "batch_size": 8}
    own = {"data.dataset.path": "table.csv", "data.dataset.label": text}
    said = Experiment({"data": data, "model": "MLP", "method": "FedAvg"}, own)
    assert said.config["data"]["dataset"]["init_args"]["label"] == text


@pytest.mark.parametrize(
    "said",
    [
        lambda: Experiment("quickstart", method__mu=0.5, method__class_path="FedProx"),
        lambda: Experiment("quickstart", {"method.init_args": {"mu": 0.5}, "method.class_path": "FedProx"}),
    ],
    ids=["keywords", "dotted keys"],
)
def test_a_class_that_is_named_after_its_arguments_keeps_them(said):
    """It began with its own defaults, though keywords come in any order."""
    assert said().config["method"]["init_args"]["mu"] == 0.5


@pytest.mark.parametrize(("named", "lr"), [("AdamW", 0.001), ("SGD", 0.01), ("RMSprop", 0.01), ("Adam", 0.5)])
def test_an_optimizer_that_is_named_after_another_takes_nothing_of_it(named, lr):
    """It had the learning rate that was tuned for the other one; SGD lost that, and kept the weight decay."""
    first = {"optimizer": {"class_path": "Adam", "init_args": {"lr": 0.5, "weight_decay": 0.25}}}
    found = Experiment("quickstart", first, optimizer=named).config["optimizer"]["init_args"]
    assert found["lr"] == lr
    assert (found["weight_decay"] == 0.25) == (named == "Adam")


def test_nothing_is_no_name_of_a_folder():
    """Runs went into a folder called null."""
    with pytest.raises(ConfigError, match=r"^output: must be str, got None$"):
        Experiment("quickstart", output=None)
    assert Experiment("quickstart", name=None).config["name"] is None


@pytest.mark.parametrize("text", ["null", "~", "Null", "#1", "true", "12"])
def test_a_name_of_python_stays_what_it_is(text, tmp_path):
    """Runs called "null" or "#1" went into the folder of their method, data set and seed."""
    own = Experiment("quickstart", name=text)
    assert (own.name, own.config["name"]) == (text, text)
    (tmp_path / "config.yaml").write_text(dump_yaml(own.config))
    assert Experiment(tmp_path / "config.yaml").name == text


def test_a_text_that_looks_like_a_comment_is_no_null():
    """A table's CSVTable had no groups where their column is called "#subject", and clients shared their samples."""
    given = {"path": "any.csv", "label": "y", "group": "#subject"}
    data = {"partition": "IID", "num_clients": 2, "dataset": {"class_path": "CSVTable", "init_args": given}}
    file = {"method": "Local", "model": "MLP", "data": data}
    plain = {**file, "data": {**data, "dataset": {"class_path": "CSVTable", "init_args": {**given, "group": None}}}}
    key = "data.dataset.init_args.group"
    for more in ([], [f"--{key}", "#subject"], [option(key, "#subject")]):
        found = resolve(CommandLine([plain if more else file, *more]).tree, Trust())
        assert found["data"]["dataset"]["init_args"]["group"] == "#subject"
    assert resolve(CommandLine([file, f"--{key}=null"]).tree, Trust())["data"]["dataset"]["init_args"]["group"] is None
    snippet = "# of a file\n{rounds: 3}"
    assert resolve(CommandLine([file, "--federation", snippet]).tree, Trust())["federation"]["rounds"] == 3


def test_what_options_say_inside_what_has_no_type_is_yaml_too():
    """Such a configuration could not be written, and --overwrite had deleted the run by then."""
    own = ["--logger", "TensorBoardLogger", "--logger.dict_kwargs.flush_secs", "5"]
    whole = resolved("--config=quickstart", *own)
    assert whole["logger"][0]["dict_kwargs"] == {"flush_secs": 5}
    crops = {"class_path": "RandomCrop", "init_args": {"size": 8}}
    data = {"augmentation": [crops, {"class_path": "RandomHorizontalFlip"}]}
    words = ["--data.augmentation.0.padding", "2", "--data.augmentation.1.p", "0.9"]
    found = resolve(CommandLine(["--config=quickstart", {"data": data}, *words]).tree, Trust())["data"]["augmentation"]
    assert [entry["init_args"] for entry in found] == [{"size": 8, "padding": 2}, {"p": 0.9}]


def test_a_section_of_comments_alone_says_nothing():
    """It wiped what the files before it said, where later ones win key by key."""
    first = {"method": {"class_path": "FedProx", "init_args": {"mu": 0.5}}, "trainer": {"gradient_clip_val": 1.0}}
    first |= {"optimizer": {"class_path": "Adam", "init_args": {"lr": 0.003}}, "federation": {"rounds": 50}}
    later = {"method": {"class_path": "FedProx", "init_args": None}, "model": {"init_args": None}}
    first |= {"model": {"init_args": {"hidden": [8]}}}
    later |= dict.fromkeys(("optimizer", "federation", "trainer", "data"))
    whole = resolve(CommandLine(["--config=quickstart", first, later]).tree, Trust())
    assert whole["method"]["init_args"]["mu"] == 0.5
    assert whole["model"]["init_args"]["hidden"] == [8]
    assert whole["optimizer"]["class_path"] == "torch.optim.Adam"
    assert whole["optimizer"]["init_args"]["lr"] == 0.003
    assert (whole["federation"]["rounds"], whole["trainer"]["gradient_clip_val"]) == (50, 1.0)
    cleared = resolve(CommandLine(["--config=quickstart", {"data": {"shift": None}, "logger": None}]).tree, Trust())
    assert cleared["data"]["shift"] is None
    assert not cleared["logger"]


def test_importing_the_package_imports_nothing_heavy():
    code = "import fl_lightning, sys; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {"Experiment", "Run", "load", "ConfigError"} <= set(dir(fl_lightning))


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Experimnet'"):
        _ = fl_lightning.Experimnet


# --- configuration ----------------------------------------------------------------------------------------------------

PROX = ("--config=quickstart", "--method=FedProx", "--method.mu=0.1", "--federation.rounds=3")


@pytest.mark.parametrize(
    "said",
    [
        lambda: Experiment("quickstart", method="FedProx", method__mu=0.1, federation__rounds=3),
        lambda: Experiment("quickstart", federation__rounds=3, method__mu=0.1, method="FedProx"),
        lambda: Experiment.from_yaml("quickstart", {"method": "FedProx", "method.mu": 0.1, "federation.rounds": 3}),
        lambda: Experiment("quickstart", method=FedProx, method__init_args__mu=0.1, federation={"rounds": 3}),
        lambda: Experiment(
            "quickstart",
            {"method": {"class_path": "FedProx", "init_args": {"mu": 0.1}}},
            {"federation": {"rounds": np.int64(3)}},
        ),
        lambda: Experiment(
            Path("experiments/quickstart.yaml"), {"federation.rounds": "3"}, method__mu="0.1", method="FedProx"
        ),
    ],
    ids=["keywords", "in any order", "dotted keys", "a class", "sections", "a path and texts"],
)
def test_python_says_what_the_command_line_says(said):
    assert said().config == resolved(*PROX)


def test_short_forms_and_lists_are_those_of_the_command_line():
    made = Experiment("quickstart", federation__failures={3: (0, 4)}, federation__wire=["TopK"], logger=None, name="1")
    options = ("--federation.failures={3: [0, 4]}", "--federation.wire=[TopK]", "--logger=null", "--name=1")
    assert made.config == resolved("--config=quickstart", *options)
    whole = {"failures": {3: (0, 4)}, "wire": ["TopK"]}  # a whole section by keyword is what a file would say
    assert Experiment("quickstart", federation=whole, logger=None, name="1").config == made.config


def test_what_is_resolved_is_taken_as_it_is():
    config = resolved(*PROX)
    assert Experiment(config).config == config


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"federation__round": 3}, r"federation\.round: there is no such key; did you mean rounds\?"),
        ({"federatoin__rounds": 3}, r"federatoin\.rounds: there is no such section; did you mean federation\?"),
        ({"method": "FedRepp"}, r"method: there is no method of that name; did you mean FedRep\?"),
        ({"federation__rounds": "three"}, r"federation\.rounds: must be int, got 'three'"),
        ({"optimizer__lr": float("nan")}, r"optimizer\.lr.*: must be a finite number, got nan"),
        ({"method": object()}, r"method: must be plain data, or a class with its arguments"),
        ({"data__partition__beta": -1}, r"data\.partition\.beta: must be .*, got -1"),
        ({"method": type("Local", (), {"__module__": "__main__"})}, "method: must be a class of a module"),
    ],
)
def test_mistakes_are_one_line_and_an_exception(overrides, line):
    with pytest.raises(ConfigError, match=line) as caught:
        Experiment("quickstart", **overrides)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_exception():
    with pytest.raises(ConfigError, match="--config: there is no such file, got 'nowhere'"):
        Experiment("nowhere")


# --- fit and run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(trial):
    return trial(name="run", federation__rounds=2).fit()


def test_run_gives_numbers_as_tables(run):
    assert run.finished
    metrics, clients = run.metrics, run.clients
    assert list(metrics["round"]) == [1, 2]
    assert metrics["Local-T"].iloc[-1] == run.summary["last"]["Local-T"] == run.rounds[-1]["Local-T"]
    assert metrics["receive_drop"].dtype == float
    assert np.isnan(metrics["receive_drop"].iloc[0])
    assert len(clients) == 2 * 4
    assert clients[clients["round"] == 2]["Local-T"].mean() == pytest.approx(metrics["Local-T"].iloc[-1])


def test_run_computes_its_accuracies_again_to_the_last_bit(run):
    again = run.evaluate()
    last = run.metrics.iloc[-1]
    assert {name: last[name] for name in again if "received" not in name} == {
        name: value for name, value in again.items() if "received" not in name
    }
    assert again["Local-T_received"] == run.summary["final_received"]["Local-T_received"]


def test_run_is_read_back_from_its_folder(run):
    again = Run.load(str(run.folder))
    assert again.summary == run.summary
    assert again.config == run.config
    with pytest.raises(ConfigError, match="there is no run in that folder"):
        Run.load(run.folder / "models")


def test_without_pandas_a_table_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"run\.metrics: needs pandas: pip install 'fl-lightning\[pandas\]'"):
        _ = run.metrics
    assert len(run.rounds) == 2


def test_pictures_and_page(run, trial):
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    other = trial(name="other", method="FedAvg", federation__rounds=1).fit()
    both = run.plot(other, columns=("Local-T", "loss", "eval_loss/Local-T", "receive_drop"))
    titles = [axes.get_title(loc="left") for axes in both.axes]
    assert titles == ["Local-T, %", "loss", "eval_loss/Local-T", "receive_drop, %"]
    drawn = both.axes[2].lines[0].get_ydata()
    assert drawn.tolist() == [row["eval_loss/Local-T"] for row in run.rounds]
    for columns in ((), "loss", None, [1]):  # a division by zero, and panels of l, o, s and s
        with pytest.raises(
            ConfigError, match=r"run\.plot: columns must be names in a list, as columns=\['loss'\], got"
        ):
            run.plot(other, columns=columns)
    page = run.report(other)
    assert page == run.folder / "report.html"
    assert "FedAvg" in page.read_text()


@pytest.mark.parametrize("round", ["", "nan"])
def test_one_run_is_plotted_without_a_row_that_is_damaged(run, tmp_path, round):
    """It was a TypeError or a ValueError, though a page and a picture of several runs left the row out."""
    head, first, second = (run.folder / "metrics.csv").read_text().splitlines()
    (tmp_path / "config.yaml").write_text((run.folder / "config.yaml").read_text())
    (tmp_path / "metrics.csv").write_text("\n".join([head, first, second.replace("2", round, 1), ""]))
    (line,) = (line for line in Run.load(tmp_path).plot().axes[1].lines if line.get_label() == "loss")
    assert line.get_xdata().tolist() == [1]


def test_fit_answers_a_folder_that_holds_a_run(run, trial, capsys):
    with pytest.raises(ConfigError, match="holds a run"):
        trial(name="run", federation__rounds=2).fit()
    longer = trial(name="run", federation__rounds=3)
    assert [row["round"] for row in longer.fit(resume="auto").rounds] == [1, 2, 3]
    capsys.readouterr()
    shorter = trial(name="run", federation__rounds=1).fit(resume="auto")
    assert shorter.config["federation"]["rounds"] == len(shorter.rounds) == 3  # config.yaml said 1
    said = capsys.readouterr()
    assert "federation.rounds: the run has 3 rounds already, and config.yaml goes on saying so" in said.out + said.err


def test_a_run_that_was_moved_goes_on_where_it_lies(trial, tmp_path):
    """It began anew in the folder that its configuration names, in silence."""
    run, moved = trial(name="moves", federation__rounds=1).fit(), tmp_path / "moved" / "it"
    shutil.copytree(run.folder, moved)
    shutil.rmtree(run.folder)
    longer = Experiment(moved / "config.yaml", {"federation": {"rounds": 2}})
    again = longer.fit(resume="auto")
    assert (again.folder, longer.folder, len(again.rounds), run.folder.exists()) == (moved, moved, 2, False)
    other = Experiment(moved / "config.yaml", name="other", output=tmp_path)
    assert other.fit(resume="auto").folder == tmp_path / "other"
    changed = Experiment(moved / "config.yaml")
    changed.config["name"] = "by-hand"
    assert changed.fit(resume="auto").folder == moved.parent / "by-hand"


def test_a_run_says_what_its_folder_holds_now(trial):
    """Its configuration was that of the run that the folder had held, beside the numbers of the new one."""
    old = trial(name="replaced", method="FedRep", federation__rounds=1).fit()
    assert old.config["method"]["class_path"].endswith("FedRep")
    new = trial(name="replaced", method="FedAvg", federation__rounds=2).fit(overwrite=True)
    assert old.config == new.config
    assert old.finished
    assert old.evaluate() == new.evaluate()


class Process:
    """What a run must leave as it was."""

    def __init__(self):
        self.torch = torch.get_rng_state()
        self.others = str(np.random.get_state()[1].tolist()), random.getstate()
        self.threads = torch.get_num_threads(), threading.active_count()
        self.signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.warnings = list(warnings.filters)
        self.files = len(os.listdir("/dev/fd"))
        self.flags = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        self.environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}

    def assert_same(self):
        now = Process()
        assert torch.equal(now.torch, self.torch)
        assert {**vars(now), "torch": 0} == {**vars(self), "torch": 0}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_fit_leaves_the_process_as_it_was_and_nothing_behind(trial):
    loops = []

    class Watch(FederationCallback):
        def on_run_end(self, loop, summary):
            loops.append(weakref.ref(loop))

    options = {"federation__rounds": 1, "federation__threads": 1}
    trial(name="left-0", **options).fit()  # what is loaded once in a process
    before = Process()
    for index in range(1, 3):
        trial(name=f"left-{index}", **options).fit(callbacks=[Watch()])
    before.assert_same()
    gc.collect()
    assert [loop() for loop in loops] == [None, None]


@contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "double": double,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_fit_does_not_reach_into_it(name, trial):
    """Autocast and another default type moved its figures, and its folder said nothing of them."""
    plain = trial(name="nothing-around", federation__rounds=1).fit(overwrite=True)
    with AROUND[name]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        run = trial(name=f"around-{name}", federation__rounds=1).fit()
        evaluated = run.evaluate()
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    assert after == before
    assert run.summary["last"] == plain.summary["last"]
    assert evaluated == plain.evaluate()


class Exactness(FederationCallback):
    """What torch makes of products, and of modules that are moved, in a round."""

    def on_round_end(self, loop, row):
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        self.seen = torch.get_float32_matmul_precision(), overwrites


@pytest.mark.parametrize("a_backend_each", [False, True])
def test_how_exact_products_are_does_not_reach_into_a_fit(a_backend_each, trial):
    """Of bfloat16 they moved figures, and the run's folder said nothing of them."""
    matmul = torch.backends.mkldnn.matmul if hasattr(torch.backends.mkldnn, "matmul") else None
    if a_backend_each and not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch keeps one setting for all backends")
    watch = Exactness()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.set_float32_matmul_precision("medium")
    try:
        if a_backend_each:
            torch.set_float32_matmul_precision("highest")
            matmul.fp32_precision = "bf16"
        trial(name=f"exact-{a_backend_each}", federation__rounds=1).fit(callbacks=[watch])
        assert watch.seen == ("highest", False)
        assert torch.__future__.get_overwrite_module_params_on_conversion()
        now = matmul.fp32_precision if a_backend_each else torch.get_float32_matmul_precision()
        assert now == ("bf16" if a_backend_each else "medium")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.set_float32_matmul_precision("highest")


class LateInterrupt(FederationCallback):
    """Ctrl-C as the last round ends."""

    def on_round_end(self, loop, row):
        if loop.round == loop.settings.rounds:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_in_the_last_round_ends_a_row_of_fits(workers, trial, capfd):
    """It was swallowed, and the next fit began."""
    own = trial(name=f"late-{workers}", federation__rounds=2, federation__workers=workers)
    with pytest.raises(KeyboardInterrupt):
        own.fit(callbacks=[LateInterrupt()])
    assert Run(own.folder).finished
    assert "stopping once round 2 is saved" in capfd.readouterr().err


class Interrupt(FederationCallback):
    """Ctrl-C in a round, so many times."""

    def __init__(self, times):
        self.times = times

    def on_client_fit_end(self, loop, report):
        if loop.round == 1 and report.client == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_models_of_an_earlier_end_are_not_given_out_as_the_last_ones(trial, capsys):
    """A run that goes on without keeping models kept those of its first end."""
    run = trial(name="went-on", federation__rounds=1).fit()
    assert len(list((run.folder / "models").iterdir())) == run.summary["clients"]
    changes = {"federation__rounds": len(run.rounds) + 1, "federation__checkpoint__models": False}
    longer = trial(name="went-on", **changes).fit(resume="auto")
    assert list((longer.folder / "models").iterdir()) == []
    with pytest.raises(ConfigError, match="this run keeps no models"):
        longer.model(client=0)
    capsys.readouterr()
    done = len(longer.rounds)
    changes = {"federation__rounds": done + 1, "federation__checkpoint__every": 0}
    last = trial(name="went-on", **changes).fit(resume="auto")
    with pytest.raises(ConfigError, match=r"^client: "):  # it has no global model, and keeps no other
        last.model()
    assert f"has {done + 1} rounds, and was last saved after round {done}" in capsys.readouterr().err


class Ends(FederationCallback):
    """Ends the run in round 2."""

    def __init__(self, error):
        self.error, self.seen = error, 0

    def on_round_end(self, loop, row):
        self.seen = len(list(loop.runner.pool.folder.glob("*.states")))
        if loop.round == 2 and self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "error", [None, ZeroDivisionError("mine"), KeyboardInterrupt()], ids=["ends", "fails", "stops"]
)
def test_states_that_nothing_saves_do_not_stay_on_disk(trial, error):
    """All clients' states stayed for good, and each start added as much."""
    options = {"name": f"unsaved-{type(error).__name__}", "federation__rounds": 3, "federation__pool": "disk"}
    experiment, ends = trial(**options, federation__checkpoint__every=0), Ends(error)
    with nullcontext() if error is None else pytest.raises(type(error)):
        experiment.fit(callbacks=[ends])
    assert ends.seen == 1
    assert list((experiment.folder / "checkpoints" / "clients").iterdir()) == []


def test_a_run_that_saves_no_more_leaves_what_is_saved_whole(trial):
    options = {"name": "saves-no-more", "federation__pool": "disk", "federation__checkpoint__keep": 2}
    experiment = trial(**options, federation__rounds=2)
    saved = [path for path in contents(experiment.fit().folder / "checkpoints") if path.suffix in (".ckpt", ".states")]
    for resume in range(2):
        changes = {"federation__checkpoint__every": 0, "federation__workers": 1 + resume}
        trial(**options, federation__rounds=3, **changes).fit(resume="auto")
        there = contents(experiment.folder / "checkpoints")
        assert [path for path in there if path.suffix in (".ckpt", ".states")] == saved
    trial(**options, federation__rounds=3).fit(resume="auto")


class Moves(FederationCallback):
    """Moves the folder away in round 2 and lets another run begin in its place."""

    def __init__(self, folder, begin):
        self.folder, self.begin = folder, begin

    def on_round_end(self, loop, row):
        if loop.round == 1:
            self.folder.rename(self.folder.with_name("moved"))
            self.begin()
            self.files = contents(self.folder)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_whose_folder_is_moved_writes_into_no_other(trial):
    """It went on in the next run of that name: its rows, its checkpoints and its summary in that one's."""
    one = trial(name="place", federation__rounds=3)
    moves = Moves(one.folder, lambda: trial(name="place", federation__rounds=2, seed=7).fit())
    with pytest.raises(OSError, match=r"^cannot write \S+place: it was moved, and another folder is there now$"):
        one.fit(callbacks=[moves])
    assert contents(one.folder) == moves.files
    assert Run(one.folder).finished
    assert len(Run(one.folder.with_name("moved")).rounds) == 1


class Counts(FederationCallback):
    def __init__(self):
        self.rounds = 0

    def on_round_end(self, loop, row):
        self.rounds += 1


@pytest.mark.parametrize("given", [lambda own: own, lambda own: iter([own]), lambda own: {own}])
def test_callbacks_may_be_one_or_come_one_after_another(given, trial):
    """Of an iterator none was told of anything, for looking at them had used them up."""
    own = Counts()
    trial(name="told", federation__rounds=2).fit(overwrite=True, callbacks=given(own))
    assert own.rounds == 2


def test_what_is_no_callback_is_refused(trial):
    with pytest.raises(ConfigError, match=r"^callbacks: must be FederationCallbacks, got 3"):
        trial(name="odd").fit(callbacks=3)


@pytest.mark.parametrize(("times", "rounds"), [(1, 2), (2, 1)], ids=["once", "twice"])
def test_interrupt_leaves_a_folder_to_go_on_with(times, rounds, trial, capfd):
    options = {"name": f"interrupted-{times}", "federation__rounds": 3}
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        trial(**options).fit(callbacks=[Interrupt(times)])
    assert signal.getsignal(signal.SIGINT) is handler
    experiment = trial(**options)
    assert len(Run(experiment.folder).rounds) == rounds
    whole = trial(name=f"whole-{times}", federation__rounds=3).fit()
    again = experiment.fit(resume="auto")
    assert again.finished
    columns = ["Local-T", "Global-T", "loss"]
    assert again.metrics[columns].equals(whole.metrics[columns])


def test_several_workers_give_the_same_numbers(run, trial):
    before = dict(os.environ), logging.getLogger("torch.multiprocessing.spawn").level
    shared = trial(name="shared", federation__rounds=2, federation__workers=2).fit()
    assert shared.metrics["Local-T"].tolist() == run.metrics["Local-T"].tolist()[:2]
    assert (dict(os.environ), logging.getLogger("torch.multiprocessing.spawn").level) == before


class Best(FederationCallback):
    """Remembers the best round, and whatever else it is told to."""

    def __init__(self, keeps=None):
        self.best = (0.0, 0)
        self.keeps = keeps

    def on_round_end(self, loop, row):
        self.best = max(self.best, (row["Local-T"], row["round"]))
        if self.keeps == "loop":
            self.keeps = loop


def test_a_callback_comes_back_from_the_processes_of_the_run(run, trial, capfd):
    watch, greedy = Best(), Best("loop")
    trial(name="watched", federation__rounds=2, federation__workers=2).fit(callbacks=[watch, greedy])
    reached = run.metrics["Local-T"].tolist()[:2]
    assert watch.best == (max(reached), 1 + reached.index(max(reached)))
    assert greedy.best == (0.0, 0)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("callbacks: ")]
    assert line.startswith("callbacks: Best: what it has seen stays in the run's own process, for an attribute cannot")


def test_a_callback_comes_back_from_a_run_that_was_stopped(trial, capfd):
    watch = Best()
    options = {"name": "watched-stopped", "federation__rounds": 3, "federation__workers": 2}
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        trial(**options).fit(callbacks=[watch, Interrupt(1)])
    assert watch.best[1] > 0


def test_a_full_temporary_folder_costs_what_callbacks_have_seen_alone(tmp_path, monkeypatch, capsys):
    """What they had seen was written by halves, and a run that was done ended in an EOFError."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("fl_lightning.api.dist.get_rank", lambda: 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    watch, told = Best(), tmp_path / "callbacks"
    try:
        with _handing_over([watch], told):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _take_back([watch], told)
    assert watch.best == (0.0, 0)
    assert not list(tmp_path.iterdir())
    assert "callbacks: what they have seen stays in the run's own process (cannot write" in capsys.readouterr().err


class OfACell(Best):
    """Is called as a class of a notebook's cell is."""

    __module__ = "__main__"


def test_callbacks_that_spawned_workers_cannot_be_sent_are_refused(trial, monkeypatch):
    """On GPUs and macOS the run's processes ended in tracebacks once they had been started."""
    monkeypatch.setattr("fl_lightning.federation.launch.best_start_method", lambda team: "spawn")
    notebook = ModuleType("__main__")
    notebook.OfACell = OfACell
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    own = trial(name="spawned", federation__rounds=1, federation__workers=2)
    with pytest.raises(
        ConfigError, match=r"^callbacks: must be of a module, not of a notebook's cell.*, got 'OfACell'"
    ):
        own.fit(callbacks=[OfACell()])
    with pytest.raises(ConfigError, match=r"^callbacks: must be what pickle takes, .*lambda.*, got 'Best'"):
        own.fit(callbacks=[Best(lambda: None)])
    assert not own.folder.exists()


def test_callbacks_may_hold_what_goes_to_a_process_as_it_is_started(trial, monkeypatch):
    """A queue on which the rounds are heard of elsewhere."""
    monkeypatch.setattr("fl_lightning.federation.launch.best_start_method", lambda team: "spawn")
    sent = []
    monkeypatch.setattr("fl_lightning.federation.launch.launch", lambda *arguments, **_: sent.extend(arguments) or 1)
    queue = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(RuntimeError, match="exit code 1"):
        trial(name="queued", federation__workers=2).fit(callbacks=[Best(queue)])
    assert sent[6][0].keeps is queue
    with pytest.raises(RuntimeError, match="inheritance"):  # it still goes nowhere else
        pickle.dumps(queue)


class Within(FederationCallback):
    """Fits once more, within the run."""

    def __init__(self, trial, **options):
        self.config = trial(name="within", seed=5, federation__rounds=1, **options).config
        self.seen = None

    def on_round_end(self, loop, row):
        run = Experiment(self.config).fit(overwrite=True)
        self.seen = run.metrics["Local-T"].tolist(), run.evaluate()


def test_a_fit_in_a_callback_is_of_one_process(trial):
    """It took the run's other processes for its own: that ended the run, with a false reason."""
    seen = []
    for workers in (1, 2):
        own = Within(trial)
        outer = trial(name=f"around-{workers}", federation__rounds=1, federation__workers=workers).fit(callbacks=[own])
        seen.append((own.seen, outer.metrics["Local-T"].tolist()))
    assert seen[0][0] is not None
    assert seen[0] == seen[1]


def test_a_fit_in_a_callback_refuses_several_processes(trial, capfd):
    with pytest.raises(ConfigError, match="a worker met bad input"):
        trial(name="around", federation__rounds=1, federation__workers=2).fit(
            callbacks=[Within(trial, federation__workers=2)]
        )
    line = "federation.workers: must be 1 for a fit in a callback of a run of several processes, got 2"
    assert line in capfd.readouterr().err


class NearlyTold(FederationCallback):
    def on_rounds_end(self, loop, row):
        raise AssertionError("nobody calls it")


def test_what_a_user_should_know_of_a_run_is_said_from_python_too(trial, capfd):
    """Only the command line said it, and not under ``--quiet``."""
    trial(name="noted", federation__rounds=1, data__batch_size=4096).fit(callbacks=[NearlyTold()])
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fl-lightning: note: ")]
    assert len(said) == 2
    assert "data.batch_size: 4096 is more than any client has" in said[0]
    assert "NearlyTold.on_rounds_end() is no hook, and nobody calls it; did you mean on_round_end()?" in said[1]


class Enough(FederationCallback):
    """Has enough in round 5."""

    def on_round_end(self, loop, row):
        if row["round"] == 5:
            loop.stop()


def test_clients_that_were_not_tested_after_their_last_fit_are_in_no_figure(trial, capfd):
    """They counted with an earlier fit's figure, or their untrained model's, as what was computed again."""
    rounds = {"rounds": 7, "evaluate_every": 3, "participation": 0.5}
    own = trial(name="ended", federation=rounds, data__num_clients=6).fit(callbacks=[Enough()])
    assert (own.finished, len(own.rounds)) == (True, 5)
    assert "Local-T" not in own.evaluate()
    err = capfd.readouterr().err
    assert "(Local-T, Global-T) are not computed: " in err
    assert ", which was not tested after its last fit" in err
    without = next(client for client in range(6) if not (own.folder / "models" / f"{client:05d}.pt").is_file())
    with pytest.raises(ConfigError, match=f"client {without} was to take part again when the run ended, "):
        own.model(client=without)


class WritesAsItSends(FedProx):
    """Moves what it predicts by, once its message is made."""

    def send(self, data):
        sent = super().send(data)
        with torch.no_grad():
            self.model.head.bias[0] += 100
        return sent


def test_a_kept_model_is_the_one_that_was_tested(trial):
    """It was the one after `send`, and `evaluate` found other figures than the run's."""
    run = trial(name="writes", method=f"{__name__}.WritesAsItSends", federation__rounds=1).fit()
    assert run.evaluate()["Local-T"] == run.summary["last"]["Local-T"]


def test_an_own_module_that_was_edited_since_its_import_is_refused(trial, tmp_path, monkeypatch):
    """The old code went on, under the new one's name."""
    code = "from fl_lightning.methods.fedavg import FedAvg\nclass Edited(FedAvg):\n    step = {}\n"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "edited_method.py").write_text(code.format(1))
    own = trial(name="edited", method="edited_method.Edited", federation__rounds=1)
    own.fit()
    (tmp_path / "edited_method.py").write_text(code.format(22))
    with pytest.raises(ConfigError, match=r"^edited_method: was edited since this process imported it"):
        own.fit(overwrite=True)
    importlib.reload(sys.modules["edited_method"])
    assert own.fit(overwrite=True).finished


def test_a_class_that_its_module_no_longer_names_is_refused(trial, tmp_path, monkeypatch):
    """The module's present class was trained in its place."""
    code = "from fl_lightning.methods.fedavg import FedAvg\nclass Stale(FedAvg):\n    step = {}\n"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "stale_method.py").write_text(code.format(1))
    module = importlib.import_module("stale_method")
    old = module.Stale
    importlib.reload(module)
    trial(name="stale", method=old)  # it says the same
    (tmp_path / "stale_method.py").write_text(code.format(22))
    importlib.reload(module)
    with pytest.raises(ConfigError, match=r"^method: is not what stale_method.Stale names now: .*; take stale_me"):
        trial(name="stale", method=old)
    with pytest.raises(ConfigError, match=r"^method: is not what stale_method.Other names now.*; write it into a file"):
        trial(name="stale", method=type("Other", (module.Stale,), {"__module__": "stale_method"}))
    trial(name="stale", method=module.Stale)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "stale_method")
        trial(name="stale", method=module.Stale)  # nothing is imported to see


def test_fits_in_two_threads_take_turns(trial):
    """Both drew from the process's streams."""
    experiments = [trial(name=f"thread{number}", federation__rounds=1) for number in range(2)]
    threads = [threading.Thread(target=own.fit) for own in experiments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = (Run(own.folder).rounds for own in experiments)
    assert [row["Local-T"] for row in one] == [row["Local-T"] for row in other]
    assert one[0]["loss"] == other[0]["loss"]


def test_a_run_is_of_the_configuration_that_was_fitted(trial):
    """With another name in it, `fit` gave the run of the name before."""
    own = trial(name="before", federation__rounds=1)
    own.config["name"] = "after"
    assert own.fit().folder.name == "after"


def test_name_and_seed_are_the_configuration_s(trial):
    """They could be set, and nothing came of it: three seeds were three times the same run."""
    own = trial(name="before", federation__rounds=1)
    own.config["seed"] = 7
    assert (own.seed, own.folder.name) == (7, "before")
    own.config["name"] = "after"
    assert (own.name, own.folder.name) == ("after", "after")
    for key, value in (("seed", 3), ("name", "b"), ("folder", Path("c"))):
        with pytest.raises(AttributeError, match=key):
            setattr(own, key, value)
    own.config["federation"]["rounds"] = "many"
    with pytest.raises(ConfigError, match=r"^federation\.rounds: ") as refused:
        own.fit()
    assert "\n" not in str(refused.value)


def test_fit_shows_rounds_only_if_asked(trial, capsys):
    trial(name="quiet", federation__rounds=1).fit()
    assert capsys.readouterr().out == ""
    trial(name="loud", federation__rounds=1).fit(verbose=True)
    assert "Local-T" in capsys.readouterr().out


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text):
        raise BrokenPipeError


def test_fit_that_shows_rounds_outlives_who_looks_at_them(trial, monkeypatch):
    """``python script.py | head`` ended the run with its first line, as a full disk under a log did."""
    monkeypatch.setattr(sys, "stdout", Gone())
    assert trial(name="unseen-rounds", federation__rounds=1).fit(verbose=True).finished


def test_folder_is_where_the_next_fit_writes(trial):
    own = trial(name="at-home")
    own.config["output"] = "~/runs"
    assert own.folder == own._built().folder == Path.home() / "runs" / "at-home"


def test_data_can_be_looked_at_before_a_fit(trial):
    counts = trial(name="unseen").data().class_counts()
    assert counts.shape == (4, 10)
    assert not trial(name="unseen").folder.exists()


class Tally(FederationCallback):
    """Counts rounds, over a resumption, too."""

    def __init__(self):
        self.count = 0

    def on_round_end(self, loop, row):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Recorder(Tally):
    """Has the name of the class that writes a run's tables."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Tally, Recorder])
def test_callbacks_of_a_fit_take_up_what_they_kept(kind, workers, trial):
    first, second = kind(), kind()
    options = {"name": f"tally-{kind.__name__}-{workers}", "federation__workers": workers}
    trial(**options, federation__rounds=2).fit(callbacks=[first])
    trial(**options, federation__rounds=3).fit(resume="auto", callbacks=[second])
    assert (first.count, second.count) == (2, 3)


def test_a_callback_that_cannot_take_what_it_kept_is_one_line(trial):
    class Cannot(Tally):
        def load_state_dict(self, state):
            raise KeyError("other")

    trial(name="cannot", federation__rounds=1).fit(callbacks=[Cannot()])
    with pytest.raises(ConfigError, match=r"^callbacks: .*Cannot\.load_state_dict\(\) cannot take what it kept"):
        trial(name="cannot", federation__rounds=2).fit(resume="auto", callbacks=[Cannot()])
