"""Optimizer steps under mixed and half precision: scaled losses, several optimizers, float32 copies."""

import math
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn

from fl_lightning.core.method import Method, Phase
from fl_lightning.core.precision import widened
from fl_lightning.core.steps import HalfLayers, MixedSteps, careful, keeps_float32
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.trainers import make_trainer
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.seeding import derive_seed


class Alone(Method):
    shared = ()


class TwoParts(Alone):
    """Head and body have an optimizer each; both follow one backward pass, in which the head's gradient overflows."""

    def __init__(self, model, scale):
        super().__init__(model)
        self.scale = scale
        self.scales, self.head_moved, self.body_moved = [], [], []

    def phases(self):
        return [Phase("both", parts={"head": ("model.head",), "body": ("model.body",)})]

    def losses(self):
        return {"overflows": 1.0}

    def local_step(self, step):
        head, body = self.model.head, self.model.body
        before = [nn.utils.parameters_to_vector(part.parameters()) for part in (head, body)]
        values = step.values(step.forward())
        if not self.scales:
            values["overflows"] = head.bias.sum() * 1e38  # times the scale: more than float32 holds
        self.scales.append(self.scale())
        step.descend(values, "head", "body")
        after = [nn.utils.parameters_to_vector(part.parameters()) for part in (head, body)]
        self.head_moved.append((after[0] - before[0]).detach())
        self.body_moved.append((after[1] - before[1]).detach())


def mixed(scale=2.0**10, **options):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, **options))]}


def scale_of(loop, client):
    return loop.runner.pool.get(client)["loss_scale"].tolist()


def present_scale(loop):
    return loop.runner.trainer.precision_plugin.scaler.get_scale()


# --- scaled losses ----------------------------------------------


def test_overflow_in_one_optimizer_leaves_the_other_steps_of_the_same_backward_pass_right(mlp, set_up_federation):
    """The scale may not change between them: the second's gradients were scaled with the first's."""
    loop = set_up_federation(lambda: TwoParts(mlp(), lambda: present_scale(loop)), trainer=mixed())
    module, data = loop.runner.load(0), loop.data.clients[0]
    loop.runner.fit(module, data, 1)
    method = module.method
    assert method.scales[:3] == [2.0**10, 2.0**9, 2.0**9]
    assert method.head_moved[0].abs().max() == 0
    assert method.head_moved[1].abs().max() > 0
    plain = set_up_federation(lambda: Alone(mlp()), trainer={"precision": "32-true"})
    model = plain.runner.load(0).method.model
    before = nn.utils.parameters_to_vector(model.body.parameters()).detach().clone()
    bundle = next(iter(plain.data.clients[0].bundles(first_shuffle(loop, data), 4)))
    x, y = next(iter(bundle.steps()))
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.body.parameters():
            parameter -= 0.1 * parameter.grad
    moved = nn.utils.parameters_to_vector(model.body.parameters()).detach() - before
    assert method.body_moved[0].norm() == pytest.approx(float(moved.norm()), rel=0.02)  # and not half or double
    assert F.cosine_similarity(method.body_moved[0], moved, 0) > 0.999


def first_shuffle(loop, data):
    return derive_seed(loop.seed, "shuffle/0", 1, data.client)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-true"])
def test_gradients_are_clipped_after_they_are_unscaled(mlp, make_data, set_up_federation, precision):
    """One step of SGD with a gradient longer than the limit moves the weights by the learning rate times the limit."""
    flags = {
        "gradient_clip_val": 0.01,
        **(mixed() if precision == "16-mixed" else {"plugins": [HalfPrecision(precision)]}),
    }
    loop = set_up_federation(lambda: Alone(mlp()), data=make_data(batch_size=64), trainer=flags)
    module = loop.runner.load(0)
    seen = []
    step = torch.optim.SGD.step

    def watched(self, *arguments, **keywords):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        step(self, *arguments, **keywords)
        after = [p for group in self.param_groups for p in group["params"]]
        assert {p.dtype for p in after} == {torch.float32}
        seen.append(math.sqrt(sum(float((a.detach() - b).square().sum()) for a, b in zip(after, before, strict=True))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", watched)
        loop.runner.fit(module, loop.data.clients[0], 1)
    assert len(seen) == 1
    assert seen[0] == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_step_with_a_gradient_that_is_not_finite_is_skipped_and_halves_the_scale(mlp, set_up_federation):
    class Explodes(Term):
        """An infinite gradient in the second mini-batch of the fit."""

        def forward(self, host, out):
            factor = torch.inf if host.fit.num_batches == 1 else 0.0
            return (out.logits.float() * factor).sum() if factor else torch.zeros(())

    loop = set_up_federation(lambda: Alone(mlp(), terms=[Explodes()]), trainer=mixed(growth_interval=1000))
    module = loop.runner.load(0)
    seen = [{name: p.detach().clone() for name, p in module.named_parameters()}]
    local_step = module.method.local_step

    def watched(step):
        local_step(step)
        seen.append({name: p.detach().clone() for name, p in module.named_parameters()})

    module.method.local_step = watched
    loop.runner.fit(module, loop.data.clients[0], 1)
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(seen)]
    assert same == [False, True, False, False]
    assert module.method.loss_scale.tolist() == [2.0**9, 2]
    assert module.method.fit.num_batches == 4
    assert module.method.fit.num_steps == 3  # those that were really made


def test_scale_grows_with_the_clients_own_steps_and_stays_with_it(mlp, set_up_federation):
    loop = set_up_federation(lambda: Alone(mlp()), rounds=2, trainer=mixed(growth_interval=3), participation=0.5)
    loop.run()
    for client in range(4):
        rounds = sum(participant == client for _, participant in loop.diary.sent)
        steps = rounds * loop.data.clients[client].num_steps(4)
        if rounds:
            assert scale_of(loop, client) == [2.0 ** (10 + steps // 3), steps % 3]
        else:
            assert loop.runner.pool.get(client) is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_scale_changes_once_an_effective_mini_batch(mlp, set_up_federation, accumulate):
    class TwoSteps(Alone):
        """The one optimizer steps twice in every mini-batch."""

        def local_step(self, step):
            for _ in range(2):
                scales.append(present_scale(loop))
                step.descend(step.values(step.forward()))

    scales = []
    flags = {**mixed(growth_interval=1), "accumulate_grad_batches": accumulate}
    loop = set_up_federation(lambda: TwoSteps(mlp()), trainer=flags)
    loop.runner.fit(loop.runner.load(1), loop.data.clients[1], 1)  # four mini-batches
    exponents = [int(math.log2(scale)) - 10 for scale in scales]
    assert exponents == ([0, 0, 1, 1, 2, 2, 3, 3] if accumulate == 1 else [0, 0, 0, 0, 0, 0, 1, 1])


def test_losses_are_not_scaled_in_what_is_logged(mlp, sgd, run_federation):
    options = {"rounds": 1, "optimizer": sgd(0.0)}
    scaled = run_federation(lambda: Alone(mlp()), trainer=mixed(), **options)
    plain = run_federation(lambda: Alone(mlp()), **options)
    assert scaled.diary.rows[0]["loss"] == pytest.approx(plain.diary.rows[0]["loss"], rel=1e-2)


# --- half precision ----------------------------------------------


def test_steps_too_small_for_half_precision_add_up(mlp, set_up_federation):
    """A hundred steps of 1e-4 from 1: in bfloat16 each alone rounds back to 1."""

    class Down(Alone):
        def losses(self):
            return {"down": 1e-3}

        def local_step(self, step):
            for _ in range(100):
                step.descend({"down": self.model.head.bias.float().sum()})

    loop = set_up_federation(lambda: Down(mlp()), trainer={"precision": "bf16-true"})
    module, data = loop.runner.load(0), loop.data.clients[0]
    bias = module.method.model.head.bias
    with torch.no_grad():
        bias.fill_(1.0)
    assert torch.tensor(1.0, dtype=torch.bfloat16) - 1e-4 == 1
    loop.runner.fit(module, data, 1)
    steps = 100 * data.num_steps(4)
    expected = torch.full((4,), 1 - steps * 1e-4).to(torch.bfloat16)
    assert bias.dtype == torch.bfloat16
    assert torch.equal(bias, expected)


def test_what_a_method_writes_between_steps_is_not_undone(mlp, set_up_federation):
    class Clamps(Alone):
        def local_step(self, step):
            super().local_step(step)
            with torch.no_grad():
                self.model.head.bias.clamp_(min=0.5)

    loop = set_up_federation(lambda: Clamps(mlp()), trainer={"precision": "bf16-true"})
    module = loop.runner.load(0)
    loop.runner.fit(module, loop.data.clients[0], 1)
    assert (module.method.model.head.bias >= 0.5).all()
    assert (module.method.model.head.bias < 0.6).all()


def test_adam_moments_are_float32(mlp, set_up_federation):
    seen = []

    class Watched(torch.optim.Adam):
        def step(self, *arguments, **keywords):
            super().step(*arguments, **keywords)
            seen.extend(state["exp_avg_sq"].dtype for state in self.state.values())

    loop = set_up_federation(
        lambda: Alone(mlp()), optimizer=lambda p: Watched(p, lr=1e-3), trainer={"precision": "bf16-true"}
    )
    loop.runner.fit(loop.runner.load(0), loop.data.clients[0], 1)
    assert set(seen) == {torch.float32}


def test_batch_norm_statistics_are_float32_and_move(conv_net, run_federation):
    loop = run_federation(lambda: Alone(conv_net()), rounds=1, trainer={"precision": "bf16-true"})
    state, initial = loop.runner.pool.get(0), loop.runner.residents.kept[0]
    statistics = [name for name in state if "running_" in name]
    assert len(statistics) == 2
    for name in statistics:
        assert state[name].dtype == torch.float32
        assert not torch.equal(state[name], state[name].bfloat16().float())  # finer than bfloat16 could hold
        assert not torch.equal(state[name], initial[name])
    assert next(t for n, t in state.items() if n.endswith("stages.0.0.weight")).dtype == torch.bfloat16


def test_methods_and_terms_keep_their_own_tensors_in_float32_and_narrow_their_layers(mlp):
    """Statistics (prototypes, running sums) are no layers."""

    class Teacher(Term):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.full((3,), 1 / 3))
            self.layer = nn.Linear(2, 2)

    method = Method(mlp(), terms=[Teacher()])
    method.register_buffer("own", torch.full((3,), 1 / 3))
    method.model.body.neck.append(nn.BatchNorm1d(5))
    HalfLayers("bf16-true", "cpu").convert_module(method)
    teacher, norm = method.terms[1], method.model.body.neck[-1]
    assert [keeps_float32(part) for part in (method, teacher, norm, teacher.layer)] == [True, True, True, False]
    for statistic in (method.own, teacher.mean):
        assert torch.equal(statistic, torch.full((3,), 1 / 3))
    assert norm.running_mean.dtype == norm.weight.dtype == torch.float32
    assert teacher.layer.weight.dtype == method.model.head.weight.dtype == torch.bfloat16


def test_precision_of_other_kinds_is_left_as_it_is():
    assert isinstance(careful(MixedPrecision("bf16-mixed", "cpu"), "cpu"), MixedSteps)
    assert isinstance(careful(HalfPrecision("16-true"), "cpu"), HalfLayers)

    class Own(HalfPrecision):
        pass

    own = Own("bf16-true")
    assert careful(own, "cpu") is own
    assert widened(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


# --- what is refused ----------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="float16 is refused where there is no GPU")
@pytest.mark.parametrize(
    ("precision", "instead"), [("16-mixed", "bf16-mixed"), (16, "bf16-mixed"), ("16-true", "bf16-true")]
)
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_float16_without_a_gpu_is_refused(precision, instead, accelerator):
    with pytest.raises(
        ConfigError, match=f"^trainer.precision: float16 needs a GPU.*; use {instead}, got {precision!r}$"
    ):
        make_trainer({"precision": precision, "accelerator": accelerator})


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16", 8, "transformer-engine"])
def test_unknown_precision_is_refused(precision):
    with pytest.raises(ConfigError, match=r"^trainer.precision: must be one of 32-true, bf16-mixed, 16-mixed, .*, got"):
        make_trainer({"precision": precision, "accelerator": "cpu"})


@pytest.mark.parametrize("precision", [None, "32-true", 32, "bf16", "bf16-mixed", "bf16-true", "64-true"])
def test_known_precisions_are_taken(precision):
    assert make_trainer({"precision": precision, "accelerator": "cpu"}).precision


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision_leaves_the_default_type_to_losses(precision):
    """A term's `torch.zeros(C)` was half, too, which counts to 256 in bfloat16 and no further."""
    with careful(HalfPrecision(precision), "cpu").train_step_context():
        assert torch.ones(()).dtype == torch.float32


class Casts(Precision):
    """Mixed precision as a user might write it, whose casts of weights torch keeps for as long as the context lasts."""

    precision = "bf16-mixed"

    @contextmanager
    def forward_context(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield


class MixedCasts(MixedPrecision):
    """The same, made of Lightning's own."""

    def autocast_context_manager(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


def test_mixed_precision_keeps_no_casts_where_lightning_would(monkeypatch):
    """Before 2.5.5 it did, and all but the first of sixteen steps saw the weights of the first."""
    monkeypatch.setattr(MixedPrecision, "autocast_context_manager", MixedCasts.autocast_context_manager)
    with careful(MixedPrecision("bf16-mixed", "cpu"), "cpu").forward_context():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("plugin", [Casts, lambda: MixedCasts("bf16-mixed", "cpu")], ids=["own", "of Lightning's"])
def test_casts_of_weights_are_no_older_than_a_step(mlp, run_federation, plugin):
    """Sixteen steps made up one of Lightning's, and all but the first saw the weights of the first."""
    one, other = (
        run_federation(lambda: FedAvg(mlp()), 1, trainer=own)
        for own in ({"plugins": [plugin()]}, {"precision": "bf16-mixed"})
    )
    assert one.diary.reports[1, 0].losses == other.diary.reports[1, 0].losses
    sent, known = (loop.diary.sent[1, 0].weights for loop in (one, other))
    assert all(torch.equal(sent[name], known[name]) for name in known)
