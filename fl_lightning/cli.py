"""The command line: one function a command. Heavy imports come late, so that a mistake is answered at once."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from fl_lightning import __version__
from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.precheck import (
    FILLED_IN,
    SECTIONS,
    check_classes,
    given_keys,
    listed_models,
    precheck,
    without_replaced,
)

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from fl_lightning.configuration import Config

COMMANDS = {
    "fit": "run a federation: fl-lightning fit --config exp.yaml [--method.init_arg value …]",
    "evaluate": "compute a run's accuracies again from its folder: fl-lightning evaluate runs/quickstart",
    "partition": "show who holds what, as a table and a picture: fl-lightning partition --config exp.yaml",
    "dashboard": "make the W&B dashboard, or draw it: fl-lightning dashboard --project P | --picture FILE runs/a …",
    "list": "what there is: fl-lightning list methods|models|datasets|partitions|exchanges|terms",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exits with 0 when all went well, 1 when `evaluate` finds other figures than the run wrote down or a worker was lost,
    2 on bad input (one line on stderr), 130 when a run was stopped by a signal after saving.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # lightning 2.6 on torch 2.15
    try:
        sys.exit(_dispatch(arguments))
    except ConfigError as error:
        _refuse(str(error) if _is_first_process() else "")


def _is_first_process() -> bool:
    """Whether no other process that torchrun or SLURM started says the same."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: fl-lightning COMMAND …\n")
        print("\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items()))
        print("\nfl-lightning COMMAND --help says more.")
        return 0
    if arguments[0] == "--version":
        print(f"fl-lightning {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise ConfigError("command", f"there is no such command; {suggest(command, COMMANDS)}", command)
    run = {"fit": _fit, "evaluate": _evaluate, "partition": _partition, "dashboard": _dashboard, "list": _list}
    return run[command](rest)


def _refuse(message: str) -> NoReturn:
    if message:
        print(f"fl-lightning: error: {message}", file=sys.stderr)
    sys.exit(2)


# --- commands -----------------------------------------------------------------------------------------------------


def _fit(argv: list[str]) -> int:
    precheck(argv)
    parser = config_parser("fit", "Run a federation from a configuration.", listed_models(argv) is not None)
    parser.add_argument(
        "--resume", type=str | None, help="continue: auto (the newest checkpoint), or a checkpoint's path"
    )  # type: ignore[arg-type]
    parser.add_argument("--overwrite", action="store_true", help="replace the run that the output folder holds")
    parser.add_argument("--quiet", action="store_true", help="print neither progress nor tables")
    options = parse_config(parser, argv)
    config = plain_config(options)

    import torch

    from fl_lightning.experiment import Experiment
    from fl_lightning.federation import launch

    arguments = config, options.resume, options.overwrite, options.quiet
    experiment = Experiment(config)
    team = experiment.team()
    if team.size == 1:
        launch.use_threads(team)
        return _fit_here(*arguments)
    if team.outside:
        launch.join(team)
        with launch.speak_for_the_team(launch.is_main()):
            return _fit_here(*arguments)
    torch.set_num_threads(1)  # a forked process cannot use the threads of the one that it came from
    experiment.check(options.resume, options.overwrite)  # here, so that a mistake is answered by one process
    advice = experiment.advice
    del experiment  # its model and data: workers have their own
    return launch.launch(_fit_here, team, *arguments, advice=advice)


def _fit_here(config: Config, resume: str | None, overwrite: bool, quiet: bool) -> int:
    """Run a federation in this process, which may be one of several."""
    from rich.console import Console

    from fl_lightning.experiment import Experiment
    from fl_lightning.report.console import RoundProgress, print_summary

    console = Console(quiet=quiet)
    experiment = Experiment(config)
    with RoundProgress(console) as progress:
        try:
            summary = experiment.fit(resume, overwrite, callbacks=lambda: [progress])
        except (KeyboardInterrupt, SystemExit):  # Lightning turns a Ctrl-C inside a fit into an exit
            if not experiment.loop.stopping:
                raise
            print("stopped at once; the rounds before this one are saved", file=sys.stderr)
            return 130
    if summary is None:  # not the main process: it has nothing to tell
        return 0
    if not summary["finished"]:
        done, folder = summary["rounds"], experiment.folder
        again = f"fl-lightning fit --config {folder}/config.yaml --resume auto"
        console.print(f"stopped after round {done}, which is saved; continue with\n  {again}", soft_wrap=True)
        return 130
    draw_run(experiment.folder, experiment.data, summary)
    print_summary(summary, console)
    return 0


def draw_run(folder: Path, data: Any, summary: dict[str, Any]) -> None:
    """Draw a finished run's curves and its partition into its folder."""
    from fl_lightning.report.figures import learning_curves, partition_bubbles
    from fl_lightning.report.record import read_rows

    title = f"{summary['method']}, {summary['clients']} clients ({summary['name']})"
    learning_curves(read_rows(folder / "metrics.csv"), folder / "curves.png", title)
    partition_bubbles(data.class_counts(), folder / "partition.png", data.arrays.classes, title)


def _evaluate(argv: list[str]) -> int:
    from jsonargparse import ArgumentParser

    parser = _parser_class()(prog="fl-lightning evaluate", description=COMMANDS["evaluate"])
    parser.add_argument("run", type=str, help="a run's folder")
    parser.add_argument("--checkpoint", type=str, default="auto", help="auto (the newest) or a checkpoint's path")
    assert isinstance(parser, ArgumentParser)
    options = parser.parse_args(argv)
    folder = Path(options.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError("evaluate", "there is no run in that folder", options.run)

    from rich.console import Console
    from rich.table import Table

    from fl_lightning.configuration import read_config
    from fl_lightning.experiment import Experiment

    sys.path.insert(0, os.getcwd())
    experiment = Experiment(read_config(folder / "config.yaml"))
    experiment.folder = folder
    figures = experiment.evaluate(options.checkpoint)
    shown = [
        figure for figure in figures if not figure[0].endswith(("_std", "_min", "_worst10", "_weighted", "_newcomers"))
    ]
    table = Table(title=f"{experiment.name}, round {experiment.loop.round}")
    for column in ("figure", "as the run wrote it", "computed again"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, then, now in shown:
        table.add_row(name, "–" if then is None else f"{100 * then:.2f} %", f"{100 * now:.2f} %")
    Console().print(table)
    different = [name for name, then, now in figures if then is not None and then != now]
    compared = sum(then is not None for _, then, _ in figures)
    if not figures:
        print("no figure of this round can be computed again from its checkpoint")
        return 0
    print(f"{compared - len(different)} of {compared} figures are equal to the last bit")
    if different:
        print(f"different: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def _partition(argv: list[str]) -> int:
    precheck(argv)
    parser = config_parser("partition", "Show who holds what.", listed_models(argv) is not None)
    parser.add_argument("--figure", type=str, default="partition.png", help="where the picture is written")
    options = parse_config(parser, argv)
    config = plain_config(options)

    from rich.console import Console

    from fl_lightning.experiment import Experiment
    from fl_lightning.report.figures import partition_bubbles, partition_table

    data = Experiment(config).data
    data.setup(config["seed"])
    counts = data.class_counts()
    title = f"{type(data.dataset).__name__}, {type(data.partition).__name__}, seed {config['seed']}"
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(partition_table(counts, [client.num_test for client in data.clients], data.arrays.classes))
    path = partition_bubbles(counts, Path(options.figure), data.arrays.classes, title)
    print(f"partition {data.partition_hash[:16]}…, drawn in {path}")
    return 0


def _dashboard(argv: list[str]) -> int:
    parser = _parser_class()(prog="fl-lightning dashboard", description=COMMANDS["dashboard"])
    optional: Any = str | None
    parser.add_argument("runs", type=str, nargs="*", help="folders of the runs that --picture draws")
    parser.add_argument("--project", type=optional, help="the W&B project that gets the dashboard as a workspace")
    parser.add_argument("--entity", type=optional, help="its user or team; default: your own")
    parser.add_argument("--json", type=optional, help="write the dashboard's panels there, as JSON")
    parser.add_argument("--picture", type=optional, help="draw the same panels from runs' folders, as a PNG")
    options = parser.parse_args(argv)

    from fl_lightning.report import dashboard

    wanted = options.project or options.json or options.picture
    require(wanted, "dashboard", "say --project P, --json FILE, or --picture FILE and the runs' folders")
    stray = not options.runs or options.picture
    require(stray, "dashboard", "runs' folders are for --picture FILE", " ".join(options.runs))
    if options.json:
        dashboard.write_definition(Path(options.json))
        print(f"panels written to {options.json}")
    if options.picture:
        dashboard.draw([Path(run) for run in options.runs], Path(options.picture))
        print(f"drawn in {options.picture}")
    if options.project:
        print(f"saved as {dashboard.publish(options.project, options.entity)}")
    return 0


def _list(argv: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from fl_lightning import catalog

    kind = argv[0] if argv else ""
    if kind in ("-h", "--help"):
        print(COMMANDS["list"])
        return 0
    if kind not in catalog.KINDS:
        raise ConfigError("list", f"say what to list; {suggest(kind, catalog.KINDS)}", kind)
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is", "paper"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for entry in catalog.entries(kind):
        table.add_row(entry.name, entry.summary, entry.paper)
    Console().print(table)
    return 0


# --- the configuration's parser -------------------------------------------------------------------------------------


def _parser_class() -> type[ArgumentParser]:
    from jsonargparse import ArgumentParser

    class OneLineParser(ArgumentParser):
        """Says what is wrong in one line."""

        given: Sequence[str] = ()

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            keys = [action.dest for action in self._actions]
            _refuse(one_line(str(message), keys, self.given))

    return OneLineParser


def config_parser(command: str, description: str, models: bool = False) -> ArgumentParser:
    """The parser of a configuration's sections: every constructor parameter is an option.

    Args:
        command: the subcommand.
        description: what it does.
        models: whether the section ``model`` is a list, whose entries `parse_config` checks.
    """
    import lightning as L
    import torch

    from fl_lightning import catalog
    from fl_lightning.core.method import Method
    from fl_lightning.data.module import FederatedData
    from fl_lightning.federation.runner import TRAINER_DEFAULTS
    from fl_lightning.federation.settings import Federation

    sys.path.insert(0, os.getcwd())  # a user's own classes
    for module in (name for kind in catalog.KINDS for name in catalog.modules(kind)):
        importlib.import_module(module)
    parser = _parser_class()(
        prog=f"fl-lightning {command}",
        description=description,
        default_env=True,
        env_prefix=f"FL_LIGHTNING_{command.upper()}_",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file; may be given several times, later ones win")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    name_help = "the run's name; default: method, data set and seed"
    parser.add_argument("--name", type=str | None, help=name_help)  # type: ignore[arg-type]
    parser.add_argument("--output", type=str, default="runs", help="folder of runs; the run's own is <output>/<name>")
    parser.add_subclass_arguments(Method, "method", skip={"model", "terms"}, required=True, instantiate=False)
    if models:
        parser.add_argument("--model", type=_checked_models, required=True, help="models, each for some of the clients")
    else:
        _add_model(parser, "model")
    parser.add_subclass_arguments(
        torch.optim.Optimizer, "optimizer", skip={"params"}, required=False, instantiate=False
    )
    parser.set_defaults({"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}})
    parser.add_class_arguments(FederatedData, "data", instantiate=False)
    parser.add_class_arguments(Federation, "federation", instantiate=False)
    own = {*TRAINER_DEFAULTS, "logger", "min_epochs", "default_root_dir", "barebones"} - {
        "num_sanity_val_steps",
        "devices",
    }
    parser.add_class_arguments(L.Trainer, "trainer", skip=own, instantiate=False)
    parser.set_defaults({"trainer.devices": 1})  # Lightning's "auto" would give one client all devices
    parser.add_argument(
        "--logger",
        type=_as_given,
        help="one of Lightning's loggers, or a list of them (class_path and init_args); they receive the values of "
        "metrics.csv, and write into the run's folder unless they are given a save_dir",
    )
    return parser


def _add_model(parser: ArgumentParser, key: str) -> None:
    from fl_lightning.models.split import SplitModel

    skip = {*FILLED_IN, "body", "embedding_size", "terms"}
    parser.add_subclass_arguments(SplitModel, key, skip=skip, required=True, instantiate=False)


def parse_config(parser: Any, argv: list[str]) -> Any:
    """Parse a command line of a configuration's sections.

    Args:
        parser: `config_parser`'s, made for a list of models if the command line ends up with one.
        argv: the command line after the subcommand.
    """
    import torch

    from fl_lightning.core.method import Method
    from fl_lightning.data.dataset import Dataset
    from fl_lightning.data.partitions import Partition
    from fl_lightning.federation.exchange import Exchange
    from fl_lightning.models.split import SplitModel

    bases: dict[str, type] = {"method": Method, "model": SplitModel, "optimizer": torch.optim.Optimizer}
    bases |= {"data.dataset": Dataset, "data.partition": Partition, "federation.exchange": Exchange}
    check_classes(argv, bases)
    type(parser).given = given_keys(argv)  # of the class: jsonargparse makes parsers of it for nested arguments
    listed = listed_models(argv)
    if listed is None:
        return parser.parse_args(without_replaced(argv))
    models = [_checked_model(index, entry) for index, entry in enumerate(listed)]
    return parser.parse_args([*without_replaced(argv, "model"), f"--model={json.dumps(models)}"])


def _checked_models(given: Any) -> list[Any]:
    """The type of a list whose entries were checked: the parser asks for it on the way in, and again at the end.

    Any other text is an environment variable's model, which the list replaces.
    """
    return json.loads(given) if isinstance(given, str) and given.startswith("[") else given


def _checked_model(index: int, entry: Any) -> dict[str, Any]:
    """Check one entry of a list of models and fill its arguments' defaults in; `clients` stays as it is."""
    key = f"model.{index}"
    node = {"class_path": entry} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "clients"}
    parser = _parser_class()(prog="fl-lightning")
    type(parser).given = [f"{key}.init_args.{name}" for name in node.get("init_args") or {}]
    _add_model(parser, key)
    # As text, because only the parser's own reader knows that 1e-3 is a number.
    checked = parser.parse_string(yaml.safe_dump({"model": {str(index): node}}, sort_keys=False))
    plain = _plain(checked[key])
    given = {} if isinstance(entry, str) or "clients" not in entry else {"clients": entry["clients"]}
    return {**plain, **given}


def plain_config(options: Any) -> Config:
    """The resolved configuration in plain containers, enough to run it again."""
    config = {key: _plain(value) for key, value in vars(options).items() if key in SECTIONS}
    if config["data"].get("augmentation") is not None:
        from fl_lightning.data.augmentation import described

        config["data"]["augmentation"] = described(config["data"]["augmentation"])
    given = config["logger"] or []
    config["logger"] = [_checked_logger(node) for node in (given if isinstance(given, list) else [given])]
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) or hasattr(value, "__dict__"):
        return {key: _plain(item) for key, item in dict(value if isinstance(value, dict) else vars(value)).items()}
    return str(value)


def _as_given(given: Any) -> Any:
    """The type of loggers: as they were written, for `_checked_logger`; `Any` would fill in defaults of its own."""
    try:
        return yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {error}") from error


def _checked_logger(node: Any) -> dict[str, Any]:
    """Check a logger's class and arguments; its `save_dir` may be left out."""
    from lightning.pytorch.loggers import Logger

    from fl_lightning.report.wandb import CLASS_PATH, takes_place_of

    node = {"class_path": node} if isinstance(node, str) else node
    fits = isinstance(node, dict) and isinstance(node.get("class_path"), str)
    require(fits, "logger", "must be a logger's name, or hold one under class_path", node)
    for member in node:
        allowed = ("class_path", "init_args", "dict_kwargs")
        require(member in allowed, f"logger.{member}", f"there is no such key; {suggest(str(member), allowed[:2])}")
    arguments = node.get("init_args") or {}
    require(isinstance(arguments, dict), "logger.init_args", "must hold the logger's arguments by name", arguments)
    name = CLASS_PATH if takes_place_of(node["class_path"]) else node["class_path"]
    keys = [f"logger.init_args.{argument}" for argument in arguments]
    check_classes([f"--logger={name}", *(f"--{key}=…" for key in keys)], {"logger": Logger})
    node, arguments = {**node, "class_path": name}, dict(arguments)
    save_dir = {"save_dir": arguments.pop("save_dir")} if "save_dir" in arguments else {}
    parser = _parser_class()(prog="fl-lightning")
    type(parser).given = keys
    parser.add_subclass_arguments(Logger, "logger", skip={"save_dir"}, required=True, instantiate=False)
    checked = _plain(parser.parse_object({"logger": {**node, "init_args": arguments}}).logger)
    return {**checked, "init_args": {**checked.get("init_args", {}), **save_dir}}


def one_line(message: str, keys: Sequence[str] = (), given: Sequence[str] = ()) -> str:
    """Turn jsonargparse's message into one line: key, what is allowed, value; with the nearest name for a wrong key."""
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", message)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", text)
    key = match[1] if (match := re.search(r'Parser key "([^"]+)"', text)) else ""
    key = next((name for name in reversed(given) if name.endswith(f".{key}")), key) if "." not in key else key
    value = match[1] if (match := re.search(r"(?:Given value|Got value): (.*)", text)) else None
    wanted = dict.fromkeys(re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value.*)?$", text, flags=re.MULTILINE))
    wanted = dict.fromkeys("null" if w == "NoneType" else w for w in wanted if "path" not in w or len(wanted) == 1)
    if key and wanted and value is not None:
        return f"{key}: must be {' or '.join(wanted)}, got {value}"
    if match := re.search(r"unrecognized arguments: --([\w.]+)", text):
        return _unknown(match[1], keys)
    if match := re.search(r"Option '([\w.]+)' is not accepted", text):
        return f"{next((name for name in given if name.endswith(f'.{match[1]}')), match[1])}: there is no such key"
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return _unknown(f"{match[1]}.{match[2]}", keys)
    return " ".join(text.split())


def _unknown(key: str, keys: Sequence[str]) -> str:
    group = key.rpartition(".")[0]
    beside = [name for name in keys if name.rpartition(".")[0] == group]
    return f"{key}: there is no such key; {suggest(key, beside)}"
