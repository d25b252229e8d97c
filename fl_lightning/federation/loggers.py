"""The loggers of a configuration: told of every round, and let go where one of them fails."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from fl_lightning.errors import require
from fl_lightning.files import expanded
from fl_lightning.report.run_logger import RoundRecord, Row, RunLogger, RunStart
from fl_lightning.terminal import say

_OF_FOLDERS = (CSVLogger, TensorBoardLogger)


class Loggers:
    """Hands a run's numbers to loggers. A run does not depend on them: one that raises is left out from then on.

    Args:
        loggers: Lightning's loggers.
        kept: the versions that they had in an earlier process of the run, by their places.

    Raises:
        ConfigError: if two of them would write into one another's files.
    """

    def __init__(self, loggers: Sequence[Logger] = (), kept: Mapping[int, Any] = MappingProxyType({})) -> None:
        # What is asked for its version has chosen one.
        self._choosing = [own for own in loggers if isinstance(own, _OF_FOLDERS) and own._version is None]
        _require_apart(loggers)
        if any(isinstance(own, TensorBoardLogger) for own in loggers):
            _hush_tensorboard()
        self.present = list(loggers)
        self._all = tuple(loggers)
        self._taken_up = [own for index, own in enumerate(loggers) if index in kept and version_of(own) == kept[index]]
        self._open = True

    @property
    def versions(self) -> dict[int, Any]:
        """The version under which a logger writes, by its place, so that a resumed run goes on in the same folder."""
        found = ((index, version_of(logger)) for index, logger in enumerate(self._all))
        return {index: version for index, version in found if version is not None}

    def reserve(self) -> None:
        """Make the folders of versions that loggers chose by themselves, so that no other run chooses the same."""
        made: set[Path] = set()
        for logger in self._choosing:
            with suppress(OSError):  # it says so itself when it is told something
                _reserve(logger, made)

    @contextmanager
    def _guarded(self, logger: Logger) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.present.remove(logger)
            root = error.__cause__ or error  # Lightning says of a full disk that a number cannot be logged
            said = " ".join(f"{type(root).__name__}: {root}".split())[:200]
            on = "the run goes on without it, all its numbers are in its folder"
            say(f"logger {type(logger).__name__} failed ({said}); {on}")

    def _tell(self, tell_ours: Callable[[RunLogger], object], tell: Callable[[Logger], object]) -> None:
        for logger in list(self.present):
            with self._guarded(logger):
                if isinstance(logger, RunLogger):
                    tell_ours(logger)
                else:
                    tell(logger)

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        """Tell them the run's configuration."""

        def tell(logger: Logger) -> None:
            with warnings.catch_warnings():
                if logger in self._taken_up:  # a CSVLogger's, whose rows are all written again
                    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
                logger.log_hyperparams(copy.deepcopy(dict(config)))  # what the run is built from stays as it is

        self._tell(tell, tell)  # type: ignore[arg-type]

    def begin(self, start: RunStart) -> None:
        """The run, or its continuation, begins."""

        def tell(logger: Logger) -> None:
            if isinstance(logger, CSVLogger):  # it deletes what it finds of an earlier process
                for row in start.rows:
                    log_row(logger, row)
            if isinstance(logger, TensorBoardLogger):  # what a killed process logged after its last checkpoint
                writer = logger.experiment
                writer.close()  # it goes on in a new file, which begins with that
                writer.purge_step = int(start.rows[-1]["round"]) + 1 if start.rows else 1

        self._tell(lambda logger: logger.begin(start), tell)

    def log_round(self, row: Row, record: Callable[[bool], RoundRecord]) -> None:
        """A round is done.

        Args:
            row: its row of numbers.
            record: makes the whole of it, with what clients share if that is wanted.
        """
        round = row["round"]
        self._tell(lambda own: own.log_round(record(own.wants_shared(round))), lambda logger: log_row(logger, row))

    def end(self, summary: Mapping[str, Any], final: Mapping[str, float] | None, round: int) -> None:
        """The run is done, or was stopped.

        Args:
            summary: what `summary.json` says.
            final: the values of the last receive; None where the run was stopped before it.
            round: the last one.
        """

        def tell(logger: Logger) -> None:
            if final is not None:
                logger.log_metrics({f"final/{name}": value for name, value in final.items()}, step=round)

        self._tell(lambda logger: logger.end(summary), tell)

    def close(self, status: str) -> None:
        """Close them, once."""
        if self._open:
            self._open = False

            def tell(logger: Logger) -> None:
                logger.finalize(status)

            self._tell(tell, tell)  # type: ignore[arg-type]


def _hush_tensorboard() -> None:
    """Print no traceback of what TensorBoard's own thread raises: whoever tells it more is told, and says so."""
    before = threading.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(arguments: threading.ExceptHookArgs, /) -> None:
        told = getattr(arguments.thread, "exception", None) is arguments.exc_value
        if not (told and type(arguments.thread).__module__.startswith("tensorboard.")):
            before(arguments)

    threading.excepthook = hook


def _require_apart(loggers: Iterable[Logger]) -> None:
    """Refuse two loggers of one kind with one place, in which every row would stand twice."""
    seen: dict[tuple[type, str], int] = {}
    for index, logger in enumerate(loggers):
        if isinstance(logger, _OF_FOLDERS):
            place, rule = logger.log_dir, "writes into the folder of logger.{}; give one of them another name"
        elif isinstance(logger, RunLogger):  # it keeps in the run's folder what the run is called where it goes
            place, rule = "", "would log into the run of logger.{}; leave one of them out"
        else:
            continue
        first = seen.setdefault((type(logger), place), index)
        require(first == index, f"logger.{index}", rule.format(first), type(logger).__name__)


def _reserve(logger: CSVLogger | TensorBoardLogger, made: set[Path]) -> None:
    """Make a logger's folder, or let it choose another version where somebody else has made it since it looked.

    Args:
        logger: it has chosen a version.
        made: the folders of the run's other loggers, which it may share; it gets this one, too.
    """
    seen = None
    while logger.version != seen and "://" not in logger.log_dir:  # one that chooses blindly stays with its choice
        folder = expanded(logger.log_dir)
        if folder in made:
            return
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            seen, logger._version = logger.version, None
        else:
            made.add(folder)
            return


def log_row(logger: Logger, row: Row) -> None:
    """Log a round's finite numbers."""
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "round"}
    logger.log_metrics({name: value for name, value in numbers.items() if math.isfinite(value)}, step=row["round"])
    logger.save()


def version_of(logger: Logger) -> Any:
    """The version under which a logger writes; None where it has none, or says nothing plain."""
    if isinstance(logger, RunLogger):
        return None
    try:
        version = logger.version
    except Exception:  # somebody else's code, which is asked again when it matters
        return None
    return version if isinstance(version, (int, str)) else None


def places(loggers: Iterable[Logger]) -> list[tuple[str, str]]:
    """Where they have put the run: what to call it, and an address or a command."""
    return [place for logger in loggers if isinstance(logger, RunLogger) for place in logger.places()]
