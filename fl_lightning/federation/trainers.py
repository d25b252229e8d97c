"""The one Trainer of a process: its flags, its precision, its place among other processes, and its use again."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.descent import FitSettings, clip
from fl_lightning.core.steps import PRECISIONS, SHORT_PRECISIONS, ReadsWide, careful, keeps_casts
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.flags import TRAINER_DEFAULTS, UNHEEDED
from fl_lightning.federation.team import gpu_here, num_devices, started_outside
from fl_lightning.federation.transport import Waiting
from fl_lightning.heap import keep_freed_memory
from fl_lightning.own_methods import has_own, is_lightnings
from fl_lightning.terminal import say


def make_trainer(flags: Mapping[str, Any]) -> L.Trainer:
    """The one Trainer of a worker.

    Raises:
        ConfigError: if Lightning refuses a flag, or a GPU is asked for, or float16, where there is none.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.accelerators.cuda").setLevel(logging.WARNING)  # at every fit
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # teachers are, on purpose
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")  # other clients
    keep_freed_memory()
    if not torch.cuda.is_available():
        # Lightning lets torch ask the driver's library, which optimizers do at every step: a tenth of a small one.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    accelerator = flags.get("accelerator", "auto")
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator", "there is no GPU on this machine; use cpu or auto", accelerator)
    precision = _precision(flags.get("precision"), accelerator)
    own = flags.get("callbacks") or []
    check_kinds(own if isinstance(own, list) else [own])  # some Lightning refuses by other words
    try:
        trainer = L.Trainer(**{**TRAINER_DEFAULTS, **flags, "precision": precision, **_place_among_workers(flags)})
    except ConfigError:
        raise
    except Exception as error:  # whatever Lightning refuses: a type, a range, an extra that is not installed
        named = next((name for name in flags if re.search(rf"\b{name}\b", str(error))), None)
        raise ConfigError(f"trainer.{named}" if named else "trainer", str(error)) from error
    _leave_files_and_signals_alone(trainer)
    _report_once(trainer)
    if tries_out(trainer):  # Lightning's own limit of steps would end a fit in its first phase
        trainer.fit_loop.epoch_loop.max_steps = flags.get("max_steps", -1)
    strategy = trainer.strategy
    here = strategy.root_device.type
    synced = bool(flags.get("sync_batchnorm")) and here == "cpu" and not isinstance(strategy, SingleDeviceStrategy)
    require(not synced, "trainer.sync_batchnorm", "needs GPUs: torch has it for no CPU; leave it out", True)
    wide = here == "mps" and str(precision).startswith("64")
    require(not wide, "trainer.precision", "Apple's GPUs have no float64; use 32-true, or the CPU", precision)
    strategy.precision_plugin = careful(strategy.precision_plugin, here)
    if isinstance(strategy, SingleDeviceStrategy):
        # Lightning's own would move the module to the CPU after every fit, and empty the GPU's cache.
        strategy.teardown = strategy.precision_plugin.teardown  # type: ignore[method-assign]
    keep_apart(trainer)
    return trainer


def _leave_files_and_signals_alone(trainer: L.Trainer) -> None:
    """Take Lightning's own answers to signals away, and what it would load by itself when a fit starts.

    Under SLURM it would save one client's fit (``hpc_ckpt_1.ckpt``), requeue the job, and load that file into every
    later fit; SIGTERM would end a fit in its middle. A run is saved and stopped as a whole (`federation/signals.py`).
    """
    trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
    trainer._checkpoint_connector._select_ckpt_path = _nothing  # type: ignore[method-assign]


def _report_once(trainer: L.Trainer) -> None:
    """Let what Lightning prints at every fit be printed once: a model's summary; the profiler by `report_profile`."""
    is_main = not _together() or dist.get_rank() == 0  # each worker's Trainer takes itself for the only one
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, ModelSummary):
            each.on_fit_start = _once(each.on_fit_start) if is_main else _nothing
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profiler.describe_run, profiler.describe = profiler.describe, _nothing


def _once(function: Callable[..., None]) -> Callable[..., None]:
    """A function that does what it does when it is first called."""
    called = False

    def call(*arguments: Any) -> None:
        nonlocal called
        if not called:
            called = True
            function(*arguments)

    return call


def report_profile(trainer: L.Trainer) -> None:
    """Print the profiler's report, of all fits of this process together."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profiler.describe_run()


_LOGGER = "needs a logger inside the fit, which clients have not"
UNFIT: Mapping[tuple[str, ...], str] = {
    ("LearningRateMonitor",): f"{_LOGGER}; federation.lr_decay says the rate",
    ("DeviceStatsMonitor", "ThroughputMonitor"): f"{_LOGGER}; seconds are in metrics.csv",
    ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"): "needs a copy of the whole fit; "
    "weights are averaged by the federation (federation.server_optimizer)",
    ("BaseFinetuning", "BackboneFinetuning"): "needs a backbone of its own naming; a method's phases say what is "
    "trained when",
    ("BatchSizeFinder", "LearningRateFinder"): "searches before a single fit; fl-lightning tune searches for all",
    ("GradientAccumulationScheduler",): "needs Lightning's own steps; trainer.accumulate_grad_batches says the same",
    ("SpikeDetection",): "needs Lightning's own steps; federation.max_growth ends what explodes",
    (
        "ModelPruning",
    ): "needs names that stay, and gives parameters others in the first fit; masks are a method's business",
    (
        "ModelCheckpoint",
        "OnExceptionCheckpoint",
    ): "needs a fit that is saved by itself; federation.checkpoint says when "
    "a run is saved, models/ in its folder has every client's",
    ("TQDMProgressBar", "RichProgressBar"): "needs a single fit to show; the rounds have a display of their own (-v)",
}
"""Lightning's callbacks that would fail in the first client's fit, and what to use instead."""


_UNCALLED = (
    "on_validation_",
    "on_test_",
    "on_predict_",
    "on_sanity_check_",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
"""Beginnings of hooks that no fit of clients calls."""
_BY_KIND: Mapping[str, type] = {
    "LearningRateMonitor": LearningRateMonitor, "ModelCheckpoint": Checkpoint, "RichProgressBar": ProgressBar,
    "StochasticWeightAveraging": StochasticWeightAveraging,
    "GradientAccumulationScheduler": GradientAccumulationScheduler,
    **{
        name: getattr(callbacks, name)
        for name in (
            "WeightAveraging", "DeviceStatsMonitor", "ThroughputMonitor", "BatchSizeFinder", "LearningRateFinder",
            "SpikeDetection",
        )
        if hasattr(callbacks, name)  # some are younger than the oldest Lightning that this works with
    },
}  # fmt: skip
"""Those of which Lightning refuses classes of one's own, too, that derive from them."""


def check_kinds(given: Sequence[Any]) -> None:
    """Refuse callbacks of Lightning's that no client's fit can do with.

    Raises:
        ConfigError: naming the first.
    """
    for each in given:
        name = type(each).__name__
        kind = next((kind for kind, base in _BY_KIND.items() if isinstance(each, base)), name)
        theirs = kind != name or is_lightnings(type(each))  # a class of one's own knows better
        why = next((rule for kinds, rule in UNFIT.items() if theirs and kind in kinds), "")
        require(not why, "trainer.callbacks", f"{name} {why}", name)


def check_callbacks(trainer: L.Trainer, logged: Collection[str], others: bool = False) -> None:
    """Refuse callbacks that would fail in every client's fit.

    Args:
        trainer: of the fits.
        logged: names of the values that a fit logs.
        others: whether it may log others, too.

    Raises:
        ConfigError: for one of Lightning's that no client's fit can do with, that watches a value that no fit has, or
            that would look, or let train, at no time.
    """
    given = trainer.callbacks  # type: ignore[attr-defined]
    check_kinds(given)
    own = others or any(not is_lightnings(type(each)) for each in given)  # who may log anything
    for each in given:
        name, watched = type(each).__name__, getattr(each, "monitor", None)
        known = own or watched is None or watched in logged or not getattr(each, "strict", True)
        require(known, "trainer.callbacks", f"{name} can watch what a client's fit logs: {', '.join(logged)}", watched)
        looks = getattr(each, "_check_on_train_epoch_end", None) is not False
        rule = f"{name} would never look: a fit validates nothing; leave check_on_train_epoch_end out"
        require(looks, "trainer.callbacks", rule)
        some = not isinstance(each, Timer) or each._duration is None or each._duration > 0
        require(some, "trainer.callbacks", "Timer leaves a fit no time: its duration must be above 0")
        hooks = _hooks_of(each)
        rule = f"{name} does something in {', '.join(hooks)} alone, which no client's fit calls: it trains, and "
        rule += "federation.evaluate tests; take on_train_epoch_end, or a FederationCallback"
        require(not hooks or any(not hook.startswith(_UNCALLED) for hook in hooks), "trainer.callbacks", rule)


def _hooks_of(callback: L.Callback) -> list[str]:
    """The hooks in which a callback does something."""
    names = [name for name in vars(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    return [name for name in names if has_own(callback, L.Callback, name)]


def sees_batches(trainer: L.Trainer) -> bool:
    """Whether one of Lightning's steps must be one mini-batch.

    A callback that is not Lightning's may look at single ones, or reckon with how many there are; a precision plugin
    that is not may keep casts of weights for as long as a step lasts.
    """
    given = trainer.callbacks  # type: ignore[attr-defined]
    own = (isinstance(each, LambdaCallback) or not is_lightnings(type(each)) for each in given)
    return any(own) or keeps_casts(trainer.precision_plugin)


class ClipsLast(L.Callback):
    """Clips gradients when all other callbacks have seen them whole, as Lightning does.

    Args:
        settings: how.
    """

    def __init__(self, settings: FitSettings) -> None:
        self.settings = settings

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Clip them."""
        clip(self.settings, [optimizer])


def clip_last(trainer: L.Trainer, settings: FitSettings) -> FitSettings:
    """Clip after callbacks that look at gradients before a step, where there are any, and not in the step itself."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    looks = any(has_own(each, L.Callback, "on_before_optimizer_step") for each in callbacks)
    if settings.clip_value is None or not looks:
        return settings
    callbacks.append(ClipsLast(settings))
    return replace(settings, clips_itself=False)


def tries_out(trainer: L.Trainer) -> bool:
    """Whether fits are tried out: one epoch of every phase, of so many mini-batches as `fast_dev_run` says."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def most_batches(trainer: L.Trainer, batches: int) -> int:
    """How many of an epoch's mini-batches a fit passes; `overfit_batches` and `fast_dev_run` set the same limit."""
    most: int | float = trainer.limit_train_batches  # type: ignore[attr-defined]
    return int(batches * most) if isinstance(most, float) else min(batches, most)


def keep_apart(trainer: L.Trainer) -> None:
    """Let layers and metrics see what this process sees, where workers fit clients of their own.

    Metrics of torchmetrics and `SyncBatchNorm` add up over all processes of a group wherever there is one: over other
    clients, and as often as each process asks, so that the main one, or a worker with one client more, would wait for
    ever. Whose they are, and when they were made, is no matter. Processes that share a fit do add up.
    """
    works_apart = dist.is_available() and dist.is_initialized() and isinstance(trainer.strategy, SingleDeviceStrategy)
    torchmetrics.Metric.sync = _nothing if works_apart else _SYNC  # type: ignore[method-assign]
    nn.SyncBatchNorm.forward = _BatchNorm.forward if works_apart else _SYNC_NORM  # type: ignore[method-assign]


_SYNC, _SYNC_NORM = torchmetrics.Metric.sync, nn.SyncBatchNorm.forward


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _precision(precision: Any, accelerator: Any) -> Any:
    """The full name of a precision; float16 without a GPU is refused, where Lightning would take bfloat16 instead."""
    named = SHORT_PRECISIONS.get(str(precision), precision)
    known = precision is None or named in PRECISIONS
    require(known, "trainer.precision", f"must be one of {', '.join(PRECISIONS)}", precision)
    gpu = _has_gpu(accelerator)
    narrow = str(named).replace("16", "bf16", 1)
    rule = f"float16 needs a GPU, and this run has none; use {narrow}"
    require(gpu or not str(named).startswith("16"), "trainer.precision", rule, precision)
    return named


def _has_gpu(accelerator: Any) -> bool:
    """Whether a Trainer of this accelerator would work on a GPU of this machine."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    return {"cpu": False, "gpu": cuda, "cuda": cuda, "mps": mps}.get(accelerator, cuda or mps)


def for_reading(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a Trainer that fits nobody: a run's own, or the CPU's where they need a GPU that is not there.

    The CPU reads float16 as float32. A line says so. What is of fits alone is left out, which is refused by now where
    it does not fit, and was not when the run was made.

    Args:
        flags: of the run's Trainer.
    """
    flags = {name: value for name, value in flags.items() if name not in (*UNHEEDED, "max_steps")}
    accelerator, devices = flags.get("accelerator", "auto"), flags.get("devices", 1)
    half = str(flags.get("precision")).startswith("16")
    names_gpus = devices != "auto" and not (str(devices).isdigit() and int(devices) > 0)
    needs_gpu = half or accelerator in ("gpu", "cuda", "mps") or (accelerator == "auto" and names_gpus)
    if not needs_gpu or _has_gpu(accelerator):
        return dict(flags)
    say(f"trainer: there is no GPU on this machine, so the CPU reads the run{', float16 as float32' if half else ''}")
    place = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "sync_batchnorm": False}
    if not half:
        return {**flags, **place}
    plugins = flags.get("plugins") or []
    plugins = plugins if isinstance(plugins, list) else [plugins]
    return {**flags, **place, "precision": None, "plugins": [*plugins, ReadsWide()]}


def _place_among_workers(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a Trainer in one of several processes: its own device, or all of them for one fit.

    Raises:
        ConfigError: for a strategy that cannot share a fit, or machines that nobody has started.
    """
    _check_nodes(flags)
    if num_devices(flags) > 1:
        allowed = flags.get("strategy", "auto") in ("auto", "ddp")
        require(allowed, "trainer.strategy", "must be ddp where trainer.devices is above 1", flags.get("strategy"))
        return {"strategy": UnwrappedDDP()}
    plugins = flags.get("plugins") or []
    plugins = plugins if isinstance(plugins, list) else [plugins]
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins = [*plugins, LightningEnvironment()]  # not torchrun's or SLURM's
    on_gpu = flags.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    strategy = flags.get("strategy", "auto")
    if strategy == "ddp" or isinstance(strategy, DDPStrategy):
        strategy = "auto"  # with one device there is nobody to talk to, and a group of processes would stay behind
    placed = {"plugins": plugins, "strategy": strategy}
    return {**placed, **({"devices": [gpu_here()]} if _together() and on_gpu else {})}


def _together() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def _check_nodes(flags: Mapping[str, Any]) -> None:
    """Refuse machines for which every fit would wait for half an hour."""
    asked, several = flags.get("num_nodes") or 1, num_devices(flags) > 1
    nodes = started_outside()[1] if several else 1
    rule = f"must be the machines of the run ({nodes})" if several else "must be 1: a client's fit has one machine"
    more = "torchrun or SLURM start federation.workers on several"
    require(asked in (1, nodes), "trainer.num_nodes", f"{rule}; {more}", asked)


class UnwrappedDDP(DDPStrategy):
    """Lightning's DDP without the wrapper around the module: clients average their gradients (`core/devices.py`)."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    # A fit begins with these two, at which the main device may be late: a federation callback takes its time.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other devices."""
        with Waiting.context():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Hear what one of the devices says."""
        with Waiting.context():
            return super().broadcast(obj, src)
