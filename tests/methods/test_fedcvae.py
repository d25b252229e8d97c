"""The tests that the specification of FedCVAE promises (BASELINES-B.md, section 6)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sections import sectioned
from tiny_optimizers import adam

from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import batch_norms
from fl_lightning.core.message import Message
from fl_lightning.core.method import Seen
from fl_lightning.core.mixing import Heard
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import EvaluationPolicy, Newcomers
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.fedcvae import Epochs, FedCVAE
from fl_lightning.methods.local import Local
from fl_lightning.models.mlp import MLP
from fl_lightning.seeding import derive_seed

pytestmark = pytest.mark.usefixtures("plain_convolutions")

SMALL = {"latent_size": 3, "width": 4}
QUIET = EvaluationPolicy(trained=False, received=False, server=False)
OFF = {"epochs": Epochs(prior_epochs=0, cvae_epochs=0)}
AUTOENCODER = {"encoder", "decoder"}
MOMENTS = {"class_mean", "class_variance", "pixel_range"}


@pytest.fixture
def small(mlp):
    """FedCVAE on 1x8x8 images with small networks around an MLP."""
    return lambda **options: FedCVAE(mlp(), **sectioned(FedCVAE, **{**SMALL, **options}))


@pytest.fixture
def one_batch(make_data):
    """One client whose training part is one batch of 15; it holds classes 0, 1 and 3 of four."""
    return lambda: make_data(counts=((8, 8, 0, 4),), batch_size=64)


def client_data(shape, num_classes, labels=(0, 1, 0, 1, 1, 0), as_bytes=False):
    """Six images of one client; as bytes they are normalised by mean 0.25 and std 0.5."""
    x = torch.rand(len(labels), *shape, generator=torch.Generator().manual_seed(0))
    classes = tuple(map(str, range(num_classes)))
    normal = {"mean": (0.25,) * shape[0], "std": (0.5,) * shape[0]} if as_bytes else {}
    x = (255 * x).round().byte() if as_bytes else x
    store = TensorStore(Arrays(x, torch.tensor(labels), len(labels), classes, **normal))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(0, store, num_classes, np.arange(len(labels)), nothing, nothing)


def ready(method, data):
    """A client that has received nothing, knows its classes and is in training mode; nothing of it is frozen."""
    client = method if isinstance(method, ClientModule) else ClientModule(method)
    client.receive(Message(), data)
    client.method.know_classes(client.bound(data))
    return client.train()


def part_of(state, part):
    return {name: tensor for name, tensor in state.items() if name.partition(".")[0] == part}


def parts(names):
    return {name.partition(".")[0] for name in names}


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "classes", "size"),
    [((3, 32, 32), 10, 2_636_430), ((3, 32, 32), 100, 2_642_280), ((1, 28, 28), 10, 2_635_278)],
    ids=str,
)
def test_message_has_the_specified_size(shape, classes, size):
    """The prior network's parameters and 1,924 buffers; DRDFL's table has 63.44 in its units, we 50.29."""
    message = ClientModule(FedCVAE(MLP(shape, classes, (8,)))).send(client_data(shape, classes))
    assert message.num_params == size
    assert message.num_bytes == 4 * size + 4 * 4  # four counters of batches are int64
    if size == 2_636_430:
        assert round(20 * size / 2**20, 2) == 50.29


def test_message_holds_the_prior_network_and_nothing_else(small):
    client = ClientModule(small())
    message = client.send(client_data((1, 8, 8), 4))
    assert set(message.weights) == {f"prior.{name}" for name in client.method.prior.state_dict()}
    assert any(name.endswith("running_mean") for name in message.weights)
    assert message.artifacts == {}
    assert set(client.method.interface()) == set(message.weights)
    assert parts(client.division.kept) == {"model", *AUTOENCODER, *MOMENTS}


def test_prior_networks_travel_around_a_ring_unless_told_otherwise(small, run_federation):
    size = ClientModule(small()).send(client_data((1, 8, 8), 4)).num_params
    loop = run_federation(small, rounds=2, optimizer=adam)
    assert isinstance(loop.exchange, Ring)
    assert [row["uplink_params"] for row in loop.diary.rows] == [4 * size] * 2
    assert [row["downlink_params"] for row in loop.diary.rows] == [0, 4 * size]
    star = run_federation(small, rounds=2, optimizer=adam, exchange=Star(), evaluate=QUIET)
    first, second = (star.diary.received[2, client].weights for client in (0, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_client_hears_the_mean_of_its_own_and_its_predecessor_s_network(small, run_federation):
    loop = run_federation(small, rounds=2, optimizer=adam, evaluate=QUIET)
    for client in range(4):
        own, other = (loop.diary.sent[1, c].weights for c in (client, (client - 1) % 4))
        for name, tensor in loop.diary.received[2, client].weights.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, (own[name] + other[name]) / 2)
            else:
                assert torch.equal(tensor, torch.maximum(own[name], other[name]))


def test_ring_of_two_networks_0_and_4_gives_2_to_both(small):
    data = client_data((1, 8, 8), 4)
    client = ClientModule(small())
    mixer = client.make_server(client.method.facts).mixer()
    weights = client.send(data).weights
    heard = [Heard(c, Message({n: torch.full_like(t, 4 * c) for n, t in weights.items()}), 0.5) for c in (0, 1)]
    for own, other in (heard, heard[::-1]):
        client.receive(mixer.mix(own, [other], None), data)
        floats = [t for n, t in client.entries.items() if n.startswith("prior.") and t.is_floating_point()]
        assert all((tensor == 2).all() for tensor in floats)


def test_newcomer_starts_from_its_predecessor_s_network_and_its_own_initial_rest(small, set_up_federation):
    loop = set_up_federation(small, rounds=3, optimizer=adam, newcomers=Newcomers(clients=1, after=2))
    initial = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.advance()
    loop.advance()
    module = loop.runner.load(3)
    module.receive(loop.exchange.inbox(3), loop.data.clients[3])
    sent = loop.diary.sent[2, 2].weights
    for name, tensor in module.entries.items():
        assert torch.equal(tensor, sent.get(name, initial[name]))
    loop.advance()
    assert set(loop.diary.sent[3, 3].weights) == set(sent)


def test_clients_with_different_classifiers_exchange_networks(mlp, run_federation):
    sizes = ((8, 5), (6, 3))
    loop = run_federation(
        lambda a: FedCVAE(mlp(hidden=sizes[a]), **SMALL), architecture=[0, 1, 0, 1], rounds=2, optimizer=adam
    )
    assert loop.done


# --- the three fits ---------------------------------------------------------------------------------------------------


def moved_by_phase(loop, client=0, round=1):
    """Entries of the state that each step changed, by the phase that it belonged to, in the order of the phases."""
    module, data = heard(loop, client, round)
    moved = {}

    def take(step):
        if step.is_first:
            module.method._enter_phase(step.phase)  # which takes the moments, before the step does
        before = {name: tensor.clone() for name, tensor in module.entries.items()}
        FedCVAE.local_step(module.method, step)
        changed = {name for name, tensor in module.entries.items() if not torch.equal(tensor, before[name])}
        moved.setdefault(step.phase.name, []).append(changed)

    module.method.local_step = take
    loop.runner.fit(module, data, round)
    return moved


def heard(loop, client=0, round=1):
    """The loop's module after a client's receive, and the client's data."""
    module, data = loop.runner.modules[0], loop.data.clients[client]
    loop.runner.receive(module, loop.exchange.inbox(client), data, replace(loop.runner.facts, round=round))
    return module, data


def test_phases_train_their_own_parts_one_after_another(conv_net, set_up_federation):
    """Batch norm's statistics of the others stay, too."""
    loop = set_up_federation(lambda: FedCVAE(conv_net(), **SMALL), optimizer=adam, local_epochs=2)
    moved = moved_by_phase(loop)
    assert list(moved) == ["prior", "cvae", "classifier"]
    expected = {"prior": {"prior"}, "cvae": AUTOENCODER, "classifier": {"model"}}
    for phase, steps in moved.items():
        assert len(steps) == 2 * 4  # 15 samples in batches of 4
        assert [parts(changed) for changed in steps] == [expected[phase]] * 8
        own = {name for name, _ in loop.runner.modules[0].method.named_parameters() if parts([name]) <= expected[phase]}
        assert own <= set().union(*steps)
        assert any(name.endswith("running_var") for name in steps[0])


def test_batch_norm_rests_in_parts_that_are_not_trained(small, one_batch, set_up_federation):
    """What the decoder imagines does not depend on what else is in the batch."""
    loop = set_up_federation(small, data=one_batch(), optimizer=adam)
    module, data = heard(loop)
    method, seen = module.method, {}

    def take(step):
        FedCVAE.local_step(method, step)
        parts = (method.prior, method.encoder, method.decoder)
        seen[step.phase.name] = [all(layer.training for layer in batch_norms(part)) for part in parts]

    method.local_step = take
    loop.runner.fit(module, data, 1)
    rest = [False] * 3
    assert seen == {"prior": [True, False, False], "cvae": [False, True, True], "classifier": rest}
    assert method.own_data is None  # a client that is swapped out leaves no data behind


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, [2, 2, 2]),
        ({"prior_epochs": 1, "cvae_epochs": 3}, [1, 3, 2]),
        ({"prior_epochs": 0}, [0, 2, 2]),
        ({"cvae_epochs": 0, "classifier_epochs": 1}, [2, 0, 1]),
        ({"classifier_epochs": 0}, [2, 2, 0]),
    ],
    ids=str,
)
def test_epochs_of_the_phases(small, set_up_federation, options, epochs):
    loop = set_up_federation(lambda: small(**options), optimizer=adam, local_epochs=2)
    moved = moved_by_phase(loop)
    assert [len(moved.get(phase, [])) for phase in ("prior", "cvae", "classifier")] == [4 * count for count in epochs]


def test_network_that_is_not_trained_is_sent_as_it_came(small, run_federation, assert_identical):
    loop = run_federation(lambda: small(prior_epochs=0), rounds=2, optimizer=adam, evaluate=QUIET)
    initial = loop.diary.sent[1, 0].weights
    for message in loop.diary.sent.values():
        assert_identical(message.weights, initial)


def test_moments_are_those_of_the_fitted_network_on_the_own_data(small, run_federation):
    """In eval mode, with g as it is sent: nothing after the first phase changes it."""
    loop = run_federation(small, rounds=2, optimizer=adam, evaluate=QUIET)
    module = loop.runner.modules[0].eval()
    for client in range(4):
        data, state = loop.data.clients[client], loop.runner.pool.get(client)
        module.load(loop.diary.sent[2, client].weights)
        x, y = (torch.cat(tensors) for tensors in zip(*data.batches("train"), strict=True))
        with torch.no_grad():
            feature = module.method.prior(x)[0]
        for k in range(4):
            own = feature[y == k]
            mean, variance = (own.mean(0), own.var(0, correction=0).clamp(min=0.01)) if len(own) else (0 * own.sum(), 1)
            torch.testing.assert_close(state["class_mean"][k], mean + torch.zeros(3))
            torch.testing.assert_close(state["class_variance"][k], variance + torch.zeros(3))


def test_absent_classes_and_single_samples_have_moments(small):
    client = ready(small(variance_floor=0.02), client_data((1, 8, 8), 4, labels=(0, 0, 0, 2))).method
    assert client.class_mean[[1, 3]].tolist() == [[0] * 3] * 2
    assert client.class_variance[[1, 3]].tolist() == [[1] * 3] * 2
    assert client.class_mean[2].abs().min() > 0
    torch.testing.assert_close(client.class_variance[2], torch.full((3,), 0.02))
    assert client.class_variance.min() >= 0.02 - 1e-6
    assert not client.class_mean.requires_grad


def test_client_of_one_class_imagines_that_class_alone(small, make_data, run_federation):
    loop = run_federation(small, rounds=2, data=make_data(counts=((0, 9, 0, 0), (6, 6, 6, 6))), optimizer=adam)
    state = loop.runner.pool.get(0)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert [bool(row.abs().max() > 0) for row in state["class_mean"]] == [False, True, False, False]
    client = ready(loop.runner.load(0), loop.data.clients[0]).method
    assert set(client.imagine(40)[1].tolist()) == {1}


# --- the losses -------------------------------------------------------------------------------------------------------


def test_losses_are_the_specifications(small, monkeypatch):
    module = ready(small(), client_data((1, 8, 8), 4))
    client = module.method
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 3])
    feature, logits = torch.randn(3, 3), torch.randn(3, 4)
    monkeypatch.setattr(client.prior, "forward", lambda images: (feature, logits))
    values = client.prior_losses(x, y)
    assert list(values) == ["prior_cross_entropy", "prior_penalty"]
    torch.testing.assert_close(values["prior_cross_entropy"], F.cross_entropy(logits, y))
    torch.testing.assert_close(values["prior_penalty"], (feature**2).sum() / 3)

    mean, log_variance, decoded = torch.randn(3, 3), torch.randn(3, 3), torch.rand(3, 1, 8, 8)
    seen = []
    monkeypatch.setattr(client.encoder, "forward", lambda images, y: (mean, log_variance))
    monkeypatch.setattr(client.decoder, "forward", lambda z, y: seen.append(z) or decoded)
    torch.manual_seed(1)
    values = client.cvae_losses(x, y)
    torch.manual_seed(1)
    torch.testing.assert_close(seen[0], mean + (log_variance / 2).exp() * torch.randn(3, 3))
    m, s2 = client.class_mean[y], client.class_variance[y]
    kl = 0.5 * ((s2 / log_variance.exp()).log() + (log_variance.exp() + (mean - m) ** 2) / s2 - 1).sum() / 3
    assert list(values) == ["reconstruction", "kl"]
    torch.testing.assert_close(values["reconstruction"], ((x - decoded) ** 2).sum() / 3)
    torch.testing.assert_close(values["kl"], kl)

    made, classes = torch.rand(3, 1, 8, 8), torch.tensor([1, 1, 0])
    monkeypatch.setattr(client, "imagine", lambda count, dtype: (made[:count], classes[:count]))
    step = module.step(x, y)
    values = client.classifier_losses(step, step.forward())
    assert list(values) == ["cross_entropy", "cross_entropy_generated"]
    torch.testing.assert_close(values["cross_entropy"], F.cross_entropy(client.model(x), y))
    torch.testing.assert_close(values["cross_entropy_generated"], F.cross_entropy(client.model(made), classes))


def test_what_is_minimised_is_the_weighted_sum(small, one_batch, run_federation):
    """One batch a phase, so that the logged loss is the mean of three."""
    loop = run_federation(
        lambda: small(kl_weight=0.5, generated_weight=3.0, penalty_weight=0.25),
        rounds=1,
        data=one_batch(),
        optimizer=adam,
        evaluate=QUIET,
    )
    value = loop.diary.reports[1, 0].losses
    total = (
        value["prior_cross_entropy"]
        + 0.25 * value["prior_penalty"]
        + value["reconstruction"]
        + 0.5 * value["kl"]
        + value["cross_entropy"]
        + 3.0 * value["cross_entropy_generated"]
    )
    assert value["loss"] == pytest.approx(total / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "trained"), [("prior", {"prior"}), ("cvae", AUTOENCODER), ("classifier", {"model"})]
)
def test_gradients_of_each_loss_reach_its_own_parts_alone(small, losses, trained):
    """Though nothing is frozen here."""
    data = client_data((1, 8, 8), 4)
    module = ready(small(), data)
    client = module.method
    x, y = next(data.batches("train"))
    step = module.step(x, y)
    values = {
        "prior": lambda: client.prior_losses(x, y),
        "cvae": lambda: client.cvae_losses(x, y),
        "classifier": lambda: client.classifier_losses(step, step.forward()),
    }[losses]()
    sum(values.values()).backward()
    reached = {name for name, p in client.named_parameters() if p.grad is not None}
    assert parts(reached) == trained
    assert reached == {name for name, _ in client.named_parameters() if name.partition(".")[0] in trained}


def test_losses_fall_but_the_divergence_whose_prior_moves(small, make_data, run_federation):
    options = {"data": make_data(counts=((12, 12, 12, 12),)), "local_epochs": 3, "evaluate": QUIET}
    loop = run_federation(small, rounds=5, optimizer=lambda p: torch.optim.Adam(p, lr=5e-3), **options)
    first, last = loop.diary.rows[0], loop.diary.rows[-1]
    for name in ("cross_entropy", "prior_cross_entropy", "reconstruction", "cross_entropy_generated"):
        assert last[f"loss/{name}"] < 0.9 * first[f"loss/{name}"], name


# --- images in [0, 1], and what is imagined ---------------------------------------------------------------------------


def test_networks_see_bytes_in_0_1_and_the_classifier_sees_them_normalised(small, monkeypatch):
    data = client_data((1, 8, 8), 4, as_bytes=True)
    client = ready(small(), data).method
    x, _ = next(data.batches("train"))
    pixels = data.store.x / 255
    assert x.min() < 0
    assert client.pixel_range.tolist() == [0, 1]
    torch.testing.assert_close(client._pixels(x), pixels)
    torch.testing.assert_close(client._in_unit_range(x), pixels)
    monkeypatch.setattr(client.decoder, "forward", lambda z, y: pixels)
    made, _ = client.imagine(6)
    torch.testing.assert_close(made, x)


def test_floats_beyond_0_1_are_brought_there_and_back(small, make_data, monkeypatch):
    data = make_data().clients[2]
    client = ready(small(), data).method
    x = torch.cat([x for x, _ in data.batches("train")])
    assert x.min() < -1
    assert x.max() > 2
    assert client.pixel_range.tolist() == [x.min(), x.max()]
    unit = client._in_unit_range(x)
    assert (unit.min(), unit.max()) == (0, 1)
    assert torch.equal(client._pixels(x), x)  # what g sees is on one scale for all clients
    monkeypatch.setattr(client.decoder, "forward", lambda z, y: unit)
    torch.testing.assert_close(client.imagine(len(x))[0], x)


def test_floats_within_0_1_stay_as_they_are(small):
    data = client_data((1, 8, 8), 4)
    client = ready(small(), data).method
    x, _ = next(data.batches("train"))
    assert client.pixel_range.tolist() == [0, 1]
    assert torch.equal(client._in_unit_range(x), x)


def test_latents_of_imagined_images_are_drawn_from_their_class_s_prior(small, monkeypatch):
    client = ready(small(generated_classes="all"), client_data((1, 8, 8), 4)).method
    client.class_mean[1], client.class_variance[1] = torch.tensor([5.0, -5.0, 0.0]), torch.tensor([0.25, 4.0, 1.0])
    seen = []
    monkeypatch.setattr(client.decoder, "forward", lambda z, y: seen.append(z) or torch.zeros(len(z), 1, 8, 8))
    torch.manual_seed(0)
    _, y = client.imagine(40_000)
    z = seen[0]
    for k in range(4):
        torch.testing.assert_close(z[y == k].mean(0), client.class_mean[k], atol=0.06, rtol=0)
        torch.testing.assert_close(z[y == k].var(0), client.class_variance[k], atol=0, rtol=0.06)


@pytest.mark.parametrize(("option", "classes"), [("present", {0, 1}), ("all", {0, 1, 2, 3})])
def test_classes_of_imagined_images_are_uniform(small, option, classes):
    client = ready(small(generated_classes=option), client_data((1, 8, 8), 4, labels=(0, 0, 0, 0, 0, 1))).method
    torch.manual_seed(0)
    x, y = client.eval().imagine(2_000)
    assert x.shape == (2_000, 1, 8, 8)
    counts = torch.bincount(y, minlength=4)
    assert set(counts.nonzero().flatten().tolist()) == classes
    assert counts[list(classes)].min() > 0.85 * 2_000 / len(classes)


def test_imagined_images_are_constants_and_as_many_as_the_batch(small, one_batch, set_up_federation):
    loop = set_up_federation(small, data=one_batch(), optimizer=adam)
    module, data = heard(loop)
    seen = []
    model = module.method.model
    plain = model.forward_features
    model.forward_features = lambda x: seen.append(x) or plain(x)
    loop.runner.fit(module, data, 1)
    real, imagined = seen
    assert real.shape == imagined.shape == (data.num_train, 1, 8, 8)
    assert not torch.equal(real, imagined)
    assert not imagined.requires_grad


# --- the classifier beside Local's ------------------------------------------------------------------------------------


def test_without_the_other_fits_and_imagined_images_it_is_local_bit_for_bit(conv_net, run_federation, assert_identical):
    """Dropout and batch norm included: what is off draws nothing."""
    ours = run_federation(lambda: FedCVAE(conv_net(), generated_weight=0.0, **OFF, **SMALL), optimizer=adam)
    theirs = run_federation(lambda: Local(conv_net()), optimizer=adam)
    for client in range(4):
        assert_identical(part_of(ours.runner.pool.get(client), "model"), dict(theirs.runner.pool.get(client)))
    for one, other in zip(ours.diary.rows, theirs.diary.rows, strict=True):
        assert one["Local-T"] == other["Local-T"]
        assert one["loss"] == other["loss"]


def test_with_the_other_fits_the_classifier_trains_as_local_s_on_later_shuffles(
    mlp, set_up_federation, assert_identical
):
    """A shuffle is seeded by the number of its epoch in the fit: the classifier's are the third and the fourth."""
    options = {"generated_weight": 0.0, "epochs": Epochs(prior_epochs=1, cvae_epochs=1)}
    loop = set_up_federation(
        lambda: FedCVAE(mlp(), **options, **SMALL), rounds=2, optimizer=adam, local_epochs=2, evaluate=QUIET
    )
    initial = {name: tensor.clone() for name, tensor in loop.runner.modules[0].method.model.state_dict().items()}
    loop.run()
    for client in range(4):
        model = mlp()
        model.load_state_dict(initial)
        for round in (1, 2):
            optimizer = adam(model.parameters())
            for epoch in (2, 3):
                seed = derive_seed(0, f"shuffle/{epoch}", round, client)
                for bundle in loop.data.clients[client].bundles(seed, 4, drop_single=True):
                    for x, y in bundle.steps():
                        optimizer.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
        trained = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        assert_identical(part_of(loop.runner.pool.get(client), "model"), trained)


def test_loss_of_imagined_images_is_logged_if_it_counts(small, run_federation):
    name = "loss/cross_entropy_generated"
    assert run_federation(small, rounds=1, optimizer=adam).diary.rows[0][name] > 0
    without = run_federation(lambda: small(generated_weight=0.0), rounds=1, optimizer=adam)
    assert name not in without.diary.rows[0]
    assert name not in without.row_columns


def test_imagined_images_leave_no_trace_in_the_classifier_s_statistics(conv_net, sgd, run_federation, assert_identical):
    """At learning rate 0 nothing but batch norm's statistics moves; tests see real images alone."""
    with_, without = (
        run_federation(
            lambda weight=weight: FedCVAE(conv_net(), generated_weight=weight, **SMALL),
            rounds=2,
            optimizer=sgd(0.0),
            evaluate=QUIET,
        )
        for weight in (1.0, 0.0)
    )
    start = conv_net().state_dict()["body.stages.0.1.running_var"]
    for client in range(4):
        ours, theirs = (part_of(loop.runner.pool.get(client), "model") for loop in (with_, without))
        assert_identical(ours, theirs)
        assert not torch.equal(ours["model.body.stages.0.1.running_var"], start)


def test_classifier_alone_predicts(small):
    client = ready(small(), client_data((1, 8, 8), 4)).eval()
    x = torch.rand(5, 1, 8, 8)
    assert list(client.predictors) == [""]
    assert torch.equal(client.predictors[""].scores(Seen(x)), client.method.model(x))


def test_extra_terms_are_part_of_the_classifier_s_loss(small, run_federation):
    """On the client's own images: what a term counts is the training part, once."""
    term = lambda: PrototypeAlignment(0.5, collection="running")  # noqa: E731
    loop = run_federation(lambda: small(extra_terms=[term()]), rounds=2, optimizer=adam, evaluate=QUIET)
    assert loop.diary.rows[1]["loss/prototype_alignment"] > 0
    message = loop.diary.sent[2, 2]
    assert set(message.artifacts) == {"prototypes"}
    assert torch.equal(message.artifacts["prototypes"].count, loop.data.clients[2].class_counts)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"kl_weight": -1},
        {"generated_weight": -1},
        {"penalty_weight": -1},
        {"latent_size": 0},
        {"width": 0},
        {"variance_floor": 0},
        {"generated_classes": "some"},
        {"prior_epochs": -1},
        {"cvae_epochs": -1},
        {"classifier_epochs": -1},
    ],
    ids=str,
)
def test_bad_values_are_refused(mlp, options):
    (option,) = options
    section = r"epochs\." if option in Epochs.__annotations__ else ""
    with pytest.raises(ConfigError, match=rf"^method\.{section}{option}: must be"):
        FedCVAE(mlp(), **sectioned(FedCVAE, **options))


def test_what_is_no_image_is_refused_in_one_line(mlp):
    with pytest.raises(ConfigError, match=r"^model: FedCVAE takes images of shape .*, got \(64,\)$") as error:
        FedCVAE(mlp(shape=(64,)))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^model: .* needs images of 8x8 or more, got \(1, 6, 8\)$"):
        FedCVAE(mlp(shape=(1, 6, 8)))
