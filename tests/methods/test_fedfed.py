"""The tests that the specification of FedFed promises (BASELINES-B.md, section 5)."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from sections import sectioned
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedfed import FedFed, Weights, class_balanced_draw
from fl_lightning.models.lightning_module import WrappedLightningModule
from fl_lightning.models.mlp import MLP
from fl_lightning.models.wrapped import WrappedModel

pytestmark = pytest.mark.usefixtures("plain_convolutions")

ONE_CLIENT = ((12, 8, 5, 4),)
BALANCED = ((12, 12, 12, 12), (6, 6, 6, 6), (6, 6, 6, 6))
QUIET = EvaluationPolicy(trained=False, received=False, server=False)
PIXELS = 64


def size_of(module):
    return sum(tensor.numel() for tensor in module.state_dict().values())


def fedfed(model, **options):
    return FedFed(model, **sectioned(FedFed, **{"feature_rounds": 1, "latent_size": 4, **options}))


def heard(loop, client, round):
    """The loop's module after a client's receive, and the client's data."""
    module, data = loop.runner.modules[0], loop.data.clients[client]
    facts = replace(loop.runner.facts, round=round, client=client)
    loop.runner.receive(module, loop.exchange.inbox(client), data, facts)
    return module, data


@pytest.fixture
def run(mlp, run_federation):
    """One round of the first phase by default, without evaluations."""

    def run(rounds=3, **options):
        method = {key: options.pop(key) for key in list(options) if key in FedFed.__init__.__annotations__}
        return run_federation(lambda: fedfed(mlp(), **method), rounds, **{"evaluate": QUIET, **options})

    return run


def test_without_a_first_phase_it_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    ours = run_federation(lambda: FedFed(conv_net(), feature_rounds=0))
    theirs = run_federation(lambda: FedAvg(conv_net()))
    assert_identical(outcome(ours), outcome(theirs))
    assert_identical(ours.final, theirs.final)


# --- the first phase --------------------------------------------------------------------------------------------------


class Counter:
    """Samples that pass through a module."""

    def __init__(self, module):
        self.samples = 0
        module.register_forward_hook(lambda module, inputs, output: self.add(len(inputs[0])))
        if hasattr(module, "forward_features"):
            forward = module.forward_features
            module.forward_features = lambda x: self.add(len(x)) or forward(x)

    def add(self, count):
        self.samples += count


def counted(mlp, set_up_federation, make_data, **options):
    loop = set_up_federation(lambda: fedfed(mlp(), **options), rounds=1, data=make_data(ONE_CLIENT))
    module = loop.runner.modules[0]
    return loop, module, Counter(module.method.model.body), Counter(module.method.vae)


def test_first_phase_costs_three_passes_an_epoch(mlp, set_up_federation, make_data):
    """Mixup: w on n. Mosaics: q on n. Split: q on n and w on 3n."""
    loop, _, classifier, autoencoder = counted(mlp, set_up_federation, make_data)
    module, data = heard(loop, 0, 1)
    loop.runner.fit(module, data, 1)
    assert classifier.samples == 4 * data.num_train
    assert autoencoder.samples == 2 * data.num_train


def moved(before, module):
    """Which parts' parameters changed."""
    return {
        name.partition(".")[0]
        for name, parameter in module.method.named_parameters()
        if not torch.equal(before[name], parameter.detach())
    }


def test_passes_train_what_they_should(mlp, set_up_federation, make_data):
    loop, *_ = counted(mlp, set_up_federation, make_data)
    module, data = heard(loop, 0, 1)
    trained = []

    def take(step):
        before = {name: parameter.detach().clone() for name, parameter in module.method.named_parameters()}
        FedFed.local_step(module.method, step)
        trained.append((step.epoch, moved(before, module)))

    module.method.local_step = take
    loop.runner.fit(module, data, 1)
    by_pass = [{frozenset(parts) for epoch, parts in trained if epoch == index} for index in range(3)]
    assert by_pass == [{frozenset({"model"})}, {frozenset({"vae"})}, {frozenset({"model", "vae"})}]


def test_losses_of_the_split_are_the_specifications(mlp, set_up_federation, monkeypatch):
    loop = set_up_federation(lambda: fedfed(mlp()), rounds=1)
    client, _ = heard(loop, 0, 1)
    module = client.method
    module.pixel_mean, module.pixel_std = torch.full((1, 1, 1, 1), 0.3), torch.full((1, 1, 1, 1), 0.5)
    x, y = torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 3])
    robust, mean, log_variance = torch.rand(3, 1, 8, 8), torch.randn(3, 4), torch.randn(3, 4)
    monkeypatch.setattr(module.vae, "forward", lambda pixels: (robust, mean, log_variance))
    module.eval()
    torch.manual_seed(3)
    values = module._split_step(client.step(x, y))[1]
    torch.manual_seed(3)
    copies = [x - (robust - std * torch.randn(3, 1, 8, 8)) / 0.5 for std in (0.15, 0.25)]
    logits = module.model(torch.cat([x, *copies]))
    pixels = 0.5 * x + 0.3
    expected = {
        "cross_entropy": F.cross_entropy(logits[:3], y),
        "cross_entropy_protected": F.cross_entropy(logits[3:], torch.cat([y, y])),
        "reconstruction": (robust - pixels).square().mean(),
        "kl": -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum() / (3 * 1 * 4),
    }
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value)
    assert module.weights == {"reconstruction": 5.0, "kl": 0.005, "cross_entropy_protected": 2.0, "cross_entropy": 0.4}


def test_classifiers_loss_on_copies_reaches_the_autoencoder(mlp, set_up_federation):
    loop = set_up_federation(lambda: fedfed(mlp()), rounds=1)
    client, _ = heard(loop, 0, 1)
    module = client.method
    values = module._split_step(client.step(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 3])))[1]
    values["cross_entropy_protected"].backward()
    assert module.vae.linear.weight.grad.abs().max() > 0
    assert module.model.head.weight.grad.abs().max() > 0


def test_at_learning_rate_0_the_first_phase_gives_back_what_it_was_given(run, assert_identical):
    loop = run(rounds=2, feature_rounds=2, feature_lr=0.0, feature_weight_decay=0.0)
    parameters = dict(loop.runner.modules[0].method.named_parameters())
    ours, theirs = loop.diary.received[1, 0].weights, loop.diary.sent[2, 3].weights
    assert_identical({n: t for n, t in theirs.items() if n in parameters}, {n: ours[n] for n in parameters})


# --- what is shared, and how often ------------------------------------------------------------------------------------


def test_messages_hold_what_the_specification_counts(run):
    """w and q; then w, once the copies up and those of the others down, and the final q to make them with."""
    loop = run(rounds=4, feature_rounds=1)
    w = size_of(loop.runner.modules[0].method.model)
    q = size_of(loop.runner.modules[0].method.vae)
    own = {client: loop.data.clients[client].num_train * (2 * PIXELS + 1) for client in range(4)}
    for client in range(4):
        sent = [loop.diary.sent[round, client].num_params for round in range(1, 5)]
        received = [loop.diary.received[round, client].num_params for round in range(1, 5)]
        assert sent == [w + q, w + own[client], w, w]
        assert received == [w + q, w + q, w + sum(own.values()) - own[client], w]


def test_pool_holds_every_sample_twice_and_its_label(run):
    loop = run(rounds=2)
    pool, labels = (loop.exchange.inbox(0).artifacts[name].rows for name in ("protected", "protected_labels"))
    counts = sum(client.class_counts for client in loop.data.clients)
    assert pool.shape == (int(counts.sum()), 2, 1, 8, 8)
    assert torch.equal(torch.bincount(labels, minlength=4), counts)
    assert not torch.equal(pool[:, 0], pool[:, 1])


def test_copies_are_made_with_the_final_autoencoder_in_eval_mode(run):
    """With noise 0 they are x − q(x), q as the server averaged it."""
    loop = run(rounds=2, feature_rounds=1, noise_stds=(0.0, 0.0))
    module = loop.runner.modules[0]
    module.load(loop.exchange.server.vae)
    module.eval()
    for client in range(4):
        x = torch.cat([x for x, _ in loop.data.clients[client].batches("train")])
        with torch.no_grad():
            expected = x - module.method.vae(x)[0]
        sent = loop.diary.sent[2, client].artifacts["protected"]
        torch.testing.assert_close(sent[:, 0], expected)
        assert torch.equal(sent[:, 0], sent[:, 1])


def test_who_stays_out_of_the_first_phase_still_shares_and_what_is_new_is_counted_once(run):
    """Two of four clients a round: the pool grows, and nobody is sent a row twice."""
    loop = run(rounds=8, participation=0.5)
    counts = {client: loop.data.clients[client].num_train for client in range(4)}
    turns = {client: [round for round, c in loop.diary.sent if c == client and round > 1] for client in range(4)}
    assert all(turns.values())
    first = {client: rounds[0] for client, rounds in turns.items()}
    assert len(set(first.values())) > 1
    for client, rounds in turns.items():
        held = 0
        for round in rounds:
            sent, received = loop.diary.sent[round, client], loop.diary.received[round, client]
            assert ("protected" in sent.artifacts) == (round == first[client])
            assert any(name.startswith("vae.") for name in received.weights) == (round == first[client])
            there = sum(counts[other] for other in range(4) if first[other] < round and other != client)
            new = received.artifacts["protected"].num_new if "protected" in received.artifacts else 0
            assert new == there - held
            held = there


def test_classifier_starts_anew_after_the_first_phase(run, assert_identical):
    loop = run(rounds=3, feature_rounds=2)
    model = {name for name in loop.diary.received[1, 0].weights if name.startswith("model.")}
    one, two, three = (loop.diary.received[round, 0].weights for round in (1, 2, 3))
    assert_identical({name: three[name] for name in model}, {name: one[name] for name in model})
    assert any(not torch.equal(two[name], one[name]) for name in model)


@pytest.mark.parametrize("rounds", [2, 3])
def test_first_phase_ends_with_its_average_as_the_global_model(mlp, run_federation, rounds):
    """Server-T of its last round, and the model that a run of that many rounds leaves."""
    loop = run_federation(lambda: fedfed(mlp(), feature_rounds=2, feature_epochs=3, feature_lr=0.02), rounds)
    sent = [(loop.diary.sent[2, client].weights, loop.data.clients[client].num_train) for client in range(4)]
    total, model = sum(num for _, num in sent), mlp()
    mean = {
        name: sum(num * weights[f"model.{name}"].double() for weights, num in sent) / total
        for name in model.state_dict()
    }
    model.load_state_dict(mean)
    with torch.no_grad():
        x, y = loop.data.store.gather(loop.data.server_test)
        accuracy = (model(x).argmax(1) == y).double().mean().item()
    assert accuracy > 0.6
    assert loop.diary.rows[1]["Server-T"] == pytest.approx(accuracy, abs=1e-9)
    if rounds == 2:
        weights = loop.exchange.global_message().weights
        for name, tensor in mean.items():
            torch.testing.assert_close(weights[f"model.{name}"], tensor.float())
        assert loop.final["Global-T_received"] == pytest.approx(accuracy, abs=1e-9)


def test_first_round_of_the_second_phase_is_a_round_of_fedavg(run, sgd, train_by_hand, assert_identical):
    """Nothing was shared yet."""
    loop = run(rounds=2)
    model = MLP((1, 8, 8), 4, (8, 5))
    prefix = "model."
    initial = {n.removeprefix(prefix): t for n, t in loop.diary.received[2, 0].weights.items() if n.startswith(prefix)}
    for client in (0, 2):
        model.load_state_dict(copy.deepcopy(initial))
        train_by_hand(model, loop.data.clients[client], sgd(), 2)
        sent = loop.diary.sent[2, client].weights
        assert_identical({n.removeprefix(prefix): t for n, t in sent.items()}, dict(model.state_dict()))


# --- the second phase -------------------------------------------------------------------------------------------------


def test_draw_has_equal_shares_of_every_class():
    labels = torch.arange(4).repeat_interleave(50)
    drawn = class_balanced_draw(labels, 4, 22)
    assert len(drawn.unique()) == 22  # without replacement
    assert torch.bincount(labels[drawn], minlength=4).min() >= 22 // 4
    assert torch.bincount(labels[drawn], minlength=4).sum() == 22


def test_draw_repeats_a_class_that_is_too_small_and_passes_on_the_share_of_one_that_is_absent():
    labels = torch.tensor([0] * 2 + [1] * 40)
    drawn = class_balanced_draw(labels, 4, 20)
    counts = torch.bincount(labels[drawn], minlength=4).tolist()
    assert len(drawn) == 20
    assert counts[0] >= 5
    assert counts[2:] == [0, 0]


def test_draw_is_in_random_order():
    labels = torch.arange(4).repeat_interleave(50)
    assert len(labels[class_balanced_draw(labels, 4, 40)][:10].unique()) > 1


def test_each_client_draws_as_many_as_it_has_for_either_copy(run, make_data):
    loop = run(rounds=3, data=make_data(BALANCED))
    module, data = heard(loop, 1, 4)
    loop.runner.fit(module, data, 4)
    labels = loop.exchange.inbox(1).artifacts["protected_labels"].rows
    one, other = module.method.draws
    assert len(one) == len(other) == data.num_train
    assert not torch.equal(one, other)
    for draw in module.method.draws:
        assert torch.bincount(labels[draw], minlength=4).min() >= data.num_train // 4
    assert module.method.num_taken == data.num_train


def test_second_phase_is_one_mean_over_own_and_shared_samples(mlp, set_up_federation):
    """Copies equal to the images (no noise, nothing robust) and the batch drawn itself: plain CE of tripled data."""
    loop = set_up_federation(lambda: fedfed(mlp(), noise_stds=(0.0, 0.0)), rounds=3)
    client, data = heard(loop, 0, 2)
    module = client.method
    module.vae.forward = lambda pixels: (torch.zeros_like(pixels), None, None)
    x = torch.cat([x for x, _ in data.batches("train")])
    copies = module._copies(client.bound(data))
    assert torch.equal(copies["protected"][:, 0], x)
    assert torch.equal(copies["protected"][:, 1], x)
    module.pool = copies["protected"], copies["protected_labels"]
    module.draws, module.num_taken = [torch.arange(4, 12)] * 2, 0
    y = copies["protected_labels"][4:8]
    values = module._shared_step(client.step(x[4:8], y))[1]
    assert list(values) == ["cross_entropy"]
    torch.testing.assert_close(values["cross_entropy"], F.cross_entropy(module.model(x[4:8]), y))
    assert module.num_taken == 4
    other = module._shared_step(client.step(x[4:8], y))[1]  # the next draws are other samples
    logits = module.model(torch.cat([x[4:8], x[8:12], x[8:12]]))
    labels = torch.cat([y, *[copies["protected_labels"][8:12]] * 2])
    torch.testing.assert_close(other["cross_entropy"], F.cross_entropy(logits, labels))


def test_second_phase_costs_three_passes_a_sample_and_none_of_the_autoencoder(run):
    loop = run(rounds=3)
    module, data = heard(loop, 1, 4)
    classifier, autoencoder = Counter(module.method.model.body), Counter(module.method.vae)
    loop.runner.fit(module, data, 4)
    module.send(data)
    assert data.num_train % 4 == 1  # a last batch of one is left out, as wherever a client has batch norm
    assert classifier.samples == 3 * (data.num_train - 1)
    assert autoencoder.samples == 0


def test_run_resumes_exactly_in_the_second_phase(mlp, set_up_federation, outcome, assert_identical, tmp_path):
    """After the first phase, after the round in which three of four clients sent their copies, and after the next."""
    options = {"rounds": 4, "participation": 0.75, "evaluate_every": 2}
    method = lambda: fedfed(mlp())  # noqa: E731
    straight = set_up_federation(method, **options)
    straight.final = straight.run()
    for round in (1, 2, 3):
        first, second = (set_up_federation(method, folder=tmp_path / str(round), **options) for _ in range(2))
        for _ in range(round):
            first.advance()
        second.load_state_dict(second.checkpoints.load(second.checkpoints.find("auto")))
        second.final = second.run()
        second.diary.rows = first.diary.rows[:round] + second.diary.rows
        assert_identical(outcome(second), outcome(straight))
        assert_identical(second.final, straight.final)


def test_order_of_clients_does_not_matter_in_the_second_phase(run, set_up_federation, mlp, outcome, assert_identical):
    plain = run(rounds=3)
    other = set_up_federation(lambda: fedfed(mlp()), rounds=3, evaluate=QUIET)
    other.fit_order = lambda clients: clients[::-1]
    other.final = other.run()
    assert_identical(outcome(other), outcome(plain))


def test_clients_of_one_class_and_of_one_sample_survive_the_second_phase(run, make_data):
    loop = run(rounds=4, data=make_data(((9, 0, 0, 0), (0, 1, 0, 0), (6, 6, 6, 6))))
    assert all(tensor.isfinite().all() for tensor in loop.exchange.inbox(0).weights.values())


def test_extra_terms_see_the_own_images_alone(mlp, run_federation):
    loop = run_federation(
        lambda: fedfed(mlp(), extra_terms=[PrototypeAlignment(0.5, collection="running")]), rounds=4, evaluate=QUIET
    )
    assert loop.diary.rows[3]["loss/prototype_alignment"] > 0
    seen = loop.diary.sent[4, 2].artifacts["prototypes"].count
    assert torch.equal(seen, loop.data.clients[2].class_counts)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_rounds": -1},
        {"feature_epochs": 0},
        {"feature_lr": -1},
        {"feature_weight_decay": -1},
        {"reconstruction_weight": -1},
        {"protected_weight": -1},
        {"kl_weight": -1},
        {"classification_weight": -1},
        {"noise_stds": (0.1,)},
        {"noise_stds": (0.1, -0.1)},
        {"mixup": 0},
        {"latent_size": 0},
    ],
    ids=str,
)
def test_bad_values_are_refused(mlp, options):
    (option,) = options
    section = r"weights\." if option in Weights.__annotations__ else ""
    with pytest.raises(ConfigError, match=rf"^method\.{section}{option}: must be"):
        FedFed(mlp(), **sectioned(FedFed, **options))


def test_what_is_no_image_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"^model: ResidualVAE takes images"):
        FedFed(mlp(shape=(64,)))


class OwnCrossEntropy(LightningModule):
    """A module that computes by itself what would be computed for it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 5), nn.ReLU(), nn.Linear(5, 4))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)


def test_a_modules_own_loss_of_images_and_copies_is_not_taken_for_that_of_the_images(run_federation, make_data):
    module, data = OwnCrossEntropy(), make_data(counts=((4, 2, 0, 0),), batch_size=8)
    models = (
        WrappedLightningModule((1, 8, 8), 4, module, optimizer="configured"),
        WrappedModel((1, 8, 8), 4, module.layers, head="3"),
    )
    ours, theirs = (
        run_federation(lambda model=model: fedfed(copy.deepcopy(model)), rounds=1, evaluate=QUIET, data=data)
        for model in models
    )
    for name in ("loss", "loss/cross_entropy", "loss/cross_entropy_protected"):
        assert ours.diary.rows[0][name] == pytest.approx(theirs.diary.rows[0][name], rel=1e-5)
