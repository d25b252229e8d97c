"""Texts as word numbers: a vocabulary of the training part's own, or a tokenizer that somebody else trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset, require_another
from fl_lightning.data.delimited import lines_in, read_columns, text_of
from fl_lightning.data.normalising import arrays_of, as_groups, as_labels, is_missing
from fl_lightning.data.text import PAD, UNKNOWN, as_text, tokenise
from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.files import expanded, plain_json


@dataclass(frozen=True)
class Words:
    """Number 0 is padding, 1 an unknown word, then come the training part's most frequent words (ties by alphabet).

    Args:
        vocabulary: word numbers, padding and unknown included, >= 3.
        length: words of a text that are kept, >= 1.
    """

    vocabulary: int = 10000
    length: int = 200

    def __post_init__(self) -> None:
        rule = "must be at least 3: padding, unknown and one word"
        require(self.vocabulary >= 3, f"{KEY}.vocabulary", rule, self.vocabulary)
        require(self.length >= 1, f"{KEY}.length", "must be at least 1", self.length)

    def tokens(self, texts: Sequence[str | None], num_train: int) -> Tensor:
        """[N, length] int64; texts are cut and padded at the end, one without a word is a single unknown word.

        None is a text without a word.
        """
        return self.encode(texts, texts[:num_train])

    def encode(self, texts: Sequence[str | None], training: Sequence[str | None]) -> Tensor:
        """The same of texts that need not be among those whose words are numbered."""
        frequency = Counter(word for text in training for word in tokenise(as_text(text)))
        kept = sorted(frequency, key=lambda word: (-frequency[word], word))[: self.vocabulary - 2]
        number = {word: token for token, word in enumerate(kept, start=2)}
        return padded([[number.get(word, UNKNOWN) for word in tokenise(as_text(text))] for text in texts], self.length)


def padded(texts: Sequence[Sequence[int]], length: int, pad: int = PAD, unknown: int = UNKNOWN) -> Tensor:
    """[N, length] int64 of lists of numbers, cut and padded at the end; an empty one is an unknown word."""
    x = torch.full((len(texts), length), pad, dtype=torch.int64)
    for row, numbers in zip(x, texts, strict=True):
        own = torch.tensor(list(numbers[:length]) or [unknown])
        row[: len(own)] = own
    return x


class TextFile(Dataset):
    """Texts in a CSV, TSV or JSON-lines file, in UTF-8, as word numbers.

    An empty cell, and null in JSON, is a text without a word: a single unknown word, or padding alone where a tokenizer
    has none. The vocabulary is of the whole file `path`: under the split ``holdout``, where clients' test samples are
    cut out of it, too, their words count.

    Args:
        path: the file: ``.csv`` and ``.tsv`` with a head, ``.jsonl`` or ``.ndjson`` with an object a line.
        text: the column of texts.
        label: the column of classes.
        test_path: a file of the same kind that is the official test part.
        group: the column that says who or where a text is from.
        tokenizer: ``words`` for lower-case words and a vocabulary of the file's own; or a ``tokenizer.json``
            of Hugging Face's `tokenizers` (needs ``pip install tokenizers``). Texts are cut and padded at the end
            whatever that file says, by the padding that it names, else by number 0.
        vocabulary: word numbers, padding and unknown included, for ``words``.
        length: tokens of a text that are kept.
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        label: str = "label",
        test_path: str | None = None,
        group: str | None = None,
        tokenizer: str = "words",
        vocabulary: int = 10000,
        length: int = 200,
    ) -> None:
        self.path = path
        self.text = text
        self.label = label
        self.test_path = test_path
        self.group = group
        self.tokenizer = tokenizer
        self._words = Words(vocabulary, length)
        self.vocabulary = vocabulary
        self.length = length

    def sources(self) -> list[Path]:
        """The files, and the tokenizer's."""
        paths = [self.path, self.test_path, None if self.tokenizer == "words" else self.tokenizer]
        return [expanded(path) for path in paths if path is not None]

    def arrays(self) -> Arrays:
        """Read and tokenise.

        Raises:
            ConfigError: if a file or a column is missing, or a file has another encoding.
        """
        require_another(f"{KEY}.test_path", self.test_path, self.path, "path")
        given = (("path", self.path), ("test_path", self.test_path))
        parts = [_read(expanded(path), option) for option, path in given if path is not None]
        for key, name in (("text", self.text), ("label", self.label), ("group", self.group)):
            for part in parts:
                require(name is None or name in part, f"{KEY}.{key}", f"columns are {', '.join(part)}", name)
            for path, part in zip(self.sources(), parts, strict=False):
                values = part[name] if name is not None and key != "text" else ()
                empty = (is_missing(value) or not str(value).strip() for value in values)
                nothing = next((place for place, is_empty in enumerate(empty) if is_empty), None)
                rule = f"{path}: sample {nothing} (from 0) has nothing under {name!r}; fill it in, or take it out"
                require(nothing is None, KEY, rule)
        texts = [as_text(text) for part in parts for text in part[self.text]]
        num_train = len(parts[0][self.text])
        labels, classes = as_labels([label for part in parts for label in part[self.label]], "TextFile")
        groups = None if self.group is None else as_groups([g for part in parts for g in part[self.group]], "TextFile")
        x, size = self._tokens(texts, num_train)
        return arrays_of(x, labels, num_train, classes, groups=groups, vocabulary_size=size)

    @property
    def text_column(self) -> str:
        """The column of texts."""
        return self.text

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """New texts in the numbers of the training part's words, or of the tokenizer."""
        require(self.text in columns, "DATA", f"must have the column {self.text!r} of texts")
        texts = [as_text(text) for text in columns[self.text]]
        if self.tokenizer != "words":
            return self._tokens(texts, 0)[0]
        return self._words.encode(texts, _read(expanded(self.path), "path")[self.text])

    def _tokens(self, texts: Sequence[str], num_train: int) -> tuple[Tensor, int]:
        if self.tokenizer == "words":
            return self._words.tokens(texts, num_train), self.vocabulary
        absent = "a tokenizer's file needs the package `tokenizers`: pip install tokenizers"
        with importing("tokenizers", f"{KEY}.tokenizer", absent, self.tokenizer):
            from tokenizers import Tokenizer
        path = expanded(self.tokenizer)
        require(path.is_file(), f"{KEY}.tokenizer", "must be words, or a tokenizer.json", self.tokenizer)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            said = " ".join(str(error).split())[:120]
            raise ConfigError(f"{KEY}.tokenizer", f"{self.tokenizer} is no tokenizer ({said})") from error
        pad = (tokenizer.padding or {}).get("pad_id", PAD)
        tokenizer.no_padding()  # to the longest of the texts that it is given: a text's numbers would rest on others'
        tokenizer.no_truncation()
        try:
            encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        except Exception as error:  # a word that it has no number for, nor one for unknown ones
            said = " ".join(str(error).split())[:120]
            raise ConfigError(f"{KEY}.tokenizer", f"{self.tokenizer} does not encode the texts ({said})") from error
        size = 1 + max([pad, *tokenizer.get_vocab().values()])  # its numbers may have gaps
        return padded(encoded, self.length, pad, _unknown(tokenizer, pad)), size


def _unknown(tokenizer: Any, pad: int) -> int:
    """The number of a tokenizer's unknown word; that of padding where it has none."""
    model = json.loads(tokenizer.to_str())["model"]
    name = model.get("unk_token")
    number = model.get("unk_id") if name is None else tokenizer.token_to_id(name)
    return pad if number is None else int(number)


def _read(path: Path, option: str) -> dict[str, list[Any]]:
    return read_table(path, f"{KEY}.{option}")


def read_table(path: Path, key: str) -> dict[str, list[Any]]:
    """The columns of a CSV, TSV or JSON-lines file.

    Raises:
        ConfigError: about `key`, if the file is missing, of another kind or encoding; it says which line.
    """
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return dict(read_columns(path, key))
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines_in(text_of(path, key)), start=1):
        if line.strip():
            try:
                row = plain_json(line)
            except ValueError as error:
                raise ConfigError(key, f"{path}: line {number} is no JSON ({error})") from error
            same = isinstance(row, dict) and (not rows or row.keys() == rows[0].keys())
            require(same, key, f"{path}: line {number} must be an object with the keys of the first line")
            rows.append(row)
    require(bool(rows), key, f"{path} holds no text")
    return {name: [row[name] for row in rows] for name in rows[0]}
