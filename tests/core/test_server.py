import torch

from fl_lightning.core.aggregation import ClassMeanRule
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.server import Server


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
