"""Local-T, Global-T and Server-T: what every client's model gets right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.checkup import Unsound
from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import training
from fl_lightning.core.method import Figure, Seen, headline
from fl_lightning.federation.embeddings import Embeddings
from fl_lightning.federation.measures import Measures, Outcome
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.report.columns import is_measure
from fl_lightning.seeding import isolated_streams

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData
    from fl_lightning.data.store import ClientData

Moment = Literal["trained", "received"]
Outcomes = dict[str, Outcome]
"""Prediction name -> what came out for some samples."""
Batches = dict[str, list[Outcome]]
"""The same in batches."""
Scores = dict[str, float]
"""Column -> accuracy in [0, 1], or another measure, of one client."""


@dataclass(frozen=True)
class Part:
    """One part of every client's samples that models are tested on.

    Args:
        letter: ``T`` for the test parts, ``V`` for the validation parts: the end of the figures' names.
        own: each client's indices.
        sizes: [N] how many these are.
        union: sorted indices of all clients'; under ``split: global`` the server's.
        local: whether clients have samples of their own in it.
        globally: whether clients are tested on the union, too.
    """

    letter: Literal["T", "V"]
    own: Sequence[Tensor]
    sizes: np.ndarray
    union: Tensor
    local: bool = True
    globally: bool = False

    def indices(self, client: int) -> Tensor:
        """What a client is tested on."""
        return self.union if self.globally else self.own[client]

    def is_empty(self, client: int) -> bool:
        """Whether a client has no samples of its own in it."""
        return len(self.own[client]) == 0

    def positions(self, client: int) -> Tensor:
        """Places of the client's samples in the union, on the CPU."""
        return torch.searchsorted(self.union.cpu(), self.own[client].cpu())


def parts_of(data: FederatedData, globally: bool, validation: bool) -> list[Part]:
    """The test parts, and the validation parts where there are any beside them.

    Args:
        data: the federation's data.
        globally: whether clients are tested on all test parts together.
        validation: whether they are tested on their validation parts, too.
    """
    own = _Own(data.clients, "test")
    parts = [Part("T", own, data.num_test, data.server_test, data.local_test, globally)]
    if validation and has_validation(data):
        parts.append(Part("V", _Own(data.clients, "validation"), data.num_validation, data.validation_union))
    return parts


class _Own(Sequence[Tensor]):
    """One part of each client's samples, looked up when it is asked for: there may be a million clients."""

    def __init__(self, clients: Sequence[ClientData], name: Literal["test", "validation"]) -> None:
        self._clients = clients
        self._name = name

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, client: Any) -> Any:
        return getattr(self._clients[client], self._name)


def has_validation(data: FederatedData) -> bool:
    """Whether clients have validation parts that are not what Local-T is measured on."""
    return data.evaluate_on == "test" and bool(data.num_validation.any())


class Evaluator:
    """Runs a client's module over test samples, in large batches, in the trainer's precision.

    Args:
        data: the federation's data, on the training device.
        policy: what is tested.
        context: the trainer's autocast context.
        seed: the run's seed; adaptation before an evaluation draws from streams of its own.
        measures: what is read off predictions beside accuracy.
        samples: what clients adapt on, by client.
    """

    def __init__(
        self,
        data: FederatedData,
        policy: EvaluationPolicy,
        context: Callable[[], AbstractContextManager[None]],
        seed: int,
        measures: Measures,
        samples: Sequence[ClientData],
    ) -> None:
        self.data = data
        self.samples = samples
        self._batch_size = policy.batch_size
        self.context = context
        self.seed = seed
        self.measures = measures
        self.parts = parts_of(data, policy.globally, policy.validation)
        self._positions, self._balances = Recent(), Recent()
        self.draws = False
        """Whether a model draws random numbers when it predicts: each mini-batch then has a stream of its own."""
        self.mixes = False
        """Whether a prediction looks at a mini-batch's other samples: own samples are then tested by themselves."""
        self._embeddings = Embeddings()
        self._of_unions: dict[tuple[str, int], Tensor] = {}
        self._measured: dict[tuple[str, str, str], tuple[Outcome, dict[str, float]]] = {}

    def client(self, module: ClientModule, client: int, moment: Moment) -> Scores:
        """Accuracies of one client's present model, by column; a client without test samples has no Local-T."""
        found, unions = self.outcomes(module, client, moment), [part.globally for part in self.parts]
        scores = self._read(module, client, moment, found, unions)
        if self.mixes and any(unions):
            alone = self.outcomes(module, client, moment, alone=True)
            unions = [union and part.is_empty(client) for union, part in zip(unions, self.parts, strict=True)]
            scores |= self._read(module, client, moment, alone, unions, globally=False)
        return scores

    def scores(self, module: ClientModule, client: int, moment: Moment, found: Sequence[Outcomes]) -> Scores:
        """Read a client's figures off what its model makes of the union of each part."""
        return self._read(module, client, moment, found, [True] * len(self.parts))

    def _read(
        self,
        module: ClientModule,
        client: int,
        moment: Moment,
        found: Sequence[Outcomes],
        unions: Sequence[bool],
        globally: bool = True,
    ) -> Scores:
        """Figures of outcomes on each part, of which some are on its union and the others on the client's own."""
        scores: Scores = {}
        for part, outcomes, is_union in zip(self.parts, found, unions, strict=True):
            about = part.letter, module, moment, self.measures.names
            if part.local:
                own, balance = outcomes, self.balance(part, client)
                if is_union:
                    positions = self._own(part, client)
                    own = {way: outcome.at(positions) for way, outcome in outcomes.items()}
                values = {way: self.measures.of(outcome, balance) for way, outcome in own.items()}
                scores |= _named("own", *about, values)
            if part.globally and globally:
                values = {way: self.of_union(part, way, moment, outcome) for way, outcome in outcomes.items()}
                scores |= _named("all", *about, values)
        return scores

    def of_union(self, part: Part, way: str, moment: str, outcome: Outcome) -> dict[str, float]:
        """Every measure of a part's union by name, once for all clients that received the same model.

        Args:
            part: the part.
            way: which of a model's ways to predict.
            moment: when; the last outcome of each is remembered.
            outcome: of the union.
        """
        key = part.letter, way, moment
        known = self._measured.get(key)
        if known is None or known[0] is not outcome:
            known = self._measured[key] = outcome, self.measures.of(outcome, self.balance(part))
        return known[1]

    def balance(self, part: Part, client: int | None = None) -> Tensor:
        """What each sample of a part counts in balanced accuracy, for a client's own or, None, for the union."""
        key = part.letter, -1 if client is None else client
        known = self._of_unions if client is None else self._balances
        if key not in known:
            indices = part.union if client is None else part.own[client]
            y = self.data.store.y[indices.to(self.data.store.device)]
            known[key] = self.measures.balance(y.to(self._device))
        return known[key]

    @property
    def batch_size(self) -> int:
        """Samples a batch."""
        return self._batch_size or self.data.store.fitting_batch

    @property
    def _device(self) -> torch.device:
        """Where outcomes are."""
        return self.data.store.target or self.data.store.device

    def columns(self, module: ClientModule, moments: Iterable[str]) -> list[str]:
        """The columns that evaluations of `module` fill, in their order in a table: accuracies first."""
        nothing = {way: dict.fromkeys(self.measures.names, math.nan) for way in module.predictors}
        columns: list[str] = []
        for moment in moments:
            for part in self.parts:
                for whose, there in (("own", part.local), ("all", part.globally)):
                    names = _named(whose, part.letter, module, moment, self.measures.names, nothing)  # type: ignore[arg-type]
                    columns += names if there else []
        return sorted(columns, key=is_measure)  # in their order otherwise

    def outcomes(self, module: ClientModule, client: int, moment: Moment, alone: bool = False) -> list[Outcomes]:
        """What a client's module makes of what it is tested on of each part, for each of its ways to predict.

        Those that adapt do so on a throw-away copy.

        Args:
            module: the module.
            client: 0-based.
            moment: when.
            alone: on the client's own samples of each part alone, also where it is tested on all clients'.
        """
        ways = module.predictors
        adapting = [name for name, way in ways.items() if way.adapts]
        tuned = [name for name, way in ways.items() if way.fine_tunes]
        plain = [name for name in ways if name not in {*adapting, *tuned}]
        found: list[Batches] = [{} for _ in self.parts]
        for names, context in (
            (plain, nullcontext()),
            (adapting, _thrown_away(self, module, client, moment)),
            (tuned, _thrown_away(self, module, client, moment, fine_tunes=True)),
        ):
            if names:
                with context:
                    for own, part in zip(found, self.parts, strict=True):
                        received = moment == "received" and names is plain and not alone
                        keeps = part.letter if received and part.globally else None
                        indices = part.own[client] if alone and not part.is_empty(client) else part.indices(client)
                        own |= self.batches(module, indices, names=names, keeps=keeps)
        return [{name: join_batches([own[name]]) for name in ways} for own in found]

    @torch.no_grad()
    def batches(
        self,
        module: ClientModule,
        indices: Tensor,
        first: int = 0,
        step: int = 1,
        names: Sequence[str] | None = None,
        keeps: str | None = None,
    ) -> Batches:
        """The same, batch by batch and as the module is now, for every `step`-th batch from the `first` on.

        Args:
            module: the module.
            indices: of the samples.
            first: this worker.
            step: how many workers there are.
            names: ways to predict; None takes all.
            keeps: the part whose union these are, if other clients may have received the same body (`Embeddings`).

        Raises:
            Unsound: if a score is no number: the largest of such would pass for the first class.
        """
        ways = module.predictors
        found: Batches = {name: [] for name in (ways if names is None else names)}
        broken: dict[str, list[Tensor]] = {name: [] for name in found}
        with training(module, False), self.context():
            embeddings = None
            chunks = indices.split(self.batch_size)[first::step] if len(indices) else ()  # no model is asked of nothing
            for index, part in enumerate(chunks):
                x, y = self.data.store.gather(part)
                seen = Seen(x)
                if keeps is not None and index == 0:
                    embeddings = self._embeddings.of(module, x[:1])
                if embeddings is not None:
                    embeddings.show(seen, module, (str(keeps), index))
                place = first + index * step  # who tests it, and what came before, changes nothing
                with isolated_streams(self.seed, "evaluate", place) if self.draws else nullcontext():
                    for name, own in found.items():
                        scores = ways[name].scores(seen)
                        own.append(self.measures.outcome(scores, y))
                        broken[name].append(scores.isnan().any())
                if embeddings is not None:
                    embeddings.keep(seen, module, (str(keeps), index))
        for name, flags in broken.items():
            if flags and bool(torch.stack(flags).any()):
                raise Unsound(f"the scores{f' by {name}' if name else ''} are nan, so that nothing is predicted")
        return found

    def _own(self, part: Part, client: int) -> Tensor:
        """Places of the client's samples in the union of a part, on the training device."""
        key = part.letter, client
        if key not in self._positions:
            self._positions[key] = part.positions(client).to(self._device)
        return self._positions[key]


RECENT = 64
"""Clients of which it is kept at hand what their test samples are: more than a cohort has, which are read off twice."""


class Recent(dict[tuple[str, int], Tensor]):
    """Tensors of the last clients that were tested.

    Not of all: small ones that stay lie between large ones that come and go, whose memory is then not given back.
    """

    @override
    def __setitem__(self, key: tuple[str, int], value: Tensor) -> None:
        if len(self) >= RECENT:
            del self[next(iter(self))]
        super().__setitem__(key, value)


def join_batches(parts: Sequence[Sequence[Outcome]]) -> Outcome:
    """Put together what came out for all samples; batches were dealt out to workers one after another."""
    longest = max(len(part) for part in parts)
    return Outcome.join([part[index] for index in range(longest) for part in parts if index < len(part)])


@contextmanager
def _thrown_away(
    evaluator: Evaluator, module: ClientModule, client: int, moment: Moment, fine_tunes: bool = False
) -> Iterator[None]:
    """Personalise a module for the length of an evaluation: its state and all random streams come back unharmed.

    They do so, too, where a client falls sick while it adapts.
    """
    saved, loose = {name: tensor.detach().clone() for name, tensor in module.entries.items()}, module.division.loose()
    # The same in every round: who sits out keeps its figures, and `evaluate` need not know when they were made.
    streams = isolated_streams(evaluator.seed, f"adapt/{moment}", client=client)
    try:
        with streams:
            with evaluator.context():
                module.adapt(evaluator.samples[client], fine_tunes)
            yield
    finally:
        module.load(saved)
        loose.put_back()


Whose = Literal["own", "all"]
FIGURES: dict[tuple[Whose, str], Figure | str] = {
    ("own", "T"): "Local-T", ("all", "T"): "Global-T", ("own", "V"): "Local-V", ("all", "V"): "Global-V"
}  # fmt: skip
"""Whose samples, of which part -> the figure."""


def _named(
    whose: Whose,
    letter: Literal["T", "V"],
    module: ClientModule,
    moment: str,
    names: Sequence[str],
    values: Mapping[str, Mapping[str, float]],
) -> Scores:
    """Columns of what each way to predict scores: ``Local-T``, ``Local-T/prototype``, ``eval_loss/Local-T``, ….

    Args:
        whose: the samples.
        letter: of the part.
        module: the client.
        moment: when.
        names: of the measures; the empty one is accuracy, whose columns stand alone.
        values: prediction name -> measure -> value.
    """
    figure = FIGURES[whose, letter] + ("" if moment == "trained" else "_received")
    best = headline(module.predictors, cast("Figure", FIGURES[whose, "T"]))
    scores: Scores = {}
    for measure in names:
        column = f"{measure}/{figure}" if measure else figure
        scores |= {} if best is None else {column: values[best][measure]}
        if len(values) > 1:
            scores |= {f"{column}/{way}": own[measure] for way, own in values.items() if way}
    return scores
