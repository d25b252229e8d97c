"""The tests that the specification of Per-FedAvg promises (BASELINES-A.md, section 9)."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.seeding import derive_seed

ONE_CLIENT = ((12, 8, 5, 4),)
NORM = "model.body.stages.0.1."


class OnBatches(PerFedAvg):
    """Hands out the meta-gradient inside a fit, once, and steps no further."""

    def _meta_step(self, step, steps):
        if not hasattr(self, "seen"):
            self.batches = [(part.x.clone(), part.y.clone()) for part in steps]
            self.weights = [p.detach().clone() for p in self._w]
            self.seen, _ = self.meta_gradient(self._w, steps)
            self.after = [p.detach().clone() for p in self._w]
        self._meta_steps += 1
        step.log({"cross_entropy": torch.zeros(())})  # a fit without steps or losses would be refused


# --- the meta-step ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.95),
        ({"approximation": "HF"}, 0.975),
        ({"approximation": "HF", "delta": 0.1}, 0.975),
        ({"approximation": "HF", "delta": 10.0}, 0.975),
    ],
    ids=str,
)
def test_perfedavg_meta_step_matches_hand_computed_value(
    on_a_parabola, number, sgd, make_data, run_federation, options, expected
):
    """f = ½w², w = 1, α = ½, β = 0.1: FO 1 − 0.1 · ½; HF 1 − 0.1 (½ − ½ · ½), for every δ on a quadratic.

    Stepping from w′ instead of w would give 0.45.
    """
    method = on_a_parabola(PerFedAvg, 1, 0, alpha=0.5, beta=0.1, **options)
    data = make_data(ONE_CLIENT, batch_size=100)
    loop = run_federation(method, rounds=1, data=data, optimizer=sgd(77.0))
    assert number(loop) == pytest.approx(expected, abs=2e-5)


def test_perfedavg_hands_the_meta_gradient_to_the_configured_optimizer(
    on_a_parabola, number, sgd, make_data, run_federation
):
    """Momentum ½, two meta-steps: g = ½w; w = 1 − 0.1 · ½ = 0.95; then 0.95 − 0.1 (½ · ½ + ½ · 0.95)."""
    method = on_a_parabola(PerFedAvg, 1, 0, alpha=0.5)
    data = make_data(ONE_CLIENT, batch_size=100)
    loop = run_federation(method, rounds=1, data=data, optimizer=sgd(0.1, momentum=0.5), local_epochs=2)
    assert number(loop) == pytest.approx(0.95 - 0.1 * (0.25 + 0.475), abs=1e-6)


@pytest.mark.parametrize("approximation", ["FO", "HF"])
def test_perfedavg_without_an_inner_step_is_fedavg_on_the_second_batches(
    mlp, sgd, make_data, set_up_federation, approximation
):
    data = make_data(ONE_CLIENT)
    loop = set_up_federation(
        lambda: PerFedAvg(mlp(), alpha=0.0, approximation=approximation), rounds=2, data=data, local_epochs=2
    )
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    size = 2 if approximation == "FO" else 3
    for round in (1, 2):
        stepper = sgd()(model.parameters())
        for epoch in range(2):
            seed = derive_seed(0, f"shuffle/{epoch}", round, 0)
            steps = [step for bundle in data.clients[0].bundles(seed, 4) for step in bundle.steps()]
            for x, y in steps[1 : len(steps) // size * size : size]:
                stepper.zero_grad()
                F.cross_entropy(model(x), y).backward()
                stepper.step()
    for name, tensor in loop.exchange.global_message().weights.items():
        assert torch.equal(tensor, model.state_dict()[name.removeprefix("model.")])


def test_perfedavg_hf_is_the_hessian_vector_product(mlp, make_data, run_federation):
    """In float64, δ = 1e-4: g = (I − α ∇²f(w; D″)) ∇f(w′; D′) by double differentiation, rtol 1e-3."""
    data = make_data(ONE_CLIENT, batch_size=5)
    method = OnBatches(mlp(), alpha=0.3, approximation="HF", delta=1e-4)
    run_federation(lambda: method, rounds=1, data=data, trainer={"precision": "64-true"})
    model = method.model
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), method.weights, strict=True):
            parameter.copy_(value)
    names = [name for name, _ in model.named_parameters()]

    def loss(values, batch):
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (batch[0],))
        return F.cross_entropy(logits, batch[1])

    w = list(model.parameters())
    inner = torch.autograd.grad(loss(w, method.batches[0]), w)
    moved = [(p - 0.3 * g).detach().requires_grad_() for p, g in zip(w, inner, strict=True)]
    u = torch.autograd.grad(loss(moved, method.batches[1]), moved)
    first = torch.autograd.grad(loss(w, method.batches[2]), w, create_graph=True)
    curved = torch.autograd.grad(sum((g * v).sum() for g, v in zip(first, u, strict=True)), w)
    for found, g, product in zip(method.seen, u, curved, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found - g, -0.3 * product, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("approximation", ["FO", "HF"])
def test_perfedavg_meta_gradient_leaves_the_weights_as_they_are(conv_net, run_federation, approximation):
    method = OnBatches(conv_net(), alpha=0.3, approximation=approximation)
    run_federation(lambda: method, rounds=1)
    assert all(torch.equal(one, other) for one, other in zip(method.weights, method.after, strict=True))


@pytest.mark.parametrize("approximation", ["FO", "HF"])
def test_perfedavg_keeps_the_statistics_of_the_first_pass_alone(conv_net, make_data, run_federation, approximation):
    """As many counted batches as meta-steps, and means of D at w."""
    data = make_data(ONE_CLIENT, batch_size=7)  # 22 samples: 7, 7, 7, and one that is dropped
    method = OnBatches(conv_net(), approximation=approximation)
    run_federation(lambda: method, rounds=1, data=data)
    norm = method.model.body.stages[0][1]
    assert norm.num_batches_tracked.item() == 1
    with torch.no_grad():
        mean = method.model.body.stages[0][0](method.batches[0][0]).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)


@pytest.mark.parametrize(
    ("approximation", "steps"), [("FO", [1, 1, 1, 2, 3]), ("HF", [1, 1, 1, 1, 2])], ids=["FO", "HF"]
)
def test_perfedavg_makes_a_meta_step_of_so_many_batches_and_one_at_least(
    mlp, make_data, run_federation, approximation, steps
):
    """Clients of 1, 2, 3, 4 and 6 batches."""
    data = make_data(counts=tuple((4 * n, 0) for n in (1, 2, 3, 4, 6)), test_fraction=0.0)
    assert [client.num_steps(4) for client in data.clients] == [1, 2, 3, 4, 6]
    method = lambda: PerFedAvg(mlp(num_classes=2), approximation=approximation)  # noqa: E731
    loop = run_federation(method, rounds=1, data=data, local_epochs=2)
    assert [loop.diary.reports[1, client].num_steps for client in range(5)] == [2 * n for n in steps]


@pytest.mark.parametrize(("approximation", "passes"), [("FO", 2), ("HF", 4)])
def test_perfedavg_costs_two_passes_a_meta_step_or_four(
    mlp, sgd, make_data, set_up_federation, count_passes, approximation, passes
):
    """FO: on D and D′; HF: twice more on D″. 24 samples in six batches, no evaluation."""
    data = make_data(counts=((12, 12),), test_fraction=0.0)
    method = lambda: PerFedAvg(mlp(num_classes=2), approximation=approximation)  # noqa: E731
    loop = set_up_federation(method, rounds=1, data=data)
    client = loop.runner.modules[0]
    counted = count_passes(client.method.model.head)
    loop.runner.fit(client, data.clients[0], 1)
    size = 2 if approximation == "FO" else 3
    assert counted.forward == counted.backward == 6 // size * passes * 4


def test_perfedavg_accumulates_meta_gradients(on_a_parabola, number, make_data, run_federation):
    """f = ½w², α = ½: both meta-steps at w = 1 have g = ½, and so has their mean; the third steps at the epoch's end.

    0.95, then 0.95 − 0.1 · ½ · (½ · 0.95).
    """
    data = make_data(counts=((12, 12),), test_fraction=0.0)
    method = on_a_parabola(PerFedAvg, 1, 0, alpha=0.5, beta=0.1)
    loop = run_federation(method, rounds=1, data=data, trainer={"accumulate_grad_batches": 2})
    assert number(loop) == pytest.approx(0.95 - 0.1 * 0.5 * 0.475, abs=1e-6)


def test_perfedavg_clips_the_meta_gradient(on_a_parabola, number, make_data, run_federation):
    data = make_data(counts=((4, 4),), test_fraction=0.0)
    method = on_a_parabola(PerFedAvg, 1, 0, alpha=0.5, beta=0.1)
    loop = run_federation(method, rounds=1, data=data, trainer={"gradient_clip_val": 0.2})
    assert number(loop) == pytest.approx(1 - 0.1 * 0.2, abs=1e-6)


def test_perfedavg_applies_extra_terms_to_f(on_a_parabola, number, sgd, make_data, run_federation):
    """f = ½w² + ½ μ (w − 1)² with μ = 2, w = 1, α = ¼: ∇f(1) = 1, w′ = ¾, u = ¾ − 2 · ¼ = ¼."""
    method = on_a_parabola(PerFedAvg, 1, 0, alpha=0.25, beta=0.1, extra_terms=[Proximal(2.0)])
    loop = run_federation(method, rounds=1, data=make_data(ONE_CLIENT, batch_size=100))
    assert number(loop) == pytest.approx(1 - 0.1 * 0.25, abs=1e-6)


@pytest.mark.parametrize(("approximation", "samples"), [("FO", 4), ("HF", 4), ("HF", 8)])
def test_perfedavg_shows_terms_a_batch_once_that_it_goes_through_again(
    mlp, make_data, run_federation, approximation, samples
):
    """A client of too few batches counted for its prototypes with up to three times its samples."""
    data = make_data(counts=((samples, 0), (0, 12)), test_fraction=0.0)
    terms = lambda: [PrototypeAlignment(collection="running")]  # noqa: E731
    method = lambda: PerFedAvg(mlp(num_classes=2), approximation=approximation, extra_terms=terms())  # noqa: E731
    loop = run_federation(method, rounds=1, data=data)
    counts = [loop.diary.sent[1, client].artifacts["prototypes"].count.tolist() for client in (0, 1)]
    assert counts == [[samples, 0], [0, 12 if approximation == "HF" else 8]]


@pytest.mark.parametrize("approximation", ["FO", "HF"])
def test_perfedavg_trains_in_mixed_precision(conv_net, run_federation, approximation):
    method = lambda: PerFedAvg(conv_net(), approximation=approximation)  # noqa: E731
    loop = run_federation(method, rounds=3, trainer={"precision": "bf16-mixed"})
    assert loop.diary.rows[-1]["loss"] < loop.diary.rows[0]["loss"]


# --- the personal model ----------------------------------------------


def test_perfedavg_evaluation_leaves_state_and_streams_and_repeats_itself(conv_net, run_federation, unchanged):
    loop = run_federation(lambda: PerFedAvg(conv_net(), alpha=0.3, adapt_steps=2), rounds=1)
    client = loop.runner.load(0)
    client.receive(loop.exchange.inbox(0), loop.data.clients[0])
    with unchanged(client):
        one = loop.runner.evaluator.client(client, 0, "received")
        other = loop.runner.evaluator.client(client, 0, "received")
    assert one == other


def test_perfedavg_personal_model_is_steps_on_training_batches(mlp, make_data, run_federation):
    data = make_data(batch_size=100)
    loop = run_federation(lambda: PerFedAvg(mlp(), alpha=0.6, adapt_steps=2), rounds=1, data=data)
    client = loop.runner.load(2)
    client.receive(loop.exchange.inbox(2), data.clients[2])
    model = copy.deepcopy(client.method.model)
    client.adapt(data.clients[2])
    x, y = data.store.gather(data.clients[2].train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for own, expected in zip(client.method.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_perfedavg_server_accuracy_is_that_of_the_model_without_the_step(mlp, run_federation):
    """Without steps all clients predict as the server's model does; with them they do not."""
    plain = run_federation(lambda: PerFedAvg(mlp(), adapt_steps=0), rounds=2)
    assert plain.final["Global-T_received"] == pytest.approx(plain.diary.rows[-1]["Server-T"], abs=1e-12)
    adapted = run_federation(lambda: PerFedAvg(mlp(), alpha=0.1, adapt_steps=5), rounds=1)
    assert adapted.final["Global-T_received_std"] > 0


# --- the exchange ----------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_perfedavg_averages_as_told(mlp, run_federation, weighting):
    loop = run_federation(lambda: PerFedAvg(mlp(), weighting=weighting), rounds=1)
    messages = [loop.diary.sent[1, client] for client in range(4)]
    counts = [message.num_samples if weighting == "samples" else 1 for message in messages]
    assert PerFedAvg(mlp()).weighting == "uniform"
    for name, merged in loop.exchange.global_message().weights.items():
        expected = sum(c * m.weights[name].double() for c, m in zip(counts, messages, strict=True)) / sum(counts)
        torch.testing.assert_close(merged, expected.float())


def test_perfedavg_sends_the_whole_model_both_ways(conv_net, run_federation):
    loop = run_federation(lambda: PerFedAvg(conv_net()), rounds=2)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for row in loop.diary.rows:
        assert row["uplink_params"] == row["downlink_params"] == 4 * size


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"alpha": -0.1}, r"method\.alpha: must be >= 0"),
        ({"beta": 0.0}, r"method\.beta: must be > 0 or null, got 0\.0"),
        ({"approximation": "SO"}, r"method\.approximation: must be one of FO, HF, got 'SO'"),
        ({"delta": 0.0}, r"method\.delta: must be > 0, got 0\.0"),
        ({"adapt_steps": -1}, r"method\.adapt_steps: must be >= 0, got -1"),
        ({"weighting": "n"}, r"method\.weighting: must be one of samples, uniform, got 'n'"),
    ],
    ids=str,
)
def test_perfedavg_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        PerFedAvg(mlp(), **option)
