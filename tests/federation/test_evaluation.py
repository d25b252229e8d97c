import random

import numpy as np
import pytest
import torch

from fl_lightning.core.method import Method, Predictor, Seen
from fl_lightning.federation.fairness import spread
from fl_lightning.federation.scores import ScoreBoard
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.report.columns import is_measure

NAN = float("nan")


class Tuned(Method):
    """Shifts its head before every evaluation, by the client's own data and by chance."""

    shared = ("model.body",)

    def predictors(self):
        return {"": Predictor(self.scores, adapts=True)}

    def scores(self, seen):
        return seen.logits(self.model)

    def adapt(self, data):
        with torch.no_grad():
            self.model.head.bias.add_(10 * data.held_classes.float() + torch.rand(4) * 0.01)
            np.random.rand(3)
            random.random()


@pytest.fixture
def evaluated(mlp, set_up_federation):
    """A loop that is set up, its evaluator and its module."""

    def make(method=None, evaluate=None, **options):
        options["evaluate"] = evaluate or alone()
        loop = set_up_federation(method or (lambda: FedAvg(mlp())), **options)
        return loop, loop.runner.evaluator, loop.runner.modules[0]

    return make


def alone(**options):
    """A policy of accuracies, without other measures."""
    return EvaluationPolicy(loss=False, balanced_accuracy=False, **options)


def accuracy(module, data, indices):
    """By hand: one sample after the other."""
    module.eval()
    (way,) = module.predictors.values()
    hits = []
    with torch.no_grad():
        for index in indices:
            x, y = data.store.gather(index[None])
            hits.append(float(way.scores(Seen(x)).argmax(1) == y))
    return sum(hits) / len(hits)


@pytest.mark.parametrize("batch_size", [1, 5, 512])
def test_local_and_global_accuracy_equal_a_pass_by_hand(evaluated, batch_size):
    loop, evaluator, module = evaluated(evaluate=alone(batch_size=batch_size))
    union = torch.cat([client.test for client in loop.data.clients])
    for client in range(4):
        scores = evaluator.client(module, client, "trained")
        assert scores["Local-T"] == pytest.approx(accuracy(module, loop.data, loop.data.clients[client].test))
        assert scores["Global-T"] == pytest.approx(accuracy(module, loop.data, union))


def test_local_accuracy_is_the_same_without_the_union(evaluated, mlp):
    _, with_union, module = evaluated()
    _, without, other = evaluated(evaluate=alone(globally=False))
    for client in range(4):
        scores = without.client(other, client, "trained")
        assert set(scores) == {"Local-T"}
        assert scores["Local-T"] == with_union.client(module, client, "trained")["Local-T"]


def test_columns_are_named_after_the_moment(evaluated):
    _, evaluator, module = evaluated()
    assert set(evaluator.client(module, 0, "received")) == {"Local-T_received", "Global-T_received"}


def test_all_ways_to_predict_are_scored(evaluated, mlp):
    _, evaluator, module = evaluated(lambda: FedProto(mlp()))
    scores = evaluator.client(module, 0, "trained")
    bases = ("Local-T", "Global-T")
    assert set(scores) == {base + way for base in bases for way in ("", "/prototype", "/classifier")}
    assert scores["Local-T"] == scores["Local-T/prototype"]
    assert evaluator.columns(module, ["trained"]) == list(scores)


def test_client_without_test_samples_has_a_global_accuracy_only(make_data, evaluated):
    data = make_data(counts=((1, 0, 0, 0), (8, 8, 8, 8), (4, 4, 0, 0), (0, 0, 4, 4)))
    _, evaluator, module = evaluated(data=data)
    scores = evaluator.client(module, 0, "trained")
    assert np.isnan(scores["Local-T"])
    assert 0 <= scores["Global-T"] <= 1


def test_no_model_is_asked_of_a_part_without_samples(make_data, evaluated, mlp):
    """Many a network of one's own cannot: `x.view(len(x), -1)`."""
    data = make_data(counts=((1, 0, 0, 0), (8, 8, 8, 8), (4, 4, 0, 0), (0, 0, 4, 4)), validation_fraction=0.2)
    assert (data.num_test[0], data.num_validation[0]) == (0, 0)
    _, evaluator, module = evaluated(data=data, evaluate=EvaluationPolicy(globally=False))
    asked = []
    module.method.model.body.register_forward_pre_hook(lambda body, given: asked.append(len(given[0])))
    scores = evaluator.client(module, 0, "trained")
    assert np.isnan(scores["Local-T"])
    assert np.isnan(scores["Local-V"])
    assert evaluator.client(module, 1, "trained")["Local-V"] >= 0
    assert min(asked) > 0


def test_evaluation_leaves_module_and_random_streams_alone(conv_net, evaluated, assert_identical):
    """Dropout and batch norm stand still; the mode comes back as it was."""
    _, evaluator, module = evaluated(lambda: FedAvg(conv_net()))
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stream = torch.get_rng_state()
    first = evaluator.client(module, 1, "trained")
    assert module.training
    assert_identical(dict(module.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert evaluator.client(module, 1, "trained") == first


def test_adaptation_runs_on_a_throw_away_copy(mlp, evaluated, assert_identical):
    loop, evaluator, module = evaluated(lambda: Tuned(mlp()))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    scores = evaluator.client(module, 3, "trained")
    assert_identical(dict(module.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert repr(np.random.get_state()) == repr(streams[1])
    assert random.getstate() == streams[2]
    module.adapt(loop.data.clients[3])
    assert scores["Local-T"] == accuracy(module, loop.data, loop.data.clients[3].test)


class Counted(Tuned):
    """Counts its adaptations in what is in no state."""

    def setup(self):
        self.register_buffer("adapted", torch.zeros(()), persistent=False)

    def adapt(self, data):
        super().adapt(data)
        self.adapted += 1


def test_adaptation_leaves_nothing_in_buffers_that_are_in_no_state(mlp, evaluated):
    _, evaluator, module = evaluated(lambda: Counted(mlp()))
    evaluator.client(module, 0, "trained")
    assert module.method.adapted == 0


@pytest.mark.parametrize("where", ["adapt", "scores"])
def test_adaptation_that_fails_does_not_leak(mlp, evaluated, assert_identical, where):
    class Fails(Tuned):
        fails_in = ""

        def adapt(self, data):
            super().adapt(data)
            if self.fails_in == "adapt":
                raise RuntimeError("cannot predict")

        def scores(self, seen):
            if self.fails_in == "scores":
                raise RuntimeError("cannot predict")
            return super().scores(seen)

    _, evaluator, module = evaluated(lambda: Fails(mlp()))
    module.method.fails_in = where
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="cannot predict"):
        evaluator.client(module, 0, "trained")
    assert_identical(dict(module.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_adaptation_does_not_change_what_is_trained(mlp, run_federation, outcome, assert_identical):
    class Plain(Method):
        shared = ("model.body",)

    adapted, plain = (outcome(run_federation(lambda kind=kind: kind(mlp()))) for kind in (Tuned, Plain))
    assert_identical(adapted["clients"], plain["clients"])
    assert_identical(adapted["exchange"], plain["exchange"])


def test_client_that_never_took_part_is_tested_as_itself(mlp, run_federation):
    """Before round 1, with nothing but its initial state, whoever was fitted before in the resident module."""

    class Listening(FedAvg):
        def receive(self, message, data):
            assert self.facts.client == data.client
            if message.num_params == 0:
                resting.append((self.facts.client, self.facts.round, torch.rand(()).item()))
            super().receive(message, data)

    resting = []
    loop = run_federation(lambda: Listening(mlp()), rounds=1, participation=0.5)
    expected = sorted(set(range(4)) - set(loop.participants))
    assert [(client, round) for client, round, _ in resting] == [(client, 0) for client in expected]
    again, resting = resting, []
    loop.runner.evaluate_resting(expected[1])
    assert resting == again[1:]


# --- spread -------------------------------------------------------------------------------------------------------


def test_spread_matches_hand_computed_values():
    """Mean 0.6, deviations 0.4, 0.2, 0.2, 0.4 -> variance 0.1; weights 1, 2, 3, 4 -> (0.2 + 0.8 + 2.4 + 4) / 10."""
    found = spread(np.array([0.2, 0.4, 0.8, 1.0]), np.array([1, 2, 3, 4]))
    hand = {"": 0.6, "_std": np.sqrt(0.1), "_min": 0.2, "_worst10": 0.2, "_weighted": 0.74}
    pairs = 2 * (0.2 + 0.6 + 0.8 + 0.4 + 0.6 + 0.2)  # Gini: of all pairs, over 2 · 4² · 0.6
    hand |= {"_gini": pairs / (32 * 0.6), "_jain": 2.4**2 / (4 * (0.04 + 0.16 + 0.64 + 1))}
    assert found == pytest.approx(hand)


def test_spread_leaves_out_clients_without_a_value():
    found = spread(np.array([NAN, 0.5, 1.0, NAN]), np.array([0, 10, 30, 0]))
    hand = {"": 0.75, "_std": 0.25, "_min": 0.5, "_worst10": 0.5, "_weighted": 0.875, "_gini": 1 / 6, "_jain": 0.9}
    assert found == pytest.approx(hand)


@pytest.mark.parametrize(("clients", "value"), [(3, 0.1), (6, 0.1), (7, 0.3), (10, 0.1), (12, 0.7)])
def test_jain_of_equals_is_one_and_not_a_rounding_more(clients, value):
    assert 1 - 1e-12 < spread(np.full(clients, value), np.ones(clients))["_jain"] <= 1


def test_spread_of_nobody_is_empty():
    assert spread(np.array([NAN, NAN]), np.array([0, 0])) == {}


@pytest.mark.parametrize(("clients", "worst"), [(1, 0.0), (10, 0.0), (11, 0.005), (20, 0.005), (21, 0.01)])
def test_worst_tenth_is_at_least_one_client_and_rounded_up(clients, worst):
    """Values 0, 0.01, 0.02, …: the mean over one, two or three of them."""
    values = np.arange(clients) / 100
    assert spread(values[::-1].copy(), np.ones(clients))["_worst10"] == pytest.approx(worst)


def test_spread_of_one_client_has_no_deviation():
    assert spread(np.array([0.3]), np.array([5]))["_std"] == 0


# --- what the loop evaluates --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "columns"),
    [
        ({}, {"Local-T", "Global-T", "Local-T_received", "Global-T_received"}),
        ({"received": False}, {"Local-T", "Global-T"}),
        ({"trained": False}, {"Local-T_received", "Global-T_received"}),
        ({"globally": False}, {"Local-T", "Local-T_received"}),
        ({"trained": False, "received": False}, set()),
    ],
)
def test_policy_says_what_is_evaluated(mlp, run_federation, policy, columns):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, evaluate=EvaluationPolicy(**policy))
    assert {name for name in loop.scores if not is_measure(name)} == columns
    assert {name for name in loop.scores if is_measure(name)} == {
        f"{measure}/{column}" for measure in ("eval_loss", "balanced_accuracy") for column in columns
    }
    filled = {name for name, value in loop.diary.rows[-1].items() if value is not None and name in ALL}
    assert filled == columns | {"Server-T"}
    assert loop.final.keys() <= set(loop.row_columns)


ALL = {"Local-T", "Global-T", "Local-T_received", "Global-T_received", "Server-T"}


def test_server_accuracy_can_be_switched_off(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1, evaluate=EvaluationPolicy(server=False))
    assert loop.diary.rows[0]["Server-T"] is None


def test_server_accuracy_is_that_of_the_aggregated_model(mlp, make_client, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2)
    module = make_client(FedAvg(mlp()))
    module.load(loop.exchange.global_message().weights)
    assert loop.diary.rows[-1]["Server-T"] == pytest.approx(accuracy(module, loop.data, loop.data.server_test))


def test_trained_accuracy_is_that_of_the_clients_own_models(mlp, make_client, run_federation):
    """FedRep: own heads under the body that each client has just trained, not the averaged one."""
    loop = run_federation(lambda: FedRep(mlp()), rounds=2)
    for client in range(4):
        module = make_client(FedRep(mlp()))
        module.load(loop.runner.pool.get(client))
        module.load(loop.diary.sent[2, client].weights)
        own = accuracy(module, loop.data, loop.data.clients[client].test)
        assert loop.scores["Local-T"][client] == pytest.approx(own)


def test_final_received_is_one_more_receive_without_a_fit(mlp, make_client, run_federation):
    loop = run_federation(lambda: FedRep(mlp()), rounds=2)
    values = []
    for client in range(4):
        module = make_client(FedRep(mlp()))
        module.load(loop.runner.pool.get(client))
        module.load(loop.exchange.global_message().weights)
        values.append(accuracy(module, loop.data, loop.data.clients[client].test))
    assert loop.final["Local-T_received"] == pytest.approx(np.mean(values))
    longer = run_federation(lambda: FedRep(mlp()), rounds=3)
    assert loop.final["Local-T_received"] == longer.diary.rows[2]["Local-T_received"]


def test_a_way_that_is_called_like_validation_parts_is_weighed_by_test_samples():
    samples = {"T": np.array([1, 3]), "V": np.array([1, 1])}
    spread = ScoreBoard([], samples).spread("Local-T/cls-V", np.array([0.0, 1.0]))
    assert spread["Local-T/cls-V_weighted"] == 0.75
