"""What a model says of a value that is out of range or of data that does not fit."""

import pytest
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.models.cnn import CNN, FedDWCNN, FedProtoCNN
from fl_lightning.models.lstm import BiLSTM
from fl_lightning.models.mlp import MLP
from fl_lightning.models.mobile import MobileNetV2, ShuffleNetV2
from fl_lightning.models.resnet import ResNet18
from fl_lightning.models.shufflenet import ShuffleNetV1

GREY = (1, 28, 28)
IMAGE_MODELS = [CNN, FedDWCNN, FedProtoCNN, ResNet18, ShuffleNetV1, ShuffleNetV2, MobileNetV2]


@pytest.mark.parametrize("model", IMAGE_MODELS)
@pytest.mark.parametrize("input_shape", [(200,), (0, 28, 28)])
def test_image_model_rejects_what_is_no_image(model, input_shape):
    with pytest.raises(ConfigError, match=rf"^model: {model.__name__} takes images .*got \({input_shape[0]},"):
        model(input_shape, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CNN((1, 8, 8), 2), r"^model: CNN needs images of 16x16 or more, got \(1, 8, 8\)$"),
        (lambda: CNN((1, 28, 15), 2), r"^model: CNN needs images of 16x16 or more, got \(1, 28, 15\)$"),
        (lambda: FedDWCNN((3, 4, 4), 2), "^model: FedDWCNN needs images of 16x16"),
        (lambda: FedProtoCNN((1, 13, 13), 2, kernel_size=3), "^model: FedProtoCNN needs images of 14x14"),
        (lambda: BiLSTM(GREY, 2, vocabulary_size=9), r"^model: BiLSTM takes token sequences .*got \(1, 28, 28\)"),
        (lambda: MLP((), 2), r"^model: MLP takes samples .*got \(\)"),
        (lambda: CNN(GREY, 0), "^model.num_classes: must be >= 1, got 0"),
        (lambda: CNN(GREY, 2, channels=[32]), r"^model.channels: must be a list of 2 sizes >= 1, got \[32\]"),
        (lambda: CNN(GREY, 2, hidden=0), "^model.hidden: must be >= 1, got 0"),
        (lambda: CNN(GREY, 2, mapping=[256, 0]), r"^model.mapping: must be a list of sizes >= 1, got \[256, 0\]"),
        (lambda: FedDWCNN((2, 28, 28), 2), "^model.channels: has a default for 1 or 3 input channels only, not for 2"),
        (lambda: FedDWCNN((2, 28, 28), 2, channels=[4, 4]), "^model.dropout: has a default for 1 or 3"),
        (lambda: FedDWCNN(GREY, 2, dropout=1.0), "^model.dropout: must be >= 0 and < 1 .*got 1.0"),
        (lambda: FedProtoCNN(GREY, 2, channels=0), "^model.channels: must be >= 1, got 0"),
        (lambda: FedProtoCNN(GREY, 2, embedding=-1), "^model.embedding: must be >= 1, got -1"),
        (lambda: FedProtoCNN(GREY, 2, dropout=-0.1), "^model.dropout: .*got -0.1"),
        (lambda: FedProtoCNN(GREY, 2, kernel_size=0), "^model.kernel_size: .*got 0"),
        (lambda: ResNet18(GREY, 2, stem="vgg"), "^model.stem: must be one of cifar, imagenet, got 'vgg'"),
        (lambda: ResNet18(GREY, 2, stem_strides=[1, 4]), '^model.stem_strides: is for `stem: "imagenet"` only'),
        (lambda: ResNet18(GREY, 2, stem="imagenet", stem_strides=[1]), r"^model.stem_strides: .*2 sizes.*got \[1\]"),
        (lambda: ShuffleNetV2(GREY, 2, width=0.7), "^model.width: must be one of 0.5, 1.0, 1.5, 2.0, got 0.7"),
        (lambda: ShuffleNetV1(GREY, 2, groups=0), "^model.groups: must be 1, 2, 3 or 6, got 0"),
        (lambda: ShuffleNetV1(GREY, 2, 4, [272, 544, 1088]), "^model.groups: must be 1, 2, 3 or 6, got 4"),
        (lambda: ShuffleNetV1(GREY, 2, groups=3), "^model.widths: must be three, .* multiples of 4 x groups"),
        (lambda: ShuffleNetV1(GREY, 2, widths=[24, 48, 96]), "^model.widths: must be three"),
        (lambda: ShuffleNetV1(GREY, 2, blocks=[4, 8]), "^model.blocks: must be three"),
        (lambda: ShuffleNetV2(GREY, 2, stem=""), "^model.stem: must be one of"),
        (lambda: MobileNetV2(GREY, 2, width=0.0), "^model.width: must be > 0 and <= 4, got 0.0"),
        (lambda: MobileNetV2(GREY, 2, last_channels=0), "^model.last_channels: must be >= 1, got 0"),
        (lambda: MobileNetV2(GREY, 2, stem=""), "^model.stem: must be one of"),
        (lambda: BiLSTM((9,), 2, vocabulary_size=0), "^model.vocabulary_size: must be >= 1, got 0"),
        (lambda: BiLSTM((9,), 2, vocabulary_size=9, hidden=0), "^model.hidden: must be >= 1, got 0"),
        (lambda: BiLSTM((9,), 2, vocabulary_size=9, embedding=0), "^model.embedding: must be >= 1, got 0"),
        (lambda: BiLSTM((9,), 2, vocabulary_size=9, token_mapping=0), "^model.token_mapping: must be >= 1, got 0"),
        (lambda: BiLSTM((9,), 2, vocabulary_size=9, dropout=2.0), "^model.dropout: .*got 2.0"),
        (lambda: MLP((4,), 2, hidden=[3, 0]), r"^model.hidden: must be a list of sizes >= 1, got \[3, 0\]"),
    ],
)
def test_model_rejects_a_bad_value_by_its_key(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_smallest_image_named_in_the_error_is_accepted():
    assert isinstance(CNN((1, 16, 16), 2), nn.Module)
    assert isinstance(FedProtoCNN((1, 14, 14), 2, kernel_size=3), nn.Module)


def test_resnet18_says_in_one_line_that_pretrained_weights_cannot_be_had(monkeypatch):
    from torchvision.models import ResNet18_Weights

    def no_network(self, *args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", no_network)
    with pytest.raises(ConfigError, match=r"^model.pretrained: .*no route to host.*use false.*$") as error:
        ResNet18(GREY, 2, pretrained=True)
    assert "\n" not in str(error.value)
