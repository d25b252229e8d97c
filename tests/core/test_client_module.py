"""What a client does with its method: messages in and out, the plan of a fit, the server's rules."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.core.aggregation import ClassMeanRule, TensorMean
from fl_lightning.core.client import ClientModule, FitSettings
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term, counts
from fl_lightning.errors import ConfigError
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.seeding import kept_streams, seed_global_streams


class Constant(Term):
    """A term whose value is known."""

    def forward(self, host, out):
        return torch.tensor(2.0)


class OnlyHead(Method):
    shared = ("model.head",)


class TwoPhases(Method):
    def phases(self):
        return [
            Phase("head", trains=("model.head",), epochs=2),
            Phase("nothing", trains=("terms",)),  # which have no parameters
            Phase("off", epochs=0),
            Phase("body", trains=("model.body",)),
        ]


# --- construction ----------------------------------------------


def test_method_gets_to_know_its_terms_in_the_clients_constructor(mlp):
    """First all terms alter the model, then the method is set up, then all terms are."""
    story = []

    class Tells(Constant):
        def alter(self, model):
            story.append((self.name, "alter"))

        def setup(self, host):
            story.append((self.name, type(host).__name__))

    class TellsToo(Tells):
        pass

    class Listens(Method):
        def setup(self):
            story.append("setup")

    method = Listens(mlp(), terms=[Tells()], extra_terms=[TellsToo()])
    assert story == []
    ClientModule(method)
    altered, known = [("tells", "alter"), ("tells_too", "alter")], [("tells", "Listens"), ("tells_too", "Listens")]
    assert story == [*altered, "setup", *known]


def test_client_holds_its_method_and_names_no_entry_of_its_own(conv_net, make_client):
    client = make_client(Method(conv_net()))
    assert client.entries.keys() == client.method.state_dict().keys()
    assert set(client.state_dict()) == {f"method.{name}" for name in client.entries}


class Projects(Constant):
    """Draws as it alters the model, and weights of its own."""

    def alter(self, model):
        torch.rand(2)

    def setup(self, host):
        self.net = nn.Linear(3, 2)
        self.offset = np.random.random()
        random.random()


class ProjectsToo(Projects):
    pass


def test_term_of_weight_0_moves_nothing_that_is_drawn_after_it(mlp):
    def drawn_with(*terms):
        method = Method(mlp(), extra_terms=[*terms, ProjectsToo()])
        seed_global_streams(0, "init")
        term = ClientModule(method).method.terms[-1]
        return [*term.net.weight.flatten().tolist(), term.offset, *torch.rand(2).tolist(), np.random.random()]

    assert drawn_with() == drawn_with(Projects(0.0))
    assert drawn_with() != drawn_with(Projects(0.5))
    pythons = random.getstate()
    with kept_streams():
        random.random()
    assert random.getstate() == pythons


def test_second_term_of_a_kind_is_refused(mlp):
    with pytest.raises(ConfigError, match="each term may occur once only, got 'constant'"):
        Method(mlp(), terms=[Constant()], extra_terms=[Constant(0.5)])


def test_extra_term_takes_the_place_of_one_that_is_off(mlp):
    method = Method(mlp(), terms=[Constant(0.0)], extra_terms=[Constant(0.5)])
    assert [(term.name, term.weight) for term in method.terms] == [("cross_entropy", 1.0), ("constant", 0.5)]
    assert list(method.terms.extra) == [method.terms[1]]
    assert method.terms.exchanging == list(method.terms)
    assert method.terms.cross_entropy is method.terms[0]


class OnBody(Constant):
    reaches = ("model.body",)


class OnlyTrainsHead(Method):
    def phases(self):
        return [Phase("head", trains=("model.head",)), Phase("off", trains=("model.body",), epochs=0)]


def test_extra_term_that_reaches_nothing_is_refused_in_one_line(mlp, make_client):
    rule = "OnBody trains model.body, which no phase of OnlyTrainsHead does: leave it out"
    with pytest.raises(ConfigError, match=rf"^method\.extra_terms: {rule}$"):
        make_client(OnlyTrainsHead(mlp(), extra_terms=[OnBody()]))
    make_client(OnlyTrainsHead(mlp(), extra_terms=[OnBody(0.0)]))
    make_client(OnlyTrainsHead(mlp(), terms=[OnBody()]))  # the method's own affair
    make_client(Method(mlp(), extra_terms=[OnBody()]))


def test_term_counts_where_it_has_a_weight_and_something_to_train(mlp):
    term, head, body = OnBody(), Phase("head", trains=("model.head",)), Phase("body", trains=("model",))
    assert [counts(term, phase, 1.0) for phase in (head, body)] == [False, True]
    assert not counts(term, body, 0.0)
    assert not counts(term, dataclasses.replace(body, terms=("cross_entropy",)), 1.0)
    assert counts(term, dataclasses.replace(body, terms=("on_body",)), 1.0)
    term.own = torch.nn.Linear(1, 1)  # what it has itself is trained wherever it counts
    assert counts(term, head, 1.0)


# --- messages ----------------------------------------------


def test_message_holds_copies_of_the_shared_weights(mlp, make_client, data):
    client = make_client(OnlyHead(mlp()))
    message = client.send(data.clients[0])
    assert tuple(message.weights) == client.division.shared
    assert message.num_samples == data.clients[0].num_train
    message.weights["model.head.weight"].zero_()
    assert client.method.model.head.weight.abs().sum() > 0


def test_initial_message_is_the_shared_weights_of_nobody(mlp, make_client, assert_identical):
    client = make_client(OnlyHead(mlp()))
    message = client.initial_message()
    assert_identical(message.weights, client.division.weights())
    assert (message.artifacts, message.num_samples) == ({}, 0)


def test_received_weights_are_copied_in(mlp, make_client, data):
    client = make_client(OnlyHead(mlp()))
    model = client.method.model
    own_body = model.body.neck[0].weight.clone()
    received = {"model.head.weight": torch.ones(4, 5)}
    client.receive(Message(received), data.clients[0])
    assert torch.equal(model.head.weight, torch.ones(4, 5))
    assert torch.equal(model.body.neck[0].weight, own_body)
    received["model.head.weight"].zero_()
    assert model.head.weight.sum() == 20


def test_state_round_trips_through_load(conv_net, make_client, assert_identical):
    torch.manual_seed(1)
    one, two = make_client(Method(conv_net())), make_client(Method(conv_net()))
    one.method.model.body.stages[0][1].num_batches_tracked.fill_(2**40 + 1)
    two.load(one.entries)
    assert_identical(dict(two.entries), dict(one.entries))


def test_method_sees_the_clients_data_bound_to_it(mlp, make_client, data):
    seen = []

    class Looks(Method):
        def receive(self, message, data):
            seen.append(data)

        def send(self, data):
            seen.append(data)
            return Message()

        def adapt(self, data):
            seen.append(data)

    client = make_client(Looks(mlp()))
    client.receive(Message(), data.clients[2])
    client.send(data.clients[2])
    client.adapt(data.clients[2])
    assert [own.client for own in seen] == [2, 2, 2]
    assert len({id(own) for own in seen}) == 3
    assert torch.equal(seen[0].collected().z, seen[1].collected().z)


def test_running_statistics_stay_where_buffers_are_not_shared(conv_net):
    client = ClientModule(Method(conv_net()), share_buffers=False)
    assert [name.rpartition(".")[2] for name in client.division.kept] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]


# --- the server's rules ----------------------------------------------


class Sends(Constant):
    def rules(self):
        return {"artifact": lambda: ClassMeanRule("uniform"), "of_the_term": TensorMean}


class NamesRules(Method):
    def make_server(self, initial, facts):
        return Server(initial, {"artifact": TensorMean})


def test_server_gets_the_rules_of_terms_below_its_own(mlp, make_client):
    server = make_client(NamesRules(mlp(), terms=[Sends()])).make_server(Facts(4))
    assert server.rules == {"artifact": TensorMean, "of_the_term": TensorMean}
    assert server.message.weights.keys() == make_client(Method(mlp())).division.weights().keys()
    plain = make_client(Method(mlp(), terms=[Sends()])).make_server(Facts(4))
    assert plain.rules["artifact"]().weighting == "uniform"
    assert make_client(Method(mlp(), terms=[Sends(0.0)])).make_server(Facts(4)).rules == {}


# --- the plan of a fit ----------------------------------------------


def test_phases_without_epochs_or_parameters_are_left_out(mlp, make_client, sgd):
    client = make_client(TwoPhases(mlp()), sgd(), local_epochs=3)
    assert [(p.phase.name, p.epochs) for p in client.plan()] == [("head", 2), ("body", 3)]
    assert client.plan().epochs == 5


def test_every_phase_has_an_optimizer_of_its_own_parameters(mlp, make_client, sgd):
    client = make_client(TwoPhases(mlp()), sgd())
    head, body = client.configure_optimizers()
    model = client.method.model
    assert {id(p) for p in head.param_groups[0]["params"]} == {id(p) for p in model.head.parameters()}
    assert {id(p) for p in body.param_groups[0]["params"]} == {id(p) for p in model.body.parameters()}


class InParts(Method):
    """One phase of three parts, one of which has nothing to train."""

    def phases(self):
        parts = {"head": ("model.head",), "absent": ("terms",), "body": ("model.body",)}
        return [Phase("all", parts=parts)]


def test_every_part_of_a_phase_has_an_optimizer_of_its_own(mlp, make_client, sgd):
    client = make_client(InParts(mlp()), sgd())
    (planned,) = client.plan()
    assert list(planned.parts) == ["head", "body"]
    assert {id(p) for p in planned.parameters} == {id(p) for p in client.method.parameters()}
    sizes = [len(optimizer.param_groups[0]["params"]) for optimizer in client.configure_optimizers()]
    assert sizes == [2, 4]


def test_parameters_of_two_parts_are_in_the_phase_once(mlp, make_client, sgd):
    class Overlaps(Method):
        def phases(self):
            return [Phase("all", parts={"model": ("model",), "head": ("model.head",)})]

    client = make_client(Overlaps(mlp()), sgd())
    (planned,) = client.plan()
    assert len(planned.parameters) == 6
    assert [len(made.param_groups[0]["params"]) for made in client.configure_optimizers()] == [6, 2]


def test_optimizers_are_made_anew(mlp, make_client, sgd):
    client = make_client(Method(mlp()), sgd())
    assert client.configure_optimizers()[0] is not client.configure_optimizers()[0]


def test_learning_rate_factor_is_applied_to_every_group(mlp, make_client):
    def groups(parameters):
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)])

    client = make_client(Method(mlp()), groups)
    client.lr_factor = 0.5
    rates = [group["lr"] for group in client.configure_optimizers()[0].param_groups]
    assert rates == pytest.approx([0.05 * (i + 1) for i in range(6)])
    assert client.method.fit.lr == pytest.approx(0.05)


def test_a_fits_facts_are_new_with_its_optimizers(mlp, make_client, sgd):
    client = make_client(TwoPhases(mlp()), sgd(0.2), local_epochs=3, accumulate=2)
    client.lr_factor = 0.5
    first = client.configure_optimizers()
    fit = client.method.fit
    assert (fit.epochs, fit.epoch, fit.num_batches, fit.num_steps) == (5, 0, 0, 0)
    assert (fit.lr, fit.lr_factor, fit.accumulate) == (0.1, 0.5, 2)
    for optimizer in first:
        optimizer.step()
    assert fit.num_steps == 2
    client.configure_optimizers()
    assert client.method.fit is not fit
    assert client.method.fit.num_steps == 0


def test_parameters_that_the_model_froze_stay_frozen(mlp, make_client, sgd):
    model = mlp()
    model.head.requires_grad_(False)
    client = make_client(Method(model), sgd())
    frozen = {id(p) for p in model.head.parameters()}
    assert frozen.isdisjoint(id(p) for p in client.plan()[0].parameters)


class TrainsBody(Method):
    def phases(self):
        return [Phase("off", epochs=0), Phase("body", trains=("model.body",))]


class TrainsNobody(Method):
    def phases(self):
        return []


def test_phases_that_train_nothing_are_refused(mlp):
    linear = SplitModel(Body([], nn.Flatten()), nn.Linear(64, 4), 64, 4, (1, 8, 8))
    with pytest.raises(ConfigError, match=r"^method: TrainsBody trains model.body, where no parameter learns"):
        ClientModule(TrainsBody(linear))
    with pytest.raises(ConfigError, match=r"^method: Method trains everything, where no parameter learns"):
        ClientModule(Method(mlp().requires_grad_(False)))
    ClientModule(TrainsNobody(mlp()))  # and says so


def test_a_client_that_is_not_fitted_has_no_plan(mlp):
    with pytest.raises(AssertionError, match="set by the runner"):
        ClientModule(Method(mlp())).plan()
    assert ClientModule(Method(mlp()), FitSettings(torch.optim.SGD)).settings.local_epochs == 1


def with_layer(layer):
    body = Body([nn.Sequential(nn.Conv2d(1, 4, 3), layer)], nn.Sequential(nn.Flatten(), nn.Linear(144, 6)))
    return SplitModel(body, nn.Linear(6, 4), 6, 4, (1, 8, 8))


def test_every_running_statistic_may_stay_at_home():
    client = ClientModule(Method(with_layer(nn.InstanceNorm2d(4, track_running_stats=True))), share_buffers=False)
    assert not [name for name in client.division.shared if "running" in name]
    assert len(client.division.kept) == 3


def test_batch_norm_without_statistics_is_refused():
    with pytest.raises(ConfigError, match=r"^model: model\.body\.stages\.0\.1 \(BatchNorm2d\) has no running"):
        ClientModule(Method(with_layer(nn.BatchNorm2d(4, track_running_stats=False))))


class Letters(Method):
    shared = "model"


class Misspelt(Method):
    shared = ("model.bodi",)


class TrainsLetters(Method):
    def phases(self):
        return [Phase("head", trains="model.head")]


class TrainsNothing(Method):
    def phases(self):
        return [Phase("all", parts={"own": ("model.heat",)})]


class Raises(Method):
    def phases(self):
        return [Phase("all", trains=self.trained)]


class PredictsNothing(Method):
    def predictors(self):
        return {}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Letters, r"Letters's shared must be names of submodules, as in \('model.head',\) with its comma, got 'model'"),
        (Misspelt, r"Misspelt's shared names 'model.bodi', which it does not have; did you mean model.body\?"),
        (TrainsLetters, r"TrainsLetters's phase 'head' \(trains\) must be names of .*, got 'model.head'"),
        (TrainsNothing, r"TrainsNothing's phase 'all' \(part 'own'\) names 'model.heat', .* did you mean model.head\?"),
        (Raises, r"Raises.phases\(\) raises AttributeError: "),
        (PredictsNothing, r"PredictsNothing.predictors\(\) must give at least one Predictor by its name"),
    ],
)
def test_names_of_nothing_are_refused_before_anything_is_trained(mlp, kind, said):
    """Such a method would share, train or be tested on nothing, and say nothing."""
    with pytest.raises(ConfigError, match=f"^method: {said}"):
        ClientModule(kind(mlp()))


def test_a_term_that_shares_what_it_does_not_have_is_refused(mlp):
    class Sends(Constant):
        shared = ("layer",)

    with pytest.raises(ConfigError, match=r"^method: Method's Sends.shared names 'terms.1.layer', which it does not"):
        ClientModule(Method(mlp(), extra_terms=[Sends(1.0)]))


def test_a_term_that_reaches_what_is_not_there_is_refused(mlp):
    """It would be left out of every phase, or be thought to train what it does not."""

    class Reaches(Constant):
        reaches = ("model.heat",)

    with pytest.raises(ConfigError, match=r"^method: Method's Reaches.reaches names 'model.heat', .* model.head\?"):
        ClientModule(Method(mlp(), terms=[Reaches(1.0)]))
    ClientModule(Method(mlp(), terms=[Reaches(0.0)]))  # off
