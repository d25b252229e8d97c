"""A configuration in plain containers: reading it, building what it names, and what makes two of them alike."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import yaml

from fl_lightning.errors import ConfigError, require

if TYPE_CHECKING:
    from fl_lightning.models.split import SplitModel

Config = dict[str, Any]

# What may differ between a run and its continuation, because it changes no number of the rounds done.
_NO_IDENTITY = (
    "name", "output", "logger", "federation.rounds", "federation.checkpoint", "federation.callbacks", "federation.pool",
    "federation.steps_per_bundle", "federation.workers", "federation.threads", "federation.worker_timeout",
    "data.cache", "data.dataset.init_args.root", "data.dataset.init_args.download",
)  # fmt: skip
_TRAINER_IDENTITY = (
    "precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "max_steps",
    "limit_train_batches", "overfit_batches", "fast_dev_run",
)  # fmt: skip


def import_class(class_path: str, key: str = "class_path") -> Any:
    """Import a class by its dotted path; `key` is where it was given.

    Raises:
        ConfigError: if there is no such module or class.
    """
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(key, f"cannot import {class_path}: {error}") from error


def options(cls: Callable[..., Any]) -> dict[str, Any] | None:
    """A constructor's parameters, each with the dataclass that its annotation is, alone or beside None; else None.

    Returns:
        None where there may be others: behind ``**kwargs``, or where a constructor has no signature.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except ValueError:
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    try:
        hints = get_type_hints(getattr(cls, "__init__", cls))
    except (NameError, TypeError):  # a name that only a type checker imports
        hints = {}
    return {name: _dataclass(hints.get(name)) for name in parameters}


def _dataclass(hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def construct(cls: Callable[..., Any], key: str, /, **arguments: Any) -> Any:
    """Call a constructor; what it refuses becomes one line about `key`."""
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(key, f"{getattr(cls, '__name__', cls)}: {error}") from error


def build(node: Any, key: str, /, **given: Any) -> Any:
    """Build ``{class_path, init_args}`` and what is inside it; plain values stay as they are.

    Args:
        node: part of a configuration.
        key: its dotted key, for errors.
        given: constructor arguments that do not come from the configuration.
    """
    if isinstance(node, list):
        return [build(item, key) for item in node]
    if not isinstance(node, Mapping):
        return node
    if "class_path" not in node:
        return {name: build(value, f"{key}.{name}") for name, value in node.items()}
    given |= node.get("dict_kwargs") or {}
    return build_as(import_class(node["class_path"]), node.get("init_args") or {}, key, **given)


def build_as(cls: Callable[..., Any], node: Mapping[str, Any], key: str, /, **given: Any) -> Any:
    """Call a constructor with what `node` holds, built.

    A mapping becomes the dataclass that the constructor's annotation names.

    Args:
        cls: the class.
        node: its arguments' part of a configuration.
        key: its dotted key, for errors.
        given: constructor arguments that do not come from the configuration.
    """
    nested = options(cls) or {}
    arguments = {name: _build_argument(nested.get(name), value, f"{key}.{name}") for name, value in node.items()}
    return construct(cls, key, **{**arguments, **given})


def _build_argument(cls: Any, node: Any, key: str) -> Any:
    if cls is None or node is None or (isinstance(node, Mapping) and "class_path" in node):
        return build(node, key)
    require(isinstance(node, Mapping), key, f"must hold {cls.__name__}'s fields by name", node)
    try:
        return build_as(cls, node, key)
    except ConfigError as error:
        own = error.key.removeprefix(f"{cls.__name__}.")  # as a dataclass that several classes take names its fields
        if own == error.key:
            raise
        raise ConfigError(f"{key}.{own}", str(error).removeprefix(f"{error.key}: ")) from error


def build_model(node: Any, key: str, **given: Any) -> SplitModel:
    """`build` for a model; what it refuses names the entry where there is a list of models."""
    try:
        return build(node, key, **given)
    except ConfigError as error:
        own = re.fullmatch(r"model(?:\.([a-z_]\w*))?", error.key)  # as a model names itself and its arguments
        if key == "model" or own is None:
            raise
        argument = f".init_args.{own[1]}" if own[1] else ""
        raise ConfigError(key + argument, str(error).removeprefix(f"{error.key}: ")) from error


def architectures(models: Any, num_clients: int) -> list[int] | None:
    """Each client's entry of a list of models, [N]; None where `models` is one model for all.

    Where the entries have `clients`, so many consecutive clients have them; otherwise client i has entry i mod length.

    Raises:
        ConfigError: if some entries have `clients` and others do not, or their numbers do not fit.
    """
    if not isinstance(models, list):
        return None
    counts = [entry["clients"] for entry in models if "clients" in entry]
    if not counts:
        some = f"has more entries than there are clients ({num_clients}); take some away, or raise data.num_clients"
        require(len(models) <= num_clients, "model", some, len(models))
        return [client % len(models) for client in range(num_clients)]
    for index, entry in enumerate(models):
        require("clients" in entry, f"model.{index}.clients", "must be given for every entry of the list, or for none")
        count = entry["clients"]
        whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        require(whole, f"model.{index}.clients", "must be a whole number >= 1", count)
    fits = sum(counts) == num_clients
    require(fits, "model", f"the entries' `clients` must add up to data.num_clients ({num_clients})", sum(counts))
    return [index for index, count in enumerate(counts) for _ in range(count)]


def short_name(node: Any) -> str:
    """The class's own name."""
    return (node if isinstance(node, str) else node["class_path"]).rpartition(".")[2]


def read_config(path: Path) -> Config:
    """Read a run's `config.yaml`.

    Raises:
        ConfigError: if it is no configuration.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    require(isinstance(config, dict) and "method" in config, str(path), "is no run's configuration")
    return config


def identity(config: Config) -> dict[str, Any]:
    """What makes a run this run: every key, dotted, that changes a number."""
    flat = dict(_flatten(config))
    trainer = tuple(f"trainer.{name}" for name in _TRAINER_IDENTITY)
    return {
        key: value
        for key, value in flat.items()
        if not any(key == name or key.startswith(name + ".") for name in _NO_IDENTITY)
        and (not key.startswith("trainer") or key.startswith(trainer))
    }


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _flatten(value, f"{prefix}.{index}")
        yield f"{prefix}.length", len(node)
    elif node is not None:
        yield prefix, node
