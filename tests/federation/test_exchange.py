import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.federation.exchange import Exchange, Star
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto


@pytest.fixture
def star(mlp, make_client):
    exchange = Star()
    exchange.setup(make_client(FedAvg(mlp())), Facts(4))
    return exchange


def like(message, value, num_samples):
    return Message({name: torch.full_like(w, value) for name, w in message.weights.items()}, {}, num_samples)


def test_everybody_first_hears_the_initial_weights(star, mlp, make_client):
    template = make_client(FedAvg(mlp()))
    star.setup(template, Facts(4))
    for client in range(4):
        assert star.inbox(client) is star.global_message()
    for name, weight in star.inbox(2).weights.items():
        assert torch.equal(weight, template.entries[name])


def test_initial_message_does_not_follow_the_template(star, mlp, make_client):
    template = make_client(FedAvg(mlp()))
    star.setup(template, Facts(4))
    before = star.inbox(0).clone()
    with torch.no_grad():
        for parameter in template.parameters():
            parameter.add_(1)
    for name, weight in star.inbox(0).weights.items():
        assert torch.equal(weight, before.weights[name])


def test_star_averages_by_samples_over_those_who_posted(star):
    """(1 · 30 + 5 · 10) / 40 = 2."""
    first = star.inbox(0)
    star.open(1, [1, 3])
    star.post(1, like(first, 1.0, 30))
    star.post(3, like(first, 5.0, 10))
    assert star.inbox(0) is first  # until the round is closed
    star.close()
    for client in range(4):
        assert all((weight == 2.0).all() for weight in star.inbox(client).weights.values())
    assert star.inbox(0).num_samples == 40


def test_posts_of_one_round_do_not_count_in_the_next(star):
    first = star.inbox(0)
    for round, value in ((1, 1.0), (2, 4.0)):
        star.open(round, [0])
        star.post(0, like(first, value, 7))
        star.close()
    assert all((weight == 4.0).all() for weight in star.inbox(1).weights.values())


def test_star_keeps_its_message_when_nobody_posts(star, assert_identical):
    before = star.inbox(0).state_dict()
    star.open(1, [])
    star.close()
    assert_identical(star.inbox(0).state_dict()["weights"], before["weights"])


def test_a_server_is_told_who_was_left_out_of_its_round(star):
    star.open(1, [0, 1, 2])
    star.withdraw([1])
    assert star.server.facts.participants == (0, 2)


def test_star_state_round_trips_through_a_file(mlp, make_client, tmp_path, assert_identical):
    star = Star()
    star.setup(make_client(FedProto(mlp())), Facts(2))
    star.open(1, [0, 1])
    star.post(0, Message({}, {"prototypes": ClassMeans(torch.ones(4, 5), torch.tensor([1, 0, 2, 0]))}, 3))
    star.close()
    torch.save(star.state_dict(), tmp_path / "state")
    other = Star()
    other.setup(make_client(FedProto(mlp())), Facts(2))
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_identical(other.state_dict(), star.state_dict())
    assert other.inbox(1).artifacts["prototypes"].valid.tolist() == [True, False, True, False]


def test_exchange_of_your_own_has_no_global_message_unless_it_says_so(mlp, run_federation):
    """Everybody hears what the client before it sent: the loop needs no more than the five calls."""

    class Neighbour(Exchange):
        def setup(self, template, facts):
            self.num_clients, self.sent = facts.num_clients, {}

        def inbox(self, client):
            return self.sent.get((client - 1) % self.num_clients, Message())

        def open(self, round, participants):
            self.posted = {}

        def post(self, client, message):
            self.posted[client] = message

        def close(self):
            self.sent.update(self.posted)

        def state_dict(self):
            return {"sent": {client: message.state_dict() for client, message in self.sent.items()}}

        def load_state_dict(self, state):
            self.sent = {client: Message.from_state_dict(own) for client, own in state["sent"].items()}

    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, exchange=Neighbour())
    diary = loop.diary
    assert diary.received[1, 2].num_params == 0
    for client in range(4):
        sent = diary.sent[1, (client - 1) % 4]
        for name, weight in diary.received[2, client].weights.items():
            assert torch.equal(weight, sent.weights[name])
    assert loop.diary.rows[-1]["Server-T"] is None
