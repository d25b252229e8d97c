"""What griffe reads of docstrings: examples without a heading are examples, brackets are no links."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Gives ``>>>`` lines the heading that Google's style wants."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """A docstring whose examples are a section of their own."""
    found = re.search(r"^>>> ", text, flags=re.MULTILINE)
    prose, examples = (text, "") if found is None else (text[: found.start()], text[found.start() :])
    prose = re.sub(r"\]\(", r"]\\(", prose)
    return prose if not examples else f"{prose.rstrip()}\n\nExamples:\n{textwrap.indent(examples, '    ')}"
