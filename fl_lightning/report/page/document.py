"""The page as one HTML file: everything in it, nothing fetched, and no script in it but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from fl_lightning.report.colours import DASHES, SHAPES
from fl_lightning.report.page import bundle, tables
from fl_lightning.report.page.figure import Figure
from fl_lightning.report.series import Series

ASSETS = Path(__file__).parent / "assets"
MOST_FOLLOWING = 16  # lines whose choice stays in sight; more would hide half of the page
MOST_BANDS = 4  # spreads over clients overlap; of more lines they are shown only if so chosen


def document(
    title: str,
    lines: Sequence[Series],
    figures: Sequence[Figure],
    table: tables.PublishedTable | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        title: its heading.
        lines: what is compared.
        figures: in the order of their sections.
        table: beside published figures, where there is one.
        notes: what is missing, and why.
    """
    scripts = [bundle.program().replace("</script", "<\\/script"), _asset("page.js")]
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    rules = f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    sections = _sections(lines, figures, table, notes)
    links = "".join(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{escape(name)}</h2>{content}</section>'
        for key, name, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head><body>'
        f'<a class="skip" href="#main">Skip to the figures</a><header><h1>{escape(title)}</h1>'
        '<div class="tools"><button type="button" id="theme" aria-pressed="false">Dark theme</button>'
        '<button type="button" id="print">Print</button></div>'
        f'<nav aria-label="Contents"><ul>{links}</ul></nav></header>'
        f'{_controls(lines, figures)}<main id="main">{body}</main><noscript><p>Figures need JavaScript.</p></noscript>'
        f'<script type="application/json" id="content">{_json(_content(lines, figures))}</script>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def _sections(
    lines: Sequence[Series],
    figures: Sequence[Figure],
    table: tables.PublishedTable | None,
    notes: Sequence[str],
) -> list[tuple[str, str, str]]:
    """Id, name and content of the page's sections."""
    found = []
    if notes:
        listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
        found.append(("missing", "What is missing", f"<ul>{listed}</ul>"))
    if table is not None:
        found.append(("table", "Table", tables.published(table)))
    if not lines:
        return found
    found.append(("moments", "Figures in brief", tables.moments(lines)))
    for place, section in enumerate(dict.fromkeys(figure.section for figure in figures)):
        own = [_figure(figure) for figure in figures if figure.section == section]
        found.append((f"section-{place}", section, f'<div class="grid">{"".join(own)}</div>'))
    found.append(("again", "Configuration, and how to run it again", "".join(tables.configurations(lines))))
    return found


def _figure(figure: Figure) -> str:
    choice = ""
    if len(figure.picks) > 1:
        choice = f'<label class="pick">Show <select data-pick="{figure.key}"></select></label>'
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in figure.facts)
    facts = f"<ul>{facts}</ul>" if facts else ""
    key, title, kind = figure.key, escape(figure.title), "full" if figure.wide else "half"
    return (
        f'<figure id="{key}" class="{kind}" aria-labelledby="{key}-title"><h3 id="{key}-title">{title}</h3>{choice}'
        f'<div class="plot" role="img" aria-label="{title}. {escape(figure.text)}" data-figure="{key}"></div>'
        f"<figcaption>{escape(figure.text)}{facts}</figcaption>"
        f'<details data-table="{key}"><summary>Data of this figure</summary></details></figure>'
    )


def _controls(lines: Sequence[Series], figures: Sequence[Figure]) -> str:
    """What is shown: the setting, the band and the runs."""
    if not lines:
        return ""
    settings = list(dict.fromkeys(line.setting for line in lines))
    choice = "".join(f'<option value="{place}">{escape(name)}</option>' for place, name in enumerate(settings))
    label = f'<label>Setting <select id="setting">{choice}</select></label>' if len(settings) > 1 else ""
    label = label or f'<p class="setting">{escape(settings[0])}</p>'
    seeds = any(len(line.runs) > 1 for line in lines)
    kinds = [*(["seeds"] if seeds else []), *(["clients"] if any("cl" in f.columns for f in figures) else []), "none"]
    first = kinds[0] if seeds or len(lines) <= MOST_BANDS else "none"
    radios = "".join(
        f'<label><input type="radio" name="band" value="{kind}"{" checked" if kind == first else ""}> '
        f"{'none' if kind == 'none' else f'± std over {kind}'}</label>"
        for kind in kinds
    )
    kind = "controls" if len(lines) <= MOST_FOLLOWING else "controls many"
    return (
        f'<aside aria-label="What is shown" class="{kind}">{label}'
        '<fieldset id="runs"><legend>Runs</legend><span id="toggles"></span>'
        '<button type="button" id="all">All</button><button type="button" id="none">None</button></fieldset>'
        f'<fieldset><legend>Band</legend>{radios}</fieldset><p id="said" class="hidden" role="status"></p></aside>'
    )


def _content(lines: Sequence[Series], figures: Sequence[Figure]) -> dict[str, Any]:
    """What the page's script draws."""
    settings = list(dict.fromkeys(line.setting for line in lines))
    return {
        "lines": [
            {
                "label": line.label,
                "setting": settings.index(line.setting),
                "light": line.light,
                "dark": line.dark,
                "dash": list(DASHES[line.dash]),
                "shape": SHAPES[line.dash],
                "runs": len(line.runs),
            }
            for line in lines
        ],
        "figures": [
            {
                "key": figure.key,
                "spec": figure.spec,
                "columns": figure.columns,
                "heads": figure.heads,
                "names": figure.names,
                "picks": figure.picks,
            }
            for figure in figures
        ],
    }


def _json(content: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
