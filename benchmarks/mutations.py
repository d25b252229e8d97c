"""Mutated configurations: does any give a traceback, a hang, a key that nobody wrote, a long line, or pass as sense?

    python benchmarks/mutations.py                     # 5,000 over six files, about 20 minutes on one core
    python benchmarks/mutations.py --number 300 --seed 7 --show
    python benchmarks/mutations.py --only 960,1300     # those that failed, again

Each mutation runs in a process forked from one that has imported everything; `fit` goes as far as it does before the
first round: configuration, data, clients and Trainer are all there. One in `--train` runs its round,
too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FILES = (
    "quickstart", "fedcpd/fmnist_dirichlet01", "feddw/cifar100_practical", "drdfl/cifar10_dirichlet01",
    "fedproto/mnist",
    "fedcpd/cifar10_dirichlet01",
)  # fmt: skip
RICH = {
    "federation": {
        "failures": {"probability": 0.1, "schedule": {"1": [0]}},
        "newcomers": {"clients": 0, "after": 0},
        "checkpoint": {"every": 1, "keep": 2},
        "evaluate": {"trained": True, "batch_size": 64},
        "wire": [{"class_path": "TopK", "init_args": {"share": 0.5}}],
        "server_optimizer": {"class_path": "ServerAdam", "init_args": {"lr": 0.1}},
        "aggregator": {"class_path": "TrimmedMean", "init_args": {"share": 0.2}},
    },
    "trainer": {
        "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "norm",
        "accumulate_grad_batches": 1,
        "limit_train_batches": 3,
        "max_steps": 5,
        "max_time": "00:01:00:00",
        "callbacks": [{"class_path": "Timer", "init_args": {"interval": "epoch"}}],
        "profiler": None,
    },
    "data": {"augmentation": [{"class_path": "RandomCrop", "init_args": {"size": 8, "padding": 1}}]},
    "logger": {"class_path": "CSVLogger", "init_args": {"name": "log", "flush_logs_every_n_steps": 10}},
}
"""What the last file is given on top, so that every kind of place is there."""
LONGEST, SLOWEST = 300, 10  # characters, seconds
VALUES = [
    None, [], {}, "", "abc", -1, 0, 1, 0.5, 1e308, 10**30, 2**63, -(2**63), True, math.nan, math.inf, -math.inf,
    "é\u202e", 10**400, -0.0, 2**31, 2**32, 1.0, "-1", "~", "true", "yes", "12:30", "0x10", "1_000", "$HOME", "{}",
    "%s%n", "=1+1", "a\nb", "\ufeff", " ", "-", "--seed", ".", "..", "/", "~/x", "http://127.0.0.1:1/x.yaml",
    {"class_path": None}, {"class_path": []}, {"class_path": "FedAvg", "init_args": 5}, {"class_path": "SGD", "x": 1},
    {"": ""}, {None: 1}, {1: 2}, [{}], [{"class_path": "FedAvg"}], {"init_args": {"init_args": {}}},
    "x" * 5000, "nul\0", "2024-13-45", [1] * 1000, [[[]]],
    {"class_path": "os.system", "init_args": {"command": "true"}},
    {"class_path": "../../x"}, "../../x", [None], {"a": 1}, [1, "a"], "FedAvg", {"class_path": "MLP"}, "1e-3", -0.5, 7,
    {"class_path": 5}, {"init_args": {}}, "builtins.eval", 1e-300, "null", [0.1, 0.2], 2**62, "\ud800",
]  # fmt: skip
NUMBERS = (
    "rounds",
    "num_clients",
    "batch_size",
    "local_epochs",
    "keep",
    "accumulate_grad_batches",
    "limit_train_batches",
)
TEXTS = {
    "duplicate": lambda text, draw: _twice(text, draw),
    "recursive alias": lambda text, draw: text + "\nname: &a [*a]\n",
    "growing aliases": lambda text, draw: text + "\nname:\n" + _laughs(),
    "tag": lambda text, draw: re.sub(r": (\d+)\n", ": !!python/object/apply:os.getcwd []\n", text, count=1),
    "cut": lambda text, draw: text[: draw.randrange(len(text))] + "\n  : ]",
    "deep": lambda text, draw: text + "\nname: " + "[" * 3000 + "]" * 3000,
    "null byte": lambda text, draw: text.replace(":", ":\0", 1),
    "tab": lambda text, draw: text.replace("\n  ", "\n\t", 1),
    "two documents": lambda text, draw: f"{text}\n---\n{text}",
    "directive": lambda text, draw: f"%YAML 9.9\n---\n{text}",
    "list on top": lambda text, draw: "- a\n- b\n",
    "text on top": lambda text, draw: "quickstart",
    "empty": lambda text, draw: "# nothing\n",
    "binary": lambda text, draw: f"{text}\nname: !!binary aGVsbG8=\n".replace("name: mutant\n", ""),
    "set": lambda text, draw: text.replace("name: mutant", "name: !!set {a, b}"),
    "python name": lambda text, draw: text.replace("seed: 0", "seed: !!python/name:os.getcwd"),
    "own tag": lambda text, draw: text.replace("seed: 0", "seed: !mine 0"),
    "key of a list": lambda text, draw: f"? [a, b]\n: 1\n{text}",
    "key of a mapping": lambda text, draw: f"? {{a: b}}\n: 1\n{text}",
    "digits": lambda text, draw: text.replace("seed: 0", f"seed: {'9' * 6000}"),
    "exponent": lambda text, draw: text.replace("seed: 0", "seed: 1e999999999"),
    "merge of a text": lambda text, draw: f"<<: abc\n{text}",
    "merge of itself": lambda text, draw: f"{text}\nx: &a {{<<: *a}}\n",
    "unknown alias": lambda text, draw: text.replace("seed: 0", "seed: *nowhere"),
    "half a character": lambda text, draw: text.replace("mutant", 'mutant"\ud800"'),
    "UTF-16": lambda text, draw: "".join(f"{letter}\0" for letter in text),
    "large": lambda text, draw: text + "# x\n" * 2_000_000,
    "many keys": lambda text, draw: text + "".join(f"k{n}: 1\n" for n in range(50_000)),
}
"""Mutations of the text; each must be refused (a cut where that leaves no YAML)."""
HARMLESS = {
    "CRLF": lambda text, draw: text.replace("\n", "\r\n"),
    "byte order mark": lambda text, draw: f"\ufeff{text}",
    "marks of a document": lambda text, draw: f"---\n{text}...\n",
    "comments": lambda text, draw: "# é\n" + text.replace("\n", "  # x\n"),
    "anchor": lambda text, draw: text.replace("seed: 0", "seed: &s 0"),
    "merge": lambda text, draw: text.replace("trainer:\n", "trainer:\n  <<: {max_steps: 3}\n"),
}
"""Mutations of the text that change nothing."""


def _twice(text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    keys = [n for n, line in enumerate(lines) if re.fullmatch(r"\s*[\w]+: [^\s{\[].*", line)]
    line = draw.choice(keys)
    return "\n".join([*lines[: line + 1], lines[line], *lines[line + 1 :]])


def _laughs() -> str:
    lines = ["  - &a [" + ", ".join("x" * 10) + "]"]
    for index in range(9):
        lines.append(f"  - &{chr(98 + index)} [" + ", ".join([f"*{chr(97 + index)}"] * 10) + "]")
    return "\n".join(lines)


@dataclass
class Mutant:
    """A mutated file.

    Args:
        base: which file.
        what: the mutation, in words.
        text: what is left of the file.
        path: the key that was changed, without ``init_args``.
        nonsense: whether it must be refused.
        files: what lies there beside `exp.yaml`, or instead of it.
        argv: how they are named.
        environment: variables on top.
        harmless: whether it must be taken.
    """

    base: str
    what: str
    text: str
    path: str
    nonsense: bool
    files: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ("--config", "exp.yaml")
    environment: dict[str, str] = field(default_factory=dict)
    harmless: bool = False


def bases() -> dict[str, Any]:
    """The files, on Digits with a small MLP, four clients and one round."""
    found = {}
    for name in FILES:
        config = yaml.safe_load((ROOT / "experiments" / f"{name}.yaml").read_text())
        config["data"] = {**config["data"], "dataset": "Digits", "num_clients": 4}
        config["model"] = {"class_path": "MLP", "init_args": {"hidden": [16, 8]}}
        config["federation"] = {**config.get("federation", {}), "rounds": 1}
        config["trainer"] = {**config.get("trainer", {}), "accelerator": "cpu"}
        config |= {"seed": 0, "name": "mutant", "output": "runs"}
        if name == FILES[-1]:
            for section, more in RICH.items():
                config[section] = {**config.get(section, {}), **more}
            config["method"] = {"class_path": "FedAvg", "init_args": {"extra_terms": [{"class_path": "Proximal"}]}}
        if name.startswith(("drdfl", "fedproto")):
            config["data"]["partition"] = {"class_path": "Dirichlet", "init_args": {"beta": 0.5, "min_samples": 10}}
            config["data"]["batch_size"] = 64
        found[name] = config
    return found


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value."""
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        found += places(value, (*path, name))
    return found


def mutate(base: str, config: Any, draw: random.Random) -> Mutant:
    """One mutation of a configuration."""
    original, config = config, copy.deepcopy(config)
    if draw.random() < 0.08:
        what = draw.choice(sorted(TEXTS | HARMLESS))
        text = (TEXTS | HARMLESS)[what](yaml.safe_dump(config, sort_keys=False), draw)
        return Mutant(base, what, text, "", what in TEXTS and what != "cut", harmless=what in HARMLESS)
    path = draw.choice(places(config))
    above = config
    for name in path[:-1]:
        above = above[name]
    last, old = path[-1], above[path[-1]]
    kind = draw.choice(["value"] * 6 + ["rename", "add", "delete"])
    nonsense, key = False, path
    if kind == "delete":
        del above[last]
    elif kind == "value":
        new = draw.choice(VALUES)
        above[last] = new
        nonsense = _is_nonsense(path, old, new)
        kind = f"value {new!r}"[:80]
    else:
        names = {"rename": f"{last}x", "add": "unheard_of"}
        new_name = draw.choice([names[kind], "", "ä", 5, "a.b", "x" * 400, "class_pth"])
        target = above if kind == "rename" else old
        if not isinstance(target, dict) or (kind == "rename" and isinstance(last, int)) or new_name in target:
            return mutate(base, original, draw)
        if kind == "rename":
            del above[last]
        target[new_name] = old if kind == "rename" else 1
        key = (*(path[:-1] if kind == "rename" else path), new_name)
        nonsense = "schedule" not in path
        kind = f"{kind} to {new_name!r}"[:60]
    dotted = ".".join(str(part) for part in key if part != "init_args")
    mutant = Mutant(base, kind, _dumped(config), dotted, nonsense)
    if kind.startswith("value") and draw.random() < 0.4:
        _say_otherwise(mutant, original, path, new, draw)
    return mutant


def _say_otherwise(mutant: Mutant, original: Any, path: tuple[Any, ...], new: Any, draw: random.Random) -> None:
    """Give the new value by an option, a variable or a second file."""
    old: Any = original
    for part in path:
        old = old[part]
    said = new if isinstance(new, str) else yaml.dump(new, Dumper=_Dumper, default_flow_style=True, width=10**9)
    said = said.removesuffix("...\n").removesuffix("\n") if not isinstance(new, str) else said
    dotted = ".".join(map(str, path))
    short = ".".join(str(part) for part in path if part != "init_args")
    way = draw.choice(["option", "short option", "equals", "added", "second file", "variable"])
    if any(isinstance(part, int) for part in path) and way in ("second file", "variable"):
        way = "option"
    mutant.what += f", {way}"
    mutant.files["exp.yaml"] = _dumped(original)
    if way == "second file":
        for part in reversed(path):
            new = {part: new}
        mutant.files["more.yaml"] = _dumped(new)
        mutant.argv += ("--config", "more.yaml")
    elif way == "variable" and not set(said) & {"\0", "\ud800"}:
        mutant.files["exp.yaml"] = _dumped(_without(original, path))  # a file says more than a variable
        mutant.environment["FL_LIGHTNING_FIT__" + "__".join(map(str, path)).upper()] = said
    elif way == "equals":
        mutant.argv += (f"--{dotted}={said}",)
    elif way == "added":
        mutant.argv += (f"--{dotted}+", said)
        mutant.nonsense = False
    else:
        mutant.argv += (f"--{short if way == 'short option' else dotted}", said)
    words = isinstance(old, str) and way != "second file"  # where a text stands, `inf` is a text, too
    if isinstance(new, (str, dict, list)) or words:  # a text may say a number, a mapping is laid over what was there
        mutant.nonsense = False


def _without(config: Any, path: tuple[Any, ...]) -> Any:
    config = copy.deepcopy(config)
    node = config
    for part in path[:-1]:
        node = node[part]
    del node[path[-1]]
    return config


def way_to(config: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Every container above a dotted key, with its own key, outermost first; what is not there is made."""
    node: Any = config
    yield "", node
    parts = key.split(".")
    for place, (name, following) in enumerate(itertools.pairwise(parts), start=1):
        if isinstance(node, list):
            node = node[int(name)]
        else:
            if not isinstance(node.get(name), (dict, list)):
                node[name] = [{}] if following.isdigit() else {}
            node = node[name]
        yield ".".join(parts[:place]), node


def _dumped(config: Any) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _is_nonsense(path: tuple[Any, ...], old: Any, new: Any) -> bool:
    """Whether the new value cannot be meant, wherever it stands."""
    if isinstance(new, float) and not math.isfinite(new):
        return True
    if isinstance(new, dict) and new.get("class_path") in ("os.system", "../../x", 5):
        return True
    if isinstance(new, str) and ("\0" in new or "\ud800" in new or len(new) > 1000):
        return True
    if isinstance(old, (int, float)) and not isinstance(old, bool) and new != "1e-3":  # which is a number here
        if isinstance(new, (str, list, dict, bool)):
            # a list of devices, a share of failures, a hidden layer, workers: auto, a fast run of one batch
            return path[-1] not in ("newcomers", "devices", "lr", "filters") or isinstance(new, (str, dict))
        return path[-1] in NUMBERS and isinstance(new, (int, float)) and new <= 0
    return (isinstance(old, bool) and isinstance(new, (list, dict))) or (isinstance(old, (dict, list)) and new == "abc")


# --- running --------------------------------------------------------------------------------------------------------


def run(
    argv: list[str],
    folder: Path,
    trains: bool,
    limit: float = 2 * SLOWEST,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str, float]:
    """A command in a forked process: exit code (-9 for one that takes longer than the limit), stderr, seconds.

    Seconds are those that it computed: a machine that is busy makes nothing slow. One that waits for ever ends, too.
    """
    errors = folder / "stderr"
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            gc.disable()
            os.chdir(folder)
            os.environ |= environment
            for number, path in ((1, os.devnull), (2, str(errors))):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
            code = _command(argv, trains)
        finally:
            sys.stderr.flush()
            os._exit(code)
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - start > 30 * limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.003)
    code = os.waitstatus_to_exitcode(status)
    said = errors.read_text(errors="replace") if errors.exists() else ""
    return code, said, used.ru_utime + used.ru_stime


def _command(argv: list[str], trains: bool) -> int:
    import traceback

    from fl_lightning import cli, config_commands
    from fl_lightning.experiment import BuiltExperiment

    if not trains:

        def only_check(self: Any, resume: Any = None, overwrite: Any = False, callbacks: Any = None) -> Any:
            self.check(resume, overwrite)
            raise SystemExit(0)

        BuiltExperiment.fit = only_check  # type: ignore[method-assign]
    config_commands.draw_run = lambda *arguments: None  # type: ignore[assignment]
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        cli.main(argv)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def warm_up() -> None:
    """Import all that a command could need, so that a fork has it."""
    import torch

    import fl_lightning.experiment
    import fl_lightning.report.console
    import fl_lightning.report.wandb  # noqa: F401
    from fl_lightning.federation.trainers import make_trainer
    from fl_lightning.parser import resolve
    from fl_lightning.reading import load_yaml
    from fl_lightning.trust import Trust

    torch.set_num_threads(1)
    make_trainer({"accelerator": "cpu"})
    resolve({"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}}, Trust())
    import torchvision.transforms.v2  # noqa: F401

    for config in bases().values():  # what is read off signatures is kept
        resolve(load_yaml(yaml.safe_dump(config)), Trust())
    gc.freeze()  # a collection would touch, and so copy, every page that a fork shares


def judge(mutant: Mutant, code: int, err: str, seconds: float) -> list[str]:
    """What is wrong with how a mutant was answered; one that trains may end in a line about a sick client."""
    wrong = []
    lines = [line for line in err.splitlines() if not line.startswith("fl-lightning: imports your own module")]
    sick = code == 1 and len(lines) == 1 and lines[0].startswith("fl-lightning: error: round 1, client ")
    if "Traceback" in err or not (sick or code in (0, 2)):
        wrong.append("traceback" if code not in (-9, -24) else "hang")
    elif seconds > SLOWEST:
        wrong.append("slow")
    if any(len(line) > LONGEST for line in lines):
        wrong.append("long line")
    if code == 2:
        if len(lines) != 1 or not lines[0].startswith("fl-lightning: error: "):
            wrong.append("not one line")
        elif mutant.path and not _names_the_key(mutant, lines[0].removeprefix("fl-lightning: error: ")):
            wrong.append("wrong key")
    if code == 0 and mutant.nonsense:
        wrong.append("nonsense accepted")
    if code == 2 and mutant.harmless:
        wrong.append("sense refused")
    return wrong


def _names_the_key(mutant: Mutant, message: str) -> bool:
    """Whether the key of a message is the changed one, one above or below it, or another one of the file."""
    key = message.partition(": ")[0].removesuffix("+")  # an option that adds to a list
    named = ".".join(part for part in key.split(".") if part != "init_args")
    if named == mutant.path or "…" in named:
        return True
    related = named.startswith(f"{mutant.path}.") or mutant.path.startswith(f"{named}.") or not named
    written = {".".join(str(p) for p in path if p != "init_args") for path in places(yaml.load(mutant.text, _Any))}
    above = named.rpartition(".")[0]  # a key that is required, and left out
    escaped = mutant.path.encode("unicode_escape").decode()
    return related or named in written or (above in written and "must be given" in message) or named in escaped


class _Any(yaml.SafeLoader):
    pass


def main() -> None:
    """Run the mutations and print what was wrong with each, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=20, help="one in so many runs a round")
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--only", type=lambda text: {int(part) for part in text.split(",")}, help="so numbered ones")
    options = parser.parse_args()
    warm_up()
    print(json.dumps(mutations(options.number, options.seed, options.train, options.show, options.only)))


def mutations(
    number: int, seed: int, train: int, show: bool = False, only: Collection[int] | None = None
) -> dict[str, int]:
    """Counts of what was wrong, by kind; prints every such mutant."""
    draw, found, configs = random.Random(seed), Counter(), bases()
    with tempfile.TemporaryDirectory() as place:
        for index in range(number):
            base = FILES[index % len(FILES)]
            mutant = mutate(base, configs[base], draw)
            if only is not None and index not in only:
                continue
            folder = Path(place) / str(index)
            folder.mkdir()
            for name, text in {"exp.yaml": mutant.text, **mutant.files}.items():
                (folder / name).write_text(text, errors="surrogatepass")
            argv = ["fit", *mutant.argv, "--quiet"]
            trains = train > 0 and index % train == 0
            code, err, seconds = run(argv, folder, trains, environment=mutant.environment)
            if trains and code in (-9, -24):  # it trains for long, as it was told, or does not come to that
                code, err, seconds = run([*argv, "--overwrite"], folder, False, environment=mutant.environment)
            wrong = judge(mutant, code, err, seconds)
            found.update([*wrong, "refused" if code == 2 else "accepted" if code == 0 else "failed"])
            if wrong or show:
                last = err.strip().splitlines()[-1][:330] if err.strip() else ""
                print(
                    f"{wrong} {index} {base} [{mutant.path}] {mutant.what}: {code}, {seconds:.1f} s: {last}", flush=True
                )
    return dict(found)


if __name__ == "__main__":
    main()
