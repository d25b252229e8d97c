"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fl_lightning.errors import ConfigError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file beside `path`, sync it, rename it, sync the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def save_tensors(path: Path, state: Any) -> None:
    """Save plain containers of tensors atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_tensors(path: Path, key: str) -> Any:
    """Load what `save_tensors` wrote, with ``weights_only=True``.

    Raises:
        ConfigError: with `key`, if the file is missing, cut short or something else.
    """
    if not path.is_file():
        raise ConfigError(key, f"there is no file {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for damaged files
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(key, f"{path} is cut short or not a checkpoint ({first[:120]})") from error


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
