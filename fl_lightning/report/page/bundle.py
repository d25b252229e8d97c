"""Vega-Lite: its program for the page, and pictures of figures without a browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError, importing
from fl_lightning.files import default_cache_dir, write_atomically, write_text
from fl_lightning.report.colours import DASHES, SHAPES
from fl_lightning.report.page.figure import (
    AREA,
    COLOUR,
    DASH,
    FULL,
    LABELS,
    LIMIT,
    ROUNDS,
    SHAPE,
    THIRD,
    WHOLE,
    Figure,
    axis_of,
    largest_bubble,
)
from fl_lightning.report.series import Series
from fl_lightning.sealed import read_json, write_json

KEY = "report"
WIDTH = 760  # pixels, of a picture
SCALE = 2  # of a PNG
SYMBOL = {"symbolOpacity": 1, "symbolStrokeWidth": 2}
LEGEND = {"title": None, "orient": "bottom", "columns": 4, "labelLimit": 260}


def renderer() -> Any:
    """The package that holds Vega-Lite.

    Raises:
        ConfigError: if it is not installed.
    """
    absent = "needs the package vl-convert-python: pip install 'fl-lightning[report]'"
    with importing("vl_convert", KEY, absent):
        import vl_convert
    return vl_convert


@lru_cache(maxsize=1)
def program() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines ``vegaEmbed``.

    To put it together takes longer than the rest of a page, so it is kept beside the decoded data sets; where it
    cannot be, or is damaged, it takes that time again.
    """
    tool = renderer()
    name = f"vega-{tool.__version__}.json"
    try:
        kept = read_json(default_cache_dir() / name, KEY).get("program")
    except (ConfigError, RuntimeError):  # of one who has no home
        kept = None
    if isinstance(kept, str):
        return kept
    made = str(tool.javascript_bundle())
    with suppress(OSError, RuntimeError):
        write_json(default_cache_dir() / name, {"program": made})
    return made


def filled(node: Any, values: Mapping[str, Any]) -> Any:
    """A specification with its stand-ins replaced, wherever they are."""
    if isinstance(node, Mapping):
        return {name: filled(value, values) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [filled(value, values) for value in node]
    return values.get(node, node) if isinstance(node, str) else node


def drawn_alone(figure: Figure, lines: Sequence[Series], setting: str, pick: int) -> dict[str, Any] | None:
    """A figure of one setting as a whole specification in light colours, with a legend; None where it has no rows.

    Args:
        figure: the figure.
        lines: all lines.
        setting: whose lines are drawn.
        pick: place among the figure's choices.
    """
    settings = list(dict.fromkeys(line.setting for line in lines))
    rows = [
        row
        for row in figure.rows(lines)
        if ("s" not in row or lines[row["s"]].setting == setting)
        and ("g" not in row or settings[row["g"]] == setting)
        and row.get("pick", pick) == pick
    ]
    if not rows:
        return None
    there = {row["s"] for row in rows if "s" in row}
    shown = [line for place, line in enumerate(lines) if place in there]
    labels = [line.label for line in shown]
    colours = {"domain": labels, "range": [line.light for line in shown]}
    dashes = {"domain": labels, "range": [list(DASHES[line.dash]) for line in shown]}
    shapes = {"domain": labels, "range": [SHAPES[line.dash] for line in shown]}
    values = {COLOUR: colours, DASH: dashes, SHAPE: shapes, LABELS: labels}
    values |= {WHOLE: WIDTH, THIRD: WIDTH // 3 - 30, FULL: WIDTH, LIMIT: WIDTH // 3}
    values[ROUNDS] = axis_of(row["x"] for row in rows if figure.heads.get("x") == "round")
    values[AREA] = largest_bubble(WIDTH, len(set(figure.columns.get("client", ()))))
    spec: dict[str, Any] = filled(figure.spec, values)
    _name_lines(spec, {"symbolType": "stroke"} if DASH in str(figure.spec) else {})
    said = [setting] if len(settings) > 1 and "g" not in rows[0] else []
    said += [figure.picks[pick]] if len(figure.picks) > 1 or "g" in rows[0] else []
    title = f"{figure.title}: {', '.join(said)}" if said else figure.title
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **spec,
        "title": {"text": title, "anchor": "start", "limit": WIDTH},
        "data": {"values": rows},
        "config": {"background": "white", "font": "sans-serif", "view": {"stroke": None}},
    }


def _name_lines(spec: Any, symbol: Mapping[str, str]) -> None:
    """Give the lines' colours a legend, which the page has above all figures."""
    if isinstance(spec, Mapping):
        for name, value in spec.items():
            if name in ("color", "strokeDash") and isinstance(value, dict) and "legend" in value:
                value["legend"] = {**LEGEND, **SYMBOL, **symbol}
            _name_lines(value, symbol)
    elif isinstance(spec, list):
        for value in spec:
            _name_lines(value, symbol)


def write_pictures(figures: Sequence[Figure], lines: Sequence[Series], folder: Path) -> Iterator[Path]:
    """Write every figure as PNG and SVG, one of each setting and choice.

    Raises:
        ConfigError: if the renderer is not installed, or the folder cannot be written to.
    """
    tool = renderer()
    settings = list(dict.fromkeys(line.setting for line in lines))
    for figure in figures:
        for place, setting in enumerate(settings):
            for pick in range(max(1, len(figure.picks))):
                spec = drawn_alone(figure, lines, setting, pick)
                if spec is None:
                    continue
                name = figure.key + (f"-{place + 1}" if len(settings) > 1 else "")
                name += f"-{pick + 1}" if len(figure.picks) > 1 else ""
                svg = tool.vegalite_to_svg(spec)
                picture = tool.svg_to_png(svg, scale=SCALE)
                try:
                    write_text(folder / f"{name}.svg", svg)
                    write_atomically(folder / f"{name}.png", partial(_put, picture), sync=False)
                except OSError as error:
                    raise ConfigError("--figures", str(error)) from error
                yield from (folder / f"{name}.svg", folder / f"{name}.png")


def _put(content: bytes, file: Any) -> None:
    file.write(content)
