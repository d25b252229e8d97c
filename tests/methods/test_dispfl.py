"""The tests that the specification of DisPFL promises (BASELINES-B.md, sections 8 and 10)."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.message import Message
from fl_lightning.core.mixing import Heard
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.model_sizes import num_parameters
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.losses.class_relation import ClassRelation, SoftLabels
from fl_lightning.losses.model_contrast import ModelContrast
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods import dispfl
from fl_lightning.methods.dispfl import ActiveMean, DisPFL, EqualMixer, MaskedWeights, replaced_share
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.resnet import ResNet18
from fl_lightning.models.sparsity import erdos_renyi_kernel, regrown_mask

NAMES = [f"model.{name}" for name in ("body.stages.0.0.weight", "body.stages.0.0.bias")]
NAMES += [f"model.{name}" for name in ("body.stages.0.1.weight", "body.stages.0.1.bias")]
NAMES += [f"model.{name}" for name in ("body.neck.2.weight", "body.neck.2.bias", "head.weight", "head.bias")]
"""What has masks in `conv_net`, in order."""


class WatchesStates(FederationCallback):
    """Remembers every client's kept state after each round, by (round, client)."""

    def __init__(self):
        self.states = {}

    def on_round_end(self, loop, row):
        for client in range(loop.num_clients):
            kept = loop.runner.pool.get(client) or {}
            self.states[row["round"], client] = {name: tensor.clone() for name, tensor in kept.items()}


@pytest.fixture
def watch():
    return WatchesStates()


def kept_masks(state):
    return {name: state[f"mask_{index}"] for index, name in enumerate(NAMES)}


def kept_weights(state):
    return {name: state[name] for name in NAMES}


def sent_masks(message):
    return {name: message.artifacts[name].mask for name in NAMES}


def count(masks):
    return [int(mask.sum()) for mask in masks.values()]


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def receive(loop, index, message=None):
    """The client with its kept state, after a receive."""
    client = loop.runner.load(index)
    client.receive(loop.exchange.inbox(index) if message is None else message, loop.data.clients[index])
    return client


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


# --- item 9 (i): as many active entries in every tensor, whatever happens --------------------------------------------


@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("density", [0.2, 0.5])
def test_dispfl_active_entries_of_every_tensor_never_change_in_number(conv_net, run_federation, watch, regrow, density):
    method = lambda: DisPFL(conv_net(), density, anneal_rounds=4, regrow=regrow)  # noqa: E731
    loop = run_federation(method, rounds=6, optimizer=momentum, callbacks=[watch])
    expected = erdos_renyi_kernel([p.shape for _, p in conv_net().named_parameters()], density)
    assert loop.runner.modules[0].method.masked_names == NAMES
    for key, message in loop.diary.sent.items():
        assert count(sent_masks(message)) == expected
        assert count(kept_masks(watch.states[key])) == expected
    assert (expected[1:4] == [3, 3, 3]) == (density == 0.5)  # dense ones among them


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_dispfl_masks_move_until_the_last_annealed_round_and_then_rest(conv_net, run_federation, watch, regrow):
    method = lambda: DisPFL(conv_net(), anneal_rounds=2, regrow=regrow)  # noqa: E731
    loop = run_federation(method, rounds=4, callbacks=[watch])
    for client in range(4):
        moved = []
        for round in (1, 2, 3, 4):
            before, after = sent_masks(loop.diary.sent[round, client]), kept_masks(watch.states[round, client])
            moved.append(sum(int((before[name] & ~after[name]).sum()) for name in NAMES))
        assert min(moved[:2]) > 0
        assert moved[2:] == [0, 0]


# --- item 9 (ii): mixing ----------------------------------------------------------------------------------------------


def masked(weights, mask):
    return MaskedWeights(
        torch.tensor([w for w, on in zip(weights, mask, strict=True) if on]), torch.tensor(mask).bool()
    )


def heard(sender, weights, mask, share=0.5):
    return Heard(sender, Message({}, {"w": masked(weights, mask)}, 1), share)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_dispfl_mixing_matches_hand_computed_value_whatever_the_shares(share):
    mixer = EqualMixer({"w": ActiveMean})
    own, other = heard(0, [2.0, 4.0, 0.0, 0.0], [1, 1, 0, 0], share), heard(1, [4.0, 0.0, 6.0, 0.0], [1, 0, 1, 0])
    for mixed in (mixer.mix(own, [other], None), mixer.mix(None, [other, own], None)):
        assert mixed.artifacts["w"].tolist() == [3.0, 4.0, 6.0, 0.0]
    assert not mixer.takes_shares


def test_dispfl_client_takes_the_mean_under_its_own_mask(on_a_parabola, make_client, make_data):
    """The head of four values of the same example: m_0 = s_0 gives [3, 4, 0, 0]."""
    method = on_a_parabola(DisPFL, 0, 1)()
    method.model.head.w = torch.nn.Parameter(torch.zeros(4))
    client = make_client(method)
    method.mask_0.copy_(torch.tensor([True, True, False, False]))
    method.has_masks.fill_(True)
    mean = torch.tensor([3.0, 4.0, 6.0, 0.0])
    client.receive(Message({}, {"model.head.w": mean}), make_data().clients[0])
    assert method.model.head.w.tolist() == [3.0, 4.0, 0.0, 0.0]


def test_dispfl_mean_does_not_depend_on_the_order_of_messages(assert_identical):
    generator = torch.Generator().manual_seed(0)
    values = [
        MaskedWeights.from_dense(torch.randn(40, generator=generator) * 10.0**k, torch.rand(40) < 0.6)
        for k in range(-3, 3)
    ]
    found = []
    for order in itertools.islice(itertools.permutations(values), 0, 720, 71):
        rule = ActiveMean()
        for value in order:
            rule.add(value, num_samples=3)
        found.append(rule.result(None))
    assert all(torch.equal(mean, found[0]) for mean in found)


def test_dispfl_round_is_the_masked_mean_of_its_neighbourhood(conv_net, run_federation):
    """A whole exchange on a ring of both sides, by hand; statistics are plain means, counters the largest."""
    method = lambda: DisPFL(conv_net(), density=0.3)  # noqa: E731
    loop = run_federation(method, rounds=2, exchange=Ring(directions="both"))
    client = receive(loop, 1)
    messages = [loop.diary.sent[2, neighbour] for neighbour in (0, 1, 2)]
    masks = client.method.masks
    hidden = 0
    for name in NAMES:
        total = torch.stack([m.artifacts[name].dense() for m in messages]).sum(0)
        active = torch.stack([m.artifacts[name].mask for m in messages]).sum(0)
        expected = torch.where((active > 0) & masks[name], total / active.clamp(min=1), 0.0)
        torch.testing.assert_close(client.entries[name], expected, rtol=1e-6, atol=1e-7)
        hidden += int(((active > 0) & ~masks[name]).sum())
    assert hidden > 0
    for name in messages[0].weights:
        found = torch.stack([m.weights[name] for m in messages])
        expected = found.mean(0) if found.is_floating_point() else found.amax(0)
        torch.testing.assert_close(client.entries[name], expected, rtol=1e-6, atol=1e-7)
    assert sorted(messages[0].weights) == [
        f"model.body.stages.0.1.{part}" for part in ("num_batches_tracked", "running_mean", "running_var")
    ]


# --- item 9 (iii), (iv): first masks, and how fast they move ----------------------------------------------------------


def test_dispfl_first_masks_are_drawn_by_client_and_not_by_when(mlp, run_federation, set_up_federation, watch):
    loop = run_federation(lambda: DisPFL(mlp(), anneal=0.0), rounds=1, callbacks=[watch])
    first = [watch.states[1, client]["mask_0"] for client in range(4)]
    for one, other in itertools.combinations(first, 2):
        assert not torch.equal(one, other)
    late = WatchesStates()
    options = {"rounds": 3, "newcomers": Newcomers(clients=1, after=2), "callbacks": [late]}
    run_federation(lambda: DisPFL(mlp(), anneal=0.0), **options)
    assert torch.equal(late.states[3, 3]["mask_0"], first[3])
    fresh = set_up_federation(lambda: DisPFL(mlp(), anneal=0.0))
    torch.manual_seed(99)  # evaluating a client that never took part runs outside the seeded streams
    assert torch.equal(receive(fresh, 3, Message()).method.mask_0, first[3])
    other = set_up_federation(lambda: DisPFL(mlp(), anneal=0.0), seed=1)
    assert not torch.equal(receive(other, 3, Message()).method.mask_0, first[3])
    assert loop.runner.pool.get(0)["has_masks"]


@pytest.mark.parametrize("init", ["common", "own"])
def test_dispfl_first_masks_may_be_the_same_for_all(mlp, run_federation, watch, init):
    method = lambda: DisPFL(mlp(), anneal=0.0, different_initial=False)  # noqa: E731
    run_federation(method, rounds=1, callbacks=[watch], init=init)
    first = watch.states[1, 0]["mask_0"]
    assert not first.all()
    assert all(torch.equal(watch.states[1, client]["mask_0"], first) for client in range(4))


def test_dispfl_clients_start_from_one_initialisation_under_their_own_masks(mlp, set_up_federation):
    loop = set_up_federation(lambda: DisPFL(mlp()))
    initial = {name: tensor.clone() for name, tensor in loop.runner.load(0).entries.items()}
    for client in range(4):
        own = receive(loop, client, Message())
        for name, mask in own.method.masks.items():
            assert torch.equal(own.entries[name], torch.where(mask, initial[name], 0.0))


def test_dispfl_replaced_share_matches_hand_computed_values():
    assert [replaced_share(t, 0.5, 500) for t in (0, 250, 500, 501)] == [0.5, 0.25, 0.0, 0.0]
    assert replaced_share(1, 0.8, 3) == pytest.approx(0.4 * 1.5)


def test_dispfl_first_round_replaces_a_half_of_what_is_active(mlp, run_federation, watch):
    """t = 0 in round 1: ⌈0.5 q⌉ entries are dropped, and at most as many places are new."""
    loop = run_federation(lambda: DisPFL(mlp(), anneal=0.5), rounds=1, callbacks=[watch])
    message = loop.diary.sent[1, 0]
    after = watch.states[1, 0]["mask_0"]
    before, weights = message.artifacts["model.body.stages.0.1.weight"].mask, message.artifacts
    values = weights["model.body.stages.0.1.weight"].dense().abs()
    kept = before & after
    largest = values[before].sort(descending=True).values[: math.floor(0.5 * int(before.sum()))]
    assert after[values >= largest[-1]].all()  # the larger half stays, whatever is regrown
    assert int(kept.sum()) < int(before.sum())


# --- item 9 (v): where it is averaging --------------------------------------------------------------------------------


def test_dispfl_dense_and_without_a_search_is_decentralised_averaging_bit_for_bit(
    conv_net, run_federation, assert_identical
):
    """All four hear each other, so that FedAvg's shares are equal, too: 1/4, which loses no bit."""
    options = {"rounds": 4, "optimizer": momentum}
    plain = run_federation(lambda: FedAvg(conv_net()), exchange=RandomPeers(), **options)
    loop = run_federation(lambda: DisPFL(conv_net(), density=1.0, anneal=0.0), **options)
    for client in range(4):
        own = loop.runner.pool.get(client)
        model = plain.runner.pool.get(client)
        assert set(model) == {name for name in own if name.startswith("model.")}
        assert_identical({name: own[name] for name in model}, model)
    apart = (*COLUMNS, "uplink_bytes", "downlink_bytes")  # the bitmap costs bytes
    for row, same in zip(loop.diary.rows, plain.diary.rows, strict=True):
        assert_identical(without(row, *apart), without(same, *apart))
        assert row["uplink_bytes"] > same["uplink_bytes"]
    assert_identical(loop.final, plain.final)


def test_dispfl_dense_and_without_a_search_counts_neighbours_alike(mlp, run_federation):
    """Shares of a third are rounded in FedAvg's mean, a sum over three is not: equal up to float32's last bits."""
    options = {"rounds": 3, "exchange": RandomPeers(degree=2)}
    plain = run_federation(lambda: FedAvg(mlp()), **options)
    loop = run_federation(lambda: DisPFL(mlp(), density=1.0, anneal=0.0), **options)
    for client in range(4):
        own = loop.runner.pool.get(client)
        for name, tensor in plain.runner.pool.get(client).items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-6)


# --- training under a mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_dispfl_pruned_weights_are_zero_after_training_with_momentum(conv_net, run_federation, watch, precision):
    loop = run_federation(
        lambda: DisPFL(conv_net(), density=0.3),
        rounds=3,
        optimizer=momentum,
        local_epochs=2,
        callbacks=[watch],
        trainer={"precision": precision},
    )
    for key, message in loop.diary.sent.items():
        trained, own = sent_masks(message), kept_weights(watch.states[key])
        for name in NAMES:
            assert not own[name][~trained[name]].any()
            assert torch.equal(own[name], message.artifacts[name].dense())
            assert own[name].isfinite().all()


@pytest.mark.parametrize(
    "trainer", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 10.0}], ids=["accumulation", "clipping"]
)
def test_dispfl_pruned_weights_are_zero_after_every_step(conv_net, set_up_federation, trainer):
    """With momentum, a step alone would move what is pruned; every optimizer step is looked at."""
    seen = []

    class Watched(DisPFL):
        def local_step(self, step):
            super().local_step(step)
            masks = self.masks
            seen.append(max(float(p.detach()[~masks[name]].abs().sum()) for name, p in self.masked.items()))

    loop = set_up_federation(lambda: Watched(conv_net(), 0.3), rounds=2, optimizer=momentum, trainer=trainer)
    loop.run()
    assert len(seen) > 20
    assert seen == [0.0] * len(seen)


def test_dispfl_keeps_what_it_trained_until_the_next_exchange(conv_net, run_federation, watch):
    """The kept w_i has the support s_i; m_i is beside it, and where it is new there is no weight yet."""
    method = lambda: DisPFL(conv_net(), density=0.3)  # noqa: E731
    loop = run_federation(method, rounds=2, callbacks=[watch])
    dropped = grown = 0
    for client in range(4):
        state, trained = watch.states[2, client], sent_masks(loop.diary.sent[2, client])
        for name in NAMES:
            own, mask = state[name], kept_masks(state)[name]
            dropped += int(own[trained[name] & ~mask].count_nonzero())
            grown += int((mask & ~trained[name]).sum())
            assert not own[mask & ~trained[name]].any()
    assert dropped > 0
    assert grown > 0


def test_dispfl_local_t_is_that_of_the_weights_as_trained(conv_net, run_federation):
    """Local-T is not that of w_i under the new mask m_i."""
    loop = run_federation(lambda: DisPFL(conv_net(), density=0.5), rounds=2, local_epochs=3)
    scores = [loop.runner.evaluator.client(loop.runner.load(client), client, "trained") for client in range(4)]
    mean = sum(own["Local-T"] for own in scores) / 4
    assert loop.diary.rows[-1]["Local-T"] == pytest.approx(mean)


# --- the search for masks ---------------------------------------------------------------------------------------------


def test_dispfl_regrows_where_the_dense_gradient_is_largest(mlp, make_data, set_up_federation):
    """One batch of all samples, so that the gradient can be taken by hand, at w without a mask on the gradient."""
    data = make_data(batch_size=100)
    loop = set_up_federation(lambda: DisPFL(mlp(), density=0.3), data=data)
    client = receive(loop, 0, Message())
    method = client.method
    method.facts = replace(method.facts, round=1)
    before = {name: mask.clone() for name, mask in method.masks.items()}
    x, y = data.store.gather(data.clients[0].train)
    loss = F.cross_entropy(method.model(x), y)
    gradients = dict(zip(method.masked, torch.autograd.grad(loss, list(method.masked.values())), strict=True))
    client.send(data.clients[0])
    grown = 0
    for name, mask in method.masks.items():
        new, size = mask & ~before[name], gradients[name].abs()
        if new.any():
            assert size[new].min() >= size[~mask].max() * (1 - 1e-4)
            grown += int(new.sum())
    assert grown > 20


def test_dispfl_search_leaves_no_trace_but_masks(conv_net, run_federation, unchanged):
    """Not in batch norm's statistics, not in modes, gradients or what is trainable."""
    loop = run_federation(lambda: DisPFL(conv_net(), anneal_rounds=500), rounds=1)
    client = receive(loop, 0)
    client.train()
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    client.send(loop.data.clients[0])
    changed = {name for name, tensor in client.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("method.mask_") for name in changed)
    assert all(part.training for part in client.modules())
    assert all(p.requires_grad and p.grad is None for p in client.parameters())
    client.method.anneal = 0.0
    with unchanged(client):  # nothing is drawn, either
        client.send(loop.data.clients[0])


def test_dispfl_random_search_needs_no_gradient(conv_net, run_federation, count_passes):
    loop = run_federation(lambda: DisPFL(conv_net(), anneal_rounds=500, regrow="random"), rounds=1)
    client = receive(loop, 0)
    passes = count_passes(client.method.model.head)
    before = client.method.mask_4.clone()
    client.send(loop.data.clients[0])
    assert passes.forward == 0
    assert not torch.equal(client.method.mask_4, before)


@pytest.mark.parametrize(("anneal_rounds", "rates"), [(3, [0.4, 0.3]), (None, [0.4, 0.3, 0.1])], ids=["3", "all"])
def test_dispfl_replaces_the_annealed_share_of_every_tensor_rounded_up(
    conv_net, run_federation, monkeypatch, anneal_rounds, rates
):
    """r_0 = 0.4, r_1 = 0.3 and r_2 = 0.1 at T = 3 of what is active, for each of four clients; null is all rounds."""
    seen = []

    def spy(mask, weights, promise, count):
        seen.append((int(mask.sum()), count))
        return regrown_mask(mask, weights, promise, count)

    monkeypatch.setattr(dispfl, "regrown_mask", spy)
    method = lambda: DisPFL(conv_net(), density=0.3, anneal=0.4, anneal_rounds=anneal_rounds)  # noqa: E731
    run_federation(method, rounds=len(rates))
    of_calls = [rate for rate in rates for _ in range(4 * len(NAMES))]
    expected = [math.ceil(round(rate * active, 6)) for rate, (active, _) in zip(of_calls, seen, strict=True)]
    assert [count for _, count in seen] == expected
    assert any(0.4 * active % 1 for active, _ in seen)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_dispfl_message_counts_active_weights_and_statistics(conv_net, run_federation):
    loop = run_federation(lambda: DisPFL(conv_net(), density=0.3), rounds=2, optimizer=momentum)
    entries = sum(p.numel() for p in conv_net().parameters())
    for message in loop.diary.sent.values():
        active = count(sent_masks(message))
        assert [message.artifacts[name].values.numel() for name in NAMES] == active
        assert message.num_params == sum(active) + (3 + 3 + 1)
        bitmaps = sum(-(-message.artifacts[name].mask.numel() // 8) for name in NAMES)
        assert message.num_bytes == 4 * sum(active) + (3 + 3) * 4 + 8 + bitmaps
        assert set(message.artifacts) == set(NAMES)
        assert 0.3 * entries - len(NAMES) < sum(active) <= 0.3 * entries


def test_dispfl_active_weights_are_a_client_s_own_and_travel(conv_net, run_federation):
    loop = run_federation(lambda: DisPFL(conv_net(), density=0.3), rounds=2, optimizer=momentum)
    active = sum(sum(count(sent_masks(message))) for message in loop.diary.sent.values()) / len(loop.diary.sent)
    assert num_parameters(loop.runner) == {"personal": active, "shared": active}


def test_dispfl_message_of_a_resnet18_is_half_of_the_model(make_client, make_data):
    """DRDFL's 106.65 is half of all entries, batch norm's 9,620 among them, which we send whole: 106.75."""
    torch.manual_seed(0)
    client = make_client(DisPFL(ResNet18((3, 32, 32), 10), density=0.5, anneal=0.0))
    data = make_data(shape=(3, 32, 32)).clients[0]
    client.receive(Message(), data)
    message = client.send(data)
    statistics = sum(tensor.numel() for tensor in message.weights.values())
    active = message.num_params - statistics
    assert statistics == 9620
    assert 11_173_962 / 2 - 62 < active <= 11_173_962 / 2
    assert f"{20 * (active + statistics / 2) / 2**20:.2f}" == "106.65"
    assert f"{20 * message.num_params / 2**20:.2f}" == "106.75"
    assert message.num_bytes == pytest.approx(4 * active + 11_173_962 / 8 + 4 * statistics + 20 * 4, abs=62)


# --- who is there, and who is not -------------------------------------------------------------------------------------


def test_dispfl_client_that_fails_keeps_its_state_and_the_others_go_round_it(
    conv_net, run_federation, watch, assert_identical
):
    method = lambda: DisPFL(conv_net(), anneal_rounds=4)  # noqa: E731
    loop = run_federation(method, rounds=4, failures=Failures(schedule={"2-3": [1]}), callbacks=[watch])
    assert [row["missing"] for row in loop.diary.rows] == [0, 1, 1, 0]
    for round in (2, 3):
        assert_identical(watch.states[round, 1], watch.states[1, 1])
        assert not any(1 in (hop.sender, hop.receiver) for hop in loop.diary.hops[round])
    assert_identical(loop.diary.received[4, 1].state_dict(), loop.diary.received[2, 0].state_dict())
    for state in (watch.states[4, client] for client in range(4)):
        assert all(tensor.isfinite().all() for tensor in state.values())
    trained, kept = sent_masks(loop.diary.sent[4, 1]), kept_masks(watch.states[3, 1])
    assert_identical(trained, kept)  # it went on under the mask that it had found


def test_dispfl_client_without_a_neighbour_goes_on_with_its_own(conv_net, run_federation, assert_identical, watch):
    """What was regrown gets 0: nobody has it, the client neither."""
    method = lambda: DisPFL(conv_net(), density=0.3)  # noqa: E731
    loop = run_federation(method, rounds=1, failures=Failures(clients=[0, 1, 2]), callbacks=[watch])
    state = watch.states[1, 3]
    client = receive(loop, 3)
    for name, mask in kept_masks(state).items():
        assert torch.equal(client.entries[name], torch.where(mask, state[name], 0.0))
        assert torch.equal(client.method.masks[name], mask)
    assert loop.exchange.downlink(3).num_params == 0


def test_dispfl_newcomer_takes_its_sponsors_mean_under_its_own_mask(mlp, run_federation):
    options = {"rounds": 3, "newcomers": Newcomers(clients=1, after=2)}
    loop = run_federation(lambda: DisPFL(mlp(), density=0.3), **options)
    message = loop.diary.received[3, 3]
    for name, value in message.artifacts.items():
        sent = [loop.diary.sent[2, sponsor].artifacts[name] for sponsor in (0, 1, 2)]
        active = torch.stack([own.mask for own in sent]).sum(0)
        expected = torch.stack([own.dense() for own in sent]).sum(0) / active.clamp(min=1)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    assert "Local-T_newcomers" in loop.diary.rows[-1]


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_dispfl_resumes_exactly_under_failures(
    conv_net, run_federation, set_up_federation, outcome, assert_identical, tmp_path, regrow
):
    method = lambda: DisPFL(conv_net(), regrow=regrow)  # noqa: E731
    options = {"rounds": 5, "optimizer": momentum, "failures": Failures(probability=0.4)}
    options |= {"exchange": RandomPeers(degree=2)}
    straight = run_federation(method, **options)
    assert sum(row["missing"] for row in straight.diary.rows) > 0
    first = set_up_federation(method, folder=tmp_path, **options)
    for _ in range(3):  # killed in the third round, after the second was saved
        first.advance()
    second = set_up_federation(method, folder=tmp_path, **options)
    second.load_state_dict(second.checkpoints.load(tmp_path / "checkpoints" / "round-0002.ckpt"))
    second.final = second.run()
    second.diary.rows = first.diary.rows[:2] + second.diary.rows
    assert_identical(outcome(second), outcome(straight))
    assert_identical(second.final, straight.final)


@pytest.mark.parametrize(
    "exchange",
    [Ring(), Ring("sequential"), DirectedGraph(degree=2), DirectedGraph(degree=2, mixing="uniform")],
    ids=["ring", "in turn", "directed", "the authors'"],
)
def test_dispfl_runs_on_any_graph_and_needs_no_push_sum(conv_net, run_federation, exchange):
    loop = run_federation(lambda: DisPFL(conv_net(), density=0.3), exchange=exchange)
    for message in (*loop.diary.received.values(), *loop.diary.sent.values()):
        assert set(message.artifacts) <= set(NAMES)
    params = loop.diary.sent[3, 0].num_params
    assert {hop.num_params for hops in loop.diary.hops.values() for hop in hops} == {params}
    assert all(t.isfinite().all() for c in range(4) for t in loop.runner.pool.get(c).values())


def test_dispfl_runs_around_a_server_too(conv_net, run_federation, assert_identical):
    """All participants are neighbours, so it is the full graph: the same bits."""
    method = lambda: DisPFL(conv_net(), density=0.3)  # noqa: E731
    star, graph = run_federation(method, exchange=Star()), run_federation(method)
    for client in range(4):
        assert_identical(star.diary.sent[3, client].state_dict(), graph.diary.sent[3, client].state_dict())
    assert star.diary.rows[-1]["Local-T"] == graph.diary.rows[-1]["Local-T"]
    assert star.diary.rows[-1]["Server-T"] is None


# --- with other parts -------------------------------------------------------------------------------------------------


def test_dispfl_terms_come_along_and_are_not_masked(conv_net, run_federation):
    terms = lambda: [Proximal(0.1), PrototypeAlignment(0.5)]  # noqa: E731
    loop = run_federation(lambda: DisPFL(conv_net(), extra_terms=terms()), rounds=3)
    message = loop.diary.sent[3, 0]
    assert set(message.artifacts) == {*NAMES, "prototypes"}
    assert loop.diary.rows[-1]["loss/proximal"] > 0
    assert loop.diary.rows[-1]["loss/prototype_alignment"] > 0
    assert loop.runner.modules[0].method.masked_names == NAMES
    received = loop.exchange.inbox(0).artifacts["prototypes"]
    assert received.valid.all()


def test_dispfl_terms_hold_and_compare_what_travels_masked(mlp, set_up_federation):
    """Masked parameters are no entries of a message, but they come in with it: under the mask, as the client starts."""
    terms = lambda: [Proximal(0.1), ModelContrast()]  # noqa: E731
    loop = set_up_federation(lambda: DisPFL(mlp(), density=0.3, extra_terms=terms()))
    client = receive(loop, 0, Message())
    proximal = client.method.terms.extra[0]
    assert proximal.names == client.method.masked_names
    assert proximal(client.method, None).item() == 0
    for name, mask in client.method.masks.items():
        assert not proximal.get_buffer(f"anchor_{proximal.names.index(name)}")[~mask].any()


@pytest.mark.parametrize("options", [{"history": "all"}, {"missing": "one_hot"}], ids=str)
def test_dispfl_refuses_terms_that_need_a_server_that_remembers(mlp, set_up_federation, options):
    with pytest.raises(ConfigError, match=r"federation\.exchange: DisPFL cannot do without its server"):
        set_up_federation(lambda: DisPFL(mlp(), extra_terms=[ClassRelation(soft_labels=SoftLabels(**options))]))


def test_dispfl_takes_terms_whose_momentum_everybody_can_keep(mlp, run_federation):
    """Of what a client was given last, not of what a server knows."""
    loop = run_federation(
        lambda: DisPFL(mlp(), extra_terms=[ClassRelation(soft_labels=SoftLabels(momentum=0.9))]), rounds=3
    )
    assert loop.exchange.inbox(0).artifacts["soft_labels"].valid.all()


def test_dispfl_parameters_that_come_frozen_have_no_mask_and_stay(conv_net, run_federation):
    def method():
        model = conv_net()
        model.head.bias.requires_grad_(False)
        return DisPFL(model, density=0.3)

    loop = run_federation(method, rounds=2)
    assert loop.runner.modules[0].method.masked_names == NAMES[:-1]
    assert "model.head.bias" not in {**loop.diary.sent[1, 0].weights, **loop.diary.sent[1, 0].artifacts}


def test_dispfl_refuses_models_of_different_shapes(mlp, set_up_federation):
    models = lambda index: DisPFL(mlp(hidden=((8, 5), (9, 5))[index]))  # noqa: E731
    with pytest.raises(ConfigError, match=r"model: DisPFL exchanges 'model\.body\.stages\.0\.1\.weight'"):
        set_up_federation(models, architecture=[0, 1, 0, 1])


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"density": 0.0}, r"method\.density: must be in \(0, 1\], got 0\.0"),
        ({"density": 1.1}, r"method\.density: must be in \(0, 1\], got 1\.1"),
        ({"anneal": -0.1}, r"method\.anneal: must be in \[0, 1\] \(0 keeps the first masks\), got -0\.1"),
        ({"anneal": 1.5}, r"method\.anneal: must be in \[0, 1\]"),
        ({"anneal_rounds": 0}, r"method\.anneal_rounds: must be >= 1 or null, got 0"),
        ({"regrow": "magnitude"}, r"method\.regrow: must be one of gradient, random, got 'magnitude'"),
    ],
    ids=str,
)
def test_dispfl_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        DisPFL(mlp(), **option)
