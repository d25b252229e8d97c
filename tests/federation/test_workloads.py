"""Local fits of whole and fractional passes, of counted mini-batches, and of numbers that are drawn."""

import pytest
import torch

from fl_lightning.core.workload import Workload
from fl_lightning.errors import ConfigError
from fl_lightning.federation.flags import limits
from fl_lightning.federation.workloads import Draw, cuts_epochs, workload_of
from fl_lightning.losses.class_relation import SoftLabels
from fl_lightning.losses.prototype import Prototypes
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep

COUNTS = ((20, 3), (4, 4), (5, 1))
"""17, 6 and 4 training samples (a quarter of each client's is for tests): 5, 2 and 1 mini-batches of 4."""
BATCHES = (5, 2, 1)


def steps(loop):
    """Mini-batches of every client's fit, round by round."""
    found = {}
    for (round, client), report in sorted(loop.diary.reports.items()):
        found.setdefault(round, []).append(report.num_steps)
        assert client == len(found[round]) - 1
    return list(found.values())


class Counted(FedAvg):
    """Sends how many optimizer steps its fit has made."""

    def send(self, data):
        message = super().send(data)
        message.artifacts["steps"] = torch.tensor(float(self.fit.num_steps))
        return message


@pytest.fixture
def three(make_data):
    """Three clients of 5, 2 and 1 mini-batches a pass."""
    data = make_data(COUNTS)
    assert tuple(client.num_steps(4) for client in data.clients) == BATCHES
    return data


@pytest.mark.parametrize(
    ("workload", "own", "expected"),
    [
        (Workload(2, batches=5), None, (2, None)),
        (Workload(2.0, batches=5), None, (2, None)),
        (Workload(0.5, batches=5), None, (1, 3)),
        (Workload(0.1, batches=30), None, (1, 3)),
        (Workload(0.01, batches=5), None, (1, 1)),
        (Workload(1.4, batches=5), None, (2, 2)),
        (Workload(1, 20, 5), None, (4, None)),
        (Workload(1, 12, 5), None, (3, 2)),
        (Workload(1, 3, 5), None, (1, 3)),
        (Workload(1, 3, 5), 7, (7, None)),
        (Workload(0.5, batches=5), 0, (0, None)),
    ],
)
def test_a_workload_is_so_many_epochs_and_a_last_one_of_so_many_mini_batches(workload, own, expected):
    assert workload.of(own) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"local_epochs": 0.5}, [3, 1, 1]),
        ({"local_epochs": 2.5}, [13, 5, 3]),
        ({"local_epochs": 2.0}, [10, 4, 2]),
        ({"local_steps": 7}, [7, 7, 7]),
        ({"local_steps": 7, "steps_per_bundle": 2}, [7, 7, 7]),
    ],
)
def test_fits_make_as_many_steps_as_they_should(mlp, run_federation, three, options, expected):
    loop = run_federation(lambda: Counted(mlp(num_classes=2)), rounds=2, data=three, **options)
    assert steps(loop) == [expected, expected]
    sent = [loop.diary.sent[round, client].artifacts["steps"] for round in (1, 2) for client in range(3)]
    assert list(map(int, sent)) == [*expected, *expected]


def test_as_many_steps_as_passes_have_are_the_passes(mlp, run_federation, make_data, outcome, assert_identical):
    data = make_data(((16, 16), (16, 16)))  # 24 training samples, 6 mini-batches each

    def method():
        return FedAvg(mlp(num_classes=2))

    passes = run_federation(method, rounds=2, data=data, local_epochs=2)
    counted = run_federation(method, rounds=2, data=data, local_steps=12)
    halves = run_federation(method, rounds=2, data=data, local_epochs=1.5)
    assert_identical(outcome(counted), outcome(passes))
    assert steps(halves) == [[9, 9], [9, 9]]


def test_bundles_change_nothing(mlp, run_federation, three, outcome, assert_identical):
    def method():
        return FedAvg(mlp(num_classes=2))

    one, many = (
        run_federation(method, rounds=2, data=three, local_steps=8, steps_per_bundle=size, trainer=flags)
        for size, flags in ((1, {"accumulate_grad_batches": 3}), (16, {"accumulate_grad_batches": 3}))
    )
    assert_identical(outcome(one), outcome(many))


def test_accumulation_steps_at_the_end_of_every_pass_and_of_what_is_cut(mlp, run_federation, make_data):
    data = make_data(((20, 3),))  # 5 mini-batches a pass: with 3 an optimizer step, 2 steps a pass
    made = []

    class Counts(FedNova):
        def on_fit_end(self):
            made.append((self.fit.num_batches, self.fit.num_steps))

    flags = {"accumulate_grad_batches": 3}
    run_federation(lambda: Counts(mlp(num_classes=2)), rounds=1, data=data, local_steps=9, trainer=flags)
    assert made == [(9, 2 + 2)]  # 5 make 2 steps; of the second pass 4 make 2


def test_phases_with_epochs_of_their_own_keep_them(mlp, run_federation, three):
    loop = run_federation(lambda: FedRep(mlp(num_classes=2), head_epochs=2), rounds=1, data=three, local_steps=3)
    assert steps(loop) == [[2 * 5 + 3, 2 * 2 + 3, 2 * 1 + 3]]


def test_draws_depend_on_seed_client_and_round_alone(mlp, run_federation, three, outcome, assert_identical):
    draw = Draw(uniform=[2, 5])
    drawn = [[draw.of(0, "local_epochs", round, client) for client in range(3)] for round in (1, 2)]
    assert all(2 <= number <= 5 for row in drawn for number in row)
    assert len({number for row in drawn for number in row}) > 1
    options = {"rounds": 2, "data": three, "local_epochs": draw}
    loop = run_federation(lambda: FedNova(mlp(num_classes=2)), **options)
    expected = [[number * each for number, each in zip(row, BATCHES, strict=True)] for row in drawn]
    assert steps(loop) == expected
    again = run_federation(lambda: FedNova(mlp(num_classes=2)), **options)
    assert_identical(outcome(loop), outcome(again))


def test_a_draw_covers_its_ends_and_may_be_made_once_for_every_client():
    numbers = [Draw(uniform=[2, 5]).of(1, "x", round, 0) for round in range(1, 200)]
    assert {*numbers} == {2, 3, 4, 5}
    assert {Draw(uniform=[2, 5], each="client").of(1, "x", round, 3) for round in range(1, 50)} == {
        Draw(uniform=[2, 5], each="client").of(1, "x", 1, 3)
    }
    assert {Draw(choice=[1, 10]).of(1, "x", 1, client) for client in range(50)} == {1, 10}
    assert 0.2 <= Draw(uniform=[0.2, 0.4]).of(1, "x", 1, 0) < 0.4
    assert workload_of(1, Draw(choice=[6]), 0, 1, 0, 4) == Workload(1, 6, 4)


def test_drawn_steps_resume_exactly(mlp, assert_resumes, three):
    options = {"rounds": 4, "data": three, "local_steps": Draw(uniform=[1, 9])}
    assert_resumes(lambda: FedAvg(mlp(num_classes=2)), **options)


def test_what_cuts_an_epoch():
    whole = [(1, None), (2.0, None), (Draw(uniform=[2, 5]), None), (Draw(choice=[1, 2]), None)]
    cut = [(0.5, None), (1, 7), (Draw(uniform=[0.5, 2]), None), (Draw(choice=[1, 0.5]), None), (1, Draw(choice=[3]))]
    cut += [(Draw(uniform=[1.0, 2.0]), None)]
    assert [cuts_epochs(*given) for given in whole] == [False] * len(whole)
    assert [cuts_epochs(*given) for given in cut] == [True] * len(cut)


@pytest.mark.parametrize(
    "method",
    [
        lambda model: FedProto(model, prototypes=Prototypes(collection="running")),
        lambda model: FedDW(model, soft_labels=SoftLabels(source="running")),
    ],
)
def test_terms_that_average_over_an_epoch_need_it_whole(mlp, set_up_federation, three, method):
    with pytest.raises(ConfigError, match=r"^federation\.local_epochs: (PrototypeAl|ClassRel)\w+ averages .* whole"):
        set_up_federation(lambda: method(mlp(num_classes=2)), data=three, local_epochs=0.5)
    set_up_federation(lambda: method(mlp(num_classes=2)), data=three, local_epochs=2)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"local_epochs": -0.5}, "federation.local_epochs: must be > 0, got -0.5"),
        (
            {"local_epochs": Draw(choice=[1, float("inf")])},
            "federation.local_epochs: must be > 0 and finite, got inf",
        ),
        (
            {"local_epochs": Draw(choice=[1, float("nan")])},
            "federation.local_epochs: must be > 0 and finite, got nan",
        ),
        (
            {"local_epochs": Draw(uniform=[0.5, float("inf")])},
            "federation.local_epochs: must be > 0 and finite, got inf",
        ),
        ({"local_steps": 0}, "federation.local_steps: must be whole numbers of mini-batches >= 1, got 0"),
        (
            {"local_steps": Draw(choice=[1, 2.5])},
            "federation.local_steps: must be whole numbers of mini-batches >= 1, got 2.5",
        ),
        ({"local_steps": 5, "local_epochs": 2}, "federation.local_steps: takes the place of federation.local_epochs"),
        ({"local_steps": 5, "trainer": {"limit_train_batches": 2}}, "federation.local_steps: trainer.limit_train_"),
        ({"local_epochs": 0.5, "trainer": {"max_steps": 2}}, "federation.local_epochs: trainer.max_steps"),
        ({"local_steps": 5, "trainer": {"limit_train_batches": 1}}, "federation.local_steps: trainer.limit_train_"),
        ({"local_steps": 5, "trainer": {"overfit_batches": 0.5}}, "federation.local_steps: trainer.overfit_batches"),
        ({"local_steps": 5, "trainer": {"fast_dev_run": True}}, "federation.local_steps: trainer.fast_dev_run counts"),
    ],
)
def test_what_is_no_amount_is_refused_in_one_line(mlp, set_up_federation, options, line):
    with pytest.raises(ConfigError) as caught:
        set_up_federation(lambda: FedAvg(mlp()), **options)
    assert str(caught.value).startswith(line)


def test_a_limit_of_steps_is_refused_where_later_phases_would_never_come(mlp, set_up_federation):
    rule = r"^trainer\.max_steps: would end fits before later phases of FedRep \(body\) .* use federation\.local_steps"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedRep(mlp()), trainer={"max_steps": 2})
    longest = {"local_epochs": 2, "trainer": {"max_steps": 1000}}  # which ends nothing
    assert set_up_federation(lambda: FedRep(mlp()), **longest).runner.trainer.max_steps == 1000


@pytest.mark.parametrize("batches", [True, 2])
def test_a_trial_run_comes_to_every_phase(batches, mlp, run_federation):
    """It trained the head alone."""
    options = {"local_epochs": 3, "trainer": {"fast_dev_run": batches}}
    loop = run_federation(lambda: FedRep(mlp(), head_epochs=2), 2, **options)
    assert {report.num_steps for report in loop.diary.reports.values()} == {2 * batches}
    sent, received = (own[1, 0].weights for own in (loop.diary.sent, loop.diary.received))
    assert not any(torch.equal(sent[name], received[name]) for name in sent)
    alone = run_federation(lambda: FedAvg(mlp()), 2, **options)
    assert {report.num_steps for report in alone.diary.reports.values()} == {int(batches)}


def test_flags_that_take_every_mini_batch_cut_nothing(mlp, set_up_federation):
    """For Lightning 1 is one mini-batch and 1.0 is all of them."""
    whole = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False, "max_steps": -1}
    loop = set_up_federation(lambda: FedAvg(mlp()), local_steps=5, steps_per_bundle=4, trainer=whole)
    assert loop.runner.steps_per_bundle == 4
    assert limits(whole) == set()
    assert limits({"limit_train_batches": 1, "fast_dev_run": 2}) == {"limit_train_batches", "fast_dev_run"}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "uniform: say one of"),
        ({"uniform": [2, 5], "choice": [1]}, "uniform: say one of"),
        ({"uniform": [5, 2]}, "uniform: must be two numbers, the least first, got [5, 2]"),
        ({"choice": []}, "choice: must hold a number"),
        ({"choice": [1], "each": "fit"}, "federation.local_epochs.each: must be one of round, client"),
    ],
)
def test_what_is_no_draw_is_refused(fields, line):
    with pytest.raises(ConfigError) as caught:
        Draw(**fields)
    assert str(caught.value).startswith(line)
