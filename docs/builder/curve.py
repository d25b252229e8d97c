"""The golden trajectory of a method as a small picture: accuracy over six rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "recorded"
SERIES = {"Local-T": "#4063d8", "Local-T_received": "#c75a12", "Global-T": "#2a8a57", "Server-T": "#9558b2"}
WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 150, 12, 30


def golden(method: str) -> dict[str, Any] | None:
    """What tests/golden has recorded of a method with its defaults; None where there is no such file."""
    path = GOLDEN / f"{method.lower()}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def rounds_of(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rounds in full precision."""
    return recorded["32-true"]["rounds"]


def svg(rounds: Sequence[Mapping[str, Any]], title: str) -> str:
    """Accuracy of each moment over rounds, as SVG that takes on the page's colours."""
    shown = {name: [row.get(name) for row in rounds] for name in SERIES}
    shown = {name: values for name, values in shown.items() if any(value is not None for value in values)}
    lines = [_axes(len(rounds))]
    taken: list[float] = []
    for name, values in shown.items():
        points = [(_x(n, len(rounds)), _y(value)) for n, value in enumerate(values) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{SERIES[name]}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{SERIES[name]}"/>' for x, y in points]
        x, y = points[-1]
        y = _free(y, taken)
        text = f"{name} {100 * [value for value in values if value is not None][-1]:.1f} %"
        lines.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{SERIES[name]}">{text}</text>')
    body = "".join(lines)
    return (
        f'<svg class="curve" role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{title}</title>{body}</svg>'
    )


def _x(number: int, total: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * number / max(1, total - 1)


def _y(value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)


def _free(y: float, taken: list[float]) -> float:
    """A height for a label that no other has; nearest first."""
    for step in range(20):
        for tried in (y + 13 * step, y - 13 * step):
            if TOP <= tried <= HEIGHT - BOTTOM and all(abs(tried - other) >= 13 for other in taken):
                taken.append(tried)
                return tried
    return y


def _axes(total: int) -> str:
    parts = []
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent / 100)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for number in range(total):
        parts.append(
            f'<text x="{_x(number, total):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number + 1}</text>'
        )
    return "".join(parts)
