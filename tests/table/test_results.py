"""The folder of a table's or a search's results."""

import os

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.table.results import claim


def test_two_files_of_one_name_do_not_overwrite_each_other(tmp_path):
    """``b/small/mytable.yaml`` and ``b/large/mytable.yaml`` are both called b-mytable."""
    small, large = tmp_path / "b/small/mytable.yaml", tmp_path / "b/large/mytable.yaml"
    for file in (small, large):
        file.parent.mkdir(parents=True)
        file.write_text(f"title: {file.parent.name}\n")
    folder = tmp_path / "runs/tables/b-mytable"
    claim(folder, small)
    small.write_text("title: edited\n")
    claim(folder, small)
    with pytest.raises(ConfigError, match=r"^name: .*b-mytable holds the results of .*small.*another name, got 'b-my"):
        claim(folder, large)
    os.rename(tmp_path / "b/small", tmp_path / "b/moved")  # its new place, and nobody's claim
    claim(folder, tmp_path / "b/moved/mytable.yaml")
    large.write_text("title: edited\n")  # a copy in another place
    claim(folder, large)
