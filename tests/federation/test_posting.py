"""When messages reach the server, and in which order, however clients are fitted."""

from dataclasses import replace

import pytest
import torch

from fl_lightning.core.server import Server
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.sickness import ClientError
from fl_lightning.methods.fedavg import FedAvg

ORDERS = {
    "one by one": {},
    "the last first": {"order": lambda clients: clients[::-1]},
    "stacked": {"cohort": 2},
    "recorded": {"graph": "auto"},
}
"""Of which all but the first fit clients in another order than theirs."""


class Drifting(Server):
    """What goes out moves a third of the way to every model as it is seen (FedAsync, arXiv:1903.03934)."""

    sees_messages = True

    def setup(self, facts):
        super().setup(facts)
        self.seen = []

    def see(self, client, message):
        self.seen.append((self.round, client))
        moved = {name: torch.lerp(self.message.weights[name], own, 1 / 3) for name, own in message.weights.items()}
        self.message = replace(self.message, weights=moved)


HEARD = []
"""What clients hear, with the round: no attribute of the method, by which its clients would differ."""


class FedAsync(FedAvg):
    def receive(self, message, data):
        HEARD.append((self.facts.round, message.weights["model.head.bias"].clone()))
        super().receive(message, data)

    def make_server(self, initial, facts):
        return Drifting(initial)


@pytest.fixture
def drifted(mlp, set_up_federation, make_data):
    def run(order=list, **options):
        HEARD.clear()
        data = make_data([(2, 2, 2, 2), (6, 6, 6, 6), (4, 4, 4, 4), (5, 5, 5, 5)])
        loop = set_up_federation(lambda: FedAsync(mlp()), data=data, trainer={"precision": "64-true"}, **options)
        loop.fit_order = order
        loop.run()
        return loop.exchange.server

    return run


@pytest.mark.parametrize("kind", ORDERS)
def test_server_sees_messages_in_the_order_of_clients_once_all_have_sent(drifted, kind):
    server = drifted(**ORDERS[kind])
    assert server.seen == [(round, client) for round in (1, 2, 3) for client in range(4)]
    for number in (1, 2, 3):
        first, *others = (weights for round, weights in HEARD if round == number)
        assert len(others) == 3
        assert all(torch.equal(first, other) for other in others)
    expected = drifted().message.weights
    for name, own in server.message.weights.items():
        torch.testing.assert_close(own, expected[name], rtol=1e-12, atol=1e-12)


def test_messages_that_meet_in_sums_wait_for_nobody(mlp, set_up_federation, monkeypatch):
    loop = set_up_federation(lambda: FedAvg(mlp()))
    posted, fitted = [], []
    post, run = Star.post, loop.runner.run
    monkeypatch.setattr(
        Star, "post", lambda self, client, message: posted.append(client) or post(self, client, message)
    )
    monkeypatch.setattr(loop.runner, "run", lambda *given: fitted.append(list(posted)) or run(*given))
    loop.advance()
    assert fitted == [list(range(count)) for count in range(4)]


def test_a_round_that_broke_off_leaves_nothing_to_be_posted(mlp, set_up_federation, monkeypatch):
    loop = set_up_federation(lambda: FedAsync(mlp()))
    run, well = loop.runner.run, 2

    def runs(visit, wire):
        if visit.job.client >= well:
            raise ClientError("sick")
        return run(visit, wire)

    monkeypatch.setattr(loop.runner, "run", runs)
    with pytest.raises(ClientError):
        loop.advance()
    loop.round, well = 1, 0
    monkeypatch.setattr(loop.ward, "policy", "skip")
    loop.advance()
    assert loop.exchange.server.seen == []
