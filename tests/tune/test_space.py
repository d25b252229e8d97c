import itertools
import math

import numpy as np
import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.table.overlays import Overlay
from fl_lightning.tune.command import _require_free
from fl_lightning.tune.space import Contender, Range, grid, grid_size, read_search

GOOD = """
seeds: [0, 1]
monitor: Local-T_received.last
trials: 4
search: grid
validation: 0.25
space: {optimizer.init_args.lr: {low: 0.001, high: 0.1, log: true}}
rows:
  FedAvg: {set: {method: FedAvg}}
  FedProx: {set: {method: FedProx}, space: {method.init_args.mu: [0.1, 1.0]}}
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "s.yaml").write_text(text)
        return tmp_path / "s.yaml"

    return write


def test_a_search_has_the_same_budget_for_every_method(write):
    search = read_search(write(GOOD))
    assert (search.seeds, search.trials, search.kind, search.pruning, search.maximise) == (
        (0, 1),
        4,
        "grid",
        False,
        True,
    )
    first, second = (grid(contender, search.trials) for contender in search.contenders)
    assert len(first) == len(second) == 4
    assert sorted(point["optimizer.init_args.lr"] for point in first) == [0.001, 0.00464159, 0.0215443, 0.1]
    assert {point["method.init_args.mu"] for point in second} == {0.1, 1.0}
    assert second == grid(search.contenders[1], 4)  # the same order every time


OPEN = Range(low=0.001, high=1.0, log=True)


@pytest.mark.parametrize(
    ("space", "size"),
    [
        ({"lr": OPEN}, 10),
        ({"lr": OPEN, "mu": Range(values=(1, 2, 3))}, 10),  # 4 × 3, less two
        ({"lr": OPEN, "mu": OPEN}, 10),
        ({"lr": OPEN, "mu": OPEN, "beta": OPEN}, 10),
        ({"lr": OPEN, "epochs": Range(low=1, high=2, whole=True)}, 10),  # which are two whatever is asked
        ({"epochs": Range(low=1, high=20, log=True, whole=True)}, 10),
        ({"mu": Range(values=(1, 2, 3))}, 3),
        ({"epochs": Range(low=1, high=2, whole=True), "mu": Range(values=(1, 2, 3))}, 6),
    ],
)
def test_a_grid_has_as_many_points_as_the_budget_if_it_can(space, size):
    points = grid(Contender("A", Overlay(), space), 10)
    assert len({tuple(point.values()) for point in points}) == len(points) == size


def test_points_of_a_grid_are_drawn_in_the_order_that_they_always_had():
    space = {"mu": Range(values=(1, 2, 3)), "way": Range(values=("a", "b")), "lr": Range(values=(0.1, 0.2))}
    whole = [
        dict(zip(space, values, strict=True)) for values in itertools.product(*(own.values for own in space.values()))
    ]
    order = np.random.default_rng(0).permutation(12)[:7]
    assert grid(Contender("A", Overlay(), space), 7) == [whole[index] for index in order]


def test_a_few_points_of_a_grid_that_no_memory_holds_are_drawn():
    space = {f"key{number}": Range(values=tuple(range(10))) for number in range(25)}
    contender = Contender("A", Overlay(), space)
    points = grid(contender, 10)
    assert grid_size(contender, 10) == len(points) == len({tuple(point.values()) for point in points}) == 10
    assert points == grid(contender, 10)
    assert {point["key0"] for point in points} != {points[0]["key0"]}


def test_points_of_ranges():
    assert Range(low=1, high=5, whole=True).points(3) == [1, 3, 5]
    assert Range(low=0.0, high=1.0).points(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert Range(values=("a", None)).points(9) == ["a", None]


@pytest.mark.parametrize(
    ("range", "points"),
    [
        (Range(low=1 / 3, high=2 / 3), [1 / 3, 0.5, 2 / 3]),  # the ends, not 0.333333 below and 0.666667 above them
        (Range(low=1234567.0, high=1234569.0), [1234567.0, 1234568.0, 1234569.0]),
        (Range(low=1000001, high=1000009, whole=True), [1000001, 1000005, 1000009]),
        (Range(low=1, high=2, whole=True), [1, 2]),
        (Range(low=1.0, high=math.nextafter(1.0, 2.0)), [1.0, math.nextafter(1.0, 2.0)]),
    ],
)
def test_points_differ_and_lie_within_the_range(range, points):
    assert range.points(3) == points


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("trials: 4", "trials: 0", "trials"),
        ("trials: 4", "trials: 4611686018427387904", "trials"),
        ("trials: 4", "trial: 4", "trial"),
        ("search: grid", "search: random", "search"),
        ("validation: 0.25", "validation: 0", "validation"),
        ("seeds: [0, 1]", "seeds: []", "seeds"),
        ("seeds: [0, 1]", "seeds: [9223372036854775808]", "seeds"),
        ("low: 0.001", "low: 1.0", "space.optimizer.init_args.lr"),
        ("low: 0.001", "low: -1.0", "space.optimizer.init_args.lr.low"),
        ("low: 0.001", "low: .nan", "space.optimizer.init_args.lr"),
        ("high: 0.1", f"high: {10**30}", "space.optimizer.init_args.lr.high"),
        ("log: true", "lag: true", "space.optimizer.init_args.lr.lag"),
        ("log: true", "log: 5", "space.optimizer.init_args.lr.log"),
        ("log: true", "log: 'no'", "space.optimizer.init_args.lr.log"),
        ("log: true", "whole: true", "space.optimizer.init_args.lr.low"),
        ("log: true", "whole: 0", "space.optimizer.init_args.lr.whole"),
        ("[0.1, 1.0]", "[]", "rows.FedProx.space.method.init_args.mu.values"),
        ("monitor: Local-T_received.last", "monitor: Local-T", "monitor"),
        ("monitor: Local-T_received.last", "monitor: eval_loss/Server-V.last", "monitor"),
        ("monitor: Local-T_received.last", "monitor: Local-T.best@Local-V", "monitor"),
        ("rows:", "row:", "row"),
        ("trials: 4", "trials: 4\nname: ../up", "name"),
        ("  FedProx:", "  ../up:", "rows.../up"),
        ("  FedProx:", "  off:", "rows"),
        ("optimizer.init_args.lr:", "seed:", "space.seed"),
        ("optimizer.init_args.lr:", "output:", "space.output"),
        ("optimizer.init_args.lr:", "data.evaluate_on:", "space.data.evaluate_on"),
        ("optimizer.init_args.lr:", "data.validation_fraction:", "space.data.validation_fraction"),
        ("optimizer.init_args.lr:", "data.partition.beta:", "space.data.partition.beta"),
        ("optimizer.init_args.lr:", "data.shift.init_args.std:", "space.data.shift.init_args.std"),
        ("method.init_args.mu:", "data:", "rows.FedProx.space.data"),
        ("  FedProx:", "  fedavg:", "rows.FedAvg"),
    ],
)
def test_mistakes_name_their_key(write, old, new, key):
    with pytest.raises(ConfigError) as caught:
        read_search(write(GOOD.replace(old, new)))
    assert caught.value.key == key


def test_a_methods_own_range_replaces_that_of_all_however_it_is_written(write):
    """Half the trials varied a key that the other spelling of it overrode."""
    text = "rows: {A: {space: {optimizer.init_args.lr: [0.2, 0.4], method: [FedProx]}}}\n"
    found = read_search(write(text + "space: {optimizer.lr: [0.1], method.class_path: [Ditto], method.mu: [1.0]}\n"))
    assert {key: own.values for key, own in found.contenders[0].space.items()} == {
        "method.mu": (1.0,),
        "optimizer.init_args.lr": (0.2, 0.4),
        "method": ("FedProx",),
    }
    with pytest.raises(ConfigError, match=r"^space\.optimizer\.lr: stands there twice, with and without init_args"):
        read_search(write("rows: {A: {}}\nspace: {optimizer.lr: [1.0], optimizer.init_args.lr: [2.0]}\n"))


@pytest.mark.parametrize("word", ["--model.hidden=[3]", "--model.init_args.hidden+=3"])
def test_what_a_search_varies_is_refused_as_an_option(write, word):
    """What was added to such a list was taken, and heeded in no run."""
    search = read_search(write("rows: {A: {}}\nspace: {model.init_args.hidden: [[4], [8]]}\n"))
    with pytest.raises(ConfigError, match=r"^--model\.hidden: is what the search varies: change its space"):
        _require_free([word], search.contenders[0])
