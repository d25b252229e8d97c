"""Federations without training: the real loop, exchanges, pool, checkpoints, messages around a fit that is arithmetic.

A schedule follows from its seed alone: who is there, joins and fails, how messages travel, when the run is stopped or
killed, and on how many workers it goes on. Workers are threads of which one runs at a time, and what they tell each
other is packed and pickled as between processes.
"""

import copy
import math
import pickle
import random
import shutil
import tempfile
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from fl_lightning.core.meter import LossMeter
from fl_lightning.core.server_optimizer import ServerAdam, ServerMomentum
from fl_lightning.errors import ConfigError
from fl_lightning.federation import loop as loops
from fl_lightning.federation import runner as runners
from fl_lightning.federation import transport
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import CheckpointPolicy
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import Quantize, TopK
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Peers, Ring
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.settings import EvaluationPolicy, Federation, Newcomers
from fl_lightning.federation.workers import Workers
from fl_lightning.methods.dfedpgp import DFedPGP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.local import Local
from fl_lightning.models.mlp import MLP
from fl_lightning.report.record import read_rows
from fl_lightning.seeding import seed_global_streams

CPU = torch.device("cpu")
MEMORY = Path("/dev/shm")
NO_EVALUATION = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
METHODS = {"FedAvg": FedAvg, "FedPer": FedPer, "DFedPGP": DFedPGP, "Local": Local}


class Killed(BaseException):
    """The process is gone, in the middle of a round."""


# --- what is random -------------------------------------------------------------------------------------------------


class Schedule:
    """What happens in one federation.

    Args:
        seed: all follows from it.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.clients = rng.randint(2, 6)
        self.rounds = rng.randint(2, 5)
        self.method = rng.choices(list(METHODS), (4, 3, 3, 1))[0]
        self.exchange, self.exchange_options = self._draw_exchange(rng)
        filters = ["", "quantize", "topk", "both"] if self.exchange == "Star" else ["", "quantize"]
        self.wire = rng.choice([*filters, ""])
        self.optimizer = rng.choices(["", "momentum", "adam"], (4, 1, 1))[0] if self.exchange == "Star" else ""
        if self.method == "Local":
            self.optimizer = self.wire = ""
        newcomers = rng.choice([0, 0, 1]) if self.clients > 2 else 0
        self.options = {
            "rounds": self.rounds,
            "participation": rng.choice([1.0, 1.0, 0.7, 0.4]),
            "failures": self._draw_failures(rng),
            "newcomers": (newcomers, rng.randint(1, self.rounds - 1) if newcomers else 0),
            "pool": rng.choice(["memory", "memory", "disk"]),
            "init": rng.choice(["common", "own"]),
            "checkpoint": (rng.choice([1, 1, 2]), rng.choice([1, 2])),
        }
        self.parts = []
        """Of the disturbed run: (workers, the round in which it ends, how: stop, kill, or end)."""
        done = 0
        while done < self.rounds:
            last = rng.randint(done + 1, self.rounds)
            self.parts.append((rng.randint(1, 3), last, rng.choice(["stop", "kill"]), rng.random()))
            done = last
        self.parts.append((rng.randint(1, 3), self.rounds, "end", 0.0))

    def _draw_exchange(self, rng):
        degree = rng.randint(1, 3)
        return rng.choice([
            ("Star", {}),
            ("Star", {}),
            ("Ring", {"schedule": "parallel", "directions": rng.choice(["one", "both"])}),
            ("Ring", {"schedule": "sequential"}),
            ("DirectedGraph", {"degree": degree, "redraw": rng.random() < 0.6}),
            ("DirectedGraph", {"degree": degree, "redraw": rng.random() < 0.6, "mixing": "uniform"}),
            ("RandomPeers", {"degree": degree, "redraw": rng.random() < 0.6}),
        ])  # fmt: skip

    def _draw_failures(self, rng):
        kind = rng.choice(["", "", "probability", "schedule", "clients"])
        if kind == "probability":
            return {"probability": rng.choice([0.2, 0.5])}
        if kind == "schedule":
            drawn = {str(r): rng.sample(range(self.clients), rng.randint(1, self.clients)) for r in (1, self.rounds)}
            return {"schedule": drawn}
        return {"clients": [rng.randrange(self.clients)]} if kind == "clients" else {}

    def settings(self, callbacks=(), on_disk=True) -> Federation:
        """A federation's settings, with an exchange and filters of its own."""
        options = self.options if on_disk else {**self.options, "pool": "memory"}
        options = dict(options)
        every, keep = options.pop("checkpoint")
        filters = {
            "quantize": [Quantize(bits=8)],
            "topk": [TopK(share=0.4)],
            "both": [TopK(share=0.4), Quantize(bits=16)],
        }
        exchanges = {"Star": Star, "Ring": Ring, "DirectedGraph": DirectedGraph, "RandomPeers": RandomPeers}
        return Federation(
            **{**options, "failures": Failures(**options["failures"]), "newcomers": Newcomers(*options["newcomers"])},
            exchange=exchanges[self.exchange](**self.exchange_options),
            wire=filters.get(self.wire),
            server_optimizer={"momentum": ServerMomentum, "adam": ServerAdam}.get(self.optimizer, lambda: None)(),
            evaluate=NO_EVALUATION,
            checkpoint=CheckpointPolicy(every=every, keep=keep, models=False),
            callbacks=list(callbacks),
        )

    def __repr__(self) -> str:
        return f"Schedule({ {name: value for name, value in vars(self).items()} })"


# --- a federation that does not train -------------------------------------------------------------------------------


class Arithmetic(runners.Runner):
    """A runner whose fit is a little arithmetic on all weights, with a draw from the streams of the fit."""

    def fit(self, module, data, round) -> None:
        seed_global_streams(self.seed, "fit", round, data.client)
        module.meter = LossMeter()
        with torch.no_grad():
            for place, parameter in enumerate(module.method.parameters()):
                step = (7 * place + 5 * round + 3 * data.client) % 16 / 16
                parameter.mul_(0.75).add_(torch.rand(parameter.shape), alpha=0.125).add_(step)


class Own:
    """A client's data, of which there is only a number."""

    held_classes = class_counts = torch.tensor([3, 4])

    def __init__(self, client: int) -> None:
        self.client, self.num_train, self.num_test = client, 5 + 3 * client, 0


class Numbers:
    """A federation's data, of which there are only numbers."""

    drop_last = local_test = False
    batch_size = 4
    partition_hash = content_hash = "none"
    server_test = np.array([], dtype=np.int64)
    arrays = SimpleNamespace(classes=("a", "b"))

    def __init__(self, num_clients: int) -> None:
        self.clients = [Own(client) for client in range(num_clients)]
        self.store = SimpleNamespace(serve=lambda device: None)

    def class_counts(self):
        return np.tile([3, 4], (len(self.clients), 1))


TRAINERS: list = []


def one_trainer(flags):
    """One Trainer for all runs; nothing is fitted with it."""
    if not TRAINERS:
        TRAINERS.append(ORIGINAL_TRAINER({"accelerator": "cpu"}))
    return TRAINERS[0]


ORIGINAL_TRAINER = runners.make_trainer


def set_up(schedule, callbacks, folder=None):
    """A loop on the present team of workers."""
    federation = loops.FederatedLoop(schedule.settings(callbacks, folder is not None))
    federation.setup(
        lambda _: METHODS[schedule.method](MLP((1, 1, 2), 2, (2,))),
        Numbers(schedule.clients),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule.seed,
        folder=folder,
    )
    return federation


# --- workers within one process -------------------------------------------------------------------------------------


class Team:
    """Workers as threads, of which one runs at a time: it hands over where it waits for another's message."""

    present = threading.local()

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.boxes = defaultdict(deque)
        self.failure: BaseException | None = None

    def run(self, work) -> list:
        """Let every worker do `work(rank)`; returns what they return, by rank, or raises the first one's exception."""
        results = [None] * self.size

        def one(rank):
            Team.present.team, Team.present.rank = self, rank
            with self.turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    self.failure = self.failure or error
                    self.turn.notify_all()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, self.size)]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def put(self, source, target, value) -> None:
        self.boxes[source, target].append(value)
        self.turn.notify_all()

    def take(self, source, target):
        self.turn.wait_for(lambda: self.boxes[source, target] or self.failure, timeout=60)
        if self.failure is not None or not self.boxes[source, target]:
            raise Killed
        return self.boxes[source, target].popleft()


def _team():
    return Team.present.team, Team.present.rank


def _packed(state):
    skeleton, tensors, _ = transport.pack(state)
    return pickle.dumps(skeleton), transport._buffer(tensors, CPU)


def _unpacked(packed):
    return transport.unpack(pickle.loads(packed[0]), packed[1])


def send(state, target, device):
    team, rank = _team()
    team.put(rank, target, _packed(state))


def receive(source, device):
    team, rank = _team()
    return _unpacked(team.take(source, rank))


def broadcast(state, device):
    team, rank = _team()
    if rank != 0:
        return receive(0, device)
    for target in range(1, team.size):
        send(state, target, device)
    return state


def gather(value):
    team, rank = _team()
    for target in range(team.size):
        team.put(rank, target, pickle.dumps(value))
    return [pickle.loads(team.take(source, rank)) for source in range(team.size)]


def present(spread=True):
    team, rank = _team()
    return Workers(rank, team.size, rank == 0)


@contextmanager
def simulated():
    """Let loops run on `Team` and do arithmetic, for the length of a block."""
    functions = {"send": send, "receive": receive, "broadcast": broadcast, "gather": gather}
    with (
        mock.patch.multiple(transport, **functions),
        mock.patch.object(Workers, "present", present),
        mock.patch.object(loops, "Runner", Arithmetic),
        mock.patch.object(runners, "make_trainer", one_trainer),
    ):
        yield


# --- what must hold -------------------------------------------------------------------------------------------------


class Auditor(FederationCallback):
    """Counts for itself what is sent in an undisturbed run, and looks at what an exchange must not change."""

    def __init__(self) -> None:
        self.rows, self.wrong = [], []

    def expect(self, holds, what) -> None:
        if not holds:
            self.wrong.append(what)

    def watch(self, loop) -> None:
        """Look at every message that is posted, and at the exchange before and after the end of a round."""
        self.posted = {}
        exchange = loop.exchange
        post, close = exchange.post, exchange.close

        def posted(client, message):
            self.posted[client] = message.clone()
            post(client, message)

        def closed():
            mass = dict(getattr(exchange, "mass", {}))
            close()
            self._look_at_mass(loop, mass)

        exchange.post, exchange.close = posted, closed

    def _look_at_mass(self, loop, before) -> None:
        """Push-sum and Metropolis-Hastings keep the sum over the clients of a round, each times its weight."""
        exchange, method = loop.exchange, loop.runner.modules[0].method
        pushes = isinstance(exchange, DirectedGraph) and exchange.pushes
        if pushes:
            total = math.fsum(exchange.mass.get(client, 1.0) for client in range(loop.num_clients))
            self.expect(abs(total - loop.num_clients) < 1e-9, f"round {exchange.round}: push-sum's mass is {total!r}")
        keeps = pushes or (isinstance(exchange, RandomPeers) and exchange.mixer.takes_shares)
        if not keeps or not self.posted or not method.shared:
            return
        after = exchange.mass if pushes else {}
        for name in next(iter(self.posted.values())).weights:
            sent = sum(before.get(c, 1.0) * m.weights[name].double() for c, m in self.posted.items())
            heard = [(c, exchange._arrived[c].message.weights[name].double()) for c in self.posted]
            got = sum(after.get(c, 1.0) * tensor for c, tensor in heard)
            self.expect(torch.allclose(sent, got, atol=1e-4), f"round {exchange.round}: the sum of {name} moved")

    def on_round_start(self, loop, round, participants) -> None:
        self.posted.clear()
        self.heard = [loop.exchange.downlink(client) for client in participants] if not loop.exchange.in_turn else None

    def on_round_end(self, loop, row) -> None:
        self.rows.append({name: value for name, value in row.items() if name != "seconds"})
        exchange, round = loop.exchange, row["round"]
        self.expect(sorted(self.posted) == loop.participants, f"round {round}: who posted is not who takes part")
        for unit in ("params", "bytes"):
            hops = sum(getattr(hop, f"num_{unit}") for hop in exchange.hops)
            own = sum(getattr(message.size, f"num_{unit}") for message in self.posted.values())
            sent = hops if exchange.between_clients else own
            self.expect(row[f"uplink_{unit}"] == sent, f"round {round}: {row[f'uplink_{unit}']} {unit} up, sent {sent}")
        if isinstance(exchange, Peers):
            self._look_at_balance(exchange, round)

    def _look_at_balance(self, exchange, round) -> None:
        """What was sent and not yet heard is waiting."""
        up, down = (sum(row[f"{way}_params"] for row in self.rows) for way in ("uplink", "downlink"))
        waiting = 0 if exchange.in_turn else sum(arrival.size.num_params for arrival in exchange._arrived.values())
        self.expect(up - down == waiting, f"round {round}: {up} values up, {down} down, {waiting} waiting")


class Ends(FederationCallback):
    """Stops a run after a round, or kills it in the middle of it."""

    def __init__(self, last, how, share) -> None:
        self.last, self.how, self.share = last, how, share

    def on_round_start(self, loop, round, participants) -> None:
        self.left = int(self.share * (len(participants) + 1))
        if self.how == "kill" and round == self.last and self.left == 0:
            raise Killed

    def on_client_fit_end(self, loop, report) -> None:
        self.left -= 1
        if self.how == "kill" and loop.round + 1 == self.last and self.left == 0:
            raise Killed

    def on_round_end(self, loop, row) -> None:
        if self.how == "kill" and row["round"] == self.last:
            raise Killed
        if self.how == "stop" and row["round"] == self.last:
            loop.stop()


def outcome(federations) -> dict:
    """All that a run leaves behind, from the loops of its workers."""
    main = federations[0]
    states = {}
    for rank, own in enumerate(federations):
        states |= {c: own.runner.pool.get(c) for c, holder in own.holders.items() if holder == rank}
    return {
        "exchange": copy.deepcopy(main.exchange.state_dict()),
        "clients": {c: dict(state or {}) for c, state in states.items()},
        "traffic": dict(main.traffic),
    }


def leaves(state, prefix=""):
    """Path -> value; tensors as their bits."""
    if isinstance(state, dict):
        return {n: v for key, value in state.items() for n, v in leaves(value, f"{prefix}/{key}").items()}
    if isinstance(state, torch.Tensor):
        return {prefix: (str(state.dtype), tuple(state.shape), state.contiguous().numpy().tobytes())}
    return {prefix: repr(state)}


def disturbed(schedule, folder):
    """The same federation, stopped and killed, on other numbers of workers; the loops of its last part."""
    federations = []
    for size, last, how, share in schedule.parts:

        def part(rank, last=last, how=how, share=share):
            recorder = Recorder(folder, {})
            federation = set_up(schedule, [recorder, Ends(last, how, share)], folder)
            newest = federation.checkpoints.find("auto")
            if newest is not None:
                federation.load_state_dict(federation.checkpoints.load(newest))
            federation.run()
            if rank == 0 and how == "stop":
                recorder.stop(federation)
            return federation

        try:
            federations = Team(size).run(part)
        except Killed:
            continue
    return federations


def check(seed: int) -> list[str]:
    """Run one schedule undisturbed and disturbed; returns what is wrong, nothing if nothing is.

    Args:
        seed: the schedule's.
    """
    schedule = Schedule(seed)
    folder = Path(tempfile.mkdtemp(prefix="schedule-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with simulated():
            return _check(schedule, folder)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(schedule, folder) -> list[str]:
    auditor = Auditor()

    def whole(rank):
        federation = set_up(schedule, [auditor])
        auditor.watch(federation)
        federation.run()
        return federation

    try:
        straight = outcome(Team(1).run(whole))
    except ConfigError:  # the method cannot do without its server, or a client hears too little
        return []
    federations = disturbed(schedule, folder)
    auditor.expect([row["round"] for row in auditor.rows] == list(range(1, schedule.rounds + 1)), "rounds of the loop")
    written = [dict(row) for row in read_rows(folder / "metrics.csv")]
    rounds = [row["round"] for row in written]
    auditor.expect(rounds == list(range(1, schedule.rounds + 1)), f"rounds of metrics.csv: {rounds}")
    for row, own in zip(written, auditor.rows, strict=False):
        same = all(row.get(name) == value for name, value in own.items())
        auditor.expect(same, f"round {own['round']} of metrics.csv is another one")
    pairs = [(row["round"], row["client"]) for row in read_rows(folder / "clients.csv")]
    every = [(round, client) for round in range(1, schedule.rounds + 1) for client in range(schedule.clients)]
    auditor.expect(pairs == every, "rows of clients.csv")
    here, there = leaves(outcome(federations)), leaves(straight)
    different = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
    auditor.expect(not different, f"another state: {', '.join(sorted(different)[:3])}")
    return auditor.wrong
