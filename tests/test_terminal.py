"""What is printed when nobody reads any more."""

import io
import os
import subprocess
import sys

import pytest

from fl_lightning.terminal import OutlivedStream, outlived, say


@pytest.fixture
def unread():
    """A text stream into a pipe that nobody reads."""
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    os.close(reader)
    yield stream
    stream.close()


def test_lines_that_nobody_reads_are_lost_without_a_word(unread):
    stream = OutlivedStream(unread)
    for _ in range(3):
        assert stream.write("a line\n") == 7
        stream.writelines(["one\n", "two\n"])
        stream.flush()
    with open(f"/dev/fd/{unread.fileno()}", "w") as void:
        assert os.path.samestat(os.fstat(void.fileno()), os.stat(os.devnull))


def test_all_else_is_the_streams_own(unread):
    stream = OutlivedStream(unread)
    assert stream.fileno() == unread.fileno()
    assert stream.isatty() is False
    assert stream.encoding == unread.encoding


def test_line_in_the_middle_of_a_line_ends_nothing(monkeypatch):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(sys, "stderr", Busy())
    say("stopping")


def test_letters_that_the_terminal_cannot_show_are_spelled_out(monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    with outlived():
        print("Käse … ±")
    assert file.getvalue() == b"K\\xe4se \\u2026 \\xb1\n"


@pytest.mark.skipif(sys.platform != "linux", reason="closes descriptors by a shell")
@pytest.mark.parametrize("streams", ["| true", ">&- 2>&-"])
def test_command_outlives_its_reader(streams):
    command = f"{sys.executable} -m fl_lightning --help {streams}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="closes descriptors by a shell")
def test_a_refusal_that_nobody_hears_has_its_exit_code(monkeypatch):
    command = f"{sys.executable} -m fl_lightning fit --config nowhere.yaml 2>&-"
    assert subprocess.run(["bash", "-c", command], timeout=60).returncode == 2
    monkeypatch.setattr(sys, "stderr", None)
    say("a remark")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such a device")
@pytest.mark.parametrize("command", ["--help", "list methods", "fit --help", "predict --help"])
def test_output_cut_by_a_full_disk_is_no_success(command):
    """As `predict … > classes.csv`: half a file must not look like a whole one."""
    argv = [sys.executable, "-m", "fl_lightning", *command.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "fl-lightning: error: standard output: No space left on device\n"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such a device")
def test_nothing_is_said_of_errors_that_could_not_be_shown():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "fl_lightning", "--help"], stdout=-1, stderr=full, text=True)
    assert done.returncode == 0
    assert done.stdout
