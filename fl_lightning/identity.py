"""What makes two configurations those of one run, or of one run but for its seed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from fl_lightning.files import content_of, expanded, inside
from fl_lightning.source import UnreadableError
from fl_lightning.static import EMPTY, load, parameters

# What may differ between a run and its continuation, because it changes no number of the rounds done.
_NO_IDENTITY = (
    "name", "output", "logger", "federation.rounds", "federation.checkpoint", "federation.pool",
    "federation.steps_per_bundle", "federation.workers", "federation.threads", "federation.worker_timeout",
    "federation.cohort", "federation.graph", "federation.compile",
    "federation.on_client_error", "federation.max_growth", "federation.early_stopping",
    "data.cache",
)  # fmt: skip
_PLACE = re.compile(r"data\.dataset\.(.+\.)?init_args\.(root|download)")  # of a data set, or of one that it draws from
_FILE = re.compile(r"data\.(dataset|partition)\.(.+\.)?init_args\.(path|test_path|tokenizer)")
_LENGTH = re.compile(r"federation\.(rounds|early_stopping)(\.|$)")
_COMPUTED = ("federation.", "trainer.")
_ROUNDING = ("federation.cohort", "federation.graph", "federation.compile")
_CARE = {"federation.on_client_error": "stop", "federation.max_growth": 1e4}  # and what they usually are
_WEIGHTS = (".pt", ".pth")
CONTENTS = " (contents)"
"""Ends the keys of what is known of a file's contents, which runs of earlier versions did not write down."""
CODE = " (code)"
"""Ends the keys of what is known of one's own code and its files, which may be edited before a run goes on."""
_OWN_OF_A_PROCESS = (  # the first one's alone, or a machine's
    "output", "logger", "data.cache", "federation.threads", "federation.worker_timeout", "trainer.accelerator",
    "trainer.devices", "trainer.enable_progress_bar",
)  # fmt: skip
_TRAINER_IDENTITY = (
    "precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "max_steps",
    "limit_train_batches", "overfit_batches", "fast_dev_run", "min_steps", "max_time", "callbacks", "plugins",
)  # fmt: skip


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run this run: every key, dotted, that changes a number."""
    trainer = tuple(f"trainer.{name}" for name in _TRAINER_IDENTITY)
    return {
        key: value
        for key, value in _without(config, _NO_IDENTITY).items()
        if not key.startswith("trainer") or key.startswith(trainer)
    }


def in_common(config: Mapping[str, Any]) -> dict[str, Any]:
    """What all processes of a run must have been told: every key, dotted, but for what each may have by itself.

    Those are where data and results lie on a machine, the threads and devices of a process, and loggers, which the
    first process alone has.
    """
    return _without(config, _OWN_OF_A_PROCESS)


def _without(config: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """The keys of a configuration outside some sections; where data lie is in none of them."""
    return {
        key: value
        for key, value in _flatten(config)
        if not any(key == name or key.startswith(name + ".") for name in sections) and not _PLACE.fullmatch(key)
    }


def says_where(key: str) -> bool:
    """Whether a key says where a file of data lies; a checkpoint knows these by what they hold."""
    return _FILE.fullmatch(key) is not None


def care(config: Mapping[str, Any]) -> dict[str, Any]:
    """What becomes of clients that fail, where it is not the usual; a run that goes on may have it otherwise."""
    return {key: value for key, value in _flatten(config) if key in _CARE and value != _CARE[key]}


def course(config: Mapping[str, Any]) -> dict[str, Any]:
    """What may differ between a run and its continuation, but not between repeats: how long it is, and its care."""
    return {**{key: value for key, value in _flatten(config) if _LENGTH.match(key)}, **care(config)}


def rounding(config: Mapping[str, Any]) -> dict[str, Any]:
    """What changes no number but by rounding, and how long a round takes, where it is asked for."""
    return {key: value for key, value in _flatten(config) if key in _ROUNDING and value}


def computed_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two configurations of one run differ that say how it is computed: workers, cohorts, devices.

    They change no number but by rounding, and so tell no run from another; how long it takes, they change.
    """
    flat = [{k: v for k, v in _flatten(config) if k.startswith(_COMPUTED)} for config in (one, other)]
    keys = dict.fromkeys(key for own in flat for key in own if not key.endswith(".length"))
    return [key for key in keys if flat[0].get(key) != flat[1].get(key)]


def contents(config: Mapping[str, Any]) -> dict[str, str]:
    """What the files of weights hold that a run starts from: key -> first digits of their SHA-256.

    A file that cannot be read is left out. Data are not among them: a checkpoint knows those by their own hash.
    """
    found = {}
    for key, value in _flatten(config.get("model"), "model"):
        if key.endswith(".weights") and str(value).endswith(_WEIGHTS):
            with suppress(OSError):
                found[f"{key}{CONTENTS}"] = hashlib.sha256(content_of(expanded(value))).hexdigest()[:16]
    return found


def data_files(config: Mapping[str, Any]) -> dict[str, str]:
    """What the files hold that a configuration's data are read from: key -> first digits of their SHA-256.

    Folders are not among them (`last_change`). A run of the same files is the same wherever it is begun; one that goes
    on compares its data by their own hash.
    """
    named = _files(_flatten(config.get("data"), "data"))
    return {f"{key}{CONTENTS}": digest for key, digest in named.items()}


def own_files(config: Mapping[str, Any]) -> dict[str, str]:
    """What other files hold that a configuration's classes are given: key -> first digits of their SHA-256.

    What a method, a model or a metric of one's own reads of them is told by nothing else. Weights are not among them
    (`contents`), nor what callbacks, loggers and Trainer write into.
    """
    sections = ("method", "model", "optimizer", "metrics", "federation")
    keys = ((key, value) for name in sections for key, value in _flatten(config.get(name), name))
    named = _files((key, value) for key, value in keys if not key.startswith("federation.callbacks."))
    weights = contents(config)
    return {f"{key}{CODE}": digest for key, digest in named.items() if f"{key}{CONTENTS}" not in weights}


def reference_figures(config: Mapping[str, Any]) -> dict[str, str]:
    """What the run says of its clients with which `federation.evaluate.reference` compares: key -> digits, likewise.

    Of a table's cells alone: a run that goes on has in its checkpoint what it began with.
    """
    folder = (config["federation"].get("evaluate") or {}).get("reference")
    digest = _of_file(os.path.join(folder, "clients.csv")) if isinstance(folder, str) else ""
    return {f"federation.evaluate.reference{CONTENTS}": digest} if digest else {}


def _files(keys: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The keys of a class' arguments whose value is a file, with what it holds."""
    named = {key: value for key, value in keys if ".init_args." in key and isinstance(value, str)}
    return {key: digest for key, value in named.items() if (digest := _of_file(value))}


def _of_file(name: str) -> str:
    """The first digits of a file's SHA-256; empty where there is none of that name."""
    path = expanded(name)
    with suppress(OSError, ValueError, RuntimeError):  # no file's name
        if path.is_file():
            status = path.stat()
            return _digest(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ""


@lru_cache
def _digest(path: str, *_: int) -> str:
    """Of a file as it is at that size and those times of change; data may be large, so that it is not read at once."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()[:16]


def last_change(folder: str) -> float:
    """When something in a folder last changed, came or went, in seconds since the epoch; 0 where the folder is gone.

    By `mtime`, so that a file whose time is set back is not seen: `ctime` would tell of it, but also of every copy of
    the folder, long after what was made of it.
    """
    times = [0.0]
    for place, names in inside(folder):
        for name in (".", *names):
            with suppress(OSError):
                times.append(os.stat(os.path.join(place, name)).st_mtime)
    return max(times)


def folders(config: Mapping[str, Any]) -> dict[str, str]:
    """Where the folders lie that a configuration names and that hold what their owner put there: key -> path.

    No part of a run's identity, for they may be moved; but of two runs at once, two folders are two data sets. A data
    set that is published is the same wherever it lies.
    """
    dataset, found = dict(_flatten((config.get("data") or {}).get("dataset"), "data.dataset")), {}
    for key, value in dataset.items():
        root = key.removesuffix("class_path") + "init_args.root"
        if key.endswith("class_path") and root in dataset and not _is_published(str(value)):
            found[root] = os.path.realpath(expanded(str(dataset[root])))
    return found


def data_folders(config: Mapping[str, Any]) -> set[str]:
    """Where all folders lie that a configuration's data are read from, by whatever name a class calls them.

    Those of published data sets are not among them.
    """
    named, found = dict(_flatten(config.get("data"), "data")), set[str]()
    for key, value in named.items():
        owner, inner, argument = key.rpartition(".init_args.")
        if inner and isinstance(value, str) and "\0" not in value:
            published = argument == "root" and _is_published(str(named.get(f"{owner}.class_path")))
            path = os.path.realpath(expanded(value))
            found |= {path} if os.path.isdir(path) and not published else set()
    return found


@lru_cache
def _is_published(class_path: str) -> bool:
    """Whether a data set's content is told by its class: it knows a folder of its own, and need not be given one."""
    try:
        return parameters(load(class_path)).get("root", (None, EMPTY, ""))[1] is not EMPTY
    except UnreadableError:
        return False


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration, dotted, with their values; of a list its length, too. What is None is left out."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _flatten(value, f"{prefix}.{index}")
        yield f"{prefix}.length", len(node)
    elif node is not None:
        yield prefix, node
