import copy
from dataclasses import replace

import pytest
from torch import nn
from tutorial_modules import DigitClassifier

from fl_lightning.core.server_optimizer import ServerMomentum
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.early_stopping import EarlyStopping
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.graphs import Ring
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.remarks import remarks
from fl_lightning.federation.selection import Cyclic
from fl_lightning.federation.settings import EvaluationPolicy, Newcomers
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.gpfl import GPFL
from fl_lightning.methods.local import Local
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models.lightning_module import WrappedLightningModule
from fl_lightning.models.split import Body, SplitModel


def test_ordinary_run_needs_no_remark(set_up_federation, mlp):
    assert list(remarks(set_up_federation(lambda: FedAvg(mlp())))) == []


def test_batch_that_no_client_can_fill_is_remarked(set_up_federation, make_data, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(batch_size=100_000))
    assert list(remarks(loop)) == [
        f"data.batch_size: 100000 is more than any client has ({loop.num_train.max()} at most), so an epoch is one step"
    ]


def test_samples_that_nobody_holds_are_remarked(set_up_federation, make_data, mlp):
    """`partition` alone said so; of a fit nobody saw that official test samples were no longer tested on."""
    data = make_data()
    data.partition.sizes[-1] -= 2
    data.setup(1)
    loop = set_up_federation(lambda: FedAvg(mlp()), data=data)
    assert list(remarks(loop)) == [f"data: 2 of {len(data.arrays.y)} samples are left out: nobody holds them"]


@pytest.mark.parametrize(("split", "number"), [("holdout", 0), ("matched", 1), ("global", 1), ("file", 1)])
def test_a_share_of_test_samples_that_no_split_cuts_is_remarked(split, number, set_up_federation, make_data, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(test_fraction=0.5))
    loop.data.split = split
    said = f"data.test_fraction: 0.5 has no effect under data.split {split}, which cuts no test samples out of clients'"
    assert [line.startswith(said) for line in remarks(loop)] == [True] * number


def test_classes_of_the_test_part_alone_are_remarked(set_up_federation, make_data, mlp):
    """Adult's test part calls its classes `<=50K.`, with a point: a run had four classes and nobody saw it."""

    def edit(arrays):
        arrays.y[arrays.y == 3] = 0
        arrays.y[-5:] = 3
        arrays.num_train -= 5

    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(edit=edit))
    said = "data: the official test part has classes that the training part has no sample of: '3'"
    assert list(remarks(loop)) == [said]


def test_exchange_that_is_not_the_methods_own_is_remarked(set_up_federation, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()), exchange=Ring())
    assert list(remarks(loop)) == ["federation.exchange: Ring, where FedAvg is defined on Star"]


class Plain(SplitModel):
    def __init__(self):
        super().__init__(Body([nn.Flatten()], nn.Linear(64, 6)), nn.Linear(6, 4), 6, 4, (1, 8, 8))


class OwnEmbedding(Plain):
    def embed(self, x):
        return 8 * super().embed(x)


class BothWays(OwnEmbedding):
    def forward_features(self, x):
        maps, z = super().forward_features(x)
        return maps, 8 * z


class OwnForward(Plain):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnBody(Plain):
    def __init__(self):
        super().__init__()
        self.body.__class__ = type("Halves", (Body,), {"forward": lambda self, x: Body.forward(self, x) / 2})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Plain, ""),
        (BothWays, ""),
        (OwnEmbedding, "OwnEmbedding.embed(), which tests call, gives another embedding than forward_features()"),
        (OwnBody, "OwnBody.embed(), which tests call, gives another embedding than forward_features()"),
        (OwnForward, "OwnForward.forward() gives other logits than head(embed(x)), which is what is trained and"),
    ],
)
def test_a_model_of_which_one_part_is_trained_and_another_tested_is_remarked(kind, said, set_up_federation):
    lines = list(remarks(set_up_federation(lambda: FedAvg(kind()))))
    assert len(lines) == bool(said)
    assert all(line.startswith(f"model: {said}") for line in lines)


def test_a_modules_loss_that_does_not_count_is_remarked(set_up_federation):
    module = WrappedLightningModule((1, 8, 8), 4, DigitClassifier())
    line = "model: {} has a loss of its own, where what training_step returns does not count"
    for kind, said in ((FedAvg, []), (FedLC, [line.format("FedLC")]), (GPFL, [line.format("GPFL")])):
        assert list(remarks(set_up_federation(lambda kind=kind: kind(copy.deepcopy(module))))) == said


def test_rounding_that_a_server_optimizer_adds_up_is_remarked(set_up_federation, mlp):
    line = "federation.wire: Quantize rounds all alike, which a server optimizer adds up; say error_feedback: true"
    cases = ((Quantize(), [line]), (Quantize(error_feedback=True, ways="up"), []), (Quantize(ways="down"), []))
    cases += ((Quantize(updates=True), []),)
    for own, said in cases:
        loop = set_up_federation(lambda: FedAvg(mlp()), wire=[own], server_optimizer=ServerMomentum(momentum=0.9))
        assert list(remarks(loop)) == said
    assert list(remarks(set_up_federation(lambda: FedAvg(mlp()), wire=[Quantize()]))) == []


@pytest.mark.parametrize(
    ("make", "precision", "said"),
    [
        (lambda model: PerFedAvg(model, approximation="HF"), "bf16-mixed", "HF's difference of gradients drowns in"),
        (lambda model: PerFedAvg(model, approximation="HF", delta=0.01), "bf16-mixed", ""),
        (lambda model: PerFedAvg(model, approximation="HF"), "32-true", ""),
        (PerFedAvg, "bf16-mixed", ""),
        (PerFedAvg, "bf16-true", "the step of alpha, in a fit and in what is tested, is rounded to bf16-true"),
        (lambda model: SCAFFOLD(model, correction="step"), "bf16-true", "bf16-true rounds the steps of correction"),
        (lambda model: SCAFFOLD(model, correction="step"), "bf16-mixed", ""),
        (SCAFFOLD, "bf16-true", ""),
    ],
)
def test_what_a_precision_does_to_a_method_is_remarked(make, precision, said, set_up_federation, mlp):
    found = list(remarks(set_up_federation(lambda: make(mlp()), trainer={"precision": precision})))
    assert [own.partition(": ")[2].partition(": ")[2].startswith(said) for own in found] == [True] * bool(said)


def test_noise_on_running_variances_is_remarked(set_up_federation, conv_net):
    line = "running_var negative, whose model gives nan; say share_buffers: false"
    for shares, said in ((True, [line]), (False, [])):
        options = {"wire": [ClipAndNoise(1.0, 1.0)], "share_buffers": shares}
        found = list(remarks(set_up_federation(lambda: FedAvg(conv_net()), **options)))
        assert [own[own.index("running_var") :] for own in found] == said


FEW = {"participation": 0.5, "evaluate": EvaluationPolicy(clients="participants")}


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (FedAvg, {"early_stopping": EarlyStopping(patience=3)}, ["federation.early_stopping.patience: 3 ends nothing"]),
        (FedAvg, {"early_stopping": EarlyStopping(patience=2)}, []),
        (FedAvg, {"early_stopping": EarlyStopping(patience=2), **FEW}, ["federation.evaluate.clients: participants"]),
        (FedAvg, {"early_stopping": EarlyStopping("Server-V", patience=2), **FEW}, []),
        (FedAvg, {"wire": [ClipAndNoise(1.0, 1.0, delta=0.25)]}, ["federation.wire: ClipAndNoise: delta: 0.25 is not"]),
        (FedAvg, {"wire": [ClipAndNoise(1.0, 1.0, delta=0.2)]}, []),
        (
            Local,
            {"wire": [Quantize()], "attack": Attack(share=0.25)},
            ["federation.wire: reaches", "federation.attack: re"],
        ),
        (FedAvg, {"newcomers": Newcomers(after=2)}, ["federation.newcomers.after: 2 has no effect without"]),
        (FedAvg, {"init": "own"}, ["federation.init: own has no effect: FedAvg shares all weights"]),
        (FedRep, {"init": "own"}, []),
        (FedAvg, {"selection": Cyclic(5)}, ["federation.selection: Cyclic: 5 groups of 4 clients"]),
        (FedAvg, {"trainer": {"gradient_clip_algorithm": "norm"}}, ["trainer.gradient_clip_algorithm: has no effect"]),
        (FedAvg, {"trainer": {"min_steps": 5}}, ["trainer.min_steps: has no effect"]),
    ],
)
def test_what_is_configured_and_does_nothing_is_remarked(method, options, said, set_up_federation, make_data, mlp):
    loop = set_up_federation(lambda: method(mlp()), data=make_data(validation_fraction=0.25), **options)
    found = list(remarks(loop))
    assert [own.startswith(start) for own, start in zip(found, said, strict=True)] == [True] * len(said), found


@pytest.mark.parametrize(
    ("make", "server", "why"),
    [(FedAvg, False, "so is server"), (Local, True, "there is no global model for server")],
)
def test_a_run_that_measures_no_accuracy_says_so(make, server, why, set_up_federation, mlp):
    policy = EvaluationPolicy(trained=False, received=False, server=server)
    said = f"federation.evaluate: no accuracy is measured: trained and received are off, and {why}"
    assert said in remarks(set_up_federation(lambda: make(mlp()), evaluate=policy))
    assert said not in remarks(set_up_federation(lambda: FedAvg(mlp()), evaluate=replace(policy, server=True)))


def test_a_run_without_test_samples_and_one_of_a_single_class_are_remarked(set_up_federation, make_data, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()))
    loop.num_test = loop.num_test * 0
    loop.data.server_test = loop.data.server_test[:0]
    loop.data.arrays.classes = ("0",)
    said = ["data: nobody has a test sample, so that", "data.dataset: all samples are of one class ('0')"]
    assert [own.startswith(start) for own, start in zip(remarks(loop), said, strict=True)] == [True, True]
