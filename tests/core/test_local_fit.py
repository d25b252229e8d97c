"""A local fit with Lightning's Trainer does what a plain loop does."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.client import ClientModule, Phase
from fl_lightning.core.term import Term
from fl_lightning.seeding import derive_seed


class Alone(ClientModule):
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


@pytest.fixture
def initial_model(set_up_federation):
    """A copy of the model that clients of such a method start from."""

    def read(loop):
        return copy.deepcopy(loop.runner.modules[0].model)

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


def test_everything_is_thawed_after_a_fit(mlp, run_federation):
    loop = run_federation(lambda: HeadThenBody(mlp()), rounds=1)
    module = loop.runner.modules[0]
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_a_phase_counts_only_the_terms_that_it_names(mlp, run_federation):
    class Push(Term):
        def forward(self, client, out):
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
    expected = F.cross_entropy(module.model(x), y).item()
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
    initial = loop.runner._initial[0]
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
def test_backward_runs_outside_the_trainers_autocast(precision, forward, mlp, run_federation):
    """Inside it, the gradient of a product that a loss computes in float32 would be narrowed."""
    seen = {"forward": set(), "backward": set()}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["forward"].add(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            seen["backward"].add(torch.is_autocast_enabled("cpu"))
            return slope

    class Watch(Term):
        def forward(self, client, out):
            return Watched.apply(out.z).sum() * 0

    run_federation(lambda: ClientModule(mlp(), terms=[Watch()]), rounds=1, trainer={"precision": precision})
    assert seen == {"forward": {forward}, "backward": {False}}
