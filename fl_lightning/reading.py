"""What is read is data: YAML without tags, without a key twice, without a text that grows when it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigError

LARGEST_FILE = 4 * 2**20
"""Bytes; a configuration has thousands of them, a list of edges of a large graph some hundred thousand."""
MOST_VALUES = 100_000
"""Values that a text may hold, those behind aliases counted wherever they are used."""
DEEPEST = 60
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_INT = re.compile(r"[-+]?(?:0b[01_]+|0|[1-9]\d*(?:_\d+)*|0x[0-9a-fA-F_]+)")  # 010 is a text: to YAML 1.1 it is eight


class UnreadableError(ValueError):
    """A text that is no YAML, or holds what no configuration may hold."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses what `load_yaml` says."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for name, _ in node.value:
            if name.tag == f"{_TAG}merge":  # what is merged in may be given anew
                continue
            key = self.construct_object(name, deep=True)
            if isinstance(key, (list, dict)):
                raise UnreadableError(f"line {name.start_mark.line + 1}: a key must be a word or a number")
            if key in seen:
                raise UnreadableError(f"the key {key!r} is given twice, the second time in line {_line(name)}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list("-+0123456789."))
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "seq", "map", "str")
}


class _Dumper(yaml.SafeDumper):
    """A safe dumper that puts in quotes what `load_yaml` would take for a number, PyYAML's own reader or not."""


for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    _Dumper.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list("-+0123456789."))


def dump_yaml(content: Any) -> str:
    """A YAML document that `load_yaml` reads as the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def load_yaml(text: str) -> Any:
    """Read a YAML document of plain containers, texts, numbers, truth values and nulls.

    Raises:
        UnreadableError: if it is none, holds a key twice, an alias of itself, or more than `MOST_VALUES` values.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, ())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UnreadableError(f"{f'line {mark.line + 1}: ' if mark else ''}{error.problem}") from error
    except UnreadableError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise UnreadableError("it is nested too deeply" if deep else str(error).split("\n")[0]) from error


def _count(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """The values that a node becomes; each node is looked at once."""
    if id(node) in above:
        raise UnreadableError(f"line {_line(node)}: an alias is part of what it stands for")
    if len(above) > DEEPEST:
        raise UnreadableError(f"line {_line(node)}: it is nested more than {DEEPEST} deep")
    if id(node) not in known:
        inside = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inside = [each for pair in node.value for each in pair]
        known[id(node)] = 1 + sum(_count(each, known, (*above, id(node))) for each in inside)
    if known[id(node)] > MOST_VALUES:
        raise UnreadableError(f"line {_line(node)}: it holds more than {MOST_VALUES} values")
    return known[id(node)]


def read_yaml(path: Path, key: str) -> Any:
    """Read a YAML file.

    Args:
        path: of the file.
        key: who asks for it, for errors.

    Raises:
        ConfigError: if it is no readable file of a reasonable size, no text, or no YAML.
    """
    try:
        if not path.is_file():
            there = "is a folder, not a file" if path.is_dir() else "there is no such file"
            raise ConfigError(key, there, str(path))
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(key, f"must be a file of at most {LARGEST_FILE // 2**20} MiB", str(path))
        return load_yaml(path.read_bytes().decode("utf-8-sig"))
    except (UnreadableError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"{path} is not YAML: {error}") from error
    except (OSError, ValueError) as error:  # a name with a null byte, one that is too long
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(key, f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from error


# --- plain values ---------------------------------------------------------------------------------------------------


def plain(value: Any, key: str) -> Any:
    """A value of no type in particular, in plain containers; a class can be named in none of them.

    Raises:
        ConfigError: for a class, for a number that is not finite, or for what is no plain value.
    """
    value = getattr(value, "parsed", value)  # an option's text, which YAML reads as in a file
    if isinstance(value, Mapping):
        refuse_class(value, key)
        return {name: plain(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each, f"{key}.{index}") for index, each in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return whole(value, key)
    if isinstance(value, float):
        return finite(value, key)
    if isinstance(value, str):
        return text(value, key)
    raise ConfigError(key, "must be plain data", value)


def refuse_class(value: Mapping[Any, Any], key: str) -> None:
    """Refuse a class where none is expected."""
    if "class_path" in value:
        raise ConfigError(f"{key}.class_path", "no class can be named here; it takes plain data", value["class_path"])


def whole(value: int, key: str) -> int:
    """A whole number that fits into 64 bits."""
    if abs(value) >= 2**63:
        raise ConfigError(key, "must be a whole number of at most 63 bits", value)
    return value


def finite(value: float, key: str, may_be_infinite: bool = False) -> float:
    """A number as a float; NaN never, and infinity where that has a meaning."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or (math.isinf(number) and not may_be_infinite):
        raise ConfigError(key, "must be a finite number", value)
    return number


def text(value: str, key: str) -> str:
    """A text that can be handed to the system."""
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(key, "must not hold a null character or half of one", value)
    return value
