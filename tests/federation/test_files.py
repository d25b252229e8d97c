"""Files that say whether they are what was written; tables that a journal makes again."""

import errno
import os
import random
import subprocess
import sys
import time

import pytest
import torch

from fl_lightning import files, sealed
from fl_lightning.errors import ConfigError
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.clients import ClientPool
from fl_lightning.files import WriteError, this_machine, write_text
from fl_lightning.report.journal import RunTables, rows_up_to
from fl_lightning.sealed import load_tensors, read_json, save_tensors, verify, write_json

STATE = {"w": torch.arange(50.0), "inner": {"count": torch.tensor([1, 2]), "name": "head"}}
COLUMNS = {"metrics.csv": ["round", "Local-T", "seconds"], "clients.csv": ["round", "client", "loss"]}


@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bit_of_a_sealed_file_is_loaded(tmp_path, seed):
    path, draw = tmp_path / "state.pt", random.Random(seed)
    save_tensors(path, STATE)
    content = path.read_bytes()
    for _ in range(50):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        for read in (load_tensors, verify):
            with pytest.raises(ConfigError, match=r"--resume: .*state\.pt"):
                read(path, "--resume")


@pytest.mark.parametrize("end", [True, False], ids=["in the seal", "in the archive"])
def test_every_bit_of_the_last_and_first_bytes_counts(tmp_path, end):
    path = tmp_path / "state.pt"
    save_tensors(path, STATE)
    content = path.read_bytes()
    for place in range(-sealed.SEAL.size, 0) if end else range(16):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ConfigError):
                load_tensors(path, "--resume")


def test_sealed_file_is_still_one_of_torchs(tmp_path):
    save_tensors(tmp_path / "state.pt", STATE)
    for mmap in (False, True):
        assert torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)["w"].equal(STATE["w"])


def test_sealed_file_says_of_which_round_it_is(tmp_path):
    """Old files, which say nothing, and torch's own are read as before."""
    path = tmp_path / "state.pt"
    for round, write in ((None, save_tensors), (None, lambda path, state: torch.save(state, path))):
        write(path, STATE)
        assert sealed.round_in(path) is round
    for round in (0, 7, 2**40):
        save_tensors(path, STATE, round=round)
        assert sealed.round_in(path) == round
        assert sealed.owner_in(path) == {}
        save_tensors(path, STATE, round=round, owner={"client": 3, "seed": -(2**70)})
        assert sealed.round_in(path) == round
        assert sealed.owner_in(path) == {"client": 3, "seed": -(2**70)}
        assert load_tensors(path, "--resume")["w"].equal(STATE["w"])
        assert torch.load(path, weights_only=True)["w"].equal(STATE["w"])
    content = bytearray(path.read_bytes())
    content[-sealed.SEAL.size - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="checksum"):
        verify(path, "--resume")
    path.write_bytes(b"short")
    assert sealed.round_in(path) is None
    assert sealed.round_in(tmp_path) is None


def test_file_without_a_seal_is_said_to_be_older(tmp_path):
    torch.save(STATE, tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="older version"):
        load_tensors(tmp_path / "state.pt", "--resume")


def test_json_with_another_value_is_refused(tmp_path):
    path = tmp_path / "partition.json"
    write_json(path, {"clients": [[1, 2], [3]], "seed": 0, "by": {1: 2.5}})
    assert read_json(path, "evaluate") == {"clients": [[1, 2], [3]], "seed": 0, "by": {"1": 2.5}}
    path.write_text(path.read_text().replace("[3]", "[4]"))
    with pytest.raises(ConfigError, match="checksum"):
        read_json(path, "evaluate")


def test_json_of_another_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "partition.json"
    monkeypatch.setattr(sealed, "JSON_FORMAT", 2)
    write_json(path, {"clients": []})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"^evaluate: .*partition\.json is of another version of fl-lightning"):
        read_json(path, "evaluate")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_the_system_refuses_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, call, number):
    path = tmp_path / "state.pt"
    save_tensors(path, {"a": torch.ones(1)})

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(WriteError, match=rf"cannot write .*state\.pt: {os.strerror(number)}"):
        save_tensors(path, {"a": torch.zeros(1)})
    monkeypatch.undo()
    assert load_tensors(path, "--resume")["a"].item() == 1
    assert [found.name for found in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_that_cannot_say_what_is_on_the_disk_is_written_to(tmp_path, monkeypatch, number):
    """VirtualBox's shared folders and others refuse fsync of folders."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: _refuse(number))
    save_tensors(tmp_path / "state.pt", {"a": torch.ones(1)})
    write_text(tmp_path / "text", "a")
    files.append_text(tmp_path / "text", "b")
    files.sync_folder(tmp_path)
    assert load_tensors(tmp_path / "state.pt", "--resume")["a"].item() == 1
    assert (tmp_path / "text").read_text() == "ab"


def test_system_that_opens_no_folders_and_syncs_only_what_is_written_to_is_written_on(tmp_path, monkeypatch):
    """Windows: no run came as far as its first round."""
    opened, synced, read_only = os.open, os.fsync, set()

    def open_as_there(path, flags, *more, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = opened(path, flags, *more, **options)
        (read_only.add if not flags & (os.O_WRONLY | os.O_RDWR) else read_only.discard)(descriptor)
        return descriptor

    monkeypatch.setattr(os, "open", open_as_there)
    monkeypatch.setattr(os, "fsync", lambda number: _refuse(errno.EBADF) if number in read_only else synced(number))
    save_tensors(tmp_path / "state.pt", {"a": torch.ones(1)})
    files.sync_folder(tmp_path)
    files.sync_file(tmp_path / "state.pt")
    assert load_tensors(tmp_path / "state.pt", "--resume")["a"].item() == 1


def _refuse(number):
    raise OSError(number, os.strerror(number))


def test_home_is_filled_in_and_who_has_none_has_the_root(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert str(files.expanded("~/a")) == "/home/me/a"
    assert str(files.expanded("~nobody-of-this-name/a")) == "~nobody-of-this-name/a"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a number without a name
    assert str(files.expanded("~/a")) == "/a"
    assert str(files.default_cache_dir()) == os.environ.get("FL_LIGHTNING_CACHE", "/.cache/fl-lightning/arrays")


def test_folder_behind_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "runs").symlink_to("scratch")
    with pytest.raises(WriteError, match=r"cannot write .*runs/a/b: .*runs is a link to scratch, which is not there"):
        files.make_folder(tmp_path / "runs" / "a" / "b")


def test_disk_that_is_full_in_the_middle_of_a_tensor_is_named(tmp_path):
    with pytest.raises(WriteError, match="No space left"):
        files.write_atomically(tmp_path / "a", lambda file: torch.save(STATE, sealed.Summed(Full())))


class Full:
    def write(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        pass


# --- tables ---------------------------------------------------------------------------------------------------------


def rows(round):
    clients = [{"round": round, "client": client, "loss": round / 3} for client in range(2)]
    return {"metrics.csv": [{"round": round, "Local-T": round / 7, "seconds": 0.5}], "clients.csv": clients}


@pytest.fixture
def tables(tmp_path):
    made = RunTables(tmp_path, COLUMNS, tmp_path / "journal.txt")
    made.start(0)
    for round in (1, 2, 3):
        made.append(round, rows(round))
        if round == 2:
            made.saved = made.state_dict()
    return made


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def expected(folder):
    fresh = RunTables(folder, COLUMNS, folder / "journal.txt")
    fresh.start(0)
    for round in (1, 2):
        fresh.append(round, rows(round))
    return contents(folder)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "missing-line": lambda path: path.write_text(path.read_text().partition("\n")[0] + "\n3,1,1\n"),
    "other-header": lambda path: path.write_text("a,b\n" + path.read_text().partition("\n")[2]),
    "no-text": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 9),
    "left-alone": lambda path: None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize("which", [("metrics.csv",), ("metrics.csv", "clients.csv"), ("journal.txt",)])
def test_tables_are_made_again_whatever_happened_to_them(tables, tmp_path, damage, which):
    """Round 3 came after the checkpoint: it goes."""
    for name in which:
        damage(tmp_path / name)
    again = RunTables(tmp_path, COLUMNS, tmp_path / "journal.txt")
    notice = again.start(2, tables.saved)
    assert bool(notice) == (which == ("journal.txt",) and "journal" in notice)
    assert again.state_dict() == tables.saved
    (tmp_path / "fresh").mkdir()
    assert contents(tmp_path) == expected(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_rows_are_those_that_were_written_whatever_happened_to_their_file(tables, tmp_path, damage, name, capfd):
    """A summary counts them at a run's end: a spreadsheet may have rounded them, an editor taken the file away."""
    path = tmp_path / name
    whole = path.read_bytes()
    damage(path)
    untouched = path.exists() and path.read_bytes() == whole
    tables.restore("metrics.csv")
    assert [row["Local-T"] for row in tables.rows("metrics.csv")] == [1 / 7, 2 / 7, 3 / 7]
    assert path.read_bytes() == whole
    assert (f"{name} was changed while the run wrote into it" in capfd.readouterr().err) != untouched


def test_journal_and_table_that_are_damaged_both_are_refused(tables, tmp_path):
    for name in ("journal.txt", "clients.csv"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:30])
    with pytest.raises(ConfigError, match=r"journal\.txt is damaged.*clients\.csv"):
        RunTables(tmp_path, COLUMNS, tmp_path / "journal.txt").start(2, tables.saved)


def test_checkpoint_of_before_counts_on_tables_whose_columns_have_changed_since(tables, tmp_path):
    """A resumed run that leaves sick clients out has a column more; killed before it was saved, it was lost."""
    more = {**COLUMNS, "metrics.csv": ["round", "Local-T", "skipped", "seconds"], "topology.csv": ["round", "sender"]}
    again = RunTables(tmp_path, more, tmp_path / "journal.txt")
    assert again.start(2, tables.saved) == ""
    killed = RunTables(tmp_path, more, tmp_path / "journal.txt")  # before its first round, and behind it
    assert killed.start(2, tables.saved) == ""
    killed.append(3, {**rows(3), "topology.csv": [{"round": 3, "sender": 0}]})
    later = killed.state_dict()
    written = contents(tmp_path)
    assert [row["Local-T"] for row in rows_up_to(tmp_path / "journal.txt", 3)] == [1 / 7, 2 / 7, 3 / 7]
    assert RunTables(tmp_path, more, tmp_path / "journal.txt").start(3, later) == ""
    assert contents(tmp_path) == written
    (tmp_path / "metrics.csv").write_text("")
    killed.restore("metrics.csv")
    assert contents(tmp_path) == written
    assert RunTables(tmp_path, COLUMNS, tmp_path / "journal.txt").start(2, tables.saved) == ""
    (tmp_path / "fresh").mkdir()
    (tmp_path / "topology.csv").unlink()
    assert contents(tmp_path) == expected(tmp_path / "fresh")


def test_column_that_a_run_goes_on_without_stays(tmp_path):
    """How many clients had been left out was gone once a run went on that ends at the first sick one."""
    more = {**COLUMNS, "metrics.csv": ["round", "Local-T", "skipped", "seconds"]}
    before = RunTables(tmp_path, more, tmp_path / "journal.txt")
    before.start(0)
    before.append(1, {**rows(1), "metrics.csv": [{**rows(1)["metrics.csv"][0], "skipped": 2}]})
    again = RunTables(tmp_path, COLUMNS, tmp_path / "journal.txt")
    assert again.start(1, before.state_dict()) == ""
    again.append(2, rows(2))
    assert [row["skipped"] for row in again.rows("metrics.csv")] == [2, None]
    assert [row["Local-T"] for row in again.rows("metrics.csv")] == [1 / 7, 2 / 7]


def test_seconds_do_not_enter_a_checkpoint(tmp_path):
    sums = []
    for seconds in (0.5, 123.4567):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        made = RunTables(folder, COLUMNS, folder / "journal.txt")
        made.start(0)
        made.append(1, {"metrics.csv": [{"round": 1, "Local-T": 0.25, "seconds": seconds}], "clients.csv": []})
        sums.append(made.state_dict())
    assert sums[0] == sums[1]


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints")
    pool = ClientPool(made.clients)
    for round in (1, 2, 3, 4):
        pool.put(0, {"head": torch.full((3,), float(round))}, round)
        pool.put(round % 2 + 1, {"head": torch.full((3,), float(round))}, round)
        made.save(round, {"exchange": {}}, pool.flush(round), keep=3)
    return made


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_newest_whole_checkpoint_is_chosen(checkpoints):
    assert checkpoints.choose("auto").path.name == "round-0004.ckpt"
    cut(checkpoints.clients / "r0004-w0.states")
    chosen = checkpoints.choose("auto")
    assert chosen.path.name == "round-0003.ckpt"
    assert "r0004-w0.states is damaged" in chosen.damaged[0]
    cut(checkpoints.folder / "round-0003.ckpt")
    assert checkpoints.choose("auto").path.name == "round-0002.ckpt"


def test_older_damaged_checkpoint_stands_in_nobodys_way(checkpoints):
    cut(checkpoints.folder / "round-0002.ckpt")
    assert checkpoints.choose("auto").damaged == ()
    checkpoints.prune(3)
    assert len(checkpoints.all()) == 3


def test_where_nothing_is_whole_one_line_says_so(checkpoints):
    for path in checkpoints.all():
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"round-0004\.ckpt.*2 more.*--overwrite") as caught:
        checkpoints.choose("auto")
    assert len(str(caught.value)) <= 300 + len(str(checkpoints.folder))


@pytest.mark.parametrize("part", ["round", "clients"])
def test_checkpoint_with_a_part_missing_is_refused(checkpoints, part):
    path = checkpoints.folder / "round-0004.ckpt"
    state = load_tensors(path, "--resume")
    del state[part]
    save_tensors(path, state)
    with pytest.raises(ConfigError, match=f"has no {part}"):
        checkpoints.load(path)


def test_newer_checkpoints_are_put_aside_with_all_that_they_need(checkpoints):
    write_text(checkpoints.journal, "rows")
    aside = Checkpoints(checkpoints.put_aside(2))
    checkpoints.prune(1)
    assert [path.name for path in checkpoints.all()] == ["round-0002.ckpt"]
    named = checkpoints.load(checkpoints.all()[0])["clients"].values()
    assert {path.name for path in checkpoints.clients.iterdir()} == {record.segment for record in named}
    assert [path.name for path in aside.all()] == ["round-0003.ckpt", "round-0004.ckpt"]
    assert aside.choose("auto").damaged == ()
    assert aside.journal.read_text() == "rows"
    assert checkpoints.put_aside(2) is None


def test_later_writes_leave_what_is_aside_as_it_was(checkpoints):
    aside = Checkpoints(checkpoints.put_aside(2))
    before = (aside.clients / "r0004-w0.states").read_bytes()
    checkpoints.prune(1)
    pool = ClientPool(checkpoints.clients)
    pool.restore(checkpoints.load(checkpoints.all()[-1])["clients"])
    for client in range(3):
        pool.put(client, {"head": torch.zeros(3)}, 4)
    assert {record.segment for record in pool.flush(4).values()} == {"r0004-w0.states"}
    assert (aside.clients / "r0004-w0.states").read_bytes() == before
    assert aside.choose("auto").damaged == ()


def test_what_a_damaged_checkpoint_lacks_keeps_it_in_nobodys_way(checkpoints):
    """The file of states that it names could not be linked, and every try left one more folder."""
    (checkpoints.clients / "r0004-w0.states").unlink()
    chosen = checkpoints.choose("auto")
    assert chosen.path.name == "round-0003.ckpt"
    aside = Checkpoints(checkpoints.put_aside(3))
    assert [path.name for path in aside.all()] == ["round-0004.ckpt"]
    assert "r0004-w0.states" not in {path.name for path in aside.clients.iterdir()}
    assert checkpoints.choose("auto") == (chosen.path, ())


def test_folder_that_could_not_be_filled_goes_unless_a_checkpoint_is_in_it(checkpoints, monkeypatch):
    replace = os.replace
    for room in (0, 1):
        moved = []

        def full(there, here, room=room, moved=moved):
            if len(moved) == room:
                raise OSError(errno.ENOSPC, "No space left on device")
            moved.append(replace(there, here))

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(WriteError, match="No space left"):
            checkpoints.put_aside(2)
        monkeypatch.undo()
        assert len(list(checkpoints.folder.glob("aside-*"))) == room
        assert checkpoints.choose("auto").path.name == f"round-{4 - room:04d}.ckpt"
    assert checkpoints.put_aside(2).name == "aside-0002"


def test_sign_that_cannot_be_put_names_the_folder(tmp_path):
    """It named a hidden file that nobody knows."""
    gone = tmp_path / "gone"
    with pytest.raises(WriteError, match=rf"^cannot write {gone}: No such"), files.sign_in(gone):
        pass


def test_only_what_the_dead_have_left_is_swept_where_several_write(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    names = {process: f".table.md.{process}-a1b2c3.tmp" for process in (int(dead.stdout), os.getpid(), 1, 10**12)}
    others = [".table.md.tmp", "table.md", "mine.1-a.tmp", ".recent.1000000000000-aa.tmp"]
    for name in (*names.values(), *others):
        (tmp_path / name).write_text("x")
        if "recent" not in name:
            os.utime(tmp_path / name, (1, 1))
    files.remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {names[os.getpid()], names[1], *others}
    files.remove_abandoned(tmp_path / "nowhere")


def test_what_another_machine_writes_is_swept_a_day_later(tmp_path):
    """Its processes are none of this one's: a download that paused for ten seconds was taken away from it."""
    now, number = time.time(), 10**12
    own, others, old = (
        f".download.{number}-{end}.tmp" for end in (f"{this_machine()}aa", "0123456789ab", "ab12cd34ef")
    )
    for name, age in ((own, 60.0), (others, 60.0), (old, files.LONG + 60.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (now - age, now - age))
    files.remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [others]


def test_folder_for_a_while_is_taken_away_and_those_of_the_dead_with_it(tmp_path):
    """Each kill in an unpacking or a download left its data for ever."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    old, used = (tmp_path / f".unpack.{int(dead.stdout)}-{end}.tmp" for end in ("aa", "bb"))
    for folder in (old, used):
        (folder / "data").mkdir(parents=True)
        (folder / "data/batch").write_text("x")
        for path in (folder / "data/batch", folder / "data", folder):
            os.utime(path, (1, 1))
    os.utime(used / "data/batch")  # another machine's, which is at it
    with files.temporary_folder(tmp_path, "unpack") as folder:
        (folder / "whole").write_text("y")
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, used.name}
    assert list(tmp_path.iterdir()) == [used]


def test_byte_of_a_path_that_is_no_letter_is_spelled_out_in_a_text(tmp_path):
    write_text(tmp_path / "a.html", "runs/K\udce4se")
    assert (tmp_path / "a.html").read_text() == "runs/K\\udce4se"


def test_client_s_state_of_another_model_is_refused(tmp_path):
    pool = ClientPool(tmp_path)
    pool.put(0, {"w": torch.zeros(2)}, 1)
    named = pool.flush(1)
    ClientPool(tmp_path).restore(named, lambda client, state: state["w"].shape == (2,))
    with pytest.raises(ConfigError, match=r"client 0 in r0001-w0\.states does not fit the model"):
        ClientPool(tmp_path).restore(named, lambda client, state: state["w"].shape == (3,))
