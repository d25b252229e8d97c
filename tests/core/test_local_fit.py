"""A local fit with Lightning's Trainer does what a plain loop does."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.method import Method, Phase
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.seeding import derive_seed


class Alone(Method):
    """Nothing is shared, so a client's state is what training alone made of it."""

    shared = ()


class HeadThenBody(Alone):
    def phases(self):
        return [
            Phase("head", trains=("model.head",), epochs=2),
            Phase("body", trains=("model.body",), epochs=1),
        ]


class Snapshots(L.Callback):
    """The parameters at the start and at the end of every epoch."""

    def __init__(self):
        self.starts, self.ends = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.starts.append(parameters(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append(parameters(pl_module))


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(one, two, part):
    names = [name for name in one if part in name]
    assert names
    return all(torch.equal(one[name], two[name]) for name in names)


def final_model(loop, client=0):
    return {name.removeprefix("model."): tensor for name, tensor in loop.runner.pool.get(client).items()}


def model_of(loop):
    return loop.runner.modules[0].method.model


@pytest.fixture
def initial_model(set_up_federation):
    """A copy of the model that clients of such a method start from."""

    def read(loop):
        return copy.deepcopy(model_of(loop))

    return read


# --- phases ----------------------------------------------


def test_phases_freeze_exactly_whatever_the_optimizer(mlp, sgd, run_federation):
    """Momentum and weight decay would move parameters whose gradient is zero."""
    seen = Snapshots()
    run_federation(
        lambda: HeadThenBody(mlp()),
        rounds=2,
        optimizer=sgd(momentum=0.9, weight_decay=0.01),
        trainer={"callbacks": [seen]},
    )
    assert len(seen.starts) == 2 * 4 * 3
    for first in range(0, len(seen.starts), 3):
        start, between, end = seen.starts[first], seen.ends[first + 1], seen.ends[first + 2]
        assert same(start, between, "body")
        assert not same(start, between, "head")
        assert same(between, end, "head")
        assert not same(between, end, "body")


class Begins(FedAvg):
    """Freezes the body as a fit of the first round begins."""

    def on_fit_start(self):
        self.model.body.requires_grad_(self.facts.round > 1)


@pytest.mark.parametrize("options", [{}, {"cohort": 4}, {"graph": "auto"}])
def test_what_a_method_freezes_as_a_fit_begins_stays_frozen_in_that_fit(options, mlp, run_federation, sgd):
    """The phase thawed it, in silence."""
    loop = run_federation(lambda: Begins(mlp()), 2, optimizer=sgd(0.1, momentum=0.9), **options)
    for round in (1, 2):
        sent, received = (own[round, 0].weights for own in (loop.diary.sent, loop.diary.received))
        stood = {name for name in sent if torch.equal(sent[name], received[name])}
        assert stood == ({name for name in sent if name.startswith("model.body.")} if round == 1 else set())


def test_everything_is_thawed_after_a_fit(mlp, run_federation):
    loop = run_federation(lambda: HeadThenBody(mlp()), rounds=1)
    module = loop.runner.modules[0]
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_a_phase_counts_only_the_terms_that_it_names(mlp, run_federation):
    class Push(Term):
        def forward(self, host, out):
            return out.logits.square().mean()

    class Partly(Alone):
        def phases(self):
            return [Phase("plain", terms=("cross_entropy",)), Phase("both")]

    loop = run_federation(lambda: Partly(mlp(), terms=[Push(0.5)]), rounds=1)
    report = loop.diary.reports[1, 0]
    client = loop.data.clients[0]
    assert report.num_steps == 2 * client.num_steps(4)
    assert set(report.losses) == {"loss", "cross_entropy", "push"}
    assert report.losses["loss"] != pytest.approx(report.losses["cross_entropy"] + 0.5 * report.losses["push"])


# --- steps ----------------------------------------------


@pytest.mark.parametrize("steps_per_bundle", [1, 2, 16])
def test_fit_equals_a_plain_loop_bit_for_bit(
    mlp, sgd, set_up_federation, initial_model, train_by_hand, assert_identical, steps_per_bundle
):
    optimizer = sgd(momentum=0.9, weight_decay=0.01)
    loop = set_up_federation(
        lambda: Alone(mlp()), 3, optimizer=optimizer, local_epochs=2, steps_per_bundle=steps_per_bundle
    )
    models = [initial_model(loop) for _ in range(4)]
    loop.run()
    for client, model in enumerate(models):
        for round in (1, 2, 3):
            train_by_hand(model, loop.data.clients[client], optimizer, round, epochs=2)
        assert_identical(final_model(loop, client), dict(model.state_dict()))


def test_optimizer_state_does_not_cross_rounds(
    mlp, sgd, set_up_federation, initial_model, train_by_hand, assert_identical
):
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    loop = set_up_federation(lambda: Alone(mlp()), 2, optimizer=adam)
    model = initial_model(loop)
    loop.run()
    for round in (1, 2):
        train_by_hand(model, loop.data.clients[0], adam, round)
    assert_identical(final_model(loop), dict(model.state_dict()))


def test_learning_rate_decays_from_round_to_round(
    mlp, sgd, set_up_federation, initial_model, train_by_hand, assert_identical
):
    loop = set_up_federation(lambda: Alone(mlp()), 3, optimizer=sgd(0.1), lr_decay=0.5)
    model = initial_model(loop)
    loop.run()
    for round, rate in ((1, 0.1), (2, 0.05), (3, 0.025)):
        train_by_hand(model, loop.data.clients[0], sgd(rate), round)
    assert_identical(final_model(loop), dict(model.state_dict()))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_as_the_trainers_flags_say(
    mlp, sgd, set_up_federation, initial_model, assert_identical, algorithm
):
    flags = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    loop = set_up_federation(lambda: Alone(mlp()), 1, trainer=flags)
    model = initial_model(loop)
    loop.run()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = torch.nn.utils.clip_grad_norm_ if algorithm == "norm" else torch.nn.utils.clip_grad_value_
    for bundle in loop.data.clients[0].bundles(derive_seed(0, "shuffle/0", 1, 0), 4):
        for x, y in bundle.steps():
            stepper.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip(model.parameters(), 0.05)
            stepper.step()
    assert_identical(final_model(loop), dict(model.state_dict()))


@pytest.mark.parametrize("steps_per_bundle", [1, 3, 16])
def test_gradients_are_accumulated_as_the_trainers_flag_says(
    mlp, set_up_federation, initial_model, assert_identical, steps_per_bundle
):
    """Client 1 has four batches an epoch: a step after the third, and one for what is left at the epoch's end."""
    flags = {"accumulate_grad_batches": 3}
    loop = set_up_federation(lambda: Alone(mlp()), 1, trainer=flags, local_epochs=2, steps_per_bundle=steps_per_bundle)
    model = initial_model(loop)
    loop.run()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in (0, 1):
        bundles = loop.data.clients[1].bundles(derive_seed(0, f"shuffle/{epoch}", 1, 1), 4)
        batches = [step for bundle in bundles for step in bundle.steps()]
        assert [len(y) for _, y in batches] == [4, 4, 4, 1]
        for index, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / 3).backward()
            if index in (2, 3):
                stepper.step()
                stepper.zero_grad()
    assert_identical(final_model(loop, 1), dict(model.state_dict()))


def test_losses_are_means_over_samples(mlp, sgd, run_federation):
    """At learning rate 0 the mean over batches of 4, 4, 4 and 1 must be the loss of the 13 samples."""
    loop = run_federation(lambda: Alone(mlp()), rounds=1, optimizer=sgd(0.0))
    module = loop.runner.load(1)
    x, y = loop.data.store.gather(loop.data.clients[1].train)
    assert len(y) == 13
    expected = F.cross_entropy(module.method.model(x), y).item()
    losses = loop.diary.reports[1, 1].losses
    assert losses["loss"] == pytest.approx(expected, rel=1e-5)
    assert losses["cross_entropy"] == losses["loss"]


def test_row_holds_the_unweighted_mean_of_the_clients_losses(mlp, run_federation):
    loop = run_federation(lambda: Alone(mlp()), rounds=1)
    losses = [loop.diary.reports[1, client].losses["loss"] for client in range(4)]
    assert loop.diary.rows[0]["loss"] == pytest.approx(sum(losses) / 4)
    assert loop.diary.rows[0]["loss/cross_entropy"] == pytest.approx(sum(losses) / 4)


# --- batch norm ----------------------------------------------


@pytest.mark.parametrize("net", ["conv_net", "dense_norm"])
def test_client_of_one_sample_trains_with_batch_norm(net, conv_net, mlp, make_data, run_federation):
    """Batch norm over [1, D] raises in train mode: such a batch uses the running statistics."""

    def dense_norm():
        model = mlp()
        model.body.neck.append(torch.nn.BatchNorm1d(5))
        return model

    data = make_data(counts=((1, 0, 0, 0), (6, 6, 6, 2)))
    assert data.clients[0].num_train == 1
    loop = run_federation(lambda: Alone({"conv_net": conv_net, "dense_norm": dense_norm}[net]()), data=data)
    state = loop.runner.pool.get(0)
    assert all(tensor.isfinite().all() for tensor in state.values())
    counter = next(tensor for name, tensor in state.items() if "num_batches_tracked" in name)
    assert counter.item() == 0
    initial = loop.runner.residents.kept[0]
    assert any(not torch.equal(state[name], initial[name]) for name in state)
    assert all(m.training for m in loop.runner.modules[0].modules() if isinstance(m, torch.nn.BatchNorm1d))


def test_last_batch_of_one_is_left_out_where_there_is_batch_norm(conv_net, mlp, run_federation):
    with_norm = run_federation(lambda: Alone(conv_net()), rounds=1)
    without = run_federation(lambda: Alone(mlp()), rounds=1)
    assert with_norm.diary.reports[1, 1].num_steps == 3
    assert without.diary.reports[1, 1].num_steps == 4


# --- precision ----------------------------------------------


def test_fit_in_bfloat16_keeps_weights_and_losses_in_float32(conv_net, run_federation):
    loop = run_federation(lambda: Alone(conv_net()), rounds=2, trainer={"precision": "bf16-mixed"})
    state = loop.runner.pool.get(0)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in state.values() if t.is_floating_point())
    assert loop.diary.rows[-1]["loss"] > 0


@pytest.mark.parametrize(("precision", "forward"), [("bf16-mixed", True), ("32-true", False)])
def test_only_passes_through_the_model_run_in_the_trainers_autocast(precision, forward, mlp, run_federation):
    """Inside it, a product that a loss computes in float32 would be narrowed, and so would its gradient."""
    seen = {"forward": set(), "loss": set(), "backward": set()}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, where):
            seen[where].add(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            seen["backward"].add(torch.is_autocast_enabled("cpu"))
            return slope, None

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Watched.apply(x, "forward") if self.training else x

    class Watch(Term):
        def forward(self, host, out):
            return Watched.apply(out.z, "loss").sum() * 0

    def method():
        model = mlp()
        model.body.neck.append(Layer())
        return Method(model, terms=[Watch()])

    run_federation(method, rounds=1, trainer={"precision": precision})
    assert seen == {"forward": {forward}, "loss": {False}, "backward": {False}}


# --- what a method may know of its fit ----------------------------------------------


def test_steps_and_fit_tell_where_the_fit_is(mlp, run_federation):
    """Client 1 has four batches an epoch; two epochs, an optimizer step every third batch and at an epoch's end."""
    told = []

    class Asks(Alone):
        def on_fit_start(self):
            told.append("start")

        def local_step(self, step):
            fit = self.fit
            told.append((step.round, step.epoch, step.is_first, step.is_last, fit.num_batches, fit.num_steps))
            assert fit.in_last_epoch == (step.epoch == 1)
            super().local_step(step)

        def on_fit_end(self):
            told.append(("end", self.fit.num_batches, self.fit.num_steps, self.facts.client))

    run_federation(lambda: Asks(mlp()), rounds=1, local_epochs=2, trainer={"accumulate_grad_batches": 3})
    start = told.index("start", 1)
    assert told[start : told.index("start", start + 1)] == [
        "start",
        (1, 0, True, False, 0, 0),
        (1, 0, False, False, 1, 0),
        (1, 0, False, False, 2, 0),
        (1, 0, False, True, 3, 1),
        (1, 1, True, False, 4, 2),
        (1, 1, False, False, 5, 2),
        (1, 1, False, False, 6, 2),
        (1, 1, False, True, 7, 3),
        ("end", 8, 4, 1),
    ]


def test_resting_batch_norm_keeps_its_statistics_in_its_phase_alone(conv_net, run_federation):
    """Two epochs with the body at rest, then one of all: the counter is the last epoch's three batches."""

    class Rests(Alone):
        def phases(self):
            return [Phase("head", trains=("model.head",), epochs=2, resting=("model.body",)), Phase("all")]

    loop = run_federation(lambda: Rests(conv_net()), rounds=1)
    state = loop.runner.pool.get(1)
    assert state["model.body.stages.0.1.num_batches_tracked"] == 3
    assert all(m.training for m in loop.runner.modules[0].modules() if isinstance(m, torch.nn.BatchNorm2d))


def test_a_phases_parts_step_on_their_own_losses(mlp, sgd, set_up_federation, initial_model, assert_identical):
    class Two(Alone):
        def phases(self):
            return [Phase("both", parts={"head": ("model.head",), "body": ("model.body",)})]

        def losses(self):
            return {"pull": 1.0}

        def local_step(self, step):
            values = step.values(step.forward())
            step.descend(values, "head")
            step.descend({"pull": self.model.body.neck[0].weight.square().sum()}, "body")

    loop = set_up_federation(lambda: Two(mlp()), 1, optimizer=sgd(0.1))
    model = initial_model(loop)
    loop.run()
    head, body = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.head, model.body))
    for bundle in loop.data.clients[0].bundles(derive_seed(0, "shuffle/0", 1, 0), 4):
        for x, y in bundle.steps():
            loss = F.cross_entropy(model(x), y)
            loss.backward(inputs=list(model.head.parameters()))
            head.step()
            head.zero_grad()
            model.body.neck[0].weight.square().sum().backward()
            body.step()
            body.zero_grad()
    assert_identical(final_model(loop), dict(model.state_dict()))
    assert set(loop.diary.reports[1, 0].losses) == {"loss", "cross_entropy", "pull"}


def test_a_phases_own_optimizer_and_rate_take_the_configurations_place(mlp, sgd, run_federation):
    made = []

    def own(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.7))
        return made[-1]

    class Own(Alone):
        def phases(self):
            return [Phase("one", optimizer=own), Phase("other", optimizer=own, lr=0.5)]

    run_federation(lambda: Own(mlp()), rounds=2, optimizer=sgd(99.0), lr_decay=0.5)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in made[2:]]  # the first two were only tried
    assert rates == [0.7, 0.5] * 4 + [0.35, 0.25] * 4


class OnlyLooks(Method):
    """It computes losses and forgets to step on them."""

    def local_step(self, step):
        step.values(step.forward())


def test_a_fit_that_nothing_steps_in_is_refused(mlp, run_federation):
    with pytest.raises(ConfigError, match=r"^method: OnlyLooks.local_step\(\) trains nothing: no step.descend\(\) in"):
        run_federation(lambda: OnlyLooks(mlp()), rounds=1)


class OutOfReach(Method):
    """It steps on losses that say nothing to a parameter."""

    def local_step(self, step):
        out = step.forward()
        step.descend({"cross_entropy": (out.logits.argmax(1) != step.y).float().mean()})
        step.observe(out)


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_fit_whose_losses_reach_no_parameter_is_refused(cohort, mlp, run_federation):
    with pytest.raises(
        ConfigError, match=r"^method: OutOfReach trains nothing: in a whole fit its losses \(cross_entropy\)"
    ):
        run_federation(lambda: OutOfReach(mlp()), rounds=1, cohort=cohort)


class DescendsOnItsOwn(Method):
    """Steps found by hand: nothing is logged, and nothing is wrong."""

    def local_step(self, step):
        parameters = list(self.model.parameters())
        step.follow(step.gradients(step.task_loss(step.forward()), parameters), parameters)

    def send(self, data):
        message = super().send(data)
        message.artifacts["steps"] = torch.tensor(float(self.fit.num_steps))
        return message


def test_a_fit_may_follow_gradients_alone(mlp, run_federation):
    loop = run_federation(lambda: DescendsOnItsOwn(mlp()), rounds=1)
    steps = [int(loop.diary.sent[1, client].artifacts["steps"]) for client in range(4)]
    assert steps == [data.num_steps(4) for data in loop.data.clients]
