"""YAML that is read as data."""

import math
import time

import pytest

from fl_lightning.errors import ConfigError, shortened, suggest
from fl_lightning.reading import UnreadableError, dump_yaml, load_yaml, plain, read_yaml


def laughs():
    lines = ["- &a [" + ", ".join("x" * 10) + "]"]
    lines += [f"- &{chr(98 + n)} [" + ", ".join([f"*{chr(97 + n)}"] * 10) + "]" for n in range(9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".inf", math.inf),
        ("2024-13-45", "2024-13-45"),
        ("2024-01-05", "2024-01-05"),
        ("00:00:01:00", "00:00:01:00"),
        ("1_000", 1000),
        ("010", "010"),
        ("-007", "-007"),
        ("08", "08"),
        ("08e1", 80.0),
        ("0", 0),
        ("-0", 0),
        ("'5'", "5"),
        ("yes", True),
        ("", None),
        ("{<<: {a: 1, b: 2}, b: 3}", {"a": 1, "b": 3}),
        ("[&a {b: 1}, *a]", [{"b": 1}, {"b": 1}]),
    ],
)
def test_plain_values_are_read(text, value):
    assert load_yaml(text) == value
    assert type(load_yaml(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "'a' is given twice, the second time in line 3"),
        ("a: {b: 1, b: 1}", "'b' is given twice"),
        ("&x [*x]", "part of what it stands for"),
        ("a: &a {b: *a}", "part of what it stands for"),
        (laughs(), "more than 100000 values"),
        ("!!python/object/apply:os.getcwd []", "constructor for the tag"),
        ("!!set {a, b}", "constructor for the tag"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 100 + "]" * 100, "nested more than 60 deep"),
        ("? [1]\n: 2", "must be a word or a number"),
        ("a: \0", "unacceptable character"),
        ("a: [", "line 1"),
        ("9" * 5000, "digits"),
        ("--- 1\n--- 2", "another document"),
    ],
)
def test_what_is_no_data_is_refused_at_once(text, said):
    start = time.process_time()
    with pytest.raises(UnreadableError, match=said.replace("(", r"\(")):
        load_yaml(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x01", b"a: 1\na: 2", b"x" * (5 * 2**20)], ids=["bytes", "twice", "huge"]
)
def test_file_that_cannot_be_read_is_one_line(tmp_path, content):
    (tmp_path / "exp.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--config: ") as error:
        read_yaml(tmp_path / "exp.yaml", "--config")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "nowhere.yaml", "x" * 5000, "nul\0"], ids=["folder", "absent", "long", "null"])
def test_name_of_no_file_is_one_line(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^--config: "):
        read_yaml(tmp_path / name, "--config")


@pytest.mark.parametrize(
    "value", [math.nan, [math.inf], {"a": {"class_path": "os.system"}}, 2**63, "\0", "\ud800", b"x"]
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(ConfigError, match=r"^key"):
        plain(value, "key")


def test_no_message_is_longer_than_a_line():
    for key in ("a", "k" * 5000):
        for allowed in ("short", "long " * 1000, suggest("x", [f"choice{n}" for n in range(500)])):
            for value in (..., "v" * 5000, list(range(10**6)), 10**10000, {"a": "\x1b[0m\n" * 100}):
                message = str(ConfigError(key, allowed, value))
                assert len(message) <= 270
                assert message.isprintable()


def test_long_text_keeps_its_beginning_and_its_end():
    assert shortened("a" * 50 + "b" * 50, 30) == "a" * 19 + "…" + "b" * 10


def test_many_choices_are_the_nearest_ones():
    said = suggest("choice77", [f"choice{n}" for n in range(500)])
    assert said.startswith("did you mean choice77? (choose from choice77, ")
    assert said.endswith("…; 500 in all)")


@pytest.mark.parametrize(
    "value",
    ["1e3", "12e4567", "1.5e3", "1e+3", "3e-4", ".5e3", "-1e3", "1_000", "0x10", "010", ".inf", "on", "", "2024-01-05",
     "1:30", "a: b", 1e3, 1e-5, 1e300, -math.inf, 10, -3, True, None, ["1e3", {"1e3": "1e3"}]],
)  # fmt: skip
def test_what_is_written_is_read_as_the_same(value):
    """A run that was named 1e3 could not be used any more: its file said 1000."""
    found = load_yaml(dump_yaml({"name": value, "others": [value]}))
    assert found == {"name": value, "others": [value]}
    assert type(found["name"]) is type(value)
