"""What somebody's own code at the server draws from the global streams: it depends on the seed and the round alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.core.aggregation import ArtifactRule
from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.mixing import MeanMixer
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.graphs import Ring
from fl_lightning.federation.peers import Peers
from fl_lightning.federation.wire import WireFilter
from fl_lightning.methods.fedavg import FedAvg


class RandomHalf(Aggregator):
    """The mean of a random half of the clients."""

    def selected(self, messages):
        return sorted(np.random.permutation(len(messages))[: max(1, len(messages) // 2)].tolist())

    def combine(self, vectors):
        return vectors.each(lambda block: block.mean(0))


class Noisy(ServerOptimizer):
    """Langevin's."""

    def __init__(self, lr=1.0):
        super().__init__(lr)

    def direction(self, name, delta):
        return delta + 0.01 * torch.randn_like(delta)


class NoiseDown(WireFilter):
    """Noise on what clients are sent."""

    ways = "down"

    def apply(self, packet, memory):
        def noisy(own):
            return own.carrying(own.values + 0.01 * torch.randn_like(own.values))

        return replace(packet, weights={name: noisy(own) for name, own in packet.weights.items()})


class Picking(Server):
    """Forgets a part of the model in every round, and for every client another one."""

    def open_round(self):
        super().open_round()
        self.keeps = random.random()

    def message_for(self, client):
        message = super().message_for(client).clone()
        for tensor in message.weights.values():
            if tensor.is_floating_point():
                tensor *= torch.rand(()) < self.keeps
        return message

    def state_dict(self):
        return {**super().state_dict(), "keeps": getattr(self, "keeps", 0.0)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.keeps = state["keeps"]


class Picked(FedAvg):
    """FedAvg with such a server."""

    def make_server(self, initial, facts):
        return Picking(initial)


class Gossip(Peers):
    """Everybody hears one other, drawn."""

    def connect(self, round, live):
        rows = {}
        for client in live:
            sender = int(np.random.choice([other for other in live if other != client]))
            rows[client] = {sender: 0.5, client: 0.5}
        return rows

    def sponsors(self, round, client, there):
        return [random.choice(there)]


class NoisyStar(Star):
    """Noise on what everybody is sent."""

    def inbox(self, client):
        message = super().inbox(client).clone()
        for tensor in message.weights.values():
            if tensor.is_floating_point():
                tensor += 0.01 * torch.randn_like(tensor)
        return message


class DroppingMixer(MeanMixer):
    """Forgets some of what it hears."""

    def mix(self, own, neighbours, previous):
        return super().mix(own, [part for part in neighbours if torch.rand(()) < 0.5], previous)


class OneOf(ArtifactRule):
    """One client's value, drawn."""

    def __init__(self):
        self.values = []

    def add(self, value, num_samples):
        self.values.append(value)

    def result(self, previous):
        return self.values[int(torch.randint(len(self.values), ()))] if self.values else previous


class Shifts(FedAvg):
    """Sends a number that its server merges by such a rule, and starts from what it hears."""

    def receive(self, message, data):
        super().receive(message, data)
        if "shift" in message.artifacts:
            self.model.head.bias.data += message.artifacts["shift"].to(self.model.head.bias)

    def send(self, data):
        message = super().send(data)
        message.artifacts["shift"] = self.model.head.bias.detach().mean().reshape(1)
        return message

    def make_server(self, initial, facts):
        return Server(initial, rules={"shift": OneOf})


class Drops(FedAvg):
    """FedAvg whose clients mix by themselves."""

    def make_server(self, initial, facts):
        server = Server(initial)
        server.mixer = DroppingMixer
        return server


class FallsSick(FedAvg):
    """FedAvg of whose participants the first raises an error in round 2."""

    def local_step(self, step):
        if (step.round, self.facts.client) == (2, self.facts.participants[0]):
            raise ValueError("sick")
        super().local_step(step)


class Drawing(FederationCallback):
    """Leaves other streams behind after every fit and round, as another worker's last client does."""

    def on_client_fit_end(self, loop, report):
        torch.rand(7)
        np.random.rand(3)
        random.random()

    def on_round_end(self, loop, row):
        self.on_client_fit_end(loop, None)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"aggregator": RandomHalf()}, FedAvg),
        ({"server_optimizer": Noisy()}, FedAvg),
        ({"wire": [NoiseDown()]}, FedAvg),
        ({}, Picked),
        ({}, Shifts),
        ({"exchange": Gossip()}, FedAvg),
        ({"exchange": Gossip(), "on_client_error": "skip", "participation": 1.0}, FallsSick),
        ({"exchange": NoisyStar()}, FedAvg),
        ({"exchange": Ring()}, Drops),
    ],
    ids=[
        "a robust rule",
        "an optimizer",
        "a filter on the way down",
        "a server",
        "an artifact's rule",
        "an exchange of peers",
        "an exchange of peers of whom one falls sick",
        "an exchange with a server",
        "a mixer",
    ],
)
def test_draws_at_the_server_are_the_rounds_own(options, method, run_federation, outcome, assert_identical, mlp):
    """They were of what the last client of the main process had left: other workers, or a resumption, other numbers."""
    runs = [
        run_federation(lambda: method(mlp()), rounds=3, callbacks=own, **{"participation": 0.8, **options})
        for own in ([], [Drawing()])
    ]
    assert_identical(*map(outcome, runs))
