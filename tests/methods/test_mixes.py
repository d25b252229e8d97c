"""FedDW's mixing rule (FedDW.md, Table IV): L = L_other + μ L_reg, no last bias, soft labels exchanged beside."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.losses.class_relation import ClassRelation, Relation
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.losses.model_contrast import ModelContrast
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.apple import APPLE
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.feddistill import FedDistill
from fl_lightning.methods.fedgh import FedGH
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.feduv import FedUV
from fl_lightning.methods.fesem import FeSEM
from fl_lightning.methods.local import Local
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.models.wrapped import WrappedModel

HOSTS = [FedProx, MOON, FedUV]


@pytest.mark.parametrize("method", [*HOSTS, FedNova, PerFedAvg])
def test_mix_exchanges_soft_labels_and_trains_on_both_losses(method, mlp, run_federation):
    loop = run_federation(lambda: method(mlp(), extra_terms=[ClassRelation(10.0)]), rounds=3)
    alone = set(run_federation(lambda: method(mlp()), rounds=1).diary.rows[0])
    assert set(loop.diary.rows[-1]) - alone == {"loss/class_relation"}
    assert 0 < loop.diary.rows[-1]["loss/class_relation"] <= 2 / 4
    assert "model.head.bias" not in loop.exchange.global_message().weights
    soft_labels = loop.exchange.global_message().artifacts["soft_labels"]
    torch.testing.assert_close(soft_labels.mean.sum(1), torch.ones(4))


@pytest.mark.parametrize("method", HOSTS)
def test_mix_of_weight_0_is_the_host(method, mlp, run_federation, outcome, assert_identical):
    alone = run_federation(lambda: method(mlp()), rounds=2)
    mixed = run_federation(lambda: method(mlp(), extra_terms=[ClassRelation(0.0)]), rounds=2)
    assert_identical(outcome(mixed), outcome(alone))


@pytest.mark.parametrize("method", HOSTS)
def test_mix_of_weight_0_may_be_the_host_without_its_last_bias(method, mlp, run_federation, outcome, assert_identical):
    def without_bias():
        model = mlp()
        model.head.bias = None
        return model

    alone = run_federation(lambda: method(without_bias()), rounds=2)
    mixed = run_federation(
        lambda: method(mlp(), extra_terms=[ClassRelation(0.0, relation=Relation(bias="always"))]), rounds=2
    )
    assert_identical(outcome(mixed), outcome(alone))


@pytest.mark.parametrize("method", HOSTS)
def test_terms_of_the_hosts_can_be_added_to_others(method, mlp, run_federation, outcome, assert_identical):
    """The host is FedAvg with its terms, so FedAvg with the host's terms is the host, bit for bit."""
    own = run_federation(lambda: method(mlp()), rounds=3, participation=0.5)
    added = run_federation(
        lambda: FedAvg(mlp(), extra_terms=list(method(mlp()).terms)[1:]), rounds=3, participation=0.5
    )
    assert_identical(outcome(added), outcome(own))


NOT_SHARED = "Proximal holds what is shared of the model; {} shares nothing of it: leave it out"
NOT_COMPARED = "ModelContrast compares with the body that came in, and {} shares none: leave it out"
NOT_TRAINED = "ClassRelation trains model.head, which no phase of {} does: leave it out"


@pytest.mark.parametrize(
    ("method", "term", "rule"),
    [
        (Local, Proximal, NOT_SHARED),
        (FedProto, Proximal, NOT_SHARED),
        (FedDistill, Proximal, NOT_SHARED),
        (Local, ModelContrast, NOT_COMPARED),
        (FedGH, ModelContrast, NOT_COMPARED),
        (APPLE, ModelContrast, NOT_COMPARED.replace("shares none", "keeps its own")),
        (FedBABU, ClassRelation, NOT_TRAINED),
    ],
)
def test_term_that_reaches_nothing_is_refused_in_one_line(method, term, rule, mlp, make_client, set_up_federation):
    for make in (make_client, lambda made: set_up_federation(lambda: made)):
        with pytest.raises(ConfigError) as refusal:
            make(method(mlp(), extra_terms=[term(0.1)]))
        assert str(refusal.value) == f"method.extra_terms: {rule.format(method.__name__)}"


@pytest.mark.parametrize(
    ("method", "term"),
    [(Local, Proximal), (FedProto, Proximal), (FedDistill, Proximal), (FedGH, ModelContrast), (FedBABU, ClassRelation)],
)
def test_term_that_reaches_nothing_may_stay_at_weight_0(method, term, mlp, run_federation, outcome, assert_identical):
    """A sweep over its weight may begin at 0."""
    alone = run_federation(lambda: method(mlp()), rounds=2)
    mixed = run_federation(lambda: method(mlp(), extra_terms=[term(0.0)]), rounds=2)
    assert_identical(outcome(mixed), outcome(alone))


def test_attention_in_a_body_without_maps_is_refused_in_one_line(mlp, make_client):
    rule = r"^FeatureDistillation\.attention: inline needs feature maps \[C, H, W\], .*; use side, got 'inline'$"
    with pytest.raises(ConfigError, match=rule):
        make_client(FedAvg(mlp(), extra_terms=[FeatureDistillation(distillation=Distillation(attention="inline"))]))


@pytest.mark.parametrize("options", [{"attention": "inline"}, {"tap": "preact"}])
def test_a_module_that_gives_maps_has_no_stages_to_cut(options, make_client):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 4))
    model = WrappedModel((1, 8, 8), 4, net, head="2", features=["0"])
    rule = r"^FeatureDistillation\.distillation: inline and preact need a body made of stages$"
    with pytest.raises(ConfigError, match=rule):
        make_client(FedAvg(model, extra_terms=[FeatureDistillation(distillation=Distillation(**options))]))


def test_extra_term_takes_the_place_of_one_that_is_off(mlp, run_federation, outcome, assert_identical):
    own = run_federation(lambda: FeSEM(mlp(), mu=0.3))
    added = run_federation(lambda: FeSEM(mlp(), mu=0.0, extra_terms=[Proximal(0.3)]))
    assert_identical(outcome(added), outcome(own))
    assert added.diary.rows[-1]["loss/proximal"] > 0


def test_extra_term_beside_one_of_its_name_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"^method\.extra_terms: each term may occur once only, got 'proximal'$"):
        FeSEM(mlp(), mu=0.1, extra_terms=[Proximal(0.3)])
