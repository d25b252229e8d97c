"""Hooks that somebody gives a network within a fit, a callback or a module of the user's own: they go with the fit."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from fl_lightning.models.copying import hook_tables
from fl_lightning.running_on import speaks_for_all
from fl_lightning.terminal import say


class FitHooks:
    """Takes away what was registered since a fit began: one module stands for all clients, which would gather them.

    Args:
        module: what is fitted.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._since: int | None = None
        self._was_said = False

    def begin(self) -> None:
        """A fit begins; what was registered before it stays."""
        self._since = RemovableHandle.next_id

    def end(self) -> None:
        """It is over, or has broken off."""
        since, self._since = self._since, None
        if since is None or since == RemovableHandle.next_id:
            return
        for place, table in hook_tables(self._module):
            for number in [number for number in table if number >= since]:
                del table[number]
                self._say(place)

    def _say(self, place: str) -> None:
        """Once: who has registered it for all fits in the first one learns that it is not there any more."""
        if not self._was_said and speaks_for_all():
            say(f"fl-lightning: a hook that {place} was given in a local fit ends with it; register one in every fit")
        self._was_said = True
