"""Clients' models in files, and whether what a file holds can be a client's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.errors import require
from fl_lightning.files import remove
from fl_lightning.sealed import load_tensors, owner_in


def full_state(module: ClientModule, copies: bool = False) -> dict[str, Tensor]:
    """The state dict and the non-persistent buffers: all that predictions depend on.

    Args:
        module: a client's.
        copies: whether its memory is left, which it goes on to write into.
    """
    buffers = dict(module.method.named_buffers())
    entries = {**buffers, **module.entries}
    state = {name: tensor.detach().cpu() for name, tensor in entries.items()}
    if copies and module.device.type == "cpu":  # elsewhere they are copies by now
        return copy.deepcopy(state)  # in one, so that tied tensors stay one in a file
    return state


def owner_of(client: int, seed: int, partition_hash: str) -> dict[str, Any]:
    """What a client's file says of whose it is."""
    return {"client": client, "seed": seed, "partition": partition_hash}


class ModelFolder(NamedTuple):
    """Where clients' trained models are.

    Args:
        path: a run's ``models/``; None where this process writes nothing.
        keeps: whether the run keeps them; there may be some of an earlier end that kept them.
    """

    path: Path | None
    keeps: bool

    def place(self, client: int, is_last: bool) -> Path | None:
        """Where a client's model goes after a fit; one of an earlier end, from which the run goes on, goes away.

        Args:
            client: 0-based.
            is_last: whether the fit may be the client's last.
        """
        if self.path is None:
            return None
        path = self.path / f"{client:05d}.pt"
        if is_last and self.keeps:
            return path
        remove(path)
        return None


def load_model(module: ClientModule, path: Path, key: str, owner: Mapping[str, Any]) -> None:
    """Load what `full_state` gave, from a file.

    Args:
        module: of the same model and method.
        path: the file, in a run's ``models/``.
        key: for errors.
        owner: whose it must be, as `owner_of` gives it; files of older versions do not say.

    Raises:
        ConfigError: if the file is missing or damaged, or is of another model, client or run.
    """
    state = load_tensors(path, key)
    own = {**dict(module.method.named_buffers()), **module.entries}
    known = isinstance(state, Mapping) and state.keys() == own.keys()
    other = next((name for name in own if not _is_like(state[name], own[name])), None) if known else "all of it"
    require(other is None, key, f"{path} does not fit the model of the run's configuration: {other}")
    said = owner_in(path)
    other = next((name for name in owner if name in said and said[name] != owner[name]), "")
    got, own_value = (str(each.get(other))[:16] for each in (said, owner))
    require(not other, key, f"{path} is another client's or run's: it is of {other} {got}, not {own_value}")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def is_state_of(module: ClientModule, state: Mapping[str, Any]) -> bool:
    """Whether a client's private state is one of its model: tensors, each as large as the model's of that name."""
    own = module.entries
    return all(isinstance(v, Tensor) and (n not in own or _is_like(v, own[n])) for n, v in state.items())


def _is_like(value: Any, own: Tensor) -> bool:
    """Whether a value can stand in a tensor's place: as large, plain, and of numbers of the same kind."""
    if not isinstance(value, Tensor) or value.shape != own.shape or value.layout != torch.strided:
        return False
    kinds = [(each.is_floating_point(), each.is_complex(), each.is_quantized, each.is_meta) for each in (value, own)]
    return kinds[0] == kinds[1]
