"""Weights & Biases: every number of a run against its rounds, tables and pictures beside them."""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from fl_lightning.errors import require
from fl_lightning.files import content_of, plain_json, write_text
from fl_lightning.report import wandb_access, wandb_media
from fl_lightning.report.best_so_far import BestSoFar
from fl_lightning.report.patience import Patience
from fl_lightning.report.run_logger import RoundRecord, Row, RunLogger, RunStart
from fl_lightning.report.wandb_file import is_unsent, read_history, run_files
from fl_lightning.terminal import say

STATE_FILE = "wandb.json"
"""In the run's folder: W&B's id of the run, so that a resumed run goes on under it."""
LIMIT = 60.0
"""Seconds that a call may take: a round with its tables and pictures."""
LIMITS = {"begin": 120.0, "finalize": 150.0}
"""The same of those that start W&B, and wait until it has sent all; more than W&B's own limits."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _harmless(method: Method) -> Method:
    """Let no error of W&B's reach the run, and no call hold it up: the first one is said in one line and ends W&B."""

    @functools.wraps(method)
    def call(self: WandbLogger, *arguments: Any, **options: Any) -> Any:
        if self.lost:
            return None
        try:
            limit = LIMITS.get(method.__name__, LIMIT)
            return self.patience.call(functools.partial(method, self, *arguments, **options), limit)
        except Exception as error:
            self.give_up(error)
            return None

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Labels:
    """What W&B finds and sorts a run by.

    Args:
        group: by default the method's name.
        tags: words to find the run by.
        notes: a longer description.
        job_type: what kind of run it is.
    """

    group: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    job_type: str | None = None

    def __post_init__(self) -> None:
        wrong = next((tag for tag in self.tags or () if not 1 <= len(tag) <= 64), None)
        require(wrong is None, "logger.labels.tags", "must each have 1 to 64 characters", wrong)


class WandbLogger(RunLogger, LightningWandbLogger):
    """Weights & Biases, with the rounds of a federation as its step axis.

    Offline by itself where there is no key or no network; no failure of W&B ends a run. A resumed run goes on under the
    same id: rounds that W&B has are not logged again, and those that a kill took from it are logged again from the
    run's own files.

    Args:
        project: W&B's project.
        entity: user or team; by default your own.
        name: the run's name; by default its name in `output`.
        offline: record into the run's folder only, for ``wandb sync``.
        id: W&B's id of the run; by default a new one, which the run's folder keeps.
        version: another word for `id`.
        save_dir: where W&B's files lie; by default in the run's folder.
        pictures_every: rounds between pictures of what clients share, >= 0; 0 draws none. They are also drawn in the
            first and the last round.
        labels: its group, tags, notes and kind.
    """

    def __init__(
        self,
        project: str = "fl-lightning",
        entity: str | None = None,
        name: str | None = None,
        offline: bool = False,
        id: str | None = None,
        version: str | None = None,
        save_dir: str = ".",
        pictures_every: int = 10,
        labels: Labels = Labels(),
    ) -> None:
        require(pictures_every >= 0, "logger.pictures_every", "must be >= 0", pictures_every)
        plain = len(project) <= 128 and not re.search(r"[/\\#?%:]", project)
        require(plain, "logger.project", "must have at most 128 characters, none of them / \\ # ? % :", project)
        for key, own in (("id", id), ("version", version)):
            plain = own is None or (1 <= len(own) <= 128 and own == own.strip() and not re.search(r"[/\\#?%:;,']", own))
            rule = "must have 1 to 128 characters, none of them / \\ # ? % : ; , ' and no space at an end"
            require(plain, f"logger.{key}", rule, own)
        given = {"entity": entity, **asdict(labels)}
        super().__init__(name=name, save_dir=save_dir, id=version or id, offline=offline, project=project, **given)
        self._id: str | None = version or id
        self._experiment: Any = None
        self.folder = Path(save_dir)
        self.pictures_every = pictures_every
        self.config: dict[str, Any] = {}
        self.lost = False
        self.is_offline = False
        self.patience = Patience()
        self._place = ""  # where the run is to be seen
        self._draws = True  # tables and pictures
        self._logged = 0  # rounds that W&B has
        self._tabled = -1  # the round of the last table; -1 for none
        self._done = 0  # rounds that the run has
        self._past_step = 0  # W&B's last step in an earlier process of the run
        self._coming: dict[str, Any] = {}  # values of somebody else's for the next round's row
        self._best = BestSoFar()
        self._rounds = 0

    # --- a run's life -----------------------------------------------------------------------------------------------

    def log_hyperparams(self, params: Any, *arguments: Any, **options: Any) -> None:
        """Keep the run's configuration for `begin`."""
        self.config |= dict(params)

    @_harmless
    def begin(self, start: RunStart) -> None:
        """Start W&B's run, or go on with it, and log the rounds that it does not have."""
        self._start, self._rounds = start, start.rounds
        self._best = BestSoFar(start.monitor, start.less)
        self._id = self._id or _kept_id(start.folder) or secrets.token_hex(4)
        write_text(start.folder / STATE_FILE, json.dumps({"id": self._id}) + "\n")
        self._drop_empty_files()
        earlier = run_files(self.folder, self._id)
        self._connect(earlier)
        if self.lost:
            return
        run = self._experiment
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        run.config.update(self._facts(), allow_val_change=True)
        self._look_back(earlier)
        self._tabled = self._logged or -1
        self._catch_up()
        self._start = replace(start, rows=(), client_rows=())  # of all rounds before, which nobody asks for again
        self._done = start.rows[-1]["round"] if start.rows else 0

    def wants_shared(self, round: int) -> bool:
        """Now and then, and in the first and the last round."""
        every = self.pictures_every
        return self._draws and not self.lost and every > 0 and (round % every == 0 or round in (1, self._rounds))

    @_harmless
    def log_round(self, record: RoundRecord) -> None:
        """Log a round, with its number as W&B's step where that is possible; a round that W&B has is left alone."""
        round = record.row["round"]
        if round > self._logged:
            numbers = {name: value for name, value in record.row.items() if value is not None}
            self._log({**self._coming, **numbers}, record)
            self._logged = round
        self._done, self._coming = round, {}
        best = self._best.see([record.row])
        if best and self._experiment is not None:
            self._experiment.summary.update(best)

    def _log(self, numbers: dict[str, Any], record: RoundRecord) -> None:
        """Log numbers with their tables and pictures; where these fail, the numbers alone from then on."""
        failure = None
        round = record.row["round"]
        step = self._step_of(round)
        if self._draws:
            table = record.ends_early or wandb_media.wants_table(round, self._rounds, self._tabled)
            try:
                with wandb_media.drawn(self._start, record, self.folder, self._logged == 0, table) as more:
                    self._experiment.log({**numbers, **more}, step=step, commit=True)
                self._tabled = round if table and record.evaluated else self._tabled
                return
            except Exception as error:  # e.g. W&B asks its server about each table, at once
                failure, self._draws = error, False
        self._experiment.log(numbers, step=step, commit=True)
        if failure is not None:
            _say(f"a table or picture failed ({_described(failure)}); from round {round} on, it gets the numbers alone")

    def _step_of(self, round: int) -> int | None:
        """W&B's step for a round; None takes W&B's next one, where somebody else's logging is past the round.

        W&B would drop a row whose step is past, without a word to the program; rows are drawn against `round` anyway.
        """
        step = max(round, self._past_step + 1)
        return step if self._experiment.step <= step else None

    def _log_beside(self, metrics: Mapping[str, Any], round: int) -> None:
        """Log values of a round that is past, or far ahead, in a row of their own."""
        self._experiment.log({**metrics, "round": round}, step=None, commit=True)
        self._experiment.summary.update({"round": self._logged})  # which `_look_back` reads

    @_harmless
    def end(self, summary: Mapping[str, Any]) -> None:
        """Put what ``summary.json`` says into W&B's summary of the run."""
        parts = {part: summary.get(part) or {} for part in ("mean_last_10", "final_received", "communication")}
        values = {f"{part}/{name}": value for part, own in parts.items() for name, value in own.items()}
        plain = {name: summary[name] for name in ("rounds", "finished", "clients") if name in summary}
        if self._coming:
            self._log_beside(self._coming, self._done)
            self._coming = {}
        self._experiment.summary.update({**values, **plain, "seconds_total": summary.get("seconds")})

    @_harmless
    def finalize(self, status: str) -> None:
        """Close W&B's run and wait until all is sent, two minutes at most."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

    @_harmless
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values of your own, e.g. from a callback.

        Args:
            metrics: the values.
            step: the round that they belong to; None for the one that is logged next.
        """
        if self._experiment is None:
            return
        if step is None or step == self._done + 1:
            self._coming |= metrics  # logging them now would advance W&B's step
        else:
            self._log_beside(metrics, step)

    def give_up(self, error: Exception) -> None:
        """Say what W&B failed at, and go on without it."""
        self.lost = True
        run, self._experiment = self._experiment, None
        _say(f"failed ({_described(error)}); the run goes on without it, all its numbers are in its folder")
        try:
            if run is not None and not isinstance(error, TimeoutError):
                run.finish(exit_code=1)
        except Exception:
            import wandb

            if wandb.run not in (None, run):  # somebody's own
                return
            try:
                wandb.teardown(exit_code=1)  # or else it would complain at the process's end
            except Exception:
                return

    def places(self) -> list[tuple[str, str]]:
        """W&B's page of the run, or the command that sends it there."""
        return [("W&B", self._place)] if self._place and not self.lost else []

    @property
    def experiment(self) -> Any:
        """W&B's run; None before the run begins, after its end, and where W&B failed."""
        return self._experiment

    # --- where it goes ----------------------------------------------------------------------------------------------

    def _connect(self, earlier: Sequence[Path]) -> None:
        """Start W&B's run: online where that is possible, else offline, with a line that says so."""
        import wandb

        base = wandb.setup(settings=wandb_access.settings()).settings
        if base.mode == "disabled":
            self.lost = True
            return
        reason = self._why_offline(base, earlier)
        if not reason:
            try:
                self._experiment = self._init("online")
                self._place = str(self._experiment.url or "")
                return
            except wandb.Error as error:
                reason = f"it refused ({_described(error)})"
        self.is_offline = True
        self._experiment = self._init("offline")
        where = f"{shlex.quote(str(self.folder))}/wandb/offline-run-*-{shlex.quote(str(self._id))}*"
        self._place = f"wandb sync {where}"
        _say(f"{reason}, so this run is recorded offline; to send it: {self._place}")

    def _why_offline(self, base: Any, earlier: Sequence[Path]) -> str:
        """Why W&B cannot or shall not be online; empty if it can."""
        if self._offline or base.mode in ("offline", "dryrun"):
            return "offline was asked for"
        if any(map(is_unsent, earlier)):
            return "parts of it were recorded offline and are not sent yet"
        if not wandb_access.has_key(base):
            return "there is no key (wandb login)"
        return "" if wandb_access.is_reachable(base.base_url) else f"{base.base_url} cannot be reached"

    def _init(self, mode: str) -> Any:
        import wandb

        about = self._start.about
        given = {name: value for name, value in self._wandb_init.items() if value is not None}
        defaults = {"name": about["name"], "group": about["method"]}
        options = {**defaults, **given, "dir": str(self.folder), "id": self._id, "resume": "allow"}
        # Only one that is not made beside others is `wandb.run`, to which callbacks may log.
        self._require_folder()
        options["reinit"] = "create_new" if wandb_access.has_open_run() else "return_previous"
        run = wandb.init(**options, settings=wandb_access.settings(mode=mode))
        if run.id != self._id:
            raise RuntimeError(f"it gave the run {run.id}, which is open in this process, in place of a new one")
        return run

    def _require_folder(self) -> None:
        """Refuse a folder in which W&B cannot write: it would take one for passing files, where nobody looks for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.R_OK | os.W_OK):
            raise PermissionError(f"{self.folder} cannot be written")

    def _drop_empty_files(self) -> None:
        """Delete what a kill left before anything was written: ``wandb sync`` would stumble over it."""
        for path in run_files(self.folder, str(self._id)):
            if path.stat().st_size <= 7 and is_unsent(path):
                shutil.rmtree(path.parent, ignore_errors=True)

    # --- what it is -------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        about = self._start.about
        more = {name: about.get(name) for name in ("seed", "git_commit", "versions")}
        facts = {"method_name": about["method"], "partition_hash": self._start.partition_hash, **more}
        return {**self.config, **facts, "num_clients": self._start.num_clients or len(self._start.class_counts)}

    def _look_back(self, earlier: Sequence[Path]) -> None:
        """Find out which rounds W&B has: somebody else may have logged, too, so its steps need not be rounds."""
        if self.is_offline:
            rows = [row for path in earlier for row in read_history(path)]
            self._past_step = max((step for row in rows if isinstance(step := row.get("_step"), int)), default=0)
            # Only a round's own row has its seconds.
            rounds = [row["round"] for row in rows if {"round", "seconds"} <= row.keys()]
            self._logged = max((round for round in rounds if isinstance(round, int)), default=0)
            return
        run = self._experiment
        self._logged = max(0, run.starting_step - 1)
        round = run.summary.get("round")
        if isinstance(round, (int, float)):
            self._logged = min(self._logged, int(round))

    def _catch_up(self) -> None:
        """Log what W&B lacks of the rounds so far, and say again what stands in its summary."""
        rows, clients = self._start.rows, _by_round(self._start.client_rows)
        best = self._best.see(rows) if rows else {}  # of all rounds at once: of equal ones the first is the best
        for row in rows:
            if row["round"] > self._logged:
                own = clients.get(row["round"], [])
                evaluated = any(row.get(name) is not None for name in wandb_media.HISTOGRAMS)
                last = row is rows[-1]  # of a run that has ended early, as far as is known here
                self.log_round(RoundRecord(row, own, evaluated, ends_early=last))
        if rows and self._experiment is not None:
            latest = {name: value for row in rows for name, value in row.items() if value is not None}
            self._experiment.summary.update({**best, **latest})


def _say(text: str) -> None:
    say(f"W&B: {text}")


def _described(error: Exception) -> str:
    """One line: an error's type and its message's first line, or for pydantic's own the first value that is wrong."""
    pydantic = sys.modules.get("pydantic")  # W&B's settings are its models; absent where W&B cannot be imported
    said = str(error).strip().splitlines()[:1]
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        said = [f"{'.'.join(map(str, first['loc']))}: {first['msg']}"]
    return " ".join(" ".join([type(error).__name__, *said]).split())[:200]


def _by_round(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["round"], []).append(row)
    return found


def _kept_id(folder: Path) -> str | None:
    """The id that an earlier process of the run kept."""
    try:
        kept = plain_json(content_of(folder / STATE_FILE))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if isinstance(kept, str) and re.fullmatch(r"[\w-]{1,64}", kept) else None
