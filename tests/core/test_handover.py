"""What a method may do with what it hears, and with what it sends, without harm to other clients."""

import pytest
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.server import Server
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.sickness import ClientError
from fl_lightning.methods.fedavg import FedAvg


class Marks(FedAvg):
    """Sends its number, and notes what the clients hear: ``heard`` by round and client."""

    def __init__(self, model):
        super().__init__(model)
        self.heard = {}

    def setup(self):
        self.register_buffer("mark", torch.zeros(2))

    def receive(self, message, data):
        self.heard[self.facts.round, data.client] = {
            **{name: tensor.clone() for name, tensor in message.weights.items()},
            **{name: value.clone() for name, value in message.artifacts.items()},
        }
        super().receive(message, data)
        self.take(message)

    def take(self, message):
        """Keep what is heard."""

    def send(self, data):
        message = super().send(data)
        message.artifacts["mark"] = torch.full((2,), data.client + 1.0)
        return message


class SetsABuffer(Marks):
    def take(self, message):
        if "mark" in message.artifacts:
            self.mark = message.artifacts["mark"]

    def on_fit_end(self):
        self.mark = self.mark + self.facts.client


class SetsWeights(Marks):
    def take(self, message):
        for name, parameter in self.named_parameters():
            if name in message.weights:
                parameter.data = message.weights[name]


class TakesOut(Marks):
    def take(self, message):
        message.artifacts.clear()
        message.weights.clear()


@pytest.mark.parametrize("kind", [SetsABuffer, SetsWeights, TakesOut])
def test_every_client_hears_what_the_server_said(kind, mlp, set_up_federation):
    method = kind(mlp())
    set_up_federation(lambda: method, rounds=2).run()
    for (_, client), heard in method.heard.items():
        first = method.heard[_, 0]
        assert heard.keys() == first.keys(), client
        assert all(torch.equal(value, first[name]) for name, value in heard.items()), client


class ChangesIt(Marks):
    def take(self, message):
        self.found = message.artifacts.get("mark", torch.zeros(2))

    def on_fit_end(self):
        self.found *= 2


class ChangesItsData(ChangesIt):
    """A write that torch does not count."""

    def on_fit_end(self):
        self.found.data += 2


@pytest.mark.parametrize("kind", [ChangesIt, ChangesItsData])
def test_change_of_what_was_received_is_said(kind, mlp, set_up_federation):
    rule = "round 2, client 0, send: changes the artifact mark that it received in place, and others hear it, too"
    with pytest.raises(ClientError, match=rule):
        set_up_federation(lambda: kind(mlp()), rounds=2).run()


class Keeps(Server):
    sees_messages = True

    def open_round(self):
        super().open_round()
        self.kept = {}

    def see(self, client, message):
        self.kept[client] = message
        return message

    def close_round(self):
        self.seen = {client: message.artifacts["mark"].tolist() for client, message in self.kept.items()}
        super().close_round()


class SendsItsOwn(Marks):
    """Buffers and parameters as they stand, and what has a graph."""

    def on_fit_end(self):
        self.mark.fill_(self.facts.client + 1)

    def send(self, data):
        artifacts = {"mark": self.mark, "embedding": self.model.embed(next(iter(data.batches()))[0]).mean(0)}
        return Message(dict(self.named_parameters()), artifacts, data.num_train)

    def make_server(self, initial, facts):
        return Keeps(initial)


def test_server_that_keeps_messages_finds_each_clients_own(mlp, set_up_federation):
    loop = set_up_federation(lambda: SendsItsOwn(mlp()), rounds=1)
    loop.run()
    server = loop.exchange.server
    assert server.seen == {client: [client + 1.0] * 2 for client in range(4)}
    assert not any(
        tensor.requires_grad for tensor in (*server.message.weights.values(), server.message.artifacts["embedding"])
    )


class SendsOneCopy(FedAvg):
    """Weights from memory of its own, which serves all clients."""

    kept = None

    def send(self, data):
        message = super().send(data)
        self.kept = self.kept or message.weights
        for name, tensor in message.weights.items():
            self.kept[name].copy_(tensor)
        return Message(dict(self.kept), {}, data.num_train)


def test_neighbours_hear_what_each_has_sent_from_memory_that_serves_all(mlp, set_up_federation):
    known, own = (
        set_up_federation(lambda kind=kind: kind(mlp()), rounds=2, exchange=Ring()).run()
        for kind in (FedAvg, SendsOneCopy)
    )
    assert own == known


class Stale(Marks):
    """Hears nothing in every other round, and takes rows one by one."""

    def setup(self):
        self.register_buffer("mark", torch.full((2,), 5.0), persistent=False)

    def take(self, message):
        self.found = {**getattr(self, "found", {}), (self.facts.round, self.facts.client): self.mark.tolist()}
        self.mark[0] = self.facts.client


def test_buffer_that_a_receive_leaves_is_not_another_clients(mlp, set_up_federation):
    method = Stale(mlp())
    set_up_federation(lambda: method, rounds=2).run()
    assert set(map(tuple, method.found.values())) == {(5.0, 5.0)}


def gives(value):
    class Gives(FedAvg):
        def send(self, data):
            message = super().send(data)
            return value(message, data)

    return Gives


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (lambda message, data: message.weights, r"Gives\.send\(\) gives dict, and must give a Message"),
        (lambda message, data: Message({}, {"a": 1.5}, data.num_train), "artifact a is float: send a tensor"),
        (
            lambda message, data: Message({}, {"a": ClassMeans(torch.ones(2, 3), torch.ones(2))}, data.num_train),
            "artifact a: a ClassMeans counts samples in whole numbers",
        ),
        (lambda message, data: Message({"model": 1.5}, {}, data.num_train), "weight model is float, no tensor"),
        (lambda message, data: Message(message.weights), r"Gives\.send\(\) gives no num_samples"),
    ],
)
def test_what_is_no_message_is_said(value, rule, mlp, set_up_federation):
    with pytest.raises(ClientError, match=rf"^round 1, client 0, send: {rule}"):
        set_up_federation(lambda: gives(value)(mlp()), rounds=1).run()
