"""The methods and terms that the guides show run as they stand, and are what the package has."""

import re
from pathlib import Path

import pytest

from fl_lightning.losses.decorrelation import Decorrelation
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


@pytest.fixture(scope="module")
def examples():
    """What the guides' own files define."""
    names = {"__name__": "examples"}
    for page, file in (("method", "myditto"), ("term", "myterm")):
        text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
        (block,) = re.findall(rf'```python title="{file}.py"\n(.*?)```', text, re.DOTALL)
        exec(compile(block, f"{page}.md", "exec"), names)
    return names


def rows(loop):
    return {row["round"]: {k: v for k, v in row.items() if not k.startswith("seconds")} for row in loop.diary.rows}


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
