import io
import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from fl_lightning.errors import ConfigError
from fl_lightning.report.class_figures import class_projection, class_relation_map, principal_plane
from fl_lightning.report.figures import draw_learning_curves, learning_curves
from fl_lightning.report.partition_figures import label_skew, partition_bubbles, partition_table

BLUE, SKY, ORANGE, GREEN = (0, 114, 178), (86, 180, 233), (213, 94, 0), (0, 158, 115)


def make_rows(rounds, every=1, globally=True, terms=("cross_entropy",)):
    rows = []
    for round in range(1, rounds + 1):
        there = round % every == 0 or round == rounds
        row = {"round": round, "Local-T": 0.9, "Local-T_std": 0.2, "Local-T_received": 0.8}
        row |= {"Global-T": 0.3, "Server-T": 0.5} if globally else {"Global-T": None}
        row = {name: value if there or name == "round" else None for name, value in row.items()}
        rows.append(row | {"loss": 1 / round} | {f"loss/{term}": 0.5 / round for term in terms})
    return rows


def pixels(path):
    """[H, W, 3] of a PNG, which must be readable."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return (255 * matplotlib.image.imread(path)[..., :3]).round().astype(int)


def has(image, color):
    return bool((np.abs(image - np.array(color)).max(-1) <= 2).any())


def text_of(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


# --- learning curves ------------------------------------------------------------------------------------------------


def test_learning_curves_draw_every_accuracy(tmp_path):
    path = learning_curves(make_rows(20), tmp_path / "curves.png", "a run")
    image = pixels(path)
    assert image.shape == (450, 1200, 3)
    assert all(has(image[:, :600], color) for color in (BLUE, SKY, ORANGE, GREEN))


def test_learning_curves_leave_out_what_a_run_does_not_have(tmp_path):
    image = pixels(learning_curves(make_rows(20, globally=False), tmp_path / "curves.png", "a run"))
    assert has(image, BLUE)
    assert not has(image, ORANGE)
    assert not has(image, GREEN)


def test_learning_curves_join_the_evaluated_rounds(tmp_path):
    """Two evaluated rounds, of 40: the line between them crosses the middle of the left half."""
    image = pixels(learning_curves(make_rows(40, every=20), tmp_path / "curves.png", "a run"))
    columns = np.flatnonzero((np.abs(image[110:, :600] - np.array(BLUE)).max(-1) <= 2).any(0))
    assert (np.diff(columns) == 1).all()
    assert columns[-1] - columns[0] > 150


@pytest.mark.parametrize(("rounds", "long"), [(200, False), (1000, True)])
def test_learning_curves_of_many_rounds_show_where_they_go(rounds, long):
    """Values that jump each round are a solid band."""
    rows = [row | {"Global-T": 0.3 + 0.2 * (row["round"] % 2)} for row in make_rows(rounds)]
    axes, losses = draw_learning_curves(rows, "a run").axes
    drawn = [line for line in axes.lines if line.get_color() == "#D55E00"]
    ends = [np.ptp(line.get_ydata()) for line in drawn]
    assert ends == pytest.approx([20 / 11, 20] if long else [20])
    assert drawn[0].get_label() == f"Global-T {100 * rows[-1]['Global-T']:.1f} %"
    labels = {own.get_xlabel() for own in (axes, losses)}
    assert labels == {"round (running means over 2 % of the rounds, each value faintly)" if long else "round"}


def test_means_of_a_constant_curve_are_its_value():
    """They differed by rounding, and the axis showed that alone."""
    rows = [{"round": round, "Local-T": 1 / 3} for round in range(1, 3001)]
    low, high = draw_learning_curves(rows, "a run").axes[0].get_ylim()
    assert high - low > 1


@pytest.mark.parametrize("terms", [(), ("cross_entropy",), ("cross_entropy", "prototype", "contrast")])
def test_learning_curves_draw_the_terms_only_if_there_are_several(tmp_path, terms):
    image = pixels(learning_curves(make_rows(20, terms=terms), tmp_path / "curves.png", "a run"))
    assert has(image[:, 600:], (230, 159, 0)) is (len(terms) > 1)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 1}],
        make_rows(1),
        [{"round": 1, "Local-T": 1.0, "Local-T_std": 0.0, "loss": float("nan")}],
        [{"round": 1, "Local-T": None, "loss": 1e6}, {"round": 2, "Local-T": 0.5, "loss": 1e-3}],
        [{"round": "1", "Local-T": "0.5", "Global-T": "", "loss": "0.1"}, {"round": "2", "Local-T": "", "loss": "0"}],
    ],
    ids=["no rows", "no values", "one round", "NaN loss", "wide range", "text"],
)
def test_learning_curves_work_on_whatever_a_run_left(tmp_path, rows):
    assert pixels(learning_curves(rows, tmp_path / "curves.png", "$ [odd] title_^ %")).shape == (450, 1200, 3)


def test_pictures_replace_the_old_one_and_leave_nothing_else(tmp_path):
    path = tmp_path / "figures" / "curves.png"
    learning_curves(make_rows(2), path, "first")
    first = path.read_bytes()
    learning_curves(make_rows(3), path, "second")
    assert path.read_bytes() != first
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_pictures_are_whole_or_not_there(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        learning_curves(make_rows(2), tmp_path / "curves.png", "a run")
    assert list(tmp_path.iterdir()) == []


def test_same_rows_give_the_same_bytes(tmp_path):
    one = learning_curves(make_rows(3), tmp_path / "one.png", "a run").read_bytes()
    assert learning_curves(make_rows(3), tmp_path / "two.png", "a run").read_bytes() == one


def test_pictures_do_not_depend_on_a_matplotlibrc(tmp_path):
    """One that asks for LaTeX, which was not there, ended the run that had them drawn."""

    def draw(folder):
        learning_curves(make_rows(3), folder / "curves.png", "a_run")
        partition_bubbles(np.eye(2, dtype=int), folder / "bubbles.png", ["a", "b"], "who holds what")
        class_relation_map(np.eye(2), folder / "map.png", ["a", "b"], "soft labels")
        class_projection(np.eye(2), folder / "points.png", ["a", "b"], "prototypes")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    plain, shown = draw(tmp_path / "plain"), draw_learning_curves(make_rows(3), "a_run")._repr_png_()
    with matplotlib.rc_context(
        {"text.usetex": True, "font.size": 20, "image.origin": "lower", "savefig.bbox": "tight"}
    ):
        assert draw(tmp_path / "other") == plain
        assert draw_learning_curves(make_rows(3), "a_run")._repr_png_() == shown


def test_what_matplotlib_cannot_draw_is_one_line(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no font")

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_figure", fail)
    with pytest.raises(ConfigError, match=r"curves\.png: matplotlib cannot draw it: RuntimeError: no font"):
        learning_curves(make_rows(2), tmp_path / "curves.png", "a run")
    assert list(tmp_path.iterdir()) == []


def test_long_title_stays_within_the_picture(tmp_path):
    """The name of a run, of up to 200 letters, was cut off on both sides."""
    figure = draw_learning_curves(make_rows(2), "fedavg_digits_" * 14)
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= title.x0
    assert title.x1 <= figure.bbox.x1


# --- partitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (2, 2), (2, 100), (20, 10), (100, 2), (100, 100)])
def test_bubbles_adapt_to_clients_and_classes(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 500, (clients, classes))
    path = partition_bubbles(counts, tmp_path / "bubbles.png", [str(c) for c in range(classes)], "who holds what")
    height, width, _ = pixels(path).shape
    assert 250 <= height <= 1050
    assert 400 <= width <= 1350


def blue_pixels(image):
    """Pixels of bubbles, left of the key: they are far more blue than red."""
    return image[:, :-130, 2] - image[:, :-130, 0] > 100


def test_bubble_area_is_proportional_to_the_samples(tmp_path):
    counts = np.array([[400, 0], [0, 100]])
    image = blue_pixels(pixels(partition_bubbles(counts, tmp_path / "bubbles.png", ["a", "b"], "")))
    half = image.shape[1] // 2
    assert image[:, :half].sum() / image[:, half:].sum() == pytest.approx(4, rel=0.1)


def test_bubble_of_a_client_without_samples_is_not_drawn(tmp_path):
    image = pixels(partition_bubbles(np.zeros((3, 4), dtype=int), tmp_path / "bubbles.png", list("abcd"), "nobody"))
    assert blue_pixels(image).sum() == 0


def test_bubbles_with_long_or_odd_class_names(tmp_path):
    names = ["a_very_long_class_name_indeed", "$x_1$ [b]"]
    pixels(partition_bubbles(np.eye(2, dtype=int), tmp_path / "long.png", names, "a long title " * 12))
    pixels(partition_bubbles(np.eye(2, dtype=int), tmp_path / "odd.png", ["$x_1$ [b]", "$"], "$ odd"))


@pytest.mark.parametrize("counts", [np.ones((2, 3)), np.ones(3), np.ones((0, 2))])
def test_partition_pictures_reject_counts_of_another_shape(tmp_path, counts):
    with pytest.raises(ValueError, match="class_counts"):
        partition_bubbles(counts, tmp_path / "bubbles.png", ["a", "b"], "")
    with pytest.raises(ValueError, match="class_counts"):
        partition_table(counts, [1, 1], ["a", "b"])


@pytest.mark.parametrize(
    ("counts", "skew"),
    [
        ([[3, 6], [10, 20]], 0.0),  # the same mix in other sizes
        ([[5, 0], [0, 5]], 0.5),  # each alone with half of all
        ([[8, 0], [0, 2]], 0.32),  # 0.8 · 0.2 + 0.2 · 0.8
        ([[0, 0], [4, 4]], 0.0),
        ([[0, 0], [0, 0]], 0.0),
    ],
)
def test_label_skew_is_the_mean_distance_to_the_mix_of_all(counts, skew):
    assert label_skew(counts) == pytest.approx(skew, abs=1e-12)
    assert label_skew(np.array(counts)) == pytest.approx(skew, abs=1e-12)


def test_partition_table_counts_every_class_where_they_are_few():
    lines = text_of(partition_table(np.array([[5, 0, 1], [0, 0, 7]]), [2, 3], ["cat", "[dog]", "emu"])).splitlines()
    rows = [line.split() for line in lines if line.strip() and "─" not in line]
    assert rows == [
        ["client", "train", "test", "classes", "cat", "[dog]", "emu"],
        ["0", "6", "2", "2", "5", "·", "1"],
        ["1", "7", "3", "1", "·", "·", "7"],
        ["total", "13", "5", "2", "5", "·", "8"],
    ]
    assert " validation " in text_of(partition_table(np.eye(2, dtype=int), [2, 3], ["cat", "dog"], "validation"))


def test_partition_table_names_the_five_largest_of_many_classes():
    counts = np.arange(13)[None]
    text = text_of(partition_table(counts, [4], [f"c{label}" for label in range(13)]))
    assert "c12: 12, c11: 11, c10: 10, c9: 9, c8: 8" in text
    assert "c7" not in text


def test_partition_table_of_ten_named_classes_fits_into_100_columns():
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    text = text_of(partition_table(np.full((20, 10), 3000), [1500] * 20, names))
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in names)
    assert "600000" in text


def test_partition_table_has_a_row_for_each_of_many_clients():
    table = partition_table(np.ones((100, 100), dtype=int), [1] * 100, [str(c) for c in range(100)])
    assert table.row_count == 101


# --- what is shared of the classes ----------------------------------------------------------------------------------


def test_relation_of_classes_is_drawn_with_its_absent_rows(tmp_path):
    matrix = np.eye(3)
    matrix[1] = np.nan
    image = pixels(class_relation_map(matrix, tmp_path / "map.png", ["a", "b", "$x_1$"], "soft labels, $ round 1"))
    assert has(image, (187, 187, 187))
    assert has(image, (253, 231, 37))  # viridis at 1
    assert has(image, (68, 1, 84))  # and at 0


@pytest.mark.parametrize("classes", [1, 2, 100])
def test_relation_of_any_number_of_classes(tmp_path, classes):
    pixels(class_relation_map(np.full((classes, classes), -2.0), tmp_path / "map.png", ["n" * 20] * classes, ""))
    pixels(class_relation_map(np.full((classes, classes), np.nan), tmp_path / "nan.png", ["n"] * classes, ""))


def test_plane_keeps_the_distances_of_points_that_lie_in_one():
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(6, 2)) @ np.linalg.qr(rng.normal(size=(9, 9)))[0][:2] + 5
    points, shares = principal_plane(flat)
    distances = [np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (flat, points)]
    np.testing.assert_allclose(distances[0], distances[1], atol=1e-12)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] >= shares[1]


def test_plane_is_that_of_scikit_learn():
    from sklearn.decomposition import PCA

    rows = np.random.default_rng(1).normal(size=(8, 20))
    points, shares = principal_plane(rows)
    reference = PCA(2).fit(rows)
    np.testing.assert_allclose(np.abs(points), np.abs(reference.transform(rows)), atol=1e-9)
    np.testing.assert_allclose(shares, reference.explained_variance_ratio_)


@pytest.mark.parametrize("there", [0, 1, 2, 5])
def test_projection_draws_the_classes_that_somebody_holds(tmp_path, there):
    rows = np.random.default_rng(0).normal(size=(5, 3))
    rows[there:] = np.nan
    image = pixels(class_projection(rows, tmp_path / "points.png", list("abcde"), "prototypes"))
    assert has(image, (230, 159, 0)) is (there > 0)
    assert has(image, ORANGE) is (there == 5)


def test_a_picture_is_the_same_file_every_time(tmp_path):
    rows = [{"round": round, "Local-T": 0.1 * round, "loss": 1.0 / round} for round in (1, 2, 3)]
    first, second = (learning_curves(rows, tmp_path / f"{name}.svg", "twice").read_bytes() for name in "ab")
    assert first == second


def test_a_backend_that_matplotlib_does_not_know_is_not_asked():
    """It ended `Run.plot` in a process of one's own, which draws into files."""
    code = "from fl_lightning.report.drawing import as_shipped\nwith as_shipped(): pass\nimport os\n"
    code += "print(os.environ['MPLBACKEND'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "MPLBACKEND": "nonsense"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "nonsense\n"), done.stderr
