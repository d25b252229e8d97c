"""Clients' states in few files: what is written, what is written anew, what is deleted, what is found damaged."""

import errno
import os
import random

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.federation import segments, state_index
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.clients import ClientPool
from fl_lightning.federation.segments import HEADER, Record, SegmentLog, load_state, verify_states
from fl_lightning.federation.state_index import packed_index, unpacked_index
from fl_lightning.files import WriteError
from fl_lightning.sealed import plain_tensors, save_tensors, tensors_as_bytes

CLIENTS = 40


def state(value):
    return {"head": torch.full((50,), float(value))}


class Run:
    """A federation of states alone: each knows the round in which it changed last."""

    def __init__(self, folder, on_disk=False, workers=1, keep=2):
        self.checkpoints = Checkpoints(folder)
        self.pools = [ClientPool(self.checkpoints.clients, on_disk, rank) for rank in range(workers)]
        self.keep = keep
        self.changed, self.kept = {}, {}

    def round(self, round, clients):
        """Clients' states change, wherever they were, and a checkpoint is written."""
        for client in clients:
            pool = random.Random(f"{round} {client}").choice(self.pools)
            for other in self.pools:
                if other is not pool and other.get(client) is not None:
                    pool.adopt(client, other.release(client))
            pool.put(client, state(1000 * round + client), round)
            self.changed[client] = round
        records = {client: at for pool in self.pools for client, at in pool.flush(round).items()}
        path = self.checkpoints.save(round, {"exchange": {}}, records, self.keep)
        for pool in self.pools:
            pool.settle(records)
        self.kept[path] = dict(self.changed)

    @property
    def sizes(self):
        return {path.name: path.stat().st_size for path in self.checkpoints.clients.iterdir()}

    def check(self):
        """Every checkpoint that is kept has all states as they were then, and no file is there that none names."""
        named = set()
        for path in self.checkpoints.all():
            records = Checkpoints(self.checkpoints.folder).load(path)["clients"]
            verify_states(self.checkpoints.clients, records)
            named |= {at.segment for at in records.values()}
            found = {c: load_state(self.checkpoints.clients, c, at)["head"][0].item() for c, at in records.items()}
            assert found == {client: 1000 * round + client for client, round in self.kept[path].items()}
        assert self.sizes.keys() == named


@pytest.fixture(params=[(False, 1), (True, 1), (True, 2)], ids=["memory", "disk", "disk, 2 workers"])
def run(request, tmp_path):
    return Run(tmp_path, *request.param)


def test_checkpoint_of_many_clients_is_few_files_and_syncs(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), sync(file)))
    run = Run(tmp_path)
    run.round(1, range(CLIENTS))
    assert len(synced) == 4  # the segment, the checkpoint, and their folders
    assert len(run.sizes) == 1
    before = sum(run.sizes.values())
    run.round(2, [3, 4])
    assert sum(run.sizes.values()) - before == before * 2 // CLIENTS


def test_what_nobody_needs_is_never_more_than_what_is_needed(run):
    draw = random.Random(0)
    run.round(1, range(CLIENTS))
    live = sum(run.sizes.values())
    for round in range(2, 30):
        run.round(round, draw.sample(range(CLIENTS), draw.choice([1, 4, 20])))
        if round % 6 == 0:
            run.check()
        # what the older checkpoint names, and what the last one has found wasteful, is there until the next
        assert sum(run.sizes.values()) <= 3.5 * live
    run.check()


def test_files_stay_few_where_few_clients_change(tmp_path, monkeypatch):
    monkeypatch.setattr(state_index, "MOST_SEGMENTS", 8)
    run = Run(tmp_path)
    for round in range(1, 40):
        run.round(round, [round])
        assert len(run.sizes) <= 14
    run.check()


def test_states_that_change_often_between_checkpoints_do_not_pile_up(tmp_path, monkeypatch, assert_identical):
    monkeypatch.setattr(segments, "LEAST_DEAD", 0)
    pool = ClientPool(tmp_path, on_disk=True)
    first = None
    for round in range(1, 20):
        for client in range(5):
            pool.put(client, state(100 * round + client), round)
        (path,) = tmp_path.iterdir()
        first = first or path.stat().st_size
        assert path.stat().st_size <= 2.5 * first
    for client in range(5):
        assert_identical(pool.get(client), state(1900 + client))


def test_run_of_the_version_before_goes_on_and_leaves_its_files(tmp_path, assert_identical):
    """A file for every client's state, named in the checkpoint (format 2)."""
    checkpoints = Checkpoints(tmp_path)
    for client in range(3):
        save_tensors(checkpoints.clients / f"{client:05d}-r0001.pt", state(client))
    names = {client: f"{client:05d}-r0001.pt" for client in range(3)}
    save_tensors(tmp_path / "round-0001.ckpt", {"format": 2, "round": 1, "clients": names, "exchange": {}})
    for on_disk in (False, True):
        chosen = checkpoints.choose("auto")
        pool = ClientPool(checkpoints.clients, on_disk)
        pool.restore(checkpoints.load(chosen.path)["clients"])
        checkpoints.prune(2)  # as a run does that goes on
        pool.put(1, state(7), 2)
        records = pool.flush(2)
        assert {at.segment for at in records.values()} <= {"r0002-w0.states", "r0002-w0-1.states"}
        for client, value in enumerate((0, 7, 2)):
            assert_identical(ClientPool.get(pool, client), state(value))
    checkpoints.save(2, {"exchange": {}}, records, keep=1)
    assert {path.name for path in checkpoints.clients.iterdir()} == {at.segment for at in records.values()}
    assert checkpoints.choose("auto").damaged == ()


def test_damaged_state_of_the_version_before_is_refused(tmp_path):
    save_tensors(tmp_path / "00003-r0001.pt", state(1))
    (tmp_path / "00003-r0001.pt").write_bytes((tmp_path / "00003-r0001.pt").read_bytes()[:300])
    for look in (lambda: verify_states(tmp_path, {3: Record("00003-r0001.pt")}),
                 lambda: load_state(tmp_path, 3, Record("00003-r0001.pt"))):  # fmt: skip
        with pytest.raises(ConfigError, match=r"00003-r0001\.pt is damaged"):
            look()


def test_every_flipped_bit_of_a_record_is_found(tmp_path):
    records = SegmentLog(tmp_path).append({0: state(1), 1: state(2)})
    path = tmp_path / "r0001-w0.states"
    content = path.read_bytes()
    draw = random.Random(0)
    places = [*range(0, 8 * HEADER.size, 3), *draw.sample(range(8 * HEADER.size, 8 * records[0].size), 50)]
    for bit in places:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"^--resume: .*r0001-w0\.states is damaged"):
            load_state(tmp_path, 0, records[0])
        verify_states(tmp_path, {1: records[1]})  # the one beside it is whole


def test_state_of_another_client_is_not_taken(tmp_path):
    records = SegmentLog(tmp_path).append({0: state(1), 1: state(2)})
    with pytest.raises(ConfigError, match="damaged"):
        load_state(tmp_path, 0, records[1])


@pytest.mark.parametrize("written", [0, 1])
def test_what_a_full_disk_cuts_short_is_taken_back(tmp_path, monkeypatch, written):
    log = SegmentLog(tmp_path)
    kept = log.append({0: state(1)}) if written else {}
    size = sum(at.size for at in kept.values())

    def full(client, round, content):
        if client == 2:
            raise OSError(28, "No space left on device")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(segments, "_crc", full)
        with pytest.raises(WriteError, match=r"r0001-w0\.states: No space left"):
            log.append({1: state(2), 2: state(3)})
    assert (tmp_path / "r0001-w0.states").stat().st_size == size
    kept |= log.append({1: state(3)})
    verify_states(tmp_path, kept)


def test_folder_that_may_not_be_looked_into_is_named(tmp_path, monkeypatch):
    """The system's own error ended the run without a word on how to go on."""

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    log = SegmentLog(tmp_path)
    monkeypatch.setattr("pathlib.Path.exists", refuse)
    with pytest.raises(WriteError, match=rf"cannot write {tmp_path}: Permission denied"):
        log.append({0: state(1)})


def test_killed_run_s_left_over_is_not_written_to(tmp_path):
    SegmentLog(tmp_path).append({0: state(1)})
    before = (tmp_path / "r0001-w0.states").read_bytes()
    assert SegmentLog(tmp_path).append({0: state(2)})[0].segment == "r0001-w0-1.states"
    assert (tmp_path / "r0001-w0.states").read_bytes() == before


def test_index_comes_back_and_others_are_none():
    records = {7: Record("r0002-w1.states", 10, 20, 2**32 - 1), 1: Record("r0001-w0.states")}
    assert unpacked_index(packed_index(records)) == records
    assert unpacked_index(packed_index({})) == {}
    good = packed_index(records)
    places = good["places"]
    others = [None, 3, [], {"a": 1}, {0: "x.pt"}, {"0": "00000-r0001.pt"}, {**good, "segments": ["../x"]}]
    others += [{**good, "segments": 3}, {**good, "segments": []}, {**good, "places": None}]
    others += [{**good, "places": changed} for changed in (places[:, :4], -places, places.float(), places[0])]
    assert [unpacked_index(other) for other in others] == [None] * len(others)


def test_a_state_in_bytes_leaves_no_buffer_behind():
    """Where the garbage collector closed the buffer before its view, Python 3.13 printed a BufferError."""
    content = tensors_as_bytes({"w": torch.arange(3.0)})
    assert type(content.obj) is bytes
    assert plain_tensors(bytes(content), "state", "--resume")["w"].tolist() == [0, 1, 2]
