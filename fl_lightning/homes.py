"""Where a key that has no section belongs: what it was probably meant to be is named, whoever taught it."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning import catalog
from fl_lightning.command_line import SECTIONS
from fl_lightning.errors import ConfigError, suggest

_MEANT = {
    "accelerator": "trainer.accelerator", "algo": "method", "algorithm": "method", "clients": "data.num_clients",
    "device": "trainer.accelerator", "devices": "trainer.devices", "epochs": "federation.local_epochs",
    "gpu": "trainer.accelerator", "gpus": "trainer.devices", "join_ratio": "federation.participation",
    "learning_rate": "optimizer.lr", "lr": "optimizer.lr", "momentum": "optimizer.momentum",
    "precision": "trainer.precision", "weight_decay": "optimizer.weight_decay",
}  # fmt: skip
"""Names without a section, and those of other programs, beside the keys of data and federation."""
_FLAGS = {
    "algo": "method", "data": "data.dataset", "dev": "trainer.accelerator", "eg": "federation.evaluate_every",
    "gr": "federation.rounds", "jr": "federation.participation", "lbs": "data.batch_size", "ld": "federation.lr_decay",
    "lr": "optimizer.lr", "ls": "federation.local_epochs", "m": "model", "nc": "data.num_clients",
}  # fmt: skip
"""PFLlib's options."""
_OF_TABLES = ("base", "columns", "goal", "rows", "space", "title")
"""Keys that only files of tables and searches have."""


def no_section(key: str, options: Sequence[str] = ()) -> ConfigError:
    """The error about a key of a section that there is none of.

    Args:
        key: dotted.
        options: what else the command has, which is no section.
    """
    name = key.partition(".")[0]
    if name in _OF_TABLES:
        return ConfigError(key, "belongs to the file of a table or a search: fl-lightning table FILE, or tune FILE")
    owners = (section for section, owner in catalog.GROUPS.items() if name in (catalog.options(owner) or ()))
    meant = _MEANT.get(name) or next((f"{section}.{name}" for section in owners), None)
    hint = suggest(name, (*SECTIONS, *options)) if meant is None else f"did you mean {meant}?"
    what = "section or option" if options and meant is None else "section"
    return ConfigError(key, f"there is no such {what}; {hint}")


def no_option(word: str) -> ConfigError | None:
    """The error about a word of a command line that is no option, as other programs have them; None if it is none."""
    key, equals, value = word.partition("=")
    if equals and key.partition(".")[0] in SECTIONS:
        return ConfigError(word, f"an option begins with two dashes: --{key} {value}")
    flag = word[1:]
    if word[:1] == "-" and flag in _FLAGS:
        return ConfigError(word, f"there is no such option; did you mean --{_FLAGS[flag]}?")
    return None
