"""What is tested when: the global model of methods that have one, and what need not be tested twice."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_lightning.classifier import classifier_of
from fl_lightning.core.client import ClientModule
from fl_lightning.core.method import Method, Predictor, Seen
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.early_stopping import EarlyStopping
from fl_lightning.federation.evaluation import join_batches
from fl_lightning.federation.examiner import holds
from fl_lightning.federation.model_files import full_state
from fl_lightning.federation.reexamination import reexamine
from fl_lightning.federation.resting import mixes, rests_on_what_travels
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel

BOTH = ("Local-T", "Global-T")


class TwoModels(Method):
    """A personal copy stays beside the global model, as Ditto's: clients predict with theirs, the server with its."""

    server_figures = ("Server-T",)
    personal_figures = BOTH

    def setup(self):
        self.personal = copy.deepcopy(self.model)

    def local_step(self, step):
        super().local_step(step)
        with torch.no_grad():
            for own, shared in zip(self.personal.parameters(), self.model.parameters(), strict=True):
                own.lerp_(shared, 0.5)

    def predictors(self):
        return {
            "personal": Predictor(lambda seen: seen.logits(self.personal), self.personal_figures),
            "global": Predictor(lambda seen: seen.logits(self.model), self.server_figures),
        }


class Claims(TwoModels):
    """Says that its personal model is the server's, too."""

    server_figures = ()
    personal_figures = (*BOTH, "Server-T")


class KnowsItsClasses(FedAvg):
    """Prefers the classes that its client holds: a predictor that rests on what a receive makes of own data."""

    def __init__(self, model, kind):
        super().__init__(model)
        filled = torch.ones(4, dtype=torch.bool) if kind == "mask" else torch.zeros(4)
        self.register_buffer("held", filled, persistent=False)

    def receive(self, message, data):
        super().receive(message, data)
        self.held.copy_(data.held_classes)

    def predictors(self):
        return {"": Predictor(self.scores)}

    def scores(self, seen):
        logits = seen.logits(self.model)
        mask = self.held.dtype == torch.bool
        return logits.masked_fill(~self.held, -torch.inf) if mask else logits + 10 * self.held


class Starts(FedBABU):
    """Trains the head, too, and every receive puts the first one back."""

    def phases(self):
        return Method.phases(self)

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model))}


class KnowsWho(FedAvg):
    """Turns the classes of every second client around."""

    def predictors(self):
        return {"": Predictor(self.scores)}

    def scores(self, seen):
        logits = seen.logits(self.model)
        return logits.flip(1) if self.facts.client % 2 == 1 else logits


class GoesByTheRound(FedAvg):
    """Rolls the classes by the rounds that are told of, as where data drift."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model).roll(self.facts.round, 1))}


class Compares(FedAvg):
    """Predicts by what sets a sample apart from those that are tested with it, as a model that adapts to them."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model) - seen.logits(self.model).mean(0))}


class ComparesTheBest(FedAvg):
    """The same by the largest, of which no samples have any."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model) - seen.logits(self.model).amax(0))}


class RoundsOtherwise(FedAvg):
    """Predicts by sums that depend on the other samples in their last digit, as where padding is cut off."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model) * (1 + 3e-6 * seen.x.mean()))}


class Counts(FedAvg):
    """Predicts in whole numbers."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model).argsort(1))}


class HasDice(FedAvg):
    """Predicts with noise from a generator of its own."""

    def setup(self):
        self.dice = torch.Generator().manual_seed(0)

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model) + torch.rand(4, generator=self.dice))}


class KnowsItsSteps(FedAvg):
    """Rolls the classes by the steps of its last fit."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model).roll(self.fit.num_steps, 1))}


class Draws(FedAvg):
    """Predicts with noise from the global stream."""

    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model) + torch.rand(()))}


@pytest.fixture
def x():
    return torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def untested(loop):
    """Let a loop test every client after its receive, as if nothing were known ahead."""
    loop.examiner.may_predict_as_global = lambda client: False
    return loop


def numbers(row):
    return {name: value for name, value in row.items() if not name.startswith("seconds")}


def assert_same_numbers(one, other):
    assert [numbers(row) for row in one.diary.rows] == [numbers(row) for row in other.diary.rows]
    assert one.final == other.final
    for name, values in one.scores.items():
        np.testing.assert_array_equal(values, other.scores[name])


# --- what a prediction rests on ---------------------------------------------------------------------------------------

MAKERS = {
    "all is shared": (FedAvg, {"": True}),
    "nothing is shared": (Local, {"": False}),
    "the head is private": (FedRep, {"": False}),
    "the head is the first one": (FedBABU, {"": True}),
    "personalised": (PerFedAvg, {"": True}),
    "prototypes are shared": (FedProto, {"prototype": False, "classifier": False}),
    "two models": (TwoModels, {"personal": False, "global": True}),
    "random": (Draws, {"": True}),
    "a mask of own classes": (lambda model: KnowsItsClasses(model, "mask"), {"": False}),
    "a prior of own classes": (lambda model: KnowsItsClasses(model, "prior"), {"": False}),
    "which client it is": (KnowsWho, {"": False}),
    "how the last fit went": (KnowsItsSteps, {"": False}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_prediction_rests_on(name, mlp, make_client, x):
    make, expected = MAKERS[name]
    client = make_client(make(mlp()))
    found = {way: rests_on_what_travels(client, predictor, x) for way, predictor in client.predictors.items()}
    assert found == expected


def test_statistics_that_do_not_travel_are_private(conv_net, x):
    clients = [ClientModule(FedAvg(conv_net()), share_buffers=share) for share in (True, False)]
    assert [rests_on_what_travels(client, client.predictors[""], x) for client in clients] == [True, False]


@pytest.mark.parametrize("make", [FedRep, TwoModels, Draws, lambda model: KnowsItsClasses(model, "mask")])
def test_measuring_leaves_the_client_and_the_streams_alone(make, mlp, make_client, x, assert_identical):
    client = make_client(make(mlp()))
    client.train()
    before = {name: tensor.clone() for name, tensor in (*client.entries.items(), *client.method.named_buffers())}
    stream = torch.get_rng_state()
    for way in client.predictors.values():
        rests_on_what_travels(client, way, x)
    assert_identical(dict((*client.entries.items(), *client.method.named_buffers())), before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert client.training


LOOK_AT_THEMSELVES = [FedAvg, Draws, HasDice, RoundsOtherwise, Counts, TwoModels, KnowsWho, PerFedAvg, FedProto]


@pytest.mark.parametrize("make", [Compares, ComparesTheBest, *LOOK_AT_THEMSELVES])
def test_whether_a_prediction_looks_at_the_samples_beside(make, mlp, make_client):
    few = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert mixes(make_client(make(mlp())), few) == (make not in LOOK_AT_THEMSELVES)


@pytest.mark.parametrize("cohort", [None, 4])
def test_own_samples_are_tested_by_themselves_where_a_prediction_looks_at_others(mlp, run_federation, cohort):
    """Local-T was what came of them among all clients' samples, whenever these were tested, too."""
    both, own = (
        run_federation(lambda: Compares(mlp()), cohort=cohort, evaluate=EvaluationPolicy(globally=globally))
        for globally in (True, False)
    )
    for name, values in own.scores.items():
        np.testing.assert_array_equal(values, both.scores[name])
    assert own.final.items() <= both.final.items()
    assert both.diary.rows[-1]["Server-T"] == own.diary.rows[-1]["Server-T"] is not None
    assert any(name.startswith("Global-T") for name in both.scores)


def test_a_client_without_test_samples_is_asked_for_no_prediction_of_none(mlp, run_federation, make_data):
    data = make_data(counts=((8, 0, 0, 0), (8, 8, 8, 8), (1, 0, 0, 0)))
    loop = run_federation(lambda: ComparesTheBest(mlp()), rounds=1, data=data)
    assert np.isnan(loop.scores["Local-T"]).tolist() == [False, False, True]
    assert not np.isnan(loop.scores["Global-T"]).any()


def test_measuring_that_fails_puts_back_what_it_hid(mlp, make_client, x, assert_identical):
    client = make_client(FedRep(mlp()))
    before = {name: tensor.clone() for name, tensor in client.entries.items()}

    def scores(seen):
        if client.method.model.head.bias.isnan().any():
            raise RuntimeError("cannot predict")
        return seen.logits(client.method.model)

    with pytest.raises(RuntimeError, match="cannot predict"):
        rests_on_what_travels(client, Predictor(scores), x)
    assert_identical(client.entries, before)


@pytest.mark.parametrize("make", [KnowsWho, KnowsItsSteps])
@pytest.mark.parametrize("cohort", [None, 4])
def test_each_client_is_tested_as_itself(make, cohort, mlp, run_federation):
    """Those of a cohort were all tested as its first."""
    loop = run_federation(lambda: make(mlp()), rounds=1, cohort=cohort)
    x, y = loop.data.store.gather(loop.data.server_test)
    for client, data in enumerate(loop.data.clients):
        module = loop.runner.residents.load_global(loop.diary.sent[1, client])
        module.eval()
        with torch.no_grad():
            logits = module.method.model(x)
        if make is KnowsItsSteps:
            logits = logits.roll(data.num_steps(loop.data.batch_size), 1)
        elif client % 2:
            logits = logits.flip(1)
        hits = (logits.argmax(1) == y).double()
        assert loop.scores["Global-T"][client] == pytest.approx(float(hits.mean()))


def test_what_all_hear_is_tested_once_unless_it_is_asked_who_does(mlp, run_federation):
    """The global model's test was everybody's, by the scores of a client that is none."""
    loop = run_federation(lambda: KnowsWho(mlp()), rounds=1)
    once = untested(copy.copy(loop)).receive_once_more()
    assert once == loop.final
    assert loop.diary.rows[-1]["Server-T"] is None


# --- Server-T ---------------------------------------------------------------------------------------------------------


def test_server_accuracy_of_two_models_is_the_global_ones(mlp, run_federation):
    loop = run_federation(lambda: TwoModels(mlp()), rounds=2)
    module = loop.runner.residents.load_global(loop.exchange.global_message())
    x, y = loop.data.store.gather(loop.data.server_test)
    module.eval()
    with torch.no_grad():
        hits = module.method.model(x).argmax(1) == y
    assert loop.diary.rows[-1]["Server-T"] == pytest.approx(float(hits.double().mean()))
    assert loop.diary.rows[-1]["Local-T"] == loop.diary.rows[-1]["Local-T/personal"]
    personal = loop.scores["Global-T/personal"]
    assert len(set(personal)) > 1  # clients' own models are not the global one


@pytest.mark.parametrize(
    ("make", "has_one"),
    [
        (FedAvg, True), (TwoModels, True), (FedBABU, True), (Starts, True), (Claims, False), (FedRep, False),
        (GoesByTheRound, True),
        (Local, False), (FedProto, False), (lambda model: KnowsItsClasses(model, "prior"), False),
    ],
)  # fmt: skip
def test_methods_whose_predictions_travel_have_a_global_model(make, has_one, mlp, run_federation):
    loop = run_federation(lambda: make(mlp()), rounds=1)
    assert loop.examiner.has_global_model == has_one
    assert (loop.diary.rows[-1]["Server-T"] is not None) == has_one
    assert (loop.examiner.server_scores()["Server-T"] is not None) == has_one


class Tied(nn.Module):
    """One layer, one buffer and a scale, each under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.fc = nn.Linear(64, 64), nn.Linear(64, 4)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.first.weight
        self.register_buffer("shift", torch.randn(64))
        self.register_buffer("shift_again", self.shift)

    def forward(self, x):
        x = self.first(x.flatten(1)).relu() + self.shift
        return self.fc(self.again(x).relu() + self.shift_again)


def test_a_network_with_tied_tensors_has_a_global_model(run_federation):
    """The second name of what travels was hidden, and with it the first."""
    loop = run_federation(lambda: FedAvg(WrappedModel((1, 8, 8), 4, Tied(), "fc")), rounds=1)
    assert loop.examiner.has_global_model
    assert loop.diary.rows[-1]["Server-T"] is not None
    own = run_federation(lambda: FedRep(WrappedModel((1, 8, 8), 4, Tied(), "fc")), rounds=1)
    assert not own.examiner.has_global_model


def test_tied_tensors_of_a_kept_model_stay_one(make_client):
    """Its file had them once for each of their names."""
    client = make_client(FedAvg(WrappedModel((1, 8, 8), 4, Tied(), "fc")))
    there, kept = ({n: own.data_ptr() for n, own in full_state(client, copies).items()} for copies in (False, True))
    assert len(set(kept.values())) == len(set(there.values())) < len(there)
    assert not set(kept.values()) & set(there.values())


@pytest.mark.parametrize("make", [FedBABU, Starts])
def test_global_model_has_the_head_that_every_receive_puts_there(make, mlp, run_federation):
    """Whoever was fitted last in the resident module: the averaged body under the first head."""
    loop = run_federation(lambda: make(mlp()), rounds=2)
    module = loop.runner.modules[0]
    module.receive(loop.exchange.global_message(), loop.data.clients[0])
    x, y = loop.data.store.gather(loop.data.server_test)
    module.eval()
    with torch.no_grad():
        hits = module.method.model(x).argmax(1) == y
    assert loop.diary.rows[-1]["Server-T"] == float(hits.double().mean())


# --- what is read off the global model --------------------------------------------------------------------------------


class Nudged(FedAvg):
    """Moves what it received: it does not predict as the global model does."""

    def receive(self, message, data):
        super().receive(message, data)
        with torch.no_grad():
            self.model.head.bias.add_(10 * data.held_classes.float())


class NudgedInPart(Nudged):
    """Only some clients do."""

    def receive(self, message, data):
        (super() if data.client % 2 else FedAvg).receive(*(() if data.client % 2 else (self,)), message, data)


CASES = {
    "all is shared": FedAvg,
    "moved in the receive": Nudged,
    "moved by some": NudgedInPart,
    "a head made anew": Starts,
    "a head made anew, then tuned": FedBABU,
    "a mask of own classes": lambda model: KnowsItsClasses(model, "mask"),
    "two models": TwoModels,
    "another in every round": GoesByTheRound,
}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_scores_read_off_the_global_model_are_those_of_a_test(name, participation, mlp, set_up_federation):
    make = lambda: CASES[name](mlp())  # noqa: E731
    short, tested = (set_up_federation(make, rounds=3, participation=participation) for _ in range(2))
    untested(tested)
    for loop in (short, tested):
        loop.final = loop.run()
    assert_same_numbers(short, tested)


@pytest.mark.parametrize("make", [GoesByTheRound, KnowsWho])
def test_predictions_that_go_by_what_is_told_are_found_again(make, mlp, set_up_federation, assert_resumes, tmp_path):
    """They were told of round 0, and of no client: by `evaluate`, by models that are loaded, and in resumed runs."""
    straight = assert_resumes(lambda: make(mlp()), participation=0.5)
    loop = set_up_federation(lambda: make(mlp()), participation=0.5, folder=tmp_path)
    found = {name: value for name, _, value in reexamine(loop, tmp_path)}
    written = {**straight.diary.rows[-1], **straight.final}
    assert found.items() <= written.items()
    assert {"Local-T", "Local-T_received"} <= found.keys()
    for client in range(loop.num_clients):
        model, data = classifier_of(loop, tmp_path, client), loop.data.clients[client]
        x, y = loop.data.store.gather(data.test)
        with torch.no_grad():
            right = float((model(x).argmax(1) == y).double().mean())
        assert right == straight.scores["Local-T"][client]


class FallsSick(GoesByTheRound):
    """Its second client cannot train in the last round."""

    def local_step(self, step):
        if (self.facts.round, self.facts.client) == (3, 1):
            raise ValueError("sick")
        super().local_step(step)


def test_a_model_of_a_round_before_is_told_of_that_one(mlp, set_up_federation, make_data, sgd, tmp_path):
    """Its client fell sick in its last round, and the model was asked as if it were of that one."""
    stops = {"early_stopping": EarlyStopping(patience=2), "on_client_error": "skip", "optimizer": sgd(lr=0.01)}

    def set_up():
        data = make_data(validation_fraction=0.25)
        return set_up_federation(lambda: FallsSick(mlp()), rounds=3, data=data, folder=tmp_path, **stops)

    ran = set_up()
    final = ran.run()
    found = {name: value for name, _, value in reexamine(set_up(), tmp_path)}
    assert found.items() <= {**ran.diary.rows[-1], **final}.items()


def test_what_the_global_model_makes_of_all_samples_is_measured_once_for_all_clients(mlp, set_up_federation):
    loop = set_up_federation(lambda: CASES["all is shared"](mlp()), rounds=2)
    measures, size = loop.runner.evaluator.measures, len(loop.runner.evaluator.parts[0].union)
    measured, of = Counter(), measures.of

    def counted(outcome, balance):
        measured[loop.round + 1] += len(outcome.right) == size
        return of(outcome, balance)

    measures.of = counted
    loop.advance()
    loop.advance()
    # The first global model and four models after their fits; what comes next is the server's, and then received.
    assert measured == {1: 1 + 4, 2: 1 + 4, 3: 1}


def count_tests(loop):
    """Which clients are tested right after their receive, by round."""
    tested, client = [], loop.runner.evaluator.client

    def counted(module, number, moment):
        if moment == "received":
            tested.append((loop.round + 1, number))
        return client(module, number, moment)

    loop.runner.evaluator.client = counted
    loop.run()
    return tested


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("all is shared", []),
        ("moved by some", [1, 3]),
        ("a mask of own classes", [0, 1, 2, 3]),
        ("two models", [0, 1, 2, 3]),
        ("another in every round", [0, 1, 2, 3]),
    ],
)
def test_who_holds_the_global_model_is_not_tested_again(name, clients, mlp, set_up_federation):
    """Twice: in the only round, and after one more receive at the end."""
    loop = set_up_federation(lambda: CASES[name](mlp()), rounds=1)
    assert count_tests(loop) == [(round, client) for round in (1, 2) for client in clients]


def test_client_holds_what_is_equal_bit_for_bit(mlp, make_client):
    client = make_client(FedAvg(mlp()))
    weights = client.division.weights()
    assert holds(client, weights)
    assert holds(client, {})
    assert not holds(client, {**weights, "model.other": torch.zeros(1)})
    name = next(iter(weights))
    first = weights[name].flatten()[0]
    weights[name].view(-1)[0] = torch.nextafter(first, first + 1)
    assert not holds(client, weights)


def test_what_several_predictors_need_is_computed_once(mlp, make_client):
    passes = []
    client = make_client(TwoModels(mlp()))
    client.method.model.body.register_forward_hook(lambda *_: passes.append(1))
    seen = Seen(torch.zeros(2, 1, 8, 8))
    for _ in range(2):
        client.predictors["global"].scores(seen)
    assert len(passes) == 1


def test_clients_of_another_architecture_are_tested_with_their_own(set_up_federation):
    """Entries of the same names and shapes, and another forward pass."""

    def make(architecture):
        activation = (nn.ReLU, nn.Tanh)[architecture]()
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), activation, nn.Linear(8, 4))
        return FedAvg(WrappedModel((1, 8, 8), 4, layers, head="3"))

    loop = set_up_federation(make, architecture=[0, 1, 0, 1], local_epochs=3)
    loop.run()
    facts = replace(loop.runner.facts, round=4)
    for client in range(4):
        own = loop.runner.evaluate_received(client, loop.exchange.inbox(client), facts, None)
        for name, value in own.items():
            assert loop.final_scores[name][client] == pytest.approx(value), (client, name)
    assert len({float(v) for v in loop.final_scores["eval_loss/Global-T_received"]}) == 2


@pytest.mark.parametrize("options", [{}, {"on_client_error": "skip"}, {"sampling": "poisson"}])
def test_who_sits_out_counts_with_what_it_received_last(mlp, run_federation, options):
    """Where fits are not tested; how often clients are tested changes nothing in those rounds."""
    policy = EvaluationPolicy(trained=False)
    often, seldom = (
        run_federation(lambda: FedAvg(mlp()), 6, participation=0.5, evaluate=policy, evaluate_every=every, **options)
        for every in (1, 3)
    )
    for round in (3, 6):
        one, other = ({k: v for k, v in loop.diary.rows[round - 1].items() if "-T" in k} for loop in (often, seldom))
        assert one == pytest.approx(other, nan_ok=True), round


def test_without_test_parts_the_global_model_is_tested_on_validation_parts(mlp, make_data, run_federation):
    data = make_data(test_fraction=0.0, validation_fraction=0.25)
    loop = run_federation(lambda: FedAvg(mlp()), 2, data=data)
    assert loop.examiner.has_global_model
    assert 0 < loop.diary.rows[-1]["Server-V"] <= 1
    assert loop.diary.rows[-1]["Server-T"] is None


def tokens(arrays):
    """Whole numbers, which are tokens."""
    arrays.x, arrays.vocabulary_size = (arrays.x.flatten(1) * 10).long().clamp(0, 9), 10


@pytest.mark.parametrize(("models", "key"), [(1, "model"), (2, r"model\.1")])
def test_a_model_that_cannot_take_the_data_is_refused_before_training(mlp, make_data, set_up_federation, models, key):
    class Reads(nn.Module):
        """Takes whole numbers and those with a point."""

        def __init__(self):
            super().__init__()
            self.hidden, self.head = nn.Linear(64, 5), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.hidden(x.float().flatten(1)))

    def wrapped():
        return WrappedModel((64,), 4, Reads(), "head")

    def method(architecture):
        return Local(mlp(shape=(64,)) if architecture == models - 1 else wrapped())

    said = rf"^{key}: MLP fails on a sample of the data set, int64 \[64\] \(.*whole numbers are tokens"
    with pytest.raises(ConfigError, match=said):
        set_up_federation(method, data=make_data(edit=tokens), architecture=[client % models for client in range(4)])


@pytest.mark.parametrize(("classes", "embedding"), [(3, 5), (5, 5), (4, 6)])
def test_a_model_that_makes_other_sizes_than_it_says_is_refused(set_up_federation, make_data, classes, embedding):
    """Of too few logits a class would be none; a traceback in round 1 said so, and of too many nothing did."""

    def method():
        body = Body([], nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
        return Local(SplitModel(body, nn.Linear(5, classes), embedding, 4, (1, 8, 8)))

    said = rf"an embedding \(1, {embedding}\) and logits \(1, 4\), got '\(1, 5\) and \(1, {classes}\)'"
    with pytest.raises(ConfigError, match=rf"^model: SplitModel must make what it says of 1 sample, {said}"):
        set_up_federation(method, data=make_data())


class Renormalises(nn.Module):
    """An embedding whose rows torch scales in place whenever they are looked up."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(17, 5, max_norm=1.0), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.rows((x.flatten(1).abs() * 3).long().clamp(max=16)).mean(1))


class Notes(nn.Module):
    """Keeps the largest number it has seen, whatever its mode."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 5), nn.Linear(5, 4)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.max().detach())
        return self.head(self.hidden(x.flatten(1)))


class Samples(SplitModel):
    """Drops out in eval mode, too, as Monte Carlo dropout does."""

    def __init__(self):
        super().__init__(Body([nn.Flatten()], nn.Linear(64, 16)), nn.Linear(16, 4), 16, 4, (1, 8, 8))

    def embed(self, x):
        return F.dropout(super().embed(x), 0.5, training=True)


def test_a_model_that_draws_in_eval_mode_is_tested_by_streams_of_the_mini_batches_own(
    run_federation, outcome, assert_identical, make_data
):
    """Figures were of what the last client had left of the streams: other workers, or a resumption, other figures."""

    class Draws(FederationCallback):
        def on_client_fit_end(self, loop, report):
            torch.rand(7)

    plain, other = (
        run_federation(lambda: FedAvg(Samples()), rounds=2, data=make_data(), callbacks=own) for own in ([], [Draws()])
    )
    assert plain.runner.evaluator.draws
    assert_identical(outcome(plain), outcome(other))


def test_a_model_that_draws_in_eval_mode_says_the_same_however_workers_share_its_mini_batches(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(Samples()), evaluate=EvaluationPolicy(batch_size=2))
    evaluator, module, union = loop.runner.evaluator, loop.runner.modules[0], loop.data.server_test
    (whole,) = evaluator.batches(module, union).values()
    shares = [evaluator.batches(module, union, rank, 2)[""] for rank in (0, 1)]
    assert torch.equal(join_batches(shares).loss, join_batches([whole]).loss)


class Halves(nn.Module):
    """Changes what it is given."""

    def forward(self, x):
        return x.mul_(0.5)


def test_a_model_that_changes_its_inputs_is_refused(set_up_federation, mlp, make_data):
    def method():
        model = mlp()
        model.body.stages.insert(0, Halves())
        return FedAvg(model)

    assert not set_up_federation(lambda: FedAvg(mlp()), data=make_data()).runner.evaluator.draws
    with pytest.raises(ConfigError, match=r"^model: MLP changes its inputs in place, which others read after it"):
        set_up_federation(method, data=make_data())


@pytest.mark.parametrize(("kind", "moved"), [(Renormalises, "rows.weight"), (Notes, "largest")])
def test_a_model_that_a_test_would_train_is_refused(set_up_federation, make_data, kind, moved):
    """What is evaluated changed what was trained, and test samples went into what was averaged."""
    with pytest.raises(
        ConfigError, match=rf"^model: WrappedModel's .*{moved} changes in eval mode, so that every test"
    ):
        set_up_federation(lambda: FedAvg(WrappedModel((1, 8, 8), 4, kind(), "head")), data=make_data())


class WritesBack(nn.Module):
    """Writes what it holds where it was, as an InstanceNorm of torch 2.6 does with its statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 0.1))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        self.mean.copy_(self.mean.expand(7, 3).mean(0))
        self.count.copy_(self.count.clone())
        return self.head(x.flatten(1))


def test_a_model_that_writes_back_what_it_holds_is_taken(set_up_federation, make_data):
    set_up_federation(lambda: FedAvg(WrappedModel((1, 8, 8), 4, WritesBack(), "head")), data=make_data())
