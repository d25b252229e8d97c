"""What W&B is shown of a round beside its numbers: a table of the clients, histograms over them, and pictures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.report import class_figures, partition_figures
from fl_lightning.report.recorded_run import those_that_count
from fl_lightning.report.run_logger import RoundRecord, Row, RunStart

HISTOGRAMS = ("Local-T", "Local-T_received")
BINS = 20
TABLES = 100
"""Tables of a run: W&B shows no more of them, and each is three files."""


def wants_table(round: int, rounds: int, last: int) -> bool:
    """Whether a round gets its table: all do in up to 199 rounds, else some that are evenly spread, and the last one.

    Args:
        round: an evaluated one.
        rounds: that the run will have.
        last: the round that got one last; -1 for none.

    >>> [wants_table(round, 300, last) for round, last in ((1, -1), (2, 1), (3, 1), (5, 3), (7, 3), (300, 299))]
    [True, False, True, False, True, True]
    """
    apart = max(1, rounds // TABLES)
    return round // apart > last // apart or round == rounds


@contextmanager
def drawn(start: RunStart, record: RoundRecord, folder: Path, first: bool, table: bool) -> Iterator[dict[str, Any]]:
    """Tables and pictures of a round, by name; they are to be logged before the context ends.

    Args:
        start: what is known of the run.
        record: the round.
        folder: where W&B's files lie.
        first: whether W&B has no round yet, and gets the picture of who holds what.
        table: whether the clients' table is among them, where they were evaluated.
    """
    with tempfile.TemporaryDirectory() as pictures, _own_data_folder(folder):
        found = of_clients(start, record.client_rows, table) if record.evaluated else {}
        yield found | of_classes(start, record, Path(pictures), first)


def of_clients(start: RunStart, rows: Sequence[Row], table: bool = True) -> dict[str, Any]:
    """A table of the clients, and histograms over those that count in means: no attackers, nobody who joined later."""
    import wandb

    if not rows:
        return {}
    found: dict[str, Any] = {"clients/table": _table(start, rows)} if table else {}
    counted = those_that_count(rows, start.num_founders)
    for name in HISTOGRAMS:
        known = [row[name] for row in counted if row.get(name) is not None]
        if known:
            counts = np.histogram(known, bins=BINS, range=(0, 1))
            found[f"clients/{name}"] = wandb.Histogram(np_histogram=counts)
    return found


def _table(start: RunStart, rows: Sequence[Row]) -> Any:
    import wandb

    held = dict(enumerate((start.class_counts > 0).sum(1).tolist()))
    names = [name for name in rows[0] if name != "round"]
    columns = [*names[:4], "classes", *names[4:]]
    cells = [{**row, "classes": held.get(row["client"])} for row in rows]
    return wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in cells])


def of_classes(start: RunStart, record: RoundRecord, folder: Path, first: bool) -> dict[str, Any]:
    """Who holds what, once, and what is shared of the classes: pictures, drawn into `folder`."""
    import wandb

    round, classes, about = record.row["round"], start.classes, start.about
    paths: dict[str, Path] = {}
    if first:
        title = f"{about['name']}: who holds what"
        paths["clients/partition"] = partition_figures.partition_bubbles(
            start.class_counts, folder / "partition.png", classes, title
        )
    for name, rows in record.shared.items():
        title = f"{name.replace('_', ' ')}, round {round}"
        draw = class_figures.class_relation_map if name in record.relations else class_figures.class_projection
        paths[f"shared/{name}"] = draw(rows, folder / f"{name}.png", classes, title)
    return {name: wandb.Image(str(path)) for name, path in paths.items()}


@contextmanager
def _own_data_folder(folder: Path) -> Iterator[None]:
    """Let W&B keep the tables that it has yet to send in the run's folder, too."""
    name = "WANDB_DATA_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str((folder / "wandb" / "data").absolute())
    try:
        yield
    finally:
        os.environ.pop(name, None)
