"""Blocks of code in Markdown, and what a comment before one says of it."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<mark>[^>]*?) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code.

    Args:
        language: after the fence.
        title: the file that it stands for.
        mark: what the comment before it says: ``setup``, ``run``, ``skip, REASON``.
        body: the text.
        line: where it begins.
    """

    language: str
    title: str
    mark: str
    body: str
    line: int


def blocks_of(text):
    """All blocks of a page, in order."""
    return [
        Block(
            found["language"],
            found["title"] or "",
            found["mark"] or "",
            found["body"],
            text.count("\n", 0, found.start("language")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def commands_of(body):
    """The lines of a shell block: each one's words, comments and continuations taken away."""
    lines = re.sub(r"\\\n\s*", " ", body).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def own_words(words):
    """What follows our command in a line, wherever it stands (behind srun, torchrun); None in other lines."""
    for index, word in enumerate(words):
        if word == "fl-lightning" or (word == "fl_lightning" and words[index - 1] == "-m"):
            return words[index + 1 :]
    return None
