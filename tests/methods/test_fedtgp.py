"""The tests that the specification of FedTGP promises (BASELINES-B.md, section 9a)."""

import copy

import numpy as np
import pytest
import torch

import fl_lightning.methods.fedtgp as module_under_test
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Seen, headline
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedtgp import FedTGP, PrototypeNetwork
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import CNN

QUICK = {"server_epochs": 3}


def upload(*rows, classes=4):
    """A message of class means, each (vector, class)."""
    mean, count = torch.zeros(classes, len(rows[0][0])), torch.zeros(classes, dtype=torch.long)
    for vector, y in rows:
        mean[y], count[y] = torch.tensor(vector), 1
    return Message({}, {"prototypes": ClassMeans(mean, count)}, len(rows))


@pytest.fixture
def make_server(make_client):
    """The server of a method, set up."""

    def make(method):
        server = make_client(method).make_server(Facts())
        server.setup(Facts())
        return server

    return make


@pytest.fixture
def line_server(mlp, make_server):
    """A server whose prototypes are numbers."""
    return lambda **options: make_server(FedTGP(mlp(hidden=(), shape=(1,)), **{**QUICK, **options}))


@pytest.fixture
def margins(monkeypatch):
    """The margins of the losses that are computed."""
    seen, loss = [], module_under_test.prototype_margin_loss

    def spy(u, y, prototypes, margin):
        seen.append(margin)
        return loss(u, y, prototypes, margin)

    monkeypatch.setattr(module_under_test, "prototype_margin_loss", spy)
    return seen


# --- the server's prototypes ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "margin"), [({}, 7.0), ({"gap": "pairwise"}, 10.0), ({"max_margin": 5.0}, 5.0), ({"max_margin": 0}, 0)]
)
def test_fedtgp_margin_is_the_gap_of_the_rounds_class_means_up_to_the_largest(line_server, margins, options, margin):
    """Class means 0, 3 and 10, the first of −1 and 1 of two clients."""
    server = line_server(**options)
    server.aggregate({0: upload(([-1.0], 0), ([3.0], 1)), 1: upload(([1.0], 0), ([10.0], 3))})
    assert set(margins) == {margin}


def test_fedtgp_server_makes_so_many_passes(line_server, margins):
    server = line_server(server_epochs=4, server_batch_size=2)
    server.aggregate({0: upload(([-1.0], 0), ([3.0], 1)), 1: upload(([1.0], 0), ([10.0], 3), ([2.0], 2))})
    assert len(margins) == 4 * 3


def test_fedtgp_server_without_uploads_changes_nothing(line_server, assert_identical):
    server = line_server()
    server.aggregate({0: upload(([-1.0], 0), ([3.0], 1))})
    before, message = copy.deepcopy(server.network.state_dict()), server.message
    server.aggregate({})
    assert_identical(server.network.state_dict(), before)
    assert_identical(server.message.artifacts["prototypes"].mean, message.artifacts["prototypes"].mean)


def test_fedtgp_classes_that_nobody_has_uploaded_have_no_prototype(line_server):
    server = line_server()
    assert "prototypes" not in server.message_for(0).artifacts
    server.aggregate({0: upload(([-1.0], 0), ([3.0], 1))})
    assert server.message.artifacts["prototypes"].valid.tolist() == [True, True, False, False]
    server.aggregate({0: upload(([3.0], 3))})
    assert server.message.artifacts["prototypes"].valid.tolist() == [True, True, False, True]


def test_fedtgp_network_persists_and_its_optimizer_does_not(line_server):
    server = line_server()
    message = {0: upload(([-1.0], 0), ([3.0], 1))}
    networks, optimizers = set(), set()
    for _ in range(3):
        server.aggregate(message)
        networks.add(server.network)
        optimizers.add(server.network_optimizer)
    assert (len(networks), len(optimizers)) == (1, 3)


def test_fedtgp_prototypes_separate_the_classes(mlp, make_server):
    server = make_server(FedTGP(mlp(hidden=(8, 32)), server_lr=0.1, server_epochs=200))
    eye = torch.eye(32).mul(3).tolist()
    server.aggregate({0: upload((eye[0], 0), (eye[1], 1)), 1: upload((eye[2], 2), (eye[3], 3))})
    prototypes = server.message.artifacts["prototypes"].mean
    assert torch.cdist(torch.tensor(eye[:4]), prototypes).argmin(1).tolist() == [0, 1, 2, 3]


def test_fedtgp_network_has_so_many_parameters():
    assert sum(p.numel() for p in PrototypeNetwork(10, 512).parameters()) == 530_432


def test_fedtgp_sends_class_means_and_receives_prototypes(mlp, run_federation):
    """D = 5: K (D + 1) up, C D down once there are prototypes."""
    loop = run_federation(lambda: FedTGP(mlp(), **QUICK), rounds=2)
    held = sum(int(client.held_classes.sum()) for client in loop.data.clients)
    first, second = loop.diary.rows
    assert (first["uplink_params"], first["downlink_params"]) == (held * 6, 0)
    assert (second["uplink_params"], second["downlink_params"]) == (held * 6, 4 * 4 * 5)


@pytest.mark.parametrize("num_classes", [10, 100])
def test_fedtgp_full_size(num_classes, make_server):
    server = make_server(FedTGP(CNN((1, 28, 28), num_classes), server_epochs=1))
    sent = Message({}, {"prototypes": ClassMeans(torch.randn(num_classes, 512), torch.ones(num_classes).long())}, 1)
    assert sent.num_params == num_classes * 513
    assert server.aggregate({0: sent}).num_params == num_classes * 512


# --- clients ----------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedtgp_clients_train_as_locals_when_weight_is_zero(conv_net, run_federation, assert_identical, participation):
    method = lambda: FedTGP(conv_net(), weight=0.0, inference="classifier", **QUICK)  # noqa: E731
    tgp = run_federation(method, participation=participation)
    local = run_federation(lambda: Local(conv_net()), participation=participation)
    for client in range(4):
        assert_identical(dict(tgp.runner.pool.get(client) or {}), dict(local.runner.pool.get(client) or {}))
    for row, other in zip(tgp.diary.rows, local.diary.rows, strict=True):
        assert (row["Local-T"], row["loss"]) == (other["Local-T"], other["loss"])


def test_fedtgp_loss_is_cross_entropy_plus_the_weighted_distance(mlp, run_federation):
    rows = run_federation(lambda: FedTGP(mlp(), **QUICK), rounds=2).diary.rows
    assert rows[0]["loss/prototype_alignment"] == 0
    total = rows[1]["loss/cross_entropy"] + 10 * rows[1]["loss/prototype_alignment"]
    assert rows[1]["loss"] == pytest.approx(total, rel=1e-5)
    assert rows[1]["loss/prototype_alignment"] > 0


def test_fedtgp_distance_is_a_mean_over_samples_whose_class_has_a_prototype(mlp, make_client):
    client = make_client(FedTGP(mlp()))
    method = client.method
    method.alignment.receive(method, upload(([1.0] * 5, 0), ([2.0] * 5, 1)))
    out = client.step(torch.randn(6, 1, 8, 8), torch.tensor([0, 3, 1, 2, 3, 3])).forward()
    target = torch.tensor([[1.0], [2.0]])
    torch.testing.assert_close(method.alignment(method, out), (out.z[[0, 2]] - target).square().mean())


def test_fedtgp_predicts_the_nearest_trained_prototype(mlp, run_federation):
    loop = run_federation(lambda: FedTGP(mlp(), **QUICK), rounds=2)
    prototypes, hits = loop.exchange.server.network().detach(), []
    for data in loop.data.clients:
        model = loop.runner.load(data.client).method.model.eval()
        x, y = loop.data.store.gather(data.test)
        with torch.no_grad():
            hits.append((torch.cdist(model.embed(x), prototypes).argmin(1) == y).double().mean().item())
    assert loop.final["Local-T_received"] == pytest.approx(np.mean(hits))
    row = loop.diary.rows[-1]
    assert row["Local-T"] == row["Local-T/prototype"]
    assert "Local-T/classifier" in row


def test_fedtgp_predicts_with_the_classifier_before_there_are_prototypes(mlp, make_client):
    method, x = make_client(FedTGP(mlp())).method, torch.randn(5, 1, 8, 8)
    ways = method.predictors()
    assert torch.equal(ways["prototype"].scores(Seen(x)), method.model(x))
    method.alignment.receive(method, upload(([9.0] * 5, 2)))
    assert ways["prototype"].scores(Seen(x)).argmax(1).tolist() == [2] * 5
    assert torch.equal(ways["classifier"].scores(Seen(x)), method.model(x))
    assert headline(ways, "Local-T") == "prototype"
    assert headline(FedTGP(mlp(), inference="classifier").predictors(), "Local-T") == "classifier"


def test_fedtgp_mixes_architectures_of_one_embedding_size(mlp, run_federation):
    method = lambda a: FedTGP(mlp(hidden=((8, 5), (11, 5))[a]), **QUICK)  # noqa: E731
    loop = run_federation(method, architecture=[0, 1, 0, 1], rounds=2)
    assert loop.exchange.global_message().artifacts["prototypes"].mean.shape == (4, 5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_fedtgp_trains_in_other_precisions(conv_net, run_federation, precision):
    loop = run_federation(lambda: FedTGP(conv_net(), **QUICK), rounds=2, trainer={"precision": precision})
    prototypes = loop.exchange.global_message().artifacts["prototypes"].mean
    assert prototypes.dtype == torch.float32
    assert prototypes.isfinite().all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight", -1.0),
        ("server_lr", 0.0),
        ("server_epochs", -1),
        ("server_batch_size", 0),
        ("max_margin", -1.0),
        ("gap", "some"),
        ("inference", "some"),
    ],
)
def test_fedtgp_rejects_bad_options(mlp, option, value):
    with pytest.raises(ConfigError, match=rf"^method\.{option}: must be .*got"):
        FedTGP(mlp(), **{option: value})
