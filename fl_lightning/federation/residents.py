"""The resident modules, one an architecture, and what their clients begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule, FitSettings
from fl_lightning.core.facts import Facts
from fl_lightning.core.freezing import training
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.errors import ConfigError, place_of
from fl_lightning.federation.alike import make_alike
from fl_lightning.federation.clients import State
from fl_lightning.federation.fit_checks import check_fits, check_interfaces, check_ways, check_whole_epochs
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.sickness import OF_VIEWS
from fl_lightning.models.split import SplitModel
from fl_lightning.seeding import isolated_streams, seed_global_streams

if TYPE_CHECKING:
    import lightning as L

    from fl_lightning.data.module import FederatedData


class Residents:
    """The modules that clients are swapped in and out of.

    Args:
        make_method: makes a fresh method of an architecture; called under a seed.
        architecture: [N] which architecture each client has.
        fit_settings: what their fits are told.
        settings: of the federation.
        data: the federation's.
        trainer: of the fits.
        facts: what everybody knows before the first round.

    Raises:
        ConfigError: if one cannot be made, or its fits would fail in some round whatever is in it.
    """

    def __init__(
        self,
        make_method: Callable[[int], Method],
        architecture: np.ndarray,
        fit_settings: FitSettings,
        settings: Federation,
        data: FederatedData,
        trainer: L.Trainer,
        facts: Facts,
    ) -> None:
        self.make_method, self.architecture = make_method, architecture
        self.settings, self.data, self.trainer, self.facts = settings, data, trainer, facts
        self.views = ""
        """The model that flattens maps by `view`, which channels last does not allow; empty where none does."""
        self.modules = [self.make(own, fit_settings) for own in range(architecture.max() + 1)]
        self.channels_last = settings.channels_last and any(map(has_convolution, self.modules))
        """Whether images are laid out so."""
        self._look_for_views()
        check_interfaces(self.modules, architecture)
        check_ways(self.modules)
        make_alike(self.modules)
        check_whole_epochs(self.modules, settings)
        self.kept = [_copy(module, module.division.kept) for module in self.modules]
        self.shared = [_copy(module, module.division.shared) for module in self.modules]
        """What clients of an architecture keep, and share, before their first round."""
        self._loose = [module.division.loose() for module in self.modules]
        self._anew = _copy(self.modules[0], self.modules[0].division.anew)

    @torch.no_grad()
    def _look_for_views(self) -> None:
        """Leave images as they are where a model flattens maps by `view`, which channels last does not suit."""
        if not self.channels_last or self.data.store.x.dim() != 4:
            return
        x = self.data.store.gather(torch.arange(min(2, len(self.data.store.x))))[0]
        x = self.trainer.precision_plugin.convert_input(x).to(self.facts.device, memory_format=torch.channels_last)
        with isolated_streams(self.facts.seed, "inputs"):
            self.views = next((own for own in (_viewing(each.method.model, x) for each in self.modules) if own), "")
        if self.views:
            self.channels_last = False
            for module in self.modules:
                _lay_out(module, torch.contiguous_format)

    def make(self, architecture: int, fit_settings: FitSettings | None, client: int = -1) -> ClientModule:
        """A module as it is before round 1.

        Args:
            architecture: its number.
            fit_settings: what its fits are told; None for one that is never fitted.
            client: whose own beginning it is; -1 for the one that all share.
        """
        seed_global_streams(self.facts.seed, "init", 0, client)
        try:
            method = self.make_method(architecture)
            method.facts = replace(self.facts, round=1)  # a schedule may begin there
            module = ClientModule(method, fit_settings, self.settings.share_buffers, self.data.drop_last)
            module.fine_tune = self.settings.evaluate.fine_tune
        except ConfigError:
            raise
        except (RuntimeError, ValueError, TypeError, MemoryError, OverflowError) as error:  # sizes of no tensor
            if isinstance(error, (ValueError, TypeError)) and "overflow" not in str(error).lower():
                raise  # somebody's mistake in a method
            said = (str(error).splitlines() or [type(error).__name__])[0]  # torch lists C++ frames below it
            raise ConfigError("method", f"cannot be made: {said}") from error
        if fit_settings is not None:
            check_fits(module, self.trainer, self.settings, self.data, self.architecture == architecture)
        if self.settings.channels_last and not self.views and has_convolution(module):
            _lay_out(module)
        module.use(self.trainer.precision_plugin)
        return module.to(self.facts.device)

    def of(self, client: int) -> ClientModule:
        """The resident module of the client's architecture."""
        return self.modules[self.architecture[client]]

    def shared_of(self, client: int) -> State:
        """What a client has of what is shared before it hears of anybody."""
        return self.shared[self.architecture[client]]

    def renewed(self, client: int) -> ClientModule:
        """The client's resident module, with what is in nobody's state as it was made."""
        self._loose[self.architecture[client]].put_back()
        return self.of(client)

    def begins_with(self, client: int) -> State:
        """The state of a client that never took part."""
        architecture = self.architecture[client]
        kept = self.kept[architecture]
        if self.settings.init == "own":
            fresh = self.make(architecture, None, client)
            kept = _copy(fresh, fresh.division.kept)
        return {**kept, **self.shared[architecture]}

    def load_global(self, message: Message, round: int = 0) -> ClientModule:
        """The global model: the first architecture's initial state with the global message's weights.

        Args:
            message: what all hear.
            round: the one that it is from, of which predictions are told; 0 before the first.
        """
        module = self.modules[0]
        module.method.facts = replace(self.facts, round=round)
        self._loose[0].put_back()
        module.load({**self.kept[0], **self.shared[0], **self.global_entries(message)})
        return module

    def global_entries(self, message: Message) -> dict[str, Tensor]:
        """What makes a client's model the global one: the message's weights, and what is the same for all."""
        return {**self._anew, **self.modules[0].division.fixed_entries(), **message.weights}

    def lay_under(self, module: ClientModule, client: int, own: Mapping[str, Tensor], received: Message) -> None:
        """Put the initial ones where a shared weight neither comes nor is kept: another client's would be there."""
        initial = self.shared_of(client)
        lacking = initial.keys() - received.weights.keys() - own.keys()
        module.load({name: initial[name] for name in lacking})

    def tell(self, facts: Facts) -> None:
        """Tell methods something else from now on."""
        for module in self.modules:
            module.method.facts = facts


def has_convolution(module: ClientModule) -> bool:
    """Whether there are images whose channels may be last: of what an MLP makes, terms see maps of 1x1."""
    terms = set(module.method.terms.modules())
    return any(isinstance(part, torch.nn.Conv2d) and part not in terms for part in module.modules())


def _copy(module: ClientModule, names: Sequence[str]) -> dict[str, Tensor]:
    entries = module.entries
    return {name: entries[name].detach().clone() for name in names}


def _lay_out(module: ClientModule, layout: torch.memory_format = torch.channels_last) -> None:
    """Channels last where there are channels: `Module.to` asks tensors of five dimensions, too, and they refuse."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=layout)


def _viewing(model: SplitModel, x: Tensor) -> str:
    """Which model, and where, cannot flatten what comes of samples so laid out; empty where it can."""
    try:
        with training(model, False):
            model(x)
    except RuntimeError as error:
        if OF_VIEWS in str(error):
            return f"{type(model).__name__}{place_of(error)}"
    except Exception:  # whatever it is, it comes again where it is said in full
        return ""
    return ""
