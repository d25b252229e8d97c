import os

import pytest
import torch

from fl_lightning import files
from fl_lightning.core.method import Phase, Server
from fl_lightning.errors import ConfigError
from fl_lightning.federation.checkpoint import CheckpointPolicy, Checkpoints
from fl_lightning.federation.clients import ClientPool
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.files import write_text
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.sealed import load_tensors, save_tensors


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder):
    return Checkpoints(folder)


@pytest.fixture
def pool(checkpoints):
    return ClientPool(checkpoints.clients)


def save_rounds(checkpoints, pool, rounds, keep=2):
    for round in rounds:
        pool.put(0, {"head": torch.full((3,), float(round))}, round)
        pool.put(round % 3 + 1, {"head": torch.full((3,), float(round))}, round)
        checkpoints.save(round, {"exchange": {"w": torch.full((2,), float(round))}}, pool.flush(round), keep)


def client_files(checkpoints):
    return {path.name for path in checkpoints.clients.iterdir()}


def named(path):
    return set(torch.load(path, weights_only=True)["clients"]["segments"])


def test_checkpoint_round_trips(checkpoints, pool):
    save_rounds(checkpoints, pool, [1])
    state = checkpoints.load(checkpoints.find("auto"))
    assert state["round"] == 1
    assert state["exchange"]["w"].tolist() == [1.0, 1.0]
    assert {client: record.segment for client, record in state["clients"].items()} == dict.fromkeys(
        (0, 2), "r0001-w0.states"
    )


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_newest_checkpoints_are_kept_with_the_states_that_they_name(checkpoints, pool, keep):
    save_rounds(checkpoints, pool, range(1, 7), keep)
    kept = checkpoints.all()
    assert [path.name for path in kept] == [f"round-{round:04d}.ckpt" for round in range(7 - keep, 7)]
    assert client_files(checkpoints) == set().union(*map(named, kept))
    assert sorted(checkpoints._named) == kept  # or it would grow for ever


def test_every_kept_checkpoint_can_be_restored(checkpoints, pool):
    save_rounds(checkpoints, pool, range(1, 6), keep=3)
    for round, path in zip((3, 4, 5), checkpoints.all(), strict=True):
        fresh = ClientPool(checkpoints.clients)
        fresh.restore(checkpoints.load(path)["clients"])
        assert fresh.get(0)["head"].tolist() == [float(round)] * 3


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_states_that_no_checkpoint_names_are_deleted_after_a_resume(folder, keep):
    first = Checkpoints(folder)
    save_rounds(first, ClientPool(first.clients), range(1, 5), keep)
    resumed = Checkpoints(folder)
    pool = ClientPool(resumed.clients)
    pool.restore(resumed.load(resumed.find("auto"))["clients"])
    save_rounds(resumed, pool, [5, 6], keep)
    assert client_files(resumed) == set().union(*map(named, resumed.all()))


def test_checkpoints_beyond_a_hundred_rounds_are_in_order(checkpoints, pool):
    save_rounds(checkpoints, pool, [9999, 10000])
    assert checkpoints.find("auto").name == "round-10000.ckpt"


def test_foreign_files_are_no_checkpoints(checkpoints, pool, folder):
    save_rounds(checkpoints, pool, [1])
    (folder / "round-best.ckpt").write_text("mine")
    (folder / "round-0007.ckpt.bak").write_text("mine")
    assert [path.name for path in checkpoints.all()] == ["round-0001.ckpt"]
    save_rounds(checkpoints, pool, [2, 3], keep=1)
    assert (folder / "round-best.ckpt").exists()


def test_auto_finds_nothing_where_there_is_nothing(checkpoints):
    assert checkpoints.find("auto") is None


def test_checkpoint_is_found_by_file_and_by_a_runs_folder(checkpoints, pool, folder):
    save_rounds(checkpoints, pool, [1, 2])
    newest = folder / "round-0002.ckpt"
    assert checkpoints.find(str(newest)) == newest
    assert checkpoints.find(str(folder)) == newest
    assert checkpoints.find(str(folder.parent)) == newest


@pytest.mark.parametrize("where", ["nowhere.ckpt", "."])
def test_checkpoint_that_is_not_there_is_refused(checkpoints, tmp_path, where):
    with pytest.raises(ConfigError, match="--resume"):
        checkpoints.find(str(tmp_path / where))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("notes"),
        lambda path: torch.save({"weights": torch.ones(2)}, path),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"format": 99, "clients": {}}, path),
    ],
    ids=["end", "cut", "empty", "text", "weights", "list", "format"],
)
def test_damaged_or_foreign_checkpoint_is_refused(checkpoints, pool, damage):
    save_rounds(checkpoints, pool, [1])
    path = checkpoints.find("auto")
    damage(path)
    with pytest.raises(ConfigError, match=r"--resume.*round-0001\.ckpt"):
        checkpoints.load(path)


def test_checkpoint_that_would_run_code_is_refused(checkpoints, pool, tmp_path):
    """`weights_only=True`: a pickle that calls something is no checkpoint."""

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    save_rounds(checkpoints, pool, [1])
    path = checkpoints.find("auto")
    torch.save({"format": 1, "clients": {}, "evil": Evil()}, path)
    with pytest.raises(ConfigError):
        checkpoints.load(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "state.ckpt"
    save_tensors(path, {"a": torch.ones(3)})

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        save_tensors(path, {"a": torch.zeros(3)})
    monkeypatch.undo()
    assert load_tensors(path, "--resume")["a"].tolist() == [1, 1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["state.ckpt"]


def test_failing_serialisation_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.ckpt"
    save_tensors(path, {"a": torch.ones(3)})
    with pytest.raises(Exception, match="local object"):  # Python 3.13 leaves out `pickle`
        save_tensors(path, {"a": lambda: None})
    assert load_tensors(path, "--resume")["a"].tolist() == [1, 1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["state.ckpt"]


def test_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, name=name, call=original: (calls.append(name), call(*a))[1])
    write_text(tmp_path / "config.yaml", "seed: 0\n")
    assert calls == ["fsync", "replace", "fsync"]


def test_failing_checkpoint_leaves_the_ones_before(checkpoints, pool, monkeypatch):
    save_rounds(checkpoints, pool, [1, 2], keep=1)

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save_rounds(checkpoints, pool, [3], keep=1)
    monkeypatch.undo()
    again = Checkpoints(checkpoints.folder)
    fresh = ClientPool(again.clients)
    fresh.restore(again.load(again.find("auto"))["clients"])
    assert fresh.get(0)["head"].tolist() == [2.0] * 3


def test_pruning_leaves_foreign_files_and_what_other_workers_write_already(checkpoints, pool):
    save_rounds(checkpoints, pool, [1], keep=1)
    for name in ("notes.txt", "r0002-w1.states"):
        (checkpoints.clients / name).write_text("")
    checkpoints.prune(1, up_to=1)
    assert (checkpoints.clients / "notes.txt").exists()
    assert (checkpoints.clients / "r0002-w1.states").exists()
    checkpoints.prune(1)  # after a kill, nobody is writing
    assert (checkpoints.clients / "notes.txt").exists()
    assert not (checkpoints.clients / "r0002-w1.states").exists()


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5]), (0, [])])
def test_rounds_that_are_saved(every, due):
    policy = CheckpointPolicy(every=every)
    assert [round for round in range(1, 6) if policy.due(round, last=round == 5)] == due


@pytest.mark.parametrize(
    ("every", "waited", "due"), [(1, 0.0, True), (2, 59.9, False), (2, 60.0, True), (0, 59.9, False), (0, 61.0, True)]
)
def test_round_is_saved_by_time_beside_the_count(every, waited, due):
    policy = CheckpointPolicy(every=every, seconds=60)
    assert policy.due(3, False, waited) is due
    assert policy.due(3, True, waited)


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, [1, 2, 3, 4]), (1e9, [4])])
def test_loop_saves_by_time(mlp, run_federation, tmp_path, seconds, rounds):
    policy = CheckpointPolicy(every=0, seconds=seconds, keep=9)
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4, folder=tmp_path, checkpoint=policy)
    assert [path.name for path in loop.checkpoints.all()] == [f"round-{round:04d}.ckpt" for round in rounds]


@pytest.mark.parametrize(
    ("option", "value"), [("every", -1), ("seconds", 0.0), ("seconds", float("nan")), ("keep", 0), ("models", "yes")]
)
def test_checkpoint_policy_rejects(option, value):
    with pytest.raises(ConfigError, match=rf"federation\.checkpoint\.{option}.*{value}"):
        CheckpointPolicy(**{option: value})


@pytest.mark.parametrize(
    ("rounds", "options", "said"),
    [
        (7, {}, "was not tested in round"),
        (7, {"evaluate": EvaluationPolicy(trained=False)}, "was not tested in round"),
        (8, {}, ""),
        (12, {}, ""),
        (7, {"on_client_error": "skip"}, ""),
        (7, {"evaluate": EvaluationPolicy(clients="participants")}, ""),
        (7, {"evaluate": EvaluationPolicy(trained=False, received=False)}, ""),
    ],
)
def test_a_run_does_not_end_where_clients_would_count_with_figures_of_an_earlier_fit(
    set_up_federation, mlp, tmp_path, rounds, options, said
):
    settings = {"participation": 0.5, "evaluate_every": 4, **options}
    first = set_up_federation(lambda: FedAvg(mlp()), rounds=12, folder=tmp_path, **settings)
    for _ in range(6):
        first.advance()
    cut = set_up_federation(lambda: FedAvg(mlp()), rounds=rounds, folder=tmp_path, **settings)
    state = cut.checkpoints.load(cut.checkpoints.find("auto"))
    if said:
        with pytest.raises(
            ConfigError, match=f"federation.rounds: round 7 cannot be the last one.*{said}.*leave it at 12"
        ):
            cut.load_state_dict(state)
        return
    cut.load_state_dict(state)
    cut.run()
    straight = set_up_federation(lambda: FedAvg(mlp()), rounds=rounds, **settings)
    straight.run()
    assert {k: v for k, v in cut.diary.rows[-1].items() if "-T" in k} == pytest.approx(
        {k: v for k, v in straight.diary.rows[-1].items() if "-T" in k}, nan_ok=True
    )


class Anneals(FedAvg):
    """Trains less from round to round."""

    def phases(self):
        return [Phase("all", lr=0.1 * (1 - self.facts.round / (self.facts.rounds + 1)))]


class Cooling(Server):
    """Weighs all alike at the run's end."""

    def weight_of(self, message):
        return message.num_samples ** (1 - self.facts.round / self.facts.rounds)


class Cools(FedAvg):
    """Its server anneals."""

    def make_server(self, initial, facts):
        return Cooling(initial)


@pytest.mark.parametrize(("make", "said"), [(Anneals, "Anneals"), (Cools, "Cooling"), (FedAvg, "")])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_longer_run_says_what_of_ones_own_goes_by_the_number_of_rounds(
    set_up_federation, mlp, tmp_path, capsys, make, said, rounds
):
    """The rounds before had the schedule of a shorter run, and nothing said so."""
    set_up_federation(lambda: make(mlp()), rounds=1, folder=tmp_path).run()
    longer = set_up_federation(lambda: make(mlp()), rounds=rounds, folder=tmp_path)
    capsys.readouterr()
    longer.load_state_dict(longer.checkpoints.load(longer.checkpoints.find("auto")))
    err = capsys.readouterr().err
    assert (f"{said} asks for facts.rounds, which were 1 until now" in err) == (bool(said) and rounds > 1)
    assert err.count("\n") == (1 if said and rounds > 1 else 0)
