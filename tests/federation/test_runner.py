import gc

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import nn

from fl_lightning.core.method import Method
from fl_lightning.errors import ConfigError
from fl_lightning.federation import trainers as trainers_module
from fl_lightning.federation.remarks import remarks
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.federation.sickness import ClientError
from fl_lightning.federation.trainers import make_trainer
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel


def weights_after(loop):
    return loop.exchange.global_message().weights


def test_one_trainer_serves_all_fits(mlp, run_federation, monkeypatch):
    made = []
    original = L.Trainer

    def counted(*arguments, **flags):
        made.append(flags)
        return original(*arguments, **flags)

    monkeypatch.setattr(trainers_module.L, "Trainer", counted)
    loop = run_federation(lambda: FedRep(mlp()), rounds=3)
    assert len(made) == 1
    assert len(loop.diary.sent) == 3 * 4


def test_one_module_serves_all_clients_of_an_architecture(mlp, run_federation):
    made = []

    def make():
        made.append(FedRep(mlp()))
        return made[-1]

    run_federation(make, rounds=3)
    assert len(made) == 1


def test_memory_stays_flat_over_many_fits(mlp, make_data, set_up_federation):
    """Resident memory after 100 fits and after 300 more: within 1 %."""
    loop = set_up_federation(
        lambda: Local(mlp()), data=make_data(batch_size=16), evaluate=EvaluationPolicy(globally=False)
    )
    runner, process = loop.runner, psutil.Process()

    def fit(times):
        for number in range(times):
            client = number % 4
            module = runner.load(client)
            runner.fit(module, loop.data.clients[client], 1)
        gc.collect()
        return process.memory_info().rss

    before = fit(100)
    after = fit(300)
    assert after <= 1.01 * before


def test_fit_after_many_equals_a_fit_after_none(mlp, set_up_federation, assert_identical):
    """The trainer used again leaves nothing behind."""
    used, fresh = (set_up_federation(lambda: Local(mlp())) for _ in range(2))
    for client in (0, 1, 2):
        used.runner.fit(used.runner.load(client), used.data.clients[client], 1)
    for loop in (used, fresh):
        loop.runner.fit(loop.runner.load(3), loop.data.clients[3], 5)
    assert_identical(dict(used.runner.modules[0].state_dict()), dict(fresh.runner.modules[0].state_dict()))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping_bounds_every_step(mlp, run_federation, algorithm):
    """SGD with lr 1: a step moves the weights by the clipped gradient."""
    seen = []

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)

        def look(own, *_):
            gradients = torch.cat([p.grad.flatten() for group in own.param_groups for p in group["params"]])
            seen.append(float(gradients.norm() if algorithm == "norm" else gradients.abs().max()))

        made.register_step_pre_hook(look)
        return made

    flags = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    run_federation(lambda: Local(mlp()), rounds=1, optimizer=optimizer, trainer=flags)
    assert seen
    assert max(seen) <= 0.01 * (1 + 1e-4)


def count_steps(run_federation, mlp, **flags):
    steps = [0]

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
        return made

    loop = run_federation(lambda: Local(mlp()), rounds=1, optimizer=optimizer, trainer=flags)
    return steps[0], {client: loop.diary.reports[1, client].num_steps for client in range(4)}, loop


def test_gradients_are_accumulated(run_federation, mlp):
    """15, 13, 14 and 10 or so training samples in batches of 4: a step every second batch and one for the rest."""
    steps, batches, loop = count_steps(run_federation, mlp, accumulate_grad_batches=2)
    wanted = {client: -(-loop.data.clients[client].num_train // 4) for client in range(4)}
    assert batches == wanted
    assert steps == sum(-(-count // 2) for count in wanted.values())


@pytest.mark.parametrize(("limit", "wanted"), [(1, 1), (2, 2), (1.0, None)])
def test_limit_train_batches_counts_local_mini_batches(run_federation, mlp, limit, wanted):
    steps, batches, loop = count_steps(run_federation, mlp, limit_train_batches=limit)
    for client, count in batches.items():
        assert count == (-(-loop.data.clients[client].num_train // 4) if wanted is None else wanted)
    assert steps == sum(batches.values())


def test_mixed_precision_trains_in_bfloat16_and_keeps_float32_weights(conv_net, run_federation):
    seen = set()

    class Watches(Method):
        def local_step(self, step):
            seen.add(step.forward().logits.dtype)
            super().local_step(step)

    loop = run_federation(lambda: Watches(conv_net()), rounds=1, trainer={"precision": "bf16-mixed"})
    assert seen == {torch.bfloat16}
    floats = [w for w in weights_after(loop).values() if w.is_floating_point()]
    assert {w.dtype for w in floats} == {torch.float32}
    assert all(torch.isfinite(w).all() for w in floats)


class Volume(nn.Module):
    """A convolution over channels, too, whose weight has five dimensions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None])[:, 0]


class AsksInReceive(FedAvg):
    """Notes what it knows of a fit where a message comes in, and where it has been fitted."""

    asked = ()

    def receive(self, message, data):
        super().receive(message, data)
        self.note("receive")

    def send(self, data):
        self.note("send")
        return super().send(data)

    def note(self, place):
        fit = self.fit
        type(self).asked += ((place, fit.epochs, fit.epoch, fit.num_batches > 0, fit.num_steps > 0, fit.lr > 0),)


def test_a_client_knows_of_no_fit_before_its_own(mlp, run_federation):
    """What was fitted before it is another client, and on several workers yet another."""
    AsksInReceive.asked = ()
    run_federation(lambda: AsksInReceive(mlp()), rounds=2, local_epochs=2)
    sent = {own for own in AsksInReceive.asked if own[0] == "send"}
    assert sent == {("send", 2, 1, True, True, True)}
    assert {own for own in AsksInReceive.asked if own[0] == "receive"} == {("receive", 0, 0, False, False, False)}


class Views(nn.Module):
    """Flattens as many networks do, which maps whose channels are last do not allow."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(108, 4)

    def forward(self, x):
        return self.fc(self.conv(x).view(-1, 108))


def test_images_are_left_as_they_are_for_a_network_that_flattens_by_view(run_federation):
    make = lambda: FedAvg(WrappedModel((1, 8, 8), 4, Views(), "fc"))  # noqa: E731
    loop, other = (run_federation(make, rounds=2, channels_last=last) for last in (True, False))
    (said,) = (line for line in remarks(loop) if "channels_last" in line)
    assert said.startswith("federation.channels_last: off, for view of WrappedModel (test_runner.py:")
    assert not [line for line in remarks(other) if "channels_last" in line]
    found, wanted = weights_after(loop), weights_after(other)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class ViewsMaps(FedAvg):
    def local_step(self, step):
        self.model.features(step.x)[0].view(len(step.x), -1)
        super().local_step(step)


def test_a_method_that_views_maps_hears_what_to_say(conv_net, run_federation):
    with pytest.raises(ClientError, match=r"with channels last: say reshape \(test_runner.py"):
        run_federation(lambda: ViewsMaps(conv_net()), rounds=1)


def test_of_flat_and_deep_convolutions_the_flat_ones_have_channels_last(conv_net, run_federation):
    def make():
        model = conv_net()
        model.body.stages[0].append(Volume())
        return FedAvg(model)

    ends = [run_federation(make, rounds=2, channels_last=last) for last in (True, False)]
    flat, _, _, _, deep = ends[0].runner.modules[0].method.model.body.stages[0]
    assert flat.weight.stride() == (9, 1, 3, 1)
    assert deep.conv.weight.dim() == 5
    shared, plain = (end.exchange.inbox(0).weights for end in ends)
    assert all(torch.allclose(shared[name], plain[name], atol=1e-5) for name in plain)


def test_lightning_callbacks_of_the_trainer_are_called(mlp, run_federation):
    calls = []

    class Counts(L.Callback):
        def on_train_start(self, trainer, pl_module):
            calls.append("start")

        def on_train_end(self, trainer, pl_module):
            calls.append(sorted(trainer.callback_metrics))

    run_federation(lambda: FedAvg(mlp()), rounds=2, trainer={"callbacks": [Counts()]})
    assert calls == ["start", ["loss", "loss/cross_entropy"]] * 8


def test_early_stopping_of_fits_begins_anew_with_every_client(mlp, run_federation):
    seen, ended = [], []

    class Stopper(EarlyStopping):
        def on_train_start(self, trainer, pl_module):
            seen.append((self.wait_count, float(self.best_score), self.stopped_epoch))
            super().on_train_start(trainer, pl_module)

        def on_train_end(self, trainer, pl_module):
            ended.append(trainer.current_epoch)

    stopper = Stopper(monitor="loss", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    run_federation(lambda: FedAvg(mlp()), 2, local_epochs=5, trainer={"callbacks": [stopper]})
    assert seen == [(0, float("inf"), 0)] * 8
    assert ended == [2] * 8


def test_a_timer_of_fits_begins_anew_with_every_client(mlp, run_federation):
    """The first fit's end would keep every later one from its first step."""
    timer, seen = Timer("00:01:00:00"), []

    class Watch(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            seen.append(timer.time_elapsed())

        def on_train_end(self, trainer, pl_module):
            assert 0 < timer.time_elapsed() < 60

    run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": [Watch(), timer]})
    assert seen == [0] * 4


def test_who_watches_steps_sees_mini_batches_one_by_one(mlp, run_federation):
    """Or a mean of what it logs would not be over samples."""
    sizes = []

    class Norms(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norm = float(sum(parameter.grad.norm() for parameter in pl_module.parameters()))
            sizes.append((norm, len(trainer.fit_loop.epoch_loop._results.batch[1])))
            pl_module.log("norm", norm, on_step=False, on_epoch=True)

        def on_train_end(self, trainer, pl_module):
            mean = sum(norm * size for norm, size in sizes) / sum(size for _, size in sizes)
            assert float(trainer.callback_metrics["norm"]) == pytest.approx(mean, rel=1e-5)
            sizes.clear()

    run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": [Norms()]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_gpu_that_is_not_there_is_refused(accelerator):
    with pytest.raises(ConfigError, match=r"trainer\.accelerator.*no GPU"):
        make_trainer({"accelerator": accelerator})


def test_fits_do_not_say_which_gpus_there_are(caplog, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    make_trainer({"accelerator": "cpu"})
    CUDAAccelerator.set_nvidia_flags(0)  # as every fit on one does
    assert "CUDA_VISIBLE_DEVICES" not in caplog.text


@pytest.mark.parametrize("flags", [{"precision": "12"}, {"nonsense": 1}, {"limit_train_batches": -1}])
def test_flag_that_lightning_refuses_is_refused(flags):
    with pytest.raises(ConfigError, match="trainer"):
        make_trainer({"accelerator": "cpu", **flags})


@pytest.mark.parametrize(("devices", "rule"), [(1, "must be 1: "), (2, r"must be the machines of the run \(1\); ")])
def test_machines_that_nobody_has_started_are_refused_instead_of_waited_for(devices, rule):
    with pytest.raises(ConfigError, match=rf"^trainer\.num_nodes: {rule}.*torchrun or SLURM.*got 2$"):
        make_trainer({"accelerator": "cpu", "devices": devices, "num_nodes": 2})


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"lr": 0.1, "momentum": -1}])
def test_optimizer_that_torch_refuses_is_refused_before_training(mlp, sgd, set_up_federation, options):
    with pytest.raises(ConfigError, match="optimizer"):
        set_up_federation(lambda: FedAvg(mlp()), optimizer=sgd(**options))


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.SGD(own, lr=0.1, differentiable=True),
        lambda own: torch.optim.LBFGS(own),
        lambda own: torch.optim.SparseAdam(own),
    ],
)
def test_optimizer_that_cannot_step_is_refused_before_training(mlp, set_up_federation, make):
    with pytest.raises(ConfigError, match=r"^optimizer: .* cannot step in a fit: "):
        set_up_federation(lambda: Local(mlp()), optimizer=make)


class LooksUp(SplitModel):
    """Pixels by how bright they are, whose gradients are sparse."""

    def __init__(self):
        super().__init__(LooksUpBody(), nn.Linear(5, 4), 5, 4, (1, 8, 8))


class LooksUpBody(Body):
    def __init__(self):
        super().__init__([], nn.EmbeddingBag(3, 5, sparse=True))

    def forward_features(self, x):
        return [], self.neck((x.flatten(1).sign() + 1).long())

    def forward(self, x):
        return self.forward_features(x)[1]


@pytest.mark.parametrize(("kind", "refused"), [("Adam", "sparse"), ("SparseAdam", "dense")])
def test_optimizer_that_takes_no_gradients_of_a_kind_is_refused_before_training(set_up_federation, kind, refused):
    with pytest.raises(
        ConfigError, match=f"^optimizer: {kind} cannot step in a fit: {kind} does not support {refused}"
    ):
        set_up_federation(lambda: FedAvg(LooksUp()), optimizer=lambda own: getattr(torch.optim, kind)(own))


def test_sparse_gradients_train(run_federation, sgd):
    loop = run_federation(lambda: FedAvg(LooksUp()), rounds=3, optimizer=sgd(0.5))
    assert loop.diary.rows[-1]["loss"] < loop.diary.rows[0]["loss"]


class Own(torch.optim.Optimizer):
    """Somebody's own, which lacks something."""

    def __init__(self, parameters, rate=0.1, lr=None, fails=False):
        super().__init__(parameters, {"rate": rate} if lr is None else {"lr": lr})
        self.fails = fails

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("no such slope")


class Stepless(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Own, r"Own's parameter groups must have an 'lr', which"),
        (lambda own: Own(own, lr=0.1, fails=True), r"Own cannot step in a fit: no such slope; it must define step\("),
        (Stepless, r"Stepless cannot step in a fit: NotImplementedError; it must define step\(closure=None\)$"),
    ],
    ids=["no lr", "raises", "no step"],
)
def test_own_optimizer_that_lacks_something_is_refused_before_training(mlp, set_up_federation, make, said):
    with pytest.raises(ConfigError, match=f"^optimizer: {said}"):
        set_up_federation(lambda: Local(mlp()), optimizer=make)


def test_models_are_kept_when_a_client_is_last_fitted(mlp, run_federation, tmp_path, assert_identical):
    loop = run_federation(lambda: FedRep(mlp()), rounds=4, participation=0.5, folder=tmp_path)
    last = {client: round for round, client in loop.diary.sent}
    for client in range(4):
        file = tmp_path / "models" / f"{client:05d}.pt"
        assert file.exists() == (client in last)
        if client in last:
            state = torch.load(file, weights_only=True)
            sent = loop.diary.sent[last[client], client].weights
            assert_identical({name: state[name] for name in sent}, sent)


def test_no_models_are_kept_where_the_policy_says_so(mlp, run_federation, tmp_path):
    from fl_lightning.federation.checkpoint import CheckpointPolicy

    run_federation(lambda: FedRep(mlp()), rounds=1, folder=tmp_path, checkpoint=CheckpointPolicy(models=False))
    assert not (tmp_path / "models").exists()
    assert (tmp_path / "checkpoints").exists()
