"""Crafted configurations and run folders: does any execute something that is no class of the kind that its key expects?

    python benchmarks/crafted.py            # every payload at every place; about 10 minutes
    python benchmarks/crafted.py --places 9 # every third place

A payload leaves a file behind if it is called, or if its module is imported. For `fit`, a module of one's own may be
imported where a class is expected, and nowhere else; for `evaluate` and `compare` nothing may.
"""

from __future__ import annotations

import argparse
import copy
import json
import pickle
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
    options = parser.parse_args()
    warm_up()
    every = [*CLASS_PLACES, *DATA_PLACES]
    chosen = every if not options.places else every[:: max(1, len(every) // options.places)]
    print(json.dumps(try_all(chosen)))


def try_all(places: list[str]) -> dict[str, int]:
    """Counts: tried, executed where nothing may be, own modules that `fit` imported for a class, tracebacks."""
    counts = {"tried": 0, "executed": 0, "own modules imported for a class": 0, "tracebacks": 0, "accepted": 0}
    with tempfile.TemporaryDirectory() as top:
        for index, (place, name, config) in enumerate(crafted(places)):
            for command in ("fit", "evaluate", "compare"):
                folder = Path(top) / f"{index}-{command}"
                folder.mkdir()
                lay_traps(folder)
                (folder / "exp.yaml").write_text(yaml.safe_dump(config))
                argv = ["fit", "--config", "exp.yaml", "--quiet"]
                if command != "fit":
                    run_folder = folder / "runs" / "run"
                    run_folder.mkdir(parents=True)
                    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
                    (run_folder / "metrics.csv").write_text("round,seconds\n1,1\n")
                    (run_folder / "clients.csv").write_text("round,client\n1,0\n")
                    argv = [command, "runs/run", *(["runs/run"] if command == "compare" else [])]
                code, err, _ = run(argv, folder, trains=False)
                counts["tried"] += 1
                counts["tracebacks"] += "Traceback" in err or code not in (0, 1, 2)
                counts["accepted"] += code == 0 and command != "compare"
                own = name.partition(".")[0] in ("evil", "package")
                if executed(folder):
                    said = "imports your own module" in err
                    kind = (
                        "own modules imported for a class"
                        if own and said and command == "fit" and place in CLASS_PLACES
                        else "executed"
                    )
                    counts[kind] += 1
                    if kind == "executed":
                        print(f"executed: {command} {place} {name}: {err.strip()[-200:]}", flush=True)
                elif "Traceback" in err or (code == 0 and command != "compare"):
                    print(f"{command} {place} {name}: {code} {err.strip()[-300:]}", flush=True)
    return counts


if __name__ == "__main__":
    main()
