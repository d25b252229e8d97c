"""Reading a run's folder so that two runs can be compared bit for bit."""

from pathlib import Path

import torch

from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.segments import load_state


def without_seconds(path: Path) -> list[list[str]]:
    """The cells of a metrics.csv but for its columns of seconds."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    left_out = {index for index, name in enumerate(rows[0]) if name.startswith("seconds")}
    return [[cell for index, cell in enumerate(row) if index not in left_out] for row in rows]


def leaves(state, prefix=""):
    """Nested containers as (path, leaf); tensors as dtype, shape and bytes."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{prefix}/{key}")
    elif isinstance(state, torch.Tensor):
        plain = state.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)  # NumPy has no bfloat16
        yield prefix, (str(state.dtype), tuple(state.shape), plain.numpy().tobytes())
    else:
        yield prefix, repr(state)


def loaded(path: Path) -> dict:
    """A file of tensors, ready to be compared bit for bit."""
    found = dict(leaves(torch.load(path, weights_only=True)))
    found.pop("/seconds", None)
    return found


TABLES = ("metrics.csv", "clients.csv", "logged.csv", "topology.csv")


def read_run(folder: Path, numbers=TABLES) -> dict:
    """All numbers and weights of a run: tables but for seconds, the newest checkpoint, clients' states, models."""
    newest = max((folder / "checkpoints").glob("round-*.ckpt"))
    aside = ("/clients/", "/holders/")  # of files that are read by themselves; of the number of workers
    checkpoint = {name: value for name, value in loaded(newest).items() if not name.startswith(aside)}
    states, records = newest.parent / "clients", Checkpoints(newest.parent).load(newest)["clients"]
    return {
        **{name: without_seconds(folder / name) for name in numbers if (folder / name).is_file()},
        "checkpoint": (newest.name, checkpoint),
        "clients": {c: dict(leaves(load_state(states, c, record))) for c, record in sorted(records.items())},
        "models": {path.name: loaded(path) for path in sorted((folder / "models").glob("*.pt"))},
    }
