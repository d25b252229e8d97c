"""The tests that the specification of FedPer promises (BASELINES-A.md, section 6)."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.local import Local
from fl_lightning.models.resnet import ResNet18

HEAD = {"model.head.weight", "model.head.bias"}


def test_fedper_without_private_layers_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    plain = run_federation(lambda: FedAvg(conv_net()), participation=0.5)
    empty = run_federation(lambda: FedPer(conv_net(), head_layers=0), participation=0.5)
    assert_identical(outcome(empty), outcome(plain))


def test_fedper_of_one_client_is_local_bit_for_bit(conv_net, make_data, run_federation, assert_identical):
    data = make_data(counts=((12, 8, 5, 4),))
    alone, shared = (run_federation(lambda m=m: m(conv_net()), data=data) for m in (Local, FedPer))
    own = {**shared.runner.pool.get(0), **shared.exchange.global_message().weights}
    assert_identical(own, alone.runner.pool.get(0))
    assert [row["Local-T"] for row in shared.diary.rows] == [row["Local-T"] for row in alone.diary.rows]


def test_fedper_sends_the_body_with_its_buffers_and_no_head(conv_net, run_federation):
    loop = run_federation(lambda: FedPer(conv_net()), rounds=2)
    body = {f"model.{name}": tensor for name, tensor in conv_net().state_dict().items() if name.startswith("body")}
    for message in (*loop.diary.sent.values(), *loop.diary.received.values()):
        assert set(message.weights) == set(body)
        assert message.num_params == sum(tensor.numel() for tensor in body.values())
    assert loop.diary.rows[0]["Server-T"] is None
    assert all(set(loop.runner.pool.get(client)) == HEAD for client in range(4))


def test_fedper_heads_follow_the_data(mlp, make_data, run_federation):
    """Two clients of the same samples have the same head, a third one another."""

    def repeat(arrays):  # client 1's samples become client 0's
        arrays.x[12:24], arrays.y[12:24] = arrays.x[:12].clone(), arrays.y[:12].clone()

    data = make_data(counts=((6, 6), (6, 6), (4, 8)), batch_size=100, test_fraction=0.0, edit=repeat)
    loop = run_federation(lambda: FedPer(mlp(num_classes=2)), data=data, local_epochs=3)
    heads = [loop.runner.pool.get(client)["model.head.weight"] for client in range(3)]
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-4, atol=1e-6)  # samples are summed in another order
    assert (heads[0] - heads[2]).abs().max() > 1e-3


@pytest.mark.parametrize(("init", "same"), [("common", True), ("own", False)])
def test_fedper_heads_start_alike_or_each_from_its_own_draw(mlp, set_up_federation, init, same):
    loop = set_up_federation(lambda: FedPer(mlp()), init=init)
    heads = [loop.runner.load(client).entries["model.head.weight"].clone() for client in range(2)]
    bodies = [loop.runner.load(client).entries["model.body.neck.0.weight"].clone() for client in range(2)]
    assert torch.equal(*heads) == same
    assert torch.equal(*bodies)


def test_fedper_moves_the_cut_by_whole_layers(mlp, make_client):
    """The body's last layer, too; a batch norm goes with the layer that it normalises."""
    kept = lambda method: set(make_client(method).division.kept)  # noqa: E731
    assert kept(FedPer(mlp(), head_layers=1)) == HEAD
    assert kept(FedPer(mlp(), head_layers=2)) == HEAD | {
        "model.body.neck.0.weight",
        "model.body.neck.0.bias",
    }
    resnet = FedPer(ResNet18((3, 32, 32), 10), head_layers=2)
    norm = {f"bn2.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    last = {f"model.body.stages.4.1.{name}" for name in (*norm, "conv2.weight")}
    assert kept(resnet) == HEAD | last


def test_fedper_names_only_its_own_head(conv_net, make_client):
    """Not body layers that are called like it (public codes look for a part of a name)."""
    model = conv_net()
    model.body.header = torch.nn.Linear(2, 2)
    division = make_client(FedPer(model)).division
    assert "model.body.header.weight" in division.shared
    assert set(division.kept) == HEAD


def test_fedper_tells_terms_what_is_shared(mlp, make_client):
    term = Proximal(1.0)
    make_client(FedPer(mlp(), head_layers=2, extra_terms=[term]))
    assert set(term.names) == {"model.body.stages.0.1.weight", "model.body.stages.0.1.bias"}


@pytest.mark.parametrize("layers", [-1, 4])
def test_fedper_rejects_layers_that_are_not_there(mlp, layers):
    with pytest.raises(ConfigError, match=rf"method\.head_layers: must be from 0 to 3, .*MLP.*got {layers}"):
        FedPer(mlp(), head_layers=layers)
