"""The examples of CONTRIBUTING.md run as they stand, and are what the package has."""

import re
from pathlib import Path

import pytest

from fl_lightning.losses.decorrelation import Decorrelation
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples():
    """All that the page's blocks define."""
    names = {"__name__": "examples"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    return names


def rows(loop):
    return {row["round"]: {k: v for k, v in row.items() if k != "seconds"} for row in loop.diary.rows}


def test_ditto_of_the_page_is_the_packages(examples, mlp, run_federation, assert_identical):
    written = run_federation(lambda: examples["MyDitto"](mlp(), weight=0.5), participation=0.5)
    shipped = run_federation(lambda: Ditto(mlp(), weight=0.5), participation=0.5)
    assert_identical(rows(written), rows(shipped))
    assert_identical(written.exchange.state_dict(), shipped.exchange.state_dict())


def test_decorrelation_of_the_page_is_the_packages(examples, mlp, run_federation, assert_identical):
    written = run_federation(lambda: FedAvg(mlp(), extra_terms=[examples["MyDecorrelation"](0.1)]))
    shipped = run_federation(lambda: FedAvg(mlp(), extra_terms=[Decorrelation(0.1)]))
    assert_identical(written.exchange.state_dict(), shipped.exchange.state_dict())
    assert [row["loss/my_decorrelation"] for row in written.diary.rows] == [
        row["loss/decorrelation"] for row in shipped.diary.rows
    ]
