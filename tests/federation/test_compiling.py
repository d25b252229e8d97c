"""Compiled steps: the same numbers but for rounding, or one line that says why they run as they are."""

import jaxtyping
import pytest
import torch
from leaves import flatten

from fl_lightning.core import compiled
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.compiling import compile_steps
from fl_lightning.federation.settings import Federation
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep


def assert_alike(one, other, tolerance=1e-5):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, (torch.Tensor, float)):
            torch.testing.assert_close(other[name], value, rtol=0, atol=tolerance, equal_nan=True)


@pytest.fixture(autouse=True)
def shapes_are_not_checked(monkeypatch):
    """The tests' checks of what losses are given are no part of a run, and torch 2.6 cannot trace them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def both(run_federation, outcome):
    """A federation as it is and compiled; the latter, when the two are alike."""

    def run(make, **options):
        plain, fast = (run_federation(make, 3, compile=own, **options) for own in (False, True))
        assert_alike(outcome(plain), outcome(fast))
        return fast

    return run


@pytest.fixture
def calls(monkeypatch):
    """Counts compiled mini-batches, and compilations, of a compiler that only takes operations down."""
    counted = {"compiled": 0, "graphs": 0}
    of, compile = compiled.CompiledLosses.of, torch.compile

    def graphs(module, inputs):
        counted["graphs"] += 1
        return module.forward

    def counting(self, *given):
        found = of(self, *given)
        counted["compiled"] += found is not None
        return found

    monkeypatch.setattr(torch, "compile", lambda run, dynamic, options: compile(run, dynamic=dynamic, backend=graphs))
    monkeypatch.setattr(compiled.CompiledLosses, "of", counting)
    return counted


def test_compiled_federation_has_the_same_numbers(mlp, both, monkeypatch, capsys):
    """Forward and backward as graphs; that a compiler makes code of them, `benchmarks/compiled.py` tries."""
    compile = torch.compile
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda run, dynamic, options: compile(run, dynamic=dynamic, backend="aot_eager")
        )
        fast = both(lambda: FedAvg(mlp()))
    assert fast.runner.modules[0].compiled.reason == ""
    assert "federation.compile" not in capsys.readouterr().err


@pytest.mark.parametrize("method", [FedRep, FedProto])
def test_phases_and_terms_are_compiled_once_for_all_clients_and_rounds(method, mlp, both, calls):
    fast = both(lambda: method(mlp()))
    assert fast.runner.modules[0].compiled.reason == ""
    assert calls["compiled"] > 3 * calls["graphs"] > 0
    assert calls["graphs"] <= 8


def test_compiled_run_resumes(mlp, assert_resumes, calls):
    assert_resumes(lambda: FedAvg(mlp()), compile=True)
    assert calls["compiled"]


def test_step_of_a_method_s_own_runs_as_it_is(mlp, both, capsys):
    fast = both(lambda: Ditto(mlp()))
    assert fast.runner.modules[0].compiled is None
    line = "fl-lightning: federation.compile: Ditto runs as it is: its step is its own\n"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize(
    ("size", "said"), [(1, "mini-batches of one are not compiled"), (99, "no client has a mini-batch of 99 samples")]
)
def test_mini_batches_that_are_never_compiled_are_said(size, said, mlp, make_data, set_up_federation, capsys):
    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(batch_size=size), compile=True)
    assert loop.runner.modules[0].compiled is None
    assert capsys.readouterr().err == f"fl-lightning: federation.compile: FedAvg runs as it is: {said}\n"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda *given: 1 / 0, "it cannot be compiled (ZeroDivisionError: division by zero)"),
        (lambda *given: _doubled(*given), "compiled, its losses or gradients are others"),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_is(run, said, mlp, both, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda *given, **options: run)
    both(lambda: FedAvg(mlp()))
    assert capsys.readouterr().err.count(f"fl-lightning: federation.compile: FedAvg runs as it is: {said}\n") == 1


def _doubled(*given):
    values, seen = compiled._losses(*given)
    return {name: 2 * value for name, value in values.items()}, seen


class Follows(Term):
    """Draws embeddings to their moving mean, a buffer that is set anew; the further, the more often it was asked."""

    def setup(self, host):
        self.register_buffer("mean", torch.zeros(host.model.embedding_size))
        self.asked, self.noted = 0, []

    def receive(self, host, message):
        self.asked, self.noted = 0, []

    def forward(self, host, out):
        self.asked += 1
        self.noted.append(self.asked)
        self.mean = self.mean.lerp(out.z.detach().mean(0), 0.5)
        return len(self.noted) * self.asked * (out.z - self.mean).square().mean()


def test_what_is_tried_both_ways_leaves_nothing_behind(mlp, both, monkeypatch):
    """The first fit of a process had a mean, and counts, of two mini-batches that nobody had."""
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    fast = both(lambda: FedAvg(mlp(), extra_terms=[Follows(0.01)]))
    assert fast.runner.modules[0].compiled.reason == ""


def test_compile_is_refused_beside_a_cohort():
    with pytest.raises(ConfigError, match=r"^federation\.compile: cannot be combined with federation\.cohort"):
        Federation(compile=True, cohort=4)


def test_a_fit_of_several_devices_runs_as_it_is(set_up_federation, mlp, capsys):
    """None of their parts has the size that is compiled, so that nothing was, and no line said so."""
    loop = set_up_federation(lambda: FedAvg(mlp()))
    loop.runner.single_device = False
    compile_steps(loop.runner, True)
    assert "FedAvg runs as it is: several devices share a fit, each with a part of every" in capsys.readouterr().err
    assert loop.runner.modules[0].compiled is None
