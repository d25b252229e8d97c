"""Damaged folders and files: every command answers with the right result or one line, and loses nothing else."""

import pytest

from cli import damaged_folders as harness

SEEDS = {
    "evaluate": range(6), "compare": range(8), "fit folder": range(5), "fit own config": range(3), "fit auto": range(3),
    "tune file": range(3), "dashboard": range(1),
}  # fmt: skip
"""Of each command, which cases; `benchmarks/folders.py` tries thousands."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    place = tmp_path_factory.mktemp("damaged") / "base"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.config_commands.draw_run", lambda *arguments: None)
        harness.build(place, harness.in_process, tables=False)
    return place


@pytest.mark.parametrize(("command", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in seeds])
def test_damage_is_answered_in_one_line_or_mended(base, command, seed, tmp_path):
    case = harness.make_case(base, tmp_path / "case", seed, command)
    answer, wrong = harness.answer_of(case, harness.in_process)
    assert wrong == [], (case, answer)
