"""All models that subclass SplitModel: sizes of the papers, and the contract of body, head and feature maps."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from tiny_models import count_parameters
from torch import nn

import fl_lightning.models.split
from fl_lightning.errors import ConfigError
from fl_lightning.models.cnn import CNN, FedDWCNN, FedProtoCNN
from fl_lightning.models.describe import has_batch_norm
from fl_lightning.models.lstm import BiLSTM
from fl_lightning.models.mlp import MLP
from fl_lightning.models.mobile import MobileNetV2, ShuffleNetV2
from fl_lightning.models.resnet import ResNet18
from fl_lightning.models.shufflenet import ShuffleNetV1, shuffled
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel

GREY, RGB = (1, 28, 28), (3, 32, 32)


def tiny_network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 5)
    )


# What to build, and the expected shapes of its feature maps and of z for a batch of two.
MODELS = {
    "CNN-grey": (lambda: CNN(GREY, 5), GREY, [(32, 12, 12), (64, 4, 4)], 512),
    "CNN-niid-bench": (lambda: CNN(RGB, 5, [6, 16], [120, 84]), RGB, [(6, 14, 14), (16, 5, 5)], 84),
    "CNN-rgb-mapping": (
        lambda: CNN(RGB, 5, channels=[4, 8], hidden=16, mapping=[12, 7]),
        RGB,
        [(4, 14, 14), (8, 5, 5)],
        7,
    ),
    "FedDWCNN-grey": (lambda: FedDWCNN(GREY, 5), GREY, [(10, 12, 12), (20, 4, 4)], 128),
    "FedDWCNN-rgb": (lambda: FedDWCNN(RGB, 5, head_bias=False), RGB, [(6, 14, 14), (16, 5, 5)], 128),
    "FedDWCNN-no-mapping": (lambda: FedDWCNN(RGB, 5, mapping=[]), RGB, [(6, 14, 14), (16, 5, 5)], 400),
    "FedProtoCNN": (lambda: FedProtoCNN(GREY, 5, channels=18), GREY, [(10, 12, 12), (18, 4, 4)], 50),
    "ResNet18": (
        lambda: ResNet18((3, 16, 16), 5, mapping=[8], head_bias=False),
        (3, 16, 16),
        [(64, 16, 16), (64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)],
        8,
    ),
    "ResNet18-imagenet-stem": (
        lambda: ResNet18(GREY, 5, stem="imagenet", stem_strides=[1, 4]),
        GREY,
        [(64, 7, 7), (64, 7, 7), (128, 4, 4), (256, 2, 2), (512, 1, 1)],
        512,
    ),
    "ShuffleNetV2": (
        lambda: ShuffleNetV2((3, 16, 16), 5, width=0.5),
        (3, 16, 16),
        [(24, 16, 16), (48, 8, 8), (96, 4, 4), (192, 2, 2), (1024, 2, 2)],
        1024,
    ),
    "ShuffleNetV2-imagenet-stem": (
        lambda: ShuffleNetV2((1, 64, 64), 5, width=0.5, stem="imagenet", mapping=[9]),
        (1, 64, 64),
        [(24, 16, 16), (48, 8, 8), (96, 4, 4), (192, 2, 2), (1024, 2, 2)],
        9,
    ),
    "ShuffleNetV1-FedDW": (
        lambda: ShuffleNetV1(RGB, 5, mapping=[256, 128], head_bias=False),
        RGB,
        [(24, 32, 32), (200, 16, 16), (400, 8, 8), (800, 4, 4)],
        128,
    ),
    "ShuffleNetV1-three-groups": (
        lambda: ShuffleNetV1((1, 9, 9), 5, groups=3, widths=[48, 96, 144], blocks=[1, 2, 1], depthwise_relu=False),
        (1, 9, 9),
        [(24, 9, 9), (48, 5, 5), (96, 3, 3), (144, 2, 2)],
        144,
    ),
    "MobileNetV2": (
        lambda: MobileNetV2((1, 32, 32), 5, width=0.25),
        (1, 32, 32),
        [(8, 32, 32), (8, 16, 16), (8, 8, 8), (24, 4, 4), (1280, 2, 2)],
        1280,
    ),
    "MobileNetV2-FedDW": (
        lambda: MobileNetV2(RGB, 5, width=0.5, last_channels=640, stem="imagenet", mapping=[256, 128]),
        RGB,
        [(8, 16, 16), (16, 8, 8), (16, 4, 4), (48, 2, 2), (640, 1, 1)],
        128,
    ),
    "BiLSTM": (
        lambda: BiLSTM((9,), 5, vocabulary_size=20, embedding=6, hidden=4, token_mapping=7, mapping=[3]),
        (9,),
        [(9, 6), (9, 8)],
        3,
    ),
    "MLP": (lambda: MLP((1, 8, 8), 5), (1, 8, 8), [(128,)], 64),
    "MLP-one-layer": (lambda: MLP((7,), 5, hidden=[4], head_bias=False), (7,), [], 4),
    "MLP-linear": (lambda: MLP((2, 3), 5, hidden=[]), (2, 3), [], 6),
    "Wrapped": (
        lambda: WrappedModel((1, 8, 8), 5, tiny_network(), head="6", features=["1", "3"]),
        (1, 8, 8),
        [(4, 6, 6), (6,)],
        6,
    ),
}


@pytest.fixture(params=MODELS)
def case(request):
    build, input_shape, maps, embedding_size = MODELS[request.param]
    torch.manual_seed(0)
    model = build()
    x = torch.randint(0, 20, (2, *input_shape)) if isinstance(model, BiLSTM) else torch.randn(2, *input_shape)
    return model, x, maps, embedding_size


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: CNN(GREY, 10), 582_026),
        (lambda: CNN(RGB, 10), 878_538),
        (lambda: CNN(RGB, 10, [6, 16], [120, 84]), 62_006),
        (lambda: CNN(RGB, 10).body, 873_408),
        (lambda: CNN(GREY, 10).body, 576_896),
        (lambda: CNN(RGB, 100).head, 51_300),
        (lambda: FedDWCNN(GREY, 10, head_bias=False), 121_632),
        (lambda: FedDWCNN(RGB, 10, head_bias=False), 139_704),
        (lambda: FedDWCNN(RGB, 10), 139_714),
        (lambda: FedProtoCNN(GREY, 10), 21_840),
        (lambda: FedProtoCNN((1, 128, 128), 62, kernel_size=3), 849_332),
        (lambda: ResNet18(RGB, 10, stem="imagenet"), 11_181_642),
        (lambda: ResNet18(RGB, 100, mapping=[256, 128], head_bias=False), 11_345_856),
        (lambda: BiLSTM((200,), 2, vocabulary_size=10_000, head_bias=False), 1_593_856),
        (lambda: ShuffleNetV2(RGB, 10), 1_263_854),
        (lambda: MobileNetV2(RGB, 10), 2_236_682),
        (lambda: ShuffleNetV1(RGB, 10), 887_582),
        (lambda: ShuffleNetV1(RGB, 100, mapping=[256, 128], head_bias=False), 1_130_324),
        (lambda: MLP((1, 8, 8), 10), 17_226),
    ],
)
def test_count_parameters_gives_the_papers_figure(build, parameters):
    assert count_parameters(build()) == parameters


def test_shufflenet_mixes_groups_and_keeps_its_input_beside():
    """Channel 0 of the output depends on both groups of the input; the last channels of a halving unit are its mean."""
    x = torch.arange(8.0).reshape(1, 4, 2, 1)
    assert shuffled(x, 2)[0, :, 0, 0].tolist() == [0.0, 4.0, 2.0, 6.0]
    assert torch.equal(shuffled(x, 1), x)
    model = ShuffleNetV1((3, 8, 8), 2, widths=[48, 72, 96], blocks=[2, 1, 1]).eval()
    maps, _ = model.forward_features(torch.ones(1, 3, 8, 8))
    beside = torch.nn.functional.avg_pool2d(maps[1], 3, stride=2, padding=1)
    torch.testing.assert_close(maps[2][:, -48:], beside)  # of what is not negative, so that the ReLU changes nothing


def test_resnet18_state_dict_has_the_papers_buffer_entries():
    model = ResNet18(RGB, 10, stem="imagenet")
    assert sum(buffer.numel() for buffer in model.buffers()) == 9_620
    assert sum(value.numel() for value in model.state_dict().values()) == 11_191_262


def test_count_parameters_counts_a_shared_layer_once_and_frozen_ones_too():
    layer = nn.Linear(3, 2)
    layer.requires_grad_(False)
    assert count_parameters(nn.Sequential(layer, nn.ReLU(), layer)) == 8


def test_model_returns_maps_embedding_and_logits_of_the_documented_shapes(case):
    model, x, expected_maps, embedding_size = case
    maps, z = model.forward_features(x)
    assert [tuple(feature.shape[1:]) for feature in maps] == expected_maps
    assert z.shape == (2, embedding_size)
    assert model.embedding_size == embedding_size
    assert model.num_classes == 5
    assert model(x).shape == (2, 5)


def test_model_in_eval_mode_repeats_exactly_and_one_pass_equals_separate_calls(case):
    model, x, *_ = case
    model.eval()
    maps, z = model.forward_features(x)
    for once, again in zip(maps, model.features(x), strict=True):
        torch.testing.assert_close(once, again, rtol=0, atol=0)
    torch.testing.assert_close(model.embed(x), z, rtol=0, atol=0)
    torch.testing.assert_close(model(x), model.head(z), rtol=0, atol=0)
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_model_takes_a_batch_of_one_in_eval_mode(case):
    model, x, *_ = case
    assert model.eval()(x[:1]).shape == (1, 5)


def test_model_state_is_body_and_head_and_nothing_else(case):
    model, *_ = case
    names = model.state_dict().keys()
    assert {name.split(".")[0] for name in names} <= {"body", "head"}
    if not isinstance(model, WrappedModel):
        assert all(name.startswith(("body.stages.", "body.neck.", "head.")) for name in names)
    body = {tensor.data_ptr() for tensor in model.body.state_dict().values() if tensor.numel()}
    head = {tensor.data_ptr() for tensor in model.head.state_dict().values()}
    assert not body & head


def test_model_gives_every_parameter_a_gradient(case):
    model, x, *_ = case
    model(x).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_model_deepcopy_and_state_dict_give_an_equal_and_independent_model(case):
    model, x, *_ = case
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert not torch.equal(twin.eval()(x), model.eval()(x))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin.eval()(x), model.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["CNN-grey", "MLP", "Wrapped"])
def test_model_runs_stacked_under_vmap(name):
    build, input_shape, *_ = MODELS[name]
    models = [build().eval() for _ in range(2)]
    x = torch.randn(2, 3, *input_shape)
    params, buffers = torch.func.stack_module_state(models)

    def maps_and_embedding(params, buffers, x):
        return torch.func.functional_call(models[0].body, (params, buffers), (x,))

    inside = {key.removeprefix("body."): value for key, value in params.items() if key.startswith("body.")}
    stacked = torch.vmap(maps_and_embedding)(inside, buffers, x)
    separate = torch.stack([model.embed(batch) for model, batch in zip(models, x, strict=True)])
    torch.testing.assert_close(stacked, separate, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (MLP((4,), 2), False),
        (CNN(GREY, 2), False),
        (ShuffleNetV2(RGB, 2), True),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), True),
        (nn.InstanceNorm2d(3), False),
        (nn.GroupNorm(1, 3), False),
    ],
)
def test_has_batch_norm_finds_batch_norm_only(module, expected):
    assert has_batch_norm(module) is expected


def test_body_without_stages_has_no_maps():
    body = Body(stages=[], neck=nn.Flatten())
    x = torch.ones(2, 3, 4)
    maps, z = body.forward_features(x)
    assert maps == []
    torch.testing.assert_close(z, x.flatten(1))
    assert SplitModel(body, nn.Linear(12, 2), 12, 2)(x).shape == (2, 2)


def test_cnn_pool_before_relu_equals_the_papers_order():
    model = CNN(GREY, 3)
    x = torch.randn(2, *GREY)
    convolution, pool, relu = model.body.stages[0]
    torch.testing.assert_close(model.features(x)[0], pool(relu(convolution(x))), rtol=0, atol=0)


def test_mapping_has_relus_between_its_layers_but_none_before_the_head():
    neck = CNN(GREY, 3, mapping=[256, 128]).body.neck
    assert [type(layer).__name__ for layer in neck] == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert (neck[3].out_features, neck[5].out_features) == (256, 128)


@pytest.mark.parametrize("head_bias", [True, False])
def test_head_bias_is_left_out_on_request(head_bias):
    for model in (CNN(GREY, 3, head_bias=head_bias), FedDWCNN(GREY, 3, head_bias=head_bias)):
        assert (model.head.bias is not None) is head_bias


def test_feddw_cnn_drops_out_on_grey_images_only():
    def probabilities(model):
        return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]

    assert probabilities(FedDWCNN(GREY, 3)) == [0.5]
    assert probabilities(FedDWCNN(RGB, 3)) == []
    assert probabilities(FedDWCNN(RGB, 3, dropout=0.2)) == [0.2]
    assert FedDWCNN((2, 28, 28), 3, channels=[4, 4], dropout=0.0)(torch.randn(1, 2, 28, 28)).shape == (1, 3)


def test_fedproto_cnn_keeps_value_dropout_out_of_the_embedding():
    model = FedProtoCNN(GREY, 3)
    assert isinstance(model.head[0], nn.Dropout)
    assert not any(isinstance(layer, nn.Dropout) for layer in model.body.modules())
    assert (model.embed(torch.randn(4, *GREY)) >= 0).all()


def test_bilstm_averages_over_all_steps_padding_included():
    model = BiLSTM((4,), 2, vocabulary_size=5, embedding=3, hidden=2, token_mapping=3, mapping=[]).eval()
    nn.init.ones_(model.body.neck[1].bias)  # whatever the draw, the ReLU is open
    tokens = torch.tensor([[1, 2, 0, 0]])
    states = model.features(tokens)[1]
    expected = torch.relu(model.body.neck[1](states)).mean(dim=1)
    torch.testing.assert_close(model.embed(tokens), expected)
    assert not torch.allclose(model.embed(tokens), model.embed(tokens[:, :2]))


def test_resnet18_stem_strides_are_those_of_convolution_and_pool():
    stem = ResNet18(RGB, 2, stem="imagenet", stem_strides=[1, 4]).body.stages[0]
    assert (stem[0].stride, stem[-1].stride) == ((1, 1), 4)


def test_resnet18_pretrained_takes_the_layers_but_neither_stem_nor_head(monkeypatch):
    from torchvision.models import ResNet18_Weights, resnet18

    state = {name: torch.full_like(value, 3) for name, value in resnet18().state_dict().items()}
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda self, *args, **kwargs: state)
    model = ResNet18((1, 8, 8), 4, pretrained=True)
    layers = model.body.stages[1:].state_dict().values()
    assert all((value == 3).all() for value in layers)
    others = [*model.body.stages[0].state_dict().values(), *model.head.state_dict().values()]
    assert not any((value == 3).all() for value in others)


def test_importing_the_models_does_not_import_torchvision():
    """Its import takes seconds, which `fl-lightning --help` has not got."""
    for file in Path(fl_lightning.models.split.__file__).parent.glob("*.py"):
        statements = ast.parse(file.read_text(encoding="utf-8")).body
        imports = [
            ast.unparse(statement) for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)
        ]
        assert not any("torchvision" in line for line in imports), file.name


def test_last_layers_are_counted_from_the_end_with_their_norms():
    mlp, resnet = MLP((1, 8, 8), 4, (8, 5)), ResNet18((3, 32, 32), 10)
    assert mlp.last_layers(0, "key") == ()
    assert mlp.last_layers(2, "key") == ("body.neck.0", "head")
    assert mlp.last_layers(3, "key") == ("body.stages.0.1", "body.neck.0", "head")
    assert resnet.last_layers(2, "key") == ("body.stages.4.1.conv2", "body.stages.4.1.bn2", "head")
    with pytest.raises(ConfigError, match="key: must be from 0 to 3, the layers of MLP with parameters, got 4"):
        mlp.last_layers(4, "key")


def test_layers_that_are_appended_to_a_body_give_the_embedding():
    model = MLP((1, 8, 8), 4, (8, 5))
    x = torch.rand(2, 1, 8, 8)
    before = model.embed(x)
    model.body.append(nn.ReLU(), nn.Linear(5, 3))
    torch.testing.assert_close(model.embed(x), model.body.neck[2](before.relu()))
    assert len(model.features(x)) == 1
