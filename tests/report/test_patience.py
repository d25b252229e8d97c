import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from fl_lightning.report.patience import Patience


@pytest.fixture(autouse=True)
def _not_stuck(monkeypatch):
    monkeypatch.setattr(Patience, "stuck", False)


def test_call_gives_what_the_function_returns_in_one_thread_of_its_own():
    patience = Patience()
    threads = {patience.call(threading.get_ident, 5.0) for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_thread_ends_with_the_object_and_keeps_nothing_of_what_it_called():
    """A thread, a logger and all that it had been told stayed of every fit in a process."""
    patience, said = Patience(), threading.Event()  # what a call holds
    told = weakref.ref(said)
    patience.call(said.is_set, 5.0)
    thread = patience._thread
    del said
    deadline = time.monotonic() + 5
    while told() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert told() is None
    assert thread.is_alive()
    del patience
    thread.join(5.0)
    assert not thread.is_alive()


def test_error_reaches_the_caller():
    with pytest.raises(ValueError, match="no"):
        Patience().call(lambda: int("no"), 5.0)


def test_call_within_a_call_is_made_at_once():
    patience = Patience()
    assert patience.call(lambda: patience.call(lambda: 3, 5.0), 5.0) == 3


def test_call_that_hangs_is_given_up_and_so_are_all_later_ones():
    patience, never = Patience(), threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        patience.call(never.wait, 0.05)
    assert Patience.stuck
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="never came back"):
        patience.call(lambda: 1, 60.0)
    assert time.monotonic() - start < 10
    never.set()


def test_run_goes_on_without_a_hanging_wandb(monkeypatch, capsys):
    wandb = pytest.importorskip("fl_lightning.report.wandb")
    monkeypatch.setattr(wandb, "LIMIT", 0.05)
    never = threading.Event()
    logger = wandb.WandbLogger()
    logger._experiment = SimpleNamespace(step=0, log=lambda *_, **__: never.wait())
    logger._draws = False
    logger.log_round(SimpleNamespace(row={"round": 1, "loss": 0.5}))
    assert logger.lost
    assert logger.experiment is None
    logger.log_round(SimpleNamespace(row={"round": 2, "loss": 0.5}))  # nothing is waited for any more
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "W&B: failed (TimeoutError no answer within" in said
    assert "the run goes on without it" in said
    never.set()
