import math

import pytest
import torch

from fl_lightning.core.checkup import Expected, Unsound, check_message, check_values
from fl_lightning.core.message import ClassMeans, Message


def test_sound_values_pass_whatever_their_type_and_size():
    tensors = {
        "a": torch.tensor([-9.0, 9.5]),
        "wide": torch.tensor([9.0], dtype=torch.float64),
        "narrow": torch.tensor([9.0], dtype=torch.bfloat16),
        "count": torch.tensor([10**12]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1.0),
    }
    check_values(tensors, {}, 10.0, {"a"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40, 79])
def test_what_is_no_finite_number_is_named_wherever_it_is(value, place):
    tensor = torch.zeros(8, 10)
    tensor.view(-1)[place] = value
    with pytest.raises(Unsound, match=rf"^b holds {value}$"):
        check_values({"a": torch.ones(2), "b": tensor}, {}, 10.0, ())


def test_parameter_may_grow_so_much_over_what_it_was():
    """Growth 10 over a largest magnitude of 5: up to 50."""
    before = {"a": torch.tensor([1.0, -5.0])}
    check_values({"a": torch.tensor([-50.0])}, before, 10.0, {"a"})
    with pytest.raises(Unsound, match=r"^a holds 51, above 50 \(federation.max_growth is 10\)$"):
        check_values({"a": torch.tensor([-51.0])}, before, 10.0, {"a"})


def test_parameter_that_was_small_is_measured_by_one():
    with pytest.raises(Unsound, match="a holds 11, above 10"):
        check_values({"a": torch.tensor([11.0])}, {"a": torch.tensor([1e-6])}, 10.0, {"a"})


def test_statistics_and_artifacts_may_be_squares_in_the_units_of_the_data():
    check_values({"variance": torch.tensor([1000.0])}, {}, 10.0, ())
    with pytest.raises(Unsound, match="variance holds 1001, above 1000"):
        check_values({"variance": torch.tensor([1001.0])}, {}, 10.0, ())


def expected(**artifacts):
    weights = {"model.a": torch.zeros(2), "model.b": torch.zeros(3), "vae.a": torch.zeros(1)}
    return Expected(weights, artifacts, weights)


def test_whole_submodule_may_stay_away_and_no_part_of_one():
    whole = {"model.a": torch.zeros(2), "model.b": torch.zeros(3)}
    check_message(Message(whole, num_samples=10), expected(), 10, Message(), 10.0)
    check_message(Message(), expected(), 10, Message(), 10.0)
    with pytest.raises(
        Unsound, match=r"weight 'model.b' is missing; what only some send is no weight, but an artifact"
    ):
        check_message(Message({"model.a": torch.zeros(2)}), expected(), 10, Message(), 10.0)
    as_artifact = Message({"model.a": torch.zeros(2)}, {"model.b": torch.zeros(3)})
    check_message(as_artifact, expected(), 10, Message(), 10.0)


def test_artifacts_have_the_shape_that_the_method_tells_of():
    means = ClassMeans(torch.zeros(4, 5), torch.ones(4, dtype=torch.long))
    check_message(Message({}, {"p": means, "other": torch.zeros(7)}), expected(p=(4, 5)), 10, Message(), 10.0)
    with pytest.raises(Unsound, match=r"artifact p is \[4, 5\] and should be \[4, 6\]"):
        check_message(Message({}, {"p": means}), expected(p=(4, 6)), 10, Message(), 10.0)


def test_values_of_artifacts_are_looked_at_field_by_field():
    means = ClassMeans(torch.full((2, 2), math.nan), torch.ones(2, dtype=torch.long))
    with pytest.raises(Unsound, match=r"artifact p\.mean holds nan"):
        check_message(Message({}, {"p": means}), expected(p=(2, 2)), 10, Message(), 10.0)


def test_growth_of_a_message_is_measured_by_what_was_received():
    received = Message({"model.a": torch.full((2,), 100.0), "model.b": torch.zeros(3)})
    sent = Message({"model.a": torch.full((2,), 900.0), "model.b": torch.zeros(3)})
    check_message(sent, expected(), 10, received, 10.0)
    with pytest.raises(Unsound, match=r"weight model\.a holds 900, above 10 "):
        check_message(sent, expected(), 10, Message(), 10.0)


def test_what_a_client_did_not_receive_may_be_a_count():
    """FedNova's steps, FedGen's samples a class: a tight bound left out the clients that have the most."""
    for growth in (2.0, 10.0):
        check_message(Message({}, {"steps": torch.tensor([1050.0])}), expected(), 10, Message(), growth)
        received = Message({}, {"steps": torch.tensor([1.0])})
        with pytest.raises(Unsound, match=rf"artifact steps holds 1050, above {growth**3:g} \("):
            check_message(Message({}, {"steps": torch.tensor([1050.0])}), expected(), 10, received, growth)
        with pytest.raises(Unsound, match="artifact steps holds 1e\\+13, above 1e\\+12"):
            check_message(Message({}, {"steps": torch.tensor([1e13])}), expected(), 10, Message(), growth)
        with pytest.raises(Unsound, match="artifact steps holds nan"):
            check_message(Message({}, {"steps": torch.tensor([torch.nan])}), expected(), 10, Message(), growth)
