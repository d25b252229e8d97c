"""What a data set is: something that decodes to `Arrays`. Where files are looked for."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from fl_lightning.data.arrays import Arrays
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import expanded


class Dataset(ABC):
    """A source of `Arrays`; a data set of your own subclasses it and writes `arrays`.

    Constructor arguments are the YAML schema: give them plain types, defaults and an ``Args:`` block, and keep each one
    in an attribute, because the attributes are part of the key of the decoded cache.
    """

    paper: str = ""
    """One line saying whom to cite."""
    otherwise: ClassVar[str] = (
        "bring a torch data set, a LightningDataModule's too, by TorchDataset, and arrays, tables and folders by "
        "ArrayFile, CSVTable, TextFile and ImageFolder"
    )
    """What to do with a class that is none."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """Decode everything from its source.

        Raises:
            ConfigError: if files are missing, cut short or of another kind; it says which, and how to get them.
        """

    def sources(self) -> list[Path] | None:
        """The files that `arrays` reads: their paths, sizes and times of change are part of the decoded cache's key.

        A folder stands for all files in it.

        By default None, they are unknown: then the data set is decoded for every run. An empty list says that it reads
        none.
        """
        return None

    @property
    def text_column(self) -> str:
        """The column that texts stand in, where the samples are texts."""
        return "text"

    def encode(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """New samples, as columns of a table and without labels, in the numbers that `arrays` has before it scales.

        Args:
            columns: by name.

        Raises:
            ConfigError: if the data set is none of tables or texts, or lacks a column.
        """
        raise ConfigError(
            "DATA", f"{type(self).__name__} is no data set of tables or texts; give an array as .npz or .pt"
        )

    def pictures(self, paths: Sequence[Path], shape: Sequence[int]) -> Tensor | None:
        """New samples, as files of pictures and without labels, as `arrays` has them before it scales.

        Args:
            paths: the files.
            shape: of the data set's samples.

        Returns:
            [N, …]; None where nothing but its shape says how one is read: then as `ImageFolder` reads it.

        Raises:
            ConfigError: if one cannot be read, or nobody knows how.
        """
        return None


def default_data_dir() -> Path:
    """Where data sets are looked for: ``$FL_LIGHTNING_DATA``, else ``~/.cache/fl-lightning/datasets``."""
    return expanded(os.environ.get("FL_LIGHTNING_DATA") or "~/.cache/fl-lightning/datasets")


def data_root(root: str | None) -> Path:
    """The folder that a data set's `root` argument means; None is the default folder."""
    return default_data_dir() if root is None else expanded(root)


def require_another(key: str, test: object, training: object, beside: str) -> None:
    """Refuse a training part that is the official test part, too: all would be tested on what they are trained on.

    Args:
        key: the test part's option.
        test: that part; None where there is none.
        training: the training part.
        beside: its option.
    """
    same = test is not None and test == training
    require(not same, key, f"must be another one than {beside}, or null: test parts are split off then", test)
