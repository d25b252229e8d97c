from types import SimpleNamespace

import pytest

from fl_lightning.tune.space import read_search
from fl_lightning.tune.trials import Median, Optuna, Trial

SEARCH = """
search: optuna
trials: 12
monitor: Local-T.last
rows:
  Method: {space: {optimizer.init_args.lr: {low: 0.0, high: 1.0}, method.init_args.mode: [a, b]}}
"""


@pytest.fixture
def search(tmp_path):
    (tmp_path / "s.yaml").write_text(SEARCH)
    return read_search(tmp_path / "s.yaml")


def worth(point):
    return -((point["optimizer.init_args.lr"] - 0.3) ** 2) - (point["method.init_args.mode"] == "a")


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optuna_goes_on_where_it_was_killed(search, tmp_path):
    pytest.importorskip("optuna")

    def go_on(stop_after):
        sampler, asked = Optuna(search, search.contenders[0], tmp_path / "out"), []
        while (answer := sampler.ask()) is not None:
            asked.append(answer[0])
            if len(asked) > stop_after:  # killed in the middle of a trial
                return asked
            sampler.tell(Trial(0, answer[0], value=worth(answer[0]), state="complete", handle=answer[1]))
        return asked

    first = go_on(5)
    again = go_on(100)
    assert len(again) == search.trials  # those of before are part of the budget
    assert again[:6] == first  # and the one that was broken off is asked for again
    assert max(map(worth, again)) > -0.02


def run(name, values, rounds=10, column="Local-T"):
    rows = [{"round": n + 1, column: value} for n, value in enumerate(values)]
    return SimpleNamespace(name=name, rounds=rounds, rows=lambda: rows)


def test_what_lies_below_the_median_of_the_others_is_ended(search):
    median = Median(search)
    for number, level in enumerate((0.5, 0.6, 0.7)):
        assert not median.worse(run(f"run{number}", [level] * 10))  # nothing to compare with yet, or good
    assert median.worse(run("bad", [0.1, 0.2, 0.3]))
    assert not median.worse(run("good", [0.1, 0.65]))
    assert not median.worse(run("young", [0.1]))  # in the first fifth of the rounds
    assert not median.worse(run("blind", []))
