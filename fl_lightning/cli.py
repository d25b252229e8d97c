"""The command line: one function a command. Heavy imports come late, so that a mistake is answered at once."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_lightning import __version__
from fl_lightning.catalog import KINDS
from fl_lightning.errors import TRACEBACK, ConfigError, line_of, refuse, require, suggest
from fl_lightning.federation.signals import StoppedAtOnce, exit_code
from fl_lightning.files import WriteError
from fl_lightning.parser import configured, one_line_parser, resolve
from fl_lightning.resuming import continue_command, round_of, takes_folders_config, with_resumed_folder
from fl_lightning.terminal import outlived, require_whole_output, say
from fl_lightning.trust import Trust

if TYPE_CHECKING:
    from rich.console import Console

    from fl_lightning.configuration import Config
    from fl_lightning.experiment import BuiltExperiment

COMMANDS = {
    "fit": "run a federation: fl-lightning fit --config exp.yaml [--method.init_arg value …]",
    "evaluate": "compute a run's accuracies again from its folder: fl-lightning evaluate runs/quickstart",
    "partition": "show who holds what, as a table and a picture: fl-lightning partition --config exp.yaml",
    "table": "run a table of methods, settings and seeds, beside the published one: fl-lightning table FILE --jobs 2",
    "report": "show runs, or a table with its runs, on one HTML page: fl-lightning report runs/a runs/b | TABLE",
    "tune": "search hyperparameters on validation parts: fl-lightning tune FILE --jobs 2",
    "compare": "say whether two runs are equal, and where they first differ: fl-lightning compare runs/a runs/b",
    "dashboard": "make the W&B dashboard, or draw it: fl-lightning dashboard --project P | --picture FILE runs/a …",
    "predict": "classes of new samples by a run's models: fl-lightning predict runs/a --client 3 DATA",
    "export": "a run's model as ONNX or TorchScript: fl-lightning export runs/a --client 3 --output model.onnx",
    "audit": "what runs give away: fl-lightning audit runs/a runs/b --output FOLDER [--canaries 1000]",
    "list": f"what there is: fl-lightning list {'|'.join(KINDS)}",
}

TRUST = "a package of your own that the run's configuration may import; may be given several times"


class Loudness(NamedTuple):
    """How much `fit` prints."""

    quiet: bool = False
    verbose: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exits with 0 when all went well, 1 when `evaluate` finds other figures, or tables, than the run wrote down, when
    `compare` finds two runs different, when a worker was lost or a client fell sick (`federation.on_client_error`), 2
    on bad input or where a file takes no more, that of the standard output as well (one line on stderr), 128 + the
    number of the signal that stopped it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1.
    The first signal stops `fit` once the present round is saved, the second at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; one that matplotlib does not know would end its import
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # lightning 2.6 on torch 2.15
    with outlived():
        try:
            code = _code_of(arguments)
            _leave_what_is_stuck(code)
            sys.exit(code)
        except ConfigError as error:
            refuse(str(error))
        except WriteError as error:
            refuse(f"output: {error}")
        except OSError as error:
            if error.filename is None:
                raise
            refuse(f"{error.filename}: {error.strerror or error}")
        except Exception as error:
            if not line_of(error):
                raise
            say(line_of(error))
            sys.exit(1)
        except KeyboardInterrupt:  # before anything was there to be saved, or after all was
            sys.exit(exit_code(signal.SIGINT))


def _code_of(arguments: list[str]) -> int:
    """Run a command; success is none where what it printed into a file is cut."""
    try:
        code = _dispatch(arguments)
    except SystemExit as ended:  # a parser's, after it printed what was asked of it
        if ended.code:
            raise
        code = 0
    if code == 0:
        require_whole_output()
    return code


def _leave_what_is_stuck(code: int) -> None:
    """End the process at once where a logger's service never answered: its own work at the end may hang, too."""
    patience = sys.modules.get("fl_lightning.report.patience")
    if patience is not None and patience.Patience.stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    run = {"fit": _fit, "evaluate": _evaluate, "partition": _partition}
    run |= {"table": _table, "report": _report, "tune": _tune, "compare": _compare, "dashboard": _dashboard}
    run |= {"predict": _predict, "export": _export, "audit": _audit, "list": _list}
    return run[command](rest)


# --- commands -----------------------------------------------------------------------------------------------------


def _fit(argv: list[str]) -> int:
    words = with_resumed_folder(argv)
    options, config = configured(
        "fit",
        "Run a federation from a configuration.",
        words,
        imports_own=not takes_folders_config(argv, words),
        trust={"metavar": "PACKAGE", "action": "append", "default": [], "help": TRUST},
        resume={"help": "continue: auto (the newest whole checkpoint), a run's folder, or a checkpoint"},
        overwrite={"action": "store_true", "help": "replace the run that the output folder holds"},
        quiet={"short": "-q", "action": "store_true", "help": "print neither progress nor tables"},
        verbose={"short": "-v", "action": "store_true", "help": "print what runs where, and a line for every client"},
    )
    require(not (options.quiet and options.verbose), "--quiet", "cannot be given together with --verbose")
    with options.given.speaking():
        return _start(config, options.resume, options.overwrite, Loudness(options.quiet, options.verbose))


def _start(config: Config, resume: str | None, overwrite: bool, loudness: Loudness) -> int:
    """Run a federation in this process, or in as many as it asks for."""
    import torch

    from fl_lightning.experiment import BuiltExperiment
    from fl_lightning.federation import launch
    from fl_lightning.federation.team import is_main

    arguments = config, resume, overwrite, loudness
    experiment = BuiltExperiment(config)
    team = experiment.team()
    if team.size == 1:
        launch.use_threads(team)
        return _fit_here(*arguments)
    if team.outside:
        launch.join(team)
        with launch.speak_for_the_team(is_main(), experiment.advice):
            return _fit_here(*arguments)
    torch.set_num_threads(1)  # a forked process cannot use the threads of the one that it came from
    experiment.check(resume, overwrite)  # here, so that a mistake is answered by one process
    advice = experiment.advice
    del experiment  # its model and data: workers have their own
    return launch.launch(_fit_here, team, *arguments, advice=advice)


def _fit_here(config: Config, resume: str | None, overwrite: bool, loudness: Loudness) -> int:
    """Run a federation in this process, which may be one of several."""
    from fl_lightning.experiment import BuiltExperiment
    from fl_lightning.federation import launch
    from fl_lightning.report.plain import PlainConsole

    console = PlainConsole(quiet=loudness.quiet)
    experiment = BuiltExperiment(config)
    try:
        return _fit_and_show(experiment, resume, overwrite, console, loudness.verbose)
    except WriteError as error:
        say(f"fl-lightning: error: {error}; {' '.join(experiment.advice().split())}")
        return launch.end_all()


def _fit_and_show(
    experiment: BuiltExperiment, resume: str | None, overwrite: bool, console: Console, verbose: bool
) -> int:
    from fl_lightning.federation.launch import leave
    from fl_lightning.federation.loggers import places
    from fl_lightning.federation.sickness import RoundError
    from fl_lightning.report.console import print_summary
    from fl_lightning.report.live import RoundProgress

    with RoundProgress(console, verbose=verbose) as progress:
        try:
            summary = experiment.fit(resume, overwrite, callbacks=lambda: [progress])
        except StoppedAtOnce as stopped:
            kept = experiment.loop.checkpoints
            rounds = [round_of(path) for path in kept.all()] if kept is not None else []
            say(f"stopped at once; {f'round {rounds[-1]} is saved' if rounds else 'nothing is saved'}")
            return exit_code(stopped.number)
        except RoundError as error:  # every process of the run knows it
            if TRACEBACK in os.environ:
                raise
            if experiment.loop.workers.is_main:
                say(experiment.said_of(error))
            return 1
    loop = experiment.loop
    whole = loop.round >= loop.settings.rounds or loop.ended
    code = 0 if whole else exit_code(loop.agreement.asked_by)
    leave()
    if summary is None:  # not the main process: it has nothing to tell
        return code
    if not summary["finished"]:
        done, again = summary["rounds"], continue_command(experiment.folder)
        saved = (
            f", which is saved; continue with\n  {again}"
            if loop.checkpoints is not None
            else f"; {experiment.advice()}"
        )
        where = f"after round {done}{saved}" if done else f"before round 1; start with\n  {again}"
        console.print(f"stopped {where}", soft_wrap=True)
        return code
    try:
        print_summary(summary, console, places(experiment.recorder.loggers))
        draw_run(experiment.folder, experiment.data, summary)
    except KeyboardInterrupt:
        say(f"stopped; the run is whole, in {experiment.folder}")
        return exit_code(signal.SIGINT)
    return 0


def draw_run(folder: Path, data: Any, summary: dict[str, Any]) -> None:
    """Draw a finished run's curves and its partition into its folder; what cannot be drawn is said, and is no error."""
    from fl_lightning.report.figures import learning_curves
    from fl_lightning.report.partition_figures import partition_bubbles
    from fl_lightning.report.recorded_run import rows_of

    title = f"{summary['method']}, {summary['clients']} clients ({summary['name']})"
    curves, partition = folder / "curves.png", folder / "partition.png"
    for draw in (
        lambda: learning_curves(rows_of(folder / "metrics.csv"), curves, title),
        lambda: partition_bubbles(data.class_counts(), partition, data.arrays.classes, data.title(summary["seed"])),
    ):
        try:
            draw()
        except ConfigError as error:
            say(f"fl-lightning: {error}")


def _evaluate(argv: list[str]) -> int:
    parser = one_line_parser("evaluate", description=COMMANDS["evaluate"])
    parser.add_argument("run", type=str, help="a run's folder")
    parser.add_argument("--checkpoint", type=str, default="auto", help="auto (the newest) or a checkpoint's path")
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    options = parser.parse_args(argv)
    folder = Path(options.run)
    require((folder / "config.yaml").is_file(), "evaluate", "there is no run in that folder", options.run)

    from fl_lightning.configuration import read_config
    from fl_lightning.experiment import BuiltExperiment
    from fl_lightning.report.console import print_evaluation
    from fl_lightning.report.recorded_run import altered_tables, rows_of
    from fl_lightning.sealed import read_json

    trust = Trust(tuple(options.trust))
    experiment = BuiltExperiment(resolve(read_config(folder / "config.yaml"), trust))
    experiment.folder = folder
    figures = experiment.evaluate(options.checkpoint)
    equal = print_evaluation(f"{experiment.name}, round {experiment.loop.round}", figures)
    summary = read_json(folder / "summary.json", "evaluate") if (folder / "summary.json").is_file() else {}
    altered = altered_tables(folder, rows_of(folder / "metrics.csv"), summary)
    for name in altered:
        say(f"fl-lightning: {folder / name} is not what the run wrote")
    return 0 if equal and not altered else 1


def _partition(argv: list[str]) -> int:
    figure = {"type": str, "default": "partition.png", "help": "where the picture is written"}
    options, config = configured("partition", "Show who holds what.", argv, runs=False, figure=figure)

    from fl_lightning.report.figures import check_ending
    from fl_lightning.report.partition_figures import label_skew, partition_bubbles, partition_table

    check_ending(Path(options.figure), "--figure")

    from fl_lightning.experiment import build_data
    from fl_lightning.report.console import print_table

    with options.given.speaking():
        data = build_data(config["data"])
        data.setup(config["seed"])
    counts = data.class_counts()
    title = data.title(config["seed"])
    table = partition_table(counts, data.num_test[: len(counts)].tolist(), data.arrays.classes)
    print_table(table)
    if len(counts) < data.num_clients:
        print(f"the first {len(counts)} of {data.num_clients} clients")
    path = partition_bubbles(counts, Path(options.figure), data.arrays.classes, title)
    if data.left_out:
        print(f"{data.left_out} of {len(data.arrays.y)} samples are left out")
    print(f"label skew {label_skew(counts):.3f} (0: the same mix of classes everywhere; towards 1: none in common)")
    print(f"partition {data.partition_hash[:16]}…, drawn in {path}")
    return 0


def _table(argv: list[str]) -> int:
    from fl_lightning.table.command import table

    return table(argv, main)


def _tune(argv: list[str]) -> int:
    from fl_lightning.tune.command import tune

    return tune(argv, main)


def _report(argv: list[str]) -> int:
    from fl_lightning.reporting import report

    return report(argv)


def _compare(argv: list[str]) -> int:
    parser = one_line_parser("compare", description=COMMANDS["compare"])
    for name in ("a", "b"):
        parser.add_argument(name, type=str, help="a run's folder")
    options = parser.parse_args(argv)

    from fl_lightning.report.compare import compare

    return 0 if compare(Path(options.a), Path(options.b)) else 1


def _dashboard(argv: list[str]) -> int:
    parser = one_line_parser("dashboard", description=COMMANDS["dashboard"])
    parser.add_argument("runs", type=str, nargs="*", help="folders of the runs that --picture draws")
    parser.add_argument("--project", help="the W&B project that gets the dashboard as a workspace")
    parser.add_argument("--entity", help="its user or team; default: your own")
    parser.add_argument("--json", help="write the dashboard's panels there, as JSON")
    parser.add_argument("--picture", help="draw the same panels from runs' folders: PNG, SVG, PDF")
    options = parser.parse_args(argv)
    rule = "is for --project P, whose user or team it is"
    require(options.project or not options.entity, "--entity", rule, options.entity)

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


def _predict(argv: list[str]) -> int:
    from fl_lightning.model_commands import predict

    return predict(argv)


def _export(argv: list[str]) -> int:
    from fl_lightning.model_commands import export

    return export(argv)


def _audit(argv: list[str]) -> int:
    parser = one_line_parser("audit", description=COMMANDS["audit"])
    parser.add_argument("runs", type=str, nargs="+", help="runs' folders, of the same data, partition and seed")
    parser.add_argument("--output", type=str, help="where to write; default: audit/ in the first run's folder")
    parser.add_argument("--images", type=int, default=4, help="images that are sought in a message; 0 for none")
    parser.add_argument("--steps", type=int, default=200, help="steps of the search")
    parser.add_argument("--objective", choices=["cosine", "dlg"], default="cosine", help="what is matched")
    parser.add_argument("--lr", type=float, help="learning rate of the search; default: the objective's own")
    parser.add_argument("--variation", type=float, default=1e-4, help="factor of the images' total variation")
    parser.add_argument("--noise", type=float, default=1.0, help="of a second attack, in RMS of the update; 0: none")
    parser.add_argument("--canaries", type=int, default=0, help="canaries of the one-shot audit; 0 for none")
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    options = parser.parse_args(argv)
    runs = [Path(run) for run in options.runs]
    for run in runs:
        require((run / "config.yaml").is_file(), "audit", "there is no run in that folder", str(run))

    from fl_lightning.audit.command import run_audit
    from fl_lightning.audit.matching import Attack

    output = runs[0] / "audit" if options.output is None else Path(options.output)
    inside = options.output is not None or not output.is_symlink()
    require(inside, "--output", f"say where to write: {output} is a link that leads out of the run's folder")
    attack = Attack(options.steps, options.objective, options.lr, options.variation)
    trust = Trust(tuple(options.trust))
    run_audit(runs, output, attack, options.images, options.noise, options.canaries, print, trust)
    print(f"written to {output}: audit.json, index.html and pictures")
    return 0


def _list(argv: list[str]) -> int:
    from fl_lightning import catalog
    from fl_lightning.report.console import print_list

    kind = argv[0] if argv else ""
    if any(word in ("-h", "--help") for word in argv):
        print(COMMANDS["list"])
        return 0
    require(kind in catalog.KINDS, "list", f"say what to list; {suggest(kind, catalog.KINDS)}", kind)
    require(len(argv) == 1, "list", f"takes one word; {kind} is one, and then came", " ".join(argv[1:]))
    print_list([(entry.name, entry.summary, entry.paper) for entry in catalog.entries(kind)])
    return 0
