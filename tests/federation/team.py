"""Workers within one process: threads of which one runs at a time, telling each other as much as processes would."""

import itertools
import pickle
import threading
from collections import defaultdict, deque
from queue import SimpleQueue

from fl_lightning.federation import transport
from fl_lightning.federation.workers import Workers


class Killed(BaseException):
    """The process is gone, in the middle of whatever it did."""


class Team:
    """Workers as threads, of which one runs at a time: it hands over where it waits for another's message.

    Args:
        size: how many.
        ticks: seconds that the clock gains at every look at it.
        renames: before which file's renaming (1-based, of all workers) the run is killed; 0 for none.
    """

    present = threading.local()
    helpers: list[SimpleQueue] = []  # noqa: RUF012 - of all teams: threads take longer to start than a round takes

    def __init__(self, size: int, ticks: float = 0.25, renames: int = 0) -> None:
        self.size = size
        self.boxes = defaultdict(deque)
        self.failure: BaseException | None = None
        self.clock = itertools.count(0.0, ticks)
        self.renames = renames
        self._gates = [_closed() for _ in range(size)]
        self._waits = {}  # rank -> whom it waits for; None for nobody, before it begins
        self._over = _closed()

    @classmethod
    def here(cls):
        """The present worker's team and rank."""
        return cls.present.team, cls.present.rank

    def run(self, work) -> list:
        """Let every worker do `work(rank)`; returns what they return, by rank, or raises the first one's exception."""
        results = [None] * self.size
        self._left = set(range(self.size))
        self._waits = dict.fromkeys(range(1, self.size))

        def one(rank):
            Team.present.team, Team.present.rank = self, rank
            if rank > 0:
                self._gates[rank].acquire()
            try:
                results[rank] = work(rank)
            except BaseException as error:
                self.failure = self.failure or error
            self._left.discard(rank)
            self._hand_over(rank) if self._left else self._over.release()

        while len(Team.helpers) < self.size - 1:
            Team.helpers.append(SimpleQueue())
            threading.Thread(target=_serve, args=(Team.helpers[-1],), daemon=True).start()
        for rank in range(1, self.size):
            Team.helpers[rank - 1].put((one, rank))
        one(0)
        self._over.acquire()
        if self.failure is not None:
            raise self.failure
        return results

    def _hand_over(self, rank) -> None:
        """Let the next worker run that can: who has not begun, has got what it waits for, or must hear of a failure."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if other in self._waits and (self.failure or self._waits[other] is None or self._ready(other)):
                del self._waits[other]
                self._gates[other].release()
                return
        self.failure = RuntimeError(f"all workers wait for each other: {self._waits}")
        self._hand_over(rank)

    def _ready(self, rank) -> bool:
        return bool(self.boxes[self._waits[rank], rank])

    def put(self, source, target, value) -> None:
        self.boxes[source, target].append(value)

    def take(self, source, target):
        if not self.boxes[source, target]:
            self._waits[target] = source
            self._hand_over(target)
            self._gates[target].acquire()
        if self.failure is not None:
            raise Killed
        return self.boxes[source, target].popleft()

    def rename(self) -> None:
        """A file is about to take its place."""
        self.renames -= 1
        if self.renames == 0:
            raise Killed


def _closed():
    lock = threading.Lock()
    lock.acquire()
    return lock


def _serve(queue) -> None:
    while True:
        work, rank = queue.get()
        work(rank)


# --- what takes the place of `torch.distributed` ----------------------------------------------------------------------


def packed(state) -> bytes:
    """A nested state as it travels, and is written: one small pickle, and one buffer."""
    skeleton, tensors, _ = transport.pack(state)
    return pickle.dumps((skeleton, transport._buffer(tensors, transport.torch.device("cpu")).numpy().tobytes()))


def unpacked(file):
    """The inverse of `packed`, from a file."""
    skeleton, content = pickle.load(file)
    buffer = transport.torch.frombuffer(bytearray(content or b"\0"), dtype=transport.torch.uint8)
    return transport.unpack(skeleton, buffer)


def send(state, target, device):
    team, rank = Team.here()
    skeleton, tensors, _ = transport.pack(state)
    team.put(rank, target, (pickle.dumps(skeleton), transport._buffer(tensors, device)))


def receive(source, device):
    team, rank = Team.here()
    skeleton, buffer = team.take(source, rank)
    return transport.unpack(pickle.loads(skeleton), buffer)


def broadcast(state, device):
    team, rank = Team.here()
    if rank != 0:
        return receive(0, device)
    for target in range(1, team.size):
        send(state, target, device)
    return state


def tell(value):
    team, rank = Team.here()
    if rank != 0:
        return pickle.loads(team.take(0, rank))
    for target in range(1, team.size):
        team.put(0, target, pickle.dumps(value))
    return value


def gather(value):
    team, rank = Team.here()
    mine = pickle.dumps(value)
    for target in range(team.size):
        team.put(rank, target, mine)
    return [pickle.loads(team.take(source, rank)) for source in range(team.size)]


def present(spread=True):
    team, rank = Team.here()
    return Workers(rank, team.size, rank == 0)


TRANSPORT = {"send": send, "receive": receive, "broadcast": broadcast, "tell": tell, "gather": gather}
