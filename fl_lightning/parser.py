"""The parser of a configuration's values: every constructor parameter is an option, every mistake is one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from fl_lightning import catalog
from fl_lightning.command_line import SECTIONS, CommandLine, flatten
from fl_lightning.configuration import import_class
from fl_lightning.errors import require, suggest
from fl_lightning.precheck import CLASS_KEYS, FILLED_IN, check_classes, check_names

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from fl_lightning.configuration import Config

_NO_FLAGS = ("logger", "min_epochs", "default_root_dir", "barebones")
_HELP = {
    "config": "a YAML file; may be given several times, later ones win",
    "seed": "seed of everything random",
    "name": "the run's name; default: method, data set and seed",
    "output": "folder of runs; the run's own is <output>/<name>",
    "model": "models, each for some of the clients",
    "logger": "one of Lightning's loggers, or a list of them (class_path and init_args); they receive the values of "
    "metrics.csv, and write into the run's folder unless they are given a save_dir",
}


def configured(command: str, description: str, argv: Sequence[str], **own: Mapping[str, Any]) -> tuple[Any, Config]:
    """Read, check and resolve a command line that holds a configuration.

    Args:
        command: the subcommand.
        description: what it does.
        argv: the command line after it.
        own: the command's own options, as `add_argument` takes them.

    Returns:
        All options, and the configuration in plain containers.
    """
    given = CommandLine(argv)
    check_names(given)
    parser = config_parser(command, description, given.models is not None)
    for name, option in own.items():
        parser.add_argument(f"--{name}", **option)
    options = parse_config(parser, given)
    return options, plain_config(options)


def config_parser(command: str, description: str, models: bool = False) -> ArgumentParser:
    """The parser of a configuration's sections.

    Args:
        command: the subcommand.
        description: what it does.
        models: whether the section ``model`` is a list, whose entries `parse_config` checks.
    """
    import lightning as L

    from fl_lightning.federation.runner import TRAINER_DEFAULTS

    sys.path.insert(0, os.getcwd())  # a user's own classes
    for module in (name for kind in catalog.KINDS for name in catalog.modules(kind)):
        importlib.import_module(module)
    prefix = f"FL_LIGHTNING_{command.upper()}_"
    parser = one_line_parser(command, description=description, default_env=True, env_prefix=prefix, allow_abbrev=False)
    optional: Any = str | None
    parser.add_argument("--config", action="config", help=_HELP["config"])
    parser.add_argument("--seed", type=int, default=0, help=_HELP["seed"])
    parser.add_argument("--name", type=optional, help=_HELP["name"])
    parser.add_argument("--output", type=str, default="runs", help=_HELP["output"])
    _add_class(parser, "method", skip={"model", "terms"})
    if models:
        parser.add_argument("--model", type=_checked_models, required=True, help=_HELP["model"])
    else:
        _add_class(parser, "model", skip=_MODEL_SKIPS)
    _add_class(parser, "optimizer", skip={"params"}, required=False)
    parser.set_defaults({"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}})
    for section, class_path in catalog.GROUPS.items():
        parser.add_class_arguments(import_class(class_path), section, instantiate=False)
    own = {*TRAINER_DEFAULTS, *_NO_FLAGS} - {"num_sanity_val_steps", "devices"}
    parser.add_class_arguments(L.Trainer, "trainer", skip=own, instantiate=False)
    parser.set_defaults({"trainer.devices": 1})  # Lightning's "auto" would give one client all devices
    parser.add_argument("--logger", type=_as_given, help=_HELP["logger"])
    return parser


def one_line_parser(command: str = "", given: Sequence[str] = (), **options: Any) -> ArgumentParser:
    """A parser that says what is wrong in one line.

    Args:
        command: the subcommand.
        given: the keys that will be given, whole.
        options: the parser's own.
    """
    from jsonargparse import ArgumentParser

    class OneLineParser(ArgumentParser):
        """Says what is wrong in one line."""

        given: Sequence[str] = ()  # of the class: jsonargparse makes parsers of it for nested arguments

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            refuse(one_line(str(message), [action.dest for action in self._actions], self.given))

    OneLineParser.given = given
    return OneLineParser(prog=f"fl-lightning {command}".strip(), **options)


def refuse(message: str) -> NoReturn:
    """Say what is wrong, once for all processes that torchrun or SLURM started, and exit with code 2."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"fl-lightning: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_config(parser: Any, given: CommandLine) -> Any:
    """Parse a command line of a configuration's sections.

    Args:
        parser: `config_parser`'s, made for a list of models if the command line ends up with one.
        given: the command line.
    """
    check_classes(given.settings, {key: _base(key) for key in (*CLASS_KEYS, "optimizer")})
    type(parser).given = given.keys
    models = None if given.models is None else [_checked_model(*entry) for entry in enumerate(given.models)]
    return parser.parse_args(given.words(models))


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


# --- classes --------------------------------------------------------------------------------------------------------

_MODEL_SKIPS = {*FILLED_IN, "body", "embedding_size", "terms"}


def _base(key: str) -> Any:
    """The class that the one named under a key must derive from."""
    outside = {"optimizer": "torch.optim.Optimizer", "logger": "lightning.pytorch.loggers.Logger"}
    return import_class(outside[key] if key in outside else catalog.KINDS[CLASS_KEYS[key]][1])


def _add_class(parser: ArgumentParser, key: str, skip: Collection[str], required: bool = True) -> None:
    base = _base(key.partition(".")[0])
    parser.add_subclass_arguments(base, key, skip=set(skip), required=required, instantiate=False)


def _checked(key: str, node: Mapping[str, Any], skip: Collection[str]) -> dict[str, Any]:
    """Check a class and its arguments on their own; defaults are filled in."""
    parser = one_line_parser(given=_argument_keys(f"{key}.init_args", node.get("init_args")))
    _add_class(parser, key, skip)
    section, _, entry = key.partition(".")
    # As text, because only the parser's own reader knows that 1e-3 is a number.
    text = yaml.safe_dump({section: {entry: node} if entry else node}, sort_keys=False)
    return _plain(parser.parse_string(text)[key])


def _argument_keys(key: str, arguments: Any) -> list[str]:
    """The dotted keys of a class's arguments; those inside sections first."""
    given = arguments if isinstance(arguments, Mapping) else {}
    inside = [name for name, _ in flatten(given) if name not in given]
    return [f"{key}.{name}" for name in (*inside, *given)]


def _checked_models(given: Any) -> Any:
    """The type of a list whose entries were checked: the parser asks for it on the way in, and again at the end.

    Any other text is an environment variable's model, which the list replaces.
    """
    return json.loads(given) if isinstance(given, str) and given.startswith("[") else given


def _checked_model(index: int, entry: Any) -> dict[str, Any]:
    """Check one entry of a list of models and fill its arguments' defaults in; `clients` stays as it is."""
    node = {"class_path": entry} if isinstance(entry, str) else dict(entry)
    clients = {"clients": node.pop("clients")} if "clients" in node else {}
    return {**_checked(f"model.{index}", node, _MODEL_SKIPS), **clients}


def _as_given(given: Any) -> Any:
    """The type of loggers: as they were written, for `_checked_logger`; `Any` would fill in defaults of its own."""
    try:
        return yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {error}") from error


def _checked_logger(node: Any) -> dict[str, Any]:
    """Check a logger's class and arguments; its `save_dir` may be left out."""
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
    given = [key for part in ("init_args", "dict_kwargs") for key in _argument_keys(f"logger.{part}", node.get(part))]
    check_classes([("logger", name), *((key, ...) for key in given)], {"logger": _base("logger")})
    save_dir = {name: value for name, value in arguments.items() if name == "save_dir"}
    others = {name: value for name, value in arguments.items() if name != "save_dir"}
    checked = _checked("logger", {**node, "class_path": name, "init_args": others}, {"save_dir"})
    return {**checked, "init_args": {**checked.get("init_args", {}), **save_dir}}


# --- messages -------------------------------------------------------------------------------------------------------


def one_line(message: str, keys: Sequence[str] = (), given: Sequence[str] = ()) -> str:
    """Turn jsonargparse's message into one line: key, what is allowed, value; with the nearest name for a wrong key."""
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", message)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", text)
    key = _whole(match[1], given) if (match := re.search(r'Parser key "([^"]+)"', text)) else ""
    value = match[1] if (match := re.search(r"(?:Given value|Got value): (.*)", text)) else None
    wanted = dict.fromkeys(re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value.*)?$", text, flags=re.MULTILINE))
    wanted = dict.fromkeys("null" if w == "NoneType" else w for w in wanted if "path" not in w or len(wanted) == 1)
    if key and wanted and value is not None:
        return f"{key}: must be {' or '.join(wanted)}, got {value}"
    if match := re.search(r"Unable to load config (.+?)\s+-\s", text):
        return f"{key}: must hold its fields by name, got {match[1]}"
    if match := re.search(r"Option '([\w.]+)' is not accepted", text):
        return f"{_whole(match[1], given)}: there is no such key"
    unknown = r"unrecognized arguments: --([\w.]+)|Group '([\w.]+)' does not accept option '([\w.]+)'"
    if match := re.search(unknown, text):
        name = ".".join(filter(None, match.groups()))
        beside = [other for other in keys if other.rpartition(".")[0] == name.rpartition(".")[0]]
        return f"{_whole(name, given)}: there is no such key; {suggest(name, beside)}"
    return " ".join(text.split())


def _whole(key: str, given: Sequence[str]) -> str:
    """The key as it was given, of which a nested parser knows the end."""
    return next((name for name in reversed(given) if name.endswith(f".{key}")), key)
