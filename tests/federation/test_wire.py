"""Filters on the wire: what arrives, what it costs, and what a client remembers of it."""

import signal
import sys
from dataclasses import replace

import pytest
import torch
from tiny_optimizers import adam
from torch import nn

from fl_lightning.core.message import ClassMeans, Message, Size
from fl_lightning.core.server import Server
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.filters import Quantize, TopK, quantised
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.launch import launch
from fl_lightning.federation.packing import Packet
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.segments import load_state
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.team import Team
from fl_lightning.federation.wire import MEMORY, Wire, WireFilter
from fl_lightning.methods.dispfl import DisPFL, MaskedWeights
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fedfed import FedFed, KeptRows
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.scaffold import SCAFFOLD

pytestmark = pytest.mark.usefixtures("plain_convolutions")


def wire(*filters):
    return Wire(filters, Star())


def up(filters, message, received=None, memory=None):
    return wire(*filters).up(message, received or Message(), {} if memory is None else memory)


def weights(*values, **options):
    return Message({"w": torch.tensor(values, **options)}, num_samples=5)


def test_factors_count_until_a_filter_changes_what_they_make():
    """A message that its method made of fewer values (FedKD) costs those; narrowed one by one, its weights count."""
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    whole = Message({"w": matrix, "b": torch.zeros(4)}, num_samples=5)
    factors = replace(whole, sent=Size(21, 84))
    assert up([TopK(1.0)], factors, whole).size == Size(21, 84)
    assert up([Quantize()], factors).size == up([Quantize()], whole).size == Size(68, (64 + 8) + (4 + 8))
    received = Message({name: torch.zeros_like(tensor) for name, tensor in whole.weights.items()})
    assert up([TopK(0.5)], factors, received).size == up([TopK(0.5)], whole, received).size


# --- quantisation -----------------------------------------------------------------------------------------------------


def test_codes_match_hand_computed_ones():
    """-1..2 in steps of 3/255: 0 is 85 steps up, 0.25 is 106.25, 2 is 255."""
    codes, scale, offset = quantised(torch.tensor([-1.0, 0.0, 0.25, 2.0]), bits=8)
    assert codes.tolist() == [0, 85, 106, 255]
    assert (float(scale), float(offset)) == (pytest.approx(3 / 255), -1.0)


def test_an_update_is_quantised_in_steps_of_its_own_range_and_as_it_is_where_nothing_was_received():
    """Of weights in thousands that changed by -1..2, as above, the codes are the change's; steps are of 3/255."""
    received = torch.cat([torch.arange(4) * 1000.0, torch.zeros(36)])
    change = torch.cat([torch.tensor([-1.0, 0.0, 0.25, 2.0]), torch.zeros(36)])
    message = Message({"w": received + change, "new": received + change})
    there = up([Quantize(updates=True)], message, Message({"w": received}))
    expected = received + torch.cat([torch.tensor([-1.0, 0.0, -1 + 106 * 3 / 255, 2.0]), torch.zeros(36)])
    torch.testing.assert_close(there.weights["w"], expected, rtol=0, atol=2e-4)
    assert torch.equal(there.weights["new"], up([Quantize()], message).weights["new"])
    assert there.num_bytes == 2 * (40 + 8) == up([Quantize()], message).num_bytes


def test_a_variance_is_never_quantised_below_zero_as_an_update():
    """What it has changed by is off by half a step of the whole range of changes, which is more than a small one is."""
    received = torch.cat([torch.full((20,), 1e-3), torch.linspace(1.0, 9.0, 20)])
    change = torch.cat([torch.full((20,), -9e-4), torch.linspace(-0.695, 1.0, 20)])
    message = Message({"w": received + change, "running_var": received + change})
    chain = Wire([Quantize(updates=True)], Star(), trained=("w",))
    there = chain.up(message, Message({"w": received, "running_var": received}), {})
    assert there.weights["w"].min() < 0  # the test's point: of a weight this is only nearness
    assert torch.equal(there.weights["running_var"], up([Quantize()], message).weights["running_var"])
    assert there.weights["running_var"].min() > 0
    assert there.num_bytes == 2 * (40 + 8)


def test_values_arrive_within_half_a_step():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for bits in (8, 16):
        there = up([Quantize(bits)], Message({"w": values})).weights["w"]
        step = float(values.max() - values.min()) / (2**bits - 1)
        assert 0 < (there - values).abs().max() <= step / 2 * 1.001
        assert there.unique().numel() <= 2**bits


def test_halves_go_to_even_codes():
    """0..255 in steps of 1."""
    there = up([Quantize()], weights(0.0, 0.5, 1.5, 2.5, *[9.0] * 8, 255.0)).weights["w"]
    assert there.tolist() == [0.0, 0.0, 2.0, 2.0, *[9.0] * 8, 255.0]


@pytest.mark.parametrize(("bits", "each"), [(8, 1), (16, 2)])
def test_codes_are_counted_with_scale_and_offset(bits, each):
    message = Message({"a": torch.randn(10, 3), "b": torch.randn(7), "steps": torch.tensor(4)})
    assert up([Quantize(bits)], message).size == Size(38, 37 * each + 2 * 8 + 8)


def test_wide_scale_for_wide_values():
    message = Message({"w": torch.randn(20, dtype=torch.float64)})
    there = up([Quantize()], message)
    assert there.size == Size(20, 20 + 16)
    assert there.weights["w"].dtype == torch.float64


def test_narrow_values_keep_their_type_and_gain_nothing_from_as_many_bits():
    message = Message({"w": torch.randn(20).bfloat16()})
    assert up([Quantize()], message).size == Size(20, 28)
    assert up([Quantize()], message).weights["w"].dtype == torch.bfloat16
    same = up([Quantize(16)], message)
    assert torch.equal(same.weights["w"], message.weights["w"])
    assert same.sent is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -3e38])
def test_constant_tensor_arrives_exactly(value, dtype):
    message = Message({"w": torch.full((50,), value, dtype=dtype)})
    there = up([Quantize()], message)
    assert torch.equal(there.weights["w"], message.weights["w"])
    assert there.num_bytes < message.num_bytes


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(0, 4), torch.tensor(0.1), torch.tensor([0.1, 0.2])])
def test_tensor_that_gets_no_smaller_crosses_as_it_is(tensor):
    there = up([Quantize()], Message({"w": tensor}))
    assert torch.equal(there.weights["w"], tensor)
    assert there.weights["w"].shape == tensor.shape
    assert there.sent is None


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_visible_and_are_not_remembered(odd):
    memory = {}
    message = weights(*torch.linspace(0, 1, 40).tolist(), odd)
    there = up([Quantize(error_feedback=True)], message, memory=memory)
    torch.testing.assert_close(there.weights["w"], message.weights["w"], rtol=0, atol=0, equal_nan=True)
    assert there.size == Size(41, 164)
    assert memory[f"{MEMORY}0.w"].tolist() == [0.0] * 41


def test_huge_range_is_quantised_without_overflow():
    values = torch.linspace(-3e38, 3e38, 100, dtype=torch.float64).float()
    there = up([Quantize()], Message({"w": values})).weights["w"]
    assert (there - values).abs().max() <= 6e38 / 255 / 2 * 1.001


def test_integers_counts_and_masks_cross_as_they_are():
    mask = torch.rand(20, 4) > 0.5
    artifacts = {
        "means": ClassMeans(torch.randn(3, 50), torch.tensor([4, 0, 2])),
        "masked": MaskedWeights(torch.randn(int(mask.sum())), mask),
        "rows": KeptRows(torch.randn(9, 9), 3),
        "labels": torch.arange(40),
    }
    message = Message({"steps": torch.tensor([3])}, artifacts, 7)
    there = up([Quantize()], message)
    assert torch.equal(there.artifacts["means"].count, artifacts["means"].count)
    assert torch.equal(there.artifacts["masked"].mask, mask)
    assert torch.equal(there.artifacts["rows"].rows, artifacts["rows"].rows)
    assert torch.equal(there.artifacts["labels"], artifacts["labels"])
    assert torch.equal(there.weights["steps"], message.weights["steps"])
    assert there.num_samples == 7


def test_artifacts_are_counted_as_what_crosses():
    """Of class means the rows that are held: 2 of 50 values as codes and 2 counts of 8 bytes."""
    mean = torch.randn(3, 50)
    mean[1] = 0
    message = Message({}, {"means": ClassMeans(mean, torch.tensor([4, 0, 2])), "t": torch.randn(30)})
    there = up([Quantize()], message)
    assert there.size == Size(102 + 30, (100 + 8 + 16) + (30 + 8))
    assert there.artifacts["means"].mean[1].tolist() == [0.0] * 50
    assert not torch.equal(there.artifacts["means"].mean, mean)


def test_rows_that_do_not_cross_do_not_widen_the_range():
    mean = torch.linspace(100, 101, 100).reshape(2, 50)
    there = up(
        [Quantize()], Message({}, {"m": ClassMeans(torch.cat([mean, torch.zeros(1, 50)]), torch.tensor([1, 1, 0]))})
    )
    assert (there.artifacts["m"].mean[:2] - mean).abs().max() <= 0.51 / 255


def test_error_feedback_adds_up_to_the_truth():
    """Sent sums equal meant sums but for what is still owed, within one step; without feedback they drift."""
    generator = torch.Generator().manual_seed(1)
    meant = [torch.cat([torch.randn(30, generator=generator) * 0.01, torch.tensor([-1.0, 1.0])]) for _ in range(20)]
    memory, sent, plain = {}, torch.zeros(32), torch.zeros(32)
    for x in meant:
        sent += up([Quantize(error_feedback=True)], Message({"w": x}), memory=memory).weights["w"]
        plain += up([Quantize()], Message({"w": x})).weights["w"]
    truth = torch.stack(meant).sum(0)
    torch.testing.assert_close(sent + memory[f"{MEMORY}0.w"], truth, rtol=0, atol=1e-5)
    assert (sent - truth).abs().max() < (plain - truth).abs().max()


def test_what_a_server_adds_up_is_owed_too(mlp, set_up_federation):
    """SCAFFOLD's c is the clients' mean c_i, but for what is still owed; what rounding lost stayed lost for good."""
    wire = [Quantize(error_feedback=True, ways="up")]
    loop = set_up_federation(lambda: SCAFFOLD(mlp()), rounds=8, wire=wire)
    for _ in range(8):
        loop.advance()
    states = [loop.runner.pool.get(client) for client in range(4)]
    meant = torch.stack([state["own_control"] for state in states]).mean(0)
    (name,) = (name for name in states[0] if name.startswith(MEMORY) and "control" in name)
    owed = torch.stack([state[name] for state in states]).mean(0)
    control = loop.exchange.global_message().artifacts["control"]
    torch.testing.assert_close(control + owed, meant, rtol=0, atol=1e-6)
    assert not torch.allclose(control, meant, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "owes"), [(FedAMP, False), (FedAvg, True)])
def test_nothing_is_owed_of_weights_that_a_fit_does_not_begin_from_as_they_came(kind, owes, mlp, set_up_federation):
    """What a client keeps to itself was owed anew in every round, and added up: FedAMP ended at chance.

    Where nothing is owed what arrives is what was received, or the client's own weight as it is.
    """
    loop = set_up_federation(lambda: kind(mlp()), rounds=4, wire=[TopK(0.1)])
    made = []
    send = kind.send

    def noting(method, data):
        message = send(method, data)
        made.append(message.clone())
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "send", noting)
        loop.run()
    last = zip(sorted(loop.participants), made[-4:], strict=True)
    added = False
    for client, honest in last:
        began, sent = loop.diary.received[4, client].weights, loop.diary.sent[4, client].weights
        added |= any(bool(((own != began[name]) & (own != honest.weights[name])).any()) for name, own in sent.items())
    assert added is owes


def test_error_feedback_of_a_narrow_type_is_kept_in_a_wide_one():
    memory = {}
    up([Quantize(error_feedback=True)], Message({"w": torch.randn(30).bfloat16()}), memory=memory)
    assert memory[f"{MEMORY}0.w"].dtype == torch.float32


def test_way_down_quantises_once_for_all_clients():
    message = Message({"w": torch.randn(30)})
    both, only_up = wire(Quantize()), wire(Quantize(ways="up"))
    assert both.down(message) is both.down(message)
    assert torch.equal(both.down(message).weights["w"], up([Quantize()], message).weights["w"])
    assert both.down(message).size == Size(30, 38)
    assert only_up.down(message) is message
    assert wire(Quantize(ways="down")).up(message, Message(), {}) is message


# --- the largest changes ----------------------------------------------------------------------------------------------


def test_largest_changes_of_all_weights_together_are_sent():
    received = Message({"a": torch.zeros(4), "b": torch.zeros(2, 2)})
    message = Message({"a": torch.tensor([1.0, -5.0, 2.0, 0.0]), "b": torch.tensor([[0.5, 4.0], [-3.0, 0.1]])})
    there = up([TopK(3 / 8)], message, received)
    assert there.weights["a"].tolist() == [0.0, -5.0, 0.0, 0.0]
    assert there.weights["b"].tolist() == [[0.0, 4.0], [-3.0, 0.0]]
    assert there.size == Size(3, 3 * 4 + 1 + 1)  # bitmaps of 4 entries each


def test_places_cost_the_less_of_indices_and_bits():
    """2 of 1,000 entries: 8 bytes of indices are less than 125 of bits; 100 of them: 125 bytes are less than 400."""
    received, message = Message({"w": torch.zeros(1000)}), Message({"w": torch.arange(1000.0)})
    assert up([TopK(0.002)], message, received).size == Size(2, 2 * 4 + 2 * 4)
    assert up([TopK(0.1)], message, received).size == Size(100, 100 * 4 + 125)


def test_values_that_are_sent_arrive_exactly_and_the_others_stay():
    generator = torch.Generator().manual_seed(0)
    received = Message({"w": torch.randn(50, generator=generator) * 1e4})
    message = Message({"w": received.weights["w"] + torch.randn(50, generator=generator)})
    there = up([TopK(0.2)], message, received).weights["w"]
    sent = there != received.weights["w"]
    assert sent.sum() == 10
    assert torch.equal(there[sent], message.weights["w"][sent])


def test_equal_changes_are_sent_in_order_and_at_least_one():
    there = up([TopK(0.01)], weights(1.0, 1.0, 1.0), weights(0.0, 0.0, 0.0))
    assert there.weights["w"].tolist() == [1.0, 0.0, 0.0]


def test_nan_is_sent_before_all():
    there = up([TopK(0.25)], weights(9.0, 1.0, torch.nan, torch.inf), weights(0.0, 0.0, 0.0, 0.0)).weights["w"]
    assert there.isnan().tolist() == [False, False, True, False]


def test_what_is_not_sent_is_remembered_and_sent_later():
    """Changes of 3, 2, 1 every round, one value each: 3; then 2 + 2 before 3; then 3 before 1 + 1 + 1 (the first)."""
    memory, zero, message = {}, weights(0.0, 0.0, 0.0), weights(3.0, 2.0, 1.0)
    rounds = [up([TopK(1 / 3)], message, zero, memory).weights["w"].tolist() for _ in range(4)]
    assert rounds == [[3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [6.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    assert memory[f"{MEMORY}0.w"].tolist() == [3.0, 0.0, 4.0]


def test_changes_add_up_to_the_truth():
    generator = torch.Generator().manual_seed(2)
    memory, sent, meant = {}, torch.zeros(40), torch.zeros(40)
    for _ in range(15):
        received = torch.randn(40, generator=generator)
        x = received + torch.randn(40, generator=generator)
        meant += x - received
        sent += up([TopK(0.1)], Message({"w": x}), Message({"w": received}), memory).weights["w"] - received
    torch.testing.assert_close(sent + memory[f"{MEMORY}0.w"], meant, rtol=0, atol=1e-4)


@pytest.mark.parametrize("own", [TopK(0.5), Quantize(error_feedback=True)], ids=["TopK", "Quantize"])
def test_nothing_is_owed_of_running_statistics(own):
    """A variance of 0.1 after every fit from 0.4: what is held back grows to 0.3 a round, and 0.1 − 0.9 is none."""
    chain, memory = Wire([own], Star(), trained={"w"}), {}
    message = Message({"w": torch.rand(100) + 1, "var": torch.cat([torch.full((99,), 0.1), torch.tensor([7.0])])})
    received = Message({"w": torch.zeros(100), "var": torch.cat([torch.full((99,), 0.4), torch.tensor([7.0])])})
    for _ in range(9):
        arrived = chain.up(message, received, memory).weights["var"]
        assert (arrived[:99] - 0.1).abs().max() < 0.02 or torch.equal(arrived, received.weights["var"])
    assert list(memory) == [f"{MEMORY}0.w"]


def test_federation_says_which_weights_are_trained(run_federation, fedavg):
    loop = run_federation(fedavg, rounds=1, wire=[TopK(0.1)])
    owed = {name.removeprefix(f"{MEMORY}0.") for name in loop.runner.pool.get(0)}
    assert owed == {name for name, _ in loop.runner.modules[0].method.named_parameters()}


def test_without_error_feedback_nothing_is_remembered():
    memory = {}
    for _ in range(2):
        there = up([TopK(1 / 3, error_feedback=False)], weights(3.0, 2.0, 1.0), weights(0.0, 0.0, 0.0), memory)
        assert there.weights["w"].tolist() == [3.0, 0.0, 0.0]
    assert memory == {}


def test_entries_that_were_not_received_integers_and_artifacts_cross_whole():
    artifacts = {"t": torch.randn(6)}
    message = Message({"new": torch.randn(5), "steps": torch.arange(3), "w": torch.ones(10)}, artifacts)
    received = Message({"steps": torch.zeros(3, dtype=torch.int64), "w": torch.zeros(10)})
    there = up([TopK(0.1)], message, received)
    assert torch.equal(there.weights["new"], message.weights["new"])
    assert torch.equal(there.weights["steps"], message.weights["steps"])
    assert torch.equal(there.artifacts["t"], artifacts["t"])
    assert there.size == Size(5 + 3 + 1 + 6, 20 + 24 + (4 + 2) + 24)


def test_share_of_one_changes_nothing():
    memory, message = {}, Message({"w": torch.randn(50) * 1e-8})
    there = up([TopK(1)], message, Message({"w": torch.randn(50)}), memory)
    assert torch.equal(there.weights["w"], message.weights["w"])
    assert there.sent is None
    assert memory == {}


# --- chains -----------------------------------------------------------------------------------------------------------


def test_values_that_are_sent_are_quantised_and_counted_with_their_places():
    """100 of 1,000: 100 codes, 8 bytes of scale and offset, and a bitmap of 125 bytes."""
    received, message = Message({"w": torch.zeros(1000)}), Message({"w": torch.arange(1000.0)})
    there = up([TopK(0.1), Quantize()], message, received)
    assert there.size == Size(100, 100 + 8 + 125)
    sent = there.weights["w"] != 0
    assert sent.nonzero().flatten().tolist() == list(range(900, 1000))
    assert (there.weights["w"][sent] - message.weights["w"][sent]).abs().max() <= 99 / 255 / 2 * 1.001


@pytest.mark.parametrize("updates", [False, True])
def test_filters_of_one_chain_remember_apart(updates):
    """What neither sent is all that is missing: both residuals and what arrived are what was meant."""
    generator = torch.Generator().manual_seed(3)
    chain = [TopK(0.3), Quantize(error_feedback=True, updates=updates)]
    memory, sent, meant = {}, torch.zeros(60), torch.zeros(60)
    for _ in range(6):
        received = torch.randn(60, generator=generator)
        x = received + torch.randn(60, generator=generator)
        meant += x - received
        sent += up(chain, Message({"w": x}), Message({"w": received}), memory).weights["w"] - received
    assert sorted(memory) == [f"{MEMORY}0.w", f"{MEMORY}1.w"]
    torch.testing.assert_close(sent + sum(memory.values()), meant, rtol=0, atol=1e-4)


def test_quantised_updates_are_nearer_than_quantised_weights(run_federation, fedavg):

    def off(**options):
        loop = run_federation(fedavg, rounds=1, wire=[Quantize(ways="up", **options)] if options else [])
        return loop.exchange.global_message().weights

    exact = off()
    by_values, by_updates = (
        max(float((own[name] - exact[name]).abs().max()) for name in exact if exact[name].is_floating_point())
        for own in (off(updates=None), off(updates=True))
    )
    assert 0 < by_updates < by_values / 3


def test_values_changed_after_quantisation_take_their_full_size_again():
    received, message = Message({"w": torch.zeros(1000)}), Message({"w": torch.randn(1000)})
    assert up([Quantize(), TopK(0.1)], message, received).num_bytes == 400 + 125
    assert up([Quantize(), TopK(0.1, error_feedback=False)], message, received).num_bytes == 100 + 8 + 125


def test_second_quantisation_only_narrows():
    message = Message({"w": torch.randn(100)})
    assert up([Quantize(16), Quantize(8)], message).num_bytes == 108
    assert up([Quantize(8), Quantize(16)], message).num_bytes == 108


def test_wire_without_filters_hands_messages_on():
    message = weights(1.0)
    assert up([], message) is message
    assert wire().down(message) is message


def test_filter_of_its_own_kind_is_one_class():
    """Clip and noise: the whole update to a norm of 1, then noise; full size, at values that are off the grid."""

    class ClipAndNoise(WireFilter):
        ways = "up"

        def apply(self, packet, memory):
            changes = {name: own.values - own.known_there for name, own in packet.weights.items()}
            norm = torch.cat(list(changes.values())).norm()
            clipped = {
                name: own.carrying(
                    own.known_there + changes[name] / norm.clamp(min=1) + torch.randn(own.num_params) * 0.0
                )
                for name, own in packet.weights.items()
            }
            return replace(packet, weights=clipped)

    there = up([ClipAndNoise()], weights(3.0, 4.0), weights(0.0, 0.0))
    assert there.weights["w"].tolist() == pytest.approx([0.6, 0.8])
    assert there.sent is None


class EveryOther(WireFilter):
    """Remembers something from its first message to its second, and so on."""

    def apply(self, packet, memory):
        if memory.pop("waits", None) is None:
            memory["waits"] = torch.ones(1)
        return packet


def test_what_a_filter_takes_out_of_its_memory_is_forgotten():
    memory = {}
    for waits in (True, False, True):
        up([Quantize(), EveryOther()], weights(1.0), memory=memory)
        assert [*memory] == [f"{MEMORY}1.waits"] * waits


class CountsDown(WireFilter):
    """Counts in place what it lets through."""

    def apply(self, packet, memory):
        memory.setdefault("left", torch.tensor(2.0))
        memory["left"] -= 1
        if memory["left"] < 0:
            raise ValueError("enough")
        return packet


def test_what_a_filter_has_written_to_its_memory_counts_only_if_it_comes_through():
    """It wrote into the client's last good state, with which a client that falls sick goes on."""
    memory = {}
    for left in (1, 0):
        up([CountsDown()], weights(1.0), memory=memory)
        assert memory[f"{MEMORY}0.left"] == left
    with pytest.raises(ValueError, match="enough"):
        up([CountsDown()], weights(1.0), memory=memory)
    assert memory[f"{MEMORY}0.left"] == 0


class CountsByANumber(WireFilter):
    def apply(self, packet, memory):
        memory["sent"] = memory.get("sent", 0) + 1
        return packet


def test_what_a_filter_remembers_of_a_client_is_a_tensor():
    with pytest.raises(
        TypeError, match=r"CountsByANumber.apply\(\) remembers 'sent', int: a client's memory holds tensors"
    ):
        up([CountsByANumber()], weights(1.0), memory={})


def test_packet_comes_back_as_it_was(assert_identical):
    message = Message(
        {"w": torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last), "steps": torch.tensor(3)},
        {"m": ClassMeans(torch.randn(3, 5), torch.tensor([0, 1, 2])), "t": torch.randn(2, 3)},
        num_samples=9,
    )
    there = Packet.of(message, message).unpacked(message)
    assert_identical(there.state_dict(), message.state_dict())
    assert there.num_samples == 9


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Quantize(bits=4), "federation.wire.bits: must be 8 or 16, got 4"),
        (lambda: Quantize(ways="sideways"), "federation.wire.ways: must be one of up, down, both, got 'sideways'"),
        (
            lambda: Quantize(error_feedback=True, ways="down"),
            "federation.wire.error_feedback: must be false where ways",
        ),
        (lambda: Quantize(ways="down", updates=True), "federation.wire.updates: must be false where ways is down"),
        (lambda: TopK(0.0), "federation.wire.share: must be in"),
        (lambda: TopK(1.1), "federation.wire.share: must be in"),
    ],
)
def test_bad_argument_is_refused(make, rule):
    with pytest.raises(ConfigError, match=rule):
        make()


# --- in a federation --------------------------------------------------------------------------------------------------


@pytest.fixture
def fedavg(conv_net):
    return lambda: FedAvg(conv_net())


class Down(WireFilter):
    ways = "down"

    def apply(self, packet, memory):
        return packet


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (TopK(), "TopK"),
        (Down(), "Down with ways: down"),
        (Quantize(ways="down"), "Quantize with ways: down"),
        (Quantize(updates=True), "Quantize with updates: true"),
    ],
)
@pytest.mark.parametrize("exchange", [Ring(), Ring("sequential"), RandomPeers(2), DirectedGraph(2)])
def test_filter_that_needs_a_server_is_refused_without_one(set_up_federation, fedavg, exchange, own, named):
    rule = f"^federation.wire: {named} needs a server, which a federation on a {type(exchange).__name__} has"
    with pytest.raises(ConfigError, match=rule) as refused:
        set_up_federation(fedavg, exchange=exchange, wire=[own])
    assert "\n" not in str(refused.value)


def test_metrics_count_what_crossed(set_up_federation, fedavg):
    loop = set_up_federation(fedavg, rounds=2, wire=[TopK(0.1), Quantize()])
    loop.run()
    plain = Message(loop.runner.modules[0].division.weights())
    for row in loop.diary.rows:
        sent = [loop.diary.sent[row["round"], client].size for client in range(4)]
        assert row["uplink_params"] == sum(size.num_params for size in sent)
        assert row["uplink_bytes"] == sum(size.num_bytes for size in sent) < plain.num_bytes * 4 / 4
        assert row["downlink_params"] == 4 * plain.num_params
        assert row["downlink_bytes"] == 4 * Wire([Quantize()], Star()).down(plain).num_bytes
    floats = sum(t.numel() for t in plain.weights.values() if t.is_floating_point())
    integers = sum(t.numel() for t in plain.weights.values()) - floats
    assert loop.diary.rows[0]["uplink_params"] == 4 * (round(0.1 * floats) + integers)


def test_client_hears_what_crossed_and_the_server_keeps_what_it_has(set_up_federation, fedavg):
    loop = set_up_federation(fedavg, rounds=1, wire=[Quantize()])
    exact = loop.exchange.inbox(0)
    heard = loop._job(1, 0).message
    assert loop.exchange.inbox(0) is exact
    assert any(not torch.equal(heard.weights[name], w) for name, w in exact.weights.items())


def test_hops_count_what_crossed(run_federation, fedavg):
    loop = run_federation(fedavg, rounds=2, exchange=Ring(), wire=[Quantize()])
    small = loop.diary.sent[1, 0].size
    assert small.num_bytes < Message(loop.diary.sent[1, 0].weights).num_bytes / 2
    assert {tuple(hop[3:]) for hop in loop.diary.hops[1]} == {tuple(small)}
    assert loop.diary.rows[1]["downlink_bytes"] == loop.diary.rows[1]["uplink_bytes"] == 4 * small.num_bytes


IDENTITIES = {"no filter": [], "all of it": [TopK(1)], "a share of one twice": [TopK(1), TopK(1, error_feedback=False)]}


@pytest.mark.parametrize("filters", IDENTITIES.values(), ids=IDENTITIES)
@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_identity_changes_no_bit(run_federation, outcome, assert_identical, conv_net, filters, method):
    make = lambda: method(conv_net())  # noqa: E731
    assert_identical(outcome(run_federation(make, wire=filters)), outcome(run_federation(make)))


def test_server_averages_what_arrived(run_federation, fedavg, assert_identical):
    loop = run_federation(fedavg, rounds=1, wire=[TopK(0.1), Quantize(ways="up")])
    mean = Server(Message()).aggregate({client: loop.diary.sent[1, client] for client in range(4)})
    assert_identical(loop.exchange.global_message().weights, mean.weights)


def test_residuals_are_the_clients_own(run_federation, fedavg):
    loop = run_federation(fedavg, rounds=2, wire=[TopK(0.1)], participation=0.5)
    kept = {client: loop.runner.pool.get(client) for client in range(4)}
    took_part = {client for _, client in loop.diary.sent}
    assert {client for client, state in kept.items() if state} == took_part
    assert all(name.startswith(MEMORY) for client in took_part for name in kept[client])


@pytest.mark.parametrize("filters", [[], [TopK(0.1)]])
def test_a_methods_own_module_may_have_the_name_of_filters_memory(run_federation, mlp, filters):
    class Counts(FedAvg):
        def setup(self):
            self.wire = nn.Module()
            self.wire.register_buffer("fits", torch.zeros(()))

        def on_fit_end(self):
            self.wire.fits += 1 + self.facts.client

    loop = run_federation(lambda: Counts(mlp()), rounds=2, wire=filters)
    assert [float(loop.runner.pool.get(client)["wire.fits"]) for client in range(4)] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("pool", ["memory", "disk"])
def test_a_client_of_which_nothing_is_left_to_remember_has_no_state(run_federation, mlp, pool, tmp_path):
    options = {"pool": pool, "folder": tmp_path, "wire": [EveryOther()]}
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, **options)
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


CHAIN = [TopK(0.1), Quantize(error_feedback=True)]
CASES = {
    "FedAvg": (FedAvg, CHAIN, {}),
    "FedBN": (FedBN, CHAIN, {}),
    "FedRep, half of the clients": (FedRep, CHAIN, {"participation": 0.5}),
    "FedProto": (FedProto, CHAIN, {}),
    "FedFed": (lambda net: FedFed(net, feature_rounds=1), CHAIN, {}),
    "DisPFL": (DisPFL, [Quantize(error_feedback=True)], {"exchange": lambda: RandomPeers(2)}),
    "a ring": (FedAvg, [Quantize(error_feedback=True)], {"exchange": lambda: Ring("sequential")}),
    "clients that join": (FedAvg, CHAIN, {"newcomers": Newcomers(1, 1)}),
    "bf16": (FedAvg, CHAIN, {"trainer": {"precision": "bf16-true"}}),
    "float64": (FedAvg, CHAIN, {"trainer": {"precision": "64-true"}}),
    "states on disk": (FedAvg, CHAIN, {"pool": "disk"}),
}


@pytest.fixture(scope="module")
def set_up_case(set_up_federation, conv_net):
    def set_up(name, folder=None, callbacks=()):
        method, filters, options = CASES[name]
        options = {key: value() if key == "exchange" else value for key, value in options.items()}
        make = lambda: method(conv_net())  # noqa: E731
        return set_up_federation(make, 3, optimizer=adam, folder=folder, wire=filters, callbacks=callbacks, **options)

    return set_up


@pytest.mark.parametrize("name", CASES)
def test_federation_resumes_bit_for_bit(set_up_case, outcome, assert_identical, name, tmp_path):
    straight, first, second = (set_up_case(name, tmp_path / part) for part in ("straight", "other", "other"))
    straight.run()
    first.advance()
    first.advance()
    second.load_state_dict(second.checkpoints.load(second.checkpoints.find("auto")))
    second.run()
    second.diary.rows = first.diary.rows + second.diary.rows
    assert_identical(outcome(second), outcome(straight))
    plain = set_up_case(name, tmp_path / "plain")
    plain.wire = Wire((), plain.exchange)
    plain.run()
    assert straight.traffic["uplink_bytes"] < plain.traffic["uplink_bytes"]
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in straight.diary.rows)


class Stops(FederationCallback):
    def on_round_end(self, loop, row):
        if row["round"] == 2:
            loop.stop(signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="functions are handed to forked processes")
def test_result_does_not_depend_on_the_number_of_workers(set_up_case, outcome, assert_identical, tmp_path):
    def run_all(folder, resume):
        for name in CASES:
            loop = set_up_case(name, folder / name, [] if resume else [Stops()])
            if resume:
                checkpoints = Checkpoints(folder / name / "checkpoints")
                loop.load_state_dict(checkpoints.load(checkpoints.find("auto")))
            loop.run()
            if loop.workers.is_main and resume:
                left = outcome(loop)
                torch.save({key: left[key] for key in ("rows", "exchange", "traffic")}, folder / f"{name}.pt")
        return 0

    assert launch(run_all, Team(2, threads=1), tmp_path / "2", False) == 0
    assert launch(run_all, Team(2, threads=1), tmp_path / "2", True) == 0
    run_all(tmp_path / "1", False)
    run_all(tmp_path / "1", True)
    for name in CASES:
        alone, together = (torch.load(tmp_path / size / f"{name}.pt") for size in ("1", "2"))
        assert_identical(together, alone)
        states = [load_clients(tmp_path / size / name) for size in ("1", "2")]
        assert_identical(*states)


def load_clients(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    records = checkpoints.load(checkpoints.find("auto"))["clients"]
    return {client: load_state(checkpoints.clients, client, record) for client, record in sorted(records.items())}


def test_linear_model_learns_from_a_tenth_of_its_changes(run_federation, mlp):
    sparse = run_federation(lambda: FedAvg(mlp()), rounds=12, wire=[TopK(0.1), Quantize()])
    dense = run_federation(lambda: FedAvg(mlp()), rounds=12)
    assert sparse.traffic["uplink_bytes"] < dense.traffic["uplink_bytes"] / 10
    assert sparse.diary.rows[-1]["loss"] < sparse.diary.rows[0]["loss"] / 2
    assert isinstance(sparse.runner.modules[0].method.model.head, nn.Linear)
