"""Names on a command line: a misspelt key or class is refused with the nearest one, ours before they are imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning import catalog
from fl_lightning.command_line import SECTIONS, CommandLine, Setting
from fl_lightning.errors import ConfigError, suggest
from fl_lightning.homes import no_section
from fl_lightning.merging import CLASS_KEYS, Text

MISPLACED = {
    "trainer.max_epochs": "a client's epochs are set by federation.local_epochs, the run's length by federation.rounds",
    "trainer.min_epochs": "a client's epochs are set by federation.local_epochs",
    "trainer.logger": "loggers belong in the section logger",
    "trainer.default_root_dir": "a run's folder is output/name",
    "trainer.enable_progress_bar": "the rounds have a display of their own; --quiet switches it off",
    "trainer.enable_checkpointing": "the federation is saved as federation.checkpoint says",
}
"""Keys that Lightning's users may look for -> where to go instead."""
FILLED_IN = ("model", "input_shape", "num_classes", "vocabulary_size", "params")
"""Constructor parameters that come from the data or the experiment, never from a configuration."""
MODEL_SKIPS = {*FILLED_IN, "body", "embedding_size", "terms"}
METHOD_SKIPS = {"model", "terms"}
METRIC_SKIPS = {
    "task", "num_classes", "num_labels", "validate_args", "multidim_average", "process_group", "sync_on_compute",
    "distributed_available_fn", "dist_sync_on_step", "dist_sync_fn", "compute_on_cpu", "compute_with_cache",
}  # fmt: skip
"""Those of a model, of a method, and of a metric, that no configuration gives."""
_IN_A_LIST = re.compile(r"(model|federation\.wire|method(?:\.init_args)?\.(extra_terms))\.\d+(?=\.|$)")
"""A key of a list's entry, be it a model, a filter or a term."""

Options = Callable[[Any], Mapping[str, Any] | None]
"""A class -> its constructor's parameters, each with the dataclass that it takes or None; None if they are unknown."""


@dataclass
class Named:
    """A class that a key names, and what it is given.

    Args:
        key: the class's own key, e.g. ``data.partition`` or ``model.1``.
        owner: the same for all entries of a list: ``model``.
        name: the class, as given.
        arguments: each argument's whole key -> its name, dotted where it is inside a dataclass.
    """

    key: str
    owner: str
    name: str
    arguments: dict[str, str] = field(default_factory=dict)


def check_names(given: CommandLine) -> None:
    """Refuse what can be refused by its name before anything heavy is imported.

    Raises:
        ConfigError: with the key, the nearest name and all that are allowed, or where the key has moved to.
    """
    for key, _ in given.settings:
        section, _, path = key.partition(".")
        if section not in SECTIONS:
            raise no_section(key)
        if key.startswith("federation.wire.") and not _IN_A_LIST.match(key):
            raise ConfigError(key, "the wire is a list: federation.wire: [{class_path: …, init_args: {…}}]")
        if key in MISPLACED:
            raise ConfigError(key, MISPLACED[key])
        if section in catalog.GROUPS and path and not _split(key, CLASS_KEYS):
            check_argument(key, path, catalog.GROUPS[section], catalog.options)
    for named in _named(given.settings, CLASS_KEYS):
        found = _class_path(CLASS_KEYS[named.owner], named.key, named.name)
        for key, path in named.arguments.items() if found else ():
            check_argument(key, path, found, catalog.options, f" of {found.rpartition('.')[2]}")


def _named(settings: Sequence[Setting], owners: Container[str]) -> list[Named]:
    """The classes that `owners` name; what was given to one that is replaced is forgotten."""
    found: list[Named] = []
    latest: dict[str, Named] = {}
    for key, value in settings:
        own, owner, path = _split(key, owners) or ("", "", "")
        if path == "" and isinstance(value, Text) and value.parsed is None:  # `--federation.aggregator null`
            latest.pop(own, Named(own, owner, "")).arguments.clear()
        elif path in ("", "class_path") and owner and isinstance(value, str):
            before = latest.get(own)
            if before is not None and before.name.rpartition(".")[2] == value.rpartition(".")[2]:
                continue
            if before is not None:
                before.arguments.clear()
            latest[own] = Named(own, owner, value)
            found.append(latest[own])
        elif own in latest and path.partition(".")[0] not in ("", "init_args", "dict_kwargs", "help"):
            latest[own].arguments[key] = path
    return found


def _split(key: str, owners: Container[str]) -> tuple[str, str, str] | None:
    """The key of the class that a key is about, the same without a list, and the rest of it; None if it is about none.

    ``model.1.init_args.hidden`` is about ``model.1`` (``model``): ``hidden``.
    """
    entry = _IN_A_LIST.match(key)
    two = ".".join(key.split(".")[:2])
    own = entry[0] if entry else two if two in owners else key.partition(".")[0]
    owner = (entry[2] or entry[1]) if entry else own
    if owner not in owners or (entry and key == f"{own}.clients"):  # how many clients have a model is none of its own
        return None
    return own, owner, key[len(own) + 1 :].removeprefix("init_args.").removeprefix("dict_kwargs.")


def check_argument(
    key: str, path: str, owner: Any, options: Options, of: str = "", skip: Collection[str] = FILLED_IN
) -> None:
    """Refuse an argument that its class does not take; inside a dataclass, one that is no field of it.

    Args:
        key: the whole key.
        path: the last part of it, which is the argument's own.
        owner: the class.
        options: what tells a class's parameters.
        of: the class for the message; nothing where the key says it.
        skip: parameters that do not come from a configuration.
    """
    known = options(owner)
    if known is None:
        return  # the parser finds out what is behind **kwargs
    known = {name: nested for name, nested in known.items() if name not in skip}
    name, _, rest = path.partition(".")
    if rest and known.get(name) is not None:
        check_argument(key, rest, known[name], options)
    if name in known:
        return
    key = key.removesuffix(f".{rest}") if rest else key
    moved = [
        f"{group}.{field}"
        for group, nested in known.items()
        if nested
        for field in {name, name.removeprefix(f"{group}_")} & set(options(nested) or ())
    ]
    if len(moved) == 1:
        raise ConfigError(key, f"has moved, it is {moved[0] + of if of else key.removesuffix(name) + moved[0]} now")
    hint = suggest(name, known) if known else "it takes no arguments"
    raise ConfigError(key, f"there is no such key{of}; {hint}")


def _class_path(kind: str, key: str, name: str) -> str:
    """The full path of one of the package's classes; empty for a class of the user's own, which is imported later."""
    short = name.rpartition(".")[2]
    ours = catalog.path_of(kind, short)
    if ours is not None and name in (short, ours):
        return ours
    if "." in name:
        return ""
    known = [entry.name for entry in catalog.entries(kind)]
    raise ConfigError(
        key, f"there is no {kind[:-1]} of that name; {suggest(name, known, f'fl-lightning list {kind}')}", name
    )


def trainer_skips() -> set[str]:
    """Flags of Lightning's Trainer that no configuration has."""
    from fl_lightning.federation.flags import TRAINER_DEFAULTS

    return {*TRAINER_DEFAULTS, "logger", "min_epochs", "default_root_dir", "barebones"} - {
        "num_sanity_val_steps",
        "devices",
    }
