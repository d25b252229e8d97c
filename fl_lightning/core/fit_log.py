"""What Lightning's callbacks hear of a local fit's losses, and what is logged in it beside them."""

from __future__ import annotations

from collections.abc import Mapping

import lightning as L

from fl_lightning.core.meter import LossMeter, loss_column


class FitLog:
    """The log of one client's fit after another; nothing is done where no callback listens."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        """What callbacks and a model of the user's own have logged in the last fit: of each name its last epoch's."""
        self._told: tuple[LossMeter | None, int] = None, 0

    def tell(self, module: L.LightningModule, meter: LossMeter, is_last: bool = True) -> None:
        """Hand the fit's mean losses to the trainer, for callbacks that read `callback_metrics`; it takes milliseconds.

        Once an epoch: in its last step, since callbacks hear of its end before the module does, or at its end where it
        was cut short.
        """
        here, trainer = (meter, module.current_epoch), module.trainer
        if not trainer.callbacks or self._told == here:  # type: ignore[attr-defined]
            return
        if is_last or 0 < trainer.max_steps <= trainer.global_step:
            means = {loss_column(name): value for name, value in meter.means().items()}
            module.log_dict(means, on_step=False, on_epoch=True, batch_size=1)
            self._told = here

    def end(self, module: L.LightningModule, meter: LossMeter, own: Mapping[str, float]) -> None:
        """The fit has ended: take down what was logged in it.

        Args:
            module: the client.
            meter: of the fit's losses, which stand elsewhere.
            own: what a model of the user's own has logged.
        """
        self.values = {}
        if module.trainer.callbacks:  # type: ignore[attr-defined]
            losses = set(map(loss_column, meter.losses))
            logged = module.trainer.callback_metrics
            self.values = {name: float(value) for name, value in logged.items() if name not in losses}
        self.values |= own
