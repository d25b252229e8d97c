"""A user's own network, split by the name of its head."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tutorial_modules import Reads

from fl_lightning.core.finetuning import FineTune
from fl_lightning.errors import ConfigError
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.wrapped import WrappedModel

SHAPE = (1, 8, 8)


class UserNet(nn.Module):
    """As users write them: layers in __init__, functions in forward."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Identity()
        self.classifier = nn.Sequential(nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, num_classes))

    def forward(self, x):
        return self.classifier(F.relu(self.norm(self.conv(x))).flatten(1))


class Tempered(UserNet):
    """A learned temperature behind the head, which is 1 at first."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) / self.temperature


class Scaled(UserNet):
    """A scale behind the head that is a buffer, and 1 at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class DropsLogits(UserNet):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class TwoInTraining(UserNet):
    def forward(self, x):
        out = super().forward(x)
        return (out, out) if self.training else out


class Recurrent(nn.Module):
    """Its last layer gives more than one tensor."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x.squeeze(1))[1].squeeze(0)


class LogProbabilities(UserNet):
    def forward(self, x):
        return F.log_softmax(super().forward(x), dim=1)


class ReadsItsHead(UserNet):
    def forward(self, x):
        return F.linear(self.classifier[:2](self.conv(x).flatten(1)), self.classifier[2].weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.fc = nn.Linear(4, 4, bias=False)
        self.fc.weight = self.first.weight

    def forward(self, x):
        return self.fc(self.first(x))


class TwoOutputs(UserNet):
    def forward(self, x):
        return super().forward(x), x


class Maps(nn.Module):
    """Head: a 1x1 convolution and a global average, fed with a map instead of a vector."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Sequential(nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.head(self.conv(x))


class TextNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.tokens(x).mean(dim=1))


@pytest.mark.parametrize(("head", "embedding_size"), [("classifier", 144), ("classifier.2", 6)])
def test_wrapped_model_computes_what_the_module_computes(head, embedding_size):
    module = UserNet().eval()
    model = WrappedModel(SHAPE, 3, module, head=head).eval()
    x = torch.randn(2, *SHAPE)
    assert model.embedding_size == embedding_size
    assert model.embed(x).shape == (2, embedding_size)
    torch.testing.assert_close(model(x), module(x), rtol=0, atol=0)


def test_lazy_layers_get_their_sizes_of_the_samples():
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5), nn.Linear(5, 3))
    model = WrappedModel(SHAPE, 3, network, "4")
    assert model.state_dict()["body.neck.3.weight"].shape == (5, 144)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert int(model.state_dict()["body.neck.1.num_batches_tracked"]) == 0


def test_wrapped_model_leaves_the_users_module_and_the_random_stream_alone():
    module = UserNet()
    module.norm.eval()
    before = copy.deepcopy(module.state_dict())
    stream = torch.get_rng_state()
    model = WrappedModel(SHAPE, 3, module, head="classifier", features=["conv"])
    assert torch.equal(torch.get_rng_state(), stream)
    assert isinstance(module.classifier, nn.Sequential)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert (module.training, model.training, model.body.neck.norm.training) == (True, True, False)
    assert model.head is not module.classifier


def test_wrapped_model_features_are_the_outputs_of_the_named_submodules_in_their_order():
    model = WrappedModel(SHAPE, 3, UserNet(), head="classifier.2", features=["classifier.1", "conv"]).eval()
    x = torch.randn(2, *SHAPE)
    maps, z = model.forward_features(x)
    torch.testing.assert_close(maps[0], z)
    torch.testing.assert_close(maps[1], model.body.neck.conv(x))


def test_wrapped_model_keeps_no_hooks_and_no_maps_between_calls():
    model = WrappedModel(SHAPE, 3, UserNet(), head="classifier", features=["conv"])
    model.features(torch.randn(2, *SHAPE))
    assert not any(module._forward_hooks for module in model.modules())
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert kept == []


def test_wrapped_model_state_has_each_tensor_once_under_body_or_head():
    module = UserNet()
    model = WrappedModel(SHAPE, 3, module, head="classifier.2", features=["conv"])
    expected = {
        f"head.{name.removeprefix('classifier.2.')}" if name.startswith("classifier.2.") else f"body.neck.{name}"
        for name in module.state_dict()
    }
    assert model.state_dict().keys() == expected
    twin = WrappedModel(SHAPE, 3, UserNet(), head="classifier.2", features=["conv"])
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, *SHAPE)
    torch.testing.assert_close(twin.eval()(x), model.eval()(x), rtol=0, atol=0)


class LooksUpPlaces(nn.Module):
    """A network over images with an embedding of places."""

    def __init__(self):
        super().__init__()
        self.patches, self.places, self.fc = nn.Conv2d(1, 4, 4, 4), nn.Embedding(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc((self.patches(x).flatten(2).transpose(1, 2) + self.places.weight).mean(1))


def test_an_embedding_of_places_makes_no_tokens_of_images():
    """Its maps were asked of whole numbers, which no convolution takes."""
    model = WrappedModel((1, 8, 8), 3, LooksUpPlaces(), "fc", features=["patches"])
    assert model.feature_shapes() == [(4, 2, 2)]


class CutsPadding(TextNet):
    """Cuts a batch to its longest text, as recurrent networks do."""

    def forward(self, x):
        longest = int((x != 0).sum(1).max())
        if longest == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        return super().forward(x[:, :longest])


def test_a_network_that_cuts_padding_away_is_tried_on_a_text():
    """Every real text has a token; of the zeros that it was tried on nothing was left, and the network was blamed."""
    model = WrappedModel((7,), 3, CutsPadding(), head="fc")
    assert model(torch.tensor([[3, 1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0]])).shape == (2, 3)


def test_wrapped_model_takes_tokens():
    model = WrappedModel((7,), 3, TextNet(), head="fc", features=["tokens"])
    maps, z = model.forward_features(torch.randint(0, 10, (2, 7)))
    assert (maps[0].shape, z.shape) == ((2, 7, 5), (2, 5))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            UserNet(),
            {"head": "clasifier"},
            r"^model.head: must name a submodule of UserNet \(nearest: classifier.*'clasifier'$",
        ),
        (
            UserNet(),
            {"head": ""},
            r"^model.head: must name a submodule of UserNet \(nearest: classifier.0, cl.*got ''$",
        ),
        (nn.Linear(8, 3), {"head": "fc"}, r"^model.head: must name a submodule of Linear \(it has none\), got 'fc'"),
        (UserNet(4), {"head": "classifier"}, r"^model.head: UserNet must return .* \[B, 3\] .*got \(2, 4\)$"),
        (TwoOutputs(), {"head": "classifier"}, "^model.head: TwoOutputs must return logits .*got 'tuple'$"),
        (nn.Sequential(nn.Linear(9, 3)), {"head": "0"}, r"^model.module: Sequential fails on .* \(1, 8, 8\)$"),
        (
            LogProbabilities(),
            {"head": "classifier"},
            "^model.head: .*must be the last thing that LogProbabilities does",
        ),
        (Tempered(), {"head": "classifier"}, "^model.head: .*must be the last thing that Tempered does"),
        (Scaled(), {"head": "classifier"}, "^model.head: .*must be the last thing that Scaled does; name"),
        (
            DropsLogits(),
            {"head": "classifier"},
            "^model.head: .*the last thing that DropsLogits does, in training, too, where something follows it$",
        ),
        (
            TwoInTraining(),
            {"head": "classifier"},
            "^model.head: .*that TwoInTraining does, in training, too, where TwoInTraining gives tuple$",
        ),
        (Recurrent(), {"head": "cell"}, '^model.head: "cell" must be the last thing that Recurrent does'),
        (UserNet(), {"head": "conv"}, '^model.head: "conv" must be the last thing that UserNet does'),
        (ReadsItsHead(), {"head": "classifier.2"}, "^model.head: .*must be the last thing .*it fails"),
        (Maps(), {"head": "head"}, r"^model.head: .*one tensor z of shape \[B, D\], got \(2, 4, 6, 6\)$"),
        (
            UserNet(),
            {"head": "classifier", "features": ["convolution"]},
            r"^model.features: .*\(nearest: conv\), got 'convolution'",
        ),
        (
            UserNet(),
            {"head": "classifier", "features": ["classifier.0"]},
            "^model.features: must name a submodule of UserNet .*got 'classifier.0'$",
        ),
        (
            UserNet(),
            {"head": "classifier", "features": ["unused"]},
            '^model.features: "unused" is not called in a forward pass',
        ),
        (UserNet(), {"head": "classifier", "num_classes": 0}, "^model.num_classes: must be >= 1, got 0"),
        (UserNet(), {"head": "classifier", "frozen": ["convolution"]}, r"^model.frozen: .*\(nearest: conv\)"),
        (UserNet(), {"head": "classifier", "frozen": ["conv", "norm", "classifier"]}, "^model.frozen: leaves nothing"),
    ],
)
def test_wrapped_model_rejects_what_it_cannot_split(module, options, message):
    with pytest.raises(ConfigError, match=message):
        WrappedModel(**{"input_shape": SHAPE, "num_classes": 3, "module": module, **options})


def test_wrapped_model_rejects_a_head_that_shares_weights_with_the_body():
    with pytest.raises(ConfigError, match=r'^model.head: "fc" must not share weights with the rest'):
        WrappedModel((4,), 4, Tied(), head="fc")


# --- buffers that are in no state dict --------------------------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which no state dict holds; a cache beside it grows with the batch."""

    def __init__(self):
        super().__init__()
        self.flatten, self.hidden, self.fc = nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(64), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        x = self.flatten(x)
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
            self.cache = torch.arange(len(x)) if self.cache is None else self.cache
        shift = 0 if self.cache is None else 0.1 * len(self.cache)
        return self.fc((self.hidden(x - self.mean) + shift).relu())


def centred(method=FedRep):
    return method(WrappedModel((1, 8, 8), 4, Centred(), "fc"))


def test_buffers_in_no_state_dict_are_no_other_clients(set_up_federation):
    loop = set_up_federation(centred, rounds=1)
    runner, module = loop.runner, loop.runner.module(0).method.model.body.neck
    runner.fit(runner.load(0), loop.data.clients[0], 1)
    assert module.mean.any()
    runner.load(1)
    assert (module.mean.any().item(), module.cache) == (False, None)
    module.mean.fill_(1.0)
    runner.residents.load_global(loop.exchange.global_message())
    assert not module.mean.any()


@pytest.mark.parametrize("method", [FedRep, FedCP])
def test_a_model_with_such_buffers_resumes_exactly(assert_resumes, method):
    """FedCP has a copy of the body that is no model of its own, and trains beside it in train mode."""
    assert_resumes(lambda: centred(method), stopped_after=1)


def test_a_trial_of_an_adapted_copy_leaves_such_buffers_alone(set_up_federation):
    plain, tuned = (
        set_up_federation(centred, rounds=2, evaluate=EvaluationPolicy(fine_tune=fine_tune))
        for fine_tune in (None, FineTune(1))
    )
    plain.run(), tuned.run()
    rows = zip(plain.diary.rows, tuned.diary.rows, strict=True)
    assert all(one["loss"] == other["loss"] for one, other in rows)


# --- state that comes up in a fit ------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps a running mean that a fit makes, or takes away."""

    def __init__(self, way):
        super().__init__()
        self.body, self.fc, self.way = nn.Linear(64, 5), nn.Linear(5, 4), way
        if way in ("none", "gone"):
            self.register_buffer("mean", None if way == "none" else torch.zeros(5))

    def forward(self, x):
        z = self.body(x.flatten(1))
        if self.training and self.way in ("none", "gone"):
            self.mean = z.detach().mean(0) if self.way == "none" else None
        elif self.training and not hasattr(self, "mean"):
            made = z.detach().mean(0)
            if self.way == "parameter":
                self.mean = nn.Parameter(made)
            else:
                self.register_buffer("mean", made, persistent=self.way == "buffer")
        return self.fc(z)


@pytest.mark.parametrize("way", ["none", "buffer", "parameter", "gone"])
def test_state_that_a_fit_makes_or_takes_away_is_refused(way, run_federation):
    """It ran on from client to client, and a run that was resumed had other numbers."""
    said = (
        rf"^model: model\.\S*mean of its state is {'gone' if way == 'gone' else 'new'} after a fit; make it, with its"
    )
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: FedAvg(WrappedModel(SHAPE, 4, Remembers(way), "fc")), rounds=1)


class HoldsTheLast(FedAvg):
    """Pulls towards a copy of the client's last model, which is put in the old one's place."""

    def setup(self):
        self.last = copy.deepcopy(self.model).requires_grad_(False)

    def is_kept(self, name, module):
        return name.startswith("last.")

    def on_fit_end(self):
        self.last = copy.deepcopy(self.model).requires_grad_(False)


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_module_in_another_one_s_place_is_refused(mlp, run_federation, cohort):
    """Its weights were neither swapped nor saved: each client was pulled towards the one before it."""
    said = r"^model: last\.\S+ is another module after a fit; copy into its entries \(load_state_dict\) instead, or it"
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: HoldsTheLast(mlp()), rounds=1, cohort=cohort)


class Collects(FedAvg):
    """Keeps an embedding of each of a client's samples, in a buffer of its own size."""

    def setup(self):
        self.register_buffer("store", torch.zeros(0, self.model.embedding_size))

    def is_shared(self, name, module):
        return name != "store" and super().is_shared(name, module)

    def is_kept(self, name, module):
        return name == "store"

    def send(self, data):
        self.store = data.collected().z.clone()
        return super().send(data)


def test_state_that_a_client_makes_larger_is_said_of_it(run_federation, conv_net):
    """The next client was said to have received something of another shape."""
    said = r"^model: store of its state has gone from \(0, \d+\) to \(15, \d+\): a state has one shape for all clients"
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: Collects(conv_net()), rounds=1)


class Changes(FedAvg):
    """Has a number of its own, which becomes of another type at the end of its first fit."""

    def __init__(self, model, was, becomes):
        super().__init__(model)
        self.register_buffer("seen", torch.zeros((), dtype=was))
        self.becomes = becomes

    def on_fit_end(self):
        self.seen = (self.seen + 1).to(self.becomes)


@pytest.mark.parametrize("cohort", [None, 4])
def test_state_that_a_client_makes_of_another_type_is_said_of_it(cohort, run_federation, mlp):
    """No resumed run could read it, and a cohort's client was said to be unstackable."""
    said = r"^model: seen of its state has gone from int64 to float32: a state has one type for all clients and rounds"
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: Changes(mlp(), torch.int64, torch.float32), rounds=1, cohort=cohort)


@pytest.mark.parametrize("cohort", [None, 4])
def test_state_that_a_client_makes_wider_goes_on(cohort, run_federation, mlp):
    loop = run_federation(lambda: Changes(mlp(), torch.float32, torch.float64), rounds=1, cohort=cohort)
    assert loop.runner.pool.get(1)["seen"].dtype == torch.float64
    assert loop.cohort.reason == ("seen changes its type or shape" if cohort else "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_an_encoder_of_torchs_is_tested_under_autocast_as_it_is_trained(method, run_federation):
    """Its way of predicting knows none: the run ended at the first test."""
    fused = torch.backends.mha.get_fastpath_enabled()
    trainer = {"precision": "bf16-mixed"}
    loop = run_federation(lambda: method(WrappedModel((1, 8, 8), 4, Reads(4), "fc")), 2, trainer=trainer)
    assert all(math.isfinite(row["Local-T"]) for row in loop.diary.rows)
    assert torch.backends.mha.get_fastpath_enabled() is fused


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoders_layers_give_feature_maps_when_they_predict():
    """They hand each other nested tensors there, which are no maps."""
    model = WrappedModel((1, 8, 8), 4, Reads(4), "fc", features=["encoder.layers.0"]).eval()
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        (feature,), z = model.forward_features(x)
        assert (feature.is_nested, list(feature.shape)) == (False, [5, 8, 8])
        torch.testing.assert_close(model.head(z), model(x), atol=1e-5, rtol=1e-5)
