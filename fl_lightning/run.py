"""A run that was made: its numbers, its models, its pictures, read back from its folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration import Config, read_config
from fl_lightning.errors import importing, require
from fl_lightning.report.columns import is_share
from fl_lightning.report.record import LOGGED, Row, read_logged, read_metrics, read_rows
from fl_lightning.report.recorded_run import has_ended, read_run
from fl_lightning.report.series import Member, in_one_picture
from fl_lightning.sealed import read_json
from fl_lightning.trust import Trust

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fl_lightning.classifier import Classifier

PLOTTED = ("Local-T", "Local-T_received", "Global-T", "loss")
"""Columns that several runs are compared by."""


class Run:
    """A run's folder. What is read is read when it is asked for, and nothing in it is run.

    Args:
        folder: where the run lies.
        trust: packages of your own that its configuration may import where models are built again.

    Raises:
        ConfigError: if there is no run in the folder.
    """

    def __init__(self, folder: str | Path, trust: Trust | str | Sequence[str] = ()) -> None:
        self.folder = Path(folder)
        self.trust = Trust.of(trust)
        there = (self.folder / "config.yaml").is_file()
        require(there, "run", "there is no run in that folder", str(folder))

    @classmethod
    def load(cls, folder: str | Path, trust: str | Sequence[str] = ()) -> Run:
        """The run that a folder holds, finished or not."""
        return cls(folder, trust)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def __fspath__(self) -> str:
        return str(self.folder)

    # --- what it says -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The resolved configuration, in plain containers."""
        return read_config(self.folder / "config.yaml")

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says: last and best round, the mean of the last ten, communication, versions.

        Raises:
            ConfigError: if the file is damaged, or missing, as it is before a run has ended.
        """
        return read_json(self.folder / "summary.json", "run.summary")

    @property
    def finished(self) -> bool:
        """Whether it is over: all its rounds are done, or it was stopped early."""
        if not (self.folder / "summary.json").is_file():
            return False
        done = max((row.get("round") or 0 for row in self.rounds), default=0)
        return has_ended(self.summary, (self.config.get("federation") or {}).get("rounds", 0), done)

    @property
    def rounds(self) -> list[Row]:
        """The rows of ``metrics.csv``, a mapping a round; None where something does not apply."""
        return read_metrics(self.folder)

    @property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row a round, accuracies in [0, 1], NaN where something does not apply.

        Raises:
            ConfigError: if pandas is not installed.
        """
        return _frame(self.rounds, "run.metrics")

    @property
    def clients(self) -> pd.DataFrame:
        """``clients.csv``: a row a round and client.

        Raises:
            ConfigError: if pandas is not installed.
        """
        return _frame(read_rows(self.folder / "clients.csv"), "run.clients")

    @property
    def logged(self) -> pd.DataFrame:
        """``logged.csv``: a row a value that a client's fit logged by itself; without a client the mean over clients.

        Raises:
            ConfigError: if pandas is not installed.
        """
        return _frame(read_logged(self.folder / LOGGED), "run.logged")

    # --- what is made of it -------------------------------------------------------------------------------------------

    def plot(self, *others: Run, columns: Sequence[str] = PLOTTED) -> Figure:
        """Its accuracies and losses over the rounds; beside other runs, some columns of all of them.

        Runs that differ only in their seed are one line with a band. The figure is matplotlib's: a notebook shows it,
        ``savefig`` writes it.

        Args:
            others: runs to compare it with.
            columns: of ``metrics.csv``, a panel each, where there are others.

        Raises:
            ConfigError: if `columns` are no names of columns, or a folder holds no round of a run.
        """
        listed = isinstance(columns, Collection) and not isinstance(columns, str) and len(columns) > 0
        named = listed and all(isinstance(name, str) for name in columns)
        require(named, "run.plot", "columns must be names in a list, as columns=['loss']", columns)
        if not others:
            from fl_lightning.report.figures import draw_learning_curves

            own = read_run(self.folder, "run.plot")
            return draw_learning_curves(own.rows, f"{own.method} ({own.name})")
        from fl_lightning.report.panels import draw_panel_grid

        lines, title = in_one_picture((read_run(run.folder, "run.plot") for run in (self, *others)), "Runs")
        panels = [(name, (name,), is_share(name)) for name in columns]
        return draw_panel_grid(panels, lines, title)

    def report(self, *others: Run, path: str | Path | None = None) -> Path:
        """Write the HTML page of ``fl-lightning report``, of this run and of others beside it.

        Args:
            others: runs to show beside it.
            path: the file; by default ``report.html`` in the run's folder.

        Returns:
            The file.

        Raises:
            ConfigError: if the extra ``report`` is not installed.
            WriteError: if the file cannot be written.
        """
        from fl_lightning.report.page.writing import write_page

        members = [Member(read_run(run.folder, "run.report")) for run in (self, *others)]
        methods = list(dict.fromkeys(member.run.method for member in members))
        page = self.folder / "report.html" if path is None else Path(path)
        return write_page(members, page, f"{', '.join(methods)}: {members[0].run.name}")[0]

    # --- its models ---------------------------------------------------------------------------------------------------

    def model(self, client: int | None = None) -> Classifier:
        """A client's model after its last fit, or the global model; see `fl_lightning.load`.

        Args:
            client: 0-based; None is the global model.
        """
        from fl_lightning.classifier import load

        return load(self, client)

    def export(self, path: str | Path, client: int | None = None) -> Path:
        """Write a client's model, or the global one, as ONNX or TorchScript, and compare it with the model.

        Args:
            path: the file: ``.onnx`` (extra ``export``), ``.pt`` or ``.ts``.
            client: 0-based; None is the global model.

        Raises:
            ConfigError: if the model cannot be written that way.
        """
        from fl_lightning.exporting import export_model

        export_model(self.folder, Path(path), client, self.trust)
        return Path(path)

    def evaluate(self, checkpoint: str = "auto") -> dict[str, float]:
        """Compute the run's accuracies again from its models and checkpoint, as ``fl-lightning evaluate`` does.

        Args:
            checkpoint: which one; ``auto`` takes the newest.

        Returns:
            By column, to the last bit what the run wrote down on the same machine.

        Raises:
            ConfigError: if there is no checkpoint, or the configuration names a package that is not trusted.
        """
        from fl_lightning.experiment import BuiltExperiment
        from fl_lightning.parser import resolve
        from fl_lightning.undisturbed import undisturbed

        with undisturbed():
            built = BuiltExperiment(resolve(self.config, self.trust))
            built.folder = self.folder
            return {name: now for name, _, now in built.evaluate(checkpoint)}


def _frame(rows: Sequence[Row], who: str) -> pd.DataFrame:
    absent = "needs pandas: pip install 'fl-lightning[pandas]'; run.rounds are the same numbers without it"
    with importing("pandas", who, absent):
        import pandas as pd
    frame = pd.DataFrame(rows)
    empty = [name for name in frame.columns if frame[name].isna().all()]
    return frame.astype(dict.fromkeys(empty, float))
