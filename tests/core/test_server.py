import copy
from dataclasses import replace

import pytest
import torch

from fl_lightning.core.aggregation import ClassMeanRule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message, Size
from fl_lightning.core.mixing import MeanMixer
from fl_lightning.core.server import Server, TrainingServer
from fl_lightning.core.server_optimizer import ServerMomentum
from fl_lightning.errors import ConfigError


def weights(*values):
    return {"w": torch.tensor(values)}


def test_server_averages_over_those_who_sent_only():
    """(1·[1, 3] + 3·[5, -1]) / (1 + 3), whatever other clients there are: the model does not shrink."""
    server = Server(Message(weights(9.0, 9.0)))
    out = server.aggregate({4: Message(weights(1.0, 3.0), {}, 1), 7: Message(weights(5.0, -1.0), {}, 3)})
    assert out.weights["w"].tolist() == [4.0, 0.0]
    assert out.num_samples == 4


def test_server_keeps_its_message_when_nothing_came_in():
    means = ClassMeans(torch.ones(2, 3), torch.tensor([1, 0]))
    server = Server(Message(weights(9.0), {"prototypes": means}))
    out = server.aggregate({})
    assert out.weights["w"].tolist() == [9.0]
    assert out.artifacts["prototypes"] is means


def test_server_returns_what_all_send_back_unchanged():
    initial = weights(*torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist())
    server = Server(Message(initial))
    out = server.aggregate({c: Message({"w": initial["w"].clone()}, {}, n) for c, n in enumerate((3, 7, 13))})
    assert torch.equal(out.weights["w"], initial["w"])


def test_rounds_do_not_leak_into_each_other():
    server = Server(Message(weights(0.0)))
    server.aggregate({0: Message(weights(100.0), {}, 1000)})
    assert server.aggregate({0: Message(weights(2.0), {}, 1)}).weights["w"].item() == 2.0


def test_a_message_sent_is_not_changed_by_later_rounds():
    server = Server(Message(weights(0.0)))
    first = server.aggregate({0: Message(weights(1.0), {}, 1)})
    server.aggregate({0: Message(weights(2.0), {}, 1)})
    assert first.weights["w"].item() == 1.0


def test_server_merges_class_means_by_count_and_tensors_by_samples():
    server = Server(Message())
    one = {"prototypes": ClassMeans(torch.tensor([[2.0]]), torch.tensor([1])), "t": torch.tensor([0.0])}
    two = {"prototypes": ClassMeans(torch.tensor([[5.0]]), torch.tensor([2])), "t": torch.tensor([4.0])}
    out = server.aggregate({0: Message({}, one, 3), 1: Message({}, two, 1)})
    assert out.artifacts["prototypes"].mean.tolist() == [[4.0]]
    assert out.artifacts["t"].tolist() == [1.0]


def test_server_takes_a_terms_own_rule():
    server = Server(Message(), {"prototypes": lambda: ClassMeanRule("uniform")})
    one = ClassMeans(torch.tensor([[2.0]]), torch.tensor([1]))
    two = ClassMeans(torch.tensor([[5.0]]), torch.tensor([2]))
    out = server.aggregate({0: Message({}, {"prototypes": one}, 1), 1: Message({}, {"prototypes": two}, 2)})
    assert out.artifacts["prototypes"].mean.tolist() == [[3.5]]


def test_server_remembers_classes_that_sat_a_round_out():
    server = Server(Message())
    first = ClassMeans(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 3]))
    server.aggregate({0: Message({}, {"p": first}, 6)})
    second = ClassMeans(torch.tensor([[5.0], [0.0]]), torch.tensor([3, 0]))
    out = server.aggregate({1: Message({}, {"p": second}, 3)})
    assert out.artifacts["p"].mean.tolist() == [[5.0], [2.0]]
    assert out.artifacts["p"].valid.tolist() == [True, True]


def test_a_round_in_which_nothing_comes_leaves_the_message_as_it_is():
    server = Server(Message())
    server.aggregate({0: Message({"w": torch.ones(2)}, {"t": torch.ones(1)}, 7)})
    before = server.message = replace(server.message, sent=Size(1, 4))
    server.aggregate({})
    assert server.message is before


def test_aggregate_does_not_depend_on_client_order():
    generator = torch.Generator().manual_seed(0)
    messages = {
        c: Message(
            {"w": torch.randn(50, generator=generator)},
            {"p": ClassMeans(torch.randn(3, 4, generator=generator), torch.tensor([c, 1, 5]))},
            3 + 7 * c,
        )
        for c in range(5)
    }
    forwards = Server(Message()).aggregate(messages)
    backwards = Server(Message()).aggregate(dict(reversed(messages.items())))
    assert torch.equal(forwards.weights["w"], backwards.weights["w"])
    assert torch.equal(forwards.artifacts["p"].mean, backwards.artifacts["p"].mean)


def test_server_state_round_trips(assert_identical):
    server = Server(Message(weights(0.0)))
    server.aggregate({0: Message(weights(1.5), {"p": ClassMeans(torch.ones(2, 2), torch.tensor([1, 0]))}, 1)})
    other = Server(Message(weights(7.0)))
    other.load_state_dict(server.state_dict())
    assert_identical(other.state_dict(), server.state_dict())


class Doubling(TrainingServer):
    """Learns one number: after each round its weight is noise plus the sum of what came in."""

    def build(self):
        return torch.nn.Linear(1, 1)

    def make_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    def train(self, messages):
        self.order = list(messages)
        self.before = self.message.weights["w"].item()
        self.contexts = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        target = sum(message.weights["w"] for message in messages.values()) + torch.randn(1)
        self.network(target).sum().backward()
        self.network_optimizer.step()
        self.network_optimizer.zero_grad()

    def publish(self, message):
        return Message({**message.weights, "trained": self.network.weight.detach().clone()}, message.artifacts)


def doubling(seed=0):
    server = Doubling(Message(weights(9.0)))
    server.setup(Facts(num_clients=4, seed=seed))
    return server


UPLOADS = {3: Message(weights(1.0), {}, 1), 1: Message(weights(5.0), {}, 3)}


def test_training_server_trains_on_all_messages_in_order_before_it_averages():
    server = doubling()
    out = server.aggregate(UPLOADS)
    assert server.order == [1, 3]
    assert server.before == 9.0
    assert out.weights["w"].tolist() == [4.0]
    assert torch.equal(out.weights["trained"], server.network.weight)


def test_training_server_publishes_before_the_first_round_and_changes_nothing_without_messages():
    server = doubling()
    first = server.message.weights["trained"].clone()
    assert torch.equal(first, server.network.weight)
    assert torch.equal(server.aggregate({}).weights["trained"], first)


def test_training_server_trains_with_gradients_and_without_autocast():
    server = doubling()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        server.aggregate(UPLOADS)
    assert server.contexts == (True, False)


def test_training_server_draws_from_seed_and_round_alone_and_leaves_the_global_streams():
    torch.manual_seed(1)
    one = doubling()
    torch.manual_seed(2)
    other, third = doubling(), doubling(seed=7)
    before = torch.get_rng_state()
    outs = [[server.aggregate(UPLOADS).weights["trained"] for _ in range(2)] for server in (one, other, third)]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(outs[0], outs[1], strict=True))
    assert not torch.equal(outs[0][0], outs[2][0])


def test_training_server_resumes_exactly_with_its_optimizer():
    straight, resumed = doubling(), doubling()
    for _ in range(2):
        straight.aggregate(UPLOADS)
    state = copy.deepcopy(straight.state_dict())
    resumed.load_state_dict(state)
    resumed.facts = replace(resumed.facts, round=straight.round)
    assert torch.equal(resumed.aggregate(UPLOADS).weights["trained"], straight.aggregate(UPLOADS).weights["trained"])


def test_rules_know_the_round():
    rounds = []

    class Watching(ClassMeanRule):
        def result(self, previous):
            rounds.append(self.round)
            return super().result(previous)

    server = Server(Message(), {"prototypes": Watching})
    for _ in range(2):
        server.aggregate({0: Message({}, {"prototypes": ClassMeans(torch.ones(1, 1), torch.ones(1).long())}, 1)})
    assert rounds == [1, 2]


def test_server_weighs_clients_alike_where_it_is_told_to():
    server = Server(Message(weights(9.0)), weighting="uniform")
    out = server.aggregate({0: Message(weights(1.0), {}, 1), 1: Message(weights(4.0), {}, 1000)})
    assert out.weights["w"].tolist() == [2.5]
    assert out.num_samples == 1001


def test_unknown_weighting_is_refused():
    with pytest.raises(ConfigError, match=r"^method\.weighting: must be"):
        Server(Message(), weighting="equal")


# --- what a subclass must say ----------------------------------------------


def test_a_subclass_only_averages_if_it_says_so_itself():
    class Silent(Server):
        pass

    class Says(Server):
        only_averages = True

    class Inherits(Says):
        pass

    assert [kind.only_averages for kind in (Server, Silent, Says, Inherits, TrainingServer)] == [
        True,
        False,
        True,
        False,
        False,
    ]


class Remembering(ClassMeanRule):
    remembers = True


def test_a_server_that_only_averages_can_be_done_without_unless_a_rule_remembers():
    class Silent(Server):
        pass

    rules = {"prototypes": ClassMeanRule}
    mixer = Server(Message(), rules).mixer()
    assert isinstance(mixer, MeanMixer)
    assert mixer.rules == rules
    assert Silent(Message()).mixer() is None
    assert Server(Message(), {"prototypes": Remembering}).mixer() is None


def test_a_subclass_that_overrides_collect_is_refused():
    with pytest.raises(TypeError, match="Own: to look at messages, override `see` and say `sees_messages = True`"):

        class Own(Server):
            def collect(self, client, message):
                pass


def test_a_subclass_that_sees_messages_must_say_so():
    with pytest.raises(TypeError, match="Own: to look at messages"):

        class Own(Server):
            def see(self, client, message):
                return message


class Picky(Server):
    """Leaves odd clients out, and doubles what the others say."""

    sees_messages = True

    def see(self, client, message):
        self.seen = [*getattr(self, "seen", []), client]
        return None if client % 2 else Message({name: 2 * w for name, w in message.weights.items()}, {}, 1)


def test_what_see_returns_is_folded_in_and_none_leaves_a_client_out():
    server = Picky(Message(weights(9.0)))
    out = server.aggregate({0: Message(weights(1.0), {}, 7), 1: Message(weights(50.0), {}, 7)})
    assert server.seen == [0, 1]
    assert out.weights["w"].tolist() == [2.0]
    assert out.num_samples == 1


def test_a_server_that_sees_messages_does_not_work_in_parts():
    assert Server(Message()).works_in_parts
    assert not Picky(Message()).works_in_parts

    class Heir(Picky):
        def see(self, client, message):
            return super().see(client, message)

    assert not Heir(Message()).works_in_parts


# --- facts ----------------------------------------------


def test_server_learns_its_facts_once_and_the_rounds_anew():
    server = Server(Message())
    assert (server.round, server.device) == (0, torch.device("cpu"))
    facts = Facts(num_clients=4, rounds=9, seed=3)
    server.setup(facts)
    server.aggregate({2: Message(weights(1.0), {}, 1), 0: Message(weights(1.0), {}, 1)})
    assert server.facts == replace(facts, round=1, participants=(2, 0))


# --- what follows the mean ----------------------------------------------


def test_a_server_optimizer_steps_from_the_old_weights_towards_the_mean(assert_identical):
    """v = 1, x = 0 + 1; then v = ½ + 2, x = 1 + 2.5."""
    server = Server(Message(weights(0.0)))
    server.optimizer = ServerMomentum(momentum=0.5)
    assert server.aggregate({0: Message(weights(1.0), {}, 1)}).weights["w"].tolist() == [1.0]
    other = Server(Message(weights(0.0)))
    other.optimizer = ServerMomentum(momentum=0.5)
    other.load_state_dict(copy.deepcopy(server.state_dict()))
    for resumed in (server, other):
        assert resumed.aggregate({0: Message(weights(3.0), {}, 1)}).weights["w"].tolist() == [3.5]
    assert_identical(other.state_dict(), server.state_dict())


def test_a_training_servers_network_and_a_server_optimizer_are_saved_apart():
    server = doubling()
    server.optimizer = ServerMomentum()
    server.aggregate(UPLOADS)
    assert {"network", "optimizer", "server_optimizer"} < server.state_dict().keys()


# --- in parts ----------------------------------------------


def test_parts_of_a_round_give_the_round(assert_identical):
    generator = torch.Generator().manual_seed(0)
    uploads = {
        client: Message(
            {"w": torch.randn(20, generator=generator), "n": torch.tensor(client)},
            {"p": ClassMeans(torch.randn(3, 2, generator=generator), torch.tensor([client, 0, 2]))},
            1 + client,
        )
        for client in range(5)
    }
    whole, main, other = (Server(Message()) for _ in range(3))
    whole.aggregate(uploads)
    for client, message in uploads.items():
        (main if client < 2 else other).collect(client, message)
    main.merge(other.partial())
    main.close_round()
    assert_identical(main.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, dtype=torch.cfloat), "not complex64"),
        (torch.eye(2).to_sparse(), "not sparse"),
        (torch.ones(2).to(torch.float8_e4m3fn), "not float8_e4m3fn"),
    ],
)
def test_artifacts_that_cannot_be_averaged_are_refused_by_name(value, said):
    """Of complex ones the mean of their real parts went out."""
    server = Server(Message())
    server.open_round()
    with pytest.raises(ValueError, match=rf"^artifact spectrum: tensors to be averaged must be dense .*, {said}$"):
        server.collect(0, Message({}, {"spectrum": value}, 3))


def test_artifacts_of_other_shapes_are_refused_by_name():
    server = Server(Message())
    server.open_round()
    server.collect(0, Message({}, {"means": torch.ones(2)}, 3))
    with pytest.raises(ValueError, match=r"^artifact means: tensors to be averaged must have the same shapes"):
        server.collect(1, Message({}, {"means": torch.ones(3)}, 3))
