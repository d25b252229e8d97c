import builtins
import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from fl_lightning.report import live
from fl_lightning.report.console import accuracy_columns, print_summary, summary_table
from fl_lightning.report.live import RoundProgress
from fl_lightning.report.plain import PlainConsole
from fl_lightning.table.progress import Progress

ROW = {
    "round": 12,
    "Local-T": 0.931,
    "Local-T_received": 0.91,
    "Global-T": 0.246,
    "Server-T": 0.569,
    "loss": 0.1234,
    "seconds": 0.52,
}


def make_summary(**changes):
    summary = {
        "method": "FedProto",
        "name": "quick[start]",
        "folder": "runs/" + "long-folder-name-" * 8 + "end",
        "rounds": 30,
        "clients": 20,
        "seconds": 16.3,
        "last": {
            "Local-T": 0.948,
            "Local-T_std": 0.051,
            "Local-T_min": 0.8,
            "Local-T_worst10": 0.82,
            "Local-T_received/prototype": 0.91,
            "Local-T_received/prototype_std": 0.123,
            "Local-T_received": 1.0,
            "Local-T_received_std": 0.1,
            "Global-T": None,
            "Server-T": 0.569,
        },
        "best": {"Local-T": {"value": 0.952, "round": 1000}, "Server-T": {"value": 0.57, "round": 29}},
        "mean_last_10": {"Local-T": 0.947, "Local-T_std": 0.052, "Server-T": 0.561},
        "final_received": {"Local-T_received": 0.92, "Local-T_received_std": 0.11},
        "communication": {
            "uplink_params": 12_345_600,
            "downlink_params": 6_000_000,
            "uplink_bytes": 49_382_400,
            "downlink_bytes": 24_000_000,
            "uplink_params_Mi_per_round": 0.3925,
            "downlink_params_Mi_per_round": 0.1907,
        },
        "participants_per_round": 10.0,
        "clients_without_test": [],
    }
    return summary | changes


def printed(summary, **options):
    file = io.StringIO()
    print_summary(summary, Console(file=file, **options))
    return file.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: now.seconds)
    return now


def plain(**options):
    file = io.StringIO()
    return RoundProgress(Console(file=file), **options), file


def terminal(width=100):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, width=width, _environ={})
    return RoundProgress(console), file


def loop_of(round, rounds, **more):
    """What of a loop the progress reads."""
    return SimpleNamespace(round=round, settings=SimpleNamespace(rounds=rounds), **more)


def run_round(progress, loop, row, clients=2):
    progress.on_round_start(loop, row["round"], list(range(clients)))
    for _ in range(clients):
        progress.on_client_fit_end(loop, SimpleNamespace())
    loop.round = row["round"]
    progress.on_round_end(loop, row)


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# --- plain lines ----------------------------------------------------------------------------------------------------


def test_plain_line_says_all_that_the_row_has(clock):
    progress, file = plain()
    loop = loop_of(11, 30)
    progress.on_run_start(loop)
    clock.seconds += 0.5
    run_round(progress, loop, ROW)
    assert file.getvalue() == (
        "round  12/30  Local-T 93.1 %  received 91.0 %  Global-T 24.6 %  Server-T 56.9 %  loss 0.1234  0.52 s"
        "  left 0:00:09\n"
    )


def test_plain_line_leaves_out_what_was_not_evaluated(clock):
    progress, file = plain()
    loop = loop_of(0, 100)
    progress.on_run_start(loop)
    clock.seconds += 1
    run_round(progress, loop, {"round": 1, "Local-T": None, "Global-T": float("nan"), "loss": 2.5, "seconds": 1.0})
    assert file.getvalue() == "round    1/100  loss 2.5000  1.00 s  left 0:01:39\n"


def test_plain_line_names_received_in_full_where_it_stands_alone():
    progress, file = plain()
    loop = loop_of(0, 1)
    progress.on_run_start(loop)
    run_round(progress, loop, {"round": 1, "Local-T_received": 0.5})
    assert file.getvalue() == "round  1/1  Local-T_received 50.0 %  left 0:00:00\n"


def test_plain_line_shows_a_loss_that_diverged():
    progress, file = plain()
    loop = loop_of(0, 1)
    progress.on_run_start(loop)
    run_round(progress, loop, {"round": 1, "loss": float("nan")})
    assert "loss nan" in file.getvalue()


def test_plain_lines_keep_the_interval_but_for_the_first_and_last_round(clock):
    progress, file = plain(interval=10)
    loop = loop_of(0, 30)
    progress.on_run_start(loop)
    for round in range(1, 31):
        clock.seconds += 1
        run_round(progress, loop, {"round": round})
    assert [int(number) for number in re.findall(r"round +(\d+)/", file.getvalue())] == [1, 11, 21, 30]


def test_plain_line_is_not_broken_on_a_narrow_output():
    file = io.StringIO()
    progress = RoundProgress(Console(file=file, width=20))
    loop = loop_of(11, 30)
    progress.on_run_start(loop)
    run_round(progress, loop, ROW)
    assert file.getvalue().count("\n") == 1


# --- time left ------------------------------------------------------------------------------------------------------


def test_time_left_of_a_resumed_run_counts_only_the_rounds_of_this_run(clock):
    progress, _ = plain()
    loop = loop_of(90, 100)
    progress.on_run_start(loop)
    assert progress.left is None
    clock.seconds += 4
    run_round(progress, loop, {"round": 91})
    clock.seconds += 6
    run_round(progress, loop, {"round": 92})
    assert progress.left == pytest.approx(8 * 5)


def test_time_left_runs_down_between_events_and_never_below_zero(clock):
    progress, _ = plain()
    loop = loop_of(0, 3)
    progress.on_run_start(loop)
    clock.seconds += 10
    run_round(progress, loop, {"round": 1})
    clock.seconds += 5
    assert progress.left == pytest.approx(15)
    clock.seconds += 50
    assert progress.left == 0


def test_time_left_is_known_within_the_first_round(clock):
    progress, _ = plain()
    loop = loop_of(0, 2)
    progress.on_run_start(loop)
    progress.on_round_start(loop, 1, [0, 1, 2, 3])
    clock.seconds += 2
    progress.on_client_fit_end(loop, SimpleNamespace())
    assert progress.left == pytest.approx(14)


# --- a terminal -----------------------------------------------------------------------------------------------------


def test_terminal_keeps_a_line_of_each_round():
    progress, file = terminal(width=120)
    loop = loop_of(11, 30)
    with progress:
        progress.on_run_start(loop)
        run_round(progress, loop, ROW)
        run_round(progress, loop, {"round": 13, "Local-T": None, "loss": 0.1})
    text = without_codes(file.getvalue())
    assert "round  12/30  Local-T 93.1 %  received 91.0 %  Global-T 24.6 %  Server-T 56.9 %  loss 0.1234" in text
    assert "round  13/30  loss 0.1000" in text


def scored(score):
    return SimpleNamespace(scores={"Local-T": score})


def test_live_line_says_who_is_done_and_how_well_and_what_is_left(clock):
    progress, _ = terminal(width=100)
    with progress:
        progress.on_run_start(loop_of(0, 3))
        progress.on_round_start(progress._loop, 1, [0, 1, 2, 3])
        clock.seconds += 2
        progress.on_client_fit_end(progress._loop, scored(0.5))
        progress.on_client_fit_end(progress._loop, scored(0.8))
        assert (
            progress.present().plain
            == f"round 1/3  {'━' * 10}{'╌' * 10}  2/4 clients  Local-T 65.0 %  0:00:02  left 0:00:10"
        )


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (80, f"round 1/3  {'━' * 10}{'╌' * 10}  2/4 clients  Local-T 65.0 %  left 0:00:10"),
        (60, "round 1/3  2/4 clients  Local-T 65.0 %  left 0:00:10"),
        (42, "1/3  2/4  Local-T 65.0 %  left 0:00:10"),
        (40, "1/3  2/4  Local-T 65.0 %  left 0:00:10"),
        (32, "1/3  2/4  65.0 %  left 0:00:10"),
        (20, "1/3  2/4"),
    ],
)
def test_live_line_fits_into_the_terminal(clock, width, said):
    progress, file = terminal(width)
    with progress:
        progress.on_run_start(loop_of(0, 3))
        progress.on_round_start(progress._loop, 1, [0, 1, 2, 3])
        clock.seconds += 2
        for score in (0.5, 0.8):
            progress.on_client_fit_end(progress._loop, scored(score))
        assert progress.present().plain == said
        progress._loop.round = 1
        progress.on_round_end(progress._loop, {**ROW, "round": 1})
    lines = without_codes(file.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= max(width, len("round  1/3  Local-T 93.1 %"))


def test_live_line_counts_what_other_workers_have_told():
    progress, _ = terminal()
    watch = SimpleNamespace(others_done=lambda round: {1: 2}[round])
    with progress:
        progress.on_run_start(loop_of(0, 3, ward=SimpleNamespace(watch=watch)))
        progress.on_round_start(progress._loop, 1, [0, 1, 2, 3])
        progress.on_client_fit_end(progress._loop, scored(0.5))
        assert " 3/4 clients" in progress.present().plain
        for _ in range(3):  # the others' reports have come
            progress.on_client_fit_end(progress._loop, scored(0.5))
        assert " 4/4 clients" in progress.present().plain


def test_live_line_says_that_the_run_is_stopping():
    progress, _ = terminal()
    with progress:
        progress.on_run_start(loop_of(0, 3, stopping=True))
        assert "stopping after this round" in progress.present().plain


def test_long_first_round_is_told_of_once_where_nothing_else_is_seen(clock):
    progress, file = plain()
    loop = loop_of(0, 10)
    progress.on_run_start(loop)
    progress.on_round_start(loop, 1, [0, 1, 2, 3])
    for _ in range(3):
        clock.seconds += 20
        progress.on_client_fit_end(loop, SimpleNamespace())
    assert file.getvalue() == "round   1/10  1 of 4 clients after 20 s; the run takes about 0:13:20\n"


def test_verbose_display_has_a_line_for_every_client():
    progress, file = plain(verbose=True)
    report = SimpleNamespace(client=7, scores={"Local-T": 0.9}, losses={"loss": 0.5}, num_steps=12, seconds=0.25)
    progress._loop = loop_of(0, 3)
    progress.on_round_start(progress._loop, 1, [7])
    progress.on_client_fit_end(progress._loop, report)
    progress.on_round_end(progress._loop, {"round": 1, "seconds": 2.0, "seconds_fit": 1.5, "seconds_save": 0.25})
    client, _, parts = file.getvalue().splitlines()
    assert client == "  client 7  Local-T 90.0 %  loss 0.5000  12 steps  0.25 s"
    assert parts == "  fit 1.50 s  save 0.25 s"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_terminal_gets_its_cursor_back_after_an_error(error):
    progress, file = terminal()

    def fail():
        with progress:
            progress.on_run_start(loop_of(0, 3))
            raise error

    with pytest.raises(error):
        fail()
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l") >= 0


def test_terminal_draws_nothing_more_once_closed():
    progress, file = terminal()
    loop = loop_of(0, 3)
    progress.on_run_start(loop)
    progress.close()
    progress.close()
    length = len(file.getvalue())
    run_round(progress, loop, {"round": 1})
    assert len(file.getvalue()) == length


def test_dumb_terminal_gets_plain_lines():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    progress = RoundProgress(console)
    loop = loop_of(0, 1)
    progress.on_run_start(loop)
    run_round(progress, loop, {"round": 1})
    assert file.getvalue() == "round  1/1  left 0:00:00\n"


def test_colours_that_are_forced_make_no_terminal_of_a_file(monkeypatch):
    """As notebooks and CI do; the live line was written four times a second."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = PlainConsole(file=io.StringIO())
    assert console.is_terminal
    assert not RoundProgress(console).live
    assert Progress(console, []).live is None


def test_a_stream_of_ones_own_needs_no_more_than_write_and_flush(monkeypatch):
    """As of scripts that write into a log beside the terminal."""
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=file.write, flush=lambda: None))
    console = PlainConsole()
    console.print("round 1")
    assert file.getvalue() == "round 1\n"
    assert not RoundProgress(console).live


def test_a_notebook_gets_lines_not_pages(monkeypatch):
    """The forked processes of its runs can show it no pages: their rounds were lost."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    file = io.StringIO()
    PlainConsole(file=file).print("round 1")
    assert file.getvalue() == "round 1\n"


# --- the end of a run -----------------------------------------------------------------------------------------------


def cells(summary):
    columns = [[str(cell) for cell in column.cells] for column in summary_table(summary).columns]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in zip(*columns, strict=True)}


def test_summary_table_has_a_row_for_each_accuracy():
    assert cells(make_summary()) == {
        "Local-T": ["94.8 ±  5.1", "94.7 ±  5.2", "95.2 (1000)", "80.0", "-"],
        "Local-T_received": ["100.0 ± 10.0", "-", "-", "-", "92.0 ± 11.0"],
        "Local-T_received/prototype": ["91.0 ± 12.3", "-", "-", "-", "-"],
        "Global-T": ["-", "-", "-", "-", "-"],
        "Server-T": ["56.9", "56.1", "57.0 (29)", "-", "-"],
    }


def test_summary_table_has_no_final_column_where_nothing_was_received():
    assert len(summary_table(make_summary(final_received={})).columns) == 5


def test_summary_table_says_over_how_many_rounds_a_short_run_is_averaged():
    assert "last 3" in str(summary_table(make_summary(rounds=3)).columns[2].header)


def test_summary_table_counts_the_rounds_that_were_evaluated():
    """Twelve rounds, every fourth one evaluated: the mean is over three."""
    header = str(summary_table(make_summary(rounds=12, evaluated_rounds=3)).columns[2].header)
    assert header == "mean of last\n3 evaluated"


def test_accuracy_columns_keep_an_inference_whose_name_ends_like_a_spread():
    assert accuracy_columns(["Local-T", "Local-T/robust_std", "Local-T_std"]) == ["Local-T", "Local-T/robust_std"]


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "width": 100}])
def test_summary_fits_into_100_columns_but_for_the_folder(options):
    lines = without_codes(printed(make_summary(clients_without_test=list(range(40))), **options)).splitlines()
    assert max(len(line) for line in lines if not line.startswith(("folder", "report"))) <= 100


def test_summary_is_complete_where_the_output_says_that_it_is_narrower():
    text = printed(make_summary(), width=40)
    assert "Local-T_received/prototype" in text
    assert "…" not in text


@pytest.mark.parametrize("width", [1, 20])
def test_summary_keeps_every_figure_on_a_terminal_that_is_too_narrow_for_it(width):
    narrow, wide = io.StringIO(), io.StringIO()
    for file, columns in ((narrow, width), (wide, 40)):
        console = PlainConsole(file=file, force_terminal=True, color_system=None, width=columns)
        console.print(summary_table(make_summary(), columns))
        assert console.width == columns
    assert narrow.getvalue() == wide.getvalue()
    assert "94.8 ±  5.1" in narrow.getvalue()
    assert "…" not in narrow.getvalue()


def test_summary_shows_the_folder_in_one_piece_and_names_as_they_are():
    text = printed(make_summary())
    assert make_summary()["folder"] in text
    assert "quick[start]: FedProto, 30 rounds, 20 clients" in text
    assert "16.3 s" in text


def test_summary_says_that_best_is_chosen_on_the_test_split():
    assert re.search(r'^"best" is chosen on the test split.*$', printed(make_summary()), re.MULTILINE)


def test_summary_gives_communication_in_all_and_per_client_and_round():
    """12,345,600 values over 30 rounds of 10 clients are 41,152 each; four bytes a value; 411,520 / 2^20 = 0.39."""
    text = printed(make_summary())
    assert re.search(r"up +12\.3 M values, 49\.4 MB +41,152 values, 165 KB +0\.39 x 2\^20 values", text)
    assert re.search(r"down +6\.00 M values, 24\.0 MB +20,000 values, 80\.0 KB +0\.19 x 2\^20 values", text)


def test_summary_counts_what_clients_heard_that_fell_sick():
    """6,000,000 values to 30 rounds of 20 clients, half of which sent nothing back."""
    there = {**make_summary()["communication"], "uplink_params_per_client": 41152.0, "downlink_params_per_client": 1e4}
    text = printed(make_summary(communication=there))
    assert "41,152 values, 165 KB" in text
    assert "10,000 values, 40.0 KB" in text


def test_summary_of_a_method_that_shares_nothing():
    nothing = dict.fromkeys(make_summary()["communication"], 0)
    assert re.search(r"up +0 values, +0 B", printed(make_summary(communication=nothing)))


def test_summary_names_clients_without_test_samples():
    assert "test samples: client 3." in printed(make_summary(clients_without_test=[3]))
    assert "clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more." in printed(
        make_summary(clients_without_test=list(range(12)))
    )
    assert "test samples" not in printed(make_summary())


def test_summary_of_one_round_without_any_accuracy():
    empty = make_summary(rounds=1, clients=1, last={}, best={}, mean_last_10={}, final_received={})
    assert "1 round, 1 client" in printed(empty)


def test_plain_summary_has_no_control_codes_and_leaves_the_console_as_it_was():
    file = io.StringIO()
    console = Console(file=file, width=60)
    print_summary(make_summary(), console)
    assert "\x1b" not in file.getvalue()
    assert console.width == 60


def test_summary_of_a_run_on_validation_parts_says_so():
    said = printed(make_summary(evaluate_on="validation"))
    assert '"best" is chosen on the validation split' in said
    assert "the test parts were laid aside" in said
