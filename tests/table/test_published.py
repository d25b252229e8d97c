"""The published tables: every file parses, every cell's configuration resolves, every published figure has its cell."""

from dataclasses import replace
from pathlib import Path

import pytest

from fl_lightning.table.cells import Choice, cells_of
from fl_lightning.table.definition import read_definition

ROOT = Path(__file__).parents[2]
TABLES = {
    # cells of one seed, seeds, published figures
    "fedcpd/tables/table1.yaml": (60, 1, 120),
    "fedcpd/tables/table2.yaml": (40, 1, 40),
    "fedcpd/tables/table3.yaml": (6, 1, 6),
    "fedcpd/tables/figure2.yaml": (10, 1, 0),
    "fedcpd/tables/methods.yaml": (36, 1, 0),
    "drdfl/tables/table1.yaml": (70, 1, 117),
    "drdfl/tables/table2.yaml": (70, 1, 117),
    "drdfl/tables/table3.yaml": (6, 1, 12),
    "drdfl/tables/small.yaml": (6, 1, 10),
    "feddw/tables/table1.yaml": (96, 5, 94),
    "feddw/tables/table2.yaml": (96, 5, 95),
    "feddw/tables/table3.yaml": (7, 1, 7),
    "feddw/tables/table4.yaml": (10, 5, 10),
    "feddw/tables/mu.yaml": (20, 5, 0),
    "fedproto/tables/mnist.yaml": (54, 1, 56),
    "fedproto/tables/mnist_tuned.yaml": (15, 3, 24),
    "fedproto/tables/femnist.yaml": (54, 1, 56),
    "fedproto/tables/cifar10.yaml": (54, 1, 56),
    "fedproto/tables/shots.yaml": (21, 1, 0),
    "fedproto/tables/lambda.yaml": (6, 1, 0),
    "pfllib/tables/leaderboard.yaml": (80, 3, 80),
    "pfllib/tables/heterogeneity.yaml": (80, 3, 80),
    "niid_bench/tables/flower.yaml": (24, 3, 20),
    "niid_bench/tables/fedprox_mu.yaml": (20, 1, 8),
    "niid_bench/tables/splits.yaml": (35, 1, 35),
    "leaderboard/tables/digits.yaml": (112, 5, 0),
    "leaderboard/tables/fashionmnist.yaml": (56, 5, 0),
    "tables/quickstart.yaml": (4, 3, 0),
}
OURS = {
    "fedcpd/tables/methods.yaml",
    "leaderboard/tables/digits.yaml",
    "leaderboard/tables/fashionmnist.yaml",
    "tables/quickstart.yaml",
}


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def definition(file):
    return read_definition(Path("experiments") / file)


def places(table):
    """(row, column) of the cells."""
    return [
        (row, column) for row in table.rows for column in table.columns if row.columns.get(column.name, ()) is not None
    ]


def test_every_table_is_listed_here():
    found = {path.relative_to("experiments").as_posix() for path in Path("experiments").rglob("tables/*.yaml")}
    assert found == set(TABLES)
    assert len({definition(file).name for file in TABLES}) == len(TABLES)  # or they would share a folder


@pytest.mark.parametrize("file", TABLES)
def test_cells_and_published_figures(file):
    table = definition(file)
    known = [(row, column) for row, column in places(table)]
    cells, seeds, published = TABLES[file]
    assert (len(known), len(table.seeds)) == (cells, seeds)
    printed = {(row, column, name) for row, of in table.published.items() for column, own in of.items() for name in own}
    assert len(printed) == published
    there = {
        (row.name, column.name, name)
        for row, column in known
        for name in column.figures
        if table.figure(row, column, name) is not None
    }
    assert printed <= there
    assert bool(table.source) == (file not in OURS)


def test_every_row_and_every_column_resolves():
    """Not each with each, which would be 700 configurations: each overlay once over each base, and what differs."""
    seen = set()
    for file in TABLES:
        table = definition(file)
        for i in range(max(len(table.rows), len(table.columns))):
            pairs = [(table.rows[i % len(table.rows)], table.columns[i % len(table.columns)])]
            pairs += [(row, column) for row, column in places(table) if column.name in row.columns]
            for row, column in pairs:
                parts = {(str(table.base), str(part)) for part in (row.overlay, column.overlay)}
                parts |= {(str(column.overlay), str(row.columns[column.name]))} if column.name in row.columns else set()
                if parts <= seen:
                    continue
                seen |= parts
                for cell in cells_of(replace(table, rows=(row,), columns=(column,)), Choice(seeds=(0,))):
                    assert cell.config["method"]["class_path"]
                    assert cell.rounds >= 1
    assert len(seen) > 100


def test_no_two_rows_of_a_column_are_one_run():
    """A row must differ from the others in more than its name."""
    for file in ("fedcpd/tables/table3.yaml", "feddw/tables/table4.yaml"):
        names = [cell.name for cell in cells_of(definition(file), Choice(seeds=(0,)))]
        assert len(set(names)) == len(names)


def test_runs_are_shared_between_tables():
    def run(file, row, column):
        (cell,) = cells_of(definition(file), Choice(rows=(row,), columns=(column,), seeds=(0,)))
        return cell.folder

    one = run("fedcpd/tables/table1.yaml", "FedCPD", "CIFAR-100 Dir(0.1)")
    assert one == run("fedcpd/tables/table3.yaml", "L_fd + L_align + L_pcl", "CIFAR-100 Dir(0.1)")
    assert run("feddw/tables/table1.yaml", "MOON", "CIFAR-10") == run("feddw/tables/table2.yaml", "MOON", "Baseline1")
    assert run("drdfl/tables/table1.yaml", "FedBN", "Comm. (M)") == run(
        "drdfl/tables/table1.yaml", "FedBN", "CIFAR-10 Dir(0.1)"
    )
    assert run("fedproto/tables/mnist.yaml", "FedProto", "n=3 std 1") == run(
        "fedproto/tables/mnist.yaml", "FedProto classifier", "n=3 std 1"
    )


def test_figure_of_a_loss_term_is_of_rows_that_evaluate_it():
    """A term of weight 0 has no value: the low end of the figure against lambda would be a dash."""
    cells = cells_of(definition("fedproto/tables/lambda.yaml"), Choice(seeds=(1234,)))
    assert len(cells) == 6
    assert all(cell.config["method"]["init_args"]["weight"] > 0 for cell in cells)
