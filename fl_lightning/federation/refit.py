"""Fits after a module's first one: they start where Lightning's own way into a fit has led before.

`Trainer.fit` connects, verifies, sets up and takes down; for a client's fit of a few small steps that takes as long as
the steps. A module's first fit goes that way whole. In later ones the Trainer, the module, its place and the kind of
its data are as they were: what remains is the module's optimizers, every hook of callbacks, and Lightning's own loop.
Nothing public of Lightning enters a fit in its middle. What is used of its inside is in this file alone;
`tests/federation/test_refit.py` compares hooks, results and the Trainer's state of both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from fl_lightning.core.message import bits_of
from fl_lightning.errors import require
from fl_lightning.federation.directory import directory_kept
from fl_lightning.federation.flags import limits, told
from fl_lightning.own_methods import is_lightnings, overrides
from fl_lightning.running_on import speaks_for_all
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.core.client import ClientModule

_BY_FIT = {"logger", "profiler", "barebones", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"}


_TAKEN_OUT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
"""What the method's steps do by themselves. Lightning refuses a fit that begins with them; callbacks read them."""


class Fits:
    """Fits modules with one Trainer, one fit after another.

    Args:
        trainer: of all fits.
        flags: that the configuration says, also of what the method's steps do by themselves.
    """

    def __init__(self, trainer: L.Trainer, flags: Mapping[str, Any]) -> None:
        self.trainer = trainer
        plain = isinstance(trainer.strategy, SingleDeviceStrategy) and not trainer.loggers
        plain = plain and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        others = _BY_FIT & told({name: value for name, value in flags.items() if value is not False})
        self.shortens = plain and not limits(flags) and not others
        """Whether fits after a module's first one are shortened."""
        self._entered: set[int] = set()
        self._wanders = self._was_cut = False
        own = (each for each in trainer.callbacks if _has_state(each))  # type: ignore[attr-defined]
        self._callbacks = [(each, copy.deepcopy(each.state_dict())) for each in own]
        timers = (each for each in trainer.callbacks if isinstance(each, Timer))  # type: ignore[attr-defined]
        self._timers = [(each, copy.deepcopy(vars(each))) for each in timers]
        self._without = {name: getattr(trainer, name) for name in _TAKEN_OUT}
        self._told = {name: flags.get(name, value) for name, value in self._without.items()}
        self._tells = _Tells(self._told)

    def fit(self, module: ClientModule, bundles: Sized, epochs: int) -> None:
        """Fit a module for some epochs, from epoch 0 and step 0.

        Raises:
            ConfigError: if it changes what is frozen and the same for all.
        """
        start_anew(self.trainer)
        for callback, unused in self._callbacks:  # or one client's losses would end the next one's fit
            callback.load_state_dict(copy.deepcopy(unused))
        for timer, unused in self._timers:  # or the first fit's end would end every later one before its first step
            vars(timer).update(copy.deepcopy(unused))
        self.trainer.fit_loop.max_epochs = epochs
        known = self.shortens and id(module) in self._entered
        self._entered.discard(id(module))  # a fit that breaks off leaves nothing to start from
        unset = self._unset() if self.trainer.callbacks else nullcontext()  # type: ignore[attr-defined]
        with self._untouched(module), directory_kept(self._say_of_directory), unset:
            if known:
                self._fit_again(module, bundles)
            else:
                self.trainer.fit(module, train_dataloaders=bundles)
        self._entered.add(id(module))
        self._look_at_end(module)

    def _look_at_end(self, module: ClientModule) -> None:
        """Say, once, what a fit lacks that has ended before its last epoch."""
        fit, method = module.method.fit, module.method
        if self._was_cut or fit.in_last_epoch:
            return
        begun, *_ = module.fitting.at(fit.epoch)
        later = ", ".join(planned.phase.name for planned in module.fitting[begun + 1 :])
        waiting = ", ".join(type(term).__name__ for term in method.terms if term.needs_whole_epochs)
        lacks = [f"nothing was trained in {later}"] if later else []
        lacks += [f"there is nothing yet of what {waiting} averages in that epoch"] if waiting else []
        self._was_cut = bool(lacks)
        if lacks and speaks_for_all():
            who = f"a callback, trainer.max_time or max_steps ended a fit of {type(method).__name__}"
            say(f"fl-lightning: {who} before its last epoch: {'; '.join(lacks)}")

    def _say_of_directory(self) -> None:
        """Once, for it may be so in every fit."""
        if not self._wanders:
            say("fl-lightning: a callback or model changes the working directory in its fits; it is set back each time")
        self._wanders = True

    @contextmanager
    def _unset(self) -> Iterator[None]:
        """A stretch in which callbacks may not set what of the Trainer local fits do not follow."""
        self.trainer.callbacks.insert(0, self._tells)  # type: ignore[attr-defined]
        try:
            yield
            found = {name: getattr(self.trainer, name) for name in _TAKEN_OUT}
        finally:  # for the next fit to begin with
            self.trainer.callbacks.remove(self._tells)  # type: ignore[attr-defined]
            _set(self.trainer, self._without)
        for name, value in self._told.items():
            own = found[name]
            rule = f"a callback set it to {own} in a fit, which does not follow that; say it in the configuration"
            require(own == value, f"trainer.{name}", rule)
        rule = (
            "a callback set trainer.strategy.lr_scheduler_configs, which no fit follows; say them in a LightningModule"
        )
        require(not self.trainer.lr_scheduler_configs, "trainer.callbacks", rule)

    @contextmanager
    def _untouched(self, module: ClientModule) -> Iterator[None]:
        """A stretch that may not change parameters which are neither exchanged nor put back."""
        before = bits_of(module.division.fixed_entries())  # a write by `.data` has no version
        yield
        after = bits_of(module.division.fixed_entries())
        changed = next((name for name, total in after.items() if total != before[name]), None)
        rule = f"{changed} comes frozen, and so does not travel, but a fit changed it: freeze it in on_fit_start"
        require(changed is None, "model", f"{rule}, or make it a buffer")

    def _fit_again(self, module: ClientModule, bundles: Sized) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        strategy._lightning_module = module
        trainer.state.fn = TrainerFn.FITTING
        trainer.state.status = TrainerStatus.RUNNING
        trainer.training = True  # type: ignore[attr-defined]
        call._call_and_handle_interrupt(trainer, self._run, module, bundles)

    def _run(self, module: ClientModule, bundles: Sized) -> None:
        trainer, strategy, stage = self.trainer, self.trainer.strategy, TrainerFn.FITTING
        loader, trainer.fit_loop._combined_loader = trainer.fit_loop._combined_loader, None
        strategy.connect(module)
        module.trainer = trainer
        trainer._callback_connector._attach_model_logging_functions()
        call._call_callback_hooks(trainer, "setup", stage=stage)
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        strategy.optimizers = module.configure_optimizers()
        strategy.setup_precision_plugin()
        call._call_callback_hooks(trainer, "on_fit_start")
        self._feed(bundles, loader)
        with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
            trainer.fit_loop.run()
        trainer._teardown()
        call._call_callback_hooks(trainer, "on_fit_end")
        call._call_callback_hooks(trainer, "teardown", stage=stage)
        module._current_fx_name = None
        module._metric_attributes = None
        trainer.state.status = TrainerStatus.FINISHED
        trainer.state.stage = None
        trainer.training = False  # type: ignore[attr-defined]

    def _feed(self, bundles: Sized, loader: Any) -> None:
        """Give the loop its data in the last fit's loader, as `setup_data` does once it knows what kind they are of."""
        trainer, loop, length = self.trainer, self.trainer.fit_loop, len(bundles)
        loop._data_source.instance = bundles
        loader.flattened, loader.limits = [bundles], [length]
        loop._combined_loader = loader
        loop._data_fetcher = _PrefetchDataFetcher()  # what a step that takes a batch, and no iterator, is given
        loop._data_fetcher.setup(loader)
        iter(loop._data_fetcher)
        loop.max_batches = trainer.val_check_batch = length
        loop._last_train_dl_reload_epoch = 0


class _Tells(Callback):
    """Lets callbacks, which come after it, read what the configuration says and Lightning must not see before.

    Args:
        told: values of the Trainer's attributes.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A fit begins."""
        _set(trainer, self.told)


def _set(trainer: L.Trainer, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(trainer, name, value)


def _has_state(callback: Callback) -> bool:
    """Whether a callback's state follows a fit; Lightning's others keep in it what the Trainer does."""
    kind = type(callback)
    own = overrides(kind, Callback, "state_dict") and not is_lightnings(kind)
    return own or isinstance(callback, EarlyStopping)


def start_anew(trainer: L.Trainer) -> None:
    """Let a Trainer that has fitted fit again, from epoch 0 and step 0."""
    loop = trainer.fit_loop
    loop.epoch_progress.reset()
    loop.epoch_loop.batch_progress.reset()
    loop.epoch_loop._batches_that_stepped = 0
    loop.epoch_loop.manual_optimization.optim_step_progress.reset()
    loop.epoch_loop.automatic_optimization.optim_progress.reset()
    trainer.should_stop = False
