"""`--help`: every option with its type, its default and what its docstring says."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fl_lightning import catalog
from fl_lightning.command_line import OPTIMIZER
from fl_lightning.errors import refuse
from fl_lightning.precheck import METHOD_SKIPS, MODEL_SKIPS, trainer_skips
from fl_lightning.trust import import_name

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

HELP = {
    "config": "a YAML file; may be given several times, later ones win",
    "seed": "seed of everything random",
    "name": "the run's name; default: method, data set and seed",
    "output": "folder of runs; the run's own is <output>/<name>",
    "model": "models, each for some of the clients",
    "logger": "one of Lightning's loggers, or a list of them (class_path and init_args); they receive the values of "
    "metrics.csv, and write into the run's folder unless they are given a save_dir",
}


def explain(command: str, description: str, words: Sequence[str], own: Mapping[str, Mapping[str, Any]]) -> NoReturn:
    """Print the help of a command that takes a configuration, or of a class (``--method.help FedRep``), and exit.

    Args:
        command: the subcommand.
        description: what it does.
        words: the word that asks for help, and what follows it.
        own: the command's own options, as `add_argument` takes them.
    """
    parser = help_parser(command, description)
    for name, option in own.items():
        parser.add_argument(f"--{name}", **option)
    asks_for_class = words[0].partition("=")[0].endswith(".help")
    parser.parse_args(words[:2] if asks_for_class else ["--help"])
    sys.exit(0)


def help_parser(command: str, description: str) -> ArgumentParser:
    """A parser that knows every option of a configuration; it only explains them."""
    import lightning as L
    from jsonargparse import ArgumentParser

    class OneLineParser(ArgumentParser):
        """Says what is wrong in one line."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            refuse(f"help: {message}")

    sys.path.insert(0, os.getcwd())  # a user's own classes
    for module in (name for kind in catalog.KINDS for name in catalog.modules(kind)):
        importlib.import_module(module)
    prefix = f"FL_LIGHTNING_{command.upper()}_"
    parser = OneLineParser(prog=f"fl-lightning {command}", description=description, default_env=True, env_prefix=prefix)
    optional: Any = str | None
    parser.add_argument("--config", action="config", help=HELP["config"])
    parser.add_argument("--seed", type=int, default=0, help=HELP["seed"])
    parser.add_argument("--name", type=optional, help=HELP["name"])
    parser.add_argument("--output", type=str, default="runs", help=HELP["output"])
    for key, base, skips in (
        ("method", catalog.KINDS["methods"][1], METHOD_SKIPS),
        ("model", catalog.KINDS["models"][1], MODEL_SKIPS),
        ("optimizer", "torch.optim.Optimizer", {"params"}),
    ):
        parser.add_subclass_arguments(import_name(base), key, skip=set(skips), required=False, instantiate=False)
    parser.set_defaults({"optimizer": OPTIMIZER})
    for section, class_path in catalog.GROUPS.items():
        parser.add_class_arguments(import_name(class_path), section, instantiate=False)
    parser.add_class_arguments(L.Trainer, "trainer", skip=trainer_skips(), instantiate=False)
    parser.set_defaults({"trainer.devices": 1})
    parser.add_argument("--logger", type=optional, help=HELP["logger"])
    return parser
