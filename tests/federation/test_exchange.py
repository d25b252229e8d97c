import pytest
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Exchange, Ring, Star
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto


@pytest.fixture
def star(mlp):
    exchange = Star()
    exchange.setup(FedAvg(mlp()), 4, seed=0)
    return exchange


def like(message, value, num_samples):
    return Message({name: torch.full_like(w, value) for name, w in message.weights.items()}, {}, num_samples)


def test_everybody_first_hears_the_initial_weights(star, mlp):
    template = FedAvg(mlp())
    star.setup(template, 4, seed=0)
    for client in range(4):
        assert star.inbox(client) is star.global_message()
    for name, weight in star.inbox(2).weights.items():
        assert torch.equal(weight, template.state_dict()[name])


def test_initial_message_does_not_follow_the_template(star, mlp):
    template = FedAvg(mlp())
    star.setup(template, 4, seed=0)
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


def test_star_state_round_trips_through_a_file(mlp, tmp_path, assert_identical):
    star = Star()
    star.setup(FedProto(mlp()), 2, seed=0)
    star.open(1, [0, 1])
    star.post(0, Message({}, {"prototypes": ClassMeans(torch.ones(4, 5), torch.tensor([1, 0, 2, 0]))}, 3))
    star.close()
    torch.save(star.state_dict(), tmp_path / "state")
    other = Star()
    other.setup(FedProto(mlp()), 2, seed=0)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_identical(other.state_dict(), star.state_dict())
    assert other.inbox(1).artifacts["prototypes"].valid.tolist() == [True, False, True, False]


def test_exchange_of_your_own_has_no_global_message_unless_it_says_so(mlp, run_federation):
    """Everybody hears what the client before it sent: the loop needs no more than the five calls."""

    class Neighbour(Exchange):
        def setup(self, template, num_clients, seed):
            self.num_clients, self.sent = num_clients, {}

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


# --- the ring ---------------------------------------------------------------------------------------------------------


def values(value):
    """A message of one number."""
    return Message({"w": torch.tensor([float(value)])}, {}, 1)


def ring(num_clients=4, **options):
    exchange = Ring(**options)
    exchange.setup(None, num_clients, seed=0)
    return exchange


def pass_round(exchange, sent, participants=None):
    """One round in which client m hears what it hears and then sends ``sent[m]``; what each has heard."""
    participants = list(sent) if participants is None else participants
    exchange.open(1, participants)
    heard = {}
    for client in participants:
        heard[client] = number(exchange.inbox(client))
        exchange.post(client, values(sent[client]))
    exchange.close()
    return heard


def number(message):
    return message.weights["w"].item() if message.weights else None


def test_ring_delivers_what_the_predecessor_finished_in_the_round_before():
    exchange = ring()
    assert pass_round(exchange, {0: 0, 1: 1, 2: 2, 3: 3}) == dict.fromkeys(range(4))
    assert pass_round(exchange, {0: 10, 1: 11, 2: 12, 3: 13}) == {0: 3, 1: 0, 2: 1, 3: 2}
    assert pass_round(exchange, {0: 20, 1: 21, 2: 22, 3: 23}) == {0: 13, 1: 10, 2: 11, 3: 12}


def test_sequential_ring_delivers_what_the_predecessor_has_just_finished():
    exchange = ring(schedule="sequential")
    assert pass_round(exchange, {0: 0, 1: 1, 2: 2, 3: 3}) == {0: None, 1: 0, 2: 1, 3: 2}
    assert pass_round(exchange, {0: 10, 1: 11, 2: 12, 3: 13}) == {0: 3, 1: 10, 2: 11, 3: 12}


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_ring_skips_who_did_not_finish_the_round_before(schedule):
    exchange = ring(schedule=schedule)
    pass_round(exchange, {0: 0, 1: 1, 3: 3})
    heard = pass_round(exchange, {0: 10, 1: 11, 3: 13})
    assert heard == ({0: 3, 1: 0, 3: 1} if schedule == "parallel" else {0: 3, 1: 10, 3: 11})
    assert number(exchange.inbox(2)) == 11  # who rested hears its nearest predecessor


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_ring_of_one_active_client_hears_nothing(schedule):
    exchange = ring(schedule=schedule)
    for _ in range(3):
        assert pass_round(exchange, {2: 5}) == {2: None}
    assert number(exchange.inbox(3)) == 5


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_ring_of_one_client_hears_nothing(schedule):
    exchange = ring(1, schedule=schedule)
    for _ in range(2):
        assert pass_round(exchange, {0: 1}) == {0: None}
    assert exchange.global_message() is None


def test_ring_of_two_clients_is_a_swap():
    exchange = ring(2)
    pass_round(exchange, {0: 0, 1: 1})
    assert pass_round(exchange, {0: 10, 1: 11}) == {0: 1, 1: 0}


def test_ring_keeps_its_messages_when_nobody_posts():
    exchange = ring()
    pass_round(exchange, {0: 0, 1: 1, 2: 2, 3: 3})
    pass_round(exchange, {})
    assert number(exchange.inbox(1)) == 0


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_ring_state_round_trips_through_a_file(schedule, tmp_path, assert_identical):
    exchange = ring(schedule=schedule)
    pass_round(exchange, {0: 0, 1: 1, 3: 3})
    torch.save(exchange.state_dict(), tmp_path / "state")
    other = ring(schedule=schedule)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_identical(other.state_dict(), exchange.state_dict())
    again = [pass_round(e, {0: 10, 2: 12, 3: 13}) for e in (exchange, other)]
    assert again[0] == again[1]


def test_ring_refuses_an_unknown_schedule():
    with pytest.raises(ConfigError, match=r"federation\.exchange\.schedule.*parallel, sequential, got 'random'"):
        Ring("random")


@pytest.fixture
def learngenes(mlp, sgd, set_up_federation):
    """Merge the Learngenes 0, 4, 8 and 12 of four clients, of whom some finished the round before; nobody trains."""

    def merge(schedule, active=(0, 1, 2, 3)):
        loop = set_up_federation(
            lambda: DRDFL(mlp(), personal_size=3, shared_size=2),
            rounds=2,
            optimizer=sgd(0.0),
            exchange=Ring(schedule),
        )
        loop.exchange.open(0, active)
        for client in range(4):
            module = loop.runner.load(client)
            module.finished_fits += 1
            for parameter in module.learngene.parameters():
                torch.nn.init.constant_(parameter, 4.0 * client)
            loop.runner._keep(module, client, 0, None)
            if client in active:
                loop.exchange.post(client, module.send(loop.data.clients[client]))
        loop.exchange.close()
        loop.draw_participants = lambda round: list(active)
        loop.advance()
        found = {}
        for client in range(4):
            learngene = [t for n, t in loop.runner.pool.get(client).items() if n.startswith("learngene.")]
            (found[client],) = {value for tensor in learngene for value in tensor.unique().tolist()}
        return found

    return merge


@pytest.mark.parametrize(
    ("schedule", "active", "expected"),
    [
        ("parallel", (0, 1, 2, 3), {0: 6, 1: 2, 2: 6, 3: 10}),
        ("sequential", (0, 1, 2, 3), {0: 6, 1: 5, 2: 6.5, 3: 9.25}),
        ("parallel", (0, 1, 3), {0: 6, 1: 2, 2: 8, 3: 8}),
    ],
)
def test_ring_of_four_learngenes_merges_as_computed_by_hand(learngenes, schedule, active, expected):
    """DRDFL.md, section 8, test 9; a client that rests keeps its own."""
    assert learngenes(schedule, active) == expected
