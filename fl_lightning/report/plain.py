"""The terminal as it shows text that others wrote: no markup, no emoji codes, no escape sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fl_lightning.terminal import printable

NARROWEST = 40  # columns that a table takes, whatever the terminal has


class PlainConsole(Console):
    """A console on which a name is a name: ``[/b]``, ``:heart:`` and an escape sequence are shown as they are written.

    In a notebook it prints as elsewhere: rich would show pages there, which a run's forked processes cannot. Only on a
    terminal is it interactive: ``FORCE_COLOR``, which notebooks and CI set, asks for colours, not for a live line.

    Args:
        options: of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, force_jupyter=False, **options)
        if not {"force_terminal", "force_interactive"} & options.keys() and not _is_terminal(self.file):
            self.is_interactive = False

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; on a terminal that is very narrow, tables are wider than it, and it breaks their lines.

        rich would shorten every cell, down to nothing.
        """
        before = self._width
        if self.width < NARROWEST and any(isinstance(each, Table) for each in objects):
            self.width, options["crop"] = NARROWEST, False
        try:
            super().print(*objects, **options)
        finally:
            self._width = before

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich renders it: spelled out here, so that it is measured as it is shown."""
        return super().render_str(printable(text, "\n\t"), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Render as rich does, and let nothing through that would move the cursor or rename the window."""
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text, "\n"), style, control)


def _is_terminal(file: Any) -> bool:
    """Whether a stream is a terminal; one of somebody's own may be closed, or have `write` and `flush` alone."""
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):
        return False
