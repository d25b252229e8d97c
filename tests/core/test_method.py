"""What a method says by itself, without a client around it."""

import pytest
import torch
from torch import nn

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Predictor, Seen, headline
from fl_lightning.core.mixing import MeanMixer
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.resting import rests_on_what_travels
from fl_lightning.models.mlp import MLP
from fl_lightning.models.split import Body, SplitModel


class Constant(Term):
    """A term whose value is known."""

    def forward(self, host, out):
        return torch.tensor(2.0)


class Halving(Constant):
    def weight_at(self, facts):
        return self.weight / facts.round


class OnlyHead(Method):
    shared = ("model.head",)


def test_method_is_a_module_and_no_part_of_a_machine(mlp):
    method = Method(mlp())
    assert [name for name, _ in method.named_children()] == ["model", "terms"]
    assert method.facts == Facts()
    assert method.fit.epochs == 0


class LazyNet(SplitModel):
    """Layers that find their sizes out."""

    def __init__(self, input_shape=(1, 8, 8)):
        neck = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
        super().__init__(Body([], neck), nn.LazyLinear(4), 5, 4, input_shape)


def test_lazy_layers_of_a_split_model_get_their_sizes(run_federation):
    loop = run_federation(lambda: OnlyHead(LazyNet()), rounds=2)
    assert loop.exchange.global_message().weights.keys() == {"model.head.weight", "model.head.bias"}
    kept = loop.runner.pool.get(0)
    assert kept["model.body.neck.3.weight"].shape == (5, 72)
    assert kept["model.body.neck.1.running_mean"].shape == (2,)


def test_lazy_layers_of_a_split_model_without_a_shape_are_refused_in_a_line():
    with pytest.raises(ConfigError, match=r"^model: LazyNet must give its `input_shape` to SplitModel\.__init__"):
        Method(LazyNet(None))


def test_weights_follow_the_schedule_of_their_round(mlp):
    class Adds(Method):
        def losses(self):
            return {"own": 0.25, "only_logged": 0.0}

    method = Adds(mlp(), terms=[Halving(3.0)])
    weights = {}
    for round in (1, 2):
        method.facts = Facts(round=round)
        weights[round] = method.term_weights()
    assert weights[1] == {"cross_entropy": 1.0, "halving": 3.0, "own": 0.25, "only_logged": 0.0}
    assert weights[2]["halving"] == 1.5


def test_interface_is_what_travels_with_the_artifacts_of_terms_that_exchange(mlp):
    class Sends(Constant):
        def interface(self, host):
            return {"artifact": (host.model.num_classes, 2)}

    head = {"model.head.weight": (4, 5), "model.head.bias": (4,)}
    assert OnlyHead(mlp(), terms=[Sends()]).interface() == {**head, "artifact": (4, 2)}
    assert OnlyHead(mlp(), terms=[Sends(0.0)]).interface() == head


def test_a_terms_shared_parts_travel_with_it_and_stay_where_it_does_not_exchange(mlp):
    class Owns(Constant):
        shared = ("scale",)

        def __init__(self, weight=1.0):
            super().__init__(weight)
            self.scale, self.other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    for weight, travels in ((1.0, True), (0.0, False)):
        method = OnlyHead(mlp(), terms=[Owns(weight)])
        assert method.is_shared("terms.1.scale.weight", method.terms[1].scale) is travels
        assert method.is_kept("terms.1.scale.weight", method.terms[1].scale) is not travels
        assert not method.is_shared("terms.1.other.weight", method.terms[1].other)


def test_default_server_averages_and_its_mixer_does_without_it(mlp):
    method = Method(mlp())
    server = method.make_server(Message(), Facts())
    assert type(server) is Server
    assert isinstance(server.mixer(), MeanMixer)


def test_default_predictor_takes_the_logits_and_gives_all_figures(mlp):
    method, x = Method(mlp()), torch.rand(3, 1, 8, 8)
    (name,) = method.predictors()
    way = method.predictors()[name]
    assert (name, way.figures, way.adapts) == ("", ("Local-T", "Global-T", "Server-T"), False)
    assert torch.equal(way.scores(Seen(x)), method.model(x))


# --- predictors ----------------------------------------------


def test_what_predictors_share_is_computed_once_for_a_batch(mlp):
    calls = []

    class Counted(MLP):
        def embed(self, x):
            calls.append(len(x))
            return super().embed(x)

    model, other = Counted((1, 8, 8), 4, (8, 5)), Counted((1, 8, 8), 4, (8, 5))
    seen = Seen(torch.rand(3, 1, 8, 8))
    assert seen.z(model) is seen.z(model)
    torch.testing.assert_close(seen.logits(model), model.head(seen.z(model)), rtol=0, atol=0)
    assert calls == [3]
    assert not torch.equal(seen.z(other), seen.z(model))
    assert calls == [3, 3]
    assert seen.once("key", object) is seen.once("key", object)


def test_each_figure_has_one_predictor():
    scores = lambda seen: seen.x  # noqa: E731
    ways = {"one": Predictor(scores, ("Local-T",)), "other": Predictor(scores, ("Local-T", "Global-T"))}
    assert headline(ways, "Global-T") == "other"
    assert headline(ways, "Server-T") is None
    with pytest.raises(ValueError, match="Local-T must have one predictor, but 'one' and 'other' claim it"):
        headline(ways, "Local-T")


class Bends(Method):
    """Predicts with a number that stays with the client."""

    shared = ("model",)

    def setup(self):
        self.register_buffer("bend", torch.ones(()))

    def predictors(self):
        return {
            "bent": Predictor(lambda seen: self.bend * seen.logits(self.model)),
            "plain": Predictor(lambda seen: seen.logits(self.model), ()),
        }


def test_whether_a_prediction_rests_on_what_travels_is_measured_and_leaves_no_trace(mlp, make_client, assert_identical):
    x = torch.rand(1, 1, 8, 8)
    for kind, expected in ((Method, [True]), (OnlyHead, [False]), (Bends, [False, True])):
        client = make_client(kind(mlp()))
        before = {name: tensor.clone() for name, tensor in client.entries.items()}
        assert [rests_on_what_travels(client, way, x) for way in client.predictors.values()] == expected
        assert_identical(dict(client.entries), before)
        assert client.method.training


class Anew(Bends):
    """The number is a constant that every receive makes anew: it rests with nobody."""

    def is_kept(self, name, module):
        return False


class Adapts(Method):
    def predictors(self):
        return {"": Predictor(lambda seen: seen.logits(self.model), adapts=True)}


@pytest.mark.parametrize(
    ("kind", "has_global_model", "received_is_global"),
    [
        (Method, True, True),
        (OnlyHead, False, False),
        (Bends, False, False),
        (Anew, True, True),
        (Adapts, True, False),
    ],
)
def test_received_model_is_the_global_one_only_if_nothing_is_personal(
    mlp, set_up_federation, kind, has_global_model, received_is_global
):
    examiner = set_up_federation(lambda: kind(mlp())).examiner
    assert examiner.has_global_model is has_global_model
    assert examiner.may_predict_as_global(0) is received_is_global
