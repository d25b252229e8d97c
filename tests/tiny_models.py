"""Models that tests share."""

from torch import nn

from fl_lightning.models.split import Body, SplitModel


class TinyConvNet(SplitModel):
    """One convolution with batch norm and dropout, for what an MLP does not show."""

    def __init__(self, input_shape, num_classes, embedding=6) -> None:
        channels, height, width = input_shape
        stage = nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2))
        size = 3 * (height // 2) * (width // 2)
        neck = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(size, embedding), nn.ReLU())
        super().__init__(Body([stage], neck), nn.Linear(embedding, num_classes), embedding, num_classes, input_shape)
