"""Decode a data set once and keep the tensors in one file."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from fl_lightning.archives import check_stored
from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import own_code, require
from fl_lightning.files import default_cache_dir, expanded, inside, remove_abandoned
from fl_lightning.own_sources import edited_since_import, imported_sources, source_of
from fl_lightning.sealed import save_tensors, verify
from fl_lightning.seeding import isolated_streams
from fl_lightning.terminal import say

ABSENT = "absent"
"""The stamp of a file that is not there."""
FORMAT = 9
"""Version of the file and of this package's decoders; raise it whenever a decoder gives other tensors,
or refuses what it took."""
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)
"""Of the data set that is being decoded: one that it is drawn from is kept there, too."""


def streams() -> AbstractContextManager[None]:
    """Those that a data set is decoded under, whatever the run's seed is: one that draws has the same samples again."""
    return isolated_streams(0, "dataset")


def load(dataset: Dataset, cache_dir: Path | None = None) -> Arrays:
    """Return the data set's arrays, decoded now or read (memory-mapped) from the cache.

    The cache's key is made of the class, its attributes, the sources' full paths, sizes and both times of change
    (`mtime`, and `ctime`, which moves with any copy or rename) and, for a class of the user's own, the text of its
    module, of those of its bases and of what they import of the user's own. A cached file that is damaged is made
    again, with a line. Where no key can be made (a class typed into a console, an attribute that is no plain value,
    `sources` that are unknown) the data set is decoded every time.

    Args:
        dataset: what to load.
        cache_dir: folder of the cache; None is that of the data set that is being decoded, else `default_cache_dir`.

    Raises:
        ConfigError: if the source is missing or broken, or what it decodes to is not valid.
    """
    folder = expanded(cache_dir or _FOLDER.get() or default_cache_dir())
    name = type(dataset).__name__
    identity = _identity(dataset)
    before = _stamps(dataset) if identity is not None else {}
    if identity is not None and (cached := _read(folder / _file_name(name, identity, before))) is not None:
        return cached
    outer = _FOLDER.set(folder)
    try:
        with own_code(KEY, dataset, "arrays()"), streams():
            arrays = dataset.arrays()
    finally:
        _FOLDER.reset(outer)
    rule = f"{name}.arrays() must return one fl_lightning.data.arrays.Arrays(x, y, num_train, classes)"
    require(isinstance(arrays, Arrays), KEY, rule, type(arrays).__name__)
    arrays.validate(name)
    arrays.digest = content_hash(arrays)
    if identity is not None:
        # The sources are looked at again: a download may just have brought them, all of them.
        now = _stamps(dataset)
        changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        if changed and any(stamp != ABSENT for stamp in before.values()):
            how = "came or changed" if changed[0] in now else "went"
            say(f"fl-lightning: {name}: {changed[0]} {how} while it was read; what was read is not cached")
        else:
            _write(folder / _file_name(name, identity, now), arrays)
    return arrays


def _identity(dataset: Dataset) -> str | None:
    """Class and constructor arguments as text, taken before decoding; None if they cannot be told for sure."""
    if _sources(dataset) is None:
        return None
    kind = type(dataset)
    attributes = vars(dataset)
    code = ""
    if kind.__module__.startswith("fl_lightning."):
        attributes = {key: value for key, value in attributes.items() if not key.startswith("_")}
    else:
        own = (kind, *filter(_is_users, kind.__mro__[1:]))
        try:
            code = "/".join(map(_text_hash, own))
            if any(edited_since_import(source_of(each)) for each in own):
                return None  # what is decoded would be of what the file was
        except (OSError, TypeError, ValueError, SyntaxError):
            return None
    try:
        return json.dumps(
            [FORMAT, f"{kind.__module__}.{kind.__qualname__}", code, attributes], sort_keys=True, default=_plain
        )
    except TypeError:
        return None


def _is_users(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package != "fl_lightning" and package not in sys.stdlib_module_names


def _text_hash(kind: type) -> str:
    """SHA-256 of the file that a class stands in, and of those of one's own that it imports.

    Raises:
        OSError: if there is none.
        TypeError: likewise.
        SyntaxError: if it has been edited since to something that is no Python; ValueError for what is no text.
    """
    own = Path(inspect.getfile(kind)).read_bytes()
    return hashlib.sha256(own + json.dumps(imported_sources(kind)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)  # whose own order is another one in every process
    raise TypeError(f"{type(value).__name__} has no stable text")


def _file_name(name: str, identity: str, stamps: Mapping[str, str]) -> str:
    digest = hashlib.sha256(identity.encode())
    for source, stamp in stamps.items():
        digest.update(f"\n{source}/{stamp}".encode(errors="surrogateescape"))  # names of files may be any bytes
    return f"{name}-{digest.hexdigest()[:20]}.pt"


def _stamps(dataset: Dataset) -> dict[str, str]:
    """Size and times of change of each of its files, in order.

    One that takes another's place may have its size and its mtime (tar, cp -p and rsync keep that, mv does, too), but a
    ctime of its own. Inode numbers are not looked at: they may be others in every container.
    """
    found = {}
    for source in _sources(dataset) or ():
        try:
            status = os.stat(source)
            found[source] = f"{status.st_size}/{status.st_mtime_ns}/{status.st_ctime_ns}"
        except OSError:
            found[source] = ABSENT
    return found


def _sources(dataset: Dataset) -> list[str] | None:
    """The files that a data set reads, by their full paths and in order, those in its folders among them."""
    with own_code(KEY, dataset, "sources()"):
        given = dataset.sources()
        if given is None:
            return None
        rule = f"{type(dataset).__name__}.sources() must return a list of files, or None"
        require(isinstance(given, Iterable) and not isinstance(given, (str, bytes)), KEY, rule, type(given).__name__)
        paths = [os.path.abspath(source) for source in given]  # a relative one is another file elsewhere
    return sorted(itertools.chain.from_iterable(map(_inside, paths)))


def _inside(path: str) -> list[str]:
    """A file itself, or all in a folder, whose own time of change says nothing of what is in them."""
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(folder, name) for folder, names in inside(path) for name in names]


def content_hash(arrays: Arrays) -> str:
    """SHA-256 over samples, labels and what is said of them."""
    digest = hashlib.sha256()
    own = {name: value for name, value in vars(arrays).items() if name not in ("digest", "group_names")}
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    told = {name: value for name, value in own.items() if name not in tensors}
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest.update(json.dumps([shapes, told], sort_keys=True, default=str).encode())
    for tensor in tensors.values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> Arrays | None:
    """The arrays in a cache file, or None if there is none or it is not whole."""
    if not os.path.isfile(path):  # nor where the folder cannot be entered, of which Path.is_file raises
        return None
    try:
        verify(path, "data.cache")
        check_stored(path, path, "data.cache")
        arrays = Arrays(**torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        arrays.hold_plainly(path.name)
        whole = len(arrays.x) == len(arrays.y) > 0 and arrays.digest != ""
    except Exception as error:  # whatever is wrong with a cache file, the remedy is to make it again
        said = " ".join(str(error).split())[:200]
        say(f"{said}; the data set is decoded again")
        return None
    return arrays if whole else None


def _write(path: Path, arrays: Arrays) -> None:
    """Write a cache file so that it appears whole or not at all; one that cannot be written is only worth a warning."""
    # clone() drops the rest of a storage that a view would take along.
    content = {**vars(arrays), "x": arrays.x.clone(), "y": arrays.y.clone()}
    try:
        remove_abandoned(path.parent)
        save_tensors(path, content)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"The decoded data set is not cached: {error}", stacklevel=3)
