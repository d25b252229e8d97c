"""The tests that the specification of FedCRL promises (BASELINES-B.md, section 9c)."""

import math

import pytest
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.losses.prototype import PrototypeContrast, prototype_contrast_loss
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcrl import FedCRL, global_share
from fl_lightning.methods.local import Local


def own_models(loop):
    states = [loop.runner.pool.get(client) for client in range(4)]
    return [{name: tensor for name, tensor in state.items() if name.startswith("model.")} for state in states]


@pytest.mark.parametrize("options", [{"weight": 0.0, "mixing": 1.0}, {"weight": 0.0}], ids=str)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_contrast_it_is_fedavg_bit_for_bit(conv_net, run_federation, assert_identical, options, participation):
    ours = run_federation(lambda: FedCRL(conv_net(), **options), participation=participation)
    theirs = run_federation(lambda: FedAvg(conv_net()), participation=participation)
    assert_identical(ours.exchange.state_dict(), theirs.exchange.state_dict())
    seconds = dict.fromkeys(COLUMNS)
    for mine, other in zip(ours.diary.rows, theirs.diary.rows, strict=True):
        assert_identical({**mine, **seconds}, {**other, **seconds})
    assert_identical(ours.final, theirs.final)


def test_that_takes_nothing_of_the_global_model_is_local_bit_for_bit(conv_net, run_federation, assert_identical):
    ours = run_federation(lambda: FedCRL(conv_net(), weight=0.0, mixing=0.0))
    theirs = run_federation(lambda: Local(conv_net()))
    assert_identical(dict(enumerate(own_models(ours))), dict(enumerate(own_models(theirs))))


def test_that_takes_nothing_of_the_global_model_still_exchanges_prototypes(mlp, run_federation):
    loop = run_federation(lambda: FedCRL(mlp(), mixing=0.0), rounds=2)
    assert loop.exchange.inbox(0).artifacts["prototypes"].valid.all()
    assert loop.diary.rows[1]["loss/prototype_contrast"] > 0


def test_uniform_similarities_take_the_whole_global_model():
    """A similarity that says nothing of the class costs log K, and θ = 1."""
    prototypes, y = torch.randn(7, 3), torch.arange(7)
    valid = torch.tensor([True] * 5 + [False] * 2)
    loss = prototype_contrast_loss(torch.zeros(7, 3), y, prototypes, 0.5, valid, average="valid")
    assert float(loss) == pytest.approx(math.log(5), abs=1e-6)
    assert global_share(float(loss), 5) == pytest.approx(1.0, abs=1e-6)
    assert global_share(10.0, 5) == 1.0
    assert global_share(0.0, 5) == 0.0


def test_one_class_costs_nothing_and_takes_nothing():
    valid = torch.tensor([True, False])
    z = torch.randn(3, 3, requires_grad=True)
    loss = prototype_contrast_loss(z, torch.zeros(3, dtype=torch.long), torch.randn(2, 3), 0.5, valid, average="valid")
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert global_share(float(loss.detach()), 1) == 0.0


def test_share_is_the_last_fits_loss_over_log_k(mlp, run_federation):
    loop = run_federation(lambda: FedCRL(mlp()), rounds=3)
    for client in range(4):
        share = float(loop.runner.pool.get(client)["global_share"])
        loss = loop.diary.reports[3, client].losses["prototype_contrast"]
        assert share == pytest.approx(min(1.0, loss / math.log(4)), abs=1e-6)
        assert 0 < share <= 1


def test_first_round_leaves_the_share_at_one(mlp, run_federation):
    """There is no prototype yet, so no loss: zero would shut the global model out."""
    loop = run_federation(lambda: FedCRL(mlp()), rounds=1)
    assert [float(loop.runner.pool.get(client)["global_share"]) for client in range(4)] == [1.0] * 4


def test_client_whose_classes_have_no_prototype_keeps_its_share(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedCRL(mlp()), rounds=1)
    module, data = loop.runner.modules[0], loop.data.clients[3]  # holds classes 2 and 3
    module.method.global_share.fill_(0.5)
    means = ClassMeans(torch.ones(4, 5), torch.tensor([3, 3, 0, 0]))
    module.receive(Message({}, {"prototypes": means}), data)
    loop.runner.fit(module, data, 1)
    assert float(module.method.global_share) == 0.5


@pytest.mark.parametrize("client", [0, 3])
def test_where_one_class_alone_has_a_prototype_nothing_is_taken(mlp, set_up_federation, client):
    """By definition: whether the client holds that class (0) or not (3)."""
    loop = set_up_federation(lambda: FedCRL(mlp()), rounds=1)
    module, data = loop.runner.modules[0], loop.data.clients[client]
    module.receive(Message({}, {"prototypes": ClassMeans(torch.ones(4, 5), torch.tensor([3, 0, 0, 0]))}), data)
    loop.runner.fit(module, data, 1)
    assert float(module.method.global_share) == 0.0


@pytest.mark.parametrize("client", [0, 1, 2])
def test_share_counts_samples_that_have_a_prototype_and_no_others(mlp, sgd, set_up_federation, client):
    """At learning rate 0 the mean over the fit is that of one pass; batches hold none to four such samples."""
    loop = set_up_federation(lambda: FedCRL(mlp()), rounds=1, optimizer=sgd(0.0), local_epochs=2)
    module, data = loop.runner.modules[0], loop.data.clients[client]
    x, y = data.store.gather(data.train)
    with torch.no_grad():
        z = module.method.model.embed(x)
    own = ClassMeans.from_samples(z, y, 4)
    mean = torch.where(own.valid[:, None], own.mean, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]))
    means = ClassMeans(mean, torch.tensor([3, 0, 3, 0]))
    module.receive(Message({}, {"prototypes": means}), data)
    loop.runner.fit(module, data, 1)
    loss = prototype_contrast_loss(z, y, means.mean, 0.5, means.valid, average="valid")
    assert 0 < float(loss) < math.log(2)
    assert float(module.method.global_share) == pytest.approx(float(loss) / math.log(2), rel=1e-5)


def test_receive_mixes_own_and_global_entries(conv_net, set_up_federation):
    loop = set_up_federation(lambda: FedCRL(conv_net()), rounds=1)
    module = loop.runner.modules[0]
    weights = {name: tensor + 4 for name, tensor in module.division.weights().items()}
    before = module.division.weights()
    module.method.global_share.fill_(0.25)
    module.receive(Message(weights), loop.data.clients[0])
    for name, tensor in module.division.weights().items():
        expected = before[name] + 1 if tensor.is_floating_point() else weights[name]  # a counter is taken as it is
        torch.testing.assert_close(tensor, expected)


def test_weights_that_do_not_fit_are_refused(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedCRL(mlp()), rounds=1)
    with pytest.raises(ValueError, match="this client has"):
        loop.runner.modules[0].receive(Message({"model.head.weight": torch.zeros(1)}), loop.data.clients[0])


def test_messages_hold_model_and_prototypes(mlp, run_federation):
    loop = run_federation(lambda: FedCRL(mlp()), rounds=2)
    size = sum(tensor.numel() for tensor in mlp().state_dict().values())
    for (_, client), message in loop.diary.sent.items():
        held = int(loop.data.clients[client].held_classes.sum())
        assert message.num_params == size + held * 5 + held
    assert loop.diary.received[2, 0].num_params == size + 4 * 5


def test_an_extra_contrast_in_the_place_of_its_own_leaves_the_share_at_one(mlp, run_federation):
    loop = run_federation(lambda: FedCRL(mlp(), weight=0.0, extra_terms=[PrototypeContrast(0.5)]), rounds=2)
    assert loop.diary.rows[1]["loss/prototype_contrast"] > 0
    assert [float(loop.runner.pool.get(client)["global_share"]) for client in range(4)] == [1.0] * 4


@pytest.mark.parametrize("options", [{"weight": -1}, {"temperature": 0}, {"mixing": 1.5}, {"mixing": -0.1}], ids=str)
def test_bad_values_are_refused(mlp, options):
    with pytest.raises(ConfigError, match=rf"^method\.{next(iter(options))}: must be"):
        FedCRL(mlp(), **options)
