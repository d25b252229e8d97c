"""Sealed files under properties: no flipped, missing or additional byte goes unnoticed, and readers take any bytes."""

import json
import random

import pytest
import torch
from damage import OF_FILES, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import leaves, messages, same

from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.report.journal import Journal, RunTables, altered
from fl_lightning.report.record import read_rows
from fl_lightning.report.wandb_file import raw_records
from fl_lightning.sealed import load_tensors, read_json, save_tensors, verify, write_json

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # nothing here outlives the test
        yield tmp_path_factory.mktemp("sealed")


def refused(read):
    """Whether a reader refuses, in one line."""
    try:
        read()
    except ConfigError as error:
        return "\n" not in str(error) and len(f"fl-lightning: error: {error}") <= 300
    return False


@QUICK
@given(message=messages(), data=st.data())
def test_no_byte_of_a_sealed_file_can_change_unnoticed(folder, message, data):
    path = folder / "round-0001.ckpt"
    save_tensors(path, message.state_dict(), sync=False)
    verify(path, "--resume")
    read = Message.from_state_dict(load_tensors(path, "--resume"))
    assert all(same(a, b) for a, b in zip(leaves(read).values(), leaves(message).values(), strict=True))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    for content in (changed, whole[:place], whole + bytes([data.draw(st.integers(0, 255))])):
        path.write_bytes(content)
        assert refused(lambda: verify(path, "--resume"))
        assert refused(lambda: load_tensors(path, "--resume"))


@QUICK
@given(
    content=st.dictionaries(st.text(max_size=6).filter(lambda key: key != "checksum"), PLAIN, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_sealed_json_says_what_was_written_or_nothing(folder, content, seed):
    path = folder / "summary.json"
    write_json(path, content)
    assert read_json(path, "evaluate") == json.loads(json.dumps(content))
    draw = random.Random(seed)
    damaged(path, draw, draw.choice(["flipped", "cut", "another digit", "inserted", "appended", "no text", "zeros"]))
    assert refused(lambda: read_json(path, "evaluate")) or read_json(path, "evaluate") == json.loads(
        json.dumps(content)
    )


@pytest.mark.parametrize("kind", sorted(OF_FILES))
def test_every_damage_to_every_file_is_refused_or_passed_over(kind, tmp_path):
    """What a reader of a run's files does with each kind of damage: never another error, never a wait."""
    tables = RunTables(tmp_path, {"metrics.csv": ["round", "Local-T", "seconds"]}, tmp_path / "journal.txt")
    tables.start(0)
    for round in (1, 2, 3):
        tables.append(round, {"metrics.csv": [{"round": round, "Local-T": round / 8, "seconds": 0.5}]})
    summary = {"tables": tables.sums}
    assert altered(tmp_path, summary) == []
    save_tensors(tmp_path / "a.ckpt", {"w": torch.ones(3)})
    for name in ("metrics.csv", "journal.txt", "a.ckpt"):
        damaged(tmp_path / name, random.Random(1), kind)
    try:
        rows = read_rows(tmp_path / "metrics.csv")
    except OSError:
        rows = []
    assert altered(tmp_path, summary) in ([], ["metrics.csv"])
    assert [row for row in rows if row.get("round") in (1, 2, 3)] == rows[:4] or altered(tmp_path, summary)
    assert len(Journal(tmp_path / "journal.txt").read(3)) <= 4
    may_read = kind in ("no permission", "another digit", "lines swapped", "line doubled", "line deleted")
    assert may_read or refused(lambda: load_tensors(tmp_path / "a.ckpt", "--resume"))


@settings(QUICK, max_examples=100)
@given(content=st.binary(max_size=200), zeros=st.integers(0, 40_000))
def test_any_bytes_are_records_of_wandbs_or_none(content, zeros):
    for record in raw_records(b":W&B\0\0\0" + content + b"\0" * zeros + content):
        assert isinstance(record, bytes)
