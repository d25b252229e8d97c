"""Models that tests share."""

from torch import nn

from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel


def count_parameters(module):
    """Number of parameter values, frozen ones included, buffers not; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


class TinyConvNet(SplitModel):
    """One convolution with batch norm and dropout, for what an MLP does not show."""

    def __init__(self, input_shape, num_classes, embedding=6) -> None:
        channels, height, width = input_shape
        stage = nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2))
        size = 3 * (height // 2) * (width // 2)
        neck = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(size, embedding), nn.ReLU())
        super().__init__(Body([stage], neck), nn.Linear(embedding, num_classes), embedding, num_classes, input_shape)


class FrozenFirst(nn.Module):
    """Frozen layers of some width before those that learn."""

    def __init__(self, width, num_classes=4, hidden=8):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 16), nn.ReLU()).requires_grad_(
            False
        )
        self.hidden = nn.Linear(16, hidden)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.fc(self.hidden(self.first(x.flatten(1))).relu())


def frozen_first(width, **options):
    """That as a split model."""
    return WrappedModel((1, 8, 8), 4, FrozenFirst(width, **options), "fc")
