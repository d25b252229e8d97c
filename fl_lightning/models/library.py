"""Networks of torchvision's and timm's, by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.models import weights as stored
from fl_lightning.models.checks import require_choice, require_image, require_size
from fl_lightning.models.split import SplitModel
from fl_lightning.models.wrapped import freeze, split_at

_OWN_LOSSES = ("googlenet", "inception_v3")  # their forward gives more than logits
_FILES = (".pt", ".pth")


class LibraryModel(SplitModel):
    """A network of torchvision's or timm's by its name, split at its classifier.

    Its classifier has as many outputs as there are classes, and its first convolution takes as many channels as images
    have. Published weights are of 3 channels; for grey images, the first convolution's are added up over them.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of classes C.
        name: as in the library, e.g. "resnet18", "mobilenet_v3_small", "vit_b_16".
        library: "torchvision", or "timm" (extra `timm`).
        weights: null draws them; the library's own by name ("DEFAULT", "IMAGENET1K_V1"), in torch's cache or over a
            network; or a file, `.pt` or `.pth`, of the network's `state_dict`. A classifier of other classes is drawn.
        head: name of the submodule that is the classifier; null finds the last linear layer.
        features: names of the submodules whose outputs are the feature maps, in this order; none by default.
        frozen: names of submodules or parameters that are not trained; everybody has them, so that they are not sent
            either. Batch norm's statistics in them go on moving.

    Raises:
        ConfigError: if there is no such network or submodule, it does not take such images, its classifier is not the
            last thing that it does, or its weights cannot be had.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        name: str,
        library: Literal["torchvision", "timm"] = "torchvision",
        weights: str | None = None,
        head: str | None = None,
        features: Sequence[str] = (),
        frozen: Sequence[str] | None = None,
    ) -> None:
        require_choice("library", library, ("torchvision", "timm"))
        require_size("num_classes", num_classes)
        channels, *_ = require_image("LibraryModel", input_shape)
        published = None if weights is None or weights.endswith(_FILES) else weights
        make = _from_torchvision if library == "torchvision" else _from_timm
        network = make(name, num_classes, channels, published)
        head = head or _classifier(network)
        if weights is not None and published is None:
            stored.load_file(network, Path(weights), head)
        freeze(network, frozen or ())
        body, classifier, size = split_at(network, head, features, input_shape, num_classes)
        super().__init__(body, classifier, size, num_classes, input_shape)


def _from_torchvision(name: str, num_classes: int, channels: int, published: str | None) -> nn.Module:
    from torchvision import models  # late: importing torchvision takes seconds

    _require_known(name, [known for known in models.list_models(module=models) if known not in _OWN_LOSSES])
    network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
    state = None
    if published is not None:
        choices = models.get_model_weights(name).__members__
        require(published in choices, stored.KEY, f"must be a file or one of {', '.join(choices)}", published)
        state = _had(lambda: choices[published].get_state_dict(progress=False, check_hash=True), name)
    first = _first_convolution(network)
    if first is not None and channels != network.get_submodule(first).in_channels:
        state = _take_channels(network, first, channels, state)
    if state is not None:
        stored.load(network, state, _classifier(network), f"{name}'s {published}")
    return network


def _from_timm(name: str, num_classes: int, channels: int, published: str | None) -> nn.Module:
    with importing("timm", "model.library", "timm is not installed: pip install 'fl-lightning[timm]'"):
        import timm
    _require_known(name.split(".")[0], timm.list_models())  # a name of a hub's would fetch a configuration, too
    tagged = name if published in (None, "DEFAULT") else f"{name}.{published}"
    known = published is None or any(f"{one}.".startswith(f"{tagged}.") for one in timm.list_pretrained())
    require(known, stored.KEY, f"timm has none of that name for {name}", published)
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    return _had(lambda: timm.create_model(tagged, pretrained=published is not None, **options), name)


def _require_known(name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    said = f"; did you mean {' or '.join(near)}?" if near else f", as {known[0]} is"
    require(name in known, "model.name", f"must be a network of the library's{said}", name)


def _had(make: Any, name: str) -> Any:
    try:
        return make()
    except Exception as error:  # no network, no room in the cache, a file cut short: each library has its own types
        said = " ".join(str(error).split())[:120]
        raise ConfigError(
            stored.KEY, f"{name}'s cannot be had ({said}); put them in the library's cache first"
        ) from error


def _classifier(network: nn.Module) -> str:
    """Name of the last linear layer."""
    names = _names_of(network, nn.Linear)
    require(len(names) > 0, "model.head", f"{type(network).__name__} has no linear layer; name its classifier")
    return names[-1]


def _first_convolution(network: nn.Module) -> str | None:
    return next(iter(_names_of(network, nn.Conv2d)), None)


def _names_of(network: nn.Module, kind: type[nn.Module]) -> list[str]:
    found: Iterable[tuple[str, nn.Module]] = network.named_modules()
    return [name for name, module in found if isinstance(module, kind)]


def _take_channels(network: nn.Module, name: str, channels: int, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Give the first convolution other channels; published weights are added up for one channel."""
    old = network.get_submodule(name)
    assert isinstance(old, nn.Conv2d)
    require(old.groups == 1, "model.name", "takes images of 3 channels alone", channels)
    require(state is None or channels == 1, stored.KEY, "published weights take images of 1 or 3 channels", channels)
    old.in_channels = channels
    old.weight = nn.Parameter(old.weight.new_empty(old.out_channels, channels, *old.kernel_size))
    nn.init.kaiming_normal_(old.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    if state is None:
        return None
    summed: torch.Tensor = state[f"{name}.weight"].sum(dim=1, keepdim=True)
    return {**state, f"{name}.weight": summed}
