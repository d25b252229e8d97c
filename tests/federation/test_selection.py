"""Who takes part by a rule: what is shipped, one's own, and what is refused of it."""

import re
import shutil

import numpy as np
import pytest
import torch

from fl_lightning import Experiment
from fl_lightning.core.coordinate_rules import CoordinateMedian
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.selection import BySamples, ClientSelection, Cyclic
from fl_lightning.federation.settings import Federation, Newcomers
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer


def calendar(rule, sizes=(1,) * 10, seed=0, **options):
    return Calendar(Federation(selection=rule, **options), len(sizes), seed, np.array(sizes))


class Own(ClientSelection):
    """Whatever a test says."""

    def __init__(self, says):
        self.says = says

    def select(self, round, num_train, count, rng):
        return self.says(round, num_train, count, rng)


# --- what is shipped --------------------------------------------------------------------------------------------------


def test_by_samples_a_client_s_chance_goes_by_its_samples():
    """One of 10, 20, 30 and 40 samples: a tenth to four tenths of 2,000 rounds, with a deviation of up to 22."""
    own = calendar(BySamples(), (10, 20, 30, 40), participation=0.25, rounds=2000)
    drawn = np.bincount([client for round in range(1, 2001) for client in own.participants(round)], minlength=4)
    assert drawn.sum() == 2000
    assert np.abs(drawn - np.array([200, 400, 600, 800])).max() < 100


@pytest.mark.parametrize(("count", "chosen"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3})])
def test_by_samples_who_has_none_comes_last(count, chosen):
    for round in range(1, 10):
        got = set(calendar(BySamples(), (0, 5, 0, 9), participation=count / 4).participants(round))
        assert len(got) == count
        assert got == chosen or (count == 1 and got < {1, 3})


@pytest.mark.parametrize(
    ("sizes", "taken"), [((0, 4, 3, 4), True), ((4, 4, 2, 4), False)], ids=["nobody at first", "few later"]
)
def test_a_robust_rule_asks_for_the_fewest_of_all_rounds(sizes, taken, mlp, set_up_federation):
    """It looked at the first round alone."""
    rule = Own(lambda round, num_train, count, rng: range(sizes[round - 1]))
    options = {"rounds": 4, "selection": rule, "aggregator": CoordinateMedian()}
    if taken:
        assert set_up_federation(lambda: FedAvg(mlp()), **options).calendar.fewest == 3
        return
    with pytest.raises(ConfigError, match="needs at least 3 participants a round, and there are 2"):
        set_up_federation(lambda: FedAvg(mlp()), **options)


def test_groups_take_turns():
    own = calendar(Cyclic(groups=3), participation=0.2)
    for round in range(1, 13):
        drawn = own.participants(round)
        assert len(drawn) == 2
        assert {client % 3 for client in drawn} == {(round - 1) % 3}
    assert len({tuple(own.participants(round)) for round in range(1, 31, 3)}) > 2


def test_of_a_group_no_more_take_part_than_there_are():
    own = calendar(Cyclic(groups=4))
    assert [own.participants(round) for round in (1, 2, 3, 4, 5)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7], [0, 4, 8]]
    assert [own.expected(round) for round in (1, 3)] == [3, 2]
    assert calendar(Cyclic(groups=12)).participants(12) == []


# --- how a rule is asked ----------------------------------------------------------------------------------------------


def test_a_rule_is_told_of_those_who_have_joined_and_whoever_fails_is_out():
    told = []

    def says(round, num_train, count, rng):
        told.append((round, num_train.tolist(), count))
        return range(len(num_train) - 1, -1, -1)

    late = {"newcomers": Newcomers(1, 1), "rounds": 3, "failures": Failures(clients=[1])}
    own = calendar(Own(says), (4, 5, 6), participation=0.5, **late)
    assert [own.participants(round) for round in (1, 2)] == [[0], [0, 2]]
    assert own.missing(2) == {1}
    assert {(1, (4, 5), 1), (2, (4, 5, 6), 1)} == {(round, tuple(sizes), count) for round, sizes, count in told}


def test_draws_are_of_the_seed_and_the_round_whenever_a_rule_is_asked():
    def draws(seed=0, order=range(1, 9)):
        own = calendar(BySamples(), range(1, 11), seed, participation=0.3)
        found = {round: own.participants(round) for round in order}
        return [found[round] for round in range(1, 9)]

    assert draws() == draws(order=range(8, 0, -1))
    assert draws() != draws(seed=1)
    assert len(set(map(tuple, draws()))) > 4


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_a_run_hears_whom_a_rule_chooses(method, mlp, set_up_federation, outcome, assert_identical, tmp_path):
    """They train and the others do not, nobody in a round without any; a run that was killed hears the same ones."""
    options = {"selection": Own(lambda round, *_: [] if round == 2 else {round % 4, 3}), "rounds": 4}
    straight = set_up_federation(lambda: method(mlp()), folder=tmp_path / "straight", **options)
    for _ in range(3):
        straight.advance()
    left = shutil.copytree(tmp_path / "straight", tmp_path / "left")
    resumed = set_up_federation(lambda: method(mlp()), folder=left, **options)
    resumed.load_state_dict(resumed.checkpoints.load(left / "checkpoints" / "round-0002.ckpt"))
    straight.final, resumed.final = straight.run(), resumed.run()
    rows = straight.diary.rows
    assert {row["round"]: row["participants"] for row in rows if row["round"]} == {1: 2, 2: 0, 3: 1, 4: 2}
    assert {client for round, client in straight.diary.sent if round == 4} == {0, 3}
    resumed.diary.rows = rows[:-2] + resumed.diary.rows
    assert_identical(outcome(resumed), outcome(straight))


@pytest.mark.parametrize("where", ["server", "client"])
def test_a_round_without_anybody_changes_nothing_under_noise_either(where, mlp, set_up_federation):
    """The noise was divided by nobody, and the run ended."""
    rule = Own(lambda round, *_: [] if round == 2 else [0])
    loop = set_up_federation(lambda: FedAvg(mlp()), selection=rule, wire=[ClipAndNoise(1.0, 0.1, where)], rounds=3)
    sent = []
    for _ in range(3):
        loop.advance()
        sent.append({name: own.clone() for name, own in loop.exchange.global_message().weights.items()})
    assert all(torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
    assert all(own.isfinite().all() and not torch.equal(own, sent[1][name]) for name, own in sent[2].items())
    assert [loop.account.mechanism(round)[1:] for round in (1, 2, 3)] == [(1, 1), (1, 1), (1, 2)]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "rule"),
    [
        (lambda *_: [0, 10], "in round 1, clients from 0 to 9, got 10"),
        (lambda *_: [-1], "in round 1, clients from 0 to 9, got -1"),
        (lambda *_: [0.0], "in round 1, clients from 0 to 9, got 0.0"),
        (lambda *_: [True], "in round 1, clients from 0 to 9, got True"),
        (lambda *_: [3, 3], "in round 1, each client at most once, got 3"),
        (lambda *_: None, "in round 1, clients from 0 to 9, each at most once, got None"),
        (lambda round, *_: [0] if round < 20 else [11], "in round 20, clients from 0 to 9, got 11"),
    ],
)
def test_what_is_no_choice_of_clients_is_refused_before_the_first_round(says, rule):
    with pytest.raises(ConfigError, match=re.escape(f"federation.selection: Own.select() must give, {rule}")):
        calendar(Own(says)).check()


def test_a_rule_that_keeps_something_or_draws_by_itself_is_refused():
    """A worker, or a run that goes on, would hear of other clients."""
    calls = []
    rule = Own(lambda *_: [calls.append(0) or len(calls) % 3])
    with pytest.raises(
        ConfigError, match=r"must give the same clients whenever it is asked: for round 1 it gave \[1\]"
    ):
        calendar(rule).check()


def test_what_a_rule_raises_is_one_line():
    """A parameter that it does not take ended the program with a traceback."""

    class Short(ClientSelection):
        def select(self, round, num_train):
            return [0]

    with pytest.raises(ConfigError, match=r"selection: Short\.select\(\) in round 1 raises TypeError: .* takes 3 pos"):
        calendar(Short()).check()
    with pytest.raises(ConfigError, match=r"Own\.select\(\) in round 1 raises ZeroDivisionError: .*\(test_selection"):
        calendar(Own(lambda *_: (1 // 0 for _ in range(3)))).check()


def test_sizes_are_not_a_rule_s_to_change():
    def says(round, num_train, count, rng):
        num_train[0] = 0

    with pytest.raises(ValueError, match="read-only"):
        calendar(Own(says)).participants(1)


def test_poisson_sampling_beside_a_rule_is_refused():
    with pytest.raises(ConfigError, match=r"federation\.sampling: must be fixed beside federation\.selection"):
        Federation(selection=Cyclic(), sampling="poisson", participation=0.5)


def test_a_rule_is_named_as_everything_else_is():
    options = {"federation__selection": "Cyclic", "federation__selection__groups": 5, "federation__workers": 7}
    built = BuiltExperiment(Experiment("quickstart", **options, trainer__accelerator="cpu").config)
    assert built.team().size == 7  # a rule may choose more than a share of the clients
    built.setup(in_memory=True)
    assert built.loop.calendar.participants(2) == [1, 6, 11, 16]
    with pytest.raises(ConfigError, match=r"federation\.selection\.groups: must be >= 1, got 0"):
        BuiltExperiment(
            Experiment("quickstart", federation__selection="Cyclic", federation__selection__groups=0).config
        )
