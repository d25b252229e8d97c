"""Stopping once a figure on the validation parts has not become better for some time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.errors import ConfigError, require, require_choices, suggest
from fl_lightning.report.columns import is_score, less_is_better, validated
from fl_lightning.report.record import WATCHED, num_evaluated

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData
    from fl_lightning.federation.policy import EvaluationPolicy

KEY = "federation.early_stopping"


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last round.

    Args:
        monitor: a column of `metrics.csv` on the validation parts, e.g. ``Local-V``, ``Server-V``,
            ``eval_loss/Local-V_received``, ``Local-V_worst10``; null takes the first there is of
            Local-V, Local-V_received and Server-V. Never one on the test parts. Where `data.evaluate_on` is validation,
            all figures are on the validation parts, and null takes the like of Local-T.
        patience: evaluated rounds without a better value after which the run ends, >= 1.
        min_delta: by how much more a value must be better to count, >= 0.
        mode: whether more is better (``max``) or less (``min``); ``auto`` knows accuracies, losses and errors.
    """

    monitor: str | None = None
    patience: int = 10
    min_delta: float = 0.0
    mode: Literal["auto", "max", "min"] = "auto"

    def __post_init__(self) -> None:
        require(self.monitor != "", f"{KEY}.monitor", "must name a column; null takes the first there is", self.monitor)
        require(self.patience >= 1, f"{KEY}.patience", "must be >= 1 evaluated rounds", self.patience)
        require(self.min_delta >= 0, f"{KEY}.min_delta", "must be >= 0", self.min_delta)
        require_choices(KEY, mode=(self.mode, Literal["auto", "max", "min"]))


class Patience:
    """Watches the monitored figure, the same on every process.

    Args:
        settings: of the stopping; None never stops.
        columns: of `metrics.csv`.
        on_validation: whether all figures are on the validation parts.
        after: the round after which newcomers join; before, no figure of theirs is waited for.
        lacking: why no figure is on the validation parts, should there be none.
    """

    def __init__(
        self,
        settings: EarlyStopping | None,
        columns: Sequence[str],
        on_validation: bool,
        after: int = 0,
        lacking: str = "and there are none: set data.validation_fraction above 0",
    ) -> None:
        self.settings = settings
        self.monitor = "" if settings is None else monitored(settings, columns, on_validation, lacking)
        self.after = after if self.monitor.endswith("_newcomers") else 0
        mode = "auto" if settings is None else settings.mode
        self.less = less_is_better(self.monitor) if mode == "auto" else mode == "min"
        self.best = math.nan
        self.round = 0
        """The round of the best value; 0 before there is one."""
        self.waited = 0
        """Evaluated rounds since then."""

    def see(self, round: int, row: Mapping[str, Any] | None) -> None:
        """Take in an evaluated round's row; a cell without a number counts as one that is no better."""
        if self.settings is None or row is None or round <= self.after:
            return
        value = row.get(self.monitor)
        number = math.nan if value is None else float(value)
        gain = self.best - number if self.less else number - self.best
        if gain > self.settings.min_delta or (math.isnan(self.best) and not math.isnan(number)):
            self.best, self.round, self.waited = number, round, 0
        else:
            self.waited += 1

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Take in the rows of `metrics.csv`, from the first on; the round with which a run ends there, 0 for none."""
        for row in rows:
            if num_evaluated([row]):
                self.see(row["round"], row)
            if self.reason:
                return int(row["round"])
        return 0

    @property
    def reason(self) -> str:
        """Why the run ends; empty while it goes on."""
        if self.settings is None or self.waited < self.settings.patience:
            return ""
        since = f"since round {self.round} ({self.best:.4g})" if self.round else "in any round"
        return f"early stopping: {self.monitor} has not become better {since}, for {self.waited} evaluated rounds"

    def state_dict(self) -> dict[str, Any]:
        """What was seen, and by what it was judged."""
        return {
            "rule": self._rule,
            "monitor": self.monitor,
            "best": self.best,
            "round": self.round,
            "waited": self.waited,
        }

    @property
    def _rule(self) -> dict[str, Any]:
        """All that a run's end depends on; empty where it has none of its own."""
        own = self.settings
        return {} if own is None else {"less": self.less, "patience": own.patience, "min_delta": own.min_delta}

    def load_state_dict(
        self, state: Mapping[str, Any], rows: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    ) -> None:
        """The inverse of `state_dict`; by another rule than the saved one, the rounds that are done are judged again.

        Args:
            state: what it gave.
            rows: reads those of `metrics.csv` up to then; where they are lost, another monitor has seen nothing.
        """
        if self.settings is None:
            return
        same = state["monitor"] == self.monitor
        done = () if same and state.get("rule") == self._rule else rows()
        if done:
            self.replay(done)
        elif same:
            self.best, self.round, self.waited = state["best"], state["round"], state["waited"]


def patience_of(
    settings: EarlyStopping | None, columns: Sequence[str], data: FederatedData, policy: EvaluationPolicy, after: int
) -> Patience:
    """What watches a federation's figure.

    Args:
        settings: as `Patience` takes them.
        columns: likewise.
        data: set up.
        policy: what is evaluated.
        after: as `Patience` takes it.

    Raises:
        ConfigError: as `monitored` does.
    """
    lacking = "" if settings is None else f"and there are none: {data.more_validation}"
    if not policy.validation and data.num_validation.any():
        lacking = "and federation.evaluate.validation switches them off"
    return Patience(settings, columns, data.evaluate_on == "validation", after, lacking)


def monitored(settings: EarlyStopping, columns: Sequence[str], on_validation: bool, lacking: str) -> str:
    """The column that is watched; `lacking` is why there may be none on the validation parts.

    Raises:
        ConfigError: if there is none of that name, or it is not on the validation parts.
    """
    allowed = [name for name in columns if is_score(name) and (on_validation or validated(name) == name)]
    if not allowed:
        if any(map(is_score, columns)):
            raise ConfigError(KEY, f"watches validation parts, {lacking}")
        raise ConfigError(KEY, "watches evaluations, and there are none: federation.evaluate switches them off")
    wanted = settings.monitor or next((name for name in WATCHED if name in allowed), allowed[0])
    if wanted in columns and is_score(wanted) and wanted not in allowed:
        there = validated(wanted) if validated(wanted) in allowed else "Local-V"
        rule = f"is on the test parts, on which nothing is chosen; take {there}"
        raise ConfigError(f"{KEY}.monitor", rule, wanted)
    require(wanted in allowed, f"{KEY}.monitor", f"there is no such column; {suggest(wanted, allowed)}", wanted)
    return wanted
