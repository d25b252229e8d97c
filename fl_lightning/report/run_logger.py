"""What a logger can take of a run beside a row of numbers a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunStart:
    """What is known of a run when its first round, or the first one after a resume, is about to begin.

    Args:
        folder: the run's folder.
        about: what ``summary.json`` says of the run beside its numbers (name, method, seed, versions, git commit).
        partition_hash: of who holds what.
        classes: [C] class names.
        class_counts: [N, C] training samples of each client and class; of a large population of the first clients.
        rounds: the rounds that the run will have.
        rows: the rows of ``metrics.csv`` so far, with the means of what fits logged (``log/<name>``); rounds of an
            earlier process that a checkpoint covers.
        client_rows: the rows of ``clients.csv`` so far.
        monitor: the column that chooses the best round (`early_stopping.monitor`); empty leaves it to the rows.
        less: whether less of it is better; None goes by its name.
        num_clients: of the federation; 0 for as many as are counted.
        num_founders: those who are there from the start, the first ones; None for all.
    """

    folder: Path
    about: Mapping[str, Any]
    partition_hash: str
    classes: Sequence[str]
    class_counts: np.ndarray
    rounds: int
    rows: Sequence[Row] = ()
    client_rows: Sequence[Row] = ()
    monitor: str = ""
    less: bool | None = None
    num_clients: int = 0
    num_founders: int | None = None


@dataclass(frozen=True)
class RoundRecord:
    """One round, as plain numbers and arrays.

    Args:
        row: its row of ``metrics.csv``; None where nothing applies.
        client_rows: its rows of ``clients.csv``.
        evaluated: whether clients were evaluated in it.
        shared: what the federation shares of each class, by name: [C, K], NaN in the rows of absent classes.
        relations: names in `shared` whose rows say how a class relates to all classes; the others' rows are points.
        ends_early: whether the run ends with it, before its last round.
    """

    row: Row
    client_rows: Sequence[Row] = ()
    evaluated: bool = True
    shared: Mapping[str, np.ndarray] = field(default_factory=dict)
    relations: frozenset[str] = frozenset()
    ends_early: bool = False


class RunLogger(ABC):
    """A logger that takes whole rounds, and what surrounds them; other loggers get a row of numbers a round."""

    @abstractmethod
    def begin(self, start: RunStart) -> None:
        """The run, or its continuation, begins."""

    @abstractmethod
    def wants_shared(self, round: int) -> bool:
        """Whether `RoundRecord.shared` of a round would be used; it takes time to gather."""

    @abstractmethod
    def log_round(self, record: RoundRecord) -> None:
        """A round is done."""

    @abstractmethod
    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is done, or was stopped; `summary` is what ``summary.json`` says."""

    def places(self) -> list[tuple[str, str]]:
        """Where the run is to be seen: what to call the place, and its address or the command that leads there."""
        return []
