"""Names in a configuration, checked before anything heavy is imported: a misspelt key or class is refused at once."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning import catalog
from fl_lightning.errors import ConfigError, suggest

SECTIONS = ("seed", "name", "output", "method", "model", "optimizer", "data", "federation", "trainer", "logger")
OPTIONS = ("config", "resume", "overwrite", "quiet", "figure", "print_config", "help")
CLASS_KEYS = {
    "method": "methods",
    "model": "models",
    "data.dataset": "datasets",
    "data.partition": "partitions",
    "federation.exchange": "exchanges",
}
"""Keys that name a class -> the kind that the package offers for it."""
GROUPS = {
    "data": "fl_lightning.data.module.FederatedData",
    "federation": "fl_lightning.federation.settings.Federation",
    "federation.evaluate": "fl_lightning.federation.settings.EvaluationPolicy",
    "federation.newcomers": "fl_lightning.federation.settings.Newcomers",
    "federation.failures": "fl_lightning.federation.failures.Failures",
    "federation.checkpoint": "fl_lightning.federation.checkpoint.CheckpointPolicy",
}
"""Keys whose members are the parameters of one class."""
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
ENTRY_KEYS = ("class_path", "init_args", "clients")
"""What an entry of a list of models may hold."""
_ENTRY = re.compile(r"model\.\d+(?=\.|$)")
"""A key inside a list of models starts like this."""


def precheck(argv: Sequence[str]) -> None:
    """Refuse what can be refused by its name.

    Args:
        argv: the command line after the subcommand.

    Raises:
        ConfigError: with the key, the nearest name and all that are allowed.
    """
    classes: dict[str, str] = {}
    arguments: dict[str, dict[str, str]] = {}  # class key -> constructor argument -> the key that gave it
    for key, value in settings(argv):
        top = key.partition(".")[0]
        if top not in (*SECTIONS, *OPTIONS):
            raise ConfigError(key, f"there is no such section; {suggest(top, SECTIONS)}")
        if key in MISPLACED:
            raise ConfigError(key, MISPLACED[key])
        group, _, member = key.rpartition(".")
        owner = key if _section(key) in CLASS_KEYS else group if member == "class_path" else ""
        if key == "method.init_args.extra_terms" or key == "method.extra_terms":
            _check_terms(key, value)
        if _section(owner) in CLASS_KEYS and isinstance(value, str):
            path = _class_path(CLASS_KEYS[_section(owner)], owner, value)
            if classes.get(owner) != path:  # another class takes other arguments: the earlier ones are dropped
                arguments.pop(owner, None)
            classes[owner] = path
        elif group in GROUPS:
            _check_member(key, member, catalog.parameters(GROUPS[group]))
        elif _is_argument(key, CLASS_KEYS):
            arguments.setdefault(group.removesuffix(".init_args"), {})[member] = key
    for owner, given in arguments.items():
        if classes.get(owner):
            path = classes[owner]
            allowed = [name for name in catalog.parameters(path) if name not in FILLED_IN]
            for member, key in given.items():
                _check_member(key, member, allowed, f" of {path.rpartition('.')[2]}")


def check_classes(argv: Sequence[str], bases: Mapping[str, type]) -> None:
    """The same for classes that must be imported to be known: PyTorch's optimizers and the user's own.

    Args:
        argv: the command line after the subcommand.
        bases: key of a class -> the class that it must derive from.

    Raises:
        ConfigError: for a name that is no class of that kind, or an argument that it does not take.
    """
    classes: dict[str, type] = {}
    arguments: dict[str, dict[str, str]] = {}
    for key, value in settings(argv):
        group, _, member = key.rpartition(".")
        owner = key if _section(key) in bases else group if member == "class_path" else ""
        if _section(owner) in bases and isinstance(value, str):
            found = _find_class(owner, value, bases[_section(owner)])
            if classes.get(owner) is not found:
                arguments.pop(owner, None)
            classes[owner] = found
        elif _is_argument(key, bases):
            arguments.setdefault(group.removesuffix(".init_args"), {})[member] = key
    for owner, given in arguments.items():
        if owner in classes:
            names = inspect.signature(classes[owner]).parameters
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
                continue  # the parser finds out what is behind **kwargs
            allowed = [name for name in names if name not in FILLED_IN]
            for member, key in given.items():
                _check_member(key, member, allowed, f" of {classes[owner].__name__}")


def _section(key: str) -> str:
    """The key as it would be without a list of models: ``model.1.init_args`` is in ``model.init_args``."""
    return _ENTRY.sub("model", key)


def _is_argument(key: str, owners: Container[str]) -> bool:
    """Whether a key is a constructor argument of the class that one of the keys `owners` names."""
    group, _, member = key.rpartition(".")
    if _ENTRY.fullmatch(group) and member == "clients":
        return False
    return _section(group.removesuffix(".init_args")) in owners and member not in ("init_args", "help")


def _find_class(key: str, name: str, base: type) -> type:
    known = {cls.__name__: cls for cls in _subclasses(base) if not cls.__name__.startswith("_")}
    module, _, last = name.rpartition(".")
    if not module:
        if name not in known:
            raise ConfigError(key, f"there is no class of that name; {suggest(name, known)}", name)
        return known[name]
    try:
        found = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ConfigError(key, f"cannot import the class: {error}", name) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(key, f"must be a subclass of {base.__name__}", name)
    return found


def _subclasses(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def given_keys(argv: Sequence[str]) -> list[str]:
    """The dotted keys of the command line and its files, without ``init_args``."""
    return [key.replace(".init_args.", ".") for key, _ in settings(argv)]


def listed_models(argv: Sequence[str]) -> list[Any] | None:
    """The list of models that a command line ends up with; None where it is one model, or none."""
    listed: list[Any] | None = None
    for key, value in _settings(argv):
        if key == "model" and isinstance(value, list):
            listed = value
        elif key in ("model", "model.class_path"):
            listed = None
    return listed


def without_replaced(argv: Sequence[str], *sections: str) -> list[str]:
    """The command line without the methods and models that a later part of it replaces.

    The parser would hand an argument on to the new class wherever that has one of the same name: a weight of 10 that
    suits one method to a method that means something else by it. It takes no lists of models either.

    Args:
        argv: the command line after the subcommand.
        sections: sections to leave out altogether.
    """
    parts: list[tuple[list[str], str, Mapping[str, Any]]] = []  # words, key, content of a file
    named: dict[str, str] = {}
    for words, key, value in _options(argv):
        content = value if key == "config" else {}
        for name, given in _flatten(content) if key == "config" else [(key, value)]:
            section = name.removesuffix(".class_path")
            if section in ("method", "model") and isinstance(given, (str, list)):
                new = given.rpartition(".")[2] if isinstance(given, str) else ""
                if named.get(section) != new or not new:
                    parts = [_without_section(part, section) for part in parts]
                named[section] = new
        parts.append((words, key, content))
    for section in sections:
        parts = [_without_section(part, section) for part in parts]
    return [word for words, _, _ in parts for word in words]


def _without_section(
    part: tuple[list[str], str, Mapping[str, Any]], section: str
) -> tuple[list[str], str, Mapping[str, Any]]:
    _, key, content = part
    if key.partition(".")[0] == section and not key.endswith(".help"):
        return [], "", {}
    left = {name: value for name, value in content.items() if str(name).partition(".")[0] != section}
    if len(left) == len(content):
        return part
    return _as_file(left), key, left


def _as_file(content: Mapping[str, Any]) -> list[str]:
    return ["--config", yaml.safe_dump(dict(content), sort_keys=False)]  # the parser takes text for a file, too


def _check_member(key: str, member: str, allowed: Sequence[str], of: str = "") -> None:
    if member not in allowed:
        hint = suggest(member, allowed) if allowed else "it takes no arguments"
        raise ConfigError(key, f"there is no such key{of}; {hint}")


def _check_terms(key: str, terms: Any) -> None:
    for term in terms if isinstance(terms, list) else ():
        name = term.get("class_path") if isinstance(term, Mapping) else term
        if isinstance(name, str):
            _class_path("terms", key, name)


def _class_path(kind: str, key: str, name: str) -> str:
    """The full path of one of the package's classes; empty for a class of the user's own, which is imported later."""
    known = {entry.name: entry.class_path for entry in catalog.entries(kind)}
    if name in known:
        return known[name]
    if name in known.values():
        return name
    if "." in name or Path(name).suffix or Path(name).exists():
        return ""
    raise ConfigError(key, f"there is no {kind[:-1]} of that name; {suggest(name, known)}", name)


def settings(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """Dotted keys and values of the configuration files and options, in the order in which they are given.

    The entries of a list of models have keys of their own (``model.1.init_args.channels``). A list replaces what was
    said of the model before, and a class named later replaces the list.

    Raises:
        ConfigError: if an entry of the list is none, or an option would change one argument of all entries.
    """
    found: list[tuple[str, Any]] = []
    listed = False
    for key, value in _settings(argv):
        if key == "model" and isinstance(value, list):
            found, listed = [*_without_model(found), *_entries(value)], True
            continue
        if listed and key in ("model", "model.class_path"):
            found, listed = _without_model(found), False
        elif listed and key.startswith("model.") and key != "model.help":
            raise ConfigError(key, "`model` is a list here; change its entries, or say --model NAME for one model")
        found.append((key, value))
    return found


def _without_model(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in found if key.partition(".")[0] != "model"]


def _entries(models: list[Any]) -> Iterator[tuple[str, Any]]:
    if not models:
        raise ConfigError("model", "the list must hold at least one model")
    for index, entry in enumerate(models):
        key = f"model.{index}"
        if isinstance(entry, str):
            yield key, entry
            continue
        if not isinstance(entry, Mapping) or not isinstance(entry.get("class_path"), str):
            raise ConfigError(key, "must be a model's name, or hold one under class_path", entry)
        for name in entry:
            _check_member(f"{key}.{name}", str(name), ENTRY_KEYS)
        if not isinstance(entry.get("init_args") or {}, Mapping):
            raise ConfigError(f"{key}.init_args", "must hold the model's arguments by name", entry["init_args"])
        yield from _flatten(entry, f"{key}.")


def _settings(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for _, key, value in _options(argv):
        if key == "config":
            yield from _flatten(value)
        elif key:
            yield key, value


def _options(argv: Sequence[str]) -> Iterator[tuple[list[str], str, Any]]:
    """Each option's words on the command line, its dotted key and its value: a file's content, short forms written out.

    An option with a short form is yielded as a file of what it is short for.
    """
    waiting = list(argv)
    while waiting:
        option = waiting.pop(0)
        if not option.startswith("--"):
            yield [option], "", ""
            continue
        words = [option]
        key, equals, value = option[2:].partition("=")
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
            words.append(value)
        key = key.rstrip("+")
        if key == "config":
            content = _read(Path(value))
            whole = _written_out(content)
            yield (words if whole == content else _as_file(whole)), key, whole
        elif key in SHORT_FORMS:
            whole = _nested(key, _long_form(key, _read_value(value), value))
            yield _as_file(whole), "config", whole
        else:
            yield words, key, value


def _nested(key: str, value: Any) -> dict[str, Any]:
    group, _, rest = key.partition(".")
    return {group: _nested(rest, value) if rest else value}


def _written_out(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A file's content in which what has a short form is in its long one."""
    whole = dict(node)
    for name, value in node.items():
        key = f"{prefix}{name}"
        if key in SHORT_FORMS:
            whole[name] = _long_form(key, value, value)
        elif isinstance(value, Mapping):
            whole[name] = _written_out(value, f"{key}.")
    return whole


def _long_form(key: str, value: Any, given: Any) -> dict[str, Any]:
    written_out, allowed = SHORT_FORMS[key]
    found = written_out(value)
    if found is None:
        raise ConfigError(key, f"must be {allowed}", given)
    return found


def _failures(given: Any) -> dict[str, Any] | None:
    """Failures by the names of their parameters; None if they are given in none of the forms."""
    if isinstance(given, list):
        return {"clients": given} if _are_clients(given) else None
    if not isinstance(given, Mapping):
        probability = _number(given)
        return None if probability is None else {"probability": probability}
    if given and all(re.fullmatch(r"\d+(-\d+)?", str(name)) for name in given):
        fits = all(_are_clients(clients) for clients in given.values())
        return {"schedule": {str(name): clients for name, clients in given.items()}} if fits else None
    named = all(isinstance(name, str) and not name[:1].isdigit() for name in given)
    return dict(given) if named else None


def _newcomers(given: Any) -> dict[str, Any] | None:
    """Newcomers by the names of their parameters; None if they are given in none of the forms."""
    if isinstance(given, Mapping):
        return dict(given)
    return {"clients": given} if _is_whole(given) else None


SHORT_FORMS: dict[str, tuple[Callable[[Any], dict[str, Any] | None], str]] = {
    "federation.failures": (
        _failures,
        "a probability (0.3), a list of clients ([7]), rounds with the clients that are out of them "
        "({3: [0, 4], 5-8: [2]}), or probability, schedule and clients by name",
    ),
    "federation.newcomers": (_newcomers, "how many join later (5), or clients and after by name"),
}
"""Keys whose commonest members need no name -> what writes the value out, and what it may be."""


def _are_clients(given: Any) -> bool:
    return isinstance(given, list) and all(_is_whole(client) for client in given)


def _is_whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _number(given: Any) -> float | None:
    """A number, also where YAML 1.1 takes it for text: 1e-3."""
    try:
        return float(given) if isinstance(given, (int, float, str)) and not isinstance(given, bool) else None
    except (ValueError, OverflowError):
        return None


def _read_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the latter for a date that is none
        return text


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError("--config", "there is no such file", str(path))
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path} is not YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError("--config", f"{path} must hold sections ({', '.join(SECTIONS)})")
    return content


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    # A class first: it drops what was said of the arguments of an earlier one.
    for name, value in sorted(node.items(), key=lambda item: item[0] != "class_path"):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value
