"""A body that several clients have received passes over the union of their test parts once."""

import pytest
import torch
from torch import nn

from fl_lightning.core.method import Method, Predictor
from fl_lightning.federation.embeddings import Embeddings
from fl_lightning.federation.resting import embeds_by_a_body_that_travels
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.mlp import MLP


class Restless(nn.Module):
    """Noise that eval mode does not take away."""

    def forward(self, z):
        return z + torch.rand(())


class InPlace(nn.Module):
    """Changes what it is given, where no gradient forbids it."""

    def forward(self, z):
        return z * 0.5 if self.training else z.mul_(0.5)


class TwoHeads(Method):
    """Shares its body, and is tested twice: by its head, and by a personal one on the same embedding."""

    shared = ("model.body",)

    def setup(self):
        self.second = nn.Linear(self.model.embedding_size, self.model.num_classes)

    def predictors(self):
        return {
            "": Predictor(lambda seen: seen.logits(self.model)),
            "second": Predictor(lambda seen: self.second(seen.z(self.model)), figures=()),
        }


def with_body(model, layer):
    model.body.append(layer)
    return model


def with_head(model, layer):
    model.head = nn.Sequential(layer, model.head)
    return model


@pytest.fixture
def x():
    return torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda mlp, _: FedRep(mlp()), True),
        (lambda mlp, _: FedAvg(mlp()), True),
        (lambda _, conv: FedRep(conv()), True),
        (lambda _, conv: FedBN(conv()), False),
        (lambda mlp, _: Local(mlp()), False),
        (lambda mlp, _: FedProto(mlp()), False),
        (lambda mlp, _: FedRep(with_body(mlp(), Restless())), False),
    ],
)
def test_which_embeddings_may_be_shared(make, expected, mlp, conv_net, make_client, x, assert_identical):
    client = make_client(make(mlp, conv_net))
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    assert embeds_by_a_body_that_travels(client, x) is expected
    assert_identical(client.entries, before)


def passes_in(loop):
    """Counts the samples that the resident module's body sees outside fits, from now on."""
    seen = []
    body = loop.runner.modules[0].method.model.body
    body.register_forward_hook(lambda module, inputs, _: None if module.training else seen.append(len(inputs[0])))
    return seen


RECEIVED = EvaluationPolicy(trained=False, server=False)


def received(make, set_up_federation, limit=None, rounds=2, **options):
    loop = set_up_federation(make, rounds=rounds, evaluate=options.pop("evaluate", RECEIVED), **options)
    if limit is not None:
        loop.runner.evaluator._embeddings = Embeddings(limit)
    seen = passes_in(loop)
    loop.final = loop.run()
    return loop, sum(seen)


@pytest.mark.parametrize("method", [FedRep, FedCPD, TwoHeads])
def test_one_body_sees_the_union_once_a_receive(method, mlp, set_up_federation, outcome, assert_identical):
    kept, few = received(lambda: method(mlp()), set_up_federation)
    anew, many = received(lambda: method(mlp()), set_up_federation, limit=0)
    assert_identical(outcome(kept), outcome(anew))
    assert_identical(kept.final, anew.final)
    clients, receives, union = kept.num_clients, 3, len(kept.data.server_test)
    assert many - few == (clients - 1) * receives * union


@pytest.mark.parametrize("method", [Local, FedProto])
def test_bodies_of_ones_own_are_all_asked(method, mlp, set_up_federation):
    _, few = received(lambda: method(mlp()), set_up_federation)
    assert few == received(lambda: method(mlp()), set_up_federation, limit=0)[1]


def test_own_test_parts_and_trained_models_are_never_read_off(mlp, set_up_federation, outcome, assert_identical):
    for policy in (EvaluationPolicy(received=False, server=False), EvaluationPolicy(trained=False, globally=False)):
        own, few = received(lambda: FedRep(mlp()), set_up_federation, evaluate=policy)
        anew, many = received(lambda: FedRep(mlp()), set_up_federation, limit=0, evaluate=policy)
        assert few == many
        assert_identical(outcome(own), outcome(anew))


def test_a_body_that_differs_in_one_bit_is_asked_anew(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedRep(mlp()), evaluate=RECEIVED)
    module, evaluator, union = loop.runner.modules[0], loop.runner.evaluator, len(loop.data.server_test)
    seen = passes_in(loop)
    evaluator.client(module, 0, "received")
    asked = sum(seen)
    evaluator.client(module, 1, "received")
    assert sum(seen) == asked
    with torch.no_grad():
        last = [*module.method.model.body.parameters()][-1].view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor([torch.inf])))
    evaluator.client(module, 2, "received")
    assert sum(seen) == asked + union


def test_a_head_that_changes_its_input_gets_it_as_it_was(mlp, set_up_federation, outcome, assert_identical):
    def make():
        return FedRep(with_head(mlp(), InPlace()))

    kept, few = received(make, set_up_federation)
    anew, many = received(make, set_up_federation, limit=0)
    assert few == many
    assert_identical(outcome(kept), outcome(anew))


def test_no_more_is_kept_than_there_is_room_for(mlp, set_up_federation, outcome, assert_identical):
    policy = EvaluationPolicy(trained=False, server=False, batch_size=4)
    row = 4 * 5 * 4  # four samples of five float32
    some, passes = received(lambda: FedRep(mlp()), set_up_federation, limit=2 * row, evaluate=policy)
    anew, many = received(lambda: FedRep(mlp()), set_up_federation, limit=0, evaluate=policy)
    assert_identical(outcome(some), outcome(anew))
    assert many - passes == (some.num_clients - 1) * 3 * 2 * 4


def test_architectures_have_bodies_of_their_own(mlp, set_up_federation, outcome, assert_identical):
    """Two architectures of one shape, by turns; passes are counted in the first one's body alone."""
    options = {"architecture": [0, 1, 0, 1]}
    kept, few = received(lambda _: FedRep(mlp()), set_up_federation, **options)
    anew, many = received(lambda _: FedRep(mlp()), set_up_federation, limit=0, **options)
    assert_identical(outcome(kept), outcome(anew))
    assert many - few == 3 * len(kept.data.server_test)


class OwnEmbedding(MLP):
    """Takes off a mean of the client's own, once it has one."""

    def __init__(self):
        super().__init__((1, 8, 8), 4, (8, 5))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def embed(self, x):
        return self.body(x) - self.mean * (self.seen > 0)


def test_a_model_with_an_embedding_of_its_own_is_not_asked_twice(make_client, x):
    assert not embeds_by_a_body_that_travels(make_client(FedRep(OwnEmbedding())), x)


class FirstToken(nn.Module):
    """A view of what it is given."""

    def forward(self, z):
        return z.repeat_interleave(9, 0).view(len(z), 9, -1)[:, 0]


def test_of_a_view_no_more_is_kept_than_itself(mlp, set_up_federation):
    loop, _ = received(lambda: FedRep(with_body(mlp(), FirstToken())), set_up_federation)
    (own,) = loop.runner.evaluator._embeddings._known.values()
    assert own.size > 0
    assert sum(z.untyped_storage().nbytes() for z in own._rows.values()) == own.size
