"""A look at the other processes of a run, so that one that died or hangs ends the run instead of holding it up."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch.distributed as dist

from fl_lightning.federation.tether import is_tethered
from fl_lightning.federation.transport import Waiting, gather, has_others, together
from fl_lightning.files import this_machine
from fl_lightning.terminal import say

PERIOD = 1.0  # seconds between two looks
ALONE = 10.0  # seconds after which what one process has met counts as met by no other one
_MET = itertools.count()  # of what processes met together, in all runs of these
_SAID = "said"  # key of the store: why the run cannot go on was said
_HAS_CLOCK = hasattr(time, "pthread_getcpuclockid")
_END = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows, which lacks the first, any ends a process
LOST = 70  # exit code by which a worker tells who started it that it has said why the run cannot go on


class Watch(threading.Thread):
    """Says every second that this process is alive, and ends it when another one has been silent for too long.

    A process counts as alive while the thread that makes this, and fits, computes or waits for other processes. Silence
    is counted in seconds in which this process runs, too, so that a job that was suspended as a whole goes on. A thread
    can be stuck in a message from a process that will never send it, where no exception reaches it: so the end is
    `os._exit`, after one line. What is on disk is whole at any moment.

    Args:
        limit: seconds of silence after which a process counts as lost.
        advice: says what the user can do, at the end of the line.
    """

    def __init__(self, limit: float, advice: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="watch")
        self.limit = limit
        self.advice = advice
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        self.clock = time.pthread_getcpuclockid(threading.get_ident()) if _HAS_CLOCK else None
        self.parent = os.getppid()
        self._waiting = 0
        self._stopped = threading.Event()
        self._beat = 0
        self._computed = -1.0
        self._time = 0.0  # seconds that this process has run; one that is suspended does not tick
        self._looked = self._time
        self._who: list[dict[str, Any]] = []
        self._done = (0, 0)
        self._told: dict[int, tuple[int, int]] = {}
        me = {"pid": os.getpid(), "host": socket.gethostname(), "machine": this_machine()}
        self.store.set(f"who/{self.rank}", json.dumps(me))
        self._say()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The thread that fits waits for others, or is in somebody else's code: silence means nothing."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def note(self, round: int, done: int) -> None:
        """Say with the next sign of life how many clients of a round this process is done with."""
        self._done = (round, done)

    def others_done(self, round: int) -> int:
        """How many clients of a round the other processes are done with, as they last said."""
        told = dict(self._told)
        return sum(done for rank, (of, done) in told.items() if rank != self.rank and of == round)

    def require_all(self, said: str) -> None:
        """Go on where all processes meet the same; where this one alone does, say what it met, and end.

        The others then wait for it in a message that it will never send, and no message can tell them.

        Args:
            said: what this one has met, for the line.
        """
        try:
            with self.waiting():
                self._await_all(f"met/{next(_MET)}", said)
        except RuntimeError:  # the store is in the main process: that one is gone, and others say so
            return

    def _await_all(self, what: str, said: str) -> None:
        self.store.set(f"{what}/{self.rank}", "")
        everybody = [f"{what}/{rank}" for rank in range(self.size)]
        end = time.monotonic() + ALONE
        while not self.store.check(everybody) and not self.store.check([_SAID]):
            if time.monotonic() > end:
                self.store.set(_SAID, what)
                where = f"on process {self.rank} of {self.size} alone, which share every fit"
                say(f"\nfl-lightning: error: {said} ({where}); {self.advice()}")
                give_up()
            time.sleep(PERIOD / 10)
        if self.store.check([_SAID]):
            give_up()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def run(self) -> None:
        """Say and look, once a second."""
        threading.Thread(target=self._see_the_store, daemon=True, name="watch-store").start()
        try:
            self._look()
        except Exception:  # the store is in the main process: torch raises several types when it is gone
            if not self._stopped.wait(3 * PERIOD):  # the main process may have ended in good order
                self._end("worker 0 is gone", lost=0)

    def _look(self) -> None:
        self._who = [json.loads(self.store.get(f"who/{rank}")) for rank in range(self.size)]
        heard: dict[int, bytes] = {}
        since = dict.fromkeys(range(self.size), self._time)
        while not self._stopped.wait(PERIOD):
            if os.getppid() != self.parent:
                self._end("the process that started the workers is gone")
            self._say()
            beats = [self.store.get(f"beat/{rank}") for rank in range(self.size)]
            self._looked = now = self._time
            said = [tuple(map(int, beat.split())) for beat in beats]
            self._told = {rank: (round, done) for rank, (_, round, done) in enumerate(said)}
            for rank, beat in enumerate(beats):
                if heard.get(rank) != beat:
                    heard[rank], since[rank] = beat, now
                elif rank != self.rank and now - since[rank] > self.limit:
                    self._lose(rank)

    def _see_the_store(self) -> None:
        """Tick; and the store is in the main process: where that one is stopped, a look never returns."""
        while not self._stopped.wait(PERIOD):
            self._time += PERIOD
            if self._time - self._looked > self.limit:
                self._lose(0)

    def _say(self) -> None:
        computed = time.clock_gettime(self.clock) if self.clock is not None else time.monotonic()
        if self._waiting or computed > self._computed:
            self._beat += 1
            round, done = self._done
            self.store.set(f"beat/{self.rank}", f"{self._beat} {round} {done}")
        self._computed = computed

    def _lose(self, rank: int) -> None:
        where = ""
        if self._who:
            pid, host = self._who[rank]["pid"], self._who[rank]["host"]
            where = f" (process {pid} on {host})"
            if self._who[rank]["machine"] == this_machine():  # another one may have the same name
                with suppress(OSError):
                    os.kill(pid, _END)  # it may be stopped, and deaf to anything milder
        self._end(f"worker {rank} of {self.size}{where} gave no sign of life for {self.limit:.0f} s", lost=rank)

    def _end(self, what: str, lost: int | None = None) -> None:
        if self._speaks(lost):
            say(f"\nfl-lightning: error: {what}; {self.advice()}")
        else:
            time.sleep(PERIOD)  # let the one that speaks do so first
        give_up()

    def _speaks(self, lost: int | None) -> bool:
        """Whether this process is the first one that is left on its machine; other machines may be lost, too."""
        unknown = range(self.size) if is_tethered() else [self.rank]
        here = [rank for rank, who in enumerate(self._who) if who["machine"] == this_machine()] or unknown
        return self.rank == min((rank for rank in here if rank != lost), default=self.rank)


def give_up() -> NoReturn:
    """End this process of a run that cannot go on, once the reason was said, and at once: others may wait for it.

    What torchrun and SLURM started ends by the exit code of a lost worker, 1, for nobody else will.
    """
    os._exit(LOST if is_tethered() else 1)


@contextmanager
def watched(limit: float, advice: Callable[[], str]) -> Iterator[Watch | None]:
    """Watch the other processes for the length of a run, where there are any; all leave it together."""
    if not has_others():
        yield None
        return
    with together():
        watch = Watch(limit, advice)
    Waiting.context = watch.waiting
    watch.start()
    try:
        yield watch
        gather(None)
    finally:
        Waiting.context = nullcontext
        watch.stop()
        watch.join(2 * PERIOD)  # a thread must not be in the middle of a look when the interpreter ends
