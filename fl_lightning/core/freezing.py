"""Stretches of code in which parts of a module are frozen, rest, or keep what they have."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core.walking import parameters_of
from fl_lightning.models.copying import require_whole


def trainable(part: nn.Module) -> list[nn.Parameter]:
    """A part's parameters that are trained at all."""
    return [parameter for parameter in part.parameters() if parameter.requires_grad]


def train_alone(parameters: Sequence[nn.Parameter], trained: Collection[int], left: Sequence[bool]) -> list[bool]:
    """Let some parameters of a fit be trained and the others not, as a phase begins.

    Args:
        parameters: of the fit.
        trained: ids of the phase's.
        left: whether each was to be trained when it was last seen; one that is not so now was frozen or thawed by
            somebody else since (a callback), and stays so.

    Returns:
        Whether each is to be trained now.
    """
    for parameter, before in zip(parameters, left, strict=True):
        if parameter.requires_grad == before:
            parameter.requires_grad_(id(parameter) in trained)
    return [parameter.requires_grad for parameter in parameters]


def frozen_copy(part: nn.Module) -> Any:
    """A copy of a part, that does not learn: a teacher, or what came in.

    Raises:
        ConfigError: if functions in its attributes would go on reading the part itself.
    """
    require_whole(part, learns=False)
    return copy.deepcopy(part).requires_grad_(False)


def frozen(part: nn.Module) -> AbstractContextManager[None]:
    """Build no graph for a part's parameters."""
    return only(part, ())


@contextmanager
def only(module: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Build a graph for some of a module's parameters alone."""
    kept = {id(p) for p in parameters}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in kept]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


class Trained:
    """Which parameters of a module are trained, as it is now.

    Args:
        module: it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters_of(module)]

    def restore(self) -> None:
        """Freeze and thaw as it was, and leave no gradient."""
        for parameter, trains in self._flags:
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
            parameter.grad = None


def set_mode(module: nn.Module, mode: bool = True) -> None:
    """`module.train(mode)`, in a fraction of the time: evaluations and teachers ask for it hundreds of times a round.

    A module with a `train` of its own is asked as ever, and so is one that takes its attributes by itself for this one.
    """
    if type(module).train is not nn.Module.train:
        module.train(mode)
    else:
        set_modes(module, mode)


def set_modes(module: nn.Module, mode: bool, resting: Sequence[nn.Module] = ()) -> None:
    """What `nn.Module.train` does, for a `train` of one's own.

    Args:
        module: what is put into train (or eval) mode with all that it holds.
        mode: True for train.
        resting: those of its children that are put into eval mode whatever is asked.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        vars(module)["training"] = mode
    else:
        module.training = mode
    for child in module._modules.values():
        if child is not None:
            set_mode(child, mode and all(child is not other for other in resting))


@contextmanager
def training(module: nn.Module, mode: bool = True) -> Iterator[None]:
    """Put a module into train (or eval) mode, and back."""
    before = module.training
    set_mode(module, mode)
    try:
        yield
    finally:
        set_mode(module, before)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The batch-norm layers inside a module."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def norms_in(module: nn.Module, parts: Iterable[str]) -> list[nn.Module]:
    """The batch-norm layers inside some parts that are in train mode: what the model itself rests is nobody else's."""
    return [layer for name in parts for layer in batch_norms(module.get_submodule(name)) if layer.training]


@contextmanager
def keeping_statistics(module: nn.Module) -> Iterator[None]:
    """Put the running statistics of a module's batch norm back afterwards."""
    moving = [layer for layer in batch_norms(module) if layer.training]
    statistics = [buffer for layer in moving for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in statistics]
    yield
    with torch.no_grad():
        for buffer, value in zip(statistics, before, strict=True):
            buffer.copy_(value)


@contextmanager
def keeping_state(module: nn.Module) -> Iterator[None]:
    """Put all that a module's state dict holds back afterwards."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    yield
    module.load_state_dict(before)


@contextmanager
def single_sample(layers: Sequence[nn.Module], batch_size: int) -> Iterator[None]:
    """Batch norm cannot normalise a batch of one: it uses its running statistics there.

    Args:
        layers: the batch-norm layers.
        batch_size: of the mini-batch.
    """
    resting = [layer for layer in layers if layer.training] if batch_size == 1 else []
    for layer in resting:
        layer.eval()
    try:
        yield
    finally:
        for layer in resting:
            layer.train()
