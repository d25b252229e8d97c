import io
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fl_lightning.core.aggregation import KindRule, default_rule
from fl_lightning.core.coding import Coding
from fl_lightning.core.message import KINDS, ClassMeans, Message, Size, Structured, artifact
from fl_lightning.core.recall import _Column
from fl_lightning.core.stacked import same
from fl_lightning.core.stacked_optimizers import StackedOptimizer
from fl_lightning.federation import transport
from fl_lightning.methods.dispfl import MaskedWeights
from fl_lightning.methods.fedfed import KeptRows


@artifact
@dataclass(frozen=True)
class Sketch(Structured):
    """A kind of a test's own: a tensor whose values may be narrowed, one whose may not, and settings."""

    rows: torch.Tensor
    places: torch.Tensor
    scale: float = 1.0
    label: str = "own"
    is_sparse: bool = False
    lossy = ("rows",)


@pytest.fixture
def message():
    """10 float32, one int64, two rows of 3 float32 with two int64 counts, and 4 float64."""
    means = ClassMeans(torch.ones(4, 3), torch.tensor([2, 0, 0, 9]))
    return Message(
        {"w": torch.randn(2, 5), "steps": torch.tensor(7)},
        {"prototypes": means, "mask": torch.ones(4, dtype=torch.float64), "bare": means.without_counts()},
        num_samples=11,
    )


def test_message_counts_weights_and_artifacts(message):
    assert message.num_params == 10 + 1 + (6 + 2) + 4 + 6


def test_message_counts_bytes_by_dtype(message):
    assert message.num_bytes == 10 * 4 + 8 + (6 * 4 + 2 * 8) + 4 * 8 + 6 * 4


def test_half_precision_weights_cost_two_bytes_each():
    assert Message({"w": torch.zeros(5, dtype=torch.bfloat16)}).num_bytes == 10


def test_empty_message_costs_nothing():
    assert (Message().num_params, Message(num_samples=5).num_bytes) == (0, 0)


def test_message_survives_a_file_that_is_loaded_with_weights_only(message, assert_identical):
    file = io.BytesIO()
    torch.save(message.state_dict(), file)
    file.seek(0)
    loaded = Message.from_state_dict(torch.load(file, weights_only=True))
    assert_identical(loaded.state_dict(), message.state_dict())
    assert loaded.num_samples == 11
    assert isinstance(loaded.artifacts["prototypes"], ClassMeans)
    assert (loaded.num_params, loaded.num_bytes) == (message.num_params, message.num_bytes)


def test_clone_shares_no_memory_and_keeps_all(message, assert_identical):
    before = message.clone()
    copy = message.clone()
    assert_identical(copy.state_dict(), message.state_dict())
    for tensor in (*copy.weights.values(), copy.artifacts["mask"], copy.artifacts["prototypes"].mean):
        tensor.zero_()
    assert_identical(message.state_dict(), before.state_dict())


def test_size_that_a_lossy_wire_made_is_what_counts_and_survives_a_file(message):
    sent = Message(message.weights, message.artifacts, 11, Size(3, 6))
    assert (sent.num_params, sent.num_bytes, sent.size) == (3, 6, Size(3, 6))
    assert Message.from_state_dict(sent.state_dict()).sent == Size(3, 6)
    assert "sent" not in message.state_dict()
    assert message.size == Size(message.num_params, message.num_bytes)


# --- kinds of artifacts ----------------------------------------------


def test_a_kind_of_ones_own_survives_a_file_that_is_loaded_with_weights_only(assert_identical):
    sketch = Sketch(torch.randn(2, 3), torch.tensor([4, 1]), 0.5, "mine", True)
    message = Message({"w": torch.zeros(2)}, {"sketch": sketch}, 5)
    file = io.BytesIO()
    torch.save(message.state_dict(), file)
    file.seek(0)
    loaded = Message.from_state_dict(torch.load(file, weights_only=True))
    assert_identical(loaded.state_dict(), message.state_dict())
    copy = loaded.artifacts["sketch"]
    assert isinstance(copy, Sketch)
    assert (copy.scale, copy.label, copy.is_sparse) == (0.5, "mine", True)
    assert loaded.size == message.size == Size(2 + 6 + 2, 4 * 8 + 8 * 2)


def test_a_kinds_tensors_are_moved_copied_and_changed_by_field():
    sketch = Sketch(torch.ones(2, 3), torch.tensor([4, 1]), 0.5)
    assert set(sketch.tensors()) == {"rows", "places"}
    narrow = sketch.map(lambda tensor: tensor.half(), *Sketch.lossy)
    assert (narrow.rows.dtype, narrow.places.dtype, narrow.scale) == (torch.float16, torch.int64, 0.5)
    assert sketch.map(torch.zeros_like).places.tolist() == [0, 0]
    assert torch.equal(sketch.to(torch.device("cpu")).rows, sketch.rows)
    copy = sketch.clone()
    copy.rows.zero_()
    copy.places.zero_()
    assert sketch.rows.sum() == 6
    assert sketch.places.tolist() == [4, 1]


def test_unregistered_kind_is_neither_written_nor_read():
    @dataclass(frozen=True)
    class Stranger(Structured):
        rows: torch.Tensor

    message = Message(artifacts={"sketch": Stranger(torch.zeros(1))})
    with pytest.raises(TypeError, match=r"^Stranger is no registered kind of artifact: decorate the class with `art"):
        message.state_dict()
    state = {"weights": {}, "artifacts": {"sketch": {"kind": "Skech", "rows": torch.zeros(1)}}, "num_samples": 1}
    with pytest.raises(
        ValueError, match=r"^artifact 'sketch' is of a kind that is not registered; import .*: 'Skech', did .* Sketch\?"
    ):
        Message.from_state_dict(state)


def test_two_kinds_of_one_name_are_refused():
    with pytest.raises(TypeError, match=r"artifact ClassMeans: fl_lightning.core.message has a kind of that name"):
        artifact(type("ClassMeans", (Structured,), {"__module__": "elsewhere"}))
    assert KINDS["ClassMeans"] is ClassMeans
    assert {"ClassMeans", "KeptRows", "MaskedWeights", f"{__name__}.Sketch"} <= KINDS.keys()


def test_kinds_of_two_modules_may_share_a_name(monkeypatch):
    """A copy of a method's file, for an ablation, could not be imported."""
    kinds = [artifact(_kind("Stats", module)) for module in ("one", "two")]
    for kind, module in zip(kinds, ("one", "two"), strict=True):
        state = Message(artifacts={"stats": kind(torch.ones(1))}).state_dict()
        assert state["artifacts"]["stats"]["kind"] == f"{module}.Stats"
        assert type(Message.from_state_dict(state).artifacts["stats"]) is kind
    older = {"weights": {}, "artifacts": {"stats": {"kind": "Stats", "rows": torch.ones(1)}}, "num_samples": 1}
    with pytest.raises(
        ValueError,
        match=r"^artifact 'stats' is of a kind that several modules have: .* one.Stats or two",
    ):
        Message.from_state_dict(older)
    monkeypatch.delitem(KINDS, "one.Stats")
    assert type(Message.from_state_dict(older).artifacts["stats"]) is kinds[1]
    assert isinstance(default_rule("Stats")(), KindRule)  # a server may name its kind as ever
    assert isinstance(default_rule("two.Stats")(), KindRule)
    monkeypatch.delitem(KINDS, "two.Stats")


def _kind(name, module):
    return dataclass(frozen=True)(
        type(name, (Structured,), {"__module__": module, "__annotations__": {"rows": torch.Tensor}})
    )


def test_a_kind_that_does_not_say_how_it_is_merged_names_both_ways_out():
    with pytest.raises(NotImplementedError, match=r"^Sketch: .*override `merge`, or name a rule"):
        Sketch.merge([], None)


# --- kinds of two methods ----------------------------------------------


def test_kept_rows_count_what_is_new_and_hold_everything(assert_identical):
    rows = KeptRows(torch.randn(7, 2, 3), num_new=2)
    message = Message(artifacts={"pool": rows})
    assert message.num_params == 2 * 6
    assert message.num_bytes == 2 * 6 * 4
    assert KeptRows(torch.zeros(0, 2, 3), 0).num_params == 0
    loaded = Message.from_state_dict(message.state_dict()).artifacts["pool"]
    assert isinstance(loaded, KeptRows)
    assert loaded.num_new == 2
    assert_identical({"": loaded.rows}, {"": rows.rows})
    copy = message.clone().artifacts["pool"]
    copy.rows.zero_()
    assert rows.rows.abs().max() > 0


def test_masked_weights_count_active_values_and_a_bit_an_entry(assert_identical):
    weights = torch.arange(18.0).view(3, 6) + 1
    mask = weights % 4 == 0
    masked = MaskedWeights.from_dense(weights, mask)
    message = Message({"mean": torch.zeros(5)}, {"w": masked})
    assert masked.values.tolist() == [4.0, 8.0, 12.0, 16.0]
    assert message.num_params == 5 + 4
    assert message.num_bytes == 5 * 4 + 4 * 4 + 3  # 18 bits
    assert_identical({"": masked.dense()}, {"": torch.where(mask, weights, 0.0)})
    assert MaskedWeights.from_dense(weights.bfloat16(), mask).num_bytes == 4 * 2 + 3


def test_masked_weights_survive_a_file_and_share_no_memory(assert_identical):
    weights, mask = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.rand(4, 3, 2, 2) < 0.5
    message = Message(artifacts={"w": MaskedWeights.from_dense(weights, mask)})
    before = torch.where(mask, weights, 0.0)
    file = io.BytesIO()
    torch.save(message.state_dict(), file)
    file.seek(0)
    loaded = Message.from_state_dict(torch.load(file, weights_only=True)).artifacts["w"]
    assert isinstance(loaded, MaskedWeights)
    copy, moved = message.clone().artifacts["w"], loaded.to(torch.device("cpu"))
    weights.zero_()
    mask.zero_()
    for found in (message.artifacts["w"], loaded, copy, moved):
        assert_identical({"": found.dense()}, {"": before})
    copy.values.zero_()
    copy.mask.zero_()
    assert_identical({"": message.artifacts["w"].dense()}, {"": before})


def test_masked_weights_refuse_values_that_their_mask_does_not_place():
    with pytest.raises(ValueError, match=r"`values` is \(2,\) but `mask` has 1 active"):
        MaskedWeights(torch.zeros(2), torch.tensor([True, False]))


def test_a_tensor_goes_into_a_buffer_and_zeros_where_there_is_none():
    buffer, means = torch.full((2,), 9.0), ClassMeans(torch.zeros(2, 1), torch.tensor([1, 0]))
    message = Message(artifacts={"mean": torch.tensor([1.0, 2.0]), "other": means})
    assert message.copy_to(buffer, "mean")
    assert buffer.tolist() == [1.0, 2.0]
    assert not message.copy_to(buffer, "absent")
    assert buffer.tolist() == [0.0, 0.0]
    assert not message.copy_to(buffer, "other")


@pytest.fixture
def apples(monkeypatch):
    """Tensors without memory that say that they are on an Apple GPU, where float64 is refused."""

    def refuse(*_):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            torch.arange(2).to(torch.ones(1, device="mps").device, non_blocking=True)
        except RuntimeError as error:
            pytest.skip(f"this torch has none, not even one without memory: {error}")
        yield lambda *shape: torch.ones(*shape, device="mps")


def test_nothing_is_float64_where_a_gpu_has_none(apples):
    """Clients' networks that rest (FedRep's), stacked clients and private means ended a run on a Mac's GPU."""
    values = apples(4, 3)
    assert _Column(values, 8).distance(torch.arange(4), values).dtype == torch.float32
    message = Message({"w": values})
    assert Coding.of(message).encoded(message, {}).dtype == torch.float32
    optimizer = torch.optim.Adam([torch.nn.Parameter(apples(3))])
    stacked = StackedOptimizer(optimizer, 0, [], values)
    assert {own.dtype for own in stacked.tensors()} == {torch.float32}
    with pytest.raises(DataDependentOutputException):  # it comes as far as asking for the values
        same(values, values)


def test_messages_travel_by_the_cpu_where_no_backend_has_the_gpu(monkeypatch):
    """`federation.workers` on a Mac's GPU: gloo knows CPUs and CUDA."""
    monkeypatch.setattr(transport.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    ways = {kind: transport.Wire.device(torch.device(kind)).type for kind in ("cpu", "cuda", "mps")}
    assert ways == {"cpu": "cpu", "cuda": "cuda", "mps": "cpu"}
