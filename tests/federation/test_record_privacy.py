"""Record-level privacy: what a private step does, what it is worth, and what allows it."""

import math
import sys
import warnings

import pytest
import torch
from every_method import METHODS
from lightning.pytorch.callbacks import EarlyStopping, ModelSummary, Timer
from torch import nn

from fl_lightning.core.private_steps import RecordPrivacy, record_safe
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.accounting import FINE_ORDERS, ORDERS
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.launch import launch
from fl_lightning.federation.record_privacy import _check_flags
from fl_lightning.federation.team import Team
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.wrapped import WrappedModel
from fl_lightning.seeding import derive_seed

HUGE = RecordPrivacy(noise_multiplier=0.0, max_grad_norm=1e6)

ALLOWED = {"FedAvg", "FedPer", "FedRep", "FedBN", "FedProx", "FedNova", "SCAFFOLD", "Ditto", "Local", "MOON", "FeSEM"}
ALLOWED |= {"DFedPGP", "FedAMP", "FedAdagrad", "FedAdam", "FedAvgM", "FedDyn", "FedYogi", "LGFedAvg"}
"""Methods whose fits are the only place where training samples are looked at, each by itself."""


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_or_says_in_one_line_why_not(name, run_federation, mlp):
    run = lambda: run_federation(lambda: METHODS[name](mlp()), rounds=2, record_privacy=RecordPrivacy())  # noqa: E731
    if name not in ALLOWED:
        with pytest.raises(ConfigError, match=rf"^federation\.record_privacy: {name} .*allows no DP-SGD: ") as caught:
            run()
        assert len(str(caught.value)) <= 300
        return
    loop = run()
    spent = [row["record_epsilon"] for row in loop.diary.rows]
    assert 0 < spent[0] < spent[1] < math.inf
    assert all(math.isfinite(row["loss"]) and 0 <= row["Local-T"] <= 1 for row in loop.diary.rows)
    assert not any(hasattr(p, "grad_sample") for p in loop.runner.modules[0].parameters())
    assert not any(part._backward_hooks for part in loop.runner.modules[0].modules())


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fitted(run_federation, make_data, mlp):
    """One client's only round: the weights before, those after, its samples in one part, and its data."""

    def run(settings, batch_size=4, method=FedAvg, counts=((8, 8, 4, 4),), **options):
        data = make_data(counts, batch_size=batch_size)
        torch.manual_seed(3)
        model = mlp()
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def make():
            own = mlp()
            own.load_state_dict(start)
            return method(own)

        loop = run_federation(make, 1, data=data, record_privacy=settings, **options)
        after = loop.exchange.global_message().weights
        model.load_state_dict(start)
        return model, {name: after[f"model.{name}"] for name in start}, data.clients[0]

    return run


def gradients(model, x, y):
    """[B] gradients of single samples, each a list over parameters."""
    for index in range(len(y)):
        loss = nn.functional.cross_entropy(model(x[index : index + 1]), y[index : index + 1])
        yield torch.autograd.grad(loss, list(model.parameters()))


def test_step_is_the_mean_of_clipped_gradients(fitted):
    """A batch of 18 samples, all of them: θ − 0.1/18 Σ g_i min(1, C/‖g_i‖), some of them clipped and some not."""
    clip = 1.8
    model, after, data = fitted(RecordPrivacy(0.0, clip), batch_size=100)
    (x, y), norms = next(data.batches("train")), []
    total = [torch.zeros_like(p) for p in model.parameters()]
    for own in gradients(model, x, y):
        norms.append(float(torch.cat([g.flatten() for g in own]).norm()))
        total = [t + g * min(1.0, clip / norms[-1]) for t, g in zip(total, own, strict=True)]
    assert min(norms) < clip < max(norms)
    assert len(y) == 18
    for (name, parameter), moved in zip(model.named_parameters(), total, strict=True):
        torch.testing.assert_close(after[name], parameter - 0.1 * moved / len(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_without_noise_and_clipping_it_is_sgd_on_poisson_batches(fitted, batch_size, mu):
    """θ ← θ − η (Σ_i g_i / E[B] + μ (θ − w)): the proximal term comes after the noise, in empty batches, too."""
    model, after, data = fitted(HUGE, batch_size, lambda own: FedProx(own, mu=mu), local_epochs=2)
    start, sizes = [p.detach().clone() for p in model.parameters()], []
    for epoch in range(2):
        for bundle in data.poisson_bundles(derive_seed(0, f"shuffle/{epoch}", 1, 0), batch_size, 16):
            for x, y in bundle.steps():
                sizes.append(len(y))
                sums = [torch.zeros_like(p) for p in start]
                for own in gradients(model, x, y):
                    sums = [t + g for t, g in zip(sums, own, strict=True)]
                with torch.no_grad():
                    for p, w, g in zip(model.parameters(), start, sums, strict=True):
                        p -= 0.1 * (g / batch_size + mu * (p - w))
    assert len(sizes) == 2 * -(-18 // batch_size)
    assert len(set(sizes)) > 1
    assert (0 in sizes) == (batch_size == 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_personal_model_feels_its_pull(run_federation, mlp):
    """The pull is a loss of weights alone: per-sample gradients do not know it, and it must not get lost."""
    options = {"record_privacy": HUGE, "local_epochs": 4}
    run = lambda weight: run_federation(lambda: Ditto(mlp(), weight=weight), 1, **options)  # noqa: E731
    far, near = run(0.0).runner, run(5.0).runner

    def distance(runner):
        start = runner.residents.shared[0]
        own = {name.replace("personal", "model"): tensor for name, tensor in runner.pool.get(0).items()}
        return float(sum((own[name] - start[name]).square().sum() for name in start))

    assert 0 < distance(near) < 0.6 * distance(far)


def test_noise_has_the_deviation_that_it_says(fitted):
    """η z C / E[B] = 0.1 · 2 · 0.5 / 18 for each of the 573 weights, and the same once more."""
    options = {"batch_size": 100}
    _, quiet, _ = fitted(RecordPrivacy(0.0, 0.5), **options)
    _, noisy, _ = fitted(RecordPrivacy(2.0, 0.5), **options)
    _, again, _ = fitted(RecordPrivacy(2.0, 0.5), **options)
    _, other, _ = fitted(RecordPrivacy(2.0, 0.5), seed=1, **options)
    noise = torch.cat([(noisy[name] - quiet[name]).flatten() for name in quiet])
    assert noise.std() == pytest.approx(0.1 * 2 * 0.5 / 18, rel=0.1)
    assert abs(noise.mean()) < 4 * noise.std() / len(noise) ** 0.5
    assert all(torch.equal(noisy[name], again[name]) for name in noisy)
    assert not torch.equal(noisy["head.weight"], other["head.weight"])


def test_poisson_batches_take_each_sample_by_its_chance(make_data):
    data = make_data(((40, 30, 30, 33),)).clients[0]
    n = data.num_train
    epochs = [data.poisson_bundles(seed, 5, 3) for seed in range(200)]
    sizes = torch.tensor([[len(y) for bundle in epoch for _, y in bundle.steps()] for epoch in epochs]).float()
    assert sizes.shape == (200, -(-n // 5))
    assert sizes.mean() == pytest.approx(5, rel=0.03)
    assert sizes.var() == pytest.approx(5 * (1 - 5 / n), rel=0.1)
    whole = torch.cat([bundle.x for bundle in data.poisson_bundles(7, 5, 100)])
    assert torch.equal(whole, torch.cat([bundle.x for bundle in data.poisson_bundles(7, 5, 1)]))
    assert [len(bundle.y) for bundle in data.poisson_bundles(0, 500)] == [n]


def test_augmentation_of_poisson_batches_is_the_same_however_many_are_gathered(make_data):
    data = make_data(((4, 4, 4, 4),)).clients[0]
    data.augment = lambda x, seed: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    once, apart = (torch.cat([bundle.x for bundle in data.poisson_bundles(7, 1, many)]) for many in (50, 1))
    assert len(once) > 3
    assert torch.equal(once, apart)


# --- a run ------------------------------------------------------------------------------------------------------------


def group_norm(conv_net):
    net = conv_net()
    net.body.stages[0][1] = nn.GroupNorm(1, 3)
    return net


def test_resume_is_bit_for_bit(assert_resumes, conv_net):
    straight = assert_resumes(
        lambda: FedRep(group_norm(conv_net)), participation=0.5, record_privacy=RecordPrivacy(2.0)
    )
    rows = straight.diary.rows
    assert len({row["record_epsilon"] for row in rows}) > 1
    assert straight.records.summary()["epsilon"] == rows[-1]["record_epsilon"]


def test_two_workers_give_the_same_bits(tmp_path, run_federation, outcome, assert_identical, mlp):
    def run(folder):
        loop = run_federation(lambda: FedAvg(mlp()), rounds=2, record_privacy=RecordPrivacy())
        if loop.workers.is_main:
            left = outcome(loop)
            torch.save({key: left[key] for key in ("rows", "exchange", "traffic")}, folder / "left.pt")
        return 0

    (tmp_path / "2").mkdir()
    assert launch(run, Team(2, threads=1), tmp_path / "2") == 0
    run(tmp_path)
    assert_identical(torch.load(tmp_path / "2" / "left.pt"), torch.load(tmp_path / "left.pt"))


def test_epsilon_is_that_of_two_accountants(run_federation, mlp):
    """15 of 20, 13 of 17, 15 of 19 and 11 of 14 samples train, in batches of 4; FedRep's two phases count both."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp
    from opacus.accountants import RDPAccountant

    settings = RecordPrivacy(1.5, delta=1e-3)
    loop = run_federation(lambda: FedRep(mlp()), 2, record_privacy=settings, local_epochs=3)
    num_train = [client.num_train for client in loop.data.clients]
    assert loop.records.steps == [2 * 4 * -(-n // 4) for n in num_train]
    spent = []
    for client, n in enumerate(num_train):
        own = RDPAccountant()
        own.history = [(1.5, 4 / n, loop.records.steps[client])]
        other = rdp.RdpAccountant(list(ORDERS))  # whole ones alone, where both are exact
        event = accounting.PoissonSampledDpEvent(4 / n, accounting.GaussianDpEvent(1.5))
        other.compose(event, loop.records.steps[client])
        spent.append(loop.records.of(client))
        at_whole = own.get_epsilon(1e-3, alphas=list(ORDERS))
        assert at_whole == pytest.approx(other.get_epsilon(1e-3), abs=1e-3)
        assert 0.97 * at_whole < spent[-1] <= at_whole
        assert spent[-1] == pytest.approx(own.get_epsilon(1e-3, alphas=list(FINE_ORDERS)), abs=1e-9)
    assert loop.diary.rows[-1]["record_epsilon"] == max(spent)
    said = loop.records.summary()
    assert (said["epsilon"], said["steps"]) == (max(spent), loop.records.steps[said["client"]])


def test_without_noise_epsilon_is_infinite(fitted, run_federation, mlp):
    loop = run_federation(lambda: FedAvg(mlp()), 1, record_privacy=HUGE)
    assert loop.diary.rows[0]["record_epsilon"] == math.inf
    assert loop.records.summary()["epsilon"] is None


def test_client_that_never_drew_a_sample_is_not_sick(run_federation, make_data, mlp):
    """Two samples in batches of one: a quarter of the batches is empty, and some fits have no other."""
    data = make_data(((2, 2, 0, 0), (0, 0, 2, 2)), batch_size=1)
    data.clients[0].train = data.clients[0].train[:2]
    loop = run_federation(lambda: FedAvg(mlp()), 12, data=data, record_privacy=RecordPrivacy(1.0))
    losses = [report.losses for report in loop.diary.reports.values()]
    assert {} in losses
    assert any(losses)


class BreaksOff(FedAvg):
    """Fails between the pass and its way back, at client 0 in round 1."""

    armed = True

    @record_safe()
    def local_step(self, step):
        out = step.forward()
        if self.armed and (self.facts.client, self.facts.round) == (0, 1):
            raise RuntimeError("broken off")
        step.descend(step.values(out))


def test_a_pass_that_is_broken_off_leaves_nothing_to_the_next_client(run_federation, make_data, mlp):
    class Whole(BreaksOff):
        armed = False

    data = make_data(((8, 8, 0, 0), (2, 2, 0, 0), (0, 2, 2, 0)), batch_size=16)
    options = {"data": data, "record_privacy": RecordPrivacy(0.0, 1e3), "on_client_error": "skip"}
    broken = run_federation(lambda: BreaksOff(mlp()), 2, **options)
    out = run_federation(lambda: Whole(mlp()), 2, failures=Failures(schedule={"1": [0]}), **options)
    assert [row["skipped"] for row in broken.diary.rows] == [1, 0]
    for round, client in ((1, 1), (1, 2), (2, 0), (2, 1)):
        one, other = (loop.diary.sent[round, client].weights for loop in (broken, out))
        assert all(torch.equal(one[name], other[name]) for name in one)


# --- what is refused --------------------------------------------------------------------------------------------------


class Spread(Term):
    """Says that it is a mean over samples, and is not."""

    sees = "sample"

    def forward(self, host, out):
        return out.z.var(0).sum() if len(out.z) > 1 else out.z.sum() * 0


class Outside(Term):
    """Uses a layer's weights outside its call."""

    sees = "sample"

    def forward(self, host, out):
        return (out.z @ host.model.head.weight.t()).square().mean(0).sum()


def test_what_a_term_says_of_itself_is_measured(set_up_federation, mlp):
    for term in (Spread, Outside):
        with pytest.raises(ConfigError, match=r"FedAvg on MLP allows no DP-SGD: a sample's gradient of model\.\S+ is"):
            set_up_federation(lambda term=term: FedAvg(mlp(), extra_terms=[term()]), record_privacy=RecordPrivacy())
    set_up_federation(lambda: FedAvg(mlp(), extra_terms=[Proximal(1.0)]), record_privacy=RecordPrivacy())


def test_who_overrides_a_hook_has_to_say_anew_that_it_is_safe(set_up_federation, mlp):
    class Sneaky(FedBABU):
        def receive(self, message, data):
            super().receive(message, data)
            self.model.head.bias.data += next(data.batches())[0].mean()

    set_up_federation(lambda: FedBABU(mlp(), finetune_epochs=0), record_privacy=RecordPrivacy())
    with pytest.raises(ConfigError, match="Sneaky allows no DP-SGD: its receive may read training samples"):
        set_up_federation(lambda: Sneaky(mlp(), finetune_epochs=0), record_privacy=RecordPrivacy())


def test_layers_that_opacus_refuses_are_named(set_up_federation, conv_net, make_data):
    with pytest.raises(ConfigError, match="TinyConvNet allows no DP-SGD: BatchNorm cannot support") as caught:
        set_up_federation(lambda: FedAvg(conv_net()), record_privacy=RecordPrivacy())
    assert len(str(caught.value)) <= 300
    set_up_federation(lambda: FedAvg(group_norm(conv_net)), record_privacy=RecordPrivacy())


class Averaging(nn.Module):
    """Keeps a running mean of what it sees, as layers do that Opacus does not know."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 0.1 * (x.detach().mean() - self.seen)
        return x


class Replacing(Averaging):
    """Puts another tensor in its place."""

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean()
        return x


@pytest.mark.parametrize("layer", [Averaging, Replacing, lambda: nn.InstanceNorm2d(1, track_running_stats=True)])
def test_a_statistic_of_samples_that_would_travel_is_refused(set_up_federation, layer):
    """They were sent bare, whatever the noise, beside a small epsilon."""

    def build():
        return FedAvg(WrappedModel((1, 8, 8), 4, nn.Sequential(layer(), nn.Flatten(), nn.Linear(64, 4)), head="2"))

    rule = r"WrappedModel allows no DP-SGD: a pass over samples changes model\.\S+, which travels without noise"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(build, record_privacy=RecordPrivacy())
    if not isinstance(layer, type):  # a layer of norms keeps its own
        set_up_federation(build, record_privacy=RecordPrivacy(), share_buffers=False)


def test_callbacks_that_may_end_a_fit_by_its_losses_are_refused(set_up_federation, mlp):
    """ε was of the steps that were left, though the raw losses had chosen them."""
    watches = [ModelSummary(), Timer("00:01:00:00")]
    trainer = {"callbacks": [*watches, EarlyStopping("loss", check_on_train_epoch_end=True)]}
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: must name none .* watch: EarlyStopping sees samples"):
        set_up_federation(lambda: FedAvg(mlp()), trainer=trainer, record_privacy=RecordPrivacy())
    _check_flags({"callbacks": watches})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("overfit_batches", 2),
        ("gradient_clip_val", 1.0),
        ("accumulate_grad_batches", 2),
        ("devices", 2),
        ("precision", "bf16-mixed"),
    ],
)
def test_flags_of_the_trainer_that_do_not_go_with_it(flag, value, set_up_federation, mlp):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match=rf"^trainer\.{flag}: must be .* under federation\.record_privacy"):
            set_up_federation(lambda: FedAvg(mlp()), trainer={flag: value}, record_privacy=RecordPrivacy())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"noise_multiplier": -0.1}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_bad_options_are_refused(options, key):
    with pytest.raises(ConfigError, match=rf"^federation\.record_privacy\.{key}: must be"):
        RecordPrivacy(**options)


def test_missing_opacus_is_said_before_training(monkeypatch, set_up_federation, mlp):
    for name in ("opacus", "opacus.grad_sample", "opacus.optimizers", "opacus.validators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"^federation\.record_privacy: .*pip install 'fl-lightning\[privacy\]'"):
        set_up_federation(lambda: FedAvg(mlp()), record_privacy=RecordPrivacy())
