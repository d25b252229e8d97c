"""Crafted configurations and run folders: does any execute something that is no class of the kind that its key expects?

    python benchmarks/crafted.py              # every payload at every place, under every command
    python benchmarks/crafted.py --places 9   # every third place
    python benchmarks/crafted.py --skip 2000  # goes on where a run was ended: it says every 500 tries how far it is

A payload leaves a file behind if it is called, or if its module is imported. For `fit` and what runs fits (`table`,
`tune`), a module of one's own may be imported where a class is expected, and nowhere else; for commands that read a
run's folder nothing may.
"""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from mutations import run, warm_up, way_to

BASE = {
    "seed": 0,
    "name": "run",
    "output": "runs",
    "method": {"class_path": "FedAvg"},
    "model": {"class_path": "MLP", "init_args": {"hidden": [8, 4]}},
    "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}},
    "data": {
        "dataset": {"class_path": "Digits"},
        "partition": {"class_path": "IID"},
        "num_clients": 2,
        "batch_size": 64,
    },
    "federation": {"rounds": 1},
    "trainer": {"accelerator": "cpu"},
}
CLASS_PLACES = (
    "method", "model", "optimizer", "data.dataset", "data.partition", "data.shift", "data.augmentation.0",
    "federation.exchange",
    "federation.server_optimizer", "federation.aggregator", "federation.wire.0", "federation.callbacks.0",
    "trainer.callbacks.0", "trainer.profiler",
    "trainer.plugins.0", "trainer.strategy", "trainer.accelerator", "logger", "method.init_args.extra_terms.0",
)  # fmt: skip
"""Where the schema has a class."""
DATA_PLACES = (
    "name", "model.init_args.hidden", "optimizer.init_args.lr", "optimizer.init_args.betas", "data.cache",
    "data.partition.init_args.beta", "federation.failures.schedule", "trainer.max_time",
    "trainer.callbacks.0.init_args.filename",
    "trainer.callbacks.0.init_args.on_train_start", "logger.init_args.name", "logger.dict_kwargs.tags",
    "data.augmentation.0.init_args.size",
)  # fmt: skip
"""Where it has none."""
AROUND = {
    "trainer.callbacks.0.init_args.on_train_start": {"class_path": "LambdaCallback"},
    "trainer.callbacks.0.init_args.filename": {"class_path": "ModelCheckpoint"},
    "logger.init_args.name": {"class_path": "CSVLogger"},
    "logger.dict_kwargs.tags": {"class_path": "TensorBoardLogger"},
    "data.augmentation.0.init_args.size": {"class_path": "RandomCrop"},
    "data.partition.init_args.beta": {"class_path": "Dirichlet"},
    "optimizer.init_args.betas": {"class_path": "Adam"},
}
"""The class whose argument a place is."""


def payloads(mark: str) -> dict[str, dict[str, Any]]:
    """Callables that leave `mark` behind, by name."""
    touch = f"open({mark!r}, 'w').close()"
    return {
        "os.system": {"command": f"touch {mark}"},
        "subprocess.Popen": {"args": ["touch", mark]},
        "subprocess.run": {"args": ["touch", mark]},
        "builtins.eval": {"source": touch},
        "builtins.exec": {"source": touch},
        "builtins.open": {"file": mark, "mode": "w"},
        "pathlib.Path": {},
        "shutil.rmtree": {"path": "victim"},
        "shutil.copyfile": {"src": "exp.yaml", "dst": mark},
        "runpy.run_path": {"path_name": "evil.py"},
        "importlib.import_module": {"name": "evil"},
        "logging.FileHandler": {"filename": mark},
        "torch.load": {"f": "evil.pt", "weights_only": False},
        "torch.save": {"obj": 1, "f": mark},
        "torch.hub.load": {"repo_or_dir": ".", "model": "payload", "source": "local"},
        "lightning.fabric.utilities.cloud_io._load": {"path_or_url": "evil.pt", "weights_only": False},
        "torch.utils.tensorboard.SummaryWriter": {"log_dir": mark},
        "fl_lightning.federation.files.write_text": {"path": mark, "text": "x"},
        "fl_lightning.cli.main": {"argv": ["list", "methods"]},
        "evil.touch": {},
        "evil.Payload": {},
        "package.inner.Payload": {},
    }


def put(config: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """The configuration with a value at a place."""
    config = copy.deepcopy(config)
    around = AROUND.get(place, {})
    for here, node in way_to(config, place):
        inside = here and (place.rpartition(".init_args")[0] == here or place.startswith(f"{here}.dict_kwargs"))
        if inside and isinstance(node, dict):
            node |= around
        if here and isinstance(node, list):
            node[0] |= around
    last = place.rpartition(".")[2]
    node[int(last) if isinstance(node, list) else last] = value
    return config


def crafted(places: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Place, payload and configuration, of all of them; a payload's mark is the file `mark`."""
    found = []
    for place in places:
        for name, arguments in payloads("mark").items():
            found.append((place, name, put(BASE, place, {"class_path": name, "init_args": arguments})))
    return found


def lay_traps(folder: Path) -> None:
    """What payloads need: a module, a package and a pickle that leave a mark; a folder to be deleted."""
    evil = (
        "open('mark', 'w').close()\n\n\ndef touch(**_):\n    open('mark', 'w').close()\n\n\nclass Payload:\n    pass\n"
    )
    (folder / "evil.py").write_text(evil)
    (folder / "hubconf.py").write_text(evil)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text(evil)
    (folder / "victim").mkdir()
    (folder / "evil.pt").write_bytes(pickle.dumps(_Touch()))


class _Touch:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch mark",)


def executed(folder: Path) -> bool:
    """Whether something was called or imported."""
    return (folder / "mark").exists() or not (folder / "victim").exists()


def main() -> None:
    """Try all and print what was executed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", type=int, default=0, help="so many of the places; 0 for all")
    parser.add_argument("--skip", type=int, default=0, help="so many tries are left out")
    options = parser.parse_args()
    warm_up()
    every = [*CLASS_PLACES, *DATA_PLACES]
    chosen = every if not options.places else every[:: max(1, len(every) // options.places)]
    print(json.dumps(try_all(chosen, options.skip)))


RUNS_FITS: dict[str, list[str]] = {
    "fit": ["fit", "--config", "exp.yaml", "--quiet"],
    "table": ["table", "table.yaml", "--quiet"],
    "tune": ["tune", "tune.yaml", "--quiet"],
}
READS_FOLDERS: dict[str, list[str]] = {
    "evaluate": ["evaluate", "runs/run"],
    "compare": ["compare", "runs/run", "runs/run"],
    "report": ["report", "runs/run", "--output", "page.html", "--embedding"],
    "predict": ["predict", "runs/run", "x.npy"],
    "export": ["export", "runs/run"],
    "audit": ["audit", "runs/run", "--images", "1", "--steps", "1"],
    "resume": ["fit", "--resume", "runs/run", "--quiet"],
}
READ_AS_TEXT = ("compare", "report")
"""Commands that need no class, so that they may end well."""


def make_run(folder: Path, config: dict[str, Any]) -> None:
    """A run's folder as somebody else could give it away."""
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "00000.pt").write_bytes(b"")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / ".lock").write_text("a run of fl-lightning lies here\n")
    (folder / "metrics.csv").write_text("round,seconds\n1,1\n")
    (folder / "clients.csv").write_text("round,client\n1,0\n")


def make_files(folder: Path, config: dict[str, Any]) -> None:
    """The configuration, and a table and a search over it."""
    (folder / "exp.yaml").write_text(yaml.safe_dump(config))
    above = {"name": "small", "seeds": [0], "base": {"files": ["exp.yaml"]}, "rows": {"A": {}}}
    (folder / "table.yaml").write_text(yaml.safe_dump({**above, "columns": {"B": {}}}))
    space = {"optimizer.init_args.lr": [0.1, 0.2]}
    (folder / "tune.yaml").write_text(yaml.safe_dump({**above, "trials": 2, "space": space}))


def try_all(places: list[str], skip: int = 0) -> dict[str, int]:
    """Counts: tried, executed where nothing may be, own modules that a fit imported for a class, tracebacks."""
    counts = {"tried": 0, "executed": 0, "own modules imported for a class": 0, "tracebacks": 0, "accepted": 0}
    tries = [(*case, command) for case in crafted(places) for command in (*RUNS_FITS, *READS_FOLDERS)]
    with tempfile.TemporaryDirectory() as top:
        for index, (place, name, config, command) in enumerate(tries[skip:], start=skip):
            folder = Path(top) / f"{index}-{command}"
            folder.mkdir()
            lay_traps(folder)
            if command in RUNS_FITS:
                make_files(folder, config)
            else:
                make_run(folder / "runs" / "run", config)
            code, err, _ = run({**RUNS_FITS, **READS_FOLDERS}[command], folder, trains=False)
            accepted = code == 0 and command not in READ_AS_TEXT
            counts["tried"] += 1
            counts["tracebacks"] += "Traceback" in err or code not in (0, 1, 2)
            counts["accepted"] += accepted
            if executed(folder):
                own = name.partition(".")[0] in ("evil", "package") and "imports your own module" in err
                meant = own and command in RUNS_FITS and place in CLASS_PLACES
                counts["own modules imported for a class" if meant else "executed"] += 1
                if not meant:
                    print(f"executed: {command} {place} {name}: {err.strip()[-200:]}", flush=True)
            elif "Traceback" in err or accepted:
                print(f"{command} {place} {name}: {code} {err.strip()[-300:]}", flush=True)
            shutil.rmtree(folder)
            if not (index + 1) % 500:
                print(f"{index + 1} of {len(tries)}", flush=True)
    return counts


if __name__ == "__main__":
    main()
