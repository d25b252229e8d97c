"""A term: one weighted part of a composite loss, with the artifact that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.division import overlap
from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import Wide, widened
from fl_lightning.errors import ConfigError, require

if TYPE_CHECKING:
    import numpy as np

    from fl_lightning.core.aggregation import RuleFactory
    from fl_lightning.core.facts import Facts, Phase
    from fl_lightning.core.host import Host, OwnData
    from fl_lightning.core.message import Artifact, Message
    from fl_lightning.models.split import SplitModel


class Term(Wide):
    """One weighted part of a composite loss.

    It is made before its method, and gets to know it in two moments: first all terms of a method `alter` its model,
    then all are `setup`. What a term received lives in non-persistent buffers that every `receive` overwrites; what a
    client must keep from round to round lives in persistent buffers or parameters.

    Args:
        weight: factor of the term in the loss, >= 0; 0 leaves the method as it is without the term.
    """

    paper: ClassVar[str] = ""
    reaches: tuple[str, ...] = ("",)
    """Submodules of the method (dotted names, ``""`` the whole) that the term's gradient can reach, beside the term's
    own parameters: it is left out of a phase that trains none of them."""
    shared: tuple[str, ...] = ()
    """Submodules of the term whose weights are exchanged; the others stay with the client."""
    accumulates: ClassVar[tuple[str, ...]] = ()
    """Buffers in which `observe` adds samples up: where several devices share a fit, their sums are added."""

    sees: ClassVar[Literal["batch", "sample", "weights"]] = "batch"
    """What its value is made of: a mini-batch as a whole; each ``sample`` by itself, of which it is the mean; or the
    ``weights`` alone. Record-level privacy needs one of the latter."""

    @property
    def needs_whole_epochs(self) -> bool:
        """Whether it averages over the last epoch of a fit, which may then not be cut short."""
        return False

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        if not weight >= 0:
            raise ConfigError(f"{type(self).__name__}.weight", "must be >= 0 (0 switches the term off)", weight)
        self.weight = weight

    @property
    def name(self) -> str:
        """The term's name in metrics: its class in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def exchanges(self) -> bool:
        """Whether the term receives and sends: not while its weight is 0."""
        return self.weight > 0

    def weight_at(self, facts: Facts) -> float:
        """The weight in the present round; `weight` unless the term has a schedule."""
        return self.weight

    def alter(self, model: SplitModel) -> None:
        """Change the model before anybody notes its names; called once. At weight 0 it must stay as it is."""

    def setup(self, host: Host) -> None:
        """Note names, make buffers and parameters; called once, when all terms have altered the model.

        Raises:
            ConfigError: saying why the term and the method do not go together.
        """

    def forward(self, host: Host, out: Forward) -> Tensor:
        """The unweighted scalar.

        Called outside any autocast, with embedding and logits in float32 or wider; further passes through a network go
        `out.through` it, in the trainer's precision.
        """
        raise NotImplementedError

    def observe(self, host: Host, out: Forward) -> None:
        """See a mini-batch's forward pass, to average artifacts while training runs: after its step in most methods."""

    def after_fit(self, host: Host) -> None:
        """Keep what the next round needs, at the end of a local fit, once its method has done so (`on_fit_end`)."""

    def receive(self, host: Host, message: Message) -> None:
        """Take the term's artifact out of what came in."""

    def prepare(self, host: Host, data: OwnData) -> None:
        """Note what it needs of the client's own data, after every receive."""

    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        """The term's artifacts, computed from the client's own training data after the fit."""
        return {}

    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the artifacts, which must be the same on clients whose models differ."""
        return {}

    def rules(self) -> Mapping[str, RuleFactory]:
        """How the server merges the term's artifacts, where it is not the default rule."""
        return {}

    def drawn(self, host: Host, message: Message) -> Mapping[str, np.ndarray]:
        """Matrices [C, C] that are drawn beside the artifacts of a global message, by name. Default: none."""
        return {}

    def extra_repr(self) -> str:
        """Show the weight in the module's printout."""
        return f"weight={self.weight}"


class CrossEntropy(Term):
    """Cross-entropy of the logits, mean over the batch: the task's own loss, in float32 (float64 stays).

    A model that computes its loss by itself has it stand here.
    """

    sees = "sample"

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return F.cross_entropy(widened(out.logits), out.y) if out.loss is None else widened(out.loss)


class Terms(nn.ModuleList):
    """The terms of a composite loss, cross-entropy first.

    Args:
        own: the method's, beside the cross-entropy. One that does not even exchange gives way to an extra one of its
            name.
        extra: those that the configuration adds.
        instead: one of the method's that counts in the place of the cross-entropy, the last of all.

    Raises:
        ConfigError: if a name occurs twice.
    """

    def __init__(
        self, own: Sequence[Term] = (), extra: Sequence[Term] | None = None, instead: Term | None = None
    ) -> None:
        extra = list(extra or ())
        for term in (*own, *extra, *([] if instead is None else [instead])):
            rule = f"{type(term).__name__}.__init__() must call super().__init__(weight)"
            require("_parameters" in vars(term), "method.extra_terms" if term in extra else "method", rule)
        names = {term.name for term in extra}
        own = [term for term in own if term.exchanges or term.name not in names]
        super().__init__([CrossEntropy(), *own, *extra, *([] if instead is None else [instead])])
        self.num_own, self._num_extra = 1 + len(own), len(extra)
        self.has_instead = instead is not None
        """Whether another loss counts in the place of the cross-entropy."""
        all_names = [term.name for term in self]
        for name in all_names:
            require(all_names.count(name) == 1, "method.extra_terms", "each term may occur once only", name)

    def __iter__(self) -> Iterator[Term]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    @property
    def cross_entropy(self) -> Term:
        """The task's own loss."""
        return self[0]  # type: ignore[return-value]

    @property
    def exchanging(self) -> list[Term]:
        """The terms that receive and send."""
        return [term for term in self if term.exchanges]

    def counting(self, phase: Phase, weights: Mapping[str, float]) -> list[Term]:
        """The terms that count in a phase, by the weight of each name."""
        return [term for term in self if counts(term, phase, weights[term.name])]

    def send(self, host: Host, data: OwnData) -> dict[str, Artifact]:
        """What the terms send together, by name. Terms that make it by one `send` may share an artifact.

        Raises:
            ConfigError: naming the term that sends no names.
            TypeError: if two terms that have nothing to do with each other send one name.
        """
        artifacts: dict[str, Artifact] = {}
        makers: dict[str, Term] = {}
        for term in self.exchanging:
            sent, kind = term.send(host, data), type(term)
            rule = f"{kind.__name__}.send() must give its artifacts by name, {{name: artifact}}"
            require(isinstance(sent, Mapping), "method", rule, type(sent).__name__)
            for name in sent:
                other = type(makers.setdefault(name, term))
                if other.send is not kind.send:
                    rule = "one would take the other's place: name one of them otherwise"
                    raise TypeError(f"{other.__name__} and {kind.__name__} both send an artifact {name}, and {rule}")
            artifacts.update(sent)
        return artifacts

    def rules(self) -> dict[str, RuleFactory]:
        """How the server merges the terms' artifacts, by name.

        Raises:
            ConfigError: naming the term whose rules are none.
        """
        found: dict[str, RuleFactory] = {}
        for term in self.exchanging:
            who = f"{type(term).__name__}.rules()"
            rules = term.rules()
            require(isinstance(rules, Mapping), "method", f"{who} must give rules by artifacts' names", rules)
            for name, make in rules.items():
                allowed = f"{who} must give for {name!r} what makes a rule for every round: a class, a function"
                require(callable(make), "method", allowed, type(make).__name__)
            found |= rules
        return found

    @property
    def extra(self) -> list[Term]:
        """Those that the configuration adds."""
        return list(self)[self.num_own : self.num_own + self._num_extra]


def require_whole_model(term: Term, host: Host) -> None:
    """Refuse a method whose model is a part of what samples pass through: its layers are not those that are to learn.

    Raises:
        ConfigError: naming the term and the method, which says so with ``whole_model = False``.
    """
    rule = f"{type(term).__name__} looks at layers of the model, and {type(host).__name__}'s is one summand of what"
    whole = getattr(host, "whole_model", True)
    require(whole, "method.extra_terms", f"{rule} samples pass through: leave it out")


def counts(term: Term, phase: Phase, weight: float) -> bool:
    """Whether a term has a weight and, in this phase, something to train.

    Args:
        term: the term.
        phase: a phase, whose parameters require a gradient.
        weight: the term's in the present round.
    """
    return weight > 0 and _reaches(term, phase) and (phase.terms is None or term.name in phase.terms)


def _reaches(term: Term, phase: Phase) -> bool:
    own = any(p.requires_grad for p in term.parameters())
    return own or any(overlap(part, trained) for part in term.reaches for trained in phase.trains)
