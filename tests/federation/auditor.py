"""Counts for itself what an undisturbed run sends, and says what does not hold."""

import math

import torch

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.exchange import Hop
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Peers


class Auditor(FederationCallback):
    """Looks at what an exchange must not change, and takes down what the tables of a run must say."""

    def __init__(self) -> None:
        self.rows, self.wrong, self.clients, self.hops = [], [], [], []

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

    def on_round_end(self, loop, row) -> None:
        self.rows.append({name: value for name, value in row.items() if not name.startswith("seconds")})
        exchange, round = loop.exchange, row["round"]
        self.expect(sorted(self.posted) == loop.participants, f"round {round}: who posted is not who takes part")
        self.expect(row["participants"] == len(self.posted), f"round {round}: the number of participants")
        for unit in ("params", "bytes"):
            hops = sum(getattr(hop, f"num_{unit}") for hop in exchange.hops)
            own = sum(getattr(message.size, f"num_{unit}") for message in self.posted.values())
            sent = hops if exchange.between_clients else own
            self.expect(row[f"uplink_{unit}"] == sent, f"round {round}: {row[f'uplink_{unit}']} {unit} up, sent {sent}")
        if isinstance(exchange, Peers):
            self._look_at_balance(exchange, round)
        self._take_down(loop)

    def _look_at_balance(self, exchange, round) -> None:
        """What was sent and not yet heard is waiting."""
        up, down = (sum(row[f"{way}_params"] for row in self.rows) for way in ("uplink", "downlink"))
        sizes = [*(arrival.size for arrival in exchange._arrived.values()), *exchange._unheard.values()]
        waiting = 0 if exchange.in_turn else sum(size.num_params for size in sizes)
        self.expect(up - down == waiting, f"round {round}: {up} values up, {down} down, {waiting} waiting")

    def _take_down(self, loop) -> None:
        """The rows that the round must have in the tables of clients and hops."""
        failed, skips, hostile = loop.calendar.missing(loop.round), loop.ledger.skips, loop.ledger.hostile
        for client in range(loop.num_clients):
            row = {"round": loop.round, "client": client, "participated": int(client in self.posted)}
            row |= {"failed": int(client in failed), "num_train": 5 + 3 * client, "num_test": 0}
            row |= {"skipped": int(client in loop.ward.skipped)} if skips else {}
            row |= {"attacker": int(client in hostile)} if hostile else {}
            self.clients.append({**row, "loss": float(loop.board.losses[client]) if client in self.posted else None})
        names = ("round", *Hop._fields)
        self.hops += [dict(zip(names, (loop.round, *hop), strict=True)) for hop in loop.exchange.hops]

    def compare_tables(self, schedule, tables) -> None:
        """Every round is written down once, and as it was.

        Args:
            schedule: what was played.
            tables: a file's name -> its rows, of the disturbed run.
        """
        every = list(range(1, schedule.rounds + 1))
        self.expect([row["round"] for row in self.rows] == every, "rounds of the loop")
        rounds = [row["round"] for row in tables["metrics.csv"]]
        self.expect(rounds == every, f"rounds of metrics.csv: {rounds}")
        for row, own in zip(tables["metrics.csv"], self.rows, strict=False):
            different = [name for name, value in own.items() if row.get(name) != value]
            self.expect(not different, f"round {own['round']} of metrics.csv: other {', '.join(different)}")
        self.expect(tables["clients.csv"] == self.clients, "rows of clients.csv")
        self.expect(tables.get("topology.csv", []) == self.hops, "rows of topology.csv")
