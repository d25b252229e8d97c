"""What Lightning's callbacks hear of a local fit's losses, and what is logged in it beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from fl_lightning.core.meter import LossMeter, loss_column
from fl_lightning.errors import require
from fl_lightning.models.own_training import OwnTraining


def logged_names(fits: Iterable[tuple[Iterable[str], OwnTraining]]) -> tuple[list[str], bool]:
    """Names of what all fits log for callbacks, and whether all may log others.

    Args:
        fits: of each kind of client the names of the losses that are taken down, and the model's share in the fit.
    """
    known = [([*map(loss_column, losses), *sorted(own.logs or ())], own.logs is None) for losses, own in fits]
    sure = [names for names, others in known if not others] or [names for names, _ in known]
    return [name for name in sure[0] if all(name in names for names in sure)], all(others for _, others in known)


class FitLog:
    """The log of one client's fit after another; nothing is done where no callback listens."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        """What callbacks and a model of the user's own have logged for loggers in the last fit: its last epoch's."""
        self._told: tuple[LossMeter | None, int] = None, 0
        self._said: Mapping[str, float] = {}
        self._of_model: set[str] = set()

    def tell(self, module: L.LightningModule, meter: LossMeter, own: OwnTraining, is_last: bool) -> None:
        """Hand an epoch's mean losses to the trainer, for callbacks that read `callback_metrics`; it takes a while.

        So are the means of what a model of the user's own has logged, whose names give way to those of the losses.
        Once an epoch: in its last step, since callbacks hear of its end before the module does, or at its end where it
        was cut short.
        """
        here, trainer = (meter, module.current_epoch), module.trainer
        if not trainer.callbacks or self._told == here:  # type: ignore[attr-defined]
            return
        if is_last or 0 < trainer.max_steps <= trainer.global_step:
            logged = own.logged_in_epoch()
            self._told, self._said = here, {**logged, **_columns(meter)}
            self._of_model |= logged.keys()
            _log(module, self._said)

    def end_epoch(self, module: L.LightningModule, meter: LossMeter, logged: Mapping[str, float]) -> None:
        """The same at an epoch's end, which a model of the user's own has seen: it may log something then, too.

        Args:
            module: the client.
            meter: of the fit's losses.
            logged: what the model has logged in the epoch.

        Raises:
            ConfigError: if Lightning's EarlyStopping watches what nothing has logged.
        """
        trainer = module.trainer
        if not trainer.callbacks:  # type: ignore[attr-defined]
            return
        said = self._said if self._told == (meter, module.current_epoch) else {}
        losses = set(map(loss_column, meter.losses))
        late = {name: value for name, value in logged.items() if name not in losses and said.get(name) != value}
        self._of_model |= logged.keys()
        _log(module, late if said else {**late, **_columns(meter)})
        _check_watched(trainer.callbacks, trainer)  # type: ignore[attr-defined]
        meter.end_epoch()

    def end(self, module: L.LightningModule, meter: LossMeter, own: Mapping[str, float]) -> None:
        """The fit has ended: take down what was logged in it.

        Args:
            module: the client.
            meter: of the fit's losses, which stand elsewhere.
            own: what a model of the user's own has logged for the run; the rest of it is at hand in the fit alone.
        """
        self.values, of_model, self._of_model = {}, self._of_model, set()
        if module.trainer.callbacks:  # type: ignore[attr-defined]
            elsewhere = {*map(loss_column, meter.losses), *of_model}
            known, shown = module.trainer.callback_metrics, module.trainer.logged_metrics
            own_names = (name for name in known if name in shown or f"{name}_epoch" in shown)  # of both levels, three
            self.values = {name: float(known[name]) for name in own_names if name not in elsewhere}
        self.values |= own


def _columns(meter: LossMeter) -> dict[str, float]:
    return {loss_column(name): value for name, value in meter.epoch_means().items()}


def _log(module: L.LightningModule, values: Mapping[str, float]) -> None:
    if values:
        module.log_dict(dict(values), on_step=False, on_epoch=True, batch_size=1)


def _check_watched(callbacks: Iterable[L.Callback], trainer: L.Trainer) -> None:
    for each in callbacks:
        if isinstance(each, EarlyStopping) and each.strict:
            logged = trainer.callback_metrics
            rule = f"{type(each).__name__} watches what this client's fit does not log; it has {', '.join(logged)}"
            require(each.monitor in logged, "trainer.callbacks", rule, each.monitor)
