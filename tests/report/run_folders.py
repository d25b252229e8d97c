"""Runs' folders as the program leaves them, made from numbers alone."""

import json
from pathlib import Path

import numpy as np

from fl_lightning.report.record import MetricsFile, summarise

ACCURACIES = ("Local-T", "Global-T", "Local-T_received", "Global-T_received")


def make_run(
    folder: Path,
    method="Alpha",
    seed=0,
    clients=5,
    rounds=3,
    classes=("0", "1", "2"),
    level=0.6,
    sends=True,
    partition_hash=None,
    beta=0.5,
    terms=("cross_entropy",),
) -> Path:
    """Write `metrics.csv`, `clients.csv`, `summary.json`, `partition.json` and `config.yaml` of a run."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, len(method)])
    names = [f"{name}{part}" for name in ACCURACIES for part in ("", "_std", "_min")]
    losses = ["loss", *(f"loss/{term}" for term in terms)]
    metrics = MetricsFile(
        folder / "metrics.csv",
        ["round", *names, "Server-T", "receive_drop", "uplink_bytes", "downlink_bytes", "seconds", *losses],
    )
    own = MetricsFile(folder / "clients.csv", ["round", "client", "num_train", "num_test", *ACCURACIES, "loss"])
    rows, client_rows = [], []
    for round in range(1, rounds + 1):
        row = {"round": round, "seconds": 0.5, "receive_drop": 0.1 / round, "Server-T": level if sends else None}
        row |= {"uplink_bytes": 1000 * sends, "downlink_bytes": 1000 * sends} | dict.fromkeys(losses, 1 / round)
        scores = {name: np.clip(level + 0.1 * draw.normal(size=clients), 0, 1) for name in ACCURACIES}
        for name, values in scores.items():
            own_row = {name: values.mean(), f"{name}_std": values.std(), f"{name}_min": values.min()}
            row |= {column: float(value) for column, value in own_row.items()}
        rows.append(row)
        for client in range(clients):
            figures = {name: float(values[client]) for name, values in scores.items()}
            client_rows.append({"round": round, "client": client, "num_train": 30, "num_test": 10, **figures})
    metrics.start(metrics.lines(rows))
    own.start(own.lines(client_rows))
    counts = draw.integers(0, 20, size=(clients, len(classes))).tolist()
    digest = partition_hash or f"{seed:064d}"
    about = {"name": folder.name, "method": method, "seed": seed, "finished": True, "rounds": rounds}
    about |= {"clients": clients, "partition_hash": digest, "versions": {"python": "3"}, "git_commit": "abc"}
    (folder / "summary.json").write_text(json.dumps({**about, **summarise(rows)}))
    held = {"hash": digest, "dataset": "Digits", "partition": "Dirichlet", "seed": seed, "classes": list(classes)}
    (folder / "partition.json").write_text(json.dumps({**held, "class_counts": counts, "clients": []}))
    config = {
        "seed": seed,
        "name": folder.name,
        "output": str(folder.parent),
        "method": {"class_path": f"package.{method}"},
        "data": {
            "dataset": {"class_path": "data.Digits"},
            "partition": {"class_path": "data.Dirichlet", "init_args": {"beta": beta}},
            "num_clients": clients,
        },
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder
