"""Augmentation of training images by torchvision's transforms: parameters drawn for every image, from a seed.

A v2 transform draws once for whatever it is given, so a batch would be flipped as one. Flips and crops, which most
papers use, are done here for a whole batch with a draw an image; every other transform is called image by image.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.reading import plain
from fl_lightning.running_on import RunningOn
from fl_lightning.seeding import isolated_streams
from fl_lightning.trust import Trust, is_known

KEY = "data.augmentation"
LIBRARY = "torchvision.transforms.v2"
"""Where names without a module are looked for; imported late, because it takes seconds."""

_CUT = ("torchvision.transforms.v2._color", "torchvision.transforms.v2._auto_augment")
"""Where torchvision has its transforms of colours and contrasts."""

Stage = Callable[[Tensor, int], Tensor]
"""From a batch and a seed to the augmented batch."""


class Augmentation:
    """Transforms one after another, on one mini-batch of training images at a time.

    Args:
        transforms: from an image [C, H, W] to an image of the same shape and type, as torchvision's v2 transforms are.
    """

    def __init__(self, transforms: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.transforms = list(transforms)
        stages: list[Stage] = []
        singly: list[Callable[[Tensor], Tensor]] = []  # consecutive ones share a loop over the images
        for transform in transforms:
            stage = _batched(transform)
            if stage is None:
                if not singly:
                    singly = []
                    stages.append(_one_by_one(singly))
                singly.append(transform)
            else:
                singly = []
                stages.append(stage)
        self._stages = stages

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """Augment a mini-batch; the result depends on both arguments and on nothing else.

        Args:
            x: [B, C, H, W] images.
            seed: of the draws.
        """
        for index, stage in enumerate(self._stages):
            x = stage(x, seed + index)
        return x.detach()  # of a layer with weights: steps would go back through it

    def check(self, x: Tensor) -> None:
        """Try a few images, so that what cannot work is refused before training, and what counts on is said.

        Args:
            x: [n, ...] some of the inputs.

        Raises:
            ConfigError: if the inputs are no images, or the transforms fail on them, change their shape or type, or
                give other images for the same seed.
        """
        if x.ndim != 4:
            raise ConfigError(KEY, f"needs images [C, H, W], but a sample of this data set is {_kind(x)}")
        self.check_scale(x)
        owners = (part for own in self.transforms for part in _parts(own))
        running_on = RunningOn(
            owners, "an image's augmentation may rest on the image and the global streams alone", True
        )
        try:
            running_on.begin()
            augmented = self(x.clone(), 0)  # which a transform may change in place
            running_on.end()
            running_on.begin()
            again = self(x.clone(), 0)
            running_on.end()
            running_on.begin()
        except Exception as error:  # whatever a transform raises
            reason = str(error).split("\n")[0]
            raise ConfigError(KEY, f"{self} fails on images of {_kind(x)}: {reason}") from error
        if augmented.shape != x.shape or augmented.dtype != x.dtype:
            rule = "must keep an image's shape and type"
            raise ConfigError(KEY, f"{rule}, but {self} turns {_kind(x)} into {_kind(augmented)}")
        seeded = "must draw from the global streams (torch's, NumPy's, Python's), which are seeded for every mini-batch"
        require(torch.equal(augmented, again), KEY, f"{self} gives other images the second time: it {seeded}")

    def check_scale(self, x: Tensor) -> None:
        """Refuse transforms that would cut images off below 0 and above 1, where torchvision takes floats to lie.

        And those that erase images of bytes with what is no byte: noise around 0, or a colour of floats.

        Args:
            x: [N, ...] all of the inputs, as clients have them.
        """
        if x.dtype == torch.uint8:
            self._check_erased()
        parts = (part for own in self.transforms for part in _parts(own))
        cuts = next((part for part in parts if type(part).__module__.startswith(_CUT)), None)
        if cuts is None or not x.is_floating_point() or not len(x):
            return
        least, most = (float(own) for own in torch.aminmax(x))
        rule = f"{type(cuts).__name__} takes images of floats from 0 to 1, and these go from {least:.3g} to {most:.3g}"
        advice = "give bytes (PILToTensor), or data.dataset.normalize: none, and no data.shift that leads beyond"
        require(least >= 0 and most <= 1, KEY, f"{rule}: {advice}")

    def _check_erased(self) -> None:
        parts = (part for own in self.transforms for part in _parts(own))
        for part in itertools.takewhile(_keeps_type, parts):
            if type(part).__name__ != "RandomErasing" or part.p == 0:
                continue
            value = "random" if part.value is None else part.value  # which is how v2 keeps noise
            fits = value != "random" and all(0 <= own <= 255 and own == int(own) for own in _listed(value))
            rule = "RandomErasing on images of bytes fills with whole numbers from 0 to 255; `value` must be one, or"
            require(fits, KEY, f"{rule} one a channel (random is noise around 0, for images of floats)", value)

    def __str__(self) -> str:
        return ", ".join(getattr(t, "__name__", type(t).__name__) for t in self.transforms)


def _parts(transform: Any) -> Iterator[Any]:
    """A transform, and those that it is made of: torchvision's containers hold theirs in lists."""
    for part in transform.modules() if isinstance(transform, nn.Module) else [transform]:
        yield part
        inner = getattr(part, "transforms", ())
        yield from (own for each in (inner if isinstance(inner, (list, tuple)) else ()) for own in _parts(each))


def _keeps_type(transform: Any) -> bool:
    """Whether it is known to: a class of one's own may turn bytes into floats, and back at the end."""
    ours = type(transform).__module__.startswith("torchvision.") or isinstance(transform, nn.ModuleList)
    return ours and type(transform).__name__ not in ("ConvertImageDtype", "Lambda", "ToDtype", "ToTensor")


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}"


# --- how a transform is applied ---------------------------------------------------------------------------------------


def _one_by_one(transforms: Sequence[Callable[[Tensor], Tensor]]) -> Stage:
    def stage(x: Tensor, seed: int) -> Tensor:
        images = []
        with isolated_streams(seed, "augment"):  # transforms draw from the global streams
            for image in x:
                for transform in transforms:
                    image = transform(image)
                if not isinstance(image, Tensor):
                    raise TypeError(f"one image must come out for one image, not a {type(image).__name__}")
                images.append(image)
        return torch.stack(images)

    return stage


def _batched(transform: Any) -> Stage | None:
    """A transform for a whole batch with a draw an image; None where there is none that does exactly the same."""
    if type(transform).__module__.partition(".")[0] != "torchvision":
        return None
    from torchvision.transforms import v2

    if type(transform) in (v2.RandomHorizontalFlip, v2.RandomVerticalFlip):
        return _flips(transform.p, -1 if type(transform) is v2.RandomHorizontalFlip else -2)
    if type(transform) is v2.RandomCrop and not transform.pad_if_needed:
        mode, fill = transform.padding_mode, transform.fill
        if mode == "reflect" or (mode == "constant" and isinstance(fill, (int, float))):
            height, width = transform.size
            return _crops(height, width, _padding(_sides(transform.padding), mode, fill))
    return None


def _sides(padding: Any) -> list[int]:
    """Left, right, top and bottom, as the transform keeps them whatever it was given."""
    return [0, 0, 0, 0] if padding is None else list(padding)


def _flips(probability: float, axis: int) -> Stage:
    def stage(x: Tensor, seed: int) -> Tensor:
        drawn = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < probability
        return torch.where(drawn.to(x.device)[:, None, None, None], x.flip(axis), x)

    return stage


def _padding(sides: list[int], mode: str, fill: float) -> Callable[[Tensor], Tensor]:
    if not any(sides):
        return lambda x: x
    if mode == "constant":
        return lambda x: F.pad(x, sides, value=fill)
    left, right, top, bottom = sides

    def reflected(x: Tensor) -> Tensor:
        rows, columns = _mirrored(x.shape[2], top, bottom), _mirrored(x.shape[3], left, right)
        return x[:, :, rows.to(x.device)][:, :, :, columns.to(x.device)]  # torch's own has no kernel for bytes

    return reflected


def _mirrored(size: int, before: int, after: int) -> Tensor:
    """Places of a side that is mirrored at its ends, without the ends once more: 2 1 | 0 1 2 | 1 0."""
    if max(before, after) >= size:
        raise ValueError(f"a side of {size} pixels cannot be reflected by {max(before, after)}: {size - 1} at most")
    return size - 1 - (torch.arange(-before, size + after).abs() - (size - 1)).abs()


def _crops(height: int, width: int, padding: Callable[[Tensor], Tensor]) -> Stage:
    def stage(x: Tensor, seed: int) -> Tensor:
        padded = padding(x)
        rows, columns = padded.shape[2] - height + 1, padded.shape[3] - width + 1
        if rows < 1 or columns < 1:
            raise ValueError(f"a crop of {height}x{width} is larger than the padded image")
        generator = torch.Generator().manual_seed(seed)
        top = torch.randint(rows, (len(x),), generator=generator).to(x.device)
        left = torch.randint(columns, (len(x),), generator=generator).to(x.device)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view [B, C, rows, columns, height, width]
        return windows[torch.arange(len(x), device=x.device), :, top, left]

    return stage


# --- from a configuration ---------------------------------------------------------------------------------------------


def build_augmentation(given: Sequence[Any] | None) -> Augmentation | None:
    """The augmentation that a list of transforms or of their descriptions says; None for none.

    Raises:
        ConfigError: for what is no transform.
    """
    if not given:
        return None
    trust = Trust(own=True)
    built = [
        _build(node, f"{KEY}.{index}", trust) if isinstance(node, (str, Mapping)) else node
        for index, node in enumerate(given)
    ]
    return Augmentation(built)


def described(given: Any, trust: Trust | None = None) -> list[dict[str, Any]]:
    """Descriptions of transforms with full class paths, checked: what a run's `config.yaml` holds.

    Args:
        given: a list of names or of ``{class_path, init_args}``.
        trust: what the classes may come from; None takes the caller's own, too.

    Raises:
        ConfigError: for an unknown class or argument, or an argument that the class refuses.
    """
    if not isinstance(given, (list, tuple)):
        raise ConfigError(KEY, "must be a list of transforms (class_path and init_args, or names)", given)
    trust = trust or Trust(own=True)
    nodes = [_described(node, f"{KEY}.{index}", trust) for index, node in enumerate(given)]
    for index, node in enumerate(nodes):
        _build(node, f"{KEY}.{index}", trust)
    return nodes


def _described(node: Any, key: str, trust: Trust) -> dict[str, Any]:
    node = {"class_path": node} if isinstance(node, str) else node
    if not isinstance(node, Mapping) or not isinstance(node.get("class_path"), str):
        raise ConfigError(key, "each transform must be a name, or hold one under class_path", node)
    for name in node:
        if name not in ("class_path", "init_args"):
            raise ConfigError(f"{key}.{name}", "there is no such key; a transform has class_path and init_args")
    cls, path = _find(node["class_path"], key, trust)
    given = node.get("init_args")
    if not isinstance(given, (Mapping, type(None))):
        raise ConfigError(f"{key}.init_args", "must hold arguments by name", given)
    arguments = dict(given or {})
    allowed = inspect.signature(cls).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in allowed.values())
    for name, value in arguments.items():
        own = f"{key}.init_args.{name}"
        if name not in allowed and not open_ended:
            hint = suggest(str(name), allowed) if allowed else "it takes no arguments"
            raise ConfigError(own, f"there is no such key of {cls.__name__}; {hint}")
        if name == "transforms" and isinstance(value, (list, tuple)):
            arguments[name] = [_described(inner, f"{own}.{index}", trust) for index, inner in enumerate(value)]
        elif isinstance(value, (Mapping, list, float)):  # Python may hand in what no file can
            arguments[name] = plain(value, own)
    # What is left out and what is said as it is by default are the same configuration.
    said = {name: value for name, value in arguments.items() if not _is_default(value, allowed.get(name))}
    return {"class_path": path, **({"init_args": said} if said else {})}


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    default = inspect.Parameter.empty if parameter is None else parameter.default
    return type(_enumerated(value, parameter)) is type(default) and _enumerated(value, parameter) == default


def _enumerated(value: Any, parameter: inspect.Parameter | None) -> Any:
    """The member of an enumeration that a text stands for, where the default is one: ``bilinear``, ``cifar10``."""
    default = None if parameter is None else parameter.default
    if not isinstance(value, str) or not isinstance(default, Enum):
        return value
    name = value.rpartition(".")[2].lower()
    return next((member for member in type(default) if name in (member.name.lower(), member.value)), value)


def _find(name: str, key: str, trust: Trust) -> tuple[type, str]:
    """A transform's class and its full path; torch's own are modules, anybody else's can at least be called."""
    path = name if "." in name else f"{LIBRARY}.{name}"
    known = vars(importlib.import_module(LIBRARY))
    if "." not in name and not isinstance(known.get(name), type):
        names = [n for n, value in known.items() if isinstance(value, type) and not n.startswith("_")]
        raise ConfigError(key, f"there is no transform of that name; {suggest(name, names)}", name)
    found = trust.load(path, key, (object,))
    called = "__call__" in vars(found) and (path.startswith("torchvision.transforms.") or not is_known(path))
    if not (issubclass(found, nn.Module) or called):
        raise ConfigError(key, "must be a transform of images", name)
    return found, path


def _build(node: Any, key: str, trust: Trust) -> Any:
    node = _described(node, key, trust)
    cls, _ = _find(node["class_path"], key, trust)
    parameters = inspect.signature(cls).parameters
    arguments = {n: _enumerated(value, parameters.get(n)) for n, value in (node.get("init_args") or {}).items()}
    if isinstance(arguments.get("transforms"), list):
        inner = f"{key}.init_args.transforms"
        arguments["transforms"] = [
            _build(each, f"{inner}.{n}", trust) for n, each in enumerate(arguments["transforms"])
        ]
    try:
        return cls(**arguments)
    except Exception as error:  # whatever a transform raises
        raise ConfigError(key, f"{cls.__name__}: {error}") from error
