"""``fl-lightning fit`` and ``partition``: the commands that take a configuration."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_lightning.commands import TRUST
from fl_lightning.errors import TRACEBACK, ConfigError, line_of, require
from fl_lightning.federation.signals import StoppedAtOnce, exit_code
from fl_lightning.files import WriteError
from fl_lightning.parser import configured
from fl_lightning.resuming import continue_command, holds_run, round_of, takes_folders_config, with_resumed_folder
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from fl_lightning.configuration import Config
    from fl_lightning.experiment import BuiltExperiment


class Loudness(NamedTuple):
    """How much `fit` prints."""

    quiet: bool = False
    verbose: bool = False


def fit(argv: Sequence[str]) -> int:
    """The command ``fit``.

    Args:
        argv: what follows it.

    Returns:
        0 for a whole run, 1 where a client fell sick, 128 + a signal's number where one stopped it.

    Raises:
        ConfigError: for what is wrong with the configuration.
    """
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
    for key in options.given.idle():
        rule = "changes nothing: a --config behind it says otherwise; give options behind files"
        say(f"fl-lightning: note: --{key} {rule}")
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
        said = f"fl-lightning: error: {error}"
    except (ConfigError, OSError):
        raise
    except Exception as error:  # out of a file of the user's own, between rounds: in them it is a `RoundError`
        said = line_of(error)
        if not said or not experiment.loop.workers.is_main or not holds_run(experiment.folder):
            raise
    say(f"{said}; {' '.join(experiment.advice().split())}")
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


def partition(argv: Sequence[str]) -> int:
    """The command ``partition``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: for what is wrong with the configuration.
    """
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
    table = partition_table(counts, data.num_test[: len(counts)].tolist(), data.arrays.classes, data.evaluate_on)
    print_table(table)
    if len(counts) < data.num_clients:
        print(f"the first {len(counts)} of {data.num_clients} clients")
    path = partition_bubbles(counts, Path(options.figure), data.arrays.classes, title)
    if data.left_out:
        print(f"{data.left_out} of {len(data.arrays.y)} samples are left out")
    print(f"label skew {label_skew(counts):.3f} (0: the same mix of classes everywhere; towards 1: none in common)")
    print(f"partition {data.partition_hash[:16]}…, drawn in {path}")
    return 0
