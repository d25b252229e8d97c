"""`--help`: every option with its type, its default and what its docstring says. Nothing is imported for it."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from fl_lightning import catalog, static
from fl_lightning.class_names import find_class
from fl_lightning.errors import ConfigError, refuse
from fl_lightning.federation.flags import IDLE, TRAINER_DEFAULTS
from fl_lightning.merging import CLASS_KEYS
from fl_lightning.precheck import METHOD_SKIPS, METRIC_SKIPS, MODEL_SKIPS, trainer_skips
from fl_lightning.schema import Parameter, classes_of, dataclass_of, parameters
from fl_lightning.source import UnreadableError
from fl_lightning.trust import Trust, import_name

HELP = {
    "config": "a YAML file; may be given several times, later ones win",
    "print_config": "print the whole configuration, defaults filled in, and exit",
    "seed": "seed of everything random (type: int, default: 0)",
    "name": "the run's name; default: method, data set and seed",
    "output": "folder of runs; the run's own is <output>/<name> (type: str, default: runs)",
    "method": "what the federation runs; --method.NAME VALUE sets one of its arguments",
    "model": "the clients' model; in a file also a list of models, each for some of the clients",
    "optimizer": "of the local fits (default: SGD with lr 0.01)",
    "metrics": "torchmetrics' classes, or your own, beside accuracy: a name or a list (class_path and init_args); "
    "every client's value at every moment is a column, e.g. F1Score/Local-T",
    "logger": "one of Lightning's loggers, or a list of them (class_path and init_args); they receive the values of "
    "metrics.csv, and write into the run's folder unless they are given a save_dir",
}
ENDING = "--KEY.help NAME explains a class, as --data.partition.help IID. An environment variable sets what no "
_EMPTY = inspect.Parameter.empty
_ROOTS = {
    "method": (catalog.KINDS["methods"][1], METHOD_SKIPS),
    "model": (catalog.KINDS["models"][1], MODEL_SKIPS),
    "optimizer": ("torch.optim.Optimizer", {"params"}),
    "metrics": ("torchmetrics.Metric", METRIC_SKIPS),
    "logger": ("lightning.pytorch.loggers.Logger", set[str]()),
}
"""Keys of a class -> its base, and the arguments that no configuration gives."""


def explain(command: str, description: str, words: Sequence[str], own: Mapping[str, Mapping[str, Any]]) -> NoReturn:
    """Print the help of a command that takes a configuration, or of a class (``--method.help FedRep``), and exit.

    Args:
        command: the subcommand.
        description: what it does.
        words: the word that asks for help, and what follows it.
        own: the command's own options, as `add_own` takes them.
    """
    option, equals, name = words[0].partition("=")
    name = name if equals else next(iter(words[1:]), "")
    if not option.endswith(".help"):
        help_parser(command, description, own).print_help()
    else:
        key = option.removeprefix("--").removesuffix(".help")
        try:
            class_parser(key, name).print_help()
        except ConfigError as error:
            refuse(f"help: {error}")
    sys.exit(0)


def add_own(parser: Any, name: str, option: Mapping[str, Any]) -> None:
    """Add an option of a command's own to a parser, under its ``short`` name, too, if it has one."""
    rest = {key: value for key, value in option.items() if key != "short"}
    parser.add_argument(*filter(None, [option.get("short"), f"--{name}"]), **rest)


def _read(path: str) -> Any:
    """A class of ours or of a library, by its source where that tells all."""
    if "torch" not in sys.modules:
        with suppress(UnreadableError):
            cls = static.load(path)
            parameters(cls)
            return cls
    return import_name(path)


def _parser(prog: str, description: str, ending: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog, usage=argparse.SUPPRESS, add_help=False, description=description, epilog=ending
    )


def help_parser(command: str, description: str, own: Mapping[str, Mapping[str, Any]]) -> argparse.ArgumentParser:
    """A parser that knows every option of a configuration; it only explains them."""
    prefix = f"FL_LIGHTNING_{command.upper()}__"
    ending = f"{ENDING}option and no file says: {prefix}DATA__BATCH_SIZE=32."
    parser = _parser(f"fl-lightning {command}", f"{description} Usage: fl-lightning {command} --config FILE …", ending)
    general = parser.add_argument_group("the command")
    for name in ("config", "print_config"):
        general.add_argument(f"--{name}", help=_escaped(HELP[name]), **_valued(name == "config"))
    for name, option in own.items():
        add_own(general, name, {**option, "help": _escaped(option.get("help", ""))})
    run = parser.add_argument_group("the run")
    for name in ("seed", "name", "output", *_ROOTS):
        run.add_argument(f"--{name}", metavar=name.upper(), help=_escaped(_with_names(name)))
    for section, path in catalog.GROUPS.items():
        group = parser.add_argument_group(section)
        _add(group, section, parameters(_read(path)), ())
    _add(parser.add_argument_group("trainer"), "trainer", trainer_flags(), ())
    return parser


def trainer_flags() -> Mapping[str, Parameter]:
    """Flags of Lightning's Trainer that change something in a federation, with the federation's own defaults."""
    known = parameters(_read("lightning.Trainer"))
    shown = {name: known[name] for name in known if name not in trainer_skips() | IDLE}
    devices = shown["devices"]
    said = devices.doc.rpartition(" Default:")[0] or devices.doc  # Lightning's, which is another
    return {**shown, "devices": devices._replace(default=TRAINER_DEFAULTS["devices"], doc=said)}


def _valued(takes: bool) -> dict[str, Any]:
    return {"metavar": "FILE"} if takes else {"action": "store_true"}


def _with_names(key: str) -> str:
    kind = CLASS_KEYS.get(key)
    return HELP[key] + (f": {', '.join(entry.name for entry in catalog.entries(kind))}" if kind else "")


def class_parser(key: str, name: str) -> argparse.ArgumentParser:
    """A parser that knows the arguments of a class.

    Args:
        key: where it could be named, e.g. ``data.partition``.
        name: the class.

    Raises:
        ConfigError: if there is no such key or class.
    """
    bases, skips = _place(key)
    for load in ([static.load] if "torch" not in sys.modules else []) + [None]:  # type: list[Load | None]
        with suppress(UnreadableError):
            found = tuple((load or import_name)(base, key) for base in bases)
            cls, path = find_class(found, name, key, Trust(own=True), load)
            known = parameters(cls)
            break
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0]
    parser = _parser(f"--{key} {cls.__name__}", f"{path}: {' '.join(summary.split())}".replace("%", "%%"))
    _add(parser.add_argument_group("arguments"), key, known, skips)
    return parser


def _place(key: str) -> tuple[list[str], Collection[str]]:
    """The base classes that a key may name, by their paths, and the arguments that are not given."""
    if key in _ROOTS:
        base, skips = _ROOTS[key]
        return [base], skips
    if key.endswith("extra_terms"):
        return [catalog.KINDS["terms"][1]], ()
    section, _, path = key.partition(".")
    owners = {**catalog.GROUPS, "trainer": "lightning.Trainer"}
    hint: Any = _read(owners[section]) if section in owners else None
    for part in path.split("."):
        known = parameters(hint) if hint is not None else {}
        hint = known[part].hint if part in known else None
        if dataclass_of(hint) is not None:
            hint = dataclass_of(hint)
    found = classes_of(hint)
    if not found:
        raise ConfigError(f"{key}.help", "is a key that names no class; try --method.help, --data.partition.help")
    return [f"{cls.__module__}.{cls.__name__}" for cls in found], ()


def _add(group: Any, prefix: str, known: Mapping[str, Parameter], skips: Collection[str]) -> None:
    """Add options to a group, those of a section behind it."""
    for name, parameter in known.items():
        if name in skips:
            continue
        key, inside = f"{prefix}.{name}", dataclass_of(parameter.hint)
        group.add_argument(f"--{key}", metavar=name.upper(), help=_escaped(_said(key, parameter)))
        if inside is not None:
            given = parameter.default
            values = vars(given) if is_dataclass(given) and not isinstance(given, type) else {}
            fields = parameters(inside)
            _add(group, key, {each: _defaulting(fields[each], each, values) for each in fields}, ())


def _defaulting(parameter: Parameter, name: str, values: Mapping[str, Any]) -> Parameter:
    return parameter._replace(default=values[name]) if name in values else parameter


def _said(key: str, parameter: Parameter) -> str:
    kind = kind_of(parameter.hint)
    default = "must be given" if parameter.default is _EMPTY else f"default: {_shown(parameter.default)}"
    whole = is_dataclass(parameter.default) and not isinstance(parameter.default, type)
    facts = "(a section)" if whole else f"(type: {kind}, {default})"
    bases = {f"{cls.__module__}.{cls.__name__}" for cls in classes_of(parameter.hint)}
    kinds = [kind for kind, (_, base) in catalog.KINDS.items() if base in bases]  # a library's are too many
    names = ", ".join(entry.name for kind in kinds for entry in catalog.entries(kind))
    names = f" One of {names}." if names else ""
    return " ".join(f"{parameter.doc}{names} {facts}".split())


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(list(value)) if isinstance(value, (tuple, set, frozenset)) else str(value)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def kind_of(hint: Any, quote: str = "") -> str:
    """A type as people write it.

    Args:
        hint: an annotation.
        quote: what stands around a literal's values.
    """
    if hint in (_EMPTY, Any, None, type(None)):
        return "null" if hint in (None, type(None)) else "anything"
    if isinstance(hint, str):
        return hint
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"{quote}{value}{quote}" for value in inside)
    if origin is Union or type(hint).__name__ == "UnionType":
        return " or ".join(kind_of(member, quote) for member in inside)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if origin in (list, tuple, set) or getattr(origin, "__module__", "") == "collections.abc":
        return f"list of {kind_of(inside[0], quote)}" if inside else "list"
    if isinstance(hint, type) and is_dataclass(hint):
        return "section"
    return getattr(hint, "__name__", str(hint))
