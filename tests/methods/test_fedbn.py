"""The tests that the specification of FedBN promises (BASELINES-A.md, section 5)."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.models.resnet import ResNet18

NORM = "model.body.stages.0.1."


def norms_of(method):
    kinds = (nn.BatchNorm2d, nn.SyncBatchNorm)
    return [name for name, module in method.named_modules() if isinstance(module, kinds)]


def test_fedbn_without_batch_norm_is_fedavg_bit_for_bit(mlp, run_federation, outcome, assert_identical):
    plain = run_federation(lambda: FedAvg(mlp()), participation=0.5)
    assert_identical(outcome(run_federation(lambda: FedBN(mlp()), participation=0.5)), outcome(plain))


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 11_172_042), ("cifar", 11_164_362)])
def test_fedbn_sends_no_batch_norm_of_a_resnet(stem, size, make_client):
    """20 layers of five tensors, the three of the downsampling paths among them; 9,600 scales and shifts."""
    client = make_client(FedBN(ResNet18((3, 32, 32), 10, stem=stem)))
    message = client.initial_message()
    private = set(client.entries) - set(message.weights)
    norms = norms_of(client.method)
    assert len(norms) == 20
    assert sum("downsample.1" in name for name in norms) == 3
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert private == {f"{name}.{tensor}" for name in norms for tensor in tensors}
    assert message.num_params == size


def test_fedbn_keeps_batch_norm_over_a_receive_and_loads_the_rest(conv_net, run_federation):
    loop = run_federation(lambda: FedBN(conv_net()), rounds=2)
    for client in range(4):
        kept = {name: tensor.clone() for name, tensor in loop.runner.pool.get(client).items()}
        assert {name for name in kept if name.startswith(NORM)} == set(kept)
        module = loop.runner.load(client)
        message = loop.exchange.inbox(client)
        module.receive(message, loop.data.clients[client])
        assert all(torch.equal(module.entries[name], tensor) for name, tensor in kept.items())
        assert all(torch.equal(module.entries[name], tensor) for name, tensor in message.weights.items())
    means = [loop.runner.pool.get(client)[NORM + "running_mean"] for client in range(4)]
    assert not torch.equal(means[0], means[1])


def test_fedbn_trains_batch_norm_with_the_rest(conv_net, run_federation, set_up_federation):
    initial = set_up_federation(lambda: FedBN(conv_net())).runner.modules[0].entries[NORM + "weight"]
    loop = run_federation(lambda: FedBN(conv_net()), rounds=1)
    assert not torch.equal(loop.runner.pool.get(0)[NORM + "weight"], initial)


def test_fedbn_client_that_never_took_part_keeps_the_initial_batch_norm_and_is_evaluated(conv_net, run_federation):
    loop = run_federation(lambda: FedBN(conv_net()), rounds=1, participation=0.25)
    resting = [client for client in range(4) if (1, client) not in loop.diary.sent]
    assert len(resting) == 3
    for client in resting:
        assert loop.runner.pool.get(client) is None
        assert 0 <= loop.scores["Local-T"][client] <= 1
        module = loop.runner.load(client)
        module.receive(loop.exchange.inbox(client), loop.data.clients[client])
        assert torch.equal(module.entries[NORM + "running_var"], torch.ones(3))
        assert torch.equal(module.entries[NORM + "weight"], torch.ones(3))


def test_fedbn_has_no_server_accuracy(conv_net, run_federation):
    assert run_federation(lambda: FedBN(conv_net()), rounds=1).diary.rows[0]["Server-T"] is None


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedbn_weighs_clients_as_told(mlp, run_federation, weighting):
    loop = run_federation(lambda: FedBN(mlp(), weighting=weighting), rounds=1)
    messages = [loop.diary.sent[1, client] for client in range(4)]
    counts = [message.num_samples if weighting == "samples" else 1 for message in messages]
    for name, merged in loop.exchange.global_message().weights.items():
        expected = sum(c * m.weights[name].double() for c, m in zip(counts, messages, strict=True)) / sum(counts)
        torch.testing.assert_close(merged, expected.float())


@pytest.mark.parametrize(
    ("layer", "private"),
    [(nn.SyncBatchNorm(3), 5), (nn.BatchNorm2d(3, affine=False), 3), (nn.GroupNorm(1, 3), 0), (nn.LayerNorm(4), 0)],
    ids=lambda value: type(value).__name__,
)
def test_fedbn_finds_batch_norm_by_its_type(conv_net, make_client, layer, private):
    model = conv_net()
    model.body.stages[0][1] = layer
    kept = make_client(FedBN(model)).division.kept
    assert len(kept) == private
    assert all(name.startswith(NORM) for name in kept)


def test_fedbn_rejects_an_unknown_weighting(mlp):
    with pytest.raises(ConfigError, match=r"method\.weighting: must be one of samples, uniform, got 'equal'"):
        FedBN(mlp(), weighting="equal")
