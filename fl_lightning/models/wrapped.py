"""A user's own network, split by the name of its head."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.checks import require_size
from fl_lightning.models.copying import copied
from fl_lightning.models.encoders import attention_step_by_step
from fl_lightning.models.head_cut import said_of_compiled, watched
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.weights import load_file
from fl_lightning.seeding import kept_streams


class WrappedModel(SplitModel):
    """Your own network, split into body and head by the name of its head.

    The head is taken out of a copy of the module, and an identity put in its place: what is left is the body. So the
    head must be the last thing that the module's `forward` does, and get a z [B, D]. This is tried out once, on two
    made-up samples, as it predicts and as it trains.

    Args:
        input_shape: shape of one sample.
        num_classes: number of classes C.
        module: the network, from a sample batch to logits [B, C].
        head: name of the submodule that is the classifier, with dots for nesting, e.g. "fc" or "classifier.6".
        features: names of the submodules whose outputs are the feature maps, in this order; none by default. A layer
            that works in place on such an output (`ReLU(inplace=True)`) changes the map as well.
        weights: a file, `.pt` or `.pth`, of the module's `state_dict` to start from; a head of other classes is left
            out. Nothing in the file is run.
        frozen: names of submodules or parameters that are not trained; everybody has them, so that they are not sent
            either. Batch norm's statistics in them go on moving.

    Raises:
        ConfigError: if head, features or frozen name no submodule, the weights are not the module's, it does not take
            such samples, its output is not [B, C], or it cannot be split there.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        module: nn.Module,
        head: str,
        features: Sequence[str] = (),
        weights: str | None = None,
        frozen: Sequence[str] | None = None,
    ) -> None:
        fill_lazy(module, lambda: input_shape)
        network = copied(module, "model.module")
        require_submodule(network, "model.head", head)
        if weights is not None:
            load_file(network, Path(weights), head)
        freeze(network, frozen or ())
        body, classifier, size = split_at(network, head, features, input_shape, num_classes)
        super().__init__(body, classifier, size, num_classes, input_shape)


def fill_lazy(module: nn.Module, input_shape: Callable[[], tuple[int, ...]], key: str = "model.module") -> None:
    """Let lazy layers (`LazyLinear`, …) get their sizes of two made-up samples: before that they cannot be copied.

    Args:
        module: the network, from a sample batch to logits; changed where it has such layers.
        input_shape: gives the shape of one sample; asked where there is such a layer.
        key: of the module, for the error.

    Raises:
        ConfigError: if it fails on such samples.
    """
    if any(map(is_lazy, _state(module))):
        try_out(module, input_shape(), key)


def split_at(
    network: nn.Module, head: str, features: Sequence[str], input_shape: tuple[int, ...], num_classes: int
) -> tuple[Body, nn.Module, int]:
    """Take the head out of a network, and try out that both parts are the network still.

    Args:
        network: from a sample batch to logits [B, C]; loses its head.
        head: name of the submodule that is the classifier.
        features: names of the submodules whose outputs are the feature maps.
        input_shape: shape of one sample.
        num_classes: number of classes C.

    Returns:
        What is left, the head, and the size D of the embedding between them.

    Raises:
        ConfigError: as `WrappedModel` does.
    """
    require_size("num_classes", num_classes)
    name = type(network).__name__
    require_submodule(network, "model.head", head)
    x, expected = try_out(network, input_shape)
    fits = isinstance(expected, Tensor) and expected.shape == (len(x), num_classes)
    rule = f"{name} must return logits of shape [B, {num_classes}] for {num_classes} classes, and its head as many"
    require(fits, "model.head", rule, shape_of(expected))

    classifier = network.get_submodule(head)
    parent, _, child = head.rpartition(".")
    last = f'"{head}" must be the last thing that {name} does'
    trains_otherwise = _in_training(network, head, x)
    with _shaken(network, classifier):
        expected = _evaluate(network, x)
        setattr(network.get_submodule(parent), child, nn.Identity())
        require_nothing_shared(network, classifier, head)
        for feature in features:
            require_submodule(network, "model.features", feature)
        body = HookedBody(network, features)
        z = _embedding_at_split(body, classifier, x, expected, last)
    require(not trains_otherwise, "model.head", f"{last}, in training, too, where {trains_otherwise}")
    _evaluate(body, x, body.forward_features)
    return body, classifier, z.shape[1]


def freeze(network: nn.Module, names: Sequence[str]) -> None:
    """Let the parameters of some submodules, or some by their own names, not be trained.

    Raises:
        ConfigError: if there is none of a name, or nothing is left to train.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for name in names:
        own = [parameter for known, parameter in parameters.items() if f"{known}.".startswith(f"{name}.")]
        if not own:
            require_submodule(network, "model.frozen", name)
        for parameter in own:
            parameter.requires_grad_(False)
    left = any(parameter.requires_grad for parameter in parameters.values())
    require(left or not names, "model.frozen", "leaves nothing to train", list(names))


@contextmanager
def _shaken(network: nn.Module, head: nn.Module) -> Iterator[None]:
    """Move numbers and vectors but a head's for a while: a scale behind it is not seen as long as it is 1."""
    own = {id(tensor) for tensor in _state(head)}
    moved = [t for t in _state(network) if id(t) not in own and t.dim() <= 1 and t.is_floating_point()]
    before = [tensor.detach().clone() for tensor in moved]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in moved:
            tensor.mul_(1.1 + 0.2 * torch.rand((), generator=generator).item()).add_(0.1)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(moved, before, strict=True):
                tensor.copy_(value)


def _in_training(network: nn.Module, head: str, x: Tensor) -> str:
    """What a network does behind its head in training alone, such as dropout on logits; empty if nothing is seen."""
    seen: list[tuple[Any, Any]] = []
    twin = copy.deepcopy(network).train()  # a pass in training may leave anything behind
    watched(twin.get_submodule(head), seen)
    try:
        with torch.no_grad(), kept_streams():
            out = twin(x)
    except Exception:  # two samples may be too few in training: what is wrong with these shows in a fit
        return ""
    if not isinstance(out, Tensor):
        return f"{type(network).__name__} gives {shape_of(out)}"
    logits = seen[-1][1] if seen else out
    if not isinstance(logits, Tensor):  # which the split itself finds
        return ""
    same = logits.shape == out.shape and torch.allclose(logits.to(out), out, rtol=1e-3, atol=1e-4, equal_nan=True)
    return "" if same else "something follows it"


class HookedBody(Body):
    """A module without its head, whose feature maps are the outputs of named submodules.

    Args:
        module: from the input to z [B, D].
        features: names of submodules of `module`.
    """

    def __init__(self, module: nn.Module, features: Sequence[str]) -> None:
        super().__init__(stages=[], neck=module)
        self.feature_names = tuple(features)
        encodes = any(isinstance(part, nn.TransformerEncoder) for part in module.modules())
        self._passes: Callable[[], AbstractContextManager[None]] = attention_step_by_step if encodes else nullcontext

    def append(self, *layers: nn.Module) -> None:
        """Put layers after the embedding; the maps stay those of the module."""
        super().append(*layers)
        self.feature_names = tuple(f"0.{name}" for name in self.feature_names)

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the outputs of the named submodules and z [B, D] in one pass.

        The hooks live for this call only, so that nothing of a batch stays behind in a copy or a checkpoint.
        """
        maps: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                rule = f'"{name}" must return one tensor to be a feature map'
                require(isinstance(output, Tensor), "model.features", rule, type(output).__name__)
                maps[name] = output

            return hook

        handles = [self.neck.get_submodule(name).register_forward_hook(keep(name)) for name in self.feature_names]
        try:
            with self._passes():  # or an encoder's layers hand each other what no map is
                z = self.neck(x)
        finally:
            for handle in handles:
                handle.remove()
        for name in self.feature_names:
            rule = f'"{name}" is not called in a forward pass{said_of_compiled(self.neck)}'
            require(name in maps, "model.features", rule)
        return [maps[name] for name in self.feature_names], z


def require_submodule(module: nn.Module, key: str, name: str) -> None:
    """Raise a `ConfigError` that names the nearest submodules, unless `module` has one called `name`."""
    names = [known for known, _ in module.named_modules(remove_duplicate=False) if known]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[-3:]
        nearest = f"nearest: {', '.join(near)}" if near else "it has none"
        raise ConfigError(key, f"must name a submodule of {type(module).__name__} ({nearest})", name)


def require_nothing_shared(body: nn.Module, classifier: nn.Module, head: str) -> None:
    """Refuse weights that are in both parts: they would be exchanged twice, or exchanged though private.

    Raises:
        ConfigError: naming the head.
    """
    shared = {id(tensor) for tensor in _state(body)} & {id(tensor) for tensor in _state(classifier)}
    rule = f'"{head}" must not share weights with the rest of the module, nor be a part of it under two names'
    require(not shared, "model.head", rule)


def _state(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def try_out(module: nn.Module, input_shape: tuple[int, ...], key: str = "model.module") -> tuple[Tensor, Any]:
    """Run two made-up samples through the module in evaluation mode, and return them with what came out.

    The shape does not say whether samples are floats or tokens; the other kind is tried where the likelier one fails.
    """
    device = next((tensor.device for tensor in _state(module)), torch.device("cpu"))
    made = (tensor for tensor in module.parameters() if not is_lazy(tensor))
    dtype = next((tensor.dtype for tensor in made if tensor.is_floating_point()), torch.float32)
    # Noise of its own generator: zeros could hide what stands behind the head, and the run's streams stay untouched.
    noise = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(0))
    floats, tokens = noise.to(device, dtype), torch.zeros((2, *input_shape), dtype=torch.int64, device=device)
    samples = [floats, tokens, tokens + 1]  # 0 is padding, and of a text that is nothing else some make no sequence
    if len(input_shape) == 1 and any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()):
        samples = [tokens, tokens + 1, floats]
    errors: list[Exception] = []
    for x in samples:
        try:
            return x, _evaluate(module, x)
        except Exception as error:  # whatever a user's own forward raises
            errors.append(error)
    reason = str(errors[0]) or type(errors[0]).__name__
    rule = f"{type(module).__name__} fails on samples of this shape ({reason})"
    raise ConfigError(key, rule, tuple(input_shape)) from errors[0]


def _embedding_at_split(body: nn.Module, classifier: nn.Module, x: Tensor, expected: Tensor, rule: str) -> Tensor:
    """Return z [B, D], after a look whether body and classifier together still give the `expected` logits."""
    try:
        z = _evaluate(body, x)
        logits = _evaluate(classifier, z)
    except Exception as error:  # whatever a user's own forward does with what was its head
        raise ConfigError("model.head", f"{rule}; split there, it fails ({error})") from error
    fits = isinstance(z, Tensor) and z.dim() == 2
    require(fits, "model.head", f"{rule}, and get one tensor z of shape [B, D]", shape_of(z))
    same = isinstance(logits, Tensor) and logits.shape == expected.shape
    same = same and torch.allclose(logits, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    require(same, "model.head", f"{rule}; name a submodule that includes what follows it")
    return z


def _evaluate(module: nn.Module, x: Tensor, call: Callable[[Tensor], Any] | None = None) -> Any:
    """Call the module, or one of its methods, in evaluation mode and without a trace in its state."""
    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            return (call or module)(x)
    finally:
        for layer, training in modes.items():
            layer.training = training


def shape_of(output: Any) -> object:
    """The shape of a tensor, the type's name of anything else."""
    return tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
