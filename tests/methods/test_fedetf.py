"""FedETF: one fixed classifier for all, and its personalisation."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedetf import FedETF
from fl_lightning.models.equiangular import EquiangularHead, simplex_frame


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedETF(mlp(), finetune_rounds=0), data=data, rounds=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    frame = model.head.frame.detach().clone()
    loop.run()
    n = data.clients[0].class_counts.float()
    for round in (1, 2):
        received = loop.diary.received[round, 0].weights
        assert "model.head.frame" not in received
        model.load_state_dict({**{k.removeprefix("model."): t for k, t in received.items()}, "head.frame": frame})

        def loss(x, y):
            h = model.head.projection(model.embed(x))
            logits = model.head.scale * (h / h.norm(dim=1, keepdim=True)) @ frame
            e = n * logits.exp()
            return -(e[range(len(y)), y] / e.sum(1)).log().mean()

        train_by_hand(model, data.clients[0], sgd(), round, loss=loss)
        for name, tensor in model.state_dict().items():
            if name != "head.frame":
                sent = loop.diary.sent[round, 0].weights[f"model.{name}"]
                torch.testing.assert_close(sent, tensor, rtol=1e-4, atol=1e-6)


def test_classes_are_as_far_apart_as_they_can_be():
    for size, classes in ((4, 4), (7, 2), (12, 10)):
        frame = simplex_frame(size, classes).double()
        expected = torch.full((classes, classes), -1 / (classes - 1)).fill_diagonal_(1).double()
        torch.testing.assert_close(frame.T @ frame, expected, rtol=0, atol=1e-6)
        assert frame.sum(1).abs().max() < 1e-6


def test_logits_by_hand():
    """V of two classes is ±v; h = (3, 4) has length 5."""
    head = EquiangularHead(2, 2)
    with torch.no_grad():
        head.projection.weight.copy_(torch.eye(2))
        head.projection.bias.zero_()
        head.frame.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        head.scale.fill_(10.0)
    assert head(torch.tensor([[3.0, 4.0]])).tolist() == [[pytest.approx(6), pytest.approx(-6)]]


def test_personalisation_moves_a_copy_and_the_frame_comes_back(mlp, make_data, run_federation):
    data = make_data(((10, 10, 0, 0), (0, 0, 10, 10)))
    loop = run_federation(lambda: FedETF(mlp(), finetune_rounds=2), data=data, rounds=2)
    plain = run_federation(lambda: FedETF(mlp(), finetune_rounds=0), data=data, rounds=2)
    assert [row["loss"] for row in loop.diary.rows] == [row["loss"] for row in plain.diary.rows]
    rows, others = loop.diary.rows[-1], plain.diary.rows[-1]
    assert (rows["Server-T"], rows["Local-T_received"] > others["Local-T_received"]) == (others["Server-T"], True)
    client = loop.runner.load(0)
    client.receive(loop.exchange.inbox(0), data.clients[0])
    head, frame = client.method.model.head, client.method.frame
    assert torch.equal(head.frame, frame)
    client.configure_optimizers()
    before = {name: tensor.clone() for name, tensor in client.method.model.state_dict().items()}
    client.adapt(data.clients[0])
    after = client.method.model.state_dict()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {"head.frame", "head.projection.weight", "head.projection.bias"}
    assert not head.frame.requires_grad
    x, y = next(data.clients[0].batches("train"))
    with torch.no_grad():
        risks = [F.cross_entropy(head(client.method.model.embed(x)), y)]
        client.receive(loop.exchange.inbox(0), data.clients[0])
        risks.append(F.cross_entropy(head(client.method.model.embed(x)), y))
    assert risks[0] < risks[1]
    assert torch.equal(head.frame, frame)


def test_a_failed_personalisation_leaves_the_frame_as_it_was(mlp, data, set_up_federation, monkeypatch):
    loop = set_up_federation(lambda: FedETF(mlp()), data=data)
    client = loop.runner.load(0)

    def fails(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("fl_lightning.methods.fedetf.train_copy", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        client.adapt(data.clients[0])
    assert not client.method.model.head.frame.requires_grad


def test_sizes_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.projection_size: must be >= 4, the classes, or null, got 3"):
        FedETF(mlp(), projection_size=3)
    for options in ({"finetune_rounds": -1}, {"finetune_epochs": 0}, {"finetune_lr": 0.0}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be >"):
            FedETF(mlp(), **options)
