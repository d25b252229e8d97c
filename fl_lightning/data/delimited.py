"""Text files and tables in them, so that an error names the line that an editor shows."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal

from fl_lightning.errors import ConfigError, require


def text_of(path: Path, key: str) -> str:
    """What a text file holds, in UTF-8, without a byte order mark; ends of lines as they are.

    Args:
        path: the file.
        key: who asks for it, for errors.

    Raises:
        ConfigError: if there is no such file, it cannot be read, or it has another encoding; it says in which line.
    """
    require(path.is_file(), key, "there is no such file", str(path))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        line = len(lines_in(error.object[: error.start].decode() + "?"))
        rule = f"{path}: line {line} is no UTF-8 (byte {error.object[error.start]:#04x}); save the file as UTF-8"
        raise ConfigError(key, rule) from error


def lines_in(text: str) -> list[str]:
    """The lines of a text, as editors count them: U+2028 and form feeds are letters of a line."""
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


_Lines = list[tuple[int, list[str]]]
"""The number of the line that a row begins in, from 1, and its cells."""


def _cells(text: str, separator: str) -> _Lines:
    """The rows of a table. A lone quotation mark would take all lines up to the next one into its cell.

    Such a mark is refused in a CSV file, unless another one happens to close it; in a TSV file, where many write none
    around cells, all are then letters. So are they where cells would hold tabs or several lines, and every line has as
    many cells as the first one without that.

    Raises:
        csv.Error: naming the line.
    """
    if separator == ",":
        return _parsed(text, separator, csv.QUOTE_MINIMAL)
    try:
        enclosed = _parsed(text, separator, csv.QUOTE_MINIMAL)
    except csv.Error:
        return _parsed(text, separator, csv.QUOTE_NONE)
    if not any("\t" in cell or "\n" in cell or "\r" in cell for _, row in enclosed for cell in row):
        return enclosed
    letters = _parsed(text, separator, csv.QUOTE_NONE)
    widths = {len(row) for _, row in letters if row}
    if widths == {1}:
        raise csv.Error("in a file of one column, quotation marks around several lines may be letters, too; write CSV")
    return letters if len(widths) == 1 else enclosed


def _parsed(text: str, separator: str, quoting: Literal[0, 3]) -> _Lines:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, quoting=quoting)
    rows, before = [], 0
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # texts may be as long as they are
    try:
        for row in reader:
            rows.append((before + 1, row))
            before = reader.line_num
    except csv.Error as error:
        raise csv.Error(f"line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return rows


def read_columns(path: Path, key: str) -> dict[str, list[str]]:
    """The columns of a CSV file with a head, as text; see `numbered_columns`."""
    return numbered_columns(path, key)[0]


def numbered_columns(path: Path, key: str) -> tuple[dict[str, list[str]], list[int]]:
    """The columns of a CSV file with a head, as text, and the line of the file that each row begins in, from 1.

    A blank line is none, but in a file of one column it is an empty cell, except before the head and at the end.

    Args:
        path: the file.
        key: who asks for it, for errors.

    Raises:
        ConfigError: if the file is missing, is no text, or a line has another number of cells.
    """
    text = text_of(path, key)
    try:
        lines = _cells(text, "\t" if path.suffix.lower() == ".tsv" else ",")
    except csv.Error as error:
        raise ConfigError(key, f"{path} is no CSV file ({error})") from error
    filled = [place for place, (_, line) in enumerate(lines) if line]
    require(len(filled) > 1, key, f"{path} must have a line of names and samples below it")
    (_, head), *below = lines[filled[0] : filled[-1] + 1]
    below = [(number, line or [""]) for number, line in below if line or len(head) == 1]
    twice = next((name for name in head if head.count(name) > 1), None)
    require(twice is None, key, f"{path} has two columns of one name", twice)
    for number, line in below:
        rule = f"{path}: line {number} has {len(line)} cells, and there are {len(head)} columns"
        require(len(line) == len(head), key, rule)
    columns = {name: [line[place] for _, line in below] for place, name in enumerate(head)}
    return columns, [number for number, _ in below]
