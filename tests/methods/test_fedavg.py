"""The tests that the specification of FedAvg promises (BASELINES-A.md, section 2)."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.term import Term
from fl_lightning.methods.fedavg import FedAvg

ONE_CLIENT = ((12, 8, 5, 4),)


class CountsFits(Term):
    """A term with something to keep from round to round, of the client's own."""

    def setup(self, host):
        self.register_buffer("fits", torch.zeros(()))

    def forward(self, host, out):
        return out.logits.sum() * 0

    def send(self, host, data):
        self.fits += 1
        return {}


def model_state(weights):
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def test_fedavg_server_matches_hand_computed_value(mlp, make_client):
    """(1·[1, 3] + 3·[5, -1]) / 4 = [4, 0]."""
    server = make_client(FedAvg(mlp())).make_server(Facts())
    one, two = Message({"w": torch.tensor([1.0, 3.0])}, {}, 1), Message({"w": torch.tensor([5.0, -1.0])}, {}, 3)
    assert server.aggregate({0: one, 1: two}).weights["w"].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("net", ["mlp", "mlp of two epochs"])
def test_fedavg_of_one_client_is_plain_training_bit_for_bit(
    mlp, sgd, make_data, set_up_federation, train_by_hand, assert_identical, net
):
    epochs = 2 if "two" in net else 1
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=4, data=make_data(ONE_CLIENT), local_epochs=epochs)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    for round in (1, 2, 3, 4):
        train_by_hand(model, loop.data.clients[0], sgd(), round, epochs=epochs)
    assert_identical(model_state(loop.exchange.global_message().weights), dict(model.state_dict()))


def test_fedavg_of_full_batches_is_one_gradient_step_on_the_pooled_data(mlp, sgd, make_data, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, data=make_data(batch_size=100))
    model = copy.deepcopy(loop.runner.modules[0].method.model).double()
    loop.run()
    x, y = loop.data.store.gather(torch.cat([client.train for client in loop.data.clients]))
    F.cross_entropy(model(x.double()), y).backward()
    sgd()(model.parameters()).step()
    averaged = model_state(loop.exchange.global_message().weights)
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(averaged[name].double(), parameter, rtol=1e-6, atol=1e-7)


def test_fedavg_averages_batch_norm_statistics_by_samples(conv_net, run_federation):
    loop = run_federation(lambda: FedAvg(conv_net()), rounds=1)
    sent = [loop.diary.sent[1, client] for client in range(4)]
    merged = loop.exchange.global_message().weights
    name = "model.body.stages.0.1.running_var"
    total = sum(message.num_samples for message in sent)
    expected = sum(message.weights[name].double() * message.num_samples for message in sent) / total
    torch.testing.assert_close(merged[name], expected.float(), rtol=1e-6, atol=0)
    name = "model.body.stages.0.1.num_batches_tracked"
    counters = [int(message.weights[name]) for message in sent]
    assert merged[name].dtype == torch.int64
    assert merged[name].item() == max(counters)
    assert len(set(counters)) > 1


def test_fedavg_sends_the_whole_model_both_ways(conv_net, run_federation):
    loop = run_federation(lambda: FedAvg(conv_net()), rounds=2, participation=0.5)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for row in loop.diary.rows:
        assert row["uplink_params"] == row["downlink_params"] == 2 * size


def test_fedavg_keeps_nothing_private(conv_net, run_federation):
    loop = run_federation(lambda: FedAvg(conv_net()))
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


def test_fedavg_clients_receive_the_global_model(mlp, run_federation):
    """All clients score as the server's model does, on the union of their test splits."""
    loop = run_federation(lambda: FedAvg(mlp()), rounds=4)
    rows = loop.diary.rows
    for before, row in itertools.pairwise(rows):
        assert row["Global-T_received"] == pytest.approx(before["Server-T"], abs=1e-12)
        assert row["Global-T_received_std"] == 0.0
    assert loop.final["Global-T_received"] == pytest.approx(rows[-1]["Server-T"], abs=1e-12)


def test_fedavg_under_partial_participation_does_not_shrink_the_model(mlp, sgd, run_federation, set_up_federation):
    before = set_up_federation(lambda: FedAvg(mlp())).exchange.global_message().weights
    loop = run_federation(lambda: FedAvg(mlp()), rounds=3, participation=0.25, optimizer=sgd(0.0))
    after = loop.exchange.global_message().weights
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("options", [{}, {"evaluate_every": 2}, {"participation": 0.5}], ids=str)
@pytest.mark.parametrize("order", [list, lambda clients: clients[::-1]], ids=["in order", "reversed"])
def test_evaluating_the_global_model_leaves_a_clients_own_state_alone(mlp, set_up_federation, options, order):
    """A term may keep something of the client's own beside a model that is wholly shared."""
    loop = set_up_federation(lambda: FedAvg(mlp(), extra_terms=[CountsFits()]), rounds=5, **options)
    loop.fit_order = order
    loop.run()
    turns = [sum(client == c for _, c in loop.diary.sent) for client in range(4)]
    fits = [loop.runner.pool.get(c)["terms.1.fits"].item() if turns[c] else 0 for c in range(4)]
    assert fits == turns
