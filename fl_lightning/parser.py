"""From a command line to a resolved configuration: a constructor's parameters are options, a mistake is one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from fl_lightning import catalog, static
from fl_lightning.command_line import OPTIMIZER, SECTIONS, CommandLine
from fl_lightning.errors import ConfigError, refuse, require, suggest
from fl_lightning.explained import add_own, explain
from fl_lightning.federation.flags import TRAINER_DEFAULTS
from fl_lightning.files import expanded
from fl_lightning.homes import no_option, no_section
from fl_lightning.merging import Text
from fl_lightning.precheck import METHOD_SKIPS, METRIC_SKIPS, MODEL_SKIPS, check_names, trainer_skips
from fl_lightning.reading import dump_yaml
from fl_lightning.rehearsal import rehearse
from fl_lightning.report.wandb_name import CLASS_PATH, takes_place_of
from fl_lightning.schema import Checker
from fl_lightning.source import UnreadableError
from fl_lightning.trust import Load, Trust, import_name

if TYPE_CHECKING:
    from fl_lightning.configuration import Config


class OneLineParser(argparse.ArgumentParser):
    """A parser of a command's own options that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; a misspelt option with the nearest one."""
        if match := re.fullmatch(r"unrecognized arguments: --([\w.-]+).*", message):
            known = [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]
            message = f"{match[1]}: there is no such key; {suggest(match[1], known)}"
        refuse(message)


def one_line_parser(command: str = "", **options: Any) -> OneLineParser:
    """A parser of a command's own options."""
    return OneLineParser(prog=f"fl-lightning {command}".strip(), allow_abbrev=False, **options)


def configured(
    command: str,
    description: str,
    argv: Sequence[str],
    imports_own: bool = True,
    runs: bool = True,
    **own: Mapping[str, Any],
) -> tuple[Any, Config]:
    """Read, check and resolve a command line that holds a configuration.

    Args:
        command: the subcommand.
        description: what it does.
        argv: the command line after it.
        imports_own: whether it may name classes of any of the user's modules, not only of those in the option `trust`.
        runs: whether the command runs it, so that it must name a method and a model.
        own: the command's own options, as `add_own` takes them.

    Returns:
        The command's own options, `given` beside them for what the command line says; and the resolved configuration.
    """
    for index, word in enumerate(argv):
        if word in ("-h", "--help") or (word.startswith("--") and word.partition("=")[0].endswith(".help")):
            explain(command, description, argv[index:], own)
    given = CommandLine(argv, f"FL_LIGHTNING_{command.upper()}__")
    parser = one_line_parser(command, usage=argparse.SUPPRESS)
    for name, option in own.items():
        add_own(parser, name, option)
    parser.add_argument("--print_config", action="store_true")
    check_options(given.words, ["config", "print_config", *SECTIONS, *own])
    check_names(given)
    options = parser.parse_args(given.words, argparse.Namespace(given=given))
    with given.speaking():
        config = resolve(given.tree, Trust(tuple(getattr(options, "trust", ())), own=imports_own), runs)
        if not options.print_config and "torch" not in sys.modules:
            rehearse(config)
    if options.print_config:
        print(dump_yaml(config), end="")
        sys.exit(0)
    return options, config


def check_options(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what is no option of the command."""
    for word in words:
        key = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and key not in known:
            raise no_section(key, [own for own in known if own not in SECTIONS])
        if not word.startswith("--") and (error := no_option(word)) is not None:
            raise error


def resolve(tree: Mapping[str, Any], trust: Trust, runs: bool = True) -> Config:
    """Check a configuration against the constructors that it is for, and fill in what it leaves out.

    What comes out is resolved as it is. Nothing is built.

    Args:
        tree: section -> its part, as files and options say it.
        trust: what its classes may come from.
        runs: whether it must name a method and a model.

    Raises:
        ConfigError: for what is wrong with it.
    """
    for name in tree:
        if name not in SECTIONS:
            raise no_section(str(name))
    for name in ("method", "model"):
        require(
            tree.get(name) is not None or not runs,
            name,
            f"must be named, e.g. --{name} NAME; `fl-lightning list {name}s` says which",
        )

    if "torch" not in sys.modules:  # answered without importing it, wherever sources tell all
        with suppress(UnreadableError):
            return _resolved(tree, trust, static.load)
    return _resolved(tree, trust, None)


def _resolved(tree: Mapping[str, Any], trust: Trust, load: Load | None) -> Config:
    checker = Checker(trust, load)
    return {
        "seed": checker.value(int, tree.get("seed", 0), "seed"),
        "name": checker.value(str | None, tree.get("name"), "name"),
        "output": _folder(checker.value(str, tree.get("output", "runs"), "output")),
        "method": _method(checker, tree.get("method")),
        "model": _models(checker, tree.get("model")),
        "optimizer": _optimizer(checker, tree.get("optimizer")),
        "data": _data(checker, tree.get("data")),
        "federation": _group(checker, "federation", tree.get("federation")),
        "metrics": _metrics(checker, tree.get("metrics")),
        "trainer": _trainer(checker, tree.get("trainer")),
        "logger": _loggers(checker, tree.get("logger")),
    }


def _folder(path: str) -> str:
    """A path that the system takes, with its ``~`` filled in."""
    fits = len(os.fsencode(path)) <= 2000 and all(len(os.fsencode(part)) <= 200 for part in path.split("/"))
    require(fits and path != "", "output", "must be a path of at most 2,000 bytes, 200 between two strokes", path)
    return str(expanded(path)) if path.startswith("~") else path


def _class(checker: Checker, path: str) -> Any:
    return (checker.load or import_name)(path, "class_path")


def _base(checker: Checker, kind: str) -> type:
    return _class(checker, catalog.KINDS[kind][1])


def _section(name: str, given: Any) -> Mapping[str, Any]:
    given = given.parsed if isinstance(given, Text) else given
    require(given is None or isinstance(given, Mapping), name, "must hold its keys by name", given)
    return given or {}


def _group(checker: Checker, name: str, given: Any) -> dict[str, Any]:
    return checker.arguments(_class(checker, catalog.GROUPS[name]), _section(name, given), name)


def _method(checker: Checker, given: Any) -> Any:
    return None if given is None else checker.node([_base(checker, "methods")], given, "method", METHOD_SKIPS)


def _models(checker: Checker, given: Any) -> Any:
    """One model, or a list of them; an entry's `clients` stays as it is."""
    if given is None:
        return None
    base = [_base(checker, "models")]
    if not isinstance(given, list):
        return checker.node(base, given, "model", MODEL_SKIPS)
    found = []
    for index, entry in enumerate(given):
        node = dict(entry) if isinstance(entry, Mapping) else entry
        clients = {"clients": node.pop("clients")} if isinstance(node, dict) and "clients" in node else {}
        found.append({**checker.node(base, node, f"model.{index}", MODEL_SKIPS), **clients})
    return found


def _optimizer(checker: Checker, given: Any) -> dict[str, Any]:
    base = _class(checker, "torch.optim.Optimizer")
    given = given.parsed if isinstance(given, Text) else given
    node = checker.node([base], OPTIMIZER if given is None else given, "optimizer", {"params"})
    own = node.get("init_args", {})
    require(own.get("lr") != 0, "optimizer.init_args.lr", "must be above 0; at 0 nothing is trained", own.get("lr"))
    require(own.get("maximize") is not True, "optimizer.init_args.maximize", "a fit descends: must be false", True)
    through, rule = own.get("differentiable"), "nothing differentiates through a fit's steps: must be false"
    require(through is not True, "optimizer.init_args.differentiable", rule, True)
    return node


def _as_in_a_file(value: Any) -> Any:
    """What options say, down to the last of them, as YAML reads it."""
    value = value.parsed if isinstance(value, Text) else value
    if isinstance(value, Mapping):
        return {name: _as_in_a_file(own) for name, own in value.items()}
    return [_as_in_a_file(own) for own in value] if isinstance(value, list) else value


def _data(checker: Checker, given: Any) -> dict[str, Any]:
    section = dict(_section("data", given))
    augmentation = section.pop("augmentation", None)
    augmentation = _as_in_a_file(augmentation)
    found = _group(checker, "data", section)
    if augmentation is not None:
        if checker.load is not None:
            raise UnreadableError("data.augmentation")
        from fl_lightning.data.augmentation import described

        found["augmentation"] = described(augmentation, checker.trust)
    return found


def _trainer(checker: Checker, given: Any) -> dict[str, Any]:
    devices = TRAINER_DEFAULTS["devices"]  # Lightning's "auto" would give one client all of them
    flags = {"devices": devices, **_section("trainer", given)}
    return checker.arguments(_class(checker, "lightning.Trainer"), flags, "trainer", trainer_skips())


def _metrics(checker: Checker, given: Any) -> list[dict[str, Any]]:
    """Metrics of torchmetrics' kind, of one or of a list; what the data say of them is left out."""
    given = given.parsed if isinstance(given, Text) else given
    if given is None or given == []:
        return []
    if checker.load is not None:
        raise UnreadableError("metrics")
    from torchmetrics import Metric, classification

    known = [name for name in classification.__all__ if not name.startswith(("Binary", "Multilabel"))]
    found = []
    for index, node in enumerate(given if isinstance(given, list) else [given]):
        key = f"metrics.{index}" if isinstance(given, list) else "metrics"
        arguments = node.get("init_args") if isinstance(node, Mapping) else None
        for own in METRIC_SKIPS & {*arguments} if isinstance(arguments, Mapping) else ():
            raise ConfigError(f"{key}.init_args.{own}", "comes from the data; leave it out")
        name = node.get("class_path") if isinstance(node, Mapping) else node
        if isinstance(name, str) and "." not in name:
            require(name in known, key, f"there is no metric of that name; {suggest(name, known)}", name)
            path = f"torchmetrics.classification.{name}"
            node = {**(node if isinstance(node, Mapping) else {}), "class_path": path}
        found.append(checker.node([Metric], node, key, METRIC_SKIPS))
    return found


def _loggers(checker: Checker, given: Any) -> list[dict[str, Any]]:
    """Loggers, of one or of a list; the `save_dir` of each may be left out."""
    base = _class(checker, "lightning.pytorch.loggers.Logger")
    given = given.parsed if isinstance(given, Text) else given
    found = []
    for index, node in enumerate(given if isinstance(given, list) else [] if given is None else [given]):
        key = f"logger.{index}" if isinstance(given, list) else "logger"
        node = {"class_path": node} if isinstance(node, str) else node
        fits = isinstance(node, Mapping) and isinstance(node.get("class_path"), str)
        require(fits, key, "must be a logger's name, or hold one under class_path", node)
        name = CLASS_PATH if takes_place_of(node["class_path"]) else node["class_path"]
        checked = checker.node([base], {**node, "class_path": name}, key, free={"save_dir"})
        for argument in ("name", "version"):  # of a folder, for most
            value = checked.get("init_args", {}).get(argument)
            parts = value.split("/") if isinstance(value, str) else ()
            fits = all(len(part.encode(errors="replace")) <= 255 for part in parts)
            require(fits, f"{key}.{argument}", "must be at most 255 bytes long", value)
        found.append(checked)
    return found
