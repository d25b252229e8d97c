import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.federation.clients import ClientPool


def state(value, size=3):
    return {"head.weight": torch.full((size,), float(value)), "steps": torch.tensor(int(value))}


@pytest.fixture(params=["memory", "disk"])
def pool(request, tmp_path):
    return ClientPool(tmp_path / "clients", on_disk=request.param == "disk")


@pytest.fixture
def files(tmp_path):
    return lambda: sorted(path.name for path in (tmp_path / "clients").glob("*"))


def test_client_that_never_took_part_has_no_state(pool):
    assert pool.get(3) is None


def test_pool_gives_back_what_was_put_bit_for_bit(pool, assert_identical):
    pool.put(3, state(1.5), 1)
    pool.put(4, state(2.5), 1)
    pool.put(3, state(7.5), 2)
    assert_identical(pool.get(3), state(7.5))
    assert_identical(pool.get(4), state(2.5))
    assert pool.get(3)["steps"].dtype == torch.int64


def test_pool_keeps_a_copy(pool):
    own = state(1)
    pool.put(0, own, 1)
    own["head.weight"].zero_()
    assert (pool.get(0)["head.weight"] == 1).all()
    pool.put(0, own, 2)
    own["head.weight"].fill_(9)
    assert (pool.get(0)["head.weight"] == 0).all()


def test_pool_takes_a_state_with_other_entries(pool, assert_identical):
    pool.put(0, state(1), 1)
    pool.put(0, {"other": torch.ones(2)}, 2)
    assert_identical(pool.get(0), {"other": torch.ones(2)})


def test_empty_state_leaves_nothing_behind(pool, files):
    pool.put(0, {}, 1)
    assert pool.get(0) is None
    assert pool.flush(1) == {}
    assert files() == []


def test_empty_state_takes_the_place_of_the_one_before(pool):
    pool.put(0, state(1), 1)
    pool.put(0, {}, 2)
    assert pool.get(0) is None
    assert pool.flush(2) == {}


def test_flush_writes_only_what_changed(pool, files, tmp_path):
    pool.put(0, state(1), 1)
    pool.put(1, state(2), 1)
    first = pool.flush(1)
    content = {name: (tmp_path / "clients" / name).read_bytes() for name in files()}
    assert list(content) == ["r0001-w0.states"]
    assert sum(record.size for record in first.values()) == len(content["r0001-w0.states"])
    pool.put(1, state(3), 2)
    second = pool.flush(2)
    assert second[0] == first[0]
    assert second[1].segment == "r0002-w0.states"
    assert (tmp_path / "clients" / "r0001-w0.states").read_bytes() == content["r0001-w0.states"]
    assert (tmp_path / "clients" / "r0002-w0.states").stat().st_size == second[1].size
    assert pool.flush(3) == second
    assert len(files()) == 2


def test_version_that_a_checkpoint_names_survives_the_next_round(pool, files, assert_identical):
    pool.put(0, state(1), 1)
    named = pool.flush(1)
    pool.put(0, state(2), 2)
    pool.put(0, state(3), 3)
    pool.flush(3)
    assert named[0].segment in files()
    fresh = ClientPool(pool.folder, pool.on_disk)
    fresh.restore(named)
    assert_identical(fresh.get(0), state(1))


def test_restore_takes_the_named_versions_and_forgets_what_came_after(pool, assert_identical):
    pool.put(0, state(1), 1)
    named = pool.flush(1)
    pool.put(0, state(2), 2)
    pool.put(1, state(2), 2)
    pool.restore(named)
    assert_identical(pool.get(0), state(1))
    assert pool.get(1) is None


def test_state_moves_to_another_pool_with_its_file(pool, files, tmp_path, assert_identical):
    pool.put(0, state(1), 1)
    pool.put(1, state(2), 1)
    named = pool.flush(1)
    other = ClientPool(tmp_path / "clients")
    other.adopt(0, pool.release(0))
    assert pool.get(0) is None
    assert_identical(other.get(0), state(1))
    assert {**pool.flush(2), **other.flush(2)} == named  # nothing changed, so nothing is written again


def test_moved_state_on_disk_keeps_the_version_that_a_checkpoint_names(tmp_path, assert_identical):
    here, there = (ClientPool(tmp_path / "clients", True, rank) for rank in range(2))
    here.put(0, state(1), 1)
    here.flush(1)
    there.adopt(0, here.release(0))
    there.put(0, state(2), 2)
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == ["r0001-w0.states", "r0002-w1.states"]
    assert_identical(there.get(0), state(2))


def test_moved_state_on_disk_that_no_checkpoint_names_is_written_by_who_gets_it(tmp_path, assert_identical):
    """A pool may write anew, and delete, what it wrote since the last checkpoint: nobody else refers to it."""
    here, there = (ClientPool(tmp_path / "clients", True, rank) for rank in range(2))
    here.put(0, state(1), 1)
    released = here.release(0)
    assert released["record"] is None
    there.adopt(0, released)
    for path in (tmp_path / "clients").glob("*-w0.states"):
        path.unlink()
    assert_identical(there.get(0), state(1))
    assert {record.segment for record in there.flush(1).values()} == {"r0001-w1.states"}


def test_client_without_a_state_moves_as_such(pool, tmp_path):
    other = ClientPool(tmp_path / "clients")
    other.adopt(5, pool.release(5))
    assert other.get(5) is None


def test_pool_on_disk_holds_nothing_in_memory(tmp_path, assert_identical):
    pool = ClientPool(tmp_path / "clients", on_disk=True)
    pool.put(0, state(1), 1)
    assert not pool._states
    assert len(list((tmp_path / "clients").iterdir())) == 1
    pool.put(0, state(2), 2)
    assert_identical(pool.get(0), state(2))


def test_pool_in_memory_writes_nothing_before_it_is_flushed(tmp_path):
    pool = ClientPool(tmp_path / "clients")
    pool.put(0, state(1), 1)
    assert not (tmp_path / "clients").exists()


def test_pool_without_a_folder_works_in_memory(assert_identical):
    pool = ClientPool(None)
    pool.put(0, state(1), 1)
    assert_identical(pool.get(0), state(1))


def test_pool_on_disk_needs_a_folder():
    with pytest.raises(ValueError, match="folder"):
        ClientPool(None, on_disk=True)


@pytest.mark.parametrize("damage", ["cut", "missing", "foreign"])
def test_damaged_version_is_refused(pool, tmp_path, damage):
    pool.put(0, state(1, size=1000), 1)
    named = pool.flush(1)
    file = tmp_path / "clients" / named[0].segment
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "missing":
        file.unlink()
    else:
        torch.save([1, 2], file)
    with pytest.raises(ConfigError, match=r"r0001-w0\.states"):
        pool.restore(named)


@pytest.mark.parametrize("other", [torch.tensor([5]), torch.tensor([1.0]), torch.tensor([[1.0, 2.0]])])
def test_a_state_of_another_size_or_type_takes_the_place_of_the_one_before(other):
    """It was spread over that one's tensors, where a pool on the disk gave it back as it is."""
    pool = ClientPool(None)
    pool.put(0, {"a": torch.tensor([5.5, 5.5, 5.5])}, 1)
    pool.put(0, {"a": other}, 2)
    found = pool.get(0)["a"]
    assert torch.equal(found, other)
    assert found.dtype == other.dtype
