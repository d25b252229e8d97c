"""A model split into body f: x → z and head g: z → logits, the split that every method speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.own_training import OwnTraining

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Body(nn.Module):
    """Feature extractor f: x → z, with the feature maps on the way.

    Args:
        stages: run one after another; the output of each is one feature map. May be empty.
        neck: from the last map (or from the input, if there are no stages) to the embedding z [B, D].
    """

    def __init__(self, stages: Iterable[nn.Module], neck: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.neck = neck

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding z [B, D]."""
        for stage in self.stages:
            x = stage(x)
        return self.neck(x)

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the feature maps, in the order of the stages, and the embedding z [B, D], in one pass."""
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps, self.neck(x)

    def append(self, *layers: nn.Module) -> None:
        """Put layers after the embedding; what comes out of the last one is z from now on."""
        self.neck = nn.Sequential(self.neck, *layers)


class SplitModel(nn.Module):
    """A body and a head; subclasses differ only in what they put there.

    Args:
        body: the extractor f: x → z [B, D].
        head: the classifier g: z [B, D] → logits [B, C].
        embedding_size: D.
        num_classes: C.
        input_shape: shape of one sample, for methods that build parts of their own around the model.
    """

    paper: ClassVar[str] = ""
    otherwise: ClassVar[str] = (
        "wrap any other network: model WrappedModel, with `module` and the name of its `head`; torchvision's and "
        "timm's go by `name`: model LibraryModel"
    )
    """What to do with a class that is none."""
    body: Body
    head: nn.Module

    def __init__(
        self,
        body: Body,
        head: nn.Module,
        embedding_size: int,
        num_classes: int,
        input_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        rule = f"{type(self).__name__} must give SplitModel a Body([*stages], neck), which says its feature maps"
        require(hasattr(body, "forward_features"), "model", rule, type(body).__name__)
        self.body = body
        self.head = head
        self.embedding_size = embedding_size
        self.num_classes = num_classes
        self.own = OwnTraining()
        """What the model brings along for its local fit: a loss and optimizers of its own, or nothing."""
        self._input_shape = None if input_shape is None else tuple(input_shape)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample.

        Raises:
            ConfigError: if the model was not told.
        """
        if self._input_shape is None:
            raise ConfigError("model", f"{type(self).__name__} must give its `input_shape` to SplitModel.__init__")
        return self._input_shape

    @property
    def trains_its_parts(self) -> bool:
        """Whether what a loss of the model's own trains is the body and the head that it predicts by."""
        return True

    @property
    def embeds_by_body(self) -> bool:
        """Whether embeddings and maps are what the body makes, and nothing of a subclass's own."""
        kind = type(self)
        return kind.embed is SplitModel.embed and kind.forward_features is SplitModel.forward_features

    @property
    def classification_layer(self) -> nn.Linear:
        """The last linear layer of the head, whose rows are the classes' weight vectors.

        Raises:
            ConfigError: if the head has none with C outputs.
        """
        layers = [layer for layer in self.head.modules() if isinstance(layer, nn.Linear)]
        fits = bool(layers) and layers[-1].out_features == self.num_classes
        require(fits, "model.head", f"{type(self).__name__}'s head must end in a linear layer of one output a class")
        return layers[-1]

    def last_layers(self, count: int, key: str) -> tuple[str, ...]:
        """Names of the modules that the last `count` layers with parameters are made of, in the model's order.

        A layer is a module that owns parameters; a normalisation counts with the layer before it.

        Args:
            count: >= 0; 0 is no layer at all.
            key: the configuration's key for `count`, for the error.

        Raises:
            ConfigError: if there are not so many.
        """
        layers: list[list[str]] = []
        for name, module in self.named_modules():
            if not module._parameters:
                continue
            if layers and isinstance(module, _NORMS):
                layers[-1].append(name)
            else:
                layers.append([name])
        rule = f"must be from 0 to {len(layers)}, the layers of {type(self).__name__} with parameters"
        require(0 <= count <= len(layers), key, rule, count)
        return tuple(name for layer in layers[len(layers) - count :] for name in layer)

    @torch.no_grad()
    def feature_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the feature maps of one sample, in the order of the stages; changes no state."""
        looked_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in self.modules())
        tokens = looked_up and len(self.input_shape) == 1  # a transformer over images may look up its positions
        sample = torch.zeros((1, *self.input_shape), dtype=torch.int64 if tokens else torch.float32)
        modes = {layer: layer.training for layer in self.modules()}
        try:
            self.eval()
            return [tuple(feature.shape[1:]) for feature in self.features(sample)]
        finally:
            for layer, mode in modes.items():
                layer.training = mode

    def features(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps, in the order of the stages."""
        return self.forward_features(x)[0]

    def embed(self, x: Tensor) -> Tensor:
        """Return the embedding z [B, D]."""
        return self.body(x)

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the feature maps and the embedding z [B, D] in one pass."""
        return self.body.forward_features(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, C]."""
        return self.head(self.embed(x))
