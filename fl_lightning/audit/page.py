"""The audit's pictures and its page: one HTML file that opens from disk, in light and dark."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fl_lightning.audit.inversion import Inversion
from fl_lightning.files import write_text
from fl_lightning.report.drawing import as_shipped
from fl_lightning.report.figures import DPI, GRID, INK, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B", "#9467BD")
"""Of runs, in both themes: Okabe and Ito's, and three more."""
TICKS = (1, 2, 5, 10, 20, 25, 50, 100)
"""Steps between marks of an axis."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy audit</title><style>
:root {{ color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #d5d5d5; --soft: #666; }}
@media (prefers-color-scheme: dark) {{ :root {{
  --ink: #e8e8e8; --paper: #16181b; --line: #3a3d42; --soft: #a0a0a0; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .35rem .7rem; border-bottom: 1px solid var(--line);
  text-align: right; }} th:first-child, td:first-child {{ text-align: left; }}
td img {{ width: 72px; height: 72px; image-rendering: pixelated; display: block; margin-left: auto; }}
p.note, small {{ color: var(--soft); }}
ul.key {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.4rem; margin: .4rem 0 0; }}
ul.key li {{ overflow-wrap: anywhere; }} ul.key svg {{ vertical-align: middle; margin-right: .4rem; }}
svg text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }} svg .grid {{ stroke: var(--line); }}
</style></head><body>
<h1>Privacy audit</h1>
{body}
</body></html>
"""


def as_array(image: Tensor) -> np.ndarray:
    """[H, W] or [H, W, 3] in [0, 1], of an image [C, H, W]: of fewer than three channels the first, as grey."""
    array = image.detach().cpu().numpy()
    return array[0] if len(array) < 3 else array[:3].transpose(1, 2, 0)


@as_shipped()
def draw_reconstructions(truth: Tensor, found: Sequence[Inversion], path: Path) -> Path:
    """Draw the real images and below them what each attack found, with its peak signal-to-noise ratio.

    Args:
        truth: [B, C, H, W] in [0, 1].
        found: the attacks; those that had nothing to go by are left out.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    shown = [own for own in found if own.found is not None]
    rows, columns = 1 + len(shown), len(truth)
    figure = Figure(figsize=(2.4 + 1.15 * columns, 1.42 * rows), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for column in range(columns):
        _image(axes[0][column], truth[column], "")
    _row_label(axes[0][0], "original")
    for row, own in enumerate(shown, start=1):
        assert own.found is not None
        for column in range(columns):
            _image(axes[row][column], own.found.images[column], f"{own.found.curves[-1][column]:.1f} dB")
        _row_label(axes[row][0], own.label)
    return save(figure, path)


def _image(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(as_array(image), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=9, color=INK, pad=3)


def _row_label(axes: Axes, label: str) -> None:
    text = label.replace(" + ", "\n+ ").replace(" (", "\n(")
    axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=10, color=INK, labelpad=8, parse_math=False)


@as_shipped()
def draw_curves(found: Sequence[Inversion], path: Path) -> Path:
    """Draw the mean peak signal-to-noise ratio over the steps of each search, with the spread over images.

    Args:
        found: the attacks.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    from fl_lightning.report.picture import add_legend

    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    lines: dict[str, Line2D] = {}
    for own, (color, dashed) in zip(found, _looks(found), strict=True):
        if own.found is None:
            continue
        curves = own.found.curves.numpy()
        steps, style = np.arange(1, len(curves) + 1), "--" if dashed else "-"
        axes.fill_between(steps, curves.min(1), curves.max(1), color=color, alpha=0.12, linewidth=0)
        lines[own.label] = axes.plot(steps, curves.mean(1), color=color, linestyle=style)[0]
    axes.set_xlabel("steps of the search", color=INK)
    axes.set_ylabel("PSNR, dB", color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        add_legend(axes, list(lines.values()), list(lines), fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.set_title("nothing was sent that could be followed", color=INK, fontsize=10)
    return save(figure, path)


def write_page(said: Mapping[str, Any], truth: Tensor | None, found: Sequence[Inversion], path: Path) -> Path:
    """Write the page.

    Args:
        said: what `audit.json` says.
        truth: [B, C, H, W] the real images; None where none were sought.
        found: the attacks.
        path: the HTML file.
    """
    body = []
    if truth is not None:
        body += _inversion_section(said, truth, found)
    if said["canaries"]:
        body += _canary_section(said["canaries"])
    write_text(path, PAGE.format(body="\n".join(body)))
    return path


def _inversion_section(said: Mapping[str, Any], truth: Tensor, found: Sequence[Inversion]) -> list[str]:
    settings = said["attack"]
    rows = ["<tr><th>original</th>" + "".join(_cell(image) for image in truth) + "<td></td></tr>"]
    for own in found:
        name = html.escape(own.label)
        if own.found is None:
            some = f"{own.message:,} values were sent, and none that it could follow: another attack might"
            why = some if own.message else "nothing was sent that it could follow"
            rows.append(f'<tr><th>{name}</th><td colspan="{len(truth) + 1}">{why}</td></tr>')
            continue
        last = own.found.curves[-1]
        cells = [_cell(i, f"{v:.1f} dB") for i, v in zip(own.found.images, last.tolist(), strict=True)]
        rows.append(f"<tr><th>{name}</th>" + "".join(cells) + f"<td><b>{last.mean():.1f} dB</b></td></tr>")
    steps = "; ".join(f"{html.escape(own.label)} {own.step:g}" for own in found if not own.blurred)
    how = f"{settings['steps']} steps of gradient matching ({settings['objective']})"
    note = (
        "The client makes one step of plain SGD on these images in round 1 and sends what its method sends. The "
        "attacker knows the weights before, the classes and the method, and not what the method draws: its best case. "
        "A low figure says that this attack failed, not that no attack can succeed. Under filters on the wire the step "
        f"is of the run's own learning rate, for they change small updates more than large ones. Its rate: {steps}."
    )
    return [
        "<h2>Images read off a client's message</h2>",
        f"<p>{how}; the peak signal-to-noise ratio against the original, the higher the more is given away.</p>",
        f'<div class="wide"><table>{"".join(rows)}</table></div>',
        _svg(found),
        f'<p class="note">{note}</p>',
    ]


def _cell(image: Tensor, text: str = "") -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, as_array(image), cmap="gray", vmin=0, vmax=1, format="png", origin="upper")
    data = base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(f"reconstruction, {text}" if text else "original image")
    return f'<td><img alt="{alt}" src="data:image/png;base64,{data}"><small>{text}</small></td>'


def _looks(found: Sequence[Inversion]) -> list[tuple[str, bool]]:
    """Each attack's colour, the run's own, and whether its line is broken: under noise."""
    looks, run = [], -1
    for own in found:
        run += not own.blurred
        looks.append((RUN_COLORS[run % len(RUN_COLORS)], own.blurred))
    return looks


def _svg(found: Sequence[Inversion]) -> str:
    """The mean curves, as lines that take the page's colours."""
    looks = [look for look, own in zip(_looks(found), found, strict=True) if own.found is not None]
    curves = [(own.label, own.found.curves.mean(1).tolist()) for own in found if own.found is not None]
    if not curves:
        return ""
    width, height, left, top = 860, 260, 62, 12
    highest = max(10.0, max(max(c) for _, c in curves))
    tick = next((step for step in TICKS if highest <= 5 * step), TICKS[-1])
    most = tick * math.ceil(highest / tick)
    steps = max(len(c) for _, c in curves)
    lines, key = [], []
    for value in range(0, most + 1, tick):
        y = top + height * (1 - value / most)
        lines.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for (color, dashed), (label, curve) in zip(looks, curves, strict=True):
        points = " ".join(
            f"{left + width * i / max(steps - 1, 1):.1f},{top + height * (1 - max(v, 0) / most):.1f}"
            for i, v in enumerate(curve)
        )
        style = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{"6 4" if dashed else ""}"'
        lines.append(f'<polyline points="{points}" {style}><title>{html.escape(label)}</title></polyline>')
        sample = f'<svg width="30" height="10" aria-hidden="true"><line x1="0" x2="30" y1="5" y2="5" {style}/></svg>'
        key.append(f"<li>{sample}{html.escape(label)}</li>")
    middle = top + height / 2
    lines.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">PSNR, dB</text>')
    lines.append(f'<text x="{left}" y="{top + height + 22}">step 1</text>')
    lines.append(
        f'<text x="{left + width}" y="{top + height + 22}" text-anchor="end">step {steps} of the search</text>'
    )
    size = f'viewBox="0 0 {left + width + 8} {top + height + 30}"'
    title = "Mean PSNR in dB over the steps of the search"
    drawn = f'<svg role="img" aria-label="{title}" width="930" {size}>{"".join(lines)}</svg>'
    return f'<div class="wide">{drawn}</div><ul class="key">{"".join(key)}</ul>'


def _canary_section(canaries: Mapping[str, Any]) -> list[str]:
    head = "<tr><th>run</th><th>ε at least (99.9 %)</th><th>ε by the accountant</th><th>point estimate</th>"
    rows = [head + "<th>canaries</th><th>dimensions</th><th>δ</th></tr>"]
    for name, own in canaries.items():
        if own is None:
            rows.append(
                f'<tr><td>{html.escape(name)}</td><td colspan="6">no ClipAndNoise: nothing is promised</td></tr>'
            )
            continue
        accounted = "∞" if own["epsilon_accounted"] is None else f"{own['epsilon_accounted']:.2f}"
        cells = [f"<b>{own['epsilon_at_least']:.2f}</b>", accounted, f"{own['epsilon_point']:.2f}"]
        cells += [str(own["canaries"]), str(own["dimensions"]), f"{own['delta']:g}"]
        rows.append(f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    note = (
        "The run is made again with canaries, clients that send a random direction of full length, and their cosines "
        "with what is given away are told apart from those of directions that took no part (Andrew et al., ICLR "
        "2024). The accountant's figure is an upper bound for the worst client; the audit's is a lower one."
    )
    return [
        "<h2>Canaries</h2>",
        f'<div class="wide"><table>{"".join(rows)}</table></div>',
        f'<p class="note">{note}</p>',
    ]
