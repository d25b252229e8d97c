"""The logger's own parts; whole runs with W&B are in `tests/cli/test_wandb.py`."""

import json
import shlex
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("wandb")

from fl_lightning.building import build_as
from fl_lightning.errors import ConfigError
from fl_lightning.report import class_figures, wandb_access, wandb_media
from fl_lightning.report.run_logger import RoundRecord, RunStart
from fl_lightning.report.wandb import WandbLogger
from fl_lightning.report.wandb_file import BLOCK, HEADER, is_unsent, raw_records, run_files
from fl_lightning.report.wandb_name import takes_place_of


def log_file(records):
    """Records as W&B writes them: in parts that end with a block of 32 KiB."""
    log = bytearray(HEADER)
    for record in records:
        first, rest = True, record
        while first or rest:
            left = BLOCK - len(log) % BLOCK
            if left < 7:
                log += bytes(left)
                left = BLOCK
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = 1 if first and not rest else 2 if first else 3 if rest else 4
            log += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    return bytes(log)


def test_records_are_read_back_across_blocks():
    rng = np.random.default_rng(0)
    records = [rng.bytes(size) for size in (0, 5, BLOCK, 3 * BLOCK, 1, BLOCK - 40, 30, 7)]
    assert list(raw_records(log_file(records))) == records


def test_record_that_was_cut_short_is_left_out():
    records = [b"a" * 100, b"b" * 2 * BLOCK]
    log = log_file(records)
    for length in (len(log) - 1, BLOCK + 3, HEADER + 110):
        assert list(raw_records(log[:length])) == records[:1]
    assert list(raw_records(log[: HEADER + 50])) == list(raw_records(b"")) == []


def test_files_of_a_run_are_found_oldest_first(tmp_path):
    names = [
        "offline-run-20260102_000000-ab",
        "run-20260101_000000-ab",
        "offline-run-20260101_120000-abc",
        "latest-run",
    ]
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / f"run-{name.split('-')[-1]}.wandb").touch()
    found = run_files(tmp_path, "ab")
    assert [path.parent.name for path in found] == [names[1], names[0]]
    assert [is_unsent(path) for path in found] == [False, True]
    found[1].with_name("run-ab.wandb.synced").touch()
    assert not is_unsent(found[1])
    name = tmp_path / "wandb" / "run-20260101_000000-[a]"
    name.mkdir()
    (name / "run-[a].wandb").touch()
    assert run_files(tmp_path, "[a]") == [name / "run-[a].wandb"]


def test_files_that_were_begun_in_one_second_are_found_in_order(tmp_path):
    """W&B puts a number behind the second one's folder: a run that was killed and resumed at once."""
    second = "offline-run-20260102_000000-ab"
    names = [second, f"{second}-1", f"{second}-2", f"{second}-10", "offline-run-20260102_000001-ab"]
    for name in reversed(names):
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / "run-ab.wandb").touch()
    assert [path.parent.name for path in run_files(tmp_path, "ab")] == names


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("wandb", True),
        ("WandbLogger", True),
        ("lightning.pytorch.loggers.WandbLogger", True),
        ("lightning.pytorch.loggers.wandb.WandbLogger", True),
        ("pytorch_lightning.loggers.WandbLogger", True),
        ("my_project.WandbLogger", False),
        ("CSVLogger", False),
    ],
)
def test_logger_takes_the_place_of_lightnings(name, ours):
    assert takes_place_of(name) is ours


def has_key(url, api_key=None):
    return wandb_access.has_key(SimpleNamespace(base_url=url, api_key=api_key))


@pytest.fixture
def netrc(tmp_path, monkeypatch):
    """The user's netrc file, which is not there yet, in a home of its own."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", "~/keys")
    return tmp_path / "keys"


def test_key_is_found_without_asking(netrc, monkeypatch):
    assert not has_key("https://example.org")
    assert has_key("https://example.org", api_key="of W&B's settings")
    keyless = "machine example.net login user\n" if sys.version_info >= (3, 11) else ""  # before, none is read then
    netrc.write_text(f"machine example.org login user password secret\n{keyless}")
    assert has_key("https://example.org")
    assert has_key("https://example.org/path")
    for other in ("https://example.com", "https://example.org:8080", "https://example.net"):
        assert not has_key(other)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_key("https://example.com")


def test_key_of_a_server_with_a_port_is_found(netrc):
    netrc.write_text("machine localhost:8080 login user password secret\n")
    assert has_key("http://localhost:8080")
    assert not has_key("http://localhost")


def test_key_of_the_server_behind_wandbs_own_is_found(netrc):
    urls = pytest.importorskip("wandb.sdk.lib.urls")
    if not hasattr(urls, "forge_upstream_url"):
        pytest.skip("this W&B knows no such servers")
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    assert has_key(urls.DEFAULT_BASE_URL)
    assert not has_key("https://example.org")


def test_keys_that_wandb_itself_wrote_are_found(netrc):
    """Whatever this version of W&B makes of its address, ``wandb login`` and `has_key` must agree on it."""
    wbnetrc = pytest.importorskip("wandb.sdk.lib.wbauth.wbnetrc")
    import wandb

    for url in (wandb.Settings().base_url, "http://localhost:8080"):
        netrc.unlink(missing_ok=True)
        wbnetrc.write_netrc_auth(host=url, api_key="0" * 40)
        assert has_key(url)


def make_start(folder, rows=(), **chooser):
    about = {"name": "run", "method": "Some", "seed": 0, "versions": {}, "git_commit": None}
    return RunStart(folder, about, "hash", ["a", "b"], np.ones((3, 2), dtype=int), 5, rows, **chooser)


def row(round, **values):
    return {"round": round, "Local-T": round / 10, **values}


class Run:
    """In W&B's place: keeps what it is given, and fails where it is told to."""

    def __init__(self, fails_on=()):
        self.fails_on, self.steps, self.finished = fails_on, {}, []
        self.config, self.summary, self.starting_step, self.step = {}, {}, 0, 0

    def log(self, values, step=None, commit=True):
        """W&B takes its own step where none is given, and drops a row whose step is past."""
        for word in self.fails_on:
            if any(word in name for name in values):
                raise RuntimeError(f"no {word}\nsecond line")
        step = self.step if step is None else step
        if step >= self.step:
            self.steps[step] = {**self.steps.get(step, {}), **values}
            self.step = step + 1 if commit else step

    def define_metric(self, *arguments, **options):
        pass

    def finish(self, exit_code):
        self.finished.append(exit_code)


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """A logger that has begun a run on `Run`, which `logger.run` is."""

    def make(fails_on=(), rows=(), starting_step=0, summary=(), **chooser):
        run = Run(fails_on)
        run.starting_step = run.step = starting_step
        run.summary |= summary
        run.config = type("Config", (), {"update": lambda self, values, **options: None})()
        made = WandbLogger(save_dir=str(tmp_path))
        monkeypatch.setattr(made, "_connect", lambda earlier: setattr(made, "_experiment", run))
        made.run = run
        made.begin(make_start(tmp_path, rows, **chooser))
        return made

    return make


def clients():
    return [
        {"round": 1, "client": c, "participated": 1, "num_train": 2, "num_test": 1, "Local-T": 0.5} for c in range(3)
    ]


@pytest.mark.parametrize(
    ("rounds", "every", "tables"),
    [(5, 1, [1, 2, 3, 4, 5]), (600, 1, [1, *range(6, 601, 6)]), (600, 5, [5, 10, 15, 20, 25, 30, 40, 45])],
)
def test_a_hundred_rounds_of_many_have_a_table(logger, rounds, every, tables):
    """Each had one, of three files; those that are not evaluated have none."""
    made = logger()
    made._rounds = rounds
    for round in range(1, min(rounds, 45) + 1):
        made.log_round(RoundRecord(row(round), clients(), round % every == 0))
    made.log_round(RoundRecord(row(rounds), clients()))
    logged = [step for step, values in made.run.steps.items() if "clients/table" in values]
    assert logged == sorted({*(own for own in tables if own <= 45), rounds})
    drawn = [step for step, values in made.run.steps.items() if "clients/Local-T" in values]
    assert drawn == sorted({*range(every, min(rounds, 45) + 1, every), rounds})


def test_round_that_ends_a_run_early_has_a_table(logger):
    """Its last table was of an earlier round."""
    made = logger()
    made._rounds = 600
    for round in range(1, 6):
        made.log_round(RoundRecord(row(round), clients(), ends_early=round == 5))
    assert [step for step, values in made.run.steps.items() if "clients/table" in values] == [1, 5]


def test_last_round_that_is_caught_up_with_has_a_table(logger, tmp_path):
    """A run that had ended early without W&B had its last table of an earlier round."""
    made = logger()
    rows = [row(round) for round in range(1, 6)]
    held = [{**client, "round": round} for round in range(1, 6) for client in clients()]
    made.begin(replace(make_start(tmp_path, rows), rounds=600, client_rows=held))
    assert [step for step, values in made.run.steps.items() if "clients/table" in values] == [1, 5]


def test_failure_of_a_table_leaves_the_numbers(logger, capsys):
    made = logger(fails_on=["clients/table"])
    for round in (1, 2):
        made.log_round(RoundRecord(row(round), clients()))
    assert made.run.steps == {1: row(1), 2: row(2)}
    assert not made.lost
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no clients/table" in err
    assert "second line" not in err


def test_failure_of_the_numbers_is_said_once_and_is_the_end_of_wandb(logger, capsys):
    made = logger(fails_on=["Local-T"])
    for round in (1, 2):
        made.log_round(RoundRecord(row(round)))
    made.end({"rounds": 2})
    made.finalize("success")
    assert made.lost
    assert made.run.finished == [1]
    assert made.experiment is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "goes on without it" in err


def test_failure_at_the_end_is_harmless(logger, capsys, monkeypatch):
    made = logger()

    def never(exit_code):
        raise TimeoutError("took too long")

    monkeypatch.setattr(made.run, "finish", never)
    made.finalize("success")
    assert "took too long" in capsys.readouterr().err


def test_rounds_that_the_server_has_are_not_logged_again(logger):
    """W&B's next step is 3, the checkpoint's round 4: rounds 3 and 4 are caught up with, round 4 is not done twice."""
    made = logger(rows=[row(round) for round in (1, 2, 3, 4)], starting_step=3)
    assert made._start.rows == ()  # which would stay with all their clients as long as the run
    for round in (4, 5):
        made.log_round(RoundRecord(row(round), evaluated=False))
    assert list(made.run.steps) == [3, 4, 5]
    assert made.run.summary["Local-T"] == 0.4
    assert (made.run.summary["best/Local-T"], made.run.summary["best_round/Local-T"]) == (0.5, 5)


def test_of_equal_rounds_the_first_is_the_best_though_wandb_lacks_the_later_one(logger):
    """The rounds that W&B lacks were looked at first."""
    rows = [{"round": round, "Local-T": value} for round, value in ((1, 0.9), (2, 0.1), (3, 0.9))]
    made = logger(rows=rows, starting_step=3)
    assert list(made.run.steps) == [3]
    assert (made.run.summary["best/Local-T"], made.run.summary["best_round/Local-T"]) == (0.9, 1)


def test_rounds_are_counted_by_what_was_logged_as_their_number(logger):
    """Somebody else logged, too, so that W&B's next step is 8 after two rounds."""
    made = logger(rows=[row(round) for round in (1, 2, 3)], starting_step=8, summary={"round": 2})
    made.log_round(RoundRecord(row(4), evaluated=False))
    assert made.run.steps == {8: row(3), 9: row(4)}


@pytest.mark.parametrize("step", [None, "its round"])
def test_values_of_ones_own_join_the_row_of_their_round(logger, step):
    made = logger()
    made._draws = False
    for round in (1, 2, 3):
        made.log_metrics({"mine": float(round)}, step=step and round)
        made.log_metrics({"more": 0.0}, step=step and round)
        made.log_round(RoundRecord(row(round), evaluated=False))
    assert made.run.steps == {round: row(round, mine=float(round), more=0.0) for round in (1, 2, 3)}


def test_values_of_ones_own_that_come_late_are_rows_of_their_own(logger):
    made = logger()
    made._draws = False
    made.log_round(RoundRecord(row(1), evaluated=False))
    made.log_metrics({"late": 1.0}, step=1)
    made.log_round(RoundRecord(row(2), evaluated=False))
    made.log_metrics({"last": 2.0})
    made.end({"rounds": 2})
    rows = list(made.run.steps.values())
    assert rows == [row(1), {"round": 1, "late": 1.0}, row(2), {"round": 2, "last": 2.0}]
    assert made.run.summary["round"] == 2


def test_round_that_wandb_has_does_not_lend_its_values_to_the_next(logger):
    """Round 1 is done again after a resume; what a callback logs in it is in W&B already."""
    made = logger(starting_step=2)
    made.log_metrics({"mine": 1.0}, step=1)
    made.log_round(RoundRecord(row(1), evaluated=False))
    made.log_round(RoundRecord(row(2), evaluated=False))
    assert made.run.steps == {2: row(2)}


def test_no_round_is_dropped_where_somebody_else_logs(logger):
    made = logger()
    for round in (1, 2, 3):
        for _ in range(round):
            made.experiment.log({"theirs": 1.0})
        made.log_round(RoundRecord(row(round), evaluated=False))
    rounds = {step: values["round"] for step, values in made.run.steps.items() if "round" in values}
    assert rounds == {1: 1, 4: 2, 8: 3}


def test_worse_round_does_not_replace_the_best(logger):
    made = logger()
    for round, value in ((1, 0.4), (2, 0.9), (3, 0.9), (4, 0.1)):
        made.log_round(RoundRecord({"round": round, "Local-T": value}))
    assert (made.run.summary["best/Local-T"], made.run.summary["best_round/Local-T"]) == (0.9, 2)


def test_best_round_is_the_one_that_early_stopping_watches(logger):
    """Less of a made-up figure is better, which its name does not say; what costs has a lowest value of its own."""
    made = logger(monitor="mine/Local-V", less=True)
    for round, mine, seconds in ((1, 0.4, 3.0), (2, 0.1, 4.0), (3, 0.3, 1.0), (4, None, 2.0)):
        others = {"Local-V": round / 10, "Local-T": round / 10, "seconds": seconds}
        made.log_round(RoundRecord({"round": round, "mine/Local-V": mine, **others}))
    said = {name: value for name, value in made.run.summary.items() if name.startswith("best_round")}
    names = dict.fromkeys(("Local-T", "Local-V", "mine/Local-V"), 2)
    assert said == {f"best_round/{name}": round for name, round in {**names, "seconds": 3}.items()}


def test_best_of_what_costs_is_the_lowest(logger):
    made = logger()
    costs = ("loss", "loss/cross_entropy", "receive_drop", "seconds", "uplink_bytes", "downlink_params")
    for round, value in ((1, 5), (2, float("nan")), (3, 2), (4, 2), (5, 3)):
        made.log_round(RoundRecord({"round": round, "participants": value, **dict.fromkeys(costs, value)}))
    said = {name: value for name, value in made.run.summary.items() if name.startswith("best")}
    assert said == {f"best/{name}": 2 for name in costs} | {f"best_round/{name}": 3 for name in costs}


def test_command_that_is_printed_sends_the_run_and_does_nothing_else(tmp_path, monkeypatch, capsys):
    """A run's name is somebody's words, and the command is there to be pasted."""
    name = "a $(touch owned) <b>'\u202e"
    made = WandbLogger(save_dir=str(tmp_path / name), offline=True, id="[$(touch owned)]")
    monkeypatch.setattr(made, "_init", lambda mode: Run())
    made.begin(make_start(tmp_path))
    (_, command), said = made.places()[0], capsys.readouterr().err
    *words, last = shlex.split(command)
    assert words == ["wandb", "sync"]
    assert last == f"{tmp_path}/{name}/wandb/offline-run-*-{made._id}*"
    assert "\u202e" not in said
    assert "\\u202e" in said


def test_run_of_ones_own_that_is_open_gets_no_round_and_stays_open(tmp_path, monkeypatch):
    """A notebook's, say: W&B gives it again to who asks for a run, unless told otherwise."""
    theirs, ours = Run(), Run()
    theirs.id = "theirs"

    def init(id, reinit=None, **options):
        ours.id = id
        return ours if reinit == "create_new" else theirs

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr(wandb_access, "has_open_run", lambda: True, raising=False)
    for run in (theirs, ours):
        run.config = SimpleNamespace(update=lambda values, **options: None)
    made = WandbLogger(save_dir=str(tmp_path), offline=True)
    made.begin(make_start(tmp_path))
    made.log_round(RoundRecord(row(1)))
    made.finalize("success")
    assert (theirs.steps, theirs.finished) == ({}, [])
    assert (ours.steps[1]["round"], ours.finished) == (1, [0])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"project": "<script>alert(1)</script>"}, "logger.project"),
        ({"project": "x" * 129}, "logger.project"),
        ({"id": "a b/c"}, "logger.id"),
        ({"id": ""}, "logger.id"),
        ({"version": " a"}, "logger.version"),
        ({"labels": {"tags": ["a", ""]}}, "logger.labels.tags"),
        ({"labels": {"tags": ["t" * 65]}}, "logger.labels.tags"),
    ],
)
def test_words_that_wandb_refuses_are_refused_before_training(tmp_path, options, key):
    with pytest.raises(ConfigError) as caught:
        build_as(WandbLogger, {"save_dir": str(tmp_path), **options}, "logger")
    assert str(caught.value).startswith(f"{key}: must")
    wild = {"project": "<img src=x onerror=alert(1)>", "labels": {"tags": ["[x](javascript:alert(1))"]}}
    wild |= {"id": "[a] b.c"}
    build_as(WandbLogger, {"save_dir": str(tmp_path), **wild}, "logger")  # W&B shows them as they are


def test_folder_that_cannot_be_written_is_the_end_of_wandb(tmp_path, monkeypatch, capsys):
    """W&B would go to a folder for passing files, and neither the command that is printed nor a resumption finds it."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("wandb.init", lambda **options: pytest.fail("began"))
    made = WandbLogger(save_dir=str(tmp_path / "file" / "inner"), offline=True)
    made.begin(make_start(tmp_path))
    assert made.lost
    assert made.places() == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("W&B: failed (NotADirectoryError")


def test_bad_setting_is_said_with_its_name(logger, capsys):
    import wandb

    made = logger()
    with pytest.raises(ValueError, match="base_url") as caught:
        wandb.Settings(base_url="no address")
    made.give_up(caught.value)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "base_url: Input should be a valid URL" in err


@pytest.mark.parametrize(("relations", "kind"), [((), "points"), (("knowledge",), "map")])
def test_square_artifact_is_drawn_as_what_it_is(monkeypatch, tmp_path, relations, kind):
    """The record says so, not the artifact's name."""
    drawn = []
    picture = tmp_path / "x.png"
    for function, what in (("class_projection", "points"), ("class_relation_map", "map")):
        monkeypatch.setattr(class_figures, function, lambda *arguments, what=what: drawn.append(what) or picture)
    monkeypatch.setattr("wandb.Image", str)
    record = RoundRecord(row(2), shared={"knowledge": np.eye(2)}, relations=frozenset(relations))
    wandb_media.of_classes(make_start(tmp_path), record, tmp_path, first=False)
    assert drawn == [kind]


def test_id_is_kept_in_the_runs_folder(logger, tmp_path):
    def begun():
        logger()
        return json.loads((tmp_path / "wandb.json").read_text())["id"]

    first = begun()
    assert begun() == first
    (tmp_path / "wandb.json").write_text("{")
    assert begun() != first


@pytest.mark.parametrize(("every", "drawn"), [(0, []), (2, [1, 2, 4, 5]), (10, [1, 5])])
def test_pictures_are_drawn_now_and_then(logger, every, drawn):
    made = logger()
    made.pictures_every = every
    assert [round for round in range(1, 6) if made.wants_shared(round)] == drawn


def test_clients_whose_classes_are_not_counted_are_in_the_table(tmp_path):
    """Of a population the first thousand are; the table of all others failed, and with it all later ones."""
    begun = make_start(tmp_path, num_clients=50_000)
    rows = [{"round": 1, "client": client, "participated": 1, "failed": 0, "Local-T": 0.5} for client in (2, 40_000)]
    found = wandb_media.of_clients(begun, rows)
    table = found["clients/table"]
    assert table.get_column("classes") == [2, None]
    assert table.get_column("client") == [2, 40_000]
    logger = WandbLogger(offline=True, save_dir=str(tmp_path))
    logger._start = begun
    assert logger._facts()["num_clients"] == 50_000


def test_histograms_are_over_those_that_count(tmp_path):
    """The mean beside them was of two clients, they were of four."""
    begun = make_start(tmp_path, num_founders=3)
    scores = {0: 0.92, 1: 0.81, 2: 0.05, 3: 0.12}
    rows = [
        {"round": 1, "client": client, "participated": 1, "attacker": int(client == 2), "Local-T": score}
        for client, score in scores.items()
    ]
    found = wandb_media.of_clients(begun, rows)
    histogram = found["clients/Local-T"]
    assert sum(histogram.histogram) == 2
    assert found["clients/table"].get_column("client") == [0, 1, 2, 3]
