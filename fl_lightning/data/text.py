"""Text data sets, tokenised to one int64 tensor each."""

from __future__ import annotations

import re
import sys
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY, Arrays
from fl_lightning.data.dataset import Dataset, data_root
from fl_lightning.data.normalising import is_missing
from fl_lightning.errors import ConfigError, require

PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z0-9']+")


@cache
def _any_word() -> re.Pattern[str]:
    """Letters, digits and marks: vowel signs are no letters to `re`, and part words from words.

    Joiners inside a word, of Persian and Sinhala, say, are part of it.
    """
    marks = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c).startswith("M"))
    part = rf"(?:[^\W_]+|['{marks}]+)+"
    return re.compile(rf"{part}(?:[\u200c\u200d]+{part})*")


def tokenise(text: str, ascii_only: bool = False) -> list[str]:
    """Lower-case words of a text in any alphabet, without ``<br />``; what has no blanks between words is one word.

    Args:
        text: it.
        ascii_only: whether words are of English letters alone, others parting them.

    >>> tokenise("It's GREAT.<br /><br />10/10, naïve_ЖУК!")
    ["it's", 'great', '10', '10', 'naïve', 'жук']
    """
    plain = text.lower().replace("<br />", " ")
    if ascii_only or plain.isascii():  # fifteen times as fast
        return _WORD.findall(plain)
    return _any_word().findall(unicodedata.normalize("NFC", plain))


def as_text(value: Any) -> str:
    """A cell as a text; None or NaN, which tables of texts hold where there is none, is one without a word.

    Raises:
        ConfigError: for a list or a mapping, whose signs would be taken for words.
    """
    rule = "a text must be a text; join what is in parts"
    require(not isinstance(value, list | tuple | Mapping), KEY, rule, value)
    return "" if is_missing(value) else str(value)


class IMDB(Dataset):
    """IMDB: 50,000 film reviews, negative or positive, as word numbers of a vocabulary of its own.

    Number 0 is padding, 1 an unknown word, then come the training part's most frequent words (ties by alphabet).
    Reviews are cut and padded at the end; one without any word is a single unknown word, so that no sequence is empty.

    Args:
        root: folder that holds ``aclImdb``, or that folder itself; by default ``$FL_LIGHTNING_DATA``, else
            ``~/.cache/fl-lightning/datasets``.
        vocabulary: number of word numbers, padding and unknown included.
        length: words of a review that are kept.
    """

    paper = "Maas et al., ACL 2011, Learning Word Vectors for Sentiment Analysis"

    ADDRESS = "https://ai.stanford.edu/~amaas/data/sentiment/"

    def __init__(self, root: str | None = None, vocabulary: int = 10000, length: int = 200) -> None:
        require(vocabulary >= 3, f"{KEY}.vocabulary", "must be at least 3: padding, unknown and one word", vocabulary)
        require(length >= 1, f"{KEY}.length", "must be at least 1", length)
        self.root = root
        self.vocabulary = vocabulary
        self.length = length

    def sources(self) -> list[Path]:
        """All reviews; hidden files are none."""
        return [path for _, _, path in self._files()]

    def arrays(self) -> Arrays:
        """Read and tokenise all reviews."""
        files = self._files()
        number: defaultdict[str, int] = defaultdict(count().__next__)  # of every kept word, in order of appearance
        reviews: list[array[int]] = []
        frequency: Counter[str] = Counter()
        for part, _, path in files:
            try:
                words = tokenise(path.read_text(encoding="utf-8"), ascii_only=True)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(KEY, f"IMDB: {path} cannot be read as text ({error})") from error
            if part == "train":
                frequency.update(words)
            reviews.append(array("l", map(number.__getitem__, words[: self.length])))
        kept = sorted(frequency, key=lambda word: (-frequency[word], word))[: self.vocabulary - 2]
        token_of = {word: token for token, word in enumerate(kept, start=2)}
        token = np.array([token_of.get(word, UNKNOWN) for word in number], dtype=np.int64)

        x = np.full((len(files), self.length), PAD, dtype=np.int64)
        for row, review in zip(x, reviews, strict=True):
            row[0] = UNKNOWN
            row[: len(review)] = token[np.asarray(review, dtype=np.int64)]
        return Arrays(
            x=torch.from_numpy(x),
            y=torch.tensor([int(label == "pos") for _, label, _ in files]),
            num_train=sum(part == "train" for part, _, _ in files),
            classes=("neg", "pos"),
            vocabulary_size=self.vocabulary,
        )

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """New reviews in the numbers of the training part's words."""
        require("text" in columns, "DATA", "must have the column 'text' of reviews")
        frequency: Counter[str] = Counter()
        for part, _, path in self._files():
            if part == "train":
                frequency.update(tokenise(path.read_text(encoding="utf-8"), ascii_only=True))
        kept = sorted(frequency, key=lambda word: (-frequency[word], word))[: self.vocabulary - 2]
        token_of = {word: token for token, word in enumerate(kept, start=2)}
        x = torch.full((len(columns["text"]), self.length), PAD, dtype=torch.int64)
        for row, text in zip(x, columns["text"], strict=True):
            words = tokenise(as_text(text), ascii_only=True)[: self.length]
            tokens = [token_of.get(word, UNKNOWN) for word in words] or [UNKNOWN]
            row[: len(tokens)] = torch.tensor(tokens)
        return x

    def _files(self) -> list[tuple[str, str, Path]]:
        """(part, label, file) of all reviews: training part first, then negative before positive, then by name."""
        root = data_root(self.root)
        folder = root / "aclImdb" if (root / "aclImdb").is_dir() else root
        found = []
        for part in ("train", "test"):
            for label in ("neg", "pos"):
                reviews = sorted((folder / part / label).glob("[!.]*.txt"))  # macOS puts ._0_9.txt beside
                if not reviews:
                    raise ConfigError(
                        KEY,
                        f"IMDB: there are no reviews (*.txt) in {folder / part / label}; unpack aclImdb_v1.tar.gz from "
                        f"{self.ADDRESS} there, or set `root` or FL_LIGHTNING_DATA",
                    )
                found += [(part, label, path) for path in reviews]
        return found
