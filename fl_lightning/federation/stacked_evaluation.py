"""What several clients' models make of the same samples, read off all of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import training
from fl_lightning.core.loose import Attributes
from fl_lightning.core.mark import Mark
from fl_lightning.core.method import Seen
from fl_lightning.core.nobody import as_nobody
from fl_lightning.core.rows import Alias, Rows, Unstackable
from fl_lightning.federation.evaluation import Batches, Evaluator, Moment, Outcomes, Scores, join_batches
from fl_lightning.federation.measures import Outcome


class StackedTests:
    """Tests clients of one architecture together, as long as that gives what each gives by itself.

    Args:
        evaluator: what is tested.
        module: their resident module.
        attributes: of its method's modules.
    """

    def __init__(self, evaluator: Evaluator, module: ClientModule, attributes: Attributes) -> None:
        self.evaluator = evaluator
        self.module = module
        self.attributes = attributes
        self._works = True
        self._checked: set[Hashable] = set()

    def scores(
        self,
        clients: Sequence[int],
        rows: Rows,
        attributes: list[dict[str, Any]],
        marks: Sequence[Mark],
        moment: Moment,
    ) -> list[Scores | None]:
        """Each client's scores; None for one that has to be tested by itself.

        Args:
            clients: 0-based.
            rows: the clients' tensors.
            attributes: of the first of them.
            marks: of all of them: only clients that are alike are tested together.
            moment: when.
        """
        found: list[Scores | None] = [None] * len(clients)
        if not self._works or len(clients) < 2 or any(mark != marks[0] for mark in marks):
            return found
        try:
            self.attributes.restore(attributes)
            outcomes = outcomes_together(self.evaluator, self.module, rows, self.attributes.aliases())
            for place, (client, own) in enumerate(zip(clients, outcomes, strict=True)):
                found[place] = None if own is None else self.evaluator.scores(self.module, client, moment, own)
            if (marks[0].kind, moment) not in self._checked and found[0] is not None:
                rows.load(0)
                self.attributes.restore(attributes)
                self._works = _same(self.evaluator.client(self.module, clients[0], moment), found[0])
                self._checked.add((marks[0].kind, moment))
        except Exception:  # whatever a predictor does: each can be tested by itself
            self._works = False
        return found if self._works else [None] * len(clients)


def _same(one: Scores, other: Scores) -> bool:
    """Whether scores are the same but for rounding, which may turn a tie."""
    close = (math.isclose(one[name], other[name], abs_tol=0.02) or math.isnan(one[name]) for name in one)
    return one.keys() == other.keys() and all(close)


@torch.no_grad()
def outcomes_together(
    evaluator: Evaluator, module: ClientModule, rows: Rows, aliases: Sequence[Alias]
) -> list[list[Outcomes] | None]:
    """What each client's model makes of the union of each part; None for a client whose scores are no numbers.

    Args:
        evaluator: what is tested.
        module: the resident module of the clients' architecture.
        rows: the clients.
        aliases: attributes of the method's modules that hold parameters or buffers.

    Raises:
        Unstackable: where clients predict otherwise than as they are, or each on samples of its own.
        AsksWho: where a prediction asks which client it is for, or how its fit went.
    """
    ways, count = module.predictors, len(rows)
    apart = evaluator.mixes or not all(part.globally for part in evaluator.parts)
    if apart or any(way.adapts or way.fine_tunes for way in ways.values()):
        raise Unstackable("its clients are tested one by one")
    found: list[list[Batches]] = [[] for _ in range(count)]
    broken = torch.zeros(count, dtype=torch.bool, device=rows.layout.device)
    for part in evaluator.parts:
        own: list[Batches] = [{name: [] for name in ways} for _ in range(count)]
        for indices in part.union.split(evaluator.batch_size):
            x, y = evaluator.data.store.gather(indices)

            def one(tensors: Sequence[Tensor], x: Tensor = x) -> tuple[Tensor, ...]:
                with rows.layout.swapped(tensors, aliases):
                    seen = Seen(x)
                    return tuple(way.scores(seen) for way in ways.values())

            with training(module, False), evaluator.context(), as_nobody(module.method):
                stacked = _of_all(one, rows.views(count))
            for name, scores in zip(ways, stacked, strict=True):
                broken |= scores.isnan().flatten(1).any(1)
                outcome = evaluator.measures.outcome(scores.flatten(0, 1), y.repeat(count))
                for client, mine in enumerate(_split(outcome, count)):
                    own[client][name].append(mine)
        for client, batches in enumerate(own):
            found[client].append(batches)
    return [
        None if sick else [{name: join_batches([batches[name]]) for name in ways} for batches in parts]
        for sick, parts in zip(broken.tolist(), found, strict=True)
    ]


def _of_all(one: Callable[[Sequence[Tensor]], tuple[Tensor, ...]], views: Sequence[Tensor]) -> list[Tensor]:
    """What every client's tensors give, stacked.

    Batches of tests are large. A CPU multiplies one client's by its weights faster than all clients' by all weights,
    whose products leave its cache (the quickstart's first layer: 1.5 ms for 20 clients, where `vmap` takes 7.3).

    Args:
        one: from a client's tensors to a number of tensors.
        views: [n, …] every tensor of the clients.
    """
    if views[0].device.type != "cpu":
        return list(vmap(one, randomness="error")(views))
    of_each = [one(tensors) for tensors in zip(*(view.unbind() for view in views), strict=True)]
    return [torch.stack(own) for own in zip(*of_each, strict=True)]


def _split(outcome: Outcome, count: int) -> list[Outcome]:
    """Each client's share of what came out for all of them."""
    fields = [field.chunk(count) if len(field) else [field] * count for field in outcome]
    return [Outcome(*own) for own in zip(*fields, strict=True)]
