"""``fl-lightning evaluate``, ``compare``, ``dashboard`` and ``audit``: their options; torch is imported after them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.commands import COMMANDS, TRUST
from fl_lightning.errors import TRACEBACK, require
from fl_lightning.files import expanded
from fl_lightning.parser import one_line_parser, resolve
from fl_lightning.terminal import say
from fl_lightning.trust import Trust


def evaluate(argv: Sequence[str]) -> int:
    """The command ``evaluate``.

    Args:
        argv: what follows it.

    Returns:
        0 if figures and tables are those that the run wrote down, else 1; so, too, where somebody falls sick in a test.

    Raises:
        ConfigError: if there is no such run or checkpoint.
    """
    parser = one_line_parser("evaluate", description=COMMANDS["evaluate"].says)
    parser.add_argument("run", type=str, help="a run's folder")
    parser.add_argument("--checkpoint", type=str, default="auto", help="auto (the newest) or a checkpoint's path")
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    options = parser.parse_args(list(argv))
    folder = Path(options.run)
    require((folder / "config.yaml").is_file(), "evaluate", "there is no run in that folder", options.run)

    from fl_lightning.configuration import read_config
    from fl_lightning.experiment import BuiltExperiment
    from fl_lightning.federation.sickness import RoundError
    from fl_lightning.report.console import print_evaluation
    from fl_lightning.report.recorded_run import altered_tables, rows_of
    from fl_lightning.sealed import read_json

    trust = Trust(tuple(options.trust))
    experiment = BuiltExperiment(resolve(read_config(folder / "config.yaml"), trust))
    experiment.folder = folder
    try:
        figures = experiment.evaluate(options.checkpoint)
    except RoundError as error:
        if TRACEBACK in os.environ:
            raise
        say(f"fl-lightning: error: {error}")
        return 1
    equal = print_evaluation(f"{experiment.name}, round {experiment.loop.round}", figures)
    summary = read_json(folder / "summary.json", "evaluate") if (folder / "summary.json").is_file() else {}
    altered = altered_tables(folder, rows_of(folder / "metrics.csv"), summary)
    for name in altered:
        say(f"fl-lightning: {folder / name} is not what the run wrote")
    return 0 if equal and not altered else 1


def compare(argv: Sequence[str]) -> int:
    """The command ``compare``.

    Args:
        argv: what follows it.

    Returns:
        0 if the runs are equal, else 1.

    Raises:
        ConfigError: if one of them is no run.
    """
    parser = one_line_parser("compare", description=COMMANDS["compare"].says)
    for name in ("a", "b"):
        parser.add_argument(name, type=str, help="a run's folder")
    options = parser.parse_args(list(argv))

    from fl_lightning.report.compare import compare

    return 0 if compare(Path(options.a), Path(options.b)) else 1


def dashboard(argv: Sequence[str]) -> int:
    """The command ``dashboard``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: if nothing is asked for, or what is asked for cannot be made.
    """
    parser = one_line_parser("dashboard", description=COMMANDS["dashboard"].says)
    parser.add_argument("runs", type=str, nargs="*", help="folders of the runs that --picture draws")
    parser.add_argument("--project", help="the W&B project that gets the dashboard as a workspace")
    parser.add_argument("--entity", help="its user or team; default: your own")
    parser.add_argument("--json", help="write the dashboard's panels there, as JSON")
    parser.add_argument("--picture", help="draw the same panels from runs' folders: PNG, SVG, PDF")
    options = parser.parse_args(list(argv))
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


def audit(argv: Sequence[str]) -> int:
    """The command ``audit``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such run, or a number is out of its range.
    """
    parser = one_line_parser("audit", description=COMMANDS["audit"].says)
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
    options = parser.parse_args(list(argv))
    runs = [Path(run) for run in options.runs]
    for run in runs:
        require((run / "config.yaml").is_file(), "audit", "there is no run in that folder", str(run))

    from fl_lightning.audit.command import run_audit
    from fl_lightning.audit.matching import Attack

    output = runs[0] / "audit" if options.output is None else expanded(options.output)
    inside = options.output is not None or not output.is_symlink()
    require(inside, "--output", f"say where to write: {output} is a link that leads out of the run's folder")
    attack = Attack(options.steps, options.objective, options.lr, options.variation)
    trust = Trust(tuple(options.trust))
    run_audit(runs, output, attack, options.images, options.noise, options.canaries, print, trust)
    print(f"written to {output}: audit.json, index.html{' and pictures' if options.images else ''}")
    return 0
