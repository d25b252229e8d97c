"""Exchanges without a server: who hears whom, what it costs, and what stays."""

from types import SimpleNamespace

import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.mixing import Heard, MeanMixer
from fl_lightning.core.server import Server
from fl_lightning.errors import ConfigError
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.sickness import ServerError
from fl_lightning.losses.class_relation import SoftLabels
from fl_lightning.methods.dispfl import DisPFL
from fl_lightning.methods.drdfl import DRDFL, Latents
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fedgh import FedGH
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fesem import FeSEM
from fl_lightning.seeding import numpy_generator

pytestmark = pytest.mark.usefixtures("plain_convolutions")


def values(value):
    """A message of one number."""
    return Message({"w": torch.tensor([float(value)])}, {}, 1)


def connected(exchange, num_clients=4, mixer=None, seed=0):
    """An exchange whose clients hear their neighbours' messages and leave their own out, unless a mixer says more."""
    server = Server(Message(), mixer=lambda rules: mixer or MeanMixer(rules, own=False))
    template = SimpleNamespace(method=None, make_server=lambda facts: server, initial_message=Message)
    exchange.setup(template, Facts(num_clients, seed=seed))
    return exchange


def ring(num_clients=4, **options):
    return connected(Ring(**options), num_clients)


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


class Placed(DRDFL):
    """Its Learngene is 4 m from the start, and again after its first fit where the test wants that."""

    def __init__(self, model, value, again):
        super().__init__(model, latents=Latents(3, 2))
        self.value, self.again = value, again
        self.place()

    def place(self):
        for parameter in self.learngene.parameters():
            torch.nn.init.constant_(parameter, self.value)

    def on_fit_end(self):
        super().on_fit_end()
        if self.again and self.facts.round == 1:
            self.place()


@pytest.mark.parametrize(
    ("schedule", "rounds", "active", "expected"),
    [
        ("parallel", 2, (0, 1, 2, 3), {0: 6, 1: 2, 2: 6, 3: 10}),
        ("parallel", 2, (0, 1, 3), {0: 6, 1: 2, 2: 8, 3: 8}),
        ("sequential", 2, (0, 1, 2, 3), {0: 6, 1: 5, 2: 6.5, 3: 9.25}),
        ("parallel", 1, (0, 1, 2, 3), {0: 0, 1: 4, 2: 8, 3: 12}),
        ("sequential", 1, (0, 1, 2, 3), {0: 0, 1: 2, 2: 5, 3: 8.5}),
    ],
)
def test_ring_of_four_learngenes_merges_as_computed_by_hand(
    schedule, rounds, active, expected, mlp, sgd, set_up_federation
):
    """DRDFL.md, section 8, test 9, from 0, 4, 8 and 12 without training; a client that rests keeps its own.

    In the very first round client 0 hears nothing yet, which in a federation of equal initial weights is no loss.
    """
    loop = set_up_federation(
        lambda m: Placed(mlp(), 4.0 * m, again=rounds == 2),
        architecture=[0, 1, 2, 3],
        rounds=rounds,
        optimizer=sgd(0.0),
        exchange=Ring(schedule),
    )
    loop.calendar.participants = lambda round: list(active)
    loop.run()
    found = {}
    for client in range(4):
        learngene = loop.runner.load(client).method.learngene
        (found[client],) = {value for tensor in learngene.parameters() for value in tensor.unique().tolist()}
    assert found == expected


def test_sequential_ring_hears_the_nearest_active_predecessor_however_old_its_message():
    exchange = ring(schedule="sequential")
    assert pass_round(exchange, {0: 0, 1: 1}) == {0: None, 1: 0}
    assert pass_round(exchange, {2: 12, 3: 13}) == {2: 1, 3: 12}  # they join: from who finished the round before
    assert pass_round(exchange, {0: 20, 1: 21}) == {0: 1, 1: 20}
    assert pass_round(exchange, {1: 31, 3: 33}) == {1: 13, 3: 31}
    assert [hop[:2] for hop in exchange.hops] == [(3, 1), (1, 3)]


def test_ring_gives_who_comes_back_what_was_finished_the_round_before():
    """A message that is not mixed with the own one gets old; nobody's share of a mean is in it."""
    one, other = ring(), ring()
    pass_round(one, {0: 0, 1: 1, 2: 2, 3: 3})
    pass_round(one, {0: 10, 1: 11, 3: 13})
    other.load_state_dict(one.state_dict())
    for exchange in (one, other):
        assert exchange.downlink(2) == (1, 4)  # client 1's first message is there
        assert number(exchange.inbox(2)) == 11
        exchange.open(3, [0, 1, 2, 3])
        assert [number(exchange.inbox(client)) for client in range(4)] == [13, 10, 11, 11]
        assert exchange.hops == [(1, 2, 1.0, 1, 4)]
        assert exchange.pulled() == (1, 4)
        assert exchange.downlink(2) == (2, 8)  # and the newer one came down, too
        for client in range(4):
            exchange.post(client, values(20 + client))
        exchange.close()
        assert [number(exchange.inbox(client)) for client in range(4)] == [23, 20, 21, 22]


def test_averaging_keeps_for_who_rests_what_holds_its_share_of_the_mean():
    exchange = connected(Ring(), 4, MeanMixer())
    gossip(exchange, [0.0, 4.0, 8.0, 12.0], 1)
    gossip(exchange, [1.0, 1.0, 0.0, 1.0], 1, lambda round: [0, 1, 3])
    exchange.open(3, [0, 1, 2, 3])
    assert number(exchange.inbox(2)) == 6.0
    assert exchange.hops == []


def test_founders_of_a_sequential_ring_average_with_their_initial_weights(mlp, set_up_federation):
    """In the first round, too; only who joins later takes a message over as it is."""

    class Listening(FedAvg):
        def receive(self, message, data):
            super().receive(message, data)
            heard[self.facts.round, data.client] = message.weights

    heard = {}
    joining = Newcomers(clients=1, after=1)
    loop = set_up_federation(lambda: Listening(mlp()), rounds=2, exchange=Ring("sequential"), newcomers=joining)
    initial = loop.runner.modules[0].division.weights()
    loop.advance()
    loop.advance()
    sent = {at: message.weights for at, message in loop.diary.sent.items()}
    assert heard[1, 0] == {}
    for name, start in initial.items():
        torch.testing.assert_close(heard[1, 1][name], (start + sent[1, 0][name]) / 2)
        torch.testing.assert_close(heard[1, 2][name], (start + sent[1, 1][name]) / 2)
        torch.testing.assert_close(heard[2, 0][name], (sent[1, 0][name] + sent[1, 2][name]) / 2)
        assert torch.equal(heard[2, 3][name], sent[2, 2][name])
    assert [hop[:3] for hop in loop.diary.hops[1]] == [(0, 1, 0.5), (1, 2, 0.5)]
    assert [hop[:3] for hop in loop.diary.hops[2]] == [(2, 0, 0.5), (0, 1, 0.5), (1, 2, 0.5), (2, 3, 1.0)]


# --- mixing with the own message --------------------------------------------------------------------------------------


def gossip(exchange, u, rounds, participants=lambda round: None, dtype=torch.float64):
    """Rounds without training: each client sends back what it has. Returns everybody's value after each."""
    z = dict(enumerate(u))
    history = []
    for round in range(1, rounds + 1):
        live = participants(round)
        live = sorted(z) if live is None else live
        exchange.open(round, live)
        for client in live:
            exchange.post(client, Message({"w": torch.tensor([z[client]], dtype=dtype)}, {}, 1))
        exchange.close()
        for client in live:
            z[client] = exchange.inbox(client).weights["w"].item()
        history.append([z[client] for client in sorted(z)])
    return history


def test_averaging_on_a_ring_takes_the_mean_with_the_predecessor():
    """Two clients at 0 and 4 are both at 2 after one round."""
    assert gossip(connected(Ring(), 2, MeanMixer()), [0.0, 4.0], 1) == [[2.0, 2.0]]
    assert gossip(connected(Ring(), 4, MeanMixer()), [0.0, 4.0, 8.0, 12.0], 1) == [[6.0, 2.0, 6.0, 10.0]]


def test_ring_of_both_directions_takes_the_mean_with_both_neighbours():
    exchange = connected(Ring(directions="both"), 4, MeanMixer())
    assert gossip(exchange, [0.0, 3.0, 6.0, 12.0], 1)[-1] == pytest.approx([5.0, 3.0, 7.0, 6.0])
    assert gossip(connected(Ring(directions="both"), 2, MeanMixer()), [0.0, 4.0], 1) == [[2.0, 2.0]]


def test_sequential_ring_takes_the_mean_with_what_the_predecessor_has_just_finished():
    exchange = connected(Ring("sequential"), 3, MeanMixer())
    exchange.open(1, [0, 1, 2])
    for client, value in enumerate((0.0, 4.0, 8.0)):
        heard = number(exchange.inbox(client))
        assert heard == (None if client == 0 else (0.0, 4.0)[client - 1])  # no message of its own yet
        exchange.post(client, values(value))
    exchange.close()
    exchange.open(2, [0, 1, 2])
    assert number(exchange.inbox(0)) == 4.0  # its own 0 and client 2's 8
    exchange.post(0, values(4.0))
    assert number(exchange.inbox(1)) == 4.0
    assert exchange.hops == [(2, 0, 0.5, 1, 4)]


def test_everybody_alone_keeps_its_own(mlp):
    for exchange in (Ring(), Ring("sequential"), DirectedGraph(), RandomPeers()):
        connected(exchange, 1, MeanMixer())
        assert gossip(exchange, [3.0], 3) == [[3.0]] * 3
        assert exchange.hops == []


# --- push-sum ---------------------------------------------------------------------------------------------------------

THREE = [[0, 1], [0, 2], [1, 2], [2, 0]]


def numerators(exchange, z):
    return [exchange.mass[client] * value for client, value in enumerate(z)]


def test_push_sum_matches_hand_computed_values():
    """BASELINES-B.md, section 7, test ii: u = (3, 6, 0)."""
    exchange = connected(DirectedGraph(edges=THREE), 3, MeanMixer())
    (z,) = gossip(exchange, [3.0, 6.0, 0.0], 1)
    assert numerators(exchange, z) == pytest.approx([1, 4, 4])
    assert list(exchange.mass.values()) == pytest.approx([5 / 6, 5 / 6, 4 / 3])
    assert z == pytest.approx([1.2, 4.8, 3.0])
    z = gossip(exchange, z, 1)[-1]
    assert z == pytest.approx([2.470588, 3.36, 3.183673], abs=1e-6)
    z = gossip(exchange, z, 58)[-1]
    assert z == pytest.approx([3.0] * 3, abs=1e-6)
    assert numerators(exchange, z) == pytest.approx([3, 2, 4], abs=1e-5)


def test_push_sum_conserves_mass_when_a_client_is_out():
    exchange = connected(DirectedGraph(edges=THREE), 3, MeanMixer())
    z = [3.0, 6.0, 0.0]
    for round in range(1, 40):
        z = gossip(exchange, z, 1, lambda _, round=round: [0, 2] if round == 3 else None)[-1]
        assert sum(numerators(exchange, z)) == pytest.approx(9, abs=1e-9)
        assert sum(exchange.mass.values()) == pytest.approx(3, abs=1e-9)
    assert z == pytest.approx([3.0] * 3, abs=1e-6)


def test_uniform_mixing_converges_elsewhere():
    """The same test, iv: 2.666667, not the mean 3."""
    exchange = connected(DirectedGraph(edges=THREE, mixing="uniform"), 3, MeanMixer())
    assert gossip(exchange, [3.0, 6.0, 0.0], 80)[-1] == pytest.approx([8 / 3] * 3, abs=1e-6)
    assert exchange.mass == {}


@pytest.mark.parametrize(("redraw", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_fifty_clients_on_a_random_directed_graph_converge_to_their_mean(redraw, dtype):
    u = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exchange = connected(DirectedGraph(degree=3, redraw=redraw), 50, MeanMixer())
    z = gossip(exchange, u.tolist(), 60, dtype=dtype)[-1]
    assert max(abs(value - u.mean().item()) for value in z) < 1e-6
    assert sum(exchange.mass.values()) == pytest.approx(50)
    assert max(exchange.mass.values()) > 1.1  # without dividing by it, nobody would be near the mean


@pytest.mark.parametrize("live", [range(9), [0, 2, 3, 7], [5]])
def test_neighbours_are_drawn_as_from_a_list_of_the_others(live):
    """Which is not made: of a million clients it would take a minute a round."""
    exchange = connected(DirectedGraph(), 9)
    for client in range(9):
        others = [other for other in live if other != client]
        rng = numpy_generator(0, "exchange/join", 4, client)
        drawn = rng.choice(others, min(3, len(others)), replace=False).tolist() if others else []
        assert exchange._draw("join", 4, client, live, 3) == drawn


def test_push_sum_weight_is_one_where_as_many_hear_as_are_heard():
    circle = [[client, (client + 1) % 5] for client in range(5)]
    exchange = connected(DirectedGraph(edges=circle), 5, MeanMixer())
    z = gossip(exchange, [0.0, 1.0, 2.0, 3.0, 4.0], 3)
    assert set(exchange.mass.values()) == {1.0}
    assert z == gossip(connected(Ring(), 5, MeanMixer()), [0.0, 1.0, 2.0, 3.0, 4.0], 3)


def test_columns_of_push_sum_and_rows_of_the_others_sum_to_one():
    for exchange in (DirectedGraph(3), DirectedGraph(3, mixing="uniform"), RandomPeers(3), Ring(directions="both")):
        connected(exchange, 9, MeanMixer())
        for round in range(1, 6):
            live = [client for client in range(9) if (client + round) % 4]
            topology = exchange.connect(round, live)
            assert sorted(topology) == live
            rows = [sum(row.values()) for row in topology.values()]
            columns = [sum(row.get(sender, 0) for row in topology.values()) for sender in live]
            pushes = isinstance(exchange, DirectedGraph) and exchange.pushes
            assert (columns if pushes else rows) == pytest.approx([1] * len(live))
            if isinstance(exchange, RandomPeers):
                assert columns == pytest.approx([1] * len(live))


def test_push_sum_weight_travels_and_is_told_to_its_client():
    exchange = connected(DirectedGraph(edges=THREE), 3, MeanMixer())
    gossip(exchange, [3.0, 6.0, 0.0], 1, dtype=torch.float32)
    assert exchange.inbox(2).artifacts["push_weight"].item() == pytest.approx(4 / 3)
    assert [hop[:2] for hop in exchange.hops] == [(2, 0), (0, 1), (0, 2), (1, 2)]
    assert {hop.num_params for hop in exchange.hops} == {2}  # the value and its weight
    assert {hop.num_bytes for hop in exchange.hops} == {8}
    assert [exchange.downlink(client) for client in range(3)] == [(2, 8), (2, 8), (4, 16)]


def test_push_sum_that_loses_its_meaning_is_refused_in_one_line():
    exchange = connected(DirectedGraph(edges=[[0, 1], [1, 2], [2, 0]]), 3, MeanMixer())
    rule = r"^federation\.exchange: client 0 hears too little \(its push-sum weight is .* after round 27\): add edges"
    with pytest.raises(ConfigError, match=rule):
        gossip(exchange, [1.0, 2.0, 3.0], 40, lambda round: [0, 1])  # client 0 gives half of its mass, hears nothing


@pytest.mark.parametrize(
    ("edges", "bad"),
    [
        ([[0, 1]], r"from client 1 to client 0, whose mass would only drain .*got \[0, 1\]"),
        ([[0, 1], [1, 2], [2, 0], [3, 0]], r"from client 0 to client 3, .*got \[3, 0\]"),
        ([[0, 1], [1, 0], [1, 2]], r"from client 2 to client 1, .*got \[1, 2\]"),
    ],
)
def test_graph_on_which_push_sum_drains_a_client_is_refused_before_training(edges, bad):
    with pytest.raises(ConfigError, match=rf"^federation\.exchange\.edges: .*there must be a way back {bad}$"):
        connected(DirectedGraph(edges=edges), 4, MeanMixer())
    for exchange in (DirectedGraph(edges=edges, mixing="uniform"), DirectedGraph(edges=edges)):
        connected(exchange, 4, MeanMixer(own=exchange.mixing != "push_sum"))  # no mass is sent


def test_client_without_edges_is_allowed_and_keeps_what_it_has():
    exchange = connected(DirectedGraph(edges=[[0, 1], [1, 0]]), 3, MeanMixer())
    assert gossip(exchange, [0.0, 4.0, 9.0], 40)[-1] == [2.0, 2.0, 9.0]


# --- random graphs ----------------------------------------------------------------------------------------------------


def edges_of(exchange, round, live):
    return {(s, r) for r, row in exchange.connect(round, live).items() for s in row if s != r}


@pytest.mark.parametrize(
    ("degree", "live", "found"),
    [(1, 6, {1}), (1, 5, {0, 1}), (2, 7, {2}), (3, 8, {3}), (3, 7, {2, 3}), (4, 9, {4}), (10, 4, {3}), (5, 6, {5})],
)
def test_random_peers_have_as_many_neighbours(degree, live, found):
    exchange = connected(RandomPeers(degree), 12, MeanMixer())
    for round in range(1, 9):
        edges = edges_of(exchange, round, list(range(live)))
        assert edges == {(receiver, sender) for sender, receiver in edges}
        assert {sum(sender == client for sender, _ in edges) for client in range(live)} == found


@pytest.mark.parametrize("make", [lambda **o: DirectedGraph(2, **o), lambda **o: RandomPeers(2, **o)])
def test_graphs_depend_on_seed_and_round_alone(make):
    live = list(range(9))
    one, same, other = (connected(make(), 9, MeanMixer(), seed) for seed in (0, 0, 1))
    graphs = [edges_of(one, round, live) for round in range(1, 6)]
    assert graphs == [edges_of(same, round, live) for round in range(1, 6)]
    assert len({frozenset(graph) for graph in graphs}) == 5
    assert graphs != [edges_of(other, round, live) for round in range(1, 6)]
    fixed = connected(make(redraw=False), 9, MeanMixer())
    assert len({frozenset(edges_of(fixed, round, live)) for round in range(1, 6)}) == 1


def test_fixed_graph_goes_round_a_client_that_is_out():
    """Its neighbours along the circle are joined: of a circle with a gap mass only drains."""
    exchange = connected(DirectedGraph(2, redraw=False), 9, MeanMixer())
    every = edges_of(exchange, 1, list(range(9)))
    there = [0, 1, 2, 3, 5, 6, 7, 8]
    left, found = {edge for edge in every if 4 not in edge}, edges_of(exchange, 2, there)
    circle = connected(DirectedGraph(1, redraw=False), 9, MeanMixer())
    ((before, _),) = (edge for edge in edges_of(circle, 1, list(range(9))) if edge[1] == 4)
    ((_, after),) = (edge for edge in edges_of(circle, 1, list(range(9))) if edge[0] == 4)
    assert found == left | {(before, after)}


@pytest.mark.parametrize("mixing", ["push_sum", "uniform"])
@pytest.mark.parametrize("out", [[], [2], [0, 5], list(range(8))])
def test_fixed_circle_reaches_everybody_who_is_there(out, mixing):
    """A client out of every round let the others' push-sum weights fall to nothing, and their rates rise with that."""
    exchange = connected(DirectedGraph(1, redraw=False, mixing=mixing), 9, MeanMixer(own=mixing != "push_sum"))
    there = [client for client in range(9) if client not in out]
    edges = edges_of(exchange, 3, there)
    if len(there) == 1:
        assert edges == set()
        return
    assert sorted(sender for sender, _ in edges) == sorted(receiver for _, receiver in edges) == there
    reached = {there[0]}
    for _ in there:
        reached |= {receiver for sender, receiver in edges if sender in reached}
    assert reached == set(there)


def test_random_peers_converge_to_the_mean():
    u = [float(value) for value in range(20)]
    for degree in (1, 4):
        exchange = connected(RandomPeers(degree), 20, MeanMixer())
        assert gossip(exchange, u, 150)[-1] == pytest.approx([9.5] * 20, abs=1e-6)


# --- mixers that have their own way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: DirectedGraph(edges=THREE), lambda: RandomPeers(2), lambda: Ring()])
def test_without_the_own_message_all_that_is_heard_counts_alike(make):
    exchange = connected(make(), 3, MeanMixer(own=False))
    for _ in range(3):
        gossip(exchange, [3.0, 6.0, 12.0], 1, dtype=torch.float32)
        mean = {}
        for receiver in range(3):
            hops = [hop for hop in exchange.hops if hop.receiver == receiver]
            assert [hop.share for hop in hops] == [1 / len(hops)] * len(hops)
            mean[receiver] = sum((3.0, 6.0, 12.0)[hop.sender] for hop in hops) / len(hops)
            assert number(exchange.inbox(receiver)) == mean[receiver]
        assert {hop[3:] for hop in exchange.hops} == {(1, 4)}  # no push-sum weight
        assert all(exchange.inbox(client).artifacts == {} for client in range(3))


def test_drdfl_on_a_directed_graph_sends_no_push_sum_weight(mlp, sgd, run_federation):
    loop = run_federation(lambda: DRDFL(mlp()), rounds=2, optimizer=sgd(1e-3), exchange=DirectedGraph(2))
    assert {hop.num_params for hop in loop.diary.hops[2]} == {loop.diary.sent[2, 0].num_params}
    assert sum(hop.share for hop in loop.diary.hops[2]) == pytest.approx(4)


def test_dispfl_logs_the_equal_shares_that_it_takes(mlp, run_federation):
    loop = run_federation(lambda: DisPFL(mlp()), rounds=1, exchange=DirectedGraph(edges=[*THREE, [0, 3], [3, 0]]))
    shares = {hop[:2]: hop.share for hop in loop.diary.hops[1]}
    third = 1 / 3
    assert shares == {(2, 0): third, (3, 0): third, (0, 1): 0.5, (0, 2): third, (1, 2): third, (0, 3): 0.5}


# --- who joins, who rests, what is saved ------------------------------------------------------------------------------

EXCHANGES = [
    lambda: Ring(),
    lambda: Ring("sequential"),
    lambda: Ring(directions="both"),
    lambda: DirectedGraph(2),
    lambda: DirectedGraph(2, mixing="uniform"),
    lambda: RandomPeers(2),
]


@pytest.mark.parametrize("make", EXCHANGES)
def test_client_that_joins_hears_those_who_finished_the_round_before(make):
    exchange = connected(make(), 6, MeanMixer())
    gossip(exchange, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2, lambda round: [0, 1, 2, 3])
    exchange.open(3, list(range(6)))
    assert number(exchange.inbox(4)) == 1.0
    late = exchange.downlink(4)
    assert late.num_params >= 1
    if not getattr(exchange, "in_turn", False):
        joining = [hop for hop in exchange.hops if hop.receiver == 4]
        assert sum(hop.num_params for hop in joining) == late.num_params
        assert exchange.pulled().num_params == sum(hop.num_params for hop in exchange.hops)


@pytest.mark.parametrize(
    ("make", "senders"),
    [
        (lambda: DirectedGraph(edges=[*THREE, [1, 5], [3, 5], [4, 5], [5, 0], [0, 3], [0, 4]]), {1, 3}),
        (lambda: DirectedGraph(2, redraw=False), None),
        (lambda: DirectedGraph(2, redraw=False, mixing="uniform"), None),
        (lambda: RandomPeers(2, redraw=False), None),
    ],
)
def test_client_that_joins_a_fixed_graph_hears_its_neighbours(make, senders):
    exchange = connected(make(), 8, MeanMixer())
    early = [0, 1, 2, 3]
    gossip(exchange, [1.0] * 8, 2, lambda round: early)
    for client in [5] if senders is not None else range(4, 8):
        expected = senders or {s for s, r in edges_of(exchange, 3, [*early, client]) if r == client}
        exchange.open(3, [*early, client])
        if expected:
            assert {hop.sender for hop in exchange.hops} == expected


def test_client_whose_neighbours_were_all_out_hears_others():
    exchange = connected(DirectedGraph(2, edges=[[0, 1], [1, 0], [2, 3], [3, 2]]), 4, MeanMixer())
    gossip(exchange, [1.0] * 4, 2, lambda round: [0, 1])
    exchange.open(3, [0, 1, 2])
    assert {hop[:2] for hop in exchange.hops} == {(0, 2), (1, 2)}


def test_client_that_rests_hears_later_what_it_was_sent():
    exchange = connected(DirectedGraph(2), 5, MeanMixer())
    gossip(exchange, [0.0, 1.0, 2.0, 3.0, 4.0], 1)
    before = exchange.inbox(4)
    gossip(exchange, [5.0, 5.0, 5.0, 5.0, 5.0], 2, lambda round: [0, 1, 2, 3])
    assert exchange.inbox(4) is before


@pytest.mark.parametrize("make", EXCHANGES)
def test_client_that_never_took_part_hears_the_same_after_a_resume(make, tmp_path):
    one, other = (connected(make(), 8, MeanMixer()) for _ in range(2))
    gossip(one, [float(client) for client in range(8)], 3, lambda round: [0, 1, 2, 3, 4])
    other.load_state_dict(one.state_dict())
    assert [number(one.inbox(client)) for client in (5, 6, 7)] == [number(other.inbox(client)) for client in (5, 6, 7)]


@pytest.mark.parametrize("make", EXCHANGES)
def test_state_round_trips_through_a_file(make, tmp_path, assert_identical):
    one, other = (connected(make(), 5, MeanMixer()) for _ in range(2))
    z = gossip(one, [0.0, 1.0, 2.0, 3.0, 4.0], 3, lambda round: [0, 1, 2, 3])[-1]
    torch.save(one.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_identical(other.state_dict(), one.state_dict())
    again = []
    for exchange in (one, other):
        exchange.open(4, list(range(5)))
        for client in range(5):
            exchange.post(client, Message({"w": torch.tensor([z[client]])}, {}, 1))
        again.append([exchange.downlink(client) for client in range(5)])
        exchange.close()
        again[-1] += [number(exchange.inbox(client)) for client in range(5)]
    assert again[0] == again[1]


# --- methods on graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EXCHANGES)
@pytest.mark.parametrize("kind", [FedAvg, FedProto, DRDFL])
def test_averaging_prototype_and_ring_methods_run_on_every_graph(make, kind, mlp, sgd, run_federation):
    loop = run_federation(lambda: kind(mlp()), rounds=2, optimizer=sgd(1e-3), exchange=make(), participation=0.75)
    assert [row["participants"] for row in loop.diary.rows] == [3, 3]
    assert loop.diary.rows[-1]["Server-T"] is None
    assert loop.diary.rows[-1]["uplink_params"] > 0


def test_fedproto_on_a_graph_merges_prototypes_by_count(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=1, exchange=RandomPeers(3))
    sent = [loop.diary.sent[1, client].artifacts["prototypes"] for client in range(4)]
    count = sum(part.count for part in sent)
    mean = sum(part.mean.double() * part.count[:, None] for part in sent) / count[:, None]
    for client in range(4):
        torch.testing.assert_close(loop.exchange.inbox(client).artifacts["prototypes"].mean.double(), mean)


def test_fedavg_on_the_complete_graph_is_the_unweighted_mean(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=1, exchange=RandomPeers(3))
    for name, weight in loop.exchange.inbox(0).weights.items():
        sent = [loop.diary.sent[1, client].weights[name].double() for client in range(4)]
        torch.testing.assert_close(weight, torch.stack(sent).mean(0).float())


@pytest.mark.parametrize("kind", [FedGH, FedNova, FeSEM])
def test_method_that_needs_its_server_is_refused(kind, mlp, set_up_federation):
    rule = rf"federation\.exchange: {kind.__name__} cannot do without its server: must be Star, got 'Ring'"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: kind(mlp()), exchange=Ring())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: DirectedGraph(0), r"federation\.exchange\.degree: must be >= 1, got 0"),
        (lambda: RandomPeers(0), r"federation\.exchange\.degree: must be >= 1, got 0"),
        (lambda: DirectedGraph(mixing="mean"), r"mixing: must be one of push_sum, uniform, got 'mean'"),
        (lambda: DirectedGraph(edges=[]), r"federation\.exchange\.edges: must not be empty; null draws them, got \[\]"),
        (lambda: DirectedGraph(edges=[[1, 1]]), r"edges: each must be a pair of different clients, got \[1, 1\]"),
        (lambda: DirectedGraph(edges=[[1]]), r"edges: each must be a pair of different clients, got \[1\]"),
        (lambda: connected(DirectedGraph(edges=[[0, 4]])), r"edges: each must be between clients 0 to 3, got \[0, 4\]"),
        (lambda: Ring("sequential", "both"), r"directions: must be one where schedule is sequential, got 'both'"),
    ],
)
def test_bad_graphs_are_refused(make, rule):
    with pytest.raises(ConfigError, match=rule):
        make()


def test_where_shares_do_not_count_artifacts_of_all_neighbours_count_alike():
    heard = [Heard(client, Message({}, {"a": torch.tensor(4.0 * client)}, 1 + 2 * client), 0.5) for client in (0, 1)]
    assert MeanMixer(own=False).mix(None, heard, None).artifacts["a"] == 2


class Counts(MeanMixer):
    """Takes down what it is told of the last time, and says how often each client has heard something."""

    def mix(self, own, neighbours, previous):
        count = 0.0 if previous is None else float(previous.artifacts["count"])
        message = super().mix(own, neighbours, previous)
        return Message(message.weights, {"count": torch.tensor(count + 1)}, message.num_samples)


def test_what_a_client_heard_last_is_told_around_a_sequential_ring_too():
    """Rules carry something over from it; each asks as often as it likes, and a resumption knows it."""

    def made():
        return connected(Ring(schedule="sequential"), 3, Counts(own=False))

    def round_of(exchange, number, clients):
        exchange.open(number, clients)
        heard = {}
        for client in clients:
            for _ in range(2):
                heard[client] = float(exchange.inbox(client).artifacts["count"])
            sent = values(client)
            exchange.post(client, Message(sent.weights, {"count": torch.zeros(())}, 1))
        exchange.close()
        return heard

    exchange = made()
    assert round_of(exchange, 1, [0, 1, 2]) == {0: 1, 1: 1, 2: 1}
    assert round_of(exchange, 2, [0, 2]) == {0: 2, 2: 2}
    resumed = made()
    resumed.load_state_dict(exchange.state_dict())
    for other in (exchange, resumed):
        assert round_of(other, 3, [0, 1, 2]) == {0: 3, 1: 2, 2: 3}


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_momentum_of_soft_labels_does_something_on_every_ring(schedule, mlp, run_federation):
    def losses(momentum):
        make = lambda: FedDW(mlp(), soft_labels=SoftLabels(momentum=momentum))  # noqa: E731
        return run_federation(make, rounds=4, exchange=Ring(schedule=schedule)).diary.rows[-1]["loss"]

    assert losses(0.0) != losses(0.9)


@pytest.mark.parametrize("own", [True, False])
def test_nobody_is_heard_across_an_edge_that_there_is_not(own):
    """A client without edges trains alone, however often it is out and comes back; so does who only sends."""
    edges = [[0, 1], [1, 0], [3, 0]]
    exchange = connected(DirectedGraph(edges=edges, mixing="uniform"), 4, MeanMixer(own=own))
    pass_round(exchange, {0: 0.0, 1: 1.0})
    for clients in ([0, 1, 2, 3], [0, 1], [1, 2, 3]):
        exchange.open(2, clients)
        for client in clients:
            heard = number(exchange.inbox(client))
            assert client in (0, 1) or heard in (None, client)
            exchange.post(client, values(client))
        exchange.close()
        assert {(hop.sender, hop.receiver) for hop in exchange.hops} <= {(0, 1), (1, 0), (3, 0)}


class Strict(Ring):
    """A ring that says the first of the clients that are there."""

    def connect(self, round, live):
        assert live[0] >= 0
        return super().connect(round, live)


def test_a_round_of_nobody_asks_for_no_graph():
    exchange = connected(Strict(), 3)
    pass_round(exchange, {0: 0.0, 1: 1.0})
    exchange.open(2, [])
    exchange.close()
    assert (exchange.topology, list(exchange.hops)) == ({}, [])
    exchange.open(3, [0, 1])
    exchange.withdraw([0, 1])
    assert exchange.topology == {}


class Alone(Strict):
    """Cannot do with fewer than two clients."""

    def connect(self, round, live):
        assert live[1] >= 0
        return super().connect(round, live)


class SickTwice(FedAvg):
    """All clients but the first fail in the second round."""

    def on_fit_start(self):
        if self.facts.round == 2 and self.facts.client:
            raise ValueError("sick")


def test_a_graph_that_fails_once_clients_are_left_out_is_told_with_its_round(mlp, run_federation):
    with pytest.raises(ServerError, match=r"^round 2, the server: IndexError"):
        run_federation(lambda: SickTwice(mlp()), rounds=2, exchange=Alone(), on_client_error="skip")
