"""Docstrings as Markdown."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from fl_lightning import catalog

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> ", re.MULTILINE)


def of_class(class_path: str) -> str:
    """A class's docstring without its list of arguments."""
    module, _, name = class_path.rpartition(".")
    found = catalog.find(module, name)
    return _prose(ast.get_docstring(found[1]) or "") if found else ""


def of_module(class_path: str) -> str:
    """The docstring of the module that a class stands in."""
    module = class_path.rpartition(".")[0]
    path = catalog.ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return _prose(ast.get_docstring(ast.parse(Path(path).read_text(encoding="utf-8"))) or "")


def _prose(text: str) -> str:
    for end in (_SECTION, _EXAMPLE):
        text = end.split(text)[0]
    return textwrap.dedent(text).strip()


def markdown(text: str) -> str:
    """Prose as Markdown: code in double backticks is code, what is indented is an equation."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if is_equation(paragraph):
            paragraphs.append(block(paragraph))
            continue
        broken = re.sub(r"(?<!\n)\n- ", "\n\n- ", f"\n{paragraph}", count=1).strip()  # a list needs a line before it
        paragraphs.append(broken.replace("``", "`"))
    return "\n\n".join(paragraphs)


def is_equation(paragraph: str) -> bool:
    """Whether a paragraph is set apart."""
    return all(line.startswith("    ") for line in paragraph.splitlines())


def block(equation: str) -> str:
    """An equation, as it stands."""
    return f"```text\n{textwrap.dedent(equation)}\n```"
