"""What can happen to a file or folder: `damaged` does one thing of it, chosen by a `random.Random`."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from fl_lightning import sealed

VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 10**30, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "abc", "é\u202e",
    "x" * 3000, "nul\0", [], {}, [None], [1, "a"], {"a": 1}, [[[]]], "../../x", "2024-13-45",
    {"class_path": "os.system", "init_args": {"command": "true"}}, {"class_path": 5},
]  # fmt: skip
"""What one value of a JSON or YAML file is replaced by."""


def damaged(path: Path, draw: random.Random, kind: str = "") -> str:
    """Damage a file.

    Args:
        path: the file, or a folder.
        draw: chooses.
        kind: of the damage; empty leaves that to chance.

    Returns:
        What was done, in words.
    """
    if path.is_dir():
        kind = kind or draw.choice(sorted(OF_FOLDERS))
        OF_FOLDERS[kind](path)
        return kind
    kinds = dict(OF_FILES)
    if path.suffix in (".json", ".yaml", ".yml"):
        kinds |= OF_TREES
    if path.suffix in (".ckpt", ".pt"):
        kinds |= OF_TENSORS
    weights = [4 if kind in {**OF_TREES, **OF_TENSORS} else 1 for kind in kinds]
    kind = kind or draw.choices(list(kinds), weights)[0]
    said = kinds[kind](path, draw)
    return f"{kind}: {said}"[:100] if said else kind


# --- bytes ----------------------------------------------------------------------------------------------------------


def _of_bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], str]:
    def do(path: Path, draw: random.Random) -> str:
        content = path.read_bytes()
        path.write_bytes(change(content, draw))
        return ""

    return do


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(draw.choice([1, 1, 1, 3, 20])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _digit(content: bytes, draw: random.Random) -> bytes:
    """Another digit: what was written is still well formed."""
    places = [place for place, byte in enumerate(content[:100_000]) if 48 <= byte <= 57]
    if not places:
        return content + b"7"
    place = draw.choice(places)
    return content[:place] + str(draw.randrange(10)).encode() + content[place + 1 :]


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Callable[[bytes, random.Random], bytes]:
    return lambda content, draw: b"".join(change(content.splitlines(keepends=True) or [b""], draw))


def _without(lines: list[bytes], draw: random.Random) -> list[bytes]:
    place = draw.randrange(len(lines))
    return lines[:place] + lines[place + 1 :]


def _twice(lines: list[bytes], draw: random.Random) -> list[bytes]:
    place = draw.randrange(len(lines))
    return [*lines[: place + 1], *lines[place:]]


def _swapped(lines: list[bytes], draw: random.Random) -> list[bytes]:
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return lines


def _other_header(lines: list[bytes], draw: random.Random) -> list[bytes]:
    heads = (b"a,b,c\n", b"\n", b"round\n", b"round,round,round\n", b"x" * 5000 + b"\n", b"{\n", b"---\n")
    return [draw.choice(heads), *lines[1:]]


def _inserted(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    odd = (b"\0", b"\xff\xfe", b"\r", b",", b'"', b"\n", b"1" * 5000, b"nan", b"-", "é\u2028".encode(), b"[" * 2000)
    return content[:place] + draw.choice(odd) + content[place:]


def _instead(make: Callable[[Path], object]) -> Callable[[Path, random.Random], str]:
    """Something else in the place of a file."""

    def do(path: Path, draw: random.Random) -> str:
        path.unlink()
        make(path)
        return ""

    return do


def _elsewhere(path: Path) -> Path:
    """A file of the user's own, outside the runs."""
    return next((above / "exp.yaml" for above in path.parents if (above / "exp.yaml").is_file()), path)


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine\n")


OF_FILES: dict[str, Callable[[Path, random.Random], str | None]] = {
    "cut": _of_bytes(lambda content, draw: content[: draw.randrange(len(content) + 1)]),
    "emptied": _of_bytes(lambda content, draw: b""),
    "flipped": _of_bytes(_flip),
    "another digit": _of_bytes(_digit),
    "line deleted": _of_bytes(_lines(_without)),
    "line doubled": _of_bytes(_lines(_twice)),
    "lines swapped": _of_bytes(_lines(_swapped)),
    "other header": _of_bytes(_lines(_other_header)),
    "inserted": _of_bytes(_inserted),
    "no text": _of_bytes(lambda content, draw: draw.randbytes(draw.choice([1, 40, 5000]))),
    "appended": _of_bytes(lambda content, draw: content + draw.choice([b"x", b"\0" * 100, b"1,2\n", content])),
    "zeros": _of_bytes(lambda content, draw: b"\0" * len(content)),
    "deleted": lambda path, draw: path.unlink(),
    "a folder": _instead(Path.mkdir),
    "a full folder": _instead(_full_folder),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to another file": _instead(lambda path: path.symlink_to(_elsewhere(path))),
    "a pipe": _instead(os.mkfifo),
    "no permission": lambda path, draw: path.chmod(0),
}


# --- JSON and YAML --------------------------------------------------------------------------------------------------


def _tree(change: Callable[[Any, tuple[Any, ...], random.Random], str]) -> Callable[[Path, random.Random], str]:
    def do(path: Path, draw: random.Random) -> str:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        places = [place for place in _places(content) if place]
        if not places:
            path.write_text("[]")
            return "all of it"
        place = draw.choice(places[:60] if draw.random() < 0.7 else places)
        node = content
        for name in place[:-1]:
            node = node[name]
        said = change(node, place, draw)
        if path.suffix == ".json":
            if isinstance(content, dict) and "checksum" in content and place != ("checksum",) and draw.random() < 0.5:
                del content["checksum"]
                sealed.write_json(path, content)  # as by somebody who means it
                return f"sealed again: {'.'.join(map(str, place))} {said}"
            path.write_text(json.dumps(content))
        else:
            path.write_text(yaml.dump(content, Dumper=_Dumper, sort_keys=False), errors="surrogatepass")
        return f"{'.'.join(map(str, place))} {said}"

    return do


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        found += _places(value, (*path, name))
    return found


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _other_value(node: Any, place: tuple[Any, ...], draw: random.Random) -> str:
    node[place[-1]] = value = draw.choice(VALUES)
    return f"= {value!r}"[:60] if not isinstance(value, int) or abs(value) < 10**40 else "= 10**400"


def _nested(node: Any, place: tuple[Any, ...], draw: random.Random) -> str:
    inner: Any = 1
    for _ in range(draw.choice([5, 90, 300])):
        inner = [inner] if draw.random() < 0.5 else {"a": inner}
    node[place[-1]] = inner
    return "nested"


def _no_key(node: Any, place: tuple[Any, ...], draw: random.Random) -> str:
    del node[place[-1]]
    return "deleted"


def _other_key(node: Any, place: tuple[Any, ...], draw: random.Random) -> str:
    if isinstance(node, list):
        node.insert(place[-1], node[place[-1]])
        return "doubled"
    new = draw.choice(["", "ä", "a.b", "x" * 400, "class_path", f"{place[-1]}x"])
    node[new] = node.pop(place[-1])
    return f"renamed to {new!r}"[:40]


def _deep(path: Path, draw: random.Random) -> str:
    path.write_text("[" * 100_000 if draw.random() < 0.5 else '{"a":' * 50_000)
    return ""


OF_TREES: dict[str, Callable[[Path, random.Random], str]] = {
    "value": _tree(_other_value),
    "deep value": _tree(_nested),
    "key deleted": _tree(_no_key),
    "key renamed": _tree(_other_key),
    "brackets": _deep,
}


# --- files of tensors -----------------------------------------------------------------------------------------------


def _resealed(path: Path, draw: random.Random) -> str:
    """Another value in a file whose seal fits."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    places = [place for place in _places(content) if place]
    place = draw.choice(places)
    node = content
    for name in place[:-1]:
        node = node[name]
    if isinstance(node, dict) and draw.random() < 0.2:
        node.pop(place[-1])
        said = "deleted"
    else:
        said, node[place[-1]] = draw.choice([*TENSORS, *((repr(value)[:30], value) for value in VALUES[:21])])
    sealed.save_tensors(path, content)
    return f"{'.'.join(map(str, place))} {said}"


TENSORS: list[tuple[str, Any]] = [
    ("empty", torch.zeros(0)),
    ("a number", torch.tensor(1.0)),
    ("NaN", torch.full((3, 3), float("nan"))),
    ("large", torch.zeros(100, 100)),
    ("whole numbers", torch.arange(6)),
    ("negative", torch.full((4,), -1)),
    ("complex", torch.zeros(2, 2, dtype=torch.complex64)),
    ("sparse", torch.eye(3).to_sparse()),
    ("without content", torch.zeros(3, device="meta")),
    ("a terabyte", torch.zeros(1).expand(10**6, 10**6)),
    ("a parameter", torch.nn.Parameter(torch.zeros(3))),
]

OF_TENSORS: dict[str, Callable[[Path, random.Random], str]] = {"sealed again": _resealed}


# --- folders --------------------------------------------------------------------------------------------------------


def _gone(path: Path) -> None:
    shutil.rmtree(path)


def _a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file\n")


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _own_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.name)


def _moved(path: Path) -> None:
    """The folder lies elsewhere, and a link leads to it."""
    there = _elsewhere(path).parent / "moved"
    shutil.move(path, there)
    path.symlink_to(there)


OF_FOLDERS: dict[str, Callable[[Path], None]] = {
    "folder deleted": _gone,
    "folder emptied": _empty,
    "folder a file": _a_file,
    "folder a link to itself": _own_link,
    "folder a link elsewhere": _moved,
    "folder without permission": lambda path: path.chmod(0),
}
