import copy

import torch

from fl_lightning.core.aggregation import ClassMeanRule
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.server import Server, TrainingServer


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
        self.optimizer.step()
        self.optimizer.zero_grad()

    def publish(self, message):
        return Message({**message.weights, "trained": self.network.weight.detach().clone()}, message.artifacts)


def doubling(seed=0):
    server = Doubling(Message(weights(9.0)))
    server.setup(seed, torch.device("cpu"))
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
    resumed.open_round(straight.round)
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
