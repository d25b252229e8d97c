"""APPLE: a sum of core models, and how much of each a client takes."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.losses.distillation import FeatureDistillation
from fl_lightning.losses.hyper_knowledge import HyperPredictions
from fl_lightning.losses.relations import FadingWeight
from fl_lightning.methods.apple import APPLE

COUNTS = ((12, 8, 0), (4, 4, 4), (0, 4, 16))


class Sum(nn.Module):
    """One core model that learns, those that do not, and the relations."""

    def __init__(self, model, relations):
        super().__init__()
        self.model, self.relations = model, relations
        self.cores = []

    def forward(self, x, own):
        w = dict(self.model.named_parameters())
        mixed = {}
        for name, tensor in w.items():
            all_cores = [tensor if j == own else dict(core.named_parameters())[name].detach() for j, core in self.cores]
            mixed[name] = sum(p * core for p, core in zip(self.relations, all_cores, strict=True))
        return functional_call(self.model, mixed, (x,))


def test_three_rounds_are_those_of_the_paper(mlp, make_data, set_up_federation, sgd, train_by_hand):
    data = make_data(COUNTS)
    make = lambda: APPLE(mlp(num_classes=3), 0.8, relation_lr=0.05, share=1.0, schedule="cosine")  # noqa: E731
    loop = set_up_federation(make, data=data, rounds=3)
    model = loop.runner.modules[0].method.model
    clients = [Sum(copy.deepcopy(model), nn.Parameter(torch.full((3,), 1 / 3))) for _ in range(3)]
    loop.run()
    sizes = torch.tensor([float(client.num_train) for client in data.clients])
    for round in (1, 2, 3):
        cores = [copy.deepcopy(client.model) for client in clients]
        target = sizes / sizes.sum() if round > 1 else torch.full((3,), 1 / 3)
        strength = 0.8 * (math.cos(math.pi * (round - 1) / 3) + 1) / 2
        for i, client in enumerate(clients):
            client.cores = list(enumerate(cores))

            def loss(x, y, client=client, i=i, target=target, strength=strength):
                return F.cross_entropy(client(x, i), y) + strength / 2 * (client.relations - target).square().sum()

            def slow(parameters, client=client):
                own = [p for p in parameters if p is not client.relations]
                return torch.optim.SGD([{"params": own}, {"params": [client.relations], "lr": 0.05}], lr=0.1)

            train_by_hand(client, data.clients[i], slow, round, loss=loss)
            for name, tensor in client.model.state_dict().items():
                sent = loop.diary.sent[round, i].weights[f"model.{name}"]
                torch.testing.assert_close(sent, tensor, rtol=1e-4, atol=1e-5)
    for i, client in enumerate(clients):
        own = loop.runner.pool.get(i)
        torch.testing.assert_close(own["relations"], client.relations.detach(), rtol=1e-4, atol=1e-5)
        x, _ = next(data.clients[i].batches("test"))
        module = loop.runner.load(i)
        loop.runner.receive(module, Message(), data.clients[i], loop.runner.facts)  # as one that is asked afterwards
        with torch.no_grad(), torch.inference_mode():
            scores = module.method.predictors()[""].scores(type("Seen", (), {"x": x}))
            torch.testing.assert_close(scores, client(x, i), rtol=1e-4, atol=1e-5)


def test_sizes_come_down_with_the_models(mlp, make_client):
    facts = Facts(num_clients=3)
    server = make_client(APPLE(mlp())).make_server(facts)
    server.setup(facts)
    weights = {f"model.{name}": tensor for name, tensor in mlp().state_dict().items()}
    server.facts = Facts(num_clients=3, round=1, participants=(0, 2))
    server.open_round()
    for client, size in ((0, 5), (2, 7)):
        server.collect(client, Message(weights, {}, size))
    server.close_round()
    artifacts = server.message_for(2).artifacts
    assert artifacts["lenders"].tolist() == [0]
    assert artifacts["sizes"].tolist() == [5, 0, 7]


def test_shares_of_who_has_sent_nothing_are_a_mean_and_the_own_is_known(mlp, make_client, make_data):
    """A late client's own share was 0, and drew its relation to itself there."""
    data = make_data(((6, 6, 0), (4, 4, 1), (0, 4, 16), (3, 3, 3)))
    facts = Facts(num_clients=4)
    client = make_client(APPLE(mlp(num_classes=3)), facts=facts)
    cores, sizes = client.method.cores, [own.num_train for own in data.clients]
    model = torch.cat([p.detach().flatten() for p in client.method.model.parameters()])
    artifacts = {"lent": model[None], "lenders": torch.tensor([2]), "sizes": torch.tensor([0, 0, sizes[2], 0])}
    assert cores.take(Message({}, artifacts, 0), client.method, data.clients[1])
    mean = (sizes[1] + sizes[2]) / 2
    expected = torch.tensor([mean, sizes[1], sizes[2], mean]) / (4 * mean)
    torch.testing.assert_close(cores.shares, expected)


def test_it_resumes_and_newcomers_join(mlp, assert_resumes):
    assert_resumes(lambda: APPLE(mlp()), participation=0.5)


def test_the_anchor_holds_in_the_first_round_of_a_short_run(mlp):
    fading = FadingWeight(2.0, "cosine", 0.1)
    assert [fading.at(round, 5) for round in (1, 2)] == [2.0, 0.0]
    assert FadingWeight(1.0, "cosine", 0.29).at(29, 100) > 0  # 0.29 · 100 is below 29 in binary


def test_ranges_are_checked(mlp):
    for options in ({"weight": -1.0}, {"relation_lr": 0.0}, {"share": 0.0}, {"schedule": "linear"}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be"):
            APPLE(mlp(), **options)


def test_terms_pass_on_in_the_precision_of_the_pass(mlp, run_federation):
    """They got bfloat16 inputs outside autocast, and the second round ended in a line of torch's."""
    trainer = {"precision": "bf16-mixed"}
    loop = run_federation(lambda: APPLE(mlp(), extra_terms=[HyperPredictions(min_share=0.0)]), 2, trainer=trainer)
    assert loop.diary.rows[-1]["loss/hyper_predictions"] > 0


def test_a_term_that_shares_weights_is_refused(mlp, set_up_federation):
    """They went up in every round, and no client ever heard them."""

    class Draws(Term):
        shared = ("own",)
        reaches = ()

        def setup(self, host):
            self.own = nn.Linear(1, 1)

    rule = r"^method\.extra_terms: APPLE lends models alone, and terms\.1\.own\.weight is a term's: let it stay "
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: APPLE(mlp(), extra_terms=[Draws()]))


@pytest.mark.parametrize("term", [ClassRelation, FeatureDistillation])
def test_terms_that_look_at_one_summands_layers_are_refused(term, mlp, set_up_federation):
    """They pulled the core model's last layer, or kept its body as teacher; what predicts is a sum of models."""
    rule = rf"^method\.extra_terms: {term.__name__} looks at layers of the model, and APPLE's is one summand of what "
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: APPLE(mlp(), extra_terms=[term()]))
    set_up_federation(lambda: APPLE(mlp(), extra_terms=[term(0.0)]))
