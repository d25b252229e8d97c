"""The tests and invariants that the specification of DRDFL promises (DRDFL.md, sections 3 to 8)."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sections import sectioned
from tiny_optimizers import adam

from fl_lightning.building import build
from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Seen, headline
from fl_lightning.core.step import Step
from fl_lightning.core.term import Term
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import Newcomers
from fl_lightning.losses.gaussian_mixture import GaussianMixture, gaussian_mixture_loss
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods import drdfl
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.models.mlp import MLP
from fl_lightning.models.resnet import ResNet18
from fl_lightning.schema import options
from fl_lightning.seeding import derive_seed, seed_global_streams

pytestmark = pytest.mark.usefixtures("plain_convolutions")

SMALL = {"personal_size": 6, "shared_size": 4}
FOUNDER = Facts(num_clients=3, rounds=4, newcomers=1, client=0, round=2)
NEWCOMER = replace(FOUNDER, client=2)
OWN = ("personanet", "terms", "adversary", "learngene", "decoder", "model")
SEQUENTIAL = {
    "literal": ["personanet", "terms", "adversary", "learngene", "decoder", "model"],
    "elbo": ["personanet", "terms", "adversary", "learngene", "decoder", "learngene", "personanet", "model"],
    "full": ["personanet", "terms", "adversary", "learngene", "decoder", "learngene", "personanet", "model"],
}


class Recorder:
    """Makes Adam optimizers that remember every step: the gradients, by the parameters' ids."""

    def __init__(self, lr=1e-3):
        self.steps, self.lr = [], lr

    def __call__(self, parameters):
        steps = self.steps

        class Remembering(torch.optim.Adam):
            def step(self, closure=None):
                own = [p for group in self.param_groups for p in group["params"]]
                steps.append({id(p): p.grad.clone() for p in own if p.grad is not None})
                return super().step(closure)

        return Remembering(parameters, lr=self.lr)

    def named(self, module):
        """The steps of its fits in order: (part, gradients by name); optimizers are tried on a copy before."""
        names = {id(p): name for name, p in module.method.named_parameters()}
        fits = [step for step in self.steps if step.keys() <= names.keys()]
        steps = [{names[key]: gradient for key, gradient in step.items()} for step in fits]
        return [(next(iter(step), "").partition(".")[0], step) for step in steps]


@pytest.fixture
def small(mlp):
    """DRDFL on 1x8x8 images with few latents."""
    return lambda **given: DRDFL(mlp(), **sectioned(DRDFL, **{**SMALL, **given}))


@pytest.fixture
def small_client(small):
    """A client of it outside a federation, as the first of two founders in the second round."""

    def make(facts=FOUNDER, **given):
        method = small(**given)
        method.facts = facts
        return ClientModule(method)

    return make


@pytest.fixture
def one_batch(make_data):
    """One client whose training part is one batch; it holds classes 0, 1 and 3 of four."""
    return lambda: make_data(counts=((8, 8, 0, 4),), batch_size=64)


@pytest.fixture
def pair(make_data):
    """Two clients of two batches each; class 3 is nowhere."""
    return lambda: make_data(counts=((8, 4, 0, 0), (0, 4, 8, 0)), batch_size=8)


@pytest.fixture
def steps_of(small, one_batch, run_federation):
    """The steps of one batch: a list of (part, gradients by name)."""

    def run(**options):
        recorder = Recorder()
        loop = run_federation(lambda: small(**options), rounds=1, data=one_batch(), optimizer=recorder)
        return recorder.named(loop.runner.modules[0])

    return run


def client_data(shape, num_classes):
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0))
    store = TensorStore(Arrays(x, torch.tensor([0, 1, 0, 1, 1, 0]), 6, tuple(map(str, range(num_classes)))))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(0, store, num_classes, np.arange(6), nothing, nothing)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def part_of(state, part):
    return {name: tensor for name, tensor in state.items() if name.startswith(part + ".")}


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "classes", "size"), [((3, 32, 32), 10, 30_520), ((3, 32, 32), 100, 42_040), ((1, 28, 28), 10, 30_088)]
)
def test_drdfl_message_has_the_specified_size(shape, classes, size):
    client = ClientModule(DRDFL(MLP(shape, classes, (8,))))
    message = client.send(client_data(shape, classes))
    assert (message.num_params, message.num_bytes) == (size, 4 * size)
    if (shape[0], classes) == (3, 10):
        assert round(20 * size / 2**20, 4) == 0.5821


def test_drdfl_message_holds_the_learngene_and_the_class_statistics_and_nothing_else(small_client):
    client = small_client()
    message = client.send(client_data((1, 8, 8), 4))
    assert set(message.weights) == {f"learngene.{name}" for name in client.method.learngene.state_dict()}
    assert {name: tuple(t.shape) for name, t in message.artifacts.items()} == {
        "class_mean": (4, 6),
        "class_log_variance": (4, 6),
    }
    assert set(client.method.interface()) == {*message.weights, *message.artifacts}


@pytest.mark.parametrize(("weight", "shared"), [(1.0, 30_520), (0.0, 29_240)])
def test_drdfl_counts_the_gaussians_where_they_travel(weight, shared):
    """Of a ResNet-18 client the message's 30,520 values are shared, and all else is personal."""
    weights = drdfl.Weights(mixture_weight=weight)
    client = ClientModule(DRDFL(ResNet18((3, 32, 32), 10, stem="imagenet"), weights))
    trained = sum(p.numel() for p in client.parameters())
    assert client.method.parameter_counts() == (trained - shared, shared)
    assert client.send(client_data((3, 32, 32), 10)).num_params == shared


def test_drdfl_keeps_its_parts_private(small_client):
    kept = {name.partition(".")[0] for name in small_client().division.kept}
    assert kept == {"model", "personanet", "learngene", "decoder", "adversary", "terms", "finished_fits"}


def test_drdfl_averages_with_its_own_learngene_at_a_server_too(small, set_up_federation, assert_identical):
    """In whatever order clients train: the one that trained before in the resident module is not the client itself."""
    loops = []
    for order in (list, lambda clients: clients[::-1]):
        loop = set_up_federation(small, rounds=3, optimizer=adam, exchange=Star())
        loop.fit_order = order
        loop.run()
        loops.append(loop)
    for sent in zip(*(sorted(loop.diary.sent.items()) for loop in loops), strict=True):
        assert_identical(*(message.state_dict() for _, message in sent))


def test_drdfl_travels_around_a_ring_unless_told_otherwise(small, pair, run_federation):
    loop = run_federation(small, rounds=2, data=pair(), optimizer=adam)
    assert isinstance(loop.exchange, Ring)
    assert [row["downlink_params"] for row in loop.diary.rows] == [0, loop.diary.rows[0]["uplink_params"]]
    for client in range(2):
        assert same(loop.diary.received[2, client].weights, loop.diary.sent[1, 1 - client].weights)
    star = run_federation(small, rounds=2, data=pair(), optimizer=adam, exchange=Star())
    assert star.done
    assert all(row["Server-T"] is None for row in star.diary.rows)


# --- receiving --------------------------------------------------------------------------------------------------------


def received(client, data, value=0.25):
    """Let `client` receive a message of one value everywhere."""
    message = client.send(data)
    weights = {name: torch.full_like(tensor, value) for name, tensor in message.weights.items()}
    artifacts = {name: torch.full_like(tensor, value) for name, tensor in message.artifacts.items()}
    client.receive(Message(weights, artifacts, 1), data)
    return client


def test_drdfl_client_averages_the_learngene_and_moves_the_statistics(small_client):
    data = client_data((1, 8, 8), 4)
    client = small_client(NEWCOMER)
    client.method.finished_fits += 1
    client.method.mixture[0].after_fit(client.method)
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    after = received(client, data).entries
    for name, tensor in after.items():
        if name.startswith("learngene."):
            torch.testing.assert_close(tensor, (before[name] + 0.25) / 2)
        elif name.endswith("class_mean"):
            torch.testing.assert_close(tensor, 0.99 * before[name] + 0.01 * 0.25)
        elif name.endswith("class_log_variance"):
            torch.testing.assert_close(tensor.exp(), torch.full_like(tensor, 0.99 + 0.01 * math.exp(0.25)))
        elif not name.endswith("class_count"):
            assert torch.equal(tensor, before[name])


def test_drdfl_newcomer_that_never_took_part_copies(small_client):
    entries = received(small_client(NEWCOMER), client_data((1, 8, 8), 4)).entries
    copied = [t for name, t in entries.items() if name.startswith("learngene.") or ".class_mean" in name]
    assert all((tensor == 0.25).all() for tensor in copied)


@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.parametrize("when", ["round", "step"])
def test_drdfl_founder_averages_what_it_hears_before_its_first_fit(small_client, when, round):
    """As in a ring in turn, or where it is first drawn in the second round: line 7 has no exception."""
    data = client_data((1, 8, 8), 4)
    for mixture in (1.0, 0.0):
        client = small_client(replace(FOUNDER, round=round), ema_when=when, mixture_weight=mixture)
        before = {name: tensor.clone() for name, tensor in client.entries.items()}
        for name, tensor in received(client, data).entries.items():
            if name.startswith("learngene."):
                torch.testing.assert_close(tensor, (before[name] + 0.25) / 2)
            elif name.endswith("class_mean"):
                expected = 0.99 * before[name] + 0.01 * 0.25 if when == "round" else before[name]
                torch.testing.assert_close(tensor, expected)
            elif name.endswith("finished_fits"):
                assert tensor == 0


@pytest.mark.parametrize("facts", [FOUNDER, NEWCOMER], ids=["founder", "newcomer"])
def test_drdfl_empty_message_changes_nothing(small_client, facts):
    data = client_data((1, 8, 8), 4)
    client = small_client(facts)
    client.receive(Message(), data)
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    for fits in (0, 1):
        client.method.finished_fits.fill_(fits)
        client.method.mixture[0].finished_fits.fill_(fits)
        before["finished_fits"] = before["terms.1.finished_fits"] = torch.tensor(fits)
        client.receive(Message(), data)
        assert same(dict(client.entries), before)


@pytest.mark.parametrize("facts", [FOUNDER, NEWCOMER], ids=["founder", "newcomer"])
def test_drdfl_message_of_another_shape_is_refused(small_client, facts):
    data = client_data((1, 8, 8), 4)
    message = small_client(shared_size=5).send(data)
    for fits in (0, 1):
        client = small_client(facts)
        client.method.finished_fits.fill_(fits)
        with pytest.raises(ValueError, match=r"received 'learngene\.mean\.weight' of shape"):
            client.receive(message, data)


def test_drdfl_counts_finished_fits(small, run_federation):
    loop = run_federation(small, rounds=3, participation=0.5, optimizer=adam)
    for client in range(4):
        took_part = sum(client in loop.calendar.participants(round) for round in (1, 2, 3))
        state = loop.runner.pool.get(client) or {"finished_fits": torch.tensor(0)}
        assert state["finished_fits"].item() == took_part
        assert state.get("terms.1.finished_fits", torch.tensor(0)).item() == took_part


def test_drdfl_founder_first_drawn_in_a_later_round_averages(small, set_up_federation):
    """The mean of its own initial Learngene and what waits for it, under participation < 1 (Algorithm 1, line 7)."""
    loop = set_up_federation(small, rounds=6, participation=0.5, optimizer=adam)
    drawn = [set(loop.calendar.participants(round)) for round in range(1, 7)]
    late = next(r for r in range(2, 7) if drawn[r - 1] - set().union(*drawn[: r - 1]))
    client = min(drawn[late - 1] - set().union(*drawn[: late - 1]))
    initial = {name: tensor.clone() for name, tensor in loop.runner.load(client).entries.items()}
    for _ in range(late - 1):
        loop.advance()
    waiting = loop.exchange.inbox(client)
    assert waiting.weights
    module = loop.runner.load(client)
    module.method.facts = replace(loop.runner.facts, round=late, client=client)
    module.receive(waiting, loop.data.clients[client])
    for name, tensor in waiting.weights.items():
        torch.testing.assert_close(module.entries[name], (initial[name] + tensor) / 2)
    mean = module.entries["terms.1.class_mean"]
    torch.testing.assert_close(
        mean, torch.lerp(initial["terms.1.class_mean"], waiting.artifacts["class_mean"], 1 - 0.99)
    )


def test_drdfl_newcomer_copies_what_waits_for_it(small, set_up_federation):
    newcomers = Newcomers(clients=1, after=2)
    loop = set_up_federation(small, rounds=3, newcomers=newcomers, optimizer=adam)
    loop.advance()
    loop.advance()
    waiting, module = loop.exchange.inbox(3), loop.runner.load(3)
    module.method.facts = replace(loop.runner.facts, round=3, client=3)
    module.receive(waiting, loop.data.clients[3])
    assert same({name: module.entries[name] for name in waiting.weights}, dict(waiting.weights))
    assert torch.equal(module.entries["terms.1.class_mean"], waiting.artifacts["class_mean"])


def test_drdfl_first_gaussians_are_drawn_from_the_runs_seed(small, set_up_federation):
    """The same for all clients of a run and for every run of that seed, others under another seed."""
    first = [set_up_federation(small, optimizer=adam, init="own", seed=seed) for seed in (0, 0, 1)]
    means = [[loop.runner.load(c).entries["terms.1.class_mean"].clone() for c in (0, 3)] for loop in first]
    assert all(torch.equal(*of_run) for of_run in means)
    assert torch.equal(means[0][0], means[1][0])
    assert not torch.equal(means[0][0], means[2][0])


def test_drdfl_parallel_averaging_keeps_the_sum_of_learngenes(small, run_federation):
    loop = run_federation(small, rounds=1, optimizer=adam)
    sent = [loop.diary.sent[1, client].weights for client in range(4)]
    merged = []
    for client in range(4):
        module = loop.runner.load(client)
        module.receive(loop.exchange.inbox(client), loop.data.clients[client])
        merged.append({name: module.entries[name].clone() for name in sent[0]})
    assert not same(merged[0], sent[0])
    for name in sent[0]:
        torch.testing.assert_close(sum(m[name] for m in merged), sum(s[name] for s in sent))


def test_drdfl_counts_all_neighbours_alike(small, make_data, run_federation):
    """Of several neighbours, however many samples they have, learngenes and Gaussians count the same."""
    data = make_data(counts=((9, 8, 7, 5), (20, 20, 20, 20), (4, 2, 3, 2)))
    loop = run_federation(small, rounds=2, data=data, optimizer=adam, exchange=Ring(directions="both"))
    one, other = (loop.diary.sent[1, client] for client in (1, 2))
    heard = loop.diary.received[2, 0]
    assert one.num_samples > 5 * other.num_samples
    for name, received in heard.weights.items():
        torch.testing.assert_close(received, (one.weights[name] + other.weights[name]) / 2)
    means = [message.artifacts["class_mean"] for message in (heard, one, other)]
    torch.testing.assert_close(means[0], (means[1] + means[2]) / 2)
    logs = [message.artifacts["class_log_variance"] for message in (heard, one, other)]
    torch.testing.assert_close(logs[0], ((logs[1].exp() + logs[2].exp()) / 2).log())


def test_drdfl_class_absent_everywhere_keeps_its_first_gaussian(small, make_data, run_federation):
    data = make_data(counts=((9, 8, 0, 0), (0, 9, 0, 8)))
    loop = run_federation(small, rounds=3, data=data, optimizer=adam)
    first = ClientModule(small()).method.mixture[0].class_mean
    for message in loop.diary.sent.values():
        assert torch.equal(message.artifacts["class_mean"][2], first[2])
        assert not message.artifacts["class_log_variance"][2].any()
    assert not torch.equal(message.artifacts["class_mean"][1], first[1])


def test_drdfl_class_absent_at_a_client_moves_by_the_average_alone(small, make_data, run_federation):
    data = make_data(counts=((9, 8, 0, 0), (0, 0, 9, 8)))
    loop = run_federation(small, rounds=2, data=data, optimizer=adam)
    one, other = (loop.diary.sent[1, client].artifacts["class_mean"][2] for client in (0, 1))
    moved = loop.diary.sent[2, 0].artifacts["class_mean"][2]
    assert not torch.equal(one, other)
    assert torch.equal(moved, torch.lerp(one, other, 1 - 0.99))


# --- the local fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_flow", ["literal", "elbo", "full"])
def test_drdfl_steps_in_the_order_of_the_algorithm(steps_of, grad_flow):
    steps = steps_of(grad_flow=grad_flow)
    assert [part for part, _ in steps] == SEQUENTIAL[grad_flow]
    assert all(gradient.isfinite().all() for _, gradients in steps for gradient in gradients.values())


@pytest.mark.parametrize("grad_flow", ["literal", "elbo", "full"])
def test_drdfl_joint_order_takes_one_step_a_part(steps_of, grad_flow):
    assert [part for part, _ in steps_of(grad_flow=grad_flow, update_order="joint")] == list(OWN)


def test_drdfl_steps_give_nothing_else_a_gradient(steps_of):
    """Each step holds its own part's parameters, all of them: what is left of one step does not enter the next."""
    for part, gradients in steps_of():
        assert {name.partition(".")[0] for name in gradients} == {part}


def test_drdfl_knows_its_classes_before_it_sees_them(small, pair, run_federation):
    """The counts are those of the training part, not of the batches seen so far."""
    loop = run_federation(small, rounds=2, data=pair(), optimizer=adam)
    for client in loop.data.clients:
        assert torch.equal(loop.runner.pool.get(client.client)["terms.1.class_count"], client.class_counts)
        module = loop.runner.load(client.client)
        module.receive(Message(), client)
        assert torch.equal(module.method.held, client.held_classes)


@pytest.mark.parametrize("sequential", [True, False])
def test_drdfl_step_of_a_batch_matches_the_algorithm_written_out(
    small, one_batch, set_up_federation, sequential, assert_identical
):
    order = "sequential" if sequential else "joint"
    loop = set_up_federation(
        lambda: small(update_order=order), rounds=1, data=one_batch(), optimizer=adam, channels_last=False
    )
    client = copy.deepcopy(loop.runner.modules[0].method)
    entries = client.state_dict()
    loop.run()
    x, y = loop.data.clients[0].bundles(derive_seed(0, "shuffle/0", 1, 0), 64)[0][:2]
    (by_hand_sequential if sequential else by_hand_joint)(client, x, y)
    parts = ("personanet.", "learngene.", "decoder.", "adversary.", "model.", "terms.1.class_mean", "terms.1.class_log")
    own = loop.runner.pool.get(0)
    for name in own:
        if name.startswith(parts):
            torch.testing.assert_close(entries[name], own[name], rtol=1e-5, atol=1e-7)


def draw(client, x):
    mean, log_variance = client.learngene(x)
    return mean, log_variance, mean + (0.5 * log_variance).exp() * torch.randn(mean.shape)


def mixture_by_hand(client, x, y):
    """Class 2 is not there: its rows are constants, and Adam leaves a row without gradient alone."""
    term = client.mixture[0]
    held = torch.tensor([True, True, False, True])[:, None]
    rows = [torch.where(held, p, p.detach()) for p in (term.class_mean, term.class_log_variance)]
    return sum(gaussian_mixture_loss(client.personanet(x), y, *rows))


def kl_by_hand(mean, log_variance):
    return 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()


def by_hand_sequential(client, x, y):
    seed_global_streams(0, "fit", 1, 0)
    client.train()
    statistics = [client.mixture[0].class_mean, client.mixture[0].class_log_variance]
    psi, psi_rec = adam([*client.personanet.parameters(), *statistics]), adam(client.personanet.parameters())
    phi, theta = adam(client.learngene.parameters()), adam(client.decoder.parameters())
    omega, reader = adam(client.model.parameters()), adam(client.adversary.parameters())

    def descend(loss, *optimizers):
        client.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    descend(mixture_by_hand(client, x, y), psi)
    mean, log_variance, z_l = draw(client, x)
    descend(F.cross_entropy(client.adversary(z_l.detach()), y), reader)
    descend(kl_by_hand(mean, log_variance) - client.adversary(z_l).log_softmax(1).mean(), phi)
    z_l = draw(client, x)[-1]
    x_rec = client.decoder(torch.cat([client.personanet(x), z_l], 1))
    noisy = x_rec.detach() + 0.1 * torch.randn(x_rec.shape)
    descend((x - x_rec).square().sum() / len(x), theta, phi, psi_rec)
    descend(F.cross_entropy(client.model(x), y) + F.cross_entropy(client.model(noisy), y), omega)


def by_hand_joint(client, x, y):
    seed_global_streams(0, "fit", 1, 0)
    client.train()
    optimizer = adam(client.parameters())
    mean, log_variance, z_l = draw(client, x)
    reading = F.cross_entropy(client.adversary(z_l.detach()), y)
    frozen = copy.deepcopy(client.adversary)
    hiding = kl_by_hand(mean, log_variance) - frozen(z_l).log_softmax(1).mean()
    x_rec = client.decoder(torch.cat([client.personanet(x), z_l], 1))
    rec = (x - x_rec).square().sum() / len(x)
    noisy = x_rec.detach() + 0.1 * torch.randn(x_rec.shape)
    classifying = F.cross_entropy(client.model(x), y) + F.cross_entropy(client.model(noisy), y)
    (mixture_by_hand(client, x, y) + reading + hiding + rec + classifying).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "weight", "reached"),
    [
        ("literal", "reconstruction_weight", {"decoder"}),
        ("elbo", "reconstruction_weight", {"decoder", "learngene", "personanet"}),
        ("full", "reconstruction_weight", {"decoder", "learngene", "personanet"}),
        ("elbo", "adversarial_weight", {"adversary"}),
        ("elbo", "uniform_weight", {"learngene"}),
        ("elbo", "kl_weight", {"learngene"}),
        ("elbo", "mixture_weight", {"personanet", "terms"}),
        ("literal", "mixture_weight", {"personanet", "terms"}),
    ],
)
def test_drdfl_loss_reaches_what_it_should_and_nothing_else(steps_of, mode, weight, reached):
    """A joint batch with another weight of the loss: only the gradients of what the loss reaches change, in any bit."""
    plain, other = (dict(steps_of(update_order="joint", grad_flow=mode, **{weight: w})) for w in (1, 3))
    assert {part for part in OWN if not same(plain[part], other[part])} == reached


def test_drdfl_cross_entropy_reaches_the_decoder_in_full_mode_alone(steps_of):
    literal, elbo, full = (dict(steps_of(update_order="joint", grad_flow=m)) for m in ("literal", "elbo", "full"))
    assert {part for part in OWN if not same(literal[part], elbo[part])} == {"personanet", "learngene"}
    assert {part for part in OWN if not same(elbo[part], full[part])} == {"personanet", "learngene", "decoder"}


def test_drdfl_shared_moments_are_those_of_the_first_step(small, one_batch, run_federation):
    """Adam's second step of one optimizer is not the first of another."""
    own, shared = (
        run_federation(lambda m=m: small(personanet_moments=m), rounds=1, data=one_batch(), optimizer=adam)
        for m in ("own", "shared")
    )
    differs = {part for part in OWN if not same(*(part_of(loop.runner.pool.get(0), part) for loop in (own, shared)))}
    assert differs == {"personanet"}


def test_drdfl_optimizers_are_fresh_every_round_at_the_decayed_rate(small, run_federation, one_batch):
    rates = []

    def watched(parameters):
        optimizer = adam(parameters)
        optimizer.register_step_pre_hook(
            lambda o, *_: rates.append((o.param_groups[0]["lr"], sum(len(s) > 0 for s in o.state.values())))
        )
        return optimizer

    run_federation(small, rounds=2, data=one_batch(), optimizer=watched, lr_decay=0.5)
    assert [rate for rate, _ in rates] == [1e-3] * 8 + [5e-4] * 8
    first_steps = [state for _, state in rates]
    assert [bool(state) for state in first_steps] == [False] * 5 + [True] + [False] * 7 + [True] + [False] * 2


def test_drdfl_steps_on_accumulated_batches_keep_losses_apart(small, make_data, run_federation, monkeypatch):
    """One batch of twelve, or three of four: the same gradients in every step, as nothing is drawn or moves."""
    monkeypatch.setattr(drdfl, "reparametrised", lambda mean, log_variance: mean + 0 * log_variance)

    def steps(batch_size, accumulate):
        recorder = Recorder(lr=0.0)
        data = make_data(counts=((8, 8, 0, 0),), batch_size=batch_size)
        loop = run_federation(
            lambda: small(noise_std=0.0),
            rounds=1,
            data=data,
            optimizer=recorder,
            trainer={"accumulate_grad_batches": accumulate},
        )
        assert loop.data.clients[0].num_train == 12
        return recorder.named(loop.runner.modules[0])

    whole, parts = steps(12, 1), steps(4, 3)
    assert [part for part, _ in whole] == [part for part, _ in parts] == SEQUENTIAL["elbo"]
    for (part, one), (_, other) in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4, msg=f"{part}: {name}")


def test_drdfl_without_noise_classifies_the_reconstruction_itself(small, one_batch, run_federation, monkeypatch):
    seen = []
    forward, decode = Step.forward, DRDFL._decode
    monkeypatch.setattr(
        Step, "forward", lambda self, x=None: seen.append((self.x if x is None else x).detach()) or forward(self, x)
    )
    monkeypatch.setattr(DRDFL, "_decode", lambda self, *z: seen.append(decode(self, *z)) or seen[-1])
    for noise, equal in ((0.0, True), (0.1, False)):
        seen.clear()
        run_federation(lambda n=noise: small(noise_std=n), rounds=1, data=one_batch(), optimizer=adam, evaluate_every=1)
        training = [t for t in seen if len(t) == 15]
        decoded, x, noisy = training[:3]
        assert torch.equal(noisy, decoded.detach()) == equal
        assert not torch.equal(x, decoded)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_order", ["sequential", "joint"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixture_weight": 0.5, "likelihood_weight": 0.1, "kl_weight": 0.2, "reconstruction_weight": 0.01},
        {"mixture_weight": 0},
        {"kl_weight": 0, "adversarial_weight": 0, "uniform_weight": 0},
        {"reconstruction_weight": 0, "grad_flow": "full"},
        {"reconstruction_weight": 0, "kl_weight": 0, "uniform_weight": 0},
    ],
)
def test_drdfl_logs_what_it_announces_and_the_sum_is_the_loss(small, one_batch, run_federation, options, update_order):
    make = lambda: small(update_order=update_order, **options)  # noqa: E731
    row = run_federation(make, rounds=1, data=one_batch(), optimizer=adam).diary.rows[0]
    logged = {name.removeprefix("loss/"): value for name, value in row.items() if name.startswith("loss")}
    module = ClientModule(make())
    client = module.method
    assert set(logged) == set(module.loss_names)
    weights = {term.name: term.weight for term in client.terms} | {"cross_entropy_reconstruction": 1}
    expected = sum(weights[name] * value for name, value in logged.items() if name in weights)
    assert logged["loss"] == pytest.approx(expected, rel=1e-5)
    if client.mixture[0].weight > 0:
        parts = (
            logged["gaussian_classification"]
            + client.mixture[0].options.likelihood_weight * logged["gaussian_likelihood"]
        )
        assert logged["gaussian_mixture"] == pytest.approx(parts, rel=1e-5)


def test_drdfl_uniform_loss_is_at_least_log_k(small, pair, run_federation):
    rows = run_federation(small, rounds=3, data=pair(), optimizer=adam).diary.rows
    assert all(row["loss/uniform_adversarial"] >= math.log(4) for row in rows)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        ("mixture_weight", "GaussianMixture"),
        ("kl_weight", "KLToStandardNormal"),
        ("adversarial_weight", "Adversarial"),
        ("uniform_weight", "UniformAdversarial"),
        ("reconstruction_weight", "Reconstruction"),
    ],
)
@pytest.mark.parametrize("update_order", ["sequential", "joint"])
def test_drdfl_term_of_weight_0_is_never_asked(
    small, one_batch, run_federation, monkeypatch, weight, kind, update_order
):
    """Whatever it would say: the run is finite although the term answers NaN."""
    nan = lambda self, *_: torch.tensor(math.nan)  # noqa: E731
    monkeypatch.setattr(getattr(drdfl, kind), "forward", nan)
    monkeypatch.setattr(GaussianMixture, "combined", nan if weight == "mixture_weight" else lambda s, a, b: a)
    make = lambda: small(update_order=update_order, **{weight: 0.0})  # noqa: E731
    loop = run_federation(make, rounds=1, data=one_batch(), optimizer=adam)
    assert math.isfinite(loop.diary.rows[0]["loss"])
    assert all(t.isfinite().all() for t in loop.runner.pool.get(0).values())


@pytest.mark.parametrize("kind", ["GaussianMixture", "KLToStandardNormal", "UniformAdversarial"])
def test_drdfl_term_of_its_own_among_the_extra_ones_is_refused(small, kind):
    """Also where its own has no weight and would give way: the classifier's pass has no latents."""
    rule = rf"^method\.extra_terms: .* is DRDFL's own, with its weight under method\.weights: .*, got '{kind}'"
    with pytest.raises(ConfigError, match=rule):
        small(mixture_weight=0.0, kl_weight=0.0, uniform_weight=0.0, extra_terms=[getattr(drdfl, kind)()])


def test_drdfl_without_mixture_sends_no_gaussians(small, one_batch, run_federation):
    loop = run_federation(lambda: small(mixture_weight=0), rounds=1, data=one_batch(), optimizer=adam)
    assert loop.diary.sent[1, 0].artifacts == {}


def test_drdfl_extra_term_of_weight_0_changes_nothing(small, pair, run_federation, outcome, assert_identical):
    plain = run_federation(small, rounds=2, data=pair(), optimizer=adam)
    term = lambda: [PrototypeAlignment(0.0)]  # noqa: E731
    other = run_federation(lambda: small(extra_terms=term()), rounds=2, data=pair(), optimizer=adam)
    assert_identical(outcome(other), outcome(plain))


class OnTheClassifier(Term):
    """Remembers the forward pass that it was given, and pulls at the embedding."""

    def forward(self, client, out):
        self.seen = out
        return out.z.square().mean()


@pytest.mark.parametrize("update_order", ["sequential", "joint"])
def test_drdfl_extra_term_joins_the_classifier_s_step(small, one_batch, run_federation, update_order):
    plain = run_federation(lambda: small(update_order=update_order), rounds=1, data=one_batch(), optimizer=adam)
    other = run_federation(
        lambda: small(update_order=update_order, extra_terms=[OnTheClassifier()]),
        rounds=1,
        data=one_batch(),
        optimizer=adam,
    )
    out = other.runner.modules[0].method.terms[-1].seen
    assert out.x.shape == (15, 1, 8, 8)
    assert (out.z.shape, out.logits.shape, len(out.features)) == ((15, 5), (15, 4), 1)
    assert other.diary.rows[0]["loss/on_the_classifier"] > 0
    states = [loop.runner.pool.get(0) for loop in (plain, other)]
    assert {part for part in OWN if not same(*(part_of(state, part) for state in states))} == {"model"}


def test_drdfl_with_prototypes_sends_and_hears_them(small, pair, run_federation):
    loop = run_federation(lambda: small(extra_terms=[PrototypeAlignment()]), rounds=2, data=pair(), optimizer=adam)
    assert set(loop.diary.received[2, 1].artifacts) == {"prototypes", "class_mean", "class_log_variance"}
    assert loop.diary.rows[1]["loss/prototype_alignment"] > 0


def test_drdfl_present_classes_keep_the_adversary_to_them(small, make_data, run_federation):
    """A client of one class: nothing is left to tell or to hide."""
    data = make_data(counts=((0, 12, 0, 0),))
    options = {"adversary_classes": "present", "posterior_classes": "present"}
    row = run_federation(lambda: small(**options), rounds=1, data=data, optimizer=adam).diary.rows[0]
    for name in ("adversarial", "uniform_adversarial", "gaussian_classification"):
        assert row[f"loss/{name}"] == 0.0
    plain = run_federation(small, rounds=1, data=data, optimizer=adam).diary.rows[0]
    assert plain["loss/uniform_adversarial"] > 1


@pytest.mark.parametrize(
    "options",
    [
        {"ema_when": "step", "class_prior": "local", "posterior_classes": "present", "adversary_classes": "present"},
        {
            "grad_flow": "full",
            "personanet_moments": "shared",
            "update_absent": True,
            "reconstruction_reduction": "mean",
        },
        {"grad_flow": "literal", "update_order": "joint", "test_noise": True, "predict_from": "both"},
    ],
)
def test_drdfl_switches_resume_exactly(small, pair, assert_resumes, options):
    assert_resumes(lambda: small(**options), rounds=3, data=pair(), optimizer=adam)


@pytest.mark.parametrize("update_order", ["sequential", "joint"])
def test_drdfl_trains_in_mixed_precision(small, pair, run_federation, update_order):
    loop = run_federation(
        lambda: small(update_order=update_order),
        rounds=6,
        data=pair(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        trainer={"precision": "bf16-mixed"},
    )
    rows = loop.diary.rows
    assert all(t.isfinite().all() for c in range(2) for t in loop.runner.pool.get(c).values())
    for name in ("loss", "loss/reconstruction", "loss/gaussian_mixture", "loss/cross_entropy"):
        assert rows[-1][name] < rows[0][name]
    assert {t.dtype for t in loop.diary.sent[1, 0].weights.values()} == {torch.float32}


def test_drdfl_trains_under_clipping(small, pair, run_federation):
    loop = run_federation(small, rounds=2, data=pair(), trainer={"gradient_clip_val": 1.0})  # SGD with 0.1
    assert all(t.isfinite().all() for c in range(2) for t in loop.runner.pool.get(c).values())


def test_drdfl_starts_with_common_learngene_and_gaussians_and_private_rest(small, set_up_federation):
    loop = set_up_federation(small, init="own", optimizer=adam)
    one, other = ({n: t.clone() for n, t in loop.runner.load(client).entries.items()} for client in (0, 1))
    for part in ("learngene", "terms"):
        assert same(part_of(one, part), part_of(other, part))
    for part in ("personanet", "decoder", "adversary", "model"):
        assert not same(part_of(one, part), part_of(other, part))


# --- prediction -------------------------------------------------------------------------------------------------------


def scores_of(method, x):
    """By every way to predict."""
    seen = Seen(x)
    return {name: way.scores(seen) for name, way in method.predictors().items()}


def test_drdfl_predicts_from_the_means_of_the_latents(small):
    client = small().eval()
    x = torch.randn(5, 1, 8, 8)
    scores = scores_of(client, x)
    latents = torch.cat([client.personanet(x), client.learngene(x)[0]], 1)
    assert torch.equal(scores["reconstruction"], client.model(client.decoder(latents)))
    assert torch.equal(scores["input"], client.model(x))
    both = (scores["reconstruction"].softmax(1) + scores["input"].softmax(1)) / 2
    torch.testing.assert_close(scores["both"].softmax(1), both)
    torch.testing.assert_close(scores["both"].exp(), both)  # as they are: losses take scores for logits
    assert headline(client.predictors(), "Local-T") == "reconstruction"


@pytest.mark.parametrize("name", ["reconstruction", "input", "both"])
def test_drdfl_headline_is_what_was_asked_for(small, one_batch, run_federation, name):
    row = run_federation(lambda: small(predict_from=name), rounds=1, data=one_batch(), optimizer=adam).diary.rows[0]
    assert row["Local-T"] == row[f"Local-T/{name}"]
    assert {f"Local-T/{n}" for n in ("reconstruction", "input", "both")} <= row.keys()
    ways = small(predict_from=name).predictors()
    assert [headline(ways, figure) for figure in ("Local-T", "Global-T", "Server-T")] == [name] * 3
    assert next(iter(ways)) == name


def test_drdfl_test_noise_changes_predictions_but_no_stream(small):
    client = small().eval()
    x = torch.randn(3, 1, 8, 8)
    plain = scores_of(client, x)
    client.decoding = replace(client.decoding, test_noise=True)
    state = torch.get_rng_state()
    noisy, again = scores_of(client, x), scores_of(client, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(noisy["input"], plain["input"])
    assert not torch.equal(noisy["reconstruction"], plain["reconstruction"])
    assert torch.equal(noisy["reconstruction"], again["reconstruction"])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *itertools.product(
            ("mixture_weight", "likelihood_weight", "kl_weight", "adversarial_weight", "uniform_weight",
             "reconstruction_weight", "noise_std", "ema"),
            (-0.1, float("nan")),
        ),
        ("ema", 1.01), ("personal_size", 0), ("shared_size", -1), ("reconstruction_reduction", "max"),
        ("ema_when", "epoch"), ("class_prior", "global"), ("posterior_classes", "held"), ("adversary_classes", "held"),
        ("grad_flow", "none"), ("update_order", "random"), ("personanet_moments", "both"), ("predict_from", "z"),
    ],
)  # fmt: skip
def test_drdfl_rejects(mlp, option, value):
    sections = {name: kind for name, kind in options(DRDFL).items() if kind and option in kind.__annotations__}
    ((section, kind),) = sections.items()
    with pytest.raises(ConfigError, match=rf"\.{option}: must be .*, got {value!r}$"):
        kind(**{option: value})
    node = {"class_path": "fl_lightning.methods.drdfl.DRDFL", "init_args": {section: {option: value}}}
    with pytest.raises(ConfigError, match=rf"^method\.init_args\.{section}\.{option}: must be .*, got {value!r}$"):
        build(node, "method", model=mlp())


def test_drdfl_refuses_what_are_no_images(mlp):
    with pytest.raises(
        ConfigError, match=r"model: DRDFL takes images of shape \(channels, height, width\), got \(7,\)"
    ):
        DRDFL(mlp(shape=(7,)))
    with pytest.raises(ConfigError, match=r"8x8 or more, got \(1, 4, 4\)"):
        DRDFL(mlp(shape=(1, 4, 4)))


def test_drdfl_refuses_a_second_term_of_its_own(mlp):
    with pytest.raises(ConfigError, match=r"method\.extra_terms: each term may occur once only"):
        DRDFL(mlp(), extra_terms=[GaussianMixture()])
