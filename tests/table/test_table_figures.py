import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from fl_lightning.table.figures import (
    Head,
    Value,
    _mark,
    _of_clients,
    _value,
    differ,
    left_out,
    of_fewer_seeds,
    on_validation,
    over_clients,
    paired_by,
    students,
)
from fl_lightning.table.progress import duration
from fl_lightning.table.quantity import Figure
from fl_lightning.table.writing import marks_rest_on, spread_out


def test_means_and_both_spreads_by_hand():
    value = Value(seeds={0: 60.0, 1: 64.0}, clients={0: 10.0, 1: 20.0}, spreads=[4.0, 6.0])
    assert value.mean == 62
    assert value.over_seeds == pytest.approx(math.sqrt(8))
    assert value.over_clients == 5
    assert spread_out(value) == "62.00 ± 2.83 (5.00)"
    assert spread_out(Value()) == "…"


def test_a_loss_far_below_one_is_printed_with_its_digits():
    """Two decimals made 0.03 and 0.03 of losses a fifth apart."""
    assert spread_out(Value(seeds={0: 0.0342, 1: 0.0286}, spreads=[0.00715])) == "0.0314 ± 0.0040 (0.0072)"


def test_what_rounding_leaves_of_nothing_is_printed_as_nothing():
    """The spread of clients that all score 0.1, in percent: 0.00000000000000139."""
    assert spread_out(Value(seeds={0: 100 * float(np.std([0.1] * 3))})) == "0.00"
    assert spread_out(Value(seeds={0: 0.99999})) == "1.00"


def test_three_seeds_are_compared_in_pairs():
    noise = {0: 0.0, 1: 30.0, 2: -20.0, 3: 5.0}
    lower = Value(seeds={seed: 50 + off for seed, off in noise.items()})
    higher = Value(seeds={seed: 51 + off + 0.1 * seed for seed, off in noise.items()})
    assert differ(higher, lower)  # though the spread over seeds is twenty times the difference
    shaken = Value(seeds={0: 49.0, 1: 83.0, 2: 28.0, 3: 56.0})
    assert not differ(shaken, lower)


def test_equal_runs_are_not_told_apart_and_a_constant_gap_is():
    same = Value(seeds={0: 1.0, 1: 2.0, 2: 3.0})
    assert not differ(same, Value(seeds=dict(same.seeds)))
    assert differ(Value(seeds={0: 1.5, 1: 2.5, 2: 3.5}), same)


def test_one_seed_is_compared_over_clients():
    draw = np.random.default_rng(1)
    base = draw.normal(50, 10, 40)

    def of(clients, seed=0):
        return Value(seeds={seed: float(np.mean(clients))}, clients=dict(enumerate(clients)))

    first, second = of(base + draw.normal(2, 1, 40)), of(base)
    assert differ(first, second)
    assert not differ(of(list(first.clients.values()), seed=1), second)  # of another partition
    assert not differ(of(base + draw.normal(0, 1, 40)), second)
    assert not differ(Value(seeds={0: 1.0}), Value(seeds={0: 2.0}))  # Server-T of one seed: nothing to compare with


def value_of(folder, *seeds, partition="one", holders=""):
    """Local-T.last of runs, each seed's given as {client: Local-T}."""
    runs = []
    for seed, clients in enumerate(seeds):
        run = run_of(folder / str(seed), [(1, client, own, 0) for client, own in clients.items()])
        run.seed, run.rows = seed, lambda own=clients: [{"round": 1, "Local-T": float(np.mean(list(own.values())))}]
        run.summary, run.clients = dict, partition  # as of a run that was extended: its summary is of more rounds
        run.holders = holders
        runs.append(run)
    return _value(runs, Figure("Local-T", "last"), 100.0)


def test_the_spread_over_clients_is_that_of_all_of_them(tmp_path):
    """They are no sample of others: over n, not n − 1."""
    assert value_of(tmp_path, {0: 0.5, 1: 0.75}).over_clients == pytest.approx(12.5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 0, 4, 1, 3, 2), (2, 3, 5, 4, 1, 0)])
def test_clients_of_another_seed_are_others_whatever_their_numbers(tmp_path, order):
    """They were put together by their numbers, so that how a seed's clients are numbered decided what is told apart."""
    draw = np.random.default_rng(3)
    one, other = draw.uniform(0.5, 0.9, (2, 6))
    gaps = draw.normal(0.05, 0.03, (2, 6))
    first = [dict(enumerate(one + gaps[0])), dict(zip(order, other + gaps[1], strict=True))]
    second = [dict(enumerate(one)), dict(zip(order, other, strict=True))]
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    values = value_of(tmp_path / "first", *first), value_of(tmp_path / "second", *second)
    assert paired_by(*values) == "12 clients"
    apart = 100 * gaps.ravel()
    assert over_clients(*values) == pytest.approx(stats.t.interval(0.95, 11, apart.mean(), stats.sem(apart)))


def test_a_client_of_two_seeds_is_one_pair(tmp_path):
    """Of a partition from a file it was one a seed: what sets it apart counted twice, and intervals were too narrow."""
    draw = np.random.default_rng(5)
    base, gaps = draw.uniform(0.5, 0.7, (2, 4)), draw.normal(0.05, 0.05, 4) + draw.normal(0, 0.01, (2, 4))
    values = []
    for name, own in (("first", base + gaps), ("second", base)):
        (tmp_path / name).mkdir()
        values.append(value_of(tmp_path / name, *(dict(enumerate(seed)) for seed in own), holders="those of a file"))
    assert paired_by(*values) == "4 clients"
    apart = 100 * gaps.mean(0)
    assert over_clients(*values) == pytest.approx(stats.t.interval(0.95, 3, apart.mean(), stats.sem(apart)))


def test_clients_of_another_partition_are_no_pairs(tmp_path):
    """Rows that differ in their partition were compared client by client, by their numbers."""
    clients = dict(enumerate(np.random.default_rng(4).uniform(0.5, 0.7, 8)))
    better = {client: own + 0.2 for client, own in clients.items()}
    values = []
    for name, own, partition in (("a", better, "one"), ("b", clients, "one"), ("c", clients, "another")):
        (tmp_path / name).mkdir()
        values.append(value_of(tmp_path / name, own, partition=partition))
    assert differ(values[0], values[1])
    assert not differ(values[0], values[2])
    assert paired_by(values[0], values[2]) == ""
    assert np.isnan(over_clients(values[0], values[2])).all()


def test_nobody_is_ahead_by_a_mean_that_its_pairs_deny():
    first = Value(seeds={0: 80.0, 1: 81.0, 2: 82.0})
    second = Value(seeds={0: 82.0, 1: 83.1, 2: 84.0, 3: 20.0, 4: 21.0})  # better wherever both ran
    assert first.mean > second.mean
    assert not differ(first, second)
    assert differ(first, Value(seeds={0: 78.0, 1: 79.1, 2: 80.0}))


def test_nobody_is_the_best_who_is_behind_another_row_on_the_seeds_of_both():
    """Means of different seeds decided: the row lacked the hard ones."""
    without = Value(seeds={0: 90.0, 1: 90.5, 2: 91.0})
    worse = Value(seeds={0: 80.0, 1: 80.6, 2: 81.0})
    ahead = Value(seeds={0: 92.0, 1: 92.6, 2: 93.0, 3: 60.0, 4: 60.0})
    _mark({"without": without, "worse": worse, "ahead": ahead})
    assert ahead.mean < worse.mean < without.mean
    assert [value.mark for value in (ahead, without, worse)] == ["", "", ""]
    ahead.seeds |= {3: 90.0, 4: 90.5}
    _mark({"without": without, "worse": worse, "ahead": ahead})
    assert [value.mark for value in (ahead, without, worse)] == ["best", "second", ""]


def test_clients_count_in_the_test_as_they_do_in_the_mean():
    gaps = [-1.0] * 39 + [60.0]
    clients, weights = dict(enumerate(gaps)), dict(enumerate([1000.0] * 39 + [1.0]))
    flat = dict.fromkeys(clients, 0.0)
    low, high = over_clients(Value({0: -1.0}, clients, weights), Value({0: 0.0}, flat, weights))
    assert -1.01 < low < high < -0.99
    low, high = over_clients(Value({0: 0.5}, clients), Value({0: 0.0}, flat))
    assert low < 0 < high


def test_what_is_marked_says_how_many_pairs_that_rests_on():
    def of(mean, seeds, clients=0):
        own = {client: mean + 0.01 * (client % 3) * mean for client in range(clients)}
        return Value(seeds={seed: mean + 0.1 * seed * (mean > 60) for seed in seeds}, clients=own)

    table = {f"{name} {column}": value for column, both in {
        "three": (of(70, (0, 1, 2)), of(60, (0, 1, 2, 3))),
        "two": (of(70, (0, 1), 8), of(60, (0, 1), 8)),
        "few": (of(70, (0, 1), 2), of(60, (0, 1), 2)),  # of two pairs nothing is said
    }.items() for name, value in zip(("first", "second"), both, strict=True)}  # fmt: skip
    for column in ("three", "two", "few"):
        _mark({row: value for row, value in table.items() if row.endswith(column)})
    assert {row: (own.mark, own.rests_on) for row, own in table.items() if own.mark} == {
        "first three": ("best", "3 seeds"), "first two": ("best", "8 clients"),
    }  # fmt: skip
    said = marks_rest_on({(row, None): own for row, own in table.items()})
    assert said.startswith(" The tests rest on 8 clients or 3 seeds. Of three or four pairs, which is few,")
    assert marks_rest_on({}) == ""


def run_of(folder, clients, config=None):
    """A cell's run of one column, Local-T, from the rows of `clients.csv`: (round, client, Local-T, attacker)."""
    folder.mkdir()
    lines = [",".join(map(str, (*row, 10))) for row in clients]
    (folder / "clients.csv").write_text("\n".join(["round,client,Local-T,attacker,num_test", *lines, ""]))
    return SimpleNamespace(folder=folder, summary=dict, clients="", holders="", config=config or {})


def test_attackers_and_newcomers_are_in_no_spread_and_no_test(tmp_path):
    config = {"data": {"num_clients": 4}, "federation": {"newcomers": {"clients": 1, "after": 1}}}
    run = run_of(tmp_path / "run", [(2, 0, 0.5, 0), (2, 1, 0.75, 0), (2, 2, 0.1, 1), (2, 3, 0.2, 0)], config)
    rows = [{"round": 2, "Local-T": 0.625, "Local-T_newcomers": 0.2}]
    assert _of_clients(run, Figure("Local-T", "last"), rows) == {0: (0.5, 0.5), 1: (0.75, 0.5)}


def test_clients_count_as_often_as_they_were_tested(tmp_path):
    """Round 1 is the mean of clients 0 and 1 (0.5), round 2 client 0's (0.8): 0.65 in all, of which 1 has a quarter."""
    run = run_of(tmp_path / "run", [(1, 0, 0.6, 0), (1, 1, 0.4, 0), (2, 0, 0.8, 0)])
    rows = [{"round": 1, "Local-T": 0.5}, {"round": 2, "Local-T": 0.8}]
    found = _of_clients(run, Figure("Local-T", "mean_last_10"), rows)
    assert {client: share for client, (_, share) in found.items()} == {0: 0.75, 1: 0.25}
    assert sum(own * share for own, share in found.values()) == pytest.approx(0.65)


def test_the_last_ten_rounds_of_a_client_are_ten(tmp_path):
    run = run_of(tmp_path / "run", [(round, 0, round / 20, 0) for round in range(1, 13)])
    rows = [{"round": round, "Local-T": round / 20} for round in range(1, 13)]
    found = _of_clients(run, Figure("Local-T", "mean_last_10"), rows)
    assert found[0][0] == pytest.approx(7.5 / 20)


@pytest.mark.parametrize("column", ["Global-T", "Global-T_received", "Global-T_weighted", "eval_loss/Global-T"])
def test_clients_that_are_tested_on_the_same_samples_are_no_pairs(tmp_path, column):
    """One test of 450 samples stands there six times: a gap of one sample would be told apart."""
    values = {}
    for name, gap in (("a", 0.0), ("b", 0.0022)):
        for figure in (Figure(column, "last"), Figure("Local-T", "last")):
            scores = [0.5 + gap + 0.01 * client for client in range(6)]
            run = run_of(tmp_path / f"{name}{len(values)}", [(1, c, own, 0) for c, own in enumerate(scores)])
            own = run.folder / "clients.csv"
            own.write_text(own.read_text().replace("Local-T", figure.of_clients))
            run.seed, run.rows = 0, lambda figure=figure, own=scores: [{"round": 1, figure.column: np.mean(own)}]
            values[name, figure.column] = _value([run], figure, 100.0)
    assert differ(values["b", "Local-T"], values["a", "Local-T"])
    assert not differ(values["b", column], values["a", column])
    assert paired_by(values["b", column], values["a", column]) == ""
    assert values["a", column].over_clients == pytest.approx(values["a", "Local-T"].over_clients)  # it is printed


def test_a_difference_in_rounding_tells_nobody_apart():
    assert not differ(Value(dict.fromkeys(range(3), 60.0 + 1.4e-14)), Value(dict.fromkeys(range(3), 60.0)))
    assert differ(Value(dict.fromkeys(range(3), 60.0 + 1e-4)), Value(dict.fromkeys(range(3), 60.0)))


def test_an_interval_is_around_the_gap_of_what_is_printed():
    """Clients were tested so seldom that their plain mean says the opposite of the printed one."""
    draw = np.random.default_rng(2)
    weights = dict(enumerate([10.0] * 20 + [1.0] * 20))
    clients = dict(enumerate([*draw.normal(1, 0.1, 20), *draw.normal(-3, 0.1, 20)]))
    flat = dict.fromkeys(clients, 0.0)
    printed = sum(clients[c] * weights[c] for c in clients) / sum(weights.values())
    low, high = over_clients(Value({0: printed}, clients, weights), Value({0: 0.0}, flat, weights))
    assert low < printed < high
    fewer = {client: 5.0 for client in range(15)}  # the other row's clients are not all tested
    low, high = over_clients(Value({0: printed}, clients, weights), Value({0: 5.0}, fewer))
    assert low < printed - 5 < high


def test_the_interval_over_clients_is_students_where_all_count_the_same():
    gaps = np.random.default_rng(0).normal(1, 2, 9)

    def students_of(gaps, weights):
        return students(np.array([gaps, weights]), np.array([np.zeros(len(gaps)), weights]))

    found = students_of(gaps, np.full(9, 7.0))
    assert found == pytest.approx(stats.t.interval(0.95, 8, gaps.mean(), stats.sem(gaps)))
    few = students_of(gaps[:4], np.array([1.0, 1.0, 1.0, 0.0]))
    assert few == pytest.approx(students_of(gaps[:3], np.ones(3)))  # who counts for nothing is not there
    assert np.isnan(students_of(gaps[:3], np.array([1.0, 1.0, 0.0]))).all()
    assert np.isnan(students_of(gaps[:3], np.zeros(3))).all()


def test_the_interval_is_the_same_whichever_row_is_the_first():
    draw = np.random.default_rng(5)
    one, other = draw.normal(size=(2, 2, 6))
    one[1], other[1] = (9, 1, 1, 1, 1, 1), 1  # the clients of one count alike, those of the other do not
    low, high = students(one, other)
    assert students(other, one) == pytest.approx((-high, -low))


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0], ids=lambda sigma: f"sizes of lognormal {sigma}")
@pytest.mark.parametrize("clients", [3, 4, 6, 10, 20])
def test_rows_that_are_alike_are_told_apart_as_seldom_as_said(clients, sigma):
    """Two methods of the same accuracy at clients that differ, of one seed: at most 7 % at the level of 5 %.

    The percentiles of a bootstrap told 26 % apart with 3 clients, 21 % with 4, 14 % with 6, 8.5 % with 10.
    """
    draw, told = np.random.default_rng(clients), 0
    for _ in range(1000):
        base, weights = draw.normal(70, 10, clients), dict(enumerate(draw.lognormal(3, sigma, clients)))
        rows = [base + draw.normal(0, 2, clients) for _ in range(2)]
        means = [float(np.average(row, weights=list(weights.values()))) for row in rows]
        first, second = (
            Value(seeds={0: mean}, clients=dict(enumerate(row)), weights=weights)
            for mean, row in zip(means, rows, strict=True)
        )
        told += differ(first, second)
    assert told <= 70


def test_clients_that_differ_are_still_told_apart():
    """Power: 20 clients and a gap of a spread are found nearly always."""
    draw, told = np.random.default_rng(0), 0
    for _ in range(200):
        base = draw.normal(70, 10, 20)
        rows = [base + draw.normal(gap, 2, 20) for gap in (3.0, 0.0)]
        told += differ(*(Value(seeds={0: float(row.mean())}, clients=dict(enumerate(row))) for row in rows))
    assert told >= 190


def test_of_spreads_and_times_the_least_is_the_best():
    values = [Value(seeds={0: m, 1: m + 1, 2: m + 3}, less_is_better=True) for m in (9.0, 3.0, 6.0)]
    _mark(dict(zip("abc", values, strict=True)))
    assert [value.mark for value in values] == ["", "best", "second"]


def test_of_two_rows_that_are_equal_none_is_the_second_best():
    """The file's order said which."""
    values = [Value(seeds={0: m, 1: m + 1, 2: m + 3}) for m in (9.0, 9.0, 3.0)]
    _mark(dict(zip("abc", values, strict=True)))
    assert [value.mark for value in values] == ["", "", ""]


def test_no_row_is_the_best_of_accuracies_and_losses():
    values = [Value(seeds={0: m, 1: m + 1, 2: m + 3}, less_is_better=m > 50) for m in (9.0, 3.0, 60.0)]
    _mark(dict(zip("abc", values, strict=True)))
    assert [value.mark for value in values] == ["", "", ""]


def test_durations():
    assert [duration(s) for s in (None, 5, 150, 7500)] == ["an unknown time", "5 s", "2 min", "2 h 5 min"]


def test_validation_figures_weigh_clients_by_their_validation_samples(tmp_path):
    (tmp_path / "clients.csv").write_text(
        "round,client,num_test,Local-V,Local-V/tuned\n1,0,9,0.5,0.5\n1,1,7,0.75,0.75\n"
    )
    (tmp_path / "partition.json").write_text('{"clients": [{"validation": [1, 2, 3]}, {"validation": [4]}]}')
    run = SimpleNamespace(folder=tmp_path, summary=dict, config={})
    *weighted, plain = (Figure(f"Local-V{end}", "last") for end in ("_weighted", "/tuned_weighted", ""))
    rows = [{"round": 1, "Local-V_weighted": 0.5625, "Local-V/tuned_weighted": 0.5625, "Local-V": 0.625}]
    for figure in weighted:
        assert _of_clients(run, figure, rows) == {0: (0.5, 0.75), 1: (0.75, 0.25)}
    assert _of_clients(run, plain, rows) == {0: (0.5, 0.5), 1: (0.75, 0.5)}


def test_cells_of_fewer_seeds_than_the_table_are_named():
    """Their means stood beside the others' without a word."""
    few, whole = Value(seeds={0: 1.0, 2: 2.0}), Value(seeds={0: 1.0, 1: 2.0, 2: 3.0})
    values = {("Few", Head("A", "one")): few, ("Few", Head("A", "other")): few, ("Whole", Head("A", "one")): whole}
    values |= {("Odd", Head("A", "one")): whole, ("Odd", Head("A", "other")): Value(seeds={1: 1.0})}
    values |= {("New", Head("A", "one")): Value()}
    assert of_fewer_seeds(values, {0, 1, 2}) == [
        "Few, A: the mean of seeds 0, 2, without 1",
        "Odd, A other: the mean of seed 1, without 0, 2",
    ]
    one = {("A", Head("A", "")): Value(seeds={1: 1.0}), ("B", Head("A", "")): Value(seeds={1: 2.0})}
    assert of_fewer_seeds(one, {0, 1}) == ["every figure is the mean of seed 1, without 0"]


def test_runs_whose_clients_fell_sick_are_named():
    """Their figures stood beside the others' without a word."""

    def run(title, *skipped):
        rows = [{"round": place + 1, **({} if own is None else {"skipped": own})} for place, own in enumerate(skipped)]
        return SimpleNamespace(title=title, rows=lambda: rows)

    runs = [run("A, one, seed 0", None, None), run("B, one, seed 0", 0, 2, 1), run("C, one, seed 0", 0, 0)]
    assert left_out(runs) == ["B, one, seed 0: in 2 of 3 rounds clients that fell sick were left out, 3 in all"]


def test_runs_on_validation_parts_are_named():
    """Their figures, which have the names of those on test parts, stood in a table without a word."""

    def run(row, part):
        config = {"data": {"evaluate_on": part}}
        return SimpleNamespace(row=SimpleNamespace(name=row), column=SimpleNamespace(name="one"), config=config)

    tested, tried = run("A", "test"), run("B", "validation")
    assert on_validation([tested]) == on_validation([]) == ""
    assert on_validation([tried, tried]).startswith("All figures are on validation parts")
    assert on_validation([tested, tried, tried]).startswith("The figures of B, one are on validation parts")
