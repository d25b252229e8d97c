"""A method: what a paper says of an algorithm, and nothing of the machine that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from fl_lightning.core.division import division_of, load_entries, matches
from fl_lightning.core.facts import Facts, Fit, Phase
from fl_lightning.core.forward import Forward
from fl_lightning.core.host import Network, OwnData, Parts
from fl_lightning.core.message import Message
from fl_lightning.core.personal import personal_and_global, personal_copy, personal_only
from fl_lightning.core.precision import Wide
from fl_lightning.core.predictor import Figure, Predictor, Seen, headline
from fl_lightning.core.server import Server, uniform_mean
from fl_lightning.core.step import Step
from fl_lightning.core.term import Term, Terms
from fl_lightning.models.wrapped import fill_lazy

if TYPE_CHECKING:
    from fl_lightning.models.split import SplitModel

# What a method's file speaks of; it may be had from here.
__all__ = [
    "Facts",
    "Figure",
    "Forward",
    "Message",
    "Method",
    "OwnData",
    "Parts",
    "Phase",
    "Predictor",
    "Seen",
    "Server",
    "Step",
    "Term",
    "headline",
    "personal_and_global",
    "personal_copy",
    "personal_only",
    "uniform_mean",
]


class Method(Wide):
    """What a paper says of its algorithm: what is shared, the local procedure, the composite loss, the server's rule.

    A client (`core/client.py`) holds one and does the rest. One resident method serves all clients of an architecture:
    their private states are swapped in and out, so everything that a client must keep lives in parameters or persistent
    buffers, and what every receive overwrites in buffers with ``persistent=False``.

    Args:
        model: body and head; lazy layers get their sizes here.
        terms: the method's terms beside the cross-entropy.
        extra_terms: terms that the configuration adds to the method.
        instead: a term that counts in the cross-entropy's place.
    """

    shared: tuple[str, ...] = ("model",)
    """Submodules whose weights are exchanged."""
    paper: ClassVar[str] = ""
    exchange: ClassVar[str] = "Star"
    """How messages travel where the configuration does not say."""

    def __init__(
        self,
        model: SplitModel,
        terms: Sequence[Term] = (),
        extra_terms: Sequence[Term] | None = None,
        instead: Term | None = None,
    ) -> None:
        super().__init__()
        fill_lazy(model, lambda: model.input_shape, "model")
        self.model = model
        self._given_frozen = tuple(p for p in model.parameters() if not p.requires_grad)
        self.terms = Terms(terms, extra_terms, instead)
        self.facts = Facts()
        """What is known of the federation; set anew for every round."""
        self.fit = Fit()
        """What is known of the local fit; set anew for every fit."""

    # --- what it is made of -------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Note names and shapes, copy parts of the model: called once, when all terms have altered the model."""

    def losses(self) -> Mapping[str, float]:
        """Losses that `local_step` computes beside the terms, with their weights; 0 for what is only logged."""
        return {}

    def term_weights(self) -> dict[str, float]:
        """The factor of each loss in the present round, by name: of the terms, and of `losses`."""
        weights = {term.name: term.weight_at(self.facts) for term in self.terms}
        if self.terms.has_instead:
            weights[self.terms.cross_entropy.name] = 0.0
        return {**weights, **self.losses()}

    def network(self) -> Network:
        """What the losses of a fit see samples through. Default: the model.

        Terms take its head for embeddings that they have heard of, and all of it for what they send of the own data.
        """
        return self.model

    # --- what travels, what stays -------------------------------------------------------------------------------------

    def is_shared(self, name: str, module: nn.Module) -> bool:
        """Whether an entry of the state dict is exchanged.

        Args:
            name: the entry's name, e.g. ``model.body.stages.0.weight``.
            module: the module that owns it, for methods that share by layer type.
        """
        of_terms = (
            f"terms.{index}.{part}" for index, term in enumerate(self.terms) if term.exchanges for part in term.shared
        )
        return matches(name, (*self.shared, *of_terms))

    def is_kept(self, name: str, module: nn.Module) -> bool:
        """Whether an entry stays with the client between rounds. Default: what the next receive does not overwrite."""
        return not self.is_shared(name, module)

    def interface(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all that is exchanged; clients whose models differ must agree on them."""
        artifacts = {n: shape for term in self.terms.exchanging for n, shape in term.interface(self).items()}
        return {**division_of(self).shapes(), **artifacts}

    def parameter_counts(self) -> tuple[int, int]:
        """Trainable parameters that stay with a client, and those that travel. Default: by what is shared of the state.

        A method whose parameters travel as artifacts overrides this.
        """
        return division_of(self).parameter_counts()

    # --- a round ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        """Take what came in; the client's own last private state is already loaded."""
        load_entries(self, message.weights)
        for term in self.terms.exchanging:
            term.receive(self, message)
            term.prepare(self, data)

    def phases(self) -> list[Phase]:
        """The phases of a local fit. Default: one, all parameters."""
        return [Phase("all")]

    def on_fit_start(self) -> None:
        """Prepare a local fit."""

    def local_step(self, step: Step) -> None:
        """One mini-batch: forward, composite loss, backward, step."""
        out = step.forward()
        step.descend(step.values(out))
        step.observe(out)

    def on_fit_end(self) -> None:
        """Keep what the next round needs."""

    def send(self, data: OwnData) -> Message:
        """What goes out after the fit: the shared weights, and each term's artifacts from the client's own data."""
        return Message(division_of(self).weights(), self.terms.send(self, data), data.num_train)

    # --- predictions --------------------------------------------------------------------------------------------------

    def predictors(self) -> dict[str, Predictor]:
        """The ways to predict, by name. Default: one, by the classifier's logits."""
        return {"": Predictor(lambda seen: seen.logits(self.model))}

    def adapt(self, data: OwnData) -> None:
        """Personalise before an evaluation, for predictors that say so; runs on a throw-away copy of the state."""

    # --- the other side -----------------------------------------------------------------------------------------------

    def make_server(self, initial: Message, facts: Facts) -> Server:
        """The method's server, and without one what clients make of what they hear (`Server.mixer`).

        Default: weighted mean of weights, artifacts by the rules of their terms.
        """
        return Server(initial)
