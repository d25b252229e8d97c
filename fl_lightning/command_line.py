"""The command line, its files and the environment, read once: what they set, in their order, and all of it together."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError, is_near, require, suggest
from fl_lightning.merging import Brief, More, Nothing, Text, class_of, is_same_class, merged, read_value
from fl_lightning.reading import read_yaml
from fl_lightning.shipped import names, path_of
from fl_lightning.short_forms import SHORT_FORMS, long_form

SECTIONS = (
    "seed", "name", "output", "method", "model", "optimizer", "data", "federation", "metrics", "trainer", "logger"
)  # fmt: skip
ENTRY_KEYS = ("class_path", "init_args", "clients")
"""What an entry of a list of models may hold."""
OPTIMIZER = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}
_OF_KEYS = ("optimizer", "data", "federation", "trainer")
"""Sections that hold keys, none of which is nothing at all."""

Setting = tuple[str, Any]
"""A dotted key and its value."""


@dataclass(frozen=True)
class Part:
    """One option, or one section of a file.

    Args:
        section: what it changes.
        content: its value, nested.
        settings: the same as dotted keys and values.
        is_option: whether it is an option.
    """

    section: str
    content: Any
    settings: list[Setting]
    is_option: bool = False


_ANEW = ("method", "model", "optimizer")
"""Sections whose class, named anew, takes over nothing."""


class CommandLine:
    """What the words after the subcommand say, files and environment included and short forms written out.

    A method, model or optimizer that is named anew replaces what was said of the one before: an argument would be
    handed on to the new class wherever that has one of the same name, a weight of 10 that suits one method to a method
    that means something else by it, Adam's learning rate to SGD. So does a list of models, and a model named after it.

    Args:
        argv: the command line after the subcommand; from Python, what a file would hold may stand among its words, and
            so may parts of another one.
        environment: what variables' names begin with that say what nothing else says; empty for none.

    Raises:
        ConfigError: if a file is no configuration, a short form is none of those allowed, an entry of a list of models
            is none, or an option would change one argument of all entries.
    """

    settings: list[Setting]
    """All keys and values; entries of a list have their own (``model.1.init_args.depth``)."""
    tree: dict[str, Any]
    """Section -> what all parts together say of it."""
    words: list[str]
    """What belongs to no section: the command's own options."""

    def __init__(self, argv: Sequence[str | Mapping[str, Any] | Part], environment: str = "") -> None:
        self.words = []
        self.tree = {}
        self._parts: list[Part] = []
        self._named: dict[str, str] = {}  # section -> its class
        self._is_list = False  # the section model
        self._early: dict[str, list[Part] | None] = {}  # section -> options after its files, until one names a class
        self._around, self._given = list(self._read(list(variables(environment)))), list(self._read(argv))
        for part in (*self._around, *self._given):
            self._add(part)
        for part in self._parts:
            self.tree[part.section] = merged(self.tree.get(part.section), part.content, part.section)
        own = self.tree.setdefault("optimizer", OPTIMIZER)
        usual = isinstance(own, Mapping) and (
            "class_path" not in own or is_same_class(class_of(own), class_of(OPTIMIZER))
        )
        if usual:  # another class has defaults of its own
            self.tree["optimizer"] = merged(OPTIMIZER, own, "optimizer")
        self.settings = list(_with_all_entries(setting for part in self._parts for setting in part.settings))

    def _read(self, argv: Sequence[str | Mapping[str, Any] | Part]) -> Iterator[Part]:
        waiting = list(argv)
        while waiting:
            option = waiting.pop(0)
            if not isinstance(option, str):
                yield from (option,) if isinstance(option, Part) else sections(option)
                continue
            key, equals, value = option[2:].partition("=")
            words = [option]
            following = waiting[0] if waiting else None
            if option.startswith("--") and not equals and isinstance(following, str) and following[:2] != "--":
                value = following
                words.append(following)
                del waiting[0]
            section = key.rstrip("+").partition(".")[0]
            if option.startswith("--") and key == "config":
                require(bool(value), key, "needs a file: --config FILE")
                yield from sections(_content(Path(value)))
            elif option.startswith("--") and section in SECTIONS and not key.endswith(".help"):
                if len(words) == 1 and not equals and key not in SHORT_FORMS:
                    raise ConfigError(key, f"needs a value: --{key} VALUE")
                yield _option(key, value)
            else:
                self.words += words

    def _add(self, part: Part) -> None:
        if part.section == "model" and isinstance(part.content, More):
            self._is_list = True
        elif part.section in _ANEW:
            given = dict(part.settings)
            named = given.get(part.section, given.get(f"{part.section}.class_path"))
            if isinstance(named, (str, list)):
                self._name(part, named)
                return
            if part.section == "optimizer" and not isinstance(part.content, Brief):
                self._named.setdefault("optimizer", class_of(OPTIMIZER))  # of whom a file speaks that names none
            elif part.section == "model" and self._is_list and part.settings:
                rule = "`model` is a list here; change its entries, or say --model NAME for one model"
                raise ConfigError(part.settings[0][0], rule)
            early = self._early.setdefault(part.section, [])
            if not part.is_option:
                self._early[part.section] = []
            elif early is not None:
                early.append(part)
        self._parts.append(part)

    def _name(self, part: Part, named: str | list[Any]) -> None:
        """Take up a class, or a list of models; what was said of the one before goes."""
        section, name = part.section, str(named) if isinstance(named, str) else ""
        early = (self._early.get(section) or []) if part.is_option else []
        self._early[section] = None if part.is_option else []
        same = bool(name) and is_same_class(self._named.get(section, name), name)
        if not same:  # a variable may say more of what is named
            self._parts = [earlier for earlier in self._parts if earlier.section != section]
        self._named[section] = name
        if section == "model":
            self._is_list = isinstance(named, list)
        self._parts.append(part)
        for own in [] if same else early:
            self._add(own)

    def idle(self) -> list[str]:
        """Keys of options before a file that change nothing, for it says otherwise."""
        last = max((place for place, part in enumerate(self._given) if not part.is_option), default=0)
        parts = [*self._around, *self._given[: last + 1]]
        found: list[str] = []
        for part in [part for part in self._given[:last][::-1] if part.is_option]:  # arguments before their class
            without = [own for own in parts if own is not part]
            with suppress(ConfigError):
                if CommandLine(without).tree == CommandLine(parts).tree:
                    parts, found = without, [part.settings[0][0], *found]
        return list(dict.fromkeys(found))

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Let errors inside name keys as they were written."""
        try:
            yield
        except ConfigError as error:
            said = self.as_written(error)
            if said is error:
                raise
            raise said from error

    def as_written(self, error: ConfigError) -> ConfigError:
        """An error about the key as it was written, where a class names an argument without saying where it belongs.

        ``data.partition.beta`` and ``data.partition.init_args.beta`` are one key. A term that a method makes refuses
        what it was given by its own name for it: then the value tells.
        """
        written = {key: value for key, value in self.settings if not isinstance(value, Mapping)}
        alike = [key for key in written if bare(key) == bare(error.key)]
        if not alike and error.value is not ...:
            section = error.key.partition(".")[0]
            under = [key for key in written if key.partition(".")[0] == section]
            last = error.key.rpartition(".")[2]
            alike = [key for key in under if key.rpartition(".")[2] == last and _is(written[key], error.value)]
            if section == "method":
                alike = alike or [key for key in under if _is(written[key], error.value)]
            alike = alike if len(alike) == 1 else []
        return error.at(alike[-1]) if alike and alike[-1] != error.key else error


def bare(key: str) -> str:
    """A dotted key without the ``init_args`` that may be left out of it."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def _is(given: Any, value: object) -> bool:
    given = given.parsed if isinstance(given, Text) else given
    return given == value and isinstance(given, bool) == isinstance(value, bool)


# --- parts ----------------------------------------------------------------------------------------------------------


VARIABLES = "FL_LIGHTNING_FIT__"
"""What the names of variables begin with that reach the runs of tables and searches, too."""


def variables(prefix: str = VARIABLES) -> Iterator[str]:
    """The environment's variables as options, files first: ``FL_LIGHTNING_FIT__DATA__BATCH_SIZE=32``.

    Raises:
        ConfigError: for one whose name is the prefix alone.
    """
    found = {
        name.removeprefix(prefix): value for name, value in os.environ.items() if prefix and name.startswith(prefix)
    }
    rule = "names no option; FL_LIGHTNING_FIT__DATA__BATCH_SIZE is data.batch_size"
    require("" not in found, prefix, rule, found.get(""))
    for name in sorted(found, key=lambda name: (name != "CONFIG", name)):
        yield f"--{name.lower().replace('__', '.')}={found[name]}"


def as_shell_says(words: Sequence[str]) -> str:
    """A command line of ours for a shell that may know none of the variables, as another machine's: they stand in it.

    Args:
        words: what follows ``fl-lightning``.
    """
    around = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return shlex.join([*(["env", *around] if around else []), "fl-lightning", *words])


def said_around() -> str:
    """A sentence on what they say; empty where there are none."""
    words = list(variables())
    gone = any(word.startswith(tuple(f"--{section}." for section in _ANEW)) for word in words)
    more = " What is said of a method, a model or an optimizer holds until another one is named." if gone else ""
    return f"Variables of the environment said {shlex.join(words)} where no file did.{more}" if words else ""


def _option(option: str, value: str) -> Part:
    key = option.rstrip("+")
    section, *path = key.split(".")
    parsed = read_value(value)
    if isinstance(parsed, str) and parsed != value and is_nested(parsed):
        value = parsed  # in quotes: a text, where the key takes one, and no list
    parsed = parsed if path else written_out(section, parsed)
    content: Any = parsed if isinstance(parsed, (Mapping, list)) and section not in ("name", "output") else Text(value)
    if key in SHORT_FORMS:
        content = long_form(key, parsed, value)
        settings = list(flatten({key: content}))
    else:
        settings = list(flatten({key: content})) if isinstance(content, Mapping) else [(key, content)]
    if path and isinstance(content, Mapping) and not content:
        content = Nothing()
    if option != key:
        content = More(content if isinstance(content, list) else [content])
        settings = [(key, content)]
    for name in reversed(path):
        content = Brief({name: content})
    return Part(section, content, settings, is_option=True)


def sections(content: Mapping[str, Any]) -> Iterator[Part]:
    """A file's sections, short forms written out."""
    for section, value in content.items():
        if value is None and section in _OF_KEYS:
            continue  # all of its lines are comments: it says nothing
        whole = written_out(str(section), _without_nothing(value))
        yield Part(str(section), whole, list(flatten({str(section): whole})))


def _without_nothing(value: Any) -> Any:
    """The same without the `init_args` of which all lines are comments."""
    if isinstance(value, list):
        return [_without_nothing(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    said = {name: own for name, own in value.items() if name != "init_args" or own is not None}
    return {name: _without_nothing(own) for name, own in said.items()}


def written_out(section: str, value: Any) -> Any:
    """A whole section with its short forms written out."""
    if not isinstance(value, Mapping):
        return value
    short = {name: f"{section}.{name}" for name in value if f"{section}.{name}" in SHORT_FORMS}
    return {**value, **{name: long_form(key, value[name], value[name]) for name, key in short.items()}}


def _content(path: Path) -> Mapping[str, Any]:
    given, path = path, path_of(path)
    if not path.suffix and not path.exists():
        ours, asked = names(), str(given)
        rule = f"there is no such file, nor one of ours; {suggest(asked, ours)}"
        require(not any(is_near(asked, name) for name in ours), "--config", rule, asked)
    content = read_yaml(path, "--config")
    if not isinstance(content, Mapping):
        raise ConfigError("--config", f"{path} must hold sections ({', '.join(SECTIONS)})")
    return content


def is_nested(text: str) -> bool:
    """Whether a text says a list or a mapping in YAML, or, in quotes, a text that does.

    >>> [is_nested(text) for text in ("[a]", "a: b", '"[a]"', "a", "'a'", "1")]
    [True, True, True, False, False, False]
    """
    said = read_value(text)
    return isinstance(said, (Mapping, list)) or (isinstance(said, str) and said != text and is_nested(said))


def as_text(value: Any) -> str:
    """A value as an option says it; a text that would be read as a list or a mapping stands in quotes.

    >>> [as_text(value) for value in ("cat", "[cat]", [64, 0.5], None, float("inf"))]
    ['cat', '"[cat]"', '[64, 0.5]', 'null', '.inf']
    """
    if isinstance(value, str) and not is_nested(value):
        return value  # a text, whatever it looks like
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"  # YAML's; JSON has none
    return json.dumps(value, ensure_ascii=False)


def flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[Setting]:
    """The dotted keys and values of nested mappings."""
    # A class first: it drops what was said of the arguments of an earlier one.
    for name, value in sorted(node.items(), key=lambda item: item[0] != "class_path"):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


# --- lists of classes -----------------------------------------------------------------------------------------------


def _with_all_entries(settings: Iterable[Setting]) -> Iterator[Setting]:
    """All settings, with what entries of lists of classes say; added ones count on from those before them."""
    length: dict[str, int] = {}
    for key, value in settings:
        own = bare(key).removesuffix(".class_path")
        first = length.get(own, 0) if isinstance(value, More) else 0
        length[own] = first + (len(value) if isinstance(value, list) else value is not None)
        yield from _with_entries(key, value, first)


def _with_entries(key: str, value: Any, first: int) -> Iterator[Setting]:
    """A setting, and what the entries say where it is a list of classes, whose first has this place."""
    if key == "model" and isinstance(value, list):
        yield from _models(value, first)
        return
    if key in ("method.init_args.extra_terms", "method.extra_terms", "federation.wire"):
        for index, entry in enumerate(value if isinstance(value, list) else (), first):
            if key == "federation.wire":
                _check_entry(f"{key}.{index}", "filter", entry, ENTRY_KEYS[:2])
            yield from flatten({f"{key}.{index}": entry})
    yield key, value


def _models(models: list[Any], first: int) -> Iterator[Setting]:
    if not models:
        raise ConfigError("model", "the list must hold at least one model")
    for index, entry in enumerate(models, first):
        _check_entry(f"model.{index}", "model", entry, ENTRY_KEYS)
        yield from flatten({f"model.{index}": entry})


def _check_entry(key: str, kind: str, entry: Any, keys: Sequence[str]) -> None:
    """Refuse an entry of a list that is neither a class's name nor holds one, with its arguments, under `keys`."""
    if isinstance(entry, str):
        return
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_path"), str):
        raise ConfigError(key, f"must be a {kind}'s name, or hold one under class_path", entry)
    for name in entry:
        if name not in keys:
            raise ConfigError(f"{key}.{name}", f"there is no such key; {suggest(str(name), keys)}")
    if not isinstance(entry.get("init_args") or {}, Mapping):
        raise ConfigError(f"{key}.init_args", f"must hold the {kind}'s arguments by name", entry["init_args"])
