"""What flags of Lightning's Trainer mean here, and which of their values would train nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fl_lightning.errors import ConfigError, require

# What the runner itself decides; a value from the configuration would be overwritten or could not work.
TRAINER_DEFAULTS: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
    "devices": 1,
}
_TOGETHER = frozenset({
    "accelerator", "devices", "num_nodes", "precision", "deterministic", "benchmark", "gradient_clip_val",
    "gradient_clip_algorithm", "accumulate_grad_batches", "max_epochs", "num_sanity_val_steps", "log_every_n_steps",
    "check_val_every_n_epoch", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "inference_mode",
    "use_distributed_sampler", "default_root_dir", "callbacks", "val_check_interval",
    "reload_dataloaders_every_n_epochs",
})  # fmt: skip
"""Flags that a fit of several clients heeds, or that mean nothing in any."""
_PRECISIONS = ("32", "32-true", "64", "64-true", "bf16", "bf16-mixed")  # float16's scaler is one client's
MOST_DEVICES = 256
MOST_NODES = 10_000
_AT_LEAST = {
    "accumulate_grad_batches": 1, "min_steps": 0, "log_every_n_steps": 0, "fast_dev_run": 0,
    "reload_dataloaders_every_n_epochs": 0, "check_val_every_n_epoch": 1,
}  # fmt: skip
_SHARES = ("limit_train_batches", "overfit_batches")
_TESTED = "clients are tested on all of their test parts; federation.evaluate_every says how often"
UNHEEDED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "limit_val_batches": ((None, 0, 0.0, 1.0), "a fit validates nothing; data.validation_fraction sets parts aside"),
    "limit_test_batches": ((None, 1.0), _TESTED),
    "limit_predict_batches": ((None, 1.0), _TESTED),
    "num_sanity_val_steps": ((None, 0), "a fit validates nothing; every model is tried out before the first one"),
    "inference_mode": ((None, True), "it is of Lightning's own tests, and the federation tests by itself"),
}
"""Flags of what no client's Trainer does: the values that change nothing, and what there is instead."""
IDLE = frozenset({
    *UNHEEDED, "val_check_interval", "check_val_every_n_epoch", "reload_dataloaders_every_n_epochs",
    "use_distributed_sampler", "enable_autolog_hparams", "model_registry",
})  # fmt: skip
"""Flags that nobody is told of: what would change something is refused, and of the last four nothing does."""


def check_flags(flags: Mapping[str, Any]) -> None:
    """Refuse flags that Lightning takes without a word and that mean nothing, or that no client would be trained.

    Raises:
        ConfigError: with the flag's key.
    """
    for name, least in _AT_LEAST.items():
        value = flags.get(name)
        require(value is None or value >= least, f"trainer.{name}", f"must be >= {least}", value)
    for name in _SHARES:
        _check_share(f"trainer.{name}", flags.get(name), name == "limit_train_batches")
    for name, (idle, instead) in UNHEEDED.items():
        value = flags.get(name)
        same = any(type(value) is type(own) and value == own for own in idle)  # 1 is one mini-batch, 1.0 are all
        require(same, f"trainer.{name}", f"must be left out: {instead}", value)
    clip = flags.get("gradient_clip_val")
    require(clip is None or clip > 0, "trainer.gradient_clip_val", "must be above 0; null clips nothing", clip)
    algorithm = flags.get("gradient_clip_algorithm")
    known = algorithm in (None, "norm", "value")
    require(known, "trainer.gradient_clip_algorithm", "must be norm or value", algorithm)
    steps = flags.get("max_steps", -1)
    require(steps == -1 or steps >= 1, "trainer.max_steps", "must be >= 1, or -1 for no limit", steps)
    strategy = flags.get("strategy")
    spawned = isinstance(strategy, str) and strategy.startswith("ddp_")
    require(not spawned, "trainer.strategy", "must be ddp, whose processes the run starts by itself", strategy)
    devices = flags.get("devices", 1)
    if isinstance(devices, int):
        allowed = f"must be from 1 to {MOST_DEVICES}, or -1 for all GPUs"
        require(devices == -1 or 1 <= devices <= MOST_DEVICES, "trainer.devices", allowed, devices)
    nodes = flags.get("num_nodes", 1)
    require(1 <= nodes <= MOST_NODES, "trainer.num_nodes", f"must be from 1 to {MOST_NODES}", nodes)
    rule = "a fit validates nothing (federation.evaluate_every says when clients are evaluated): must be null"
    interval, epochs = flags.get("val_check_interval"), flags.get("check_val_every_n_epoch")
    require(interval in (None, 1), "trainer.val_check_interval", rule, interval)
    require(epochs in (None, 1), "trainer.check_val_every_n_epoch", rule.replace("null", "null or 1"), epochs)
    if flags.get("max_time") is not None:
        _check_time(flags["max_time"])


def check_batches(flags: Mapping[str, Any], num_batches: int) -> None:
    """Refuse a share of the mini-batches that leaves a client none.

    Args:
        flags: of the Trainer.
        num_batches: of the client that has fewest.

    Raises:
        ConfigError: with the flag's key.
    """
    for name in _SHARES:
        share = flags.get(name)
        if isinstance(share, float) and share > 0:
            rule = f"leaves the smallest client none of its {num_batches} mini-batches; take more, or a whole number"
            require(int(share * num_batches) >= 1, f"trainer.{name}", rule, share)


def told(flags: Mapping[str, Any]) -> set[str]:
    """The flags that say something else than Lightning's defaults, which a resolved configuration has all of.

    Args:
        flags: of the Trainer.
    """
    import lightning as L  # takes seconds, and the command line asks this module before it needs it

    usual = inspect.signature(L.Trainer.__init__).parameters
    defaults = {name: usual[name].default if name in usual else None for name in flags}
    return {name for name, value in flags.items() if value is not None and value != defaults[name]}


def limits(flags: Mapping[str, Any]) -> set[str]:
    """The flags that may end a fit before its epochs are through, as Lightning's Trainer takes them.

    A whole number counts mini-batches and a fraction is a share of them: 1 is one mini-batch, 1.0 is all. A
    ``fast_dev_run`` of true is one mini-batch.

    Args:
        flags: of the Trainer.
    """
    shares = {name: flags.get(name) for name in _SHARES}
    found = {name for name, of in shares.items() if of and not (isinstance(of, float) and of == 1)}
    found |= {name for name in ("fast_dev_run", "max_time") if flags.get(name)}
    return found if flags.get("max_steps", -1) in (None, -1) else {*found, "max_steps"}


def unstacked_flag(flags: Mapping[str, Any]) -> str:
    """The first flag that only a client's own Trainer heeds; empty where none is set.

    Args:
        flags: of the Trainer.
    """
    own = told(flags)
    for name in flags:
        if name in own and name not in _TOGETHER and flags[name] != TRAINER_DEFAULTS.get(name):
            return name
    precision = str(flags.get("precision") or 32)
    many = flags.get("devices", 1) not in (1, "auto", "1")
    return "devices" if many else "precision" if precision not in _PRECISIONS else ""


def _check_share(key: str, value: Any, trains: bool) -> None:
    """A number of batches, or a share of them; 0 only where nothing depends on it."""
    if value is None or (value == 0 and not trains):
        return
    if isinstance(value, float):
        require(0 < value <= 1, key, "a share must be in (0, 1], a number of batches a whole number >= 1", value)
    require(value >= 1 or isinstance(value, float), key, "must be >= 1 batches; null takes all", value)


def _check_time(given: Any) -> None:
    rule = "must be DD:HH:MM:SS, or days, hours, minutes and seconds by name, and above 0"
    if isinstance(given, Mapping):
        try:
            length = timedelta(**given)
        except (TypeError, OverflowError) as error:
            raise ConfigError("trainer.max_time", rule, given) from error
    elif isinstance(given, timedelta):
        length = given
    else:
        found = re.fullmatch(r"(\d{1,5}):(\d\d):(\d\d):(\d\d)", str(given))
        require(found is not None, "trainer.max_time", rule, given)
        assert found is not None
        days, hours, minutes, seconds = map(int, found.groups())
        length = timedelta(days, seconds, minutes=minutes, hours=hours)
    require(length > timedelta(0), "trainer.max_time", rule, given)
