"""Random federations beside their twins, which do the same another way: does what is promised to change nothing do so?

    python benchmarks/twins.py                    seeds 0 to 299
    python benchmarks/twins.py 500 2000           seeds 500 to 1,999
    python benchmarks/twins.py 1234 --show        one of them, and what it is

A seed draws a federation on Digits: method and its options, models, data, participation, failures, exchange, robust
rule, filters, attack, measures, callbacks, trainer. It is run as it is, and again with two workers, killed and resumed,
on disk (the same bits are asked of them), and, where it is in double precision, stacked, recorded, with nothing
recalled (the same but for rounding); and `evaluate` is asked to find its figures again. One line for each that does
not; the seed repeats it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import inspect
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from workplaces import workplaces

CLOSE = 1e-6
"""By how much, relatively, what rounding alone may have moved is another number."""
EXACT: dict[str, dict[str, Any]] = {
    "two workers": {"workers": 2},
    "on disk": {"pool": "disk", "steps_per_bundle": 1, "checkpoint": {"every": 2}},
    "killed": {},
    "killed, then two workers": {},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "stacked": {"cohort": 3},
    "all stacked": {"cohort": 6, "pool": "disk"},
    "recorded": {"graph": "auto"},
    "stacked and recorded": {"cohort": 4, "graph": "auto"},
    "stacked by two workers": {"cohort": 3, "workers": 2},
    "recorded by two workers": {"graph": "auto", "workers": 2},
    "stacked, recorded and killed": {"cohort": 3, "graph": "auto"},
    "not recalled": {"recall": 0},
}
EVALUATED = "evaluated"
KILLED: dict[str, str] = {
    "stacked by two workers, killed": "stacked by two workers",
}
"""Twins that must be the very ones of others, to the last bit."""
KINDS = (EVALUATED, *EXACT, *ROUNDED, *KILLED)
COUNTED = ("uplink_", "downlink_")
"""Columns that no rounding moves."""
DOUBLE = "64-true"
"""The precision in which a difference is none of rounding; in the others, only what makes the same bits is compared."""
NET = """
import lightning
import torch
from torch import nn

from fl_lightning.federation.callbacks import FederationCallback


class Warmup(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 * min(1, (index + 1) / 4)


class Noise(lightning.Callback):
    def on_train_start(self, trainer, module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.001 * torch.randn_like(parameter))


class Counts(FederationCallback):
    rounds = 0

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]

    def on_round_end(self, loop, row):
        self.rounds += 1
        if self.rounds != row["round"]:
            raise RuntimeError(f"{self.rounds} rounds counted, {row['round']} made")


class Net(nn.Module):
    def __init__(self, width=4, norm=True, dropout=0.0):
        super().__init__()
        conv = nn.Conv2d(1, width, 3, padding=1, bias=not norm)  # whose gradient would be rounding, which Adam enlarges
        self.conv = nn.Sequential(conv, nn.BatchNorm2d(width) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2))
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(width * 16, 10)

    def forward(self, x):
        return self.fc(self.drop(self.conv(x).flatten(1)))
"""


# --- what is drawn ----------------------------------------------------------------------------------------------------


class Draw(random.Random):
    """Random choices of a configuration."""

    def chance(self, share: float) -> bool:
        """Whether something is taken that is in so many configurations."""
        return self.random() < share

    def of(self, known: dict[str, dict[str, Any]], share: float = 1.0) -> dict[str, Any] | None:
        """One of some classes with its arguments; none in other configurations than so many."""
        if not self.chance(share):
            return None
        name = self.choice(sorted(known))
        return {"class_path": name.partition(" ")[0], "init_args": dict(known[name])}


def configuration(seed: int) -> dict[str, Any]:
    """A federation; some are refused, for what they combine."""
    draw = Draw(seed)
    config: dict[str, Any] = {
        "seed": seed,
        "name": "run",
        "output": "runs",
        "method": _method(draw),
        "model": _model(draw),
        "optimizer": draw.of(OPTIMIZERS),
        "data": _data(draw),
        "federation": _federation(draw),
        "trainer": {"accelerator": "cpu", "precision": DOUBLE},
    }
    if draw.chance(0.3):
        config["trainer"]["precision"] = draw.choice(["32-true", "bf16-mixed", "bf16-true"])
    if draw.chance(0.15):
        config["trainer"]["accumulate_grad_batches"] = draw.choice([2, 3])
    if draw.chance(0.1):
        config["trainer"]["limit_train_batches"] = draw.choice([2, 0.5])
    if draw.chance(0.1):
        config["trainer"]["callbacks"] = [{"class_path": draw.choice(["nets.Warmup", "nets.Noise"])}]
    if draw.chance(0.1):
        config["federation"]["callbacks"] = [{"class_path": "nets.Counts"}]
    if draw.chance(0.1):
        config["metrics"] = [draw.of(METRICS)]
    if draw.chance(0.15):
        clip = draw.choice(
            [{"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}]
        )
        config["trainer"] |= clip
    return config


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3},
    "Adam": {"lr": 0.002},
    "AdamW": {"lr": 0.002, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.001},
}
TERMS: dict[str, dict[str, Any]] = {
    "Proximal": {"weight": 0.1},
    "Decorrelation": {"weight": 0.1},
    "ModelContrast": {"weight": 0.5},
    "PrototypeAlignment": {"weight": 0.5},
    "LabelDistillation": {"weight": 0.5},
    "Uniformity": {"weight": 0.1},
    "ClassRelation": {"weight": 0.1},
    "HyperFeatures": {"weight": 0.1},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "Dirichlet": {"beta": 0.3, "min_samples": 8},
    "IID": {},
    "Shards": {"shards": 2},
    "QuantitySkew": {"beta": 0.5, "min_samples": 8},
    "ClassesPerClient": {"classes": 3},
}
SHIFTS: dict[str, dict[str, Any]] = {"RotationSkew": {}, "NoiseSkew": {"std": 0.1}, "ConceptShift": {}}
EXCHANGES: dict[str, dict[str, Any]] = {
    "Ring": {},
    "RandomPeers": {"degree": 2},
    "DirectedGraph": {"degree": 2},
}
METRICS: dict[str, dict[str, Any]] = {
    "torchmetrics.classification.MulticlassF1Score": {"num_classes": 10},
    "torchmetrics.classification.MulticlassCalibrationError": {"num_classes": 10},
}
SERVERS: dict[str, dict[str, Any]] = {"ServerMomentum": {}, "ServerAdam": {}, "ServerYogi": {}}
RULES: dict[str, dict[str, Any]] = {
    "CoordinateMedian": {},
    "TrimmedMean": {},
    "NormClipping": {},
    "GeometricMedian": {},
    "CentredClipping": {},
}
FILTERS: dict[str, dict[str, Any]] = {
    "Quantize": {},
    "Quantize with feedback": {"error_feedback": True, "ways": "up"},
    "TopK": {},
    "TopK without feedback": {"share": 0.3, "error_feedback": False},
    "ClipAndNoise": {"clip": 1.0, "noise_multiplier": 0.1},
}


def _method(draw: Draw) -> dict[str, Any]:
    """A method, with some of its options that have names, or are true or false, another way."""
    from fl_lightning import catalog
    from fl_lightning.trust import import_name

    entry = draw.choice(catalog.entries("methods"))
    kind = import_name(entry.class_path)
    init = _options(draw, kind)
    if "extra_terms" in inspect.signature(kind.__init__).parameters and draw.chance(0.3):
        init["extra_terms"] = [draw.of(TERMS)]
    return {"class_path": entry.name, "init_args": init}


def _options(draw: Draw, kind: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, hint in get_type_hints(kind.__init__).items():
        values = get_args(hint) if get_origin(hint) is Literal else (True, False) if hint is bool else ()
        if is_dataclass(hint):
            made[name] = _options(draw, hint)
        elif values and draw.chance(0.3):
            made[name] = draw.choice(values)
    return {name: value for name, value in made.items() if value != {}}


def _model(draw: Draw) -> Any:
    def one(narrow: bool = False) -> dict[str, Any]:
        width = 8 if narrow else 12
        if draw.chance(0.5):
            return {"class_path": "MLP", "init_args": {"hidden": [width, 8]}}
        if draw.chance(0.4):
            args = {"channels": [4, width], "hidden": 8, "kernel_size": 3, "padding": 1}
            return {"class_path": "CNN", "init_args": args}
        network = {"width": 4, "norm": draw.chance(0.7), "dropout": 0.2 if draw.chance(0.2) else 0.0}
        module = {"class_path": "nets.Net", "init_args": network}
        return {"class_path": "WrappedModel", "init_args": {"module": module, "head": "fc", "features": ["conv"]}}

    return [{**one(True), "clients": 2}, {**one(), "clients": 4}] if draw.chance(0.15) else one()


def _data(draw: Draw) -> dict[str, Any]:
    data: dict[str, Any] = {
        "dataset": {
            "class_path": "Sample",
            "init_args": {"dataset": "Digits", "samples": draw.choice([240, 301, 420])},
        },
        "partition": draw.of(PARTITIONS),
        "num_clients": 6,
        "batch_size": draw.choice([4, 8, 13, 32]),
        "drop_last": draw.chance(0.2),
        "validation_fraction": draw.choice([0, 0, 0.2]),
        "split": draw.choice(["holdout", "holdout", "matched", "global"]),
        "shift": draw.of(SHIFTS, 0.2),
    }
    if draw.chance(0.15):
        data["augmentation"] = ["RandomHorizontalFlip"]
    if data["validation_fraction"] and draw.chance(0.3):
        data["evaluate_on"] = "validation"
    return data


def _federation(draw: Draw) -> dict[str, Any]:
    federation: dict[str, Any] = {
        "rounds": draw.choice([3, 4]),
        "participation": draw.choice([1.0, 1.0, 0.7, 0.34]),
        "sampling": "poisson" if draw.chance(0.15) else "fixed",
        "local_epochs": draw.choice([1, 1, 2, 0.5, {"uniform": [1, 3]}, {"choice": [0.5, 2], "each": "client"}]),
        "lr_decay": draw.choice([1.0, 0.9]),
        "evaluate_every": draw.choice([1, 1, 2]),
        "init": "own" if draw.chance(0.2) else "common",
        "share_buffers": not draw.chance(0.2),
        "exchange": draw.of(EXCHANGES, 0.15),
        "server_optimizer": draw.of(SERVERS, 0.1),
        "aggregator": draw.of(RULES, 0.1),
        "evaluate": {
            "fine_tune": {"epochs": 1} if draw.chance(0.1) else None,
            "clients": "participants" if draw.chance(0.1) else "all",
            "trained": not draw.chance(0.1),
            "globally": not draw.chance(0.2),
            "server": not draw.chance(0.1),
            "loss": not draw.chance(0.1),
            "batch_size": 7 if draw.chance(0.1) else None,
        },
    }
    if draw.chance(0.2):
        federation["local_steps"], federation["local_epochs"] = draw.choice([1, 3, {"uniform": [1, 4]}]), 1
    if draw.chance(0.1):
        federation["record_privacy"] = {"noise_multiplier": draw.choice([0.0, 0.5]), "max_grad_norm": 1.0}
    if draw.chance(0.1):
        federation["early_stopping"] = {"patience": 1}
    if draw.chance(0.2):
        federation["failures"] = {"probability": 0.3}
    if draw.chance(0.15):
        federation["newcomers"] = {"clients": 2, "after": 1}
    if draw.chance(0.15):
        federation["wire"] = [draw.of(FILTERS) for _ in range(draw.choice([1, 1, 2, 3]))]
    if draw.chance(0.15):
        kinds = ("noise", "sign_flip", "scale", "label_flip", "same_value", "inner_product")
        federation["attack"] = {"clients": [draw.randrange(6)], "kind": draw.choice(kinds)}
    if draw.chance(0.2):
        federation["on_client_error"], federation["max_growth"] = "skip", draw.choice([1.05, 1.5, 1e4])
    return federation


def without(config: dict[str, Any], said: str) -> bool:
    """Leave out what the line that refuses a federation names; false where that can't be left out."""
    key = said.strip().splitlines()[-1].removeprefix("fl-lightning: error: ").partition(":")[0]
    section, name = [*key.split("."), ""][:2]
    if key == "model" and isinstance(config["model"], list):
        config["model"] = {name: value for name, value in config["model"][1].items() if name != "clients"}
        return True
    known = "nets." not in said and name != "" and isinstance(config.get(section), dict)
    return known and config[section].pop(name, None) is not None


# --- what is compared -------------------------------------------------------------------------------------------------


def fit(place: Any, config: dict[str, Any], kind: str = "", die_at: int = 1) -> tuple[int, str]:
    """Run a federation, or a twin; exit code, and what it said.

    Args:
        place: where.
        config: of the federation.
        kind: of the twin.
        die_at: before which of its operations on files a killed one dies.
    """
    changed = copy.deepcopy(config)
    changed["federation"] |= {**EXACT, **ROUNDED}.get(KILLED.get(kind, kind), {})
    place.draws = False
    (place.path / "nets.py").write_text(NET)
    (place.path / "exp.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    words = ["fit", "--config", "exp.yaml", "--quiet", "--resume", "auto"]
    try:
        if "killed" in kind:
            code, _, said = place.call(*words, die_at=die_at)
            if code != -9 and "was killed by SIGKILL" not in said:
                return code, said
            words += ["--federation.workers", "2"] if kind in EXACT and "two workers" in kind else []
        code, _, said = place.call(*words)
    except AssertionError as error:  # it hangs
        return -1, str(error)
    return code, said


def evaluated(place: Any) -> list[str]:
    """What `evaluate` does not find again in a run."""
    code, out, err = place.call("evaluate", "runs/run", "--trust", "nets")
    if code:
        return [f"failed ({code}): {err.strip()[-300:]}"]
    if "no figure of this round can be computed again" in out:  # without a server, where what clients sent is gone
        return []
    found = [line.split() for line in out.splitlines() if "figures are equal" in line]
    return [] if found and found[0][0] == found[0][2] else [out.strip()[-300:]]


def differences(one: Path, other: Path, close: float) -> Iterator[str]:
    """Where two runs differ: in a row of a table, or in a model; of those with the same bits in their checkpoints, too.

    Args:
        one: the folder of a run.
        other: of another one.
        close: by how much, relatively, numbers may differ; 0 asks for the same bits.
    """
    if not close:
        from cli.run_files import read_run

        own, new = read_run(one), read_run(other)
        yield from (name for name in own if own[name] != new[name])
        return
    for name in ("metrics.csv", "clients.csv"):
        rows, others = _rows(one / name), _rows(other / name)
        if len(rows) != len(others) or (rows[:1] and rows[0].keys() != others[0].keys()):
            yield f"{name} has other rows or columns"
            continue
        for number, (own, new) in enumerate(zip(rows, others, strict=True)):
            for column, cell in own.items():
                tolerance = 0.0 if column.startswith(COUNTED) else close
                if not column.startswith("seconds") and not _same(cell, new[column], tolerance):
                    yield f"{name} row {number + 1} {column}: {cell} and {new[column]}"
    states, others = (
        {path.name: torch.load(path, weights_only=True) for path in sorted((folder / "models").glob("*.pt"))}
        for folder in (one, other)
    )
    for name in states.keys() | others.keys():
        state, again = states.get(name, {}), others.get(name, {})
        for key in state.keys() | again.keys():
            if key not in state or key not in again or not _alike(state[key], again[key], close):
                yield f"{name} {key}"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def _same(one: str, other: str, close: float) -> bool:
    if one == other:
        return True
    try:
        return math.isclose(float(one), float(other), rel_tol=close, abs_tol=close) if close else False
    except ValueError:
        return False


def _alike(one: torch.Tensor, other: torch.Tensor, close: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=close, atol=close * largest, equal_nan=True)


def _rounds(config: dict[str, Any]) -> bool:
    """Whether rounding decides more than last digits: of the first steps of Adam, all as long, which ones are sent."""
    cuts = any(own["class_path"] == "TopK" for own in config["federation"].get("wire") or ())
    return config["trainer"].get("precision") != DOUBLE or (cuts and config["optimizer"]["class_path"] != "SGD")


def twins(seed: int, make: Any, kinds: list[str], show: bool, found: Counter[str]) -> None:
    """Run a federation and its twins of some kinds."""
    config, draw = configuration(seed), random.Random(-1 - seed)
    if show:
        print(yaml.safe_dump(config, sort_keys=False))
    place = make("plain")
    code, said = fit(place, config)
    while code == 2 and without(config, said):
        code, said = fit(place, config)
    if code:
        kind = "refused" if code == 2 else "sick" if code == 1 and "Error: " not in said else "failed"
        kind = "failed" if "nets." in said else kind  # which are here
        found[kind] += 1
        if kind == "failed" or show:
            print(f"seed {seed}: {kind} ({code}): {said.strip()[-300:]}", flush=True)
        return
    found["federations"] += 1
    rounds = _rounds(config)
    for kind in kinds:
        if rounds and kind in ROUNDED:
            continue
        first = place
        if kind in KILLED:
            first = make("whole")
            code, said = fit(first, config, KILLED[kind])
        if kind == EVALUATED:
            wrong = evaluated(place)
        else:
            twin = make("twin")
            code, said = fit(twin, config, kind, 12 + draw.randrange(40))
            wrong = [f"failed ({code}): {said.strip()[-300:]}"] if code else []
            wrong = wrong or list(differences(first.run, twin.run, CLOSE if kind in ROUNDED else 0.0))
        found["twins"] += 1
        if wrong:
            found["not the same"] += 1
            what = f"seed {seed}, {config['method']['class_path']}, {kind}"
            print(f"{what}: {wrong[0]} (and {len(wrong) - 1} more)", flush=True)
        elif show:
            print(f"{kind}: the same", flush=True)


def main() -> int:
    """Run all federations; the exit code says whether one has another twin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("end", type=int, nargs="?", help="the first seed that is left out")
    parser.add_argument("--twins", type=int, default=3, help="kinds of twins that are drawn for each")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these kinds")
    parser.add_argument("--show", action="store_true", help="print the federations, and try all kinds")
    options = parser.parse_args()
    end = options.end or options.first + (1 if options.show else 300)
    found: Counter[str] = Counter()
    start = time.monotonic()
    with workplaces() as make:
        for seed in range(options.first, end):
            drawn = KINDS if options.show else random.Random(f"kinds of {seed}").sample(KINDS, options.twins)
            twins(seed, make, options.only or list(drawn), options.show, found)
    print(f"{dict(found)}, {time.monotonic() - start:.0f} s")
    return 1 if found["not the same"] or found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
