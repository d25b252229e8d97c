"""LightningModules of tutorials, unmodified, federated by methods that know nothing of them."""

import contextlib
import copy
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tutorial_modules import (
    GAN,
    Autoencoder,
    AutoencoderClassifier,
    DigitClassifier,
    FineTuned,
    MeteredModel,
    Mixup,
    OneCycleNet,
    PlainModel,
    Tabular,
    TextClassifier,
    TwoOptimizers,
)

import fl_lightning
from fl_lightning.core.finetuning import FineTune
from fl_lightning.errors import ConfigError
from fl_lightning.federation.graphs import DirectedGraph
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.losses.gaussian_mixture import GaussianMixture
from fl_lightning.methods.apple import APPLE
from fl_lightning.methods.dfedpgp import DFedPGP
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedetf import FedETF
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedpac import FedPAC
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models.lightning_module import WrappedLightningModule
from fl_lightning.models.split import Body
from fl_lightning.models.wrapped import WrappedModel

SHAPE = (1, 8, 8)
IMAGES = (
    DigitClassifier,
    AutoencoderClassifier,
    OneCycleNet,
    MeteredModel,
    FineTuned,
    PlainModel,
    Tabular,
    TwoOptimizers,
    Mixup,
)
METHODS = {"FedAvg": FedAvg, "FedProx": lambda model: FedProx(model, mu=0.5), "FedRep": FedRep}


def wrapped(module, head=None, shape=SHAPE, **options):
    return WrappedLightningModule(shape, 4, module, head, **options)


def weights(loop):
    return {name: tensor.clone() for name, tensor in loop.exchange.global_message().weights.items()}


def assert_runs(loop):
    assert [row["round"] for row in loop.diary.rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)
    assert loop.diary.rows[-1]["Local-T"] >= 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("module", IMAGES, ids=lambda module: module.__name__)
def test_tutorial_runs_unmodified(module, name, run_federation):
    assert_runs(run_federation(lambda: METHODS[name](wrapped(module())), rounds=2, local_epochs=2))


@pytest.mark.parametrize("name", METHODS)
def test_texts_run_unmodified(name, make_data, run_federation):
    def to_tokens(arrays):
        generator = torch.Generator().manual_seed(0)
        arrays.x = torch.randint(1, 30, (len(arrays.y), 6), generator=generator)
        arrays.vocabulary_size = 30

    data = make_data(edit=to_tokens)
    assert_runs(run_federation(lambda: METHODS[name](wrapped(TextClassifier(), shape=(6,))), rounds=2, data=data))


# --- what is trained --------------------------------------------------------------------------------------------------


class Twin(nn.Module):
    """What `Sgd` is, without Lightning."""

    def __init__(self):
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.hidden(x.flatten(1)).relu())


class Sgd(L.LightningModule):
    """Cross-entropy and SGD, by automatic or by manual optimization."""

    def __init__(self, manual=False, momentum=0.5):
        super().__init__()
        self.automatic_optimization = not manual
        self.momentum = momentum
        self.hidden, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.hidden(x.flatten(1)).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=self.momentum)


@pytest.mark.parametrize("kind", [FedAvg, lambda m: FedProx(m, mu=1.0), FedRep], ids=["FedAvg", "FedProx", "FedRep"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_training_step_and_optimizer_are_the_modules_own(kind, manual, run_federation, sgd):
    ours = run_federation(lambda: kind(wrapped(Sgd(manual), "fc")), rounds=2)
    same = run_federation(
        lambda: kind(WrappedModel(SHAPE, 4, Twin(), "fc")), rounds=2, optimizer=sgd(lr=0.2, momentum=0.5)
    )
    for (name, own), other in zip(weights(ours).items(), weights(same).values(), strict=True):
        assert torch.allclose(own, other, atol=1e-6), name
    rows = zip(ours.diary.rows, same.diary.rows, strict=True)
    for own, other in rows:
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert own["Local-T"] == other["Local-T"]


class InTurn(Sgd):
    """Two optimizers in turn, each with the other's parameters at rest, by Lightning's hooks or by its context."""

    def __init__(self, context):
        super().__init__(manual=True)
        self.context = context

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, learns, rests in zip(self.optimizers(), ("fc", "hidden"), ("hidden", "fc"), strict=True):
            optimizer.zero_grad()
            with optimizer.toggle_model() if self.context else self.toggled(optimizer):
                assert all(parameter.requires_grad for parameter in getattr(self, learns).parameters())
                assert not any(parameter.requires_grad for parameter in getattr(self, rests).parameters())
                loss = F.cross_entropy(self(x), y)
                self.manual_backward(loss)
            assert all(parameter.requires_grad for parameter in self.parameters())
            optimizer.step()
        return loss

    @contextlib.contextmanager
    def toggled(self, optimizer):
        self.toggle_optimizer(optimizer)
        yield
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.2) for part in (self.fc, self.hidden)]


def test_optimizers_rest_in_turn_as_in_lightning(run_federation):
    make = lambda context: lambda: FedAvg(wrapped(InTurn(context), "fc"))  # noqa: E731
    by_context, by_hooks = (run_federation(make(own), rounds=2) for own in (True, False))
    assert_runs(by_context)
    for name, own in weights(by_context).items():
        assert torch.equal(own, weights(by_hooks)[name]), name


class ByBatch(Sgd):
    """Weighs a mini-batch by its number, and halves its gradients on their way."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + batch_idx)

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad /= 2


def test_a_copy_that_learns_beside_the_module_is_trained_like_it(run_federation, set_up_federation, sgd):
    """Ditto without a pull is Local beside FedAvg, whatever the section `optimizer` says, in any order of clients."""
    local = run_federation(lambda: Local(wrapped(ByBatch(), "fc")), rounds=2)
    loop = set_up_federation(lambda: Ditto(wrapped(ByBatch(), "fc"), weight=0.0), rounds=2, optimizer=sgd(9.0))
    loop.fit_order = lambda clients: sorted(clients, reverse=True)
    loop.run()
    for client in range(4):
        kept, alone = loop.runner.pool.get(client), local.runner.pool.get(client)
        for name, tensor in alone.items():
            assert torch.equal(kept[name.replace("model.", "personal.", 1)], tensor), name


def test_parts_without_a_parameter_of_the_modules_are_trained_by_its_optimizer(run_federation, sgd):
    """The section `optimizer` is not used: APPLE's relations have a rate of their own, but the module's momentum."""
    kept = [
        run_federation(lambda: APPLE(wrapped(Sgd(), "fc")), rounds=1, optimizer=optimizer).runner.pool.get(0)
        for optimizer in (sgd(), sgd(momentum=0.9))
    ]
    assert torch.equal(*(own["relations"] for own in kept))


def test_the_configurations_optimizer_is_taken_if_so_asked(run_federation, sgd):
    make = lambda **options: lambda: FedAvg(wrapped(Sgd(momentum=0.0), **options))  # noqa: E731
    own = run_federation(make(), rounds=1, optimizer=sgd(lr=0.01))
    configured = run_federation(make(optimizer="configured"), rounds=1, optimizer=sgd(lr=0.2))
    other = run_federation(make(optimizer="configured"), rounds=1, optimizer=sgd(lr=0.01))
    assert all(torch.equal(tensor, weights(configured)[name]) for name, tensor in weights(own).items())
    assert not all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(own).items())


def test_head_and_body_are_parted_where_the_head_is(run_federation):
    loop = run_federation(lambda: FedRep(wrapped(MeteredModel(), "layers.out")), rounds=1)
    assert [name.removeprefix("model.body.neck.") for name in weights(loop)] == [
        "layers.hidden.weight",
        "layers.hidden.bias",
    ]
    assert set(loop.runner.pool.get(0)) == {"model.head.weight", "model.head.bias"}


class TwoNames(L.LightningModule):
    """Its head stands in the network, and beside it."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 4))
        self.classifier = self.network[-1]

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_head_of_two_names_is_refused():
    """The other one counted as the body, so that FedRep and FedPer sent the head."""
    with pytest.raises(ConfigError, match=r'^model\.head: ".*" must not share weights with the rest of the module'):
        WrappedLightningModule(SHAPE, 4, TwoNames())


class Called(TwoNames):
    """Hands its head what it takes by its name, or through a hook that doubles it."""

    def __init__(self, by_name):
        super().__init__()
        self.network, self.classifier, self.by_name = self.network[:-1], self.network[-1], by_name
        if not by_name:
            self.classifier.register_forward_pre_hook(lambda layer, given: (2 * given[0] + 1,))

    def forward(self, x):
        z = self.network(x)
        return self.classifier(input=z) if self.by_name else self.classifier(z)


@pytest.mark.parametrize("by_name", [True, False])
def test_predictions_are_the_modules_own(by_name, run_federation):
    """A hook before the head acted twice in them; what came by its name was an IndexError."""
    module, x = Called(by_name).eval(), torch.randn(3, *SHAPE)
    torch.testing.assert_close(wrapped(module).eval()(x), module(x))
    run_federation(lambda: FedAvg(wrapped(Called(by_name))), rounds=1)


def test_frozen_parts_stay_as_they_are(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(FineTuned())), rounds=2)
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    moved = {name for name, tensor in weights(loop).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if "classifier" in name or ".fc." in name or "head" in name}


def test_hooks_are_called_as_in_a_fit(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(PlainModel())), rounds=1, local_epochs=2)
    loop.run()
    called = loop.runner.modules[0].own.joined.module.called
    steps = loop.data.clients[0].num_steps(4)
    batches = [text for index in range(steps) for text in (f"batch {index}", f"batch {index} done")]
    epochs = [[f"epoch {epoch} of 2", *batches, "epoch done"] for epoch in range(2)]
    last = called[-called[::-1].index("start") - 1 :]
    first = called[called.index("start") :][: len(epochs[0]) * 2 + 2]
    assert first == ["start", *epochs[0], *epochs[1], "end"]
    assert last[-1] == "end"


def test_a_cycle_of_learning_rates_ends_with_the_fit(set_up_federation):
    rates = []

    class Cycle(OneCycleNet):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])

    loop = set_up_federation(lambda: FedAvg(wrapped(Cycle())), rounds=1, local_epochs=2, lr_decay=1.0)
    loop.run()
    steps = 2 * loop.data.clients[0].num_steps(4)
    own = rates[:steps]
    assert max(own) == pytest.approx(0.1, rel=0.05)
    assert own[-2] < 0.001  # the rate of the last step
    assert rates[steps] > own[-2]  # the next client begins anew


def test_a_cycle_of_learning_rates_ends_with_a_fit_that_is_cut_short(set_up_federation):
    """`local_steps` may end in the middle of an epoch; the module is told so beforehand."""
    seen = []

    class Cycle(OneCycleNet):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            lr = self.optimizers().param_groups[0]["lr"]
            seen.append((self.trainer.estimated_stepping_batches, lr))

    loop = set_up_federation(lambda: FedAvg(wrapped(Cycle())), rounds=1, local_steps=7)
    loop.run()
    own = seen[:7]
    assert {total for total, _ in own} == {7}
    assert max(rate for _, rate in own) > 10 * own[-2][1]  # the rate of the last step


@pytest.mark.parametrize("scheduler", ["linear", "lambda", "cycle"])
def test_a_term_with_parameters_has_the_modules_schedule(set_up_federation, scheduler):
    rates = []

    class Scheduled(Tabular):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if scheduler == "linear":
                return [optimizer], [LinearLR(optimizer, 0.1, total_iters=4)]
            if scheduler == "lambda":
                return [optimizer], [LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))]
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

        def on_train_epoch_end(self):
            groups = self.optimizers().param_groups
            rates.append(([group["lr"] for group in groups], sum(len(group["params"]) for group in groups)))

    make = lambda: FedAvg(wrapped(Scheduled()), extra_terms=[GaussianMixture()])  # noqa: E731
    loop = set_up_federation(make, rounds=2, local_epochs=2, lr_decay=0.9)
    loop.run()
    own = sum(1 for _ in wrapped(Scheduled()).parameters())
    assert all(len(rate) == 1 and count > own for rate, count in rates)
    assert len({rate[0] for rate, _ in rates}) > 2


def test_fednova_reads_the_normaliser_off_the_modules_own_optimizer(set_up_federation, sgd):
    class Momentum(Tabular):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    configured = sgd(0.05, momentum=0.9)
    own, other = (
        set_up_federation(lambda net=net: FedNova(net()), rounds=1, optimizer=optimizer)
        for net, optimizer in (
            (lambda: wrapped(Momentum()), sgd(0.1)),
            (lambda: wrapped(Momentum(), optimizer="configured"), configured),
        )
    )
    for loop in (own, other):
        loop.run()
    for client in range(4):
        a, b = (loop.diary.sent[1, client].artifacts["normaliser"] for loop in (own, other))
        assert a.item() > 1.2 * own.data.clients[client].num_steps(4)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", [SCAFFOLD, FedNova])
def test_methods_that_reckon_with_one_learning_rate_say_so(run_federation, method):
    class Groups(Tabular):
        def configure_optimizers(self):
            groups = [{"params": self.body.parameters()}, {"params": self.out.parameters(), "lr": 0.001}]
            return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(ConfigError, match=r"have several; say optimizer: configured, got \[0.001, 0.1\]"):
        run_federation(lambda: method(wrapped(Groups())), rounds=1)
    with pytest.raises(ConfigError, match="have a schedule; say optimizer: configured"):
        run_federation(lambda: method(wrapped(OneCycleNet())), rounds=1)
    assert_runs(run_federation(lambda: method(wrapped(Groups(), optimizer="configured")), rounds=2))


def test_decay_from_round_to_round_reaches_schedulers(set_up_federation):
    rates = []

    class Cycle(OneCycleNet):
        def on_train_epoch_end(self):
            rates.append(self.optimizers().param_groups[0]["max_lr"])

    set_up_federation(lambda: FedAvg(wrapped(Cycle())), rounds=2, lr_decay=0.5).run()
    assert (rates[0], rates[-1]) == (pytest.approx(0.1), pytest.approx(0.05))


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # which torch 2.6's SequentialLR itself still passes
@pytest.mark.parametrize("kind", ["warm-up, then cosine", "chained", "cyclic", "averaging"])
def test_decay_from_round_to_round_reaches_every_part_of_a_schedule(kind, set_up_federation):
    """Schedules of several stood at their first round's rates again from their second stage on."""
    rates = []

    class Stages(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            of = torch.optim.lr_scheduler
            scheduler = {
                "warm-up, then cosine": lambda: of.SequentialLR(
                    optimizer, [of.LinearLR(optimizer, 0.5, total_iters=2), of.CosineAnnealingLR(optimizer, 4)], [2]
                ),
                "chained": lambda: of.ChainedScheduler([of.LambdaLR(optimizer, lambda step: 1 / (1 + step))]),
                "cyclic": lambda: of.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
                "averaging": lambda: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=3),
            }[kind]()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])

    set_up_federation(lambda: FedAvg(wrapped(Stages())), rounds=2, lr_decay=0.5, local_epochs=2).run()
    half = len(rates) // 2
    assert half > 8
    assert rates[half:] == pytest.approx([rate / 2 for rate in rates[:half]])
    assert len(set(rates[:half])) > 2


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation: gradients anew at a point uphill."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.move(0.05)
        self.zero_grad()
        closure()
        self.move(-0.05)

    def move(self, size):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=size)


class Twice(torch.optim.SGD):
    """Asks for gradients twice."""

    def step(self, closure=None):
        closure()
        super().step()
        return closure()


@pytest.mark.parametrize("kind", [Sharpness, Twice])
def test_an_optimizer_that_needs_gradients_anew_is_refused_before_training(kind, set_up_federation, mlp):
    """It was stepped on the gradients there were: SAM went uphill, or was SGD, in silence."""

    class Needs(Scheduled):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.1)

    said = rf"{kind.__name__} cannot step in a fit: its step asks for gradients anew \(a closure\)"
    with pytest.raises(ConfigError, match=rf"^model\.module: {said}"):
        set_up_federation(lambda: FedAvg(wrapped(Needs())), rounds=1)
    with pytest.raises(ConfigError, match=rf"^optimizer: {said}"):
        set_up_federation(lambda: FedAvg(mlp()), rounds=1, optimizer=kind)


def test_a_scheduler_that_watches_a_value_goes_by_the_epoch(set_up_federation):
    class Watches(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": plateau, "interval": "step", "monitor": "loss"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    with pytest.raises(ConfigError, match=r"^model\.module: Watches's ReduceLROnPlateau must have interval: epoch"):
        set_up_federation(lambda: FedAvg(wrapped(Watches())), rounds=1)


@pytest.mark.parametrize("where", ["__init__", "setup", "configure_model"])
def test_parts_that_a_module_puts_into_eval_mode_stay_in_it(where, set_up_federation):
    """As in Lightning's fit: batch norm of a network that was trained before must not move."""
    modes = []

    class Rests(Scheduled):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.rest("__init__")

        def setup(self, stage):
            self.rest("setup")

        def configure_model(self):
            self.rest("configure_model")

        def rest(self, here):
            self.norm.train(self.norm.training and here != where)

        def forward(self, x):
            return self.head(self.norm(self.net(x)))

        def on_train_batch_start(self, batch, batch_idx):
            modes.append((self.training, self.net.training, self.norm.training))

    loop = set_up_federation(lambda: FedAvg(wrapped(Rests())), rounds=2)
    loop.run()
    assert set(modes) == {(True, True, False)}
    (counted,) = (value for name, value in loop.runner.modules[0].entries.items() if "num_batches" in name)
    assert counted == 0


class CopiesAtEnd(FedAvg):
    """Keeps a copy of the model that was trained."""

    def on_fit_end(self):
        super().on_fit_end()
        kept = copy.deepcopy(self.model)
        assert all(
            torch.equal(one, other) for one, other in zip(kept.parameters(), self.model.parameters(), strict=True)
        )


def test_a_module_can_be_copied_behind_its_fit(run_federation):
    run_federation(lambda: CopiesAtEnd(wrapped(Scheduled())), rounds=2)


def test_the_end_of_a_mini_batch_is_told_its_loss_as_lightning_does(set_up_federation):
    outputs = []

    class Ends(Scheduled):
        def on_train_batch_end(self, given, batch, batch_idx):
            outputs.append(given)

    trainer = {"accumulate_grad_batches": 2}
    set_up_federation(lambda: FedAvg(wrapped(Ends())), rounds=1, trainer=trainer).run()
    assert {tuple(own) for own in outputs} == {("loss",)}
    assert all(0 < own["loss"] < 1.5 and not own["loss"].requires_grad for own in outputs)


def test_a_limit_of_steps_is_refused_where_a_module_steps_by_itself(set_up_federation):
    with pytest.raises(ConfigError, match=r"^trainer\.max_steps: must be left out: the module steps by itself"):
        set_up_federation(lambda: FedAvg(wrapped(Sgd(manual=True))), rounds=1, trainer={"max_steps": 3})


def test_module_resumes_exactly(assert_resumes):
    assert_resumes(lambda: FedRep(wrapped(Tabular())), stopped_after=1)


def test_module_is_whole_again_only_while_it_is_asked():
    model = wrapped(DigitClassifier())
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == 4
    x = torch.randn(3, *SHAPE)
    model.eval()
    assert torch.allclose(model(x).log_softmax(1), DigitClassifier.forward(whole(model), x), atol=1e-6)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not torch.equal(twin(x), model(x))


def whole(model):
    model.own.joined.__enter__()
    return model.own.joined.module


def test_terms_that_see_embeddings_are_added_to_an_automatic_step(run_federation):
    loop = run_federation(lambda: MOON(wrapped(Sgd(), "fc")), rounds=2)
    assert "loss/model_contrast" in loop.diary.rows[-1]


def test_three_lines_federate_a_module(trial, capsys):
    module = {"class_path": "tutorial_modules.PlainTen", "init_args": {"width": 6}}
    lines = {"class_path": "WrappedLightningModule", "init_args": {"module": module}}
    run = trial(name="three-lines", model=lines, method="FedProx", method__mu=0.1, federation__rounds=1).fit()
    said = capsys.readouterr().err
    assert "optimizer: not used, the model brings its own" in said
    assert run.evaluate()["Local-T"] == run.summary["last"]["Local-T"]
    with pytest.raises(ConfigError, match="--trust tutorial_modules"):
        fl_lightning.load(run.folder, client=1)
    model = fl_lightning.load(run.folder, client=1, trust=["tutorial_modules"])
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_a_list_says_whose_optimizer_is_not_used(trial, capsys):
    """It said so of all the list, of which the others do use it."""
    module = {"class_path": "tutorial_modules.PlainTen", "init_args": {"width": 6}}
    models = ["MLP", {"class_path": "WrappedLightningModule", "init_args": {"module": module}}]
    trial(name="whose", model=models, method="Local", federation__rounds=1).fit()
    said = capsys.readouterr().err
    line = "optimizer: not used for model.1, which brings its own; its init_args.optimizer: configured takes this one"
    assert [each for each in said.splitlines() if "optimizer" in each] == [line]


# --- what cannot be --------------------------------------------------------------------------------------------------


class NoStep(Sgd):
    def training_step(self, batch, batch_idx):
        return torch.zeros(())


class Wrong(Sgd):
    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return F.cross_entropy(self(x), y)


class Several(Sgd):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


class Behind(Sgd):
    def forward(self, x):
        return super().forward(x).exp() + x.mean()


class Averaged(Sgd):
    """Answers by a running average, which its training does not pass."""

    def __init__(self):
        super().__init__()
        self.average = nn.Linear(64, 4)

    def forward(self, x):
        return super().forward(x) if self.training else self.average(x.flatten(1))


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (GAN, {}, "model.module: GAN fails on samples of this shape"),
        (Autoencoder, {}, r"model.module: Autoencoder's forward must return logits of shape \[B, 4\] for 4 classes"),
        (NoStep, {}, "model.module: NoStep's training_step must return a loss with a gradient"),
        (Wrong, {}, "model.module: Wrong's training step fails \\(ValueError: not enough values"),
        (Several, {}, "model.module: Several has 2 optimizers, which needs self.automatic_optimization = False"),
        (Behind, {}, "model.head: name the layer of Behind that gives the logits"),
        (Averaged, {}, "model.head: \"average\" gives Averaged's logits in eval mode, and forward must come to it"),
        (Sgd, {"head": "hidden"}, 'model.head: "hidden" must give Sgd\'s logits'),
        (Sgd, {"head": "fcc"}, r"model.head: must name a submodule of Sgd \(nearest: fc"),
        (lambda: Sgd(manual=True), {"optimizer": "configured"}, "model.optimizer: configured needs a module of auto"),
    ],
    ids=["GAN", "coder", "no loss", "batch", "optimizers", "behind", "average", "not logits", "misspelt", "manual"],
)  # fmt: skip
def test_what_is_no_classifier_is_refused_in_one_line(module, options, said):
    with pytest.raises(ConfigError, match=said) as caught:
        wrapped(module(), **options)
    assert len(str(caught.value)) < 300


def test_layers_that_are_compiled_are_not_said_to_be_missing():
    class Compiled(Sgd):
        def __init__(self):
            super().__init__()
            self.rest = torch.compile(nn.Sequential(self.hidden, self.fc), backend="eager")

        def forward(self, x):
            return self.rest(x.flatten(1))

    with pytest.raises(ConfigError, match=r"^model.head: .*what rest calls cannot be seen.* federation.compile: true$"):
        wrapped(Compiled(), None)


def test_a_method_with_another_head_is_refused():
    with pytest.raises(ConfigError, match="model: FedETF replaces the head, which a module's own step would not use"):
        FedETF(wrapped(Sgd()))


class OwnHead(FedAvg):
    def __init__(self, model):
        super().__init__(model)
        model.head = copy.deepcopy(model.head)


class OwnBody(FedAvg):
    def __init__(self, model):
        super().__init__(model)
        model.body = Body([], nn.Sequential(model.body, nn.Tanh()))


@pytest.mark.parametrize("kind", [OwnHead, OwnBody])
def test_a_method_of_ones_own_that_puts_parts_in_the_modules_place_is_refused(kind, set_up_federation):
    with pytest.raises(ConfigError, match=f"^model: {kind.__name__} puts a head or body of its own in the model's"):
        set_up_federation(lambda: kind(wrapped(Sgd())))


def test_manual_optimization_is_refused_where_a_method_cannot_add_its_loss(set_up_federation, run_federation):
    manual = lambda kind: lambda: kind(wrapped(Sgd(manual=True), "fc"))  # noqa: E731
    with pytest.raises(ConfigError, match="model: MOON's loss model_contrast needs automatic optimization"):
        set_up_federation(manual(MOON))
    with pytest.raises(ConfigError, match=r"trainer\.accumulate_grad_batches: must be left out"):
        set_up_federation(manual(FedAvg), trainer={"accumulate_grad_batches": 2})
    with pytest.raises(ConfigError, match=r"trainer\.gradient_clip_val: must be left out"):
        set_up_federation(manual(FedAvg), trainer={"gradient_clip_val": 1.0})
    with pytest.raises(ConfigError, match="model: SCAFFOLD's loss control needs automatic optimization"):
        set_up_federation(manual(SCAFFOLD))
    with pytest.raises(
        ConfigError, match="model: PerFedAvg makes steps of its own, but the module has stepped by itself"
    ):
        run_federation(manual(PerFedAvg), rounds=1)
    assert_runs(run_federation(manual(FedNova), rounds=2))


def test_scaffold_corrects_after_a_modules_own_steps(run_federation):
    make = lambda manual: lambda: SCAFFOLD(wrapped(Sgd(manual), "fc"), "step")  # noqa: E731
    automatic, manual = (run_federation(make(own), rounds=3) for own in (False, True))
    assert automatic.exchange.global_message().artifacts["control"].any()
    torch.testing.assert_close(weights(manual), weights(automatic), rtol=1e-5, atol=1e-6)


def test_trainer_says_what_it_is_not():
    class Asks(Sgd):
        def training_step(self, batch, batch_idx):
            return self.trainer.datamodules

    with pytest.raises(ConfigError, match=r"self\.trainer\.datamodules is not there in a federated fit"):
        wrapped(Asks(), "fc")


class Scheduled(L.LightningModule):
    """A network under a schedule of its own: constant, or down to nothing over the fit."""

    def __init__(self, falls=False):
        super().__init__()
        self.falls = falls
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = LinearLR(optimizer, 1.0, 0.0, steps) if self.falls else LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_phase_keeps_its_learning_rate_under_a_schedule_of_the_modules_own(run_federation):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        make = lambda: FedPAC(wrapped(Scheduled()), head_epochs=1, body_epochs=1, head_lr=0.01)  # noqa: E731
        run_federation(make, 2, lr_decay=0.5)
    finally:
        hook.remove()
    assert {round(rate, 9) for rate in rates} == {0.01, 0.3, 0.005, 0.15}


@pytest.mark.parametrize("warms_up", [False, True])
def test_what_a_phase_makes_of_its_rate_stays_under_a_schedule_of_the_modules_own(warms_up, set_up_federation):
    """DFedPGP's body steps at η/μ: from the second step on a schedule took it back to η."""
    rates = []

    class Halved(DFedPGP):
        def receive(self, message, data):
            super().receive(message, data)
            self.mass.fill_(0.5)

    class Steps(Scheduled):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            share = (lambda step: min(1.0, step / 2)) if warms_up else (lambda step: 1.0)
            return {**made, "lr_scheduler": {"scheduler": LambdaLR(made["optimizer"], share), "interval": "step"}}

        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    set_up_federation(lambda: Halved(wrapped(Steps()), head_epochs=0), exchange=DirectedGraph(degree=1)).advance()
    assert rates[:4] == pytest.approx([0.0, 0.3, 0.6, 0.6] if warms_up else [0.6] * 4)


@pytest.mark.parametrize(("accumulate", "every"), [(1, 3), (2, 2), (3, 2)])
def test_a_scheduler_goes_by_the_mini_batches_of_an_epoch(accumulate, every, set_up_federation):
    """As in Lightning's fit: every nth of each epoch, if a step is due there; it was every nth step of the fit."""
    rates = []

    class Halves(Scheduled):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            halving = torch.optim.lr_scheduler.StepLR(made["optimizer"], 1, 0.5)
            return {**made, "lr_scheduler": {"scheduler": halving, "interval": "step", "frequency": every}}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])

    trainer = {"accumulate_grad_batches": accumulate}
    loop = set_up_federation(lambda: FedAvg(wrapped(Halves())), rounds=1, local_epochs=2, trainer=trainer)
    loop.run()
    count = loop.data.clients[0].num_steps(4)
    expected, rate = [], 0.3
    for _ in range(2):
        for number in range(1, count + 1):
            due = number % accumulate == 0 or number == count
            rate = rate / 2 if due and number % every == 0 else rate
            expected.append(rate)
    assert count > every
    assert rates[: 2 * count] == pytest.approx(expected)


def test_an_optimizer_that_needs_a_closure_is_refused_before_training(set_up_federation):
    class Needs(Scheduled):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match=r"^model\.module: LBFGS cannot step in a fit: its step needs a closure"):
        set_up_federation(lambda: FedAvg(wrapped(Needs())), rounds=1)


@pytest.mark.parametrize("module", [OneCycleNet, lambda: Scheduled(falls=True)], ids=["OneCycle", "Linear"])
def test_training_outside_a_fit_has_no_schedule_and_does_not_look_at_other_clients(module, set_up_federation):
    """OneCycle counts its steps; how many the last fit had depends on who it was of."""
    finals = []
    for turned in (False, True):
        policy = EvaluationPolicy(fine_tune=FineTune(2))
        loop = set_up_federation(lambda: FedAvg(wrapped(module())), 2, evaluate=policy)
        if turned:
            loop.fit_order = lambda clients: list(reversed(clients))
        loop.run()
        finals.append([row["Local-T_received/fine_tuned"] for row in loop.diary.rows])
        assert len(loop.runner.modules[0].own.present.optimizers) <= 1
    assert finals[0] == finals[1]


def test_training_outside_a_fit_begins_at_its_beginning_whoever_was_fitted_before(set_up_federation):
    """It read the steps, the epoch and the logged values of the last fit, of whichever client that was."""
    asked = []

    class Reads(Scheduled):
        def configure_optimizers(self):
            asked.append((self.global_step, self.current_epoch, [*self.trainer.callback_metrics]))
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    policy = EvaluationPolicy(fine_tune=FineTune(1))
    set_up_federation(lambda: FedAvg(wrapped(Reads())), 2, evaluate=policy).run()
    assert len(asked) > 12
    assert {(step, epoch, len(names)) for step, epoch, names in asked} == {(0, 0, 0)}
