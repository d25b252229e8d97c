"""A finished run built again, with its clients' trained models: for what its files alone do not say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.configuration import read_config
from fl_lightning.core.predictor import headline
from fl_lightning.data.module import is_recorded
from fl_lightning.errors import renamed, require
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.reexamination import trained_model
from fl_lightning.federation.saving import CHANGED
from fl_lightning.parser import resolve
from fl_lightning.report.record import read_metrics
from fl_lightning.sealed import read_json
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.core.method import Method
    from fl_lightning.core.predictor import Predictor
    from fl_lightning.federation.loop import FederatedLoop
    from fl_lightning.report.series import Series
    from fl_lightning.trust import Trust

LATER = "the models are of later rounds than those that are shown: somebody has extended the run"


def first_runs(lines: Sequence[Series], option: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Which lines have a first run whose models are of the rounds that are shown: their places, and what to call it.

    Args:
        lines: what a page shows.
        option: of the command line, for messages.

    Returns:
        These, and a sentence on each of the others.

    Raises:
        ConfigError: if there are only others.
    """
    runs = [line.runs[0] for line in lines]
    ends = ["" if run.seed is None else f", seed {run.seed}" for run in runs]
    names = [f"{line.label}{end}" for line, end in zip(lines, ends, strict=True)]
    found = [(place, name) for place, name in enumerate(names) if not runs[place].is_past]
    require(bool(found) or not runs, option, LATER, ", ".join(str(run.path) for run in runs))
    return found, [f"{name}: {LATER}" for run, name in zip(runs, names, strict=True) if run.is_past]


def rebuilt(folder: Path, trust: Trust) -> FederatedLoop:
    """A run's loop, built again, data and all, in the state of its newest checkpoint, where there is one.

    Nothing is written.

    Args:
        folder: the run's.
        trust: what its configuration may import.

    Raises:
        ConfigError: if it cannot be built again, or a file is damaged.
    """
    from fl_lightning.experiment import BuiltExperiment

    experiment = BuiltExperiment(resolve(read_config(folder / "config.yaml"), trust))
    experiment.folder = folder
    experiment.setup(fits=False)
    checkpoints = Checkpoints(folder / "checkpoints")
    with renamed("--resume", str(folder)):
        path = checkpoints.find("auto")
        if path is not None:
            experiment.loop.load_state_dict(checkpoints.load(path))
        elif (folder / "partition.json").is_file():
            record = read_json(folder / "partition.json", "--resume")
            require(is_recorded(record, experiment.loop.data), "--resume", CHANGED)
    loop, rounds = experiment.loop, (row["round"] for row in read_metrics(folder))
    done = max((round for round in rounds if isinstance(round, int)), default=0)
    finished = (folder / "summary.json").is_file()
    if finished and 0 < loop.round < done:
        say(f"{folder} has {done} rounds, and was last saved after round {loop.round}, whose state this is")
    return loop


def with_models(folder: Path, trust: Trust, option: str) -> FederatedLoop:
    """The same of a run that keeps its clients' models.

    Args:
        folder: the run's.
        trust: what its configuration may import.
        option: of the command line, for messages.

    Raises:
        ConfigError: if it cannot be built again, or keeps no models or no checkpoint.
    """
    require((folder / "config.yaml").is_file(), option, "needs the run's config.yaml", str(folder))
    rule = "needs the clients' models, which this run does not keep (federation.checkpoint.models)"
    require((folder / "models").is_dir(), option, rule, str(folder))
    loop = rebuilt(folder, trust)
    require(loop.round > 0, option, "there is no checkpoint in that folder", str(folder))
    return loop


def trained(loop: FederatedLoop, folder: Path, option: str) -> Iterator[tuple[int, Method]]:
    """Each client that has test samples, with the method as it was after its last local fit, ready to predict.

    One method serves all clients: it is another client's as soon as the next is taken.

    Raises:
        ConfigError: if a file is damaged.
    """
    for client in range(loop.num_clients):
        file = folder / "models" / f"{client:05d}.pt"
        if file.is_file() and len(loop.data.clients[client].test):
            module = trained_model(loop, client, file, option)
            module.eval()
            yield client, module.method


def own_way(method: Method) -> Predictor | None:
    """How a client predicts with what is its own; None where it does not."""
    ways = method.predictors()
    name = headline(ways, "Local-T")
    return None if name is None else ways[name]
