"""What a configuration may say of a federation, and what it may not."""

import math
from dataclasses import FrozenInstanceError

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy, Federation, Newcomers


def test_federation_that_says_nothing_is_one_that_runs():
    settings = Federation()
    assert (settings.rounds, settings.participation, settings.local_epochs) == (20, 1.0, 1)
    assert settings.evaluate == EvaluationPolicy()
    assert settings.newcomers == Newcomers(0, 0)
    assert settings.failures.among(range(5), seed=0, round=1) == set()


def test_sections_of_two_federations_are_their_own():
    assert Federation().evaluate is not Federation().evaluate
    with pytest.raises(FrozenInstanceError):
        Federation().rounds = 3


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("rounds", 0, "must be >= 1"),
        ("participation", 0.0, r"must be in \(0, 1\]"),
        ("participation", 1.01, r"must be in \(0, 1\]"),
        ("participation", math.nan, r"must be in \(0, 1\]"),
        ("local_epochs", 0, "must be > 0"),
        ("lr_decay", 0.0, r"must be in \(0, 1\]"),
        ("lr_decay", 1.5, r"must be in \(0, 1\]"),
        ("evaluate_every", 0, "must be >= 1"),
        ("steps_per_bundle", 0, "must be >= 1"),
        ("workers", 0, "must be auto or a number >= 1"),
        ("workers", -2, "must be auto or a number >= 1"),
        ("workers", "two", "must be auto or a number >= 1"),
        ("threads", 0, "must be from 1 to 1024"),
        ("recall", -1, "must be >= 0 MiB"),
        ("worker_timeout", 4.9, "must be >= 5 seconds"),
        ("init", "onw", "must be one of common, own"),
        ("pool", "dsk", "must be one of memory, disk"),
        ("graph", "foo", "must be auto, true or null"),
    ],
)
def test_federation_refuses(option, value, rule):
    with pytest.raises(ConfigError, match=rf"^federation\.{option}: {rule}, got '?{value}'?$"):
        Federation(**{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 1},
        {"participation": 1e-9},
        {"participation": 1},
        {"lr_decay": 1.0},
        {"workers": None},
        {"workers": "auto"},
        {"workers": 1},
        {"threads": None},
        {"worker_timeout": 5},
        {"rounds": 3, "newcomers": Newcomers(1, 2)},
        {"rounds": 1, "newcomers": Newcomers(0, 5)},
    ],
)
def test_federation_allows(options):
    settings = Federation(**options)
    assert {name: getattr(settings, name) for name in options} == options


@pytest.mark.parametrize(
    ("clients", "after", "message"),
    [
        (-1, 1, r"federation\.newcomers\.clients: must be >= 0, got -1"),
        (1, 0, r"federation\.newcomers\.after: must be named, and >= 1, for 1 newcomers, got 0"),
        (0, -1, r"federation\.newcomers\.after: must be >= 0, got -1"),
        (1, 3, r"federation\.newcomers\.after: must be < federation\.rounds \(3\), got 3"),
    ],
)
def test_bad_newcomers_are_refused(clients, after, message):
    with pytest.raises(ConfigError, match=message):
        Federation(rounds=3, newcomers=Newcomers(clients, after))


@pytest.mark.parametrize("value", [0, -1])
def test_evaluation_batch_size_is_checked(value):
    with pytest.raises(ConfigError, match=rf"federation\.evaluate\.batch_size: must be >= 1, got {value}"):
        EvaluationPolicy(batch_size=value)


@pytest.mark.parametrize(
    ("trained", "received", "moments"),
    [
        (True, True, ["trained", "received"]),
        (True, False, ["trained"]),
        (False, True, ["received"]),
        (False, False, []),
    ],
)
def test_moments_are_those_that_the_policy_names(trained, received, moments):
    assert EvaluationPolicy(trained=trained, received=received).moments == moments
