"""Mutated configurations: whatever is done to a file, the answer is a run or one line about a key that is in it."""

import io
import random
from contextlib import redirect_stderr, suppress

import pytest
import yaml
from harnesses import harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.federation.flags import check_flags
from fl_lightning.parser import resolve
from fl_lightning.precheck import check_names
from fl_lightning.reading import UnreadableError, load_yaml
from fl_lightning.trust import Trust

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
mutations = harness("mutations")
BASES = mutations.bases()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutations")


def answer(folder, text):
    """What `fit` says before it builds anything: (0 or 2, the line)."""
    (folder / "exp.yaml").write_text(text, errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()):
        patch.chdir(folder)
        try:
            given = CommandLine(["--config", "exp.yaml"])
            check_names(given)
            with given.speaking():
                config = resolve(given.tree, Trust(own=True))
                flags = {name: value for name, value in config["trainer"].items() if value is not None}
                check_flags(flags)
        except ConfigError as error:
            return 2, f"fl-lightning: error: {error}"
    assert resolve(load_yaml(yaml.safe_dump(config)), Trust()) == config  # what is resolved stays as it is
    return 0, ""


@pytest.mark.parametrize("name", BASES)
def test_file_that_nobody_changed_is_taken(folder, name):
    assert answer(folder, yaml.safe_dump(BASES[name])) == (0, "")


@QUICK
@given(name=st.sampled_from(sorted(BASES)), seed=st.integers(0, 2**32))
def test_mutation_is_answered_in_one_line_about_its_key(folder, name, seed):
    mutant = mutations.mutate(name, BASES[name], random.Random(seed))
    code, line = answer(folder, mutant.text)
    wrong = mutations.judge(mutant, code, line, 0.0)
    range_of_values = (
        code == 0 and wrong == ["nonsense accepted"] and "value" in mutant.what
    )  # constructors refuse those
    assert wrong == [] or range_of_values, (mutant, line)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@QUICK
@given(name=st.sampled_from(sorted(BASES)), value=plain, data=st.data())
def test_any_value_anywhere_is_taken_or_refused_about_its_key(folder, name, value, data):
    config = load_yaml(yaml.safe_dump(BASES[name]))
    path = data.draw(st.sampled_from(mutations.places(config)))
    node = config
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    dotted = ".".join(str(part) for part in path if part != "init_args")
    text = yaml.dump(config, Dumper=mutations._Dumper, sort_keys=False)
    code, line = answer(folder, text)
    wrong = mutations.judge(mutations.Mutant(name, "value", text, dotted, False), code, line, 0.0)
    assert wrong == [], (dotted, value, line)


@QUICK
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text):
    with suppress(UnreadableError):
        load_yaml(text)


CLASSES = (
    "federation.aggregator", "federation.exchange", "federation.server_optimizer", "federation.wire", "data.shift",
    "data.augmentation", "optimizer", "logger", "trainer.profiler", "federation.attack", "federation.record_privacy",
)  # fmt: skip


def test_null_of_an_option_is_null_of_a_file():
    argv = ["--method", "FedAvg", "--model", "MLP", "--data.dataset", "Digits", "--data.partition", "IID"]
    plain_one = CommandLine(argv)
    named = CommandLine(
        [*argv, "--federation.aggregator", "Krum", "--federation.aggregator.select", "2"]
        + [word for key in CLASSES for word in (f"--{key}", "null")]
    )
    check_names(named)
    assert resolve(named.tree, Trust()) == resolve(plain_one.tree, Trust())


# --- through the command, as far as the first round ------------------------------------------------------------------

NONSENSE = [
    ("trainer.gradient_clip_val", -1), ("trainer.gradient_clip_val", 0), ("trainer.gradient_clip_val", float("nan")),
    ("trainer.accumulate_grad_batches", 0), ("trainer.accumulate_grad_batches", -1),
    ("trainer.gradient_clip_algorithm", "banana"), ("trainer.limit_train_batches", 0), ("trainer.max_steps", 0),
    ("trainer.limit_train_batches", 0.0), ("trainer.limit_train_batches", 1.5), ("trainer.overfit_batches", -1),
    ("trainer.max_time", "00:00:00:00"), ("trainer.max_time", {"seconds": 0}), ("trainer.max_time", "soon"),
    ("trainer.num_nodes", 2**62), ("trainer.val_check_interval", 100), ("optimizer.init_args.lr", 0),
    ("optimizer.init_args.maximize", True), ("optimizer.init_args.differentiable", True),
    ("output", ""), ("output", "\udcff"),
    ("trainer.devices", 2**63), ("trainer.devices", 0), ("trainer.devices", 10**9), ("trainer.num_nodes", 0),
    ("optimizer.init_args.weight_decay", float("nan")), ("optimizer.init_args.lr", float("inf")),
    ("federation.checkpoint", None), ("federation.evaluate", 5), ("federation.newcomers.clients", None),
    ("federation.failures.probability", float("nan")), ("federation", []), ("trainer", 1), ("output", None),
    ("seed", None), ("seed", "2024-13-45"), ("output", "x" * 300), ("output", "nul\0"),
    ("method.class_path", "../../x"),
    ("data.augmentation", [{"class_path": "RandomCrop", "init_args": {"size": float("inf")}}]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), NONSENSE, ids=[f"{key}={value!r}"[:60] for key, value in NONSENSE])
def test_nonsense_is_refused_by_its_whole_key(folder, key, value):
    config = load_yaml(yaml.safe_dump(BASES["quickstart"]))
    node = config
    *above, last = key.split(".")
    for part in above:
        node = node.setdefault(part, {})
    node[last] = value
    code, line = answer(folder, yaml.safe_dump(config))
    named = key.removesuffix(".class_path")
    assert code == 2
    assert line.startswith(f"fl-lightning: error: {named}"), line
