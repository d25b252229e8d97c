"""Lightning callbacks of a user's own in clients' fits: what they see of a mini-batch, what state they start from."""

import os
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from tutorial_modules import Tabular

from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback, never_called
from fl_lightning.federation.settings import Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.lightning_module import WrappedLightningModule
from fl_lightning.models.mlp import MLP


class Decays(Callback):
    """Divides the learning rate by the mini-batches it has seen, which it says are its state."""

    def __init__(self):
        self.seen = 0
        self.starts = []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def on_fit_start(self, trainer, pl_module):
        self.starts.append(self.seen)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / self.seen


class Fresh(list):
    """What a configuration says of callbacks: every Trainer has its own."""

    def __iter__(self):
        return iter([Decays()])

    def __len__(self):
        return 1


class Sees(Callback):
    """Notes what it is given of mini-batches."""

    def __init__(self):
        self.batches, self.counts = [], set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        x, y = batch
        assert len(x) == len(y)
        self.batches.append(len(y))
        self.counts.add(trainer.num_training_batches)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert batch_idx + 1 == trainer.global_step


class Blanks(Callback):
    """Puts other inputs in the place of a mini-batch's."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0] = torch.zeros_like(batch[0])


def test_every_clients_fit_starts_from_the_state_that_was_configured(set_up_federation, mlp):
    own = Decays()
    set_up_federation(lambda: FedAvg(mlp()), rounds=2, trainer={"callbacks": [own]}).run()
    assert own.starts == [0] * 8
    assert own.seen > 0


def test_a_run_with_such_a_callback_resumes_exactly(assert_resumes, mlp):
    assert_resumes(lambda: FedAvg(mlp()), trainer={"callbacks": Fresh()})


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_callback_sees_every_mini_batch_as_inputs_and_classes(precision, set_up_federation, mlp):
    own, trainer = Sees(), {"precision": precision}
    plain = set_up_federation(lambda: FedAvg(mlp()), rounds=1, trainer=trainer)
    seen = set_up_federation(lambda: FedAvg(mlp()), rounds=1, trainer={**trainer, "callbacks": [own]})
    plain.run(), seen.run()
    steps = [client.num_steps(4) for client in seen.data.clients]
    assert (len(own.batches), max(own.batches)) == (sum(steps), 4)
    assert own.counts == set(steps)
    weights = [loop.exchange.global_message().weights for loop in (plain, seen)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_what_a_callback_puts_in_a_mini_batch_is_trained_on(set_up_federation, mlp):
    loop = set_up_federation(
        lambda: FedRep(mlp(), head_epochs=2), rounds=1, local_epochs=2, trainer={"callbacks": [Blanks()]}
    )
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    first = next(name for name, tensor in before.items() if tensor.ndim == 2)
    assert torch.equal(loop.exchange.global_message().weights[first], before[first])


class Freezes(Callback):
    """Lets the body be trained from the second epoch on."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.method.model.body.requires_grad_(trainer.current_epoch > 0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_a_callback_freezes_as_an_epoch_begins_stays_frozen(epochs, run_federation, mlp):
    """The phase thawed it in every epoch."""
    options = {"trainer": {"callbacks": [Freezes()]}, "local_epochs": epochs}
    loop = run_federation(lambda: FedAvg(mlp()), 1, **options)
    sent, received = (own[1, 0].weights for own in (loop.diary.sent, loop.diary.received))
    same = {name for name in sent if torch.equal(sent[name], received[name])}
    body = {name for name in sent if name.startswith("model.body.")}
    assert same == (body if epochs == 1 else set())


class Clamps(Callback):
    """Keeps weights small whenever gradients are about to be cleared."""

    def __init__(self):
        self.optimizers = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.optimizers.append(optimizer)
        with torch.no_grad():
            for parameter in pl_module.method.parameters():
                parameter.clamp_(-0.05, 0.05)


def test_callbacks_are_told_before_gradients_are_cleared(run_federation, mlp):
    own = Clamps()
    loop = run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": [own]})
    assert len(own.optimizers) == sum(client.num_steps(4) for client in loop.data.clients)
    assert all(isinstance(each, torch.optim.SGD) for each in own.optimizers)
    weights = loop.diary.sent[1, 0].weights.values()
    assert max(float(tensor.abs().max()) for tensor in weights) == pytest.approx(0.05)


class Sets(Callback):
    """Sets something of the Trainer's as a fit goes on."""

    def __init__(self, hook, change):
        self.change = change
        setattr(self, hook, self._set)

    def _set(self, trainer, pl_module, *_):
        self.change(trainer)


def accumulates(trainer):
    trainer.accumulate_grad_batches = 3


def clips(trainer):
    trainer.gradient_clip_val = 0.01


def schedules(trainer):
    trainer.strategy.lr_scheduler_configs = [object()]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_end"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (accumulates, r"^trainer\.accumulate_grad_batches: a callback set it to 3 in a fit, which does not follow"),
        (clips, r"^trainer\.gradient_clip_val: a callback set it to 0\.01 in a fit, which does not follow"),
        (schedules, r"^trainer\.callbacks: a callback set trainer\.strategy\.lr_scheduler_configs, which"),
    ],
)
def test_what_a_callback_sets_and_no_fit_follows_is_refused(hook, change, said, run_federation, mlp):
    """The run was the same as without it, in silence."""
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": [Sets(hook, change)]})


class ReadsFlags(Callback):
    """Writes down what the Trainer says of accumulation and clipping."""

    def __init__(self):
        self.said = set()

    def setup(self, trainer, pl_module, stage):
        clips = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        self.said.add((trainer.accumulate_grad_batches, *clips))

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.setup(trainer, pl_module, "fit")

    def on_train_epoch_start(self, trainer, pl_module):
        self.steps = trainer.estimated_stepping_batches


@pytest.mark.parametrize("architecture", [[0, 0, 0, 0], [0, 1, 0, 1]])
def test_a_callback_reads_what_the_configuration_says_of_steps(architecture, run_federation, mlp):
    """It read 1 and None, and as many optimizer steps as there were mini-batches."""
    own = ReadsFlags()
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    trainer = {**flags, "callbacks": [own]}
    loop = run_federation(lambda _=0: FedAvg(mlp()), 1, trainer=trainer, architecture=architecture)
    assert own.said == {(2, 0.5, "value")}
    assert own.steps == -(-loop.data.clients[3].num_steps(4) // 2)


class Embellishes(FederationCallback):
    def on_round_end(self, loop, row):
        row["Local-T"] = 1.0


def test_what_a_callback_makes_of_a_row_reaches_nobody_and_is_said(set_up_federation, mlp, capsys):
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1)
    loop.callbacks.insert(0, Embellishes())
    loop.run()
    assert loop.diary.rows[0]["Local-T"] < 1
    said = "fl-lightning: Embellishes.on_round_end changes what it is given, which stays as it was\n"
    assert capsys.readouterr().err == said


class Meddles(FederationCallback):
    """Changes what it is handed, without touching a tensor."""

    def __init__(self):
        self.lengths = []

    def on_round_start(self, loop, round, participants):
        participants.pop()

    def on_client_fit_end(self, loop, report):
        self.lengths.append(len(report.message.weights))
        report.scores["Local-T"] = 1.0
        report.message.weights.clear()


def test_what_a_callback_makes_of_participants_and_reports_reaches_nobody(run_federation, mlp, capsys):
    """It left clients out of rounds, and wrote their accuracies, in silence."""
    plain = run_federation(lambda: FedAvg(mlp()), rounds=2)
    capsys.readouterr()
    meddles = Meddles()
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, callbacks=[meddles])
    for own, other in zip(loop.diary.rows, plain.diary.rows, strict=True):
        assert {n: own[n] for n in own if "seconds" not in n} == {n: other[n] for n in other if "seconds" not in n}
    assert len(set(meddles.lengths)) == 1
    assert meddles.lengths[0] > 0
    said = capsys.readouterr().err
    assert "Meddles.on_round_start changes what it is given" in said
    assert "Meddles.on_client_fit_end changes what it is given" in said


class Wanders(FederationCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_round_end(self, loop, row):
        os.chdir(self.folder)


def test_a_callback_that_leaves_the_working_directory_is_brought_back(run_federation, mlp, tmp_path, capsys):
    """The run, whose folder is named from there, died of it."""
    here = os.getcwd()
    run_federation(lambda: FedAvg(mlp()), rounds=1, callbacks=[Wanders(tmp_path)])
    assert os.getcwd() == here
    assert "Wanders.on_round_end changes the working directory, which is set back" in capsys.readouterr().err


class Strays(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        os.chdir(self.folder)


def test_a_fit_that_leaves_the_working_directory_is_brought_back(run_federation, mlp, tmp_path, capsys):
    """The run ended as its folder was found no more."""
    here = os.getcwd()
    run_federation(lambda: FedAvg(mlp()), rounds=1, trainer={"callbacks": [Strays(tmp_path)]})
    assert os.getcwd() == here
    assert capsys.readouterr().err.count("changes the working directory in its fits; it is set back") == 1


class FreezesFirst(Callback):
    """Freezes the body before a fit of the first round begins, and thaws nothing."""

    def __init__(self, hook):
        setattr(self, hook, self._freeze)

    def _freeze(self, trainer, pl_module, stage=None):
        if pl_module.method.facts.round == 1:
            pl_module.method.model.body.requires_grad_(False)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start"])
def test_what_a_callback_freezes_before_a_fit_is_frozen_in_that_fit_alone(hook, run_federation, assert_resumes, mlp):
    """It stayed frozen for all clients and rounds, but not in a run that was resumed."""
    loop = run_federation(lambda: FedAvg(mlp()), 2, trainer={"callbacks": [FreezesFirst(hook)]})
    for round in (1, 2):
        sent, received = (own[round, 0].weights for own in (loop.diary.sent, loop.diary.received))
        body = [torch.equal(sent[name], received[name]) for name in sent if name.startswith("model.body.")]
        assert body == [round == 1] * len(body)
    assert_resumes(lambda: FedAvg(mlp()), stopped_after=1, trainer={"callbacks": [FreezesFirst(hook)]})


class Looks(Callback):
    """Notes the norm of the gradients, and makes them larger."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        for gradient in gradients:
            gradient.mul_(100)


def test_callbacks_see_gradients_before_they_are_clipped(run_federation, mlp):
    """As in Lightning; what a callback made of them was clipped by nobody."""
    trainer, looks = {"gradient_clip_val": 1e-3}, Looks()
    loop = run_federation(lambda: FedAvg(mlp()), 1, trainer={**trainer, "callbacks": [looks]})
    assert min(looks.norms) > 1e-2
    sent, received = (own[1, 0].weights for own in (loop.diary.sent, loop.diary.received))
    moved = torch.stack([(sent[name] - received[name]).norm() for name in sent]).norm()
    assert 0 < moved <= 0.1 * 1e-3 * len(looks.norms)  # the learning rate, times the norm, times the steps

    class Silent(torch.optim.SGD):
        def step(self, closure=None):
            super().step()

    with pytest.raises(ConfigError, match=r"^optimizer: Silent must call its step's closure: callbacks look at"):
        run_federation(lambda: FedAvg(mlp()), 1, optimizer=Silent, trainer={**trainer, "callbacks": [Looks()]})

    class Own(Tabular):
        def configure_optimizers(self):
            return Silent(self.parameters(), lr=0.1)

    options = {**trainer, "callbacks": [Looks()]}
    with pytest.raises(ConfigError, match=r"^model\.module: Silent must call its step's closure"):
        run_federation(lambda: FedAvg(WrappedLightningModule((1, 8, 8), 4, Own())), 1, trainer=options)


class Reckons(Callback):
    """Asks how many mini-batches there are, and for nothing else."""

    def __init__(self):
        self.said = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.said.append((trainer.num_training_batches, trainer.estimated_stepping_batches))


def test_a_callback_reckons_with_mini_batches_and_not_with_bundles(run_federation, mlp):
    own = Reckons()
    loop = run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": [own]}, local_epochs=2)
    steps = [client.num_steps(4) for client in loop.data.clients]
    assert own.said == [(count, 2 * count) for count in steps for _ in range(2)]


class Warms(Callback):
    """Adds a group, or momentum, in the second epoch."""

    def __init__(self, what, plain):
        self.what = what
        if not plain:
            self.on_after_backward = lambda trainer, pl_module: None

    def setup(self, trainer, pl_module, stage):
        if self.what == "group":
            pl_module.method.model.body.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            optimizer, body = trainer.optimizers[0], pl_module.method.model.body
            if self.what == "group":
                body.requires_grad_(True)
                optimizer.add_param_group({"params": list(body.parameters())})
            else:
                for group in optimizer.param_groups:
                    group[self.what] = 0.9 if self.what == "momentum" else True


@pytest.mark.parametrize("what", ["group", "momentum", "maximize"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_a_callback_changes_of_an_optimizer_is_stepped_with(what, momentum, run_federation, mlp):
    """Steps in few operations went on with the groups and options that they had seen first."""
    sent = []
    for plain in (True, False):
        options = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=momentum), "local_epochs": 3}
        callbacks = [Warms(what, plain)]
        loop = run_federation(lambda: FedAvg(mlp()), 1, trainer={"callbacks": callbacks}, **options)
        sent.append((loop.diary.received[1, 0].weights, loop.diary.sent[1, 0].weights))
    (start, one), (_, other) = sent
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], start[name]) for name in one)


class Sums(Callback):
    """Notes the sum of every mini-batch."""

    def __init__(self):
        self.sums = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.sums.append(float(batch[0].double().sum()))


def test_to_overfit_is_to_see_the_same_mini_batches_again(run_federation, mlp):
    own = Sums()
    trainer = {"callbacks": [own], "overfit_batches": 1}
    loop = run_federation(lambda: FedAvg(mlp()), 2, local_epochs=3, trainer=trainer)
    assert len(own.sums) == 2 * 3 * len(loop.data.clients)
    assert len(set(own.sums)) == len(loop.data.clients)


class Reads(Callback):
    """Notes the loss at the end of every epoch."""

    def __init__(self):
        self.losses = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["loss"]))


@pytest.mark.parametrize("beyond", [-1, 2])
def test_an_epoch_that_a_limit_of_steps_cuts_has_its_loss_too(beyond, run_federation, mlp, make_data):
    """It had none, or the epoch's before it."""
    data, own = make_data(((8, 8, 0, 0),) * 2), Reads()
    steps = data.clients[0].num_steps(4)
    trainer = {"callbacks": [own], "max_steps": steps + beyond}
    run_federation(lambda: FedAvg(mlp()), 1, data=data, local_epochs=2, trainer=trainer)
    assert len(own.losses) == len(set(own.losses)) == (2 if beyond < 0 else 4)


@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_a_callback_reads_the_loss_of_the_epoch_and_not_of_the_fit_so_far(method, run_federation, mlp):
    """It stopped, or lowered a rate, by a mean that the first epochs still were in."""
    own = Reads()
    loop = run_federation(lambda: method(mlp()), 1, local_epochs=3, trainer={"callbacks": [own]})
    fits = len(own.losses) // len(loop.data.clients)
    of_fits = [report.losses["loss"] for report in loop.diary.reports.values()]
    means = [sum(own.losses[at : at + fits]) / fits for at in range(0, len(own.losses), fits)]
    assert sorted(means) == pytest.approx(sorted(of_fits))  # of as many samples each


class LogsLoss(Tabular):
    """Logs its loss, by the step and by the epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss


class LogsLate(LogsLoss):
    """Logs the epoch's number when it ends."""

    def on_train_epoch_end(self):
        self.log("late", float(self.current_epoch))


class Notes(Callback):
    """What is there to read when an epoch ends."""

    def __init__(self):
        self.read = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.read.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize(("monitor", "epochs"), [("train_loss", 1), ("both_epoch", 1), ("late", 2)])
def test_early_stopping_watches_what_a_module_logs(monitor, epochs, run_federation):
    """It was refused, or failed in the first fit."""
    notes, limit = Notes(), 0.5 if monitor == "late" else 0.0
    stops = EarlyStopping(monitor, mode="max", stopping_threshold=limit)
    trainer = {"callbacks": [stops, notes]}
    make = lambda: FedAvg(WrappedLightningModule((1, 8, 8), 4, LogsLate()))  # noqa: E731
    run_federation(make, 1, local_epochs=3, trainer=trainer)
    assert len(notes.read) == 4 * epochs
    for own in notes.read:
        assert own["train_loss"] == own["both_epoch"] == pytest.approx(own["loss"])
    assert [own.get("late") for own in notes.read[:epochs]] == [None, 0.0][:epochs]


def test_early_stopping_of_what_nothing_logs_is_refused_in_one_line(run_federation):
    model = lambda kind: FedAvg(WrappedLightningModule((1, 8, 8), 4, kind()))  # noqa: E731
    rule = r"EarlyStopping can watch what a client's fit logs: loss, loss/cross_entropy, both, both_epoch, both_step, "
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {rule}train_loss, got 'val_loss'"):
        run_federation(lambda: model(LogsLoss), 1, trainer={"callbacks": [EarlyStopping("val_loss")]})
    rule = "EarlyStopping watches what this client's fit does not log; it has .*train_loss.*late, got 'val_loss'$"
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {rule}"):
        run_federation(lambda: model(LogsLate), 1, trainer={"callbacks": [EarlyStopping("val_loss")]})


def test_what_is_watched_is_logged_by_clients_of_every_model(set_up_federation):
    """Only the first model was asked, and the run ended in its first round."""
    models = [lambda: WrappedLightningModule((1, 8, 8), 4, LogsLoss()), lambda: MLP((1, 8, 8), 4, [8])]
    options = {"architecture": [0, 0, 1, 1], "trainer": {"callbacks": [EarlyStopping("train_loss")]}}
    with pytest.raises(ConfigError, match=r"EarlyStopping can watch what a client's fit logs: loss, .*'train_loss'"):
        set_up_federation(lambda kind: Local(models[kind]()), **options)


def with_hook(name, hook):
    """A federation's callback of which one hook is somebody's own."""
    return type("Mine", (FederationCallback,), {name: hook})()


@pytest.mark.parametrize(
    ("name", "hook", "wanted"),
    [
        ("on_round_end", lambda self, loop: None, "loop, row"),
        ("on_run_start", lambda self, loop, more: None, "loop"),
        ("on_client_fit_end", lambda self, loop, *, report: None, "loop, report"),
        ("load_state_dict", lambda self: None, "state"),
        ("state_dict", lambda self, rounds: {}, "nothing"),
        ("on_run_end", None, "loop, summary"),
    ],
)
def test_hook_that_cannot_be_called_is_refused_by_name(name, hook, wanted):
    with pytest.raises(ConfigError, match=rf"^federation\.callbacks\.1: Mine\.{name}\(\) must take {wanted}$"):
        Federation(rounds=1, callbacks=[FederationCallback(), with_hook(name, hook)])


def test_hook_may_take_more_than_it_is_given():
    own = with_hook("on_round_end", lambda self, *arguments, loud=False: None)
    assert Federation(rounds=1, callbacks=[own]).callbacks == [own]


def test_name_that_is_nearly_a_hook_is_told_of():
    own = with_hook("on_round_ends", lambda self, loop, row: None)
    rule = "Mine.on_round_ends() is no hook, and nobody calls it; did you mean on_round_end()?"
    assert list(never_called([own])) == [rule]


def test_names_of_hooks_and_of_other_libraries_are_not():
    both = type("Both", (Callback, FederationCallback), {"on_run_end": lambda self, loop, summary: None})
    assert list(never_called([both(), with_hook("on_my_mind", None), FederationCallback()])) == []
