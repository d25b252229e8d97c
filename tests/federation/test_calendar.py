"""Who takes part when, and who is evaluated when: known ahead, without a federation."""

import numpy as np
import pytest

from fl_lightning import Experiment
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.early_stopping import EarlyStopping
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.settings import Federation, Newcomers


def calendar(num_clients=10, seed=0, **options):
    return Calendar(Federation(**options), num_clients, seed)


@pytest.mark.parametrize("early_stopping", [None, EarlyStopping(patience=5)])
def test_what_is_known_of_rounds_that_are_over_is_forgotten(early_stopping):
    """It was kept in every process, and grew with the participants of every round."""
    options = {"participation": 0.5, "rounds": 60, "evaluate_every": 5, "early_stopping": early_stopping}
    own = calendar(**options)
    known = []
    for round in range(1, 61):
        for client in own.participants(round):
            for ask in (Calendar.may_be_last_fit, Calendar.is_last_before_evaluation):
                assert ask(own, client, round) == ask(calendar(**options), client, round)
        known.append(sorted(own._known))
    assert all(min(rounds) >= round for round, rounds in enumerate(known, 1) if rounds)
    assert max(map(len, known)) < 30
    assert [own.last_fit(client, 60) for client in range(10)] == [
        calendar(**options).last_fit(client, 60) for client in range(10)
    ]


# --- participants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "clients", "count"),
    [(0.3, 10, 3), (0.1, 10, 1), (0.05, 10, 1), (0.29, 10, 2), (0.7, 10, 7), (0.99, 10, 9), (1.0, 10, 10), (0.5, 3, 1)],
)
def test_as_many_take_part_as_the_fraction_says(fraction, clients, count):
    """max(1, int(p·N)); 0.29 · 10 and 0.7 · 10 are a little off in floating point."""
    own = calendar(clients, participation=fraction)
    for round in range(1, 20):
        drawn = own.participants(round)
        assert len(drawn) == len(set(drawn)) == count
        assert drawn == sorted(drawn)
        assert set(drawn) <= set(range(clients))


def test_workers_are_planned_for_as_many_as_take_part():
    """0.29 · 100 is 28.999… in floating point; int of it alone would refuse the 29th worker."""
    options = {"data__num_clients": 100, "federation__participation": 0.29, "federation__workers": 29}
    built = BuiltExperiment(Experiment("quickstart", **options, trainer__accelerator="cpu").config)
    assert built.team().size == len(calendar(100, participation=0.29).participants(1)) == 29


def test_participants_depend_on_seed_and_round_alone():
    def draws(seed=0, **options):
        own = calendar(seed=seed, participation=0.3, **options)
        return [own.participants(round) for round in range(1, 11)]

    base = draws()
    assert base == draws(rounds=99, local_epochs=2, evaluate_every=3)
    assert base != draws(seed=1)
    assert len(set(map(tuple, base))) > 5


def test_asking_twice_or_out_of_order_changes_nothing():
    own, other = (calendar(participation=0.3) for _ in range(2))
    forth = {round: own.participants(round) for round in range(1, 11)}
    back = {round: other.participants(round) for round in range(10, 0, -1)}
    assert forth == back == {round: own.participants(round) for round in range(1, 11)}


def test_every_client_is_drawn_equally_often():
    """300 rounds of 3 of 10: 90 each, with a standard deviation of 8."""
    own = calendar(participation=0.3)
    drawn = np.bincount([client for round in range(300) for client in own.participants(round)], minlength=10)
    assert drawn.min() > 60
    assert drawn.max() < 120


def test_who_fails_was_drawn_and_does_not_take_part():
    """Failures take nobody else's place."""
    plain, failing = calendar(participation=0.5), calendar(participation=0.5, failures=Failures(0.4))
    missing = 0
    for round in range(1, 21):
        out = failing.missing(round)
        assert failing.participants(round) == [c for c in plain.participants(round) if c not in out]
        assert out <= set(plain.participants(round))
        assert plain.missing(round) == set()
        missing += len(out)
    assert missing > 20


def test_newcomers_are_drawn_like_the_others_once_they_have_joined():
    own = calendar(4, rounds=99, participation=0.5, newcomers=Newcomers(2, 50))
    early = [own.participants(round) for round in range(1, 51)]
    late = [own.participants(round) for round in range(51, 100)]
    assert {len(drawn) for drawn in early} == {1}
    assert {client for drawn in early for client in drawn} == {0, 1}
    assert {len(drawn) for drawn in late} == {2}
    assert {client for drawn in late for client in drawn} == {0, 1, 2, 3}


def test_newcomers_are_the_last_clients():
    own = calendar(10, newcomers=Newcomers(3, 4))
    assert own.num_founders == 7
    assert [own.num_present(round) for round in (1, 4, 5, 20)] == [7, 7, 10, 10]
    assert own.participants(4) == list(range(7))
    assert own.participants(5) == list(range(10))


# --- evaluations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "rounds"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 4, 6, 7]), (3, [3, 6, 7]), (7, [7]), (99, [7])]
)
def test_last_round_is_evaluated_whatever_comes_before(every, rounds):
    own = calendar(rounds=7, evaluate_every=every)
    assert [round for round in range(1, 8) if own.is_evaluated(round)] == rounds


@pytest.mark.parametrize("options", [{}, {"failures": Failures(0.4)}, {"newcomers": Newcomers(2, 5)}])
@pytest.mark.parametrize("every", [1, 3, 5])
def test_every_state_that_is_reported_is_tested_once(every, options):
    """The last fit before each evaluated round, and no other one."""
    own = calendar(6, rounds=12, participation=0.4, evaluate_every=every, **options)
    fits = {c: [r for r in range(1, 13) if c in own.participants(r)] for c in range(6)}
    evaluated = [round for round in range(1, 13) if own.is_evaluated(round)]
    for client, rounds in fits.items():
        reported = {max((fit for fit in rounds if fit <= round), default=None) for round in evaluated} - {None}
        assert {fit for fit in rounds if own.is_last_before_evaluation(client, fit)} == reported


def test_last_fit_of_a_client():
    own = calendar(6, rounds=12, participation=0.4)
    for client in range(6):
        rounds = [round for round in range(1, 13) if own.takes_part(client, round)]
        assert rounds == [round for round in range(1, 13) if client in own.participants(round)]
        assert [round for round in rounds if own.is_last_fit(client, round)] == rounds[-1:]
