"""Flip single bits in every file that a run reads back, and count what is loaded with other values: there must be none.

A small run on Digits is made first. Each flip hits a random bit of a random file of one of the kinds below; the
program's own reader must then refuse the file, or give what it gave before.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning import cli
from fl_lightning.data import cache
from fl_lightning.errors import ConfigError
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.segments import load_state
from fl_lightning.report.journal import Journal, RunTables, recover
from fl_lightning.sealed import load_tensors, read_json

FIT = (
    "fit --method FedProto --model MLP --model.hidden [16,8] --data.dataset Digits --data.partition Dirichlet "
    "--data.partition.beta 0.5 --data.num_clients 4 --data.batch_size 64 --federation.rounds 3 "
    "--trainer.accelerator cpu --federation.checkpoint.models true --name run --quiet"
)


def plain(value: Any) -> bytes:
    """A value as bytes, to be compared bit for bit."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def readers(run: Path, cached: Path) -> dict[str, tuple[list[Path], Callable[[Path], Any]]]:
    """Kind of file -> the files of that kind, and how the program reads them."""
    checkpoints = Checkpoints(run / "checkpoints")
    state = checkpoints.load(checkpoints.all()[-1])
    saved = state["callbacks"]["Recorder"]["tables"]
    tables = {name: (run / name).read_text().partition("\n")[0].split(",") for name in saved}

    def states(path: Path) -> Any:
        own = {client: at for client, at in state["clients"].items() if at.segment == path.name}
        return {client: load_state(path.parent, client, at) for client, at in own.items()}

    def journal(path: Path) -> Any:
        return json.dumps(recover(Journal(path), run, state["round"], saved)[0])

    def table(path: Path) -> Any:
        RunTables(run, tables, checkpoints.journal).start(state["round"], saved)
        return path.read_bytes()

    def arrays(path: Path) -> Any:
        found = cache._read(path)
        if found is None:
            raise ConfigError("data.cache", "is decoded again")
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(found).items()
        }

    return {
        "checkpoint": (checkpoints.all(), checkpoints.load),
        "clients' states": (sorted(checkpoints.clients.glob("*.states")), states),
        "model": (sorted((run / "models").glob("*.pt")), lambda path: load_tensors(path, "evaluate")),
        "JSON": ([run / "partition.json", run / "summary.json"], lambda path: read_json(path, "evaluate")),
        "journal": ([checkpoints.journal], journal),
        "table": ([run / name for name in saved], table),
        "data cache": (sorted(cached.glob("*.pt")), arrays),
    }


def flip(path: Path, read: Callable[[Path], Any], draw: random.Random) -> str:
    """Flip one bit, read, and put the file back: ``refused``, ``same`` or ``OTHER VALUES``."""
    before, content = plain(read(path)), path.read_bytes()
    damaged = bytearray(content)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)
    try:
        return "same" if plain(read(path)) == before else "OTHER VALUES"
    except ConfigError:
        return "refused"
    finally:
        path.write_bytes(content)


def main() -> None:
    """Make a run, damage it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        argv = [*FIT.split(), "--output", folder, "--data.cache", f"{folder}/cache"]
        try:
            cli.main(argv)
        except SystemExit as end:
            if end.code:
                raise
        cache.say = lambda text: None  # type: ignore[attr-defined]
        kinds = readers(Path(folder) / "run", Path(folder) / "cache")
        counts = {kind: Counter[str]() for kind in kinds}
        for number in range(options.flips):
            kind = list(kinds)[number % len(kinds)]
            files, read = kinds[kind]
            counts[kind][flip(draw.choice(files), read, draw)] += 1
    for kind, count in counts.items():
        print(f"{kind:16} {dict(count)}")
    print(f"loaded with other values: {sum(count['OTHER VALUES'] for count in counts.values())} of {options.flips}")


if __name__ == "__main__":
    main()
