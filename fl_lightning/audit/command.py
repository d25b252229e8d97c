"""`fl-lightning audit RUN …`: what runs give away."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_lightning.audit.canaries import Estimate, audit_canaries
from fl_lightning.audit.inversion import Inversion, Victim, choose_victim, invert, make_one_step
from fl_lightning.audit.matching import Attack
from fl_lightning.audit.page import draw_curves, draw_reconstructions, write_page
from fl_lightning.configuration import read_config
from fl_lightning.errors import ConfigError, require
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.sickness import RoundError
from fl_lightning.files import write_text
from fl_lightning.parser import resolve
from fl_lightning.report.record import read_rows
from fl_lightning.trust import Trust


def run_audit(
    runs: Sequence[Path],
    output: Path,
    attack: Attack,
    images: int = 4,
    noise: float = 1.0,
    canaries: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    trust: Trust | None = None,
) -> dict[str, Any]:
    """Audit runs, and write `audit.json`, pictures and a page: of what was found, too, if something then breaks off.

    Args:
        runs: folders of runs; of each its configuration is read, and nothing is written.
        output: where the audit is written.
        attack: how images are sought.
        images: how many are sought, of one client; 0 for none.
        noise: of a second attack under noise, in units of the update's root mean square; 0 for none.
        canaries: how many of them; 0 for no such audit.
        tell: is told what happens.
        trust: which packages of the user's own the runs' configurations may import.

    Returns:
        What `audit.json` says.
    """
    require(images >= 0, "audit --images", "must be >= 0", images)
    require(attack.steps >= 1, "audit --steps", "must be >= 1", attack.steps)
    moves = attack.lr is None or 0 < attack.lr < math.inf
    require(moves, "audit --lr", "must be > 0 and finite", attack.lr)
    smooth = 0 <= attack.variation < math.inf
    require(smooth, "audit --variation", "must be >= 0 and finite", attack.variation)
    require(0 <= noise < math.inf, "audit --noise", "must be >= 0 and finite", noise)
    require(canaries == 0 or canaries >= 20, "audit --canaries", "must be >= 20, or 0 for no such audit", canaries)
    require(images + canaries > 0, "audit", "there is nothing to do without images and canaries")
    _check_output(output)
    trust = Trust() if trust is None else trust
    asked = {"runs": [str(run) for run in runs], "attack": asdict(attack), "images": images, "noise": noise}
    victims: list[Victim] = []
    found: list[Inversion] = []
    estimates: dict[str, Estimate | None] = {}
    try:
        if images:
            for victim, own in _inversions(_experiments(runs, trust), attack, images, noise, tell):
                victims.append(victim)
                found += own
        if canaries:
            for name, estimate in _estimates(_experiments(runs, trust), [*map(_rounds, runs)], canaries, tell):
                estimates[name] = estimate
    except BaseException:
        if found or estimates:
            _write(output, asked, victims, found, estimates)
            tell(f"what was found before is in {output}")
        raise
    return _write(output, asked, victims, found, estimates)


def _write(
    output: Path,
    asked: Mapping[str, Any],
    victims: Sequence[Victim],
    found: Sequence[Inversion],
    estimates: Mapping[str, Estimate | None],
) -> dict[str, Any]:
    """Write what was found; all victims have the same images."""
    said = {
        **asked,
        "inversion": [_as_dict(own) for own in found],
        "canaries": {name: None if own is None else own.as_dict() for name, own in estimates.items()},
    }
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "audit.json", json.dumps(said, indent=2) + "\n")
    if victims:
        draw_reconstructions(victims[0].images, found, output / "reconstructions.png")
        draw_curves(found, output / "psnr.png")
    write_page(said, victims[0].images if victims else None, found, output / "index.html")
    return said


def _check_output(output: Path) -> None:
    """Refuse a folder that cannot be written to before minutes of searching; nothing is made yet."""
    there = next((path for path in (output, *output.parents) if path.exists()), output)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    require(writable, "audit --output", f"{there} is no folder that can be written to", str(output))


def _experiment(run: Path, trust: Trust) -> BuiltExperiment:
    require((run / "config.yaml").is_file(), "audit", "there is no run in that folder", str(run))
    return BuiltExperiment(resolve(read_config(run / "config.yaml"), trust))


def _rounds(run: Path) -> int | None:
    """How many rounds a run has made; None where it has written none down."""
    rows = read_rows(run / "metrics.csv")
    return int(rows[-1]["round"] or 0) or None if rows else None


def _experiments(runs: Sequence[Path], trust: Trust) -> list[BuiltExperiment]:
    """The runs, of which those of one name go by their folders, as seen from the one that all lie in."""
    found = [_experiment(run, trust) for run in runs]
    names = [own.name for own in found]
    above = os.path.commonpath([os.path.abspath(run.parent) for run in runs])
    for own, run in zip(found, runs, strict=True):
        own.name = os.path.relpath(run, above) if names.count(own.name) > 1 else own.name
    return found


def _inversions(
    experiments: Sequence[BuiltExperiment], attack: Attack, images: int, noise: float, tell: Callable[[str], None]
) -> Iterator[tuple[Victim, list[Inversion]]]:
    """The attacks on every run, all on the same images."""
    first: Victim | None = None
    for experiment in experiments:
        make_one_step(experiment, images)
        experiment.setup(in_memory=True)
        victim = choose_victim(experiment.loop, images)
        first = victim if first is None else first
        same = victim.images.shape == first.images.shape and bool((victim.images == first.images).all())
        if not same:
            rule = f"runs must share data, partition and seed, but {experiment.name} holds other images at client"
            raise ConfigError("audit", f"{rule} {victim.client}")
        own = invert(experiment, victim, attack, noise, _every(attack.steps, experiment.name, tell))
        for each in own:
            tell(f"{each.label}: {_end_of(each)}")
        yield victim, own


def _end_of(own: Inversion) -> str:
    if own.found is not None:
        return f"{float(own.found.curves[-1].mean()):.1f} dB"
    hidden = f"sends {own.message} values that this search cannot follow: another one might"
    return hidden if own.message else "sends nothing"


def _every(steps: int, name: str, tell: Callable[[str], None]) -> Callable[[int], None]:
    def report(step: int) -> None:
        if steps >= 100 and step and step % 100 == 0:
            tell(f"{name}: step {step} of {steps}")

    return report


def _estimates(
    experiments: Sequence[BuiltExperiment], made: Sequence[int | None], canaries: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, Estimate | None]]:
    for experiment, rounds in zip(experiments, made, strict=True):
        try:
            own = audit_canaries(experiment, canaries, tell, rounds)
        except RoundError as error:
            raise ConfigError("audit --canaries", f"{experiment.name}: {' '.join(str(error).split())}") from error
        if own is None:
            tell(f"{experiment.name}: no ClipAndNoise in federation.wire, so that nothing is promised")
        else:
            accounted = "infinite" if own.epsilon_accounted is None else f"{own.epsilon_accounted:.2f}"
            tell(f"{experiment.name}: epsilon is at least {own.epsilon_at_least:.2f}, at most {accounted}")
        yield experiment.name, own


def _as_dict(own: Inversion) -> dict[str, Any]:
    if own.found is None:
        return {**_sizes(own), "psnr": None, "curves": None}
    curves = own.found.curves
    return {
        **_sizes(own),
        "psnr": [round(value, 3) for value in curves[-1].tolist()],
        "curves": [[round(value, 3) for value in row] for row in curves.tolist()],
    }


def _sizes(own: Inversion) -> dict[str, Any]:
    return {"label": own.label, "attacked_values": own.sent, "sent_values": own.message, "step": own.step}
