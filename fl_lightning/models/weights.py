"""Weights that a network starts from: a file of tensors, of which nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, expanded
from fl_lightning.sealed import plain_tensors

KEY = "model.weights"
_INSIDE = ("state_dict", "model_state_dict", "model")  # under which training scripts keep them
_COUNTERS = "num_batches_tracked"  # of batch norms; old files have none


def load_file(network: nn.Module, path: Path, head: str) -> None:
    """Load weights from a `.pt` or `.pth` file.

    Args:
        network: gets them.
        path: a dict of tensors by name, or one under ``state_dict``, as `torch.save` wrote it.
        head: the submodule that keeps its own where the file's is of other classes.

    Raises:
        ConfigError: if the file is missing, damaged, holds anything but tensors, or weights of another network.
    """
    path = expanded(path)
    require(path.is_file(), KEY, "there is no such file", str(path))
    found = plain_tensors(content_of(path), path, KEY)
    inside = [found[name] for name in _INSIDE if isinstance(found, Mapping) and isinstance(found.get(name), Mapping)]
    load(network, inside[0] if inside else found, head, str(path))


def load(network: nn.Module, state: Any, head: str, source: str) -> None:
    """Load weights by name; all but the head's must be there and fit.

    Args:
        network: gets them.
        state: name -> tensor.
        head: the submodule that keeps its own where these are of other classes.
        source: what they are of, for errors.

    Raises:
        ConfigError: if they are not the network's.
    """
    fits = isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values())
    require(fits and len(state) > 0, KEY, f"{source} must hold a dict of tensors")
    own = network.state_dict()
    state = {str(name): value for name, value in state.items()}
    if not state.keys() & own.keys():
        state = {name.removeprefix("module."): value for name, value in state.items()}  # DataParallel's
    if any(name in state and state[name].shape != own[name].shape for name in own if _within(name, head)):
        state = {name: value for name, value in state.items() if not _within(name, head)}
    what = type(network).__name__
    for name, value in state.items():
        require(name in own, KEY, f"{source} holds weights that {what} has not", name)
        require(_is_plain(value), KEY, f"{source} must hold finite numbers, stored one by one", name)
        if value.shape != own[name].shape:
            said = f"{source} holds {name} of shape {list(value.shape)}, {what} has {list(own[name].shape)}"
            raise ConfigError(KEY, said)
    for name in own:
        kept = name in state or _within(name, head) or name.endswith(_COUNTERS)
        require(kept, KEY, f"{source} lacks weights of {what}", name)
    network.load_state_dict(state, strict=False)


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor can become weights: neither sparse nor quantized nor complex, and every number finite."""
    odd = value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex()
    return not odd and bool(value.float().isfinite().all())


def _within(name: str, submodule: str) -> bool:
    return name.startswith(f"{submodule}.")
