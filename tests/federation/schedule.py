"""What happens in one simulated federation; all of it follows from a seed (`simulator.py` plays it)."""

import random
from typing import NamedTuple

from fl_lightning.core.centre_rules import CentredClipping, GeometricMedian, NormClipping
from fl_lightning.core.coordinate_rules import CoordinateMedian, TrimmedMean
from fl_lightning.core.selection_rules import Bulyan, Krum
from fl_lightning.core.server_optimizer import ServerAdagrad, ServerAdam, ServerMomentum, ServerYogi
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.checkpoint import CheckpointPolicy
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import Quantize, TopK
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.settings import EvaluationPolicy, Federation, Newcomers

NO_EVALUATION = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
METHODS = {"FedAvg": 4, "FedPer": 3, "DFedPGP": 3, "Means": 3, "SCAFFOLD": 1, "Local": 1}
"""Name -> how often it is drawn; `Means` is the simulator's own."""
EXCHANGES = {"Star": Star, "Ring": Ring, "DirectedGraph": DirectedGraph, "RandomPeers": RandomPeers}
FILTERS = {
    "quantize": lambda: [Quantize(bits=8)],
    "down": lambda: [Quantize(bits=16, ways="down")],
    "fed back": lambda: [Quantize(bits=8, error_feedback=True)],
    "topk": lambda: [TopK(share=0.4)],
    "both": lambda: [TopK(share=0.4), Quantize(bits=16)],
    "noise at the server": lambda: [ClipAndNoise(1.0, 0.5)],
    "noise at the client": lambda: [ClipAndNoise(1.0, 0.5, where="client")],
}
OPTIMIZERS = {"momentum": ServerMomentum, "adagrad": ServerAdagrad, "adam": ServerAdam, "yogi": ServerYogi}
AGGREGATORS = {  # with the participants that they need
    "median": (CoordinateMedian, 3),
    "trimmed": (lambda: TrimmedMean(0.2), 3),
    "krum": (lambda: Krum(0), 3),
    "multi-krum": (lambda: Krum(1, None), 5),
    "bulyan": (lambda: Bulyan(0), 3),
    "norm": (lambda: NormClipping(0.5), 1),
    "geometric": (lambda: GeometricMedian(iterations=4), 1),
    "centred": (lambda: CentredClipping(0.5), 1),
}
ATTACKS = ("noise", "sign_flip", "scale", "label_flip", "same_value", "inner_product")
CHECKPOINTS = ((1, None), (1, None), (2, None), (0, 1.0), (3, 0.6), (0, 0.3))
"""Rounds and seconds between two; the simulated clock gains a quarter of a second whenever it is looked at."""
ENDS = ("stop", "kill", "file", "error")
WORKERS = (1, 1, 2, 2, 3)
DAMAGES = ("", "", "", "newest", "state", "journal", "tables")


class Part(NamedTuple):
    """A stretch of the disturbed run.

    Args:
        workers: how many share its clients out.
        last: the round in which it ends.
        how: ``stop``: asked to after it; ``kill``: in the middle of it; ``file``: before a file takes its place;
            ``error``: a client raises one; ``end``: the run is over.
        share: where in the round, in [0, 1).
        older: whether it goes on from an older checkpoint than the newest.
        damage: what befalls the folder before: the newest checkpoint, a state that it names, the journal, the tables.
    """

    workers: int
    last: int
    how: str
    share: float
    older: bool = False
    damage: str = ""


class Schedule:
    """What happens in one federation.

    Args:
        seed: all follows from it.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.real_files = rng.random() < 0.1
        """Whether files are torch's own archives; otherwise a plain pickle, many times faster, is sealed."""
        large = rng.random() < 0.25
        self.clients = rng.choice((3, 4, 5, 6) if large else (2, 3, 3))
        self.rounds = rng.choice((3, 4, 5) if large else (2, 2, 3))
        self.method = rng.choices(list(METHODS), list(METHODS.values()))[0]
        self.exchange, self.exchange_options = self._draw_exchange(rng)
        self.newcomers = rng.choice([0, 0, 1]) if self.clients > 2 else 0
        self.participation = rng.choice([1.0, 1.0, 0.7, 0.4])
        self._draw_what_servers_do(rng)
        self.options = {
            "rounds": self.rounds,
            "participation": self.participation,
            "sampling": rng.choice(["fixed", "poisson"]),
            "on_client_error": rng.choice(["stop", "stop", "skip"]),
            "pool": rng.choice(["memory", "memory", "disk"]),
            "init": rng.choice(["common", "common", "own"]),
        }
        self.failures = self._draw_failures(rng)
        self.joins_after = rng.randint(1, self.rounds - 1) if self.newcomers else 0
        self.checkpoint = (*rng.choice(CHECKPOINTS), rng.choice([1, 2]))
        self.attack = self._draw_attack(rng)
        self.sick = self._draw_sick(rng) if self.options["on_client_error"] == "skip" else {}
        """(round, client) -> what is wrong with it."""
        self.parts = self._draw_parts(rng, 3 if large else 1)
        """Of the disturbed run."""

    def _draw_exchange(self, rng):
        degree, redraw = rng.randint(1, 3), rng.random() < 0.6
        ring = list(range(self.clients))
        edges = [[a, b] for a, b in zip(ring, [*ring[1:], 0], strict=True)]
        edges += [[a, b] for a, b in [rng.sample(ring, 2)] if [a, b] not in edges]
        drawn = rng.choice([
            ("Star", {}),
            ("Star", {}),
            ("Star", {}),
            ("Ring", {"schedule": "parallel", "directions": rng.choice(["one", "both"])}),
            ("Ring", {"schedule": "sequential"}),
            ("DirectedGraph", {"degree": degree, "redraw": redraw}),
            ("DirectedGraph", {"degree": degree, "redraw": redraw, "mixing": "uniform"}),
            ("DirectedGraph", {"edges": edges, "mixing": rng.choice(["push_sum", "uniform"])}),
            ("RandomPeers", {"degree": degree, "redraw": redraw}),
        ])  # fmt: skip
        return ("Star", {}) if self.method == "SCAFFOLD" else drawn

    def _draw_what_servers_do(self, rng):
        """Wire, server optimizer and aggregator, as far as they go together."""
        star, silent = self.exchange == "Star", self.method == "Local"
        noise = ["noise at the client"] if self.method != "SCAFFOLD" else []
        if star and noise:
            noise.append("noise at the server")
        filters = ["", "", "quantize", "fed back", *noise] + (["down", "topk", "both"] if star else [])
        self.wire = "" if silent else rng.choice(filters)
        wanted = rng.choices(["", *OPTIMIZERS], (6, 1, 1, 1, 1))[0]
        self.optimizer = wanted if star and not silent else ""
        present = max(1, int(self.participation * (self.clients - self.newcomers) + 1e-9))
        rules = [name for name, (_, least) in AGGREGATORS.items() if least <= present]
        guarded = star and not silent and "server" not in self.wire and rng.random() < 0.4
        self.aggregator = rng.choice(rules) if guarded else ""

    def _draw_failures(self, rng):
        kind = rng.choice(["", "", "probability", "schedule", "clients"])
        if kind == "probability":
            return {"probability": rng.choice([0.2, 0.5])}
        if kind == "schedule":
            keys = ("1", f"2-{self.rounds}")
            return {"schedule": {key: rng.sample(range(self.clients), rng.randint(1, self.clients)) for key in keys}}
        return {"clients": [rng.randrange(self.clients)]} if kind == "clients" else {}

    def _draw_attack(self, rng):
        if self.method == "Local" or rng.random() < 0.7:
            return {}
        in_turn = self.exchange_options.get("schedule") == "sequential"
        kind = rng.choice(ATTACKS[:-1] if in_turn else ATTACKS)
        if rng.random() < 0.5 and self.clients - self.newcomers > 2:
            return {"kind": kind, "share": 0.3}
        return {"kind": kind, "clients": [rng.randrange(self.clients - self.newcomers)]}

    def _draw_sick(self, rng):
        kinds = ("raises", "nan", "huge", "loss")
        places = [(rng.randint(1, self.rounds), rng.randrange(self.clients)) for _ in range(rng.randint(1, 4))]
        return {place: rng.choice(kinds) for place in places}

    def _draw_parts(self, rng, most):
        parts, done = [], 0
        ends = ENDS if self.options["on_client_error"] == "stop" else ENDS[:-1]
        while done < self.rounds and len(parts) < most:
            last = rng.randint(done + 1, self.rounds)
            parts.append(Part(rng.choice(WORKERS), last, rng.choice(ends), rng.random(), *self._draw_start(rng)))
            done = last
        parts.append(Part(rng.choice(WORKERS), self.rounds, "end", 0.0, *self._draw_start(rng)))
        spoilt = [index for index, part in enumerate(parts) if part.damage in ("journal", "tables")]
        for index in spoilt[1:]:  # a kill may come before the other was made again
            parts[index] = parts[index]._replace(damage="")
        return parts

    def _draw_start(self, rng):
        return rng.random() < 0.2, rng.choice(DAMAGES)

    def settings(self, callbacks=(), on_disk=True) -> Federation:
        """A federation's settings, with an exchange, rules and filters of its own."""
        options = self.options if on_disk else {**self.options, "pool": "memory"}
        every, seconds, keep = self.checkpoint
        rule, _ = AGGREGATORS.get(self.aggregator, (lambda: None, 0))
        return Federation(
            **options,
            failures=Failures(**self.failures),
            newcomers=Newcomers(self.newcomers, self.joins_after),
            exchange=EXCHANGES[self.exchange](**self.exchange_options),
            wire=FILTERS[self.wire]() if self.wire else None,
            server_optimizer=OPTIMIZERS[self.optimizer]() if self.optimizer else None,
            aggregator=rule(),
            attack=Attack(**self.attack) if self.attack else None,
            evaluate=NO_EVALUATION,
            checkpoint=CheckpointPolicy(every=every, seconds=seconds, keep=keep, models=False),
            callbacks=list(callbacks),
        )

    def __repr__(self) -> str:
        return f"Schedule({vars(self)})"
