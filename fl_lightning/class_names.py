"""Names of classes: short ones, paths, and the class that is meant."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence

from fl_lightning import catalog, static
from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.static import StaticClass
from fl_lightning.trust import Load, Trust


def _kind(base: type) -> str:
    path = f"{base.__module__}.{base.__name__}"
    return next((kind for kind, (_, own) in catalog.KINDS.items() if own == path), "")


_FABRIC = "lightning.fabric.plugins"
_PACKAGES = {
    "torch.optim.optimizer.Optimizer": "torch.optim",
    "torch.optim.lr_scheduler.LRScheduler": "torch.optim.lr_scheduler",
    "lightning.pytorch.callbacks.callback.Callback": "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers.logger.Logger": "lightning.pytorch.loggers",
    "lightning.pytorch.profilers.profiler.Profiler": "lightning.pytorch.profilers",
    "lightning.pytorch.strategies.strategy.Strategy": "lightning.pytorch.strategies",
    "lightning.pytorch.accelerators.accelerator.Accelerator": "lightning.pytorch.accelerators",
    "lightning.pytorch.plugins.precision.precision.Precision": "lightning.pytorch.plugins",
    f"{_FABRIC}.environments.cluster_environment.ClusterEnvironment": "lightning.pytorch.plugins.environments",
    f"{_FABRIC}.io.checkpoint_io.CheckpointIO": "lightning.pytorch.plugins",
    "lightning.pytorch.plugins.layer_sync.LayerSync": "lightning.pytorch.plugins",
}
"""Base class -> the package whose classes go by their name alone."""


def short_names(bases: Sequence[type]) -> dict[str, str]:
    """Name -> path of the classes that may go by their name alone: ours, or those that a library offers in public."""
    known: dict[str, str] = {}
    for base in bases:
        package = _PACKAGES.get(f"{base.__module__}.{base.__name__}")
        if kind := _kind(base):
            known |= {entry.name: entry.class_path for entry in catalog.entries(kind)}
        elif package is not None:
            known |= {name: public_path(cls) for name, cls in _offered(package, base).items()}
    return known


def find_class(bases: Sequence[type], name: str, key: str, trust: Trust, load: Load | None) -> tuple[type, str]:
    """The class that is meant by a name, and the path under which it is found.

    Args:
        bases: it must derive from one of them.
        name: its path, or its short name.
        key: where it was given.
        trust: what it may come from.
        load: what gives a library's class by its path, instead of an import.

    Raises:
        ConfigError: if there is none, or it is only a base of others.
        UnreadableError: if `load` cannot tell without an import.
    """
    if "." not in name:
        path = path_of(name, bases)
        if path is None:
            known = short_names(bases)
            require(bool(known), key, "must be the full path of a class (package.module.Class)", name)
            kinds = [kind for kind in map(_kind, bases) if kind]
            word = kinds[0][:-1].replace("_", " ") if kinds else "class"
            command = f"fl-lightning list {kinds[0]}" if kinds else ""
            raise ConfigError(key, f"there is no {word} of that name; {suggest(name, known, command)}", name)
        name = path
    cls = trust.load(name, key, bases, load)
    if inspect.isabstract(cls):
        lacks = " and ".join(f"{method}()" for method in sorted(cls.__abstractmethods__))  # type: ignore[attr-defined]
        others = suggest("", short_names(bases))
        raise ConfigError(key, f"{cls.__name__} is only a base of others: it does not define {lacks} {others}")
    return cls, public_path(cls)


def path_of(name: str, bases: Sequence[type]) -> str | None:
    """The path of the class that goes by a name."""
    for base in bases:
        package = _PACKAGES.get(f"{base.__module__}.{base.__name__}")
        if (kind := _kind(base)) and (path := catalog.path_of(kind, name)):
            return path
        if package is not None and not kind and (cls := _offered(package, base, name).get(name)) is not None:
            return public_path(cls)
    return None


def _offered(package: str, base: type, name: str = "") -> dict[str, type]:
    """The classes of a package that derive from a class and can be built; only the one of that name if it is given."""
    if isinstance(base, StaticClass):
        return static.offered(package, base, name)
    return {
        name: each
        for name, each in vars(importlib.import_module(package)).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base and not inspect.isabstract(each)
        if not name.startswith("_")
    }


def public_path(cls: type) -> str:
    """The shortest path under which a class is found: ``torch.optim.SGD``, not ``torch.optim.sgd.SGD``."""
    if isinstance(cls, StaticClass):
        return static.public_path(cls)
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
