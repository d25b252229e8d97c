"""Which entries of a method's state travel, which stay, and which every receive makes anew."""

import pytest
import torch

from fl_lightning.core.division import Division, division_of, load_entries, matches, overlap
from fl_lightning.core.method import Method
from fl_lightning.errors import ConfigError


class OnlyHead(Method):
    shared = ("model.head",)


class LacksAReturn(Method):
    def is_shared(self, name, module):
        name.startswith("model")


class KeepsByNothing(Method):
    def is_kept(self, name, module):
        name.startswith("model")


@pytest.mark.parametrize(("kind", "what"), [(LacksAReturn, "is_shared"), (KeepsByNothing, "is_kept")])
def test_what_gives_nothing_for_any_entry_is_refused(kind, what, mlp):
    """It would share nothing, and every client would train alone."""
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.{what}\(\) gives nothing for any entry"):
        Division(kind(mlp()))


class OnlyNorm(Method):
    """Shares by layer type, not by name."""

    def is_shared(self, name, module):
        return isinstance(module, torch.nn.BatchNorm2d)


class Forgets(OnlyHead):
    """Neither shares nor keeps its body: every receive makes it anew."""

    def is_kept(self, name, module):
        return False


STATISTICS = tuple(f"model.body.stages.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize("kind", [Method, OnlyHead, OnlyNorm, Forgets])
@pytest.mark.parametrize("share_buffers", [True, False])
def test_what_travels_stays_and_is_made_anew_is_the_whole_state_once(conv_net, kind, share_buffers):
    method = kind(conv_net())
    division = Division(method, share_buffers)
    assert sorted((*division.shared, *division.kept, *division.anew)) == sorted(method.state_dict())


def test_a_tied_tensor_travels_once_by_its_first_name(mlp):
    method = Method(mlp())
    method.again = method.model.head
    division = Division(method)
    assert [name for name in division.shared if name.startswith("again")] == []
    assert "model.head.weight" in division.shared
    assert not [name for name in (*division.kept, *division.anew) if name.startswith("again")]
    load_entries(method, {"model.head.weight": torch.zeros_like(method.again.weight)})
    assert method.state_dict()["again.weight"].abs().max() == 0


def test_shared_names_go_by_submodule(mlp):
    division = Division(OnlyHead(mlp()))
    assert division.shared == ("model.head.weight", "model.head.bias")
    assert division.kept == ("model.body.stages.0.1.weight", "model.body.stages.0.1.bias", *NECK)


NECK = ("model.body.neck.0.weight", "model.body.neck.0.bias")


def test_shared_prefix_matches_whole_names_only(mlp):
    class Prefix(Method):
        shared = ("model.he",)

    assert Division(Prefix(mlp())).shared == ()


def test_shared_names_go_by_layer_type(conv_net):
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert Division(OnlyNorm(conv_net())).shared == tuple(f"model.body.stages.0.1.{name}" for name in names)


def test_running_statistics_stay_where_buffers_are_not_shared(conv_net):
    method = Method(conv_net())
    whole, without = Division(method), Division(method, share_buffers=False)
    assert without.kept == STATISTICS
    assert set(whole.shared) == {*without.shared, *STATISTICS}
    assert whole.kept == ()


def frozen(model):
    model.body.requires_grad_(False)
    return model


@pytest.mark.parametrize(("kind", "is_shared"), [(Method, True), (OnlyHead, False)])
def test_what_comes_frozen_does_not_travel_and_what_was_private_stays_so(kind, is_shared, mlp):
    division = Division(kind(frozen(mlp())))
    body = ("model.body.stages.0.1.weight", "model.body.stages.0.1.bias", *NECK)
    assert division.shared == ("model.head.weight", "model.head.bias")
    assert (division.fixed, division.kept) == ((body, ()) if is_shared else ((), body))
    assert set(division.fixed_entries()) == set(division.fixed)


def test_what_a_method_freezes_or_thaws_by_itself_travels(mlp):
    method = Method(mlp())
    method.model.body.requires_grad_(False)
    assert Division(method).fixed == ()
    method = Method(frozen(mlp()))
    method.model.body.requires_grad_(True)
    assert Division(method).fixed == ()


def test_division_is_made_once_and_anew_where_buffers_are_said(conv_net):
    method = Method(conv_net())
    first = division_of(method)
    assert division_of(method) is first
    assert first.kept == ()
    assert division_of(method, share_buffers=False).kept == STATISTICS
    assert division_of(method).kept == STATISTICS
    assert "_division" not in method.state_dict()


def test_weights_are_copies_and_shapes_are_theirs(mlp):
    method = OnlyHead(mlp())
    division = Division(method)
    weights = division.weights()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == division.shapes()
    weights["model.head.weight"].zero_()
    assert method.model.head.weight.abs().sum() > 0
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_parameters_are_counted_where_they_stay_and_where_they_travel(conv_net):
    """Statistics are no parameters; neither is what the model froze."""
    method = OnlyHead(conv_net())
    method.model.body.stages[0][0].requires_grad_(False)
    body = sum(p.numel() for p in method.model.body.parameters() if p.requires_grad)
    assert Division(method).parameter_counts() == (body, 6 * 4 + 4)
    assert Division(Method(conv_net())).parameter_counts()[0] == 0


def test_unknown_weights_are_refused(mlp):
    with pytest.raises(ValueError, match=r"received 'model.tail' of shape \(2,\).*does not have it"):
        load_entries(Method(mlp()), {"model.tail": torch.zeros(2)})


def test_weights_of_another_shape_are_refused(mlp):
    with pytest.raises(ValueError, match=r"'model.head.bias' of shape \(1,\), but this client has \(4,\)"):
        load_entries(Method(mlp()), {"model.head.bias": torch.zeros(1)})


def test_state_round_trips_through_load_entries(conv_net, assert_identical):
    torch.manual_seed(1)
    one, two = Method(conv_net()), Method(conv_net())
    one.model.body.stages[0][1].num_batches_tracked.fill_(2**40 + 1)
    load_entries(two, one.state_dict())
    assert_identical(dict(two.state_dict()), dict(one.state_dict()))


def test_dotted_names_are_matched_part_by_part():
    assert matches("model.head.bias", ("model.body", "model.head"))
    assert matches("model", ("model",))
    assert matches("anything", ("",))
    assert not matches("model.header", ("model.head",))
    assert not matches("model", ("model.head",))
    assert not matches("model", ())


def test_names_overlap_where_one_lies_inside_the_other():
    assert overlap("model", "model.head")
    assert overlap("model.head", "model")
    assert overlap("", "terms.1")
    assert not overlap("model.body", "model.head")


class Odd(torch.nn.Linear):
    """A head with a state that is no tensor, or one of its own, or a complex buffer."""

    def __init__(self, *sizes, extra=None):
        super().__init__(*sizes)
        if extra is None:
            self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.extra = extra

    def get_extra_state(self):
        return self.phase.real if self.extra is None else torch.tensor(3) if self.extra == "fleeting" else self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"k": 1}, r"_extra_state of its state must be a tensor.*, got 'dict'$"),
        (None, r"phase is complex, and what"),
        ("fleeting", r"_extra_state of its state is made anew whenever it is asked for .* keep it in a buffer"),
    ],
    ids=["no tensor", "complex", "fleeting"],
)
def test_entries_that_cannot_travel_are_refused_by_name(mlp, extra, said):
    model = mlp()
    model.head = Odd(5, 4, extra=extra)
    with pytest.raises(ConfigError, match=rf"^model: model\.head\.{said}"):
        Division(OnlyHead(model))


def test_an_extra_state_that_lasts_may_stay(mlp):
    model = mlp()
    model.head = Odd(5, 4, extra=torch.tensor(1))
    one = OnlyHead(model)
    load_entries(one, {"model.head._extra_state": torch.tensor(5)})
    assert "model.head._extra_state" in Division(one).shared
    assert int(model.head.extra) == 5


def test_a_complex_entry_may_stay(mlp):
    class OnlyBody(Method):
        shared = ("model.body",)

    model = mlp()
    model.head = Odd(5, 4)
    assert "model.head.phase" in Division(OnlyBody(model)).kept
