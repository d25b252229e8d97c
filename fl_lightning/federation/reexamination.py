"""A finished run's accuracies, computed again from its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.core.client import ClientModule
from fl_lightning.errors import ConfigError
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.evaluation import Scores
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.model_files import load_model, owner_of
from fl_lightning.federation.sickness import at
from fl_lightning.report.record import read_rows
from fl_lightning.sealed import read_json, round_in
from fl_lightning.terminal import named_clients, say

Figure = tuple[str, "float | None", float]
"""A column, what the run wrote down, and what comes out now."""


def reexamine(loop: FederatedLoop, folder: Path, checkpoint: str = "auto") -> list[Figure]:
    """Compute again what can be computed from a run's folder.

    The run's value is None where it wrote none down. Where clients train in turn, what they received in the next round
    was sent in that round, so that a checkpoint before the last has none of these figures.

    Args:
        loop: the run's loop, set up.
        folder: the run's folder.
        checkpoint: which checkpoint; ``auto`` takes the newest.

    Raises:
        ConfigError: if there is no checkpoint.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    path = checkpoints.find(checkpoint)
    if path is None:
        raise ConfigError("evaluate", f"{folder} holds no checkpoint")
    loop.load_state_dict(checkpoints.load(path))
    summary_file = folder / "summary.json"
    summary = read_json(summary_file, "evaluate") if summary_file.is_file() else {}
    rows = {row.get("round"): row for row in read_rows(folder / "metrics.csv")}
    finished = bool(summary.get("finished")) and loop.round == summary["rounds"]
    finished = finished or (not summary and loop.done)
    if loop.settings.evaluate.trained and not finished:
        _leave_out(f"round {loop.round} is not the run's last, whose models alone are kept")
    if not summary and loop.done:
        say(f"fl-lightning: {summary_file} is missing: nothing is compared with it")
    now = _trained_again(loop, folder / "models") if finished else {}
    now |= {name: value for name, value in loop.examiner.server_scores().items() if value is not None}
    written: dict[str, Any] = dict(rows.get(loop.round, {}))
    figures: list[Figure] = [(name, written.get(name), value) for name, value in now.items()]
    if loop.exchange.in_turn and not finished:
        return figures
    everybody = len(loop.calendar.participants(loop.round + 1)) == loop.num_clients == len(loop.board.clients)
    all_receive = everybody and not rows.get(loop.round + 1, {}).get("skipped")
    then = summary.get("final_received", {}) if finished else rows.get(loop.round + 1, {}) if all_receive else {}
    again = loop.receive_once_more()
    return figures + [(name, then.get(name), value) for name, value in again.items()]


def trained_model(loop: FederatedLoop, client: int, file: Path, key: str) -> ClientModule:
    """A client as it was after its last fit, told what it was told in that round.

    Args:
        loop: the run's, at its end.
        client: 0-based.
        file: its model, in the run's ``models/``.
        key: for errors.

    Raises:
        ConfigError: if the file is missing or damaged, or is of another model, client or run.
    """
    module = loop.runner.load(client)
    load_model(module, file, key, owner_of(client, loop.seed, loop.data.partition_hash))
    round = round_in(file) or loop.calendar.last_fit(client, loop.round) or 0  # who fell sick since has that of before
    participants = tuple(loop.calendar.participants(round)) if round else ()
    module.method.facts = replace(loop.runner.facts, round=round, participants=participants, client=client)
    return module


def _leave_out(why: str) -> None:
    say(f"fl-lightning: accuracies of clients' own models (Local-T, Global-T) are not computed: {why}")


def _was_tested(loop: FederatedLoop, client: int) -> bool:
    """Whether a client's scores are those of its last fit: it was to take part again, where a callback ends a run."""
    last = loop.calendar.last_fit(client, loop.round)
    skips = loop.settings.on_client_error == "skip"  # then all are tested
    return skips or last is None or loop.calendar.is_last_before_evaluation(client, last)


def _tested(loop: FederatedLoop, client: int, file: Path) -> Scores:
    """What a client's kept model scores; its initial one where it never took part."""
    if not file.is_file():
        return loop.runner.evaluate_resting(client)
    return loop.runner.evaluator.client(trained_model(loop, client, file, "evaluate"), client, "trained")


def _trained_again(loop: FederatedLoop, folder: Path) -> dict[str, float]:
    """Local-T and Global-T of the clients' own models, as the run kept them."""
    if not loop.settings.evaluate.trained:
        return {}
    if not folder.is_dir() and loop.board.took_part.any():
        _leave_out(f"{folder} is missing")
        return {}
    kept: list[int] = []
    scores = {
        name: np.full(len(loop.board.clients), np.nan) for name in loop.examiner.columns if "_received" not in name
    }
    for place, client in enumerate(loop.board.clients.tolist()):
        file, found = folder / f"{client:05d}.pt", Scores()
        if loop.board.took_part[client] and not file.is_file():  # it fell sick in its last round, or that never came
            if not _was_tested(loop, client):
                _leave_out(f"{folder} lacks the last model of client {client}, which was not tested after its last fit")
                return {}
            kept.append(client)
            found = {name: float(values[place]) for name, values in loop.scores.items() if name in scores}
        elif file.is_file() or client < loop.calendar.num_present(loop.round):  # others have not joined yet
            with loop.ward.care(client, takes_part=False), at(loop.round, client, "evaluation"):
                found = _tested(loop, client, file)
        for name, value in found.items():
            scores[name][place] = value
    loop.ward.agree()  # who was sick when the run tested it, too
    if kept:
        lacks = f"{folder} lacks the last model of {named_clients(kept)}"
        say(f"fl-lightning: {lacks}: counted as the run scored it, not computed again")
    return loop.board.spreads(scores)
