"""A notebook as a page: its text, its code, and what it showed when it was executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page(path: Path, shown_as: str) -> str:
    """The notebook in Markdown.

    Args:
        path: the notebook, executed.
        shown_as: its path for readers.
    """
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in _parts(cell)]
    return "\n\n".join([parts[0], f"*This page is the notebook `{shown_as}`, as it was executed.*", *parts[1:]]) + "\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        title, _, rest = source.partition("\n\n")
        yield title
        if rest:
            yield rest
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "image/png" in shown:
            content = "".join(shown["image/png"]).replace("\n", "")
            yield f'<img alt="What the cell shows" src="data:image/png;base64,{content}">'
        elif text := "".join(shown.get("text/plain", output.get("text", ""))).rstrip():
            yield f"```text\n{text}\n```"
