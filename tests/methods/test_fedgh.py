"""The tests that the specification of FedGH promises (BASELINES-B.md, section 2)."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.fedgh import FedGH
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import CNN


def client_data(x, y, num_classes):
    store = TensorStore(Arrays(x, y, len(y), tuple(map(str, range(num_classes)))))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(0, store, num_classes, np.arange(len(y)), nothing, nothing)


def upload(*rows, classes=2):
    """A message of class means, each (vector, class, samples)."""
    mean, count = torch.zeros(classes, len(rows[0][0])), torch.zeros(classes, dtype=torch.long)
    for vector, y, n in rows:
        mean[y], count[y] = torch.tensor(vector), n
    return Message({}, {"class_means": ClassMeans(mean, count)}, int(count.sum()))


def server_of(client):
    """A client's server, set up."""
    server = client.make_server(Facts())
    server.setup(Facts())
    return server


@pytest.fixture
def plane_server(mlp, make_client):
    """A server whose zero head maps the plane to two classes."""

    def make(**options):
        method = FedGH(mlp(hidden=(), shape=(2,), num_classes=2), **{"server_lr": 1.0, **options})
        for parameter in method.model.head.parameters():
            torch.nn.init.zeros_(parameter)
        return server_of(make_client(method))

    return make


def head_of(server):
    return {name.removeprefix("model.head."): tensor for name, tensor in server.message.weights.items()}


def heads_sent(loop, round):
    return {client: m.weights for (r, client), m in loop.diary.received.items() if r == round}


# --- the server's step ----------------------------------------------


def test_fedgh_server_takes_one_step_of_cross_entropy(plane_server):
    """Softmax of zeros is (1/2, 1/2): W −= (p − e_0) vᵀ, b −= p − e_0."""
    server = plane_server()
    server.aggregate({0: upload(([1.0, 0.0], 0, 5))})
    assert head_of(server)["weight"].tolist() == [[0.5, 0.0], [-0.5, 0.0]]
    assert head_of(server)["bias"].tolist() == [0.5, -0.5]


def test_fedgh_server_without_uploads_keeps_head_and_optimizer(plane_server, assert_identical):
    server = plane_server(server_momentum=0.9)
    server.aggregate({0: upload(([1.0, 0.0], 0, 5))})
    before, state = copy.deepcopy(head_of(server)), copy.deepcopy(server.state_dict())
    server.aggregate({})
    assert_identical(head_of(server), before)
    assert_identical(server.state_dict()["optimizer"]["state"], state["optimizer"]["state"])


def test_fedgh_server_counts_each_class_mean_once_or_by_samples(plane_server):
    """Bias gradients of v = 0: the mean of p − e_c is (0, 0) for one mean each, (1/2 − 3/4, 1/2 − 1/4) for 3 : 1."""
    messages = {0: upload(([0.0, 0.0], 0, 3)), 1: upload(([0.0, 0.0], 1, 1))}
    alike, weighted = plane_server(), plane_server(weighting="count")
    alike.aggregate(messages)
    weighted.aggregate(messages)
    assert head_of(alike)["bias"].tolist() == [0.0, 0.0]
    assert head_of(weighted)["bias"].tolist() == [0.25, -0.25]


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(1, 10, 1), (3, 2, 6), (0, 10, 0)])
def test_fedgh_server_makes_so_many_passes(plane_server, epochs, batch_size, steps):
    server = plane_server(server_epochs=epochs, server_batch_size=batch_size)
    taken = []
    server.network_optimizer.register_step_post_hook(lambda *_: taken.append(1))
    server.aggregate({0: upload(([1.0, 0.0], 0, 5), ([0.0, 1.0], 1, 2)), 1: upload(([1.0, 1.0], 1, 2))})
    assert len(taken) == steps


def test_fedgh_server_momentum_crosses_rounds(plane_server):
    """Second step: momentum 0.9 times the first gradient beside the new one."""
    server, twice = plane_server(server_momentum=0.9), {0: upload(([0.0, 0.0], 0, 1))}
    first = server.aggregate(twice).weights["model.head.bias"].clone()
    second = server.aggregate(twice).weights["model.head.bias"]
    p = first.softmax(0)
    expected = first - (p - torch.tensor([1.0, 0.0]) + 0.9 * torch.tensor([-0.5, 0.5]))
    torch.testing.assert_close(second, expected)


def test_fedgh_head_is_trained_by_the_federation(mlp, run_federation):
    """In the authors' code the head is in no optimizer: it stays at its random start."""
    loop = run_federation(lambda: FedGH(mlp(), server_lr=0.5, server_epochs=20), rounds=4)
    heads = [heads_sent(loop, round)[0]["model.head.weight"] for round in (1, 2, 3, 4)]
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(heads))
    server = loop.exchange.server
    messages = [loop.diary.sent[4, client] for client in range(4)]
    v = torch.cat([m.artifacts["class_means"].mean[m.artifacts["class_means"].valid] for m in messages])
    y = torch.cat([m.artifacts["class_means"].valid.nonzero().flatten() for m in messages])
    first = loop.diary.received[1, 0].weights
    start = F.cross_entropy(v @ first["model.head.weight"].T + first["model.head.bias"], y)
    assert F.cross_entropy(server.network(v), y) < 0.7 * start


# --- what travels ----------------------------------------------


@pytest.mark.parametrize(("num_classes", "held", "up"), [(10, range(10), 5130), (10, [1, 4], 1026), (100, [5], 513)])
def test_fedgh_sends_class_means_and_receives_the_head(make_client, num_classes, held, up):
    y = torch.tensor(list(held)).repeat(2)
    x = torch.rand(len(y), 1, 28, 28, generator=torch.Generator().manual_seed(0))
    client = make_client(FedGH(CNN((1, 28, 28), num_classes)))
    message = client.send(client_data(x, y, num_classes))
    assert message.num_params == up
    server = server_of(client)
    assert server.message_for(0).num_params == num_classes * 513
    server.aggregate({0: message})
    assert server.message_for(0).num_params == num_classes * 513


def test_fedgh_all_start_from_one_head_and_hear_the_same(mlp, run_federation, assert_identical):
    loop = run_federation(lambda: FedGH(mlp()), rounds=3, init="own")
    for round in (1, 2, 3):
        heads = heads_sent(loop, round)
        assert len(heads) == 4
        for client in range(4):
            assert_identical(heads[client], heads[0])


def test_fedgh_class_means_are_those_of_samples_not_of_batches(mlp, make_client):
    """600 samples of one class in batches of 512 and 88, of embeddings 1 and 5: 1 + 4 · 88 / 600, not 3."""
    x, y = torch.ones(600, 2), torch.zeros(600, dtype=torch.long)
    x[512:] = 5.0
    client = make_client(FedGH(mlp(hidden=(), shape=(2,), num_classes=2)))
    sent = client.send(client_data(x, y, 2)).artifacts["class_means"]
    torch.testing.assert_close(sent.mean[0], torch.full((2,), 1 + 4 * 88 / 600))
    assert sent.count.tolist() == [600, 0]


def test_fedgh_collects_in_eval_mode_after_the_fit(conv_net, run_federation):
    loop = run_federation(lambda: FedGH(conv_net()), rounds=2)
    for data in loop.data.clients:
        model = loop.runner.load(data.client).method.model.eval()
        x, y = loop.data.store.gather(data.train)
        with torch.no_grad():
            expected = ClassMeans.from_samples(model.embed(x), y, 4)
        torch.testing.assert_close(loop.diary.sent[2, data.client].artifacts["class_means"].mean, expected.mean)


# --- bodies and heads ----------------------------------------------


def test_fedgh_with_an_untrained_head_trains_bodies_as_hand_written(
    mlp, sgd, set_up_federation, train_by_hand, assert_identical
):
    loop = set_up_federation(lambda: FedGH(mlp(), server_epochs=0), rounds=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    head = copy.deepcopy(model.head.state_dict())
    loop.run()
    for round in (1, 2):
        model.head.load_state_dict(head)
        train_by_hand(model, loop.data.clients[0], sgd(), round)
    assert_identical({f"model.{n}": t for n, t in model.state_dict().items()}, dict(loop.runner.pool.get(0)))


def test_fedgh_first_round_is_local(mlp, run_federation, assert_identical):
    one, other = (run_federation(lambda m=m: m(mlp()), rounds=1) for m in (FedGH, Local))
    for client in range(4):
        assert_identical(dict(one.runner.pool.get(client)), dict(other.runner.pool.get(client)))


def test_fedgh_server_step_changes_no_client(mlp, set_up_federation, assert_identical):
    loop = set_up_federation(lambda: FedGH(mlp(), server_lr=0.5), rounds=2)
    close, states = loop.exchange.close, []

    def watched():
        for _ in range(2):
            states.append({c: {n: t.clone() for n, t in loop.runner.pool.get(c).items()} for c in range(4)})
            if len(states) % 2:
                close()

    loop.exchange.close = watched
    loop.run()
    assert_identical(states[0], states[1])
    assert_identical(states[2], states[3])


def test_fedgh_training_a_client_does_not_change_the_servers_head(mlp, set_up_federation):
    loop = set_up_federation(lambda: FedGH(mlp()), rounds=1)
    network = loop.exchange.server.network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    seen = []
    loop.exchange.post = lambda client, message: seen.append(
        all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    )
    loop.advance()
    assert seen == [True] * 4
    addresses = {tensor.data_ptr() for tensor in loop.runner.modules[0].state_dict().values()}
    assert not addresses & {tensor.data_ptr() for tensor in network.state_dict().values()}
    assert not torch.equal(loop.runner.pool.get(0)["model.head.weight"], before["weight"])


def test_fedgh_evaluates_own_and_received_heads(mlp, run_federation):
    loop = run_federation(lambda: FedGH(mlp()), rounds=2)
    hits = {"trained": [], "received": []}
    for data in loop.data.clients:
        model = loop.runner.load(data.client).method.model.eval()
        x, y = loop.data.store.gather(data.test)
        with torch.no_grad():
            z = model.embed(x)
            hits["trained"].append((model.head(z).argmax(1) == y).double().mean().item())
            hits["received"].append((loop.exchange.server.network(z).argmax(1) == y).double().mean().item())
    assert loop.diary.rows[-1]["Local-T"] == pytest.approx(np.mean(hits["trained"]))
    assert loop.final["Local-T_received"] == pytest.approx(np.mean(hits["received"]))
    assert loop.diary.rows[-1]["Server-T"] is None


# --- running ----------------------------------------------


def test_fedgh_mixes_bodies_of_one_embedding_size(mlp, run_federation):
    loop = run_federation(lambda a: FedGH(mlp(hidden=((8, 5), (11, 5))[a])), architecture=[0, 1, 0, 1], rounds=2)
    assert loop.exchange.server.network.weight.shape == (4, 5)
    with pytest.raises(ConfigError, match=r"FedGH exchanges 'model\.head\.weight'"):
        run_federation(lambda a: FedGH(mlp(hidden=((8, 5), (8, 7))[a])), architecture=[0, 1, 0, 1])


def test_fedgh_resumes_exactly_with_momentum(mlp, assert_resumes):
    method = lambda: FedGH(mlp(), server_momentum=0.9, server_lr=0.1, server_batch_size=2)  # noqa: E731
    assert_resumes(method, rounds=4, participation=0.5)


def test_fedgh_costs_one_forward_pass_over_the_data_also_beside_a_term(mlp, set_up_federation):
    off = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
    for terms in ([], [PrototypeAlignment()]):
        loop = set_up_federation(lambda t=terms: FedGH(mlp(), extra_terms=copy.deepcopy(t)), rounds=1, evaluate=off)
        counts = {True: 0, False: 0}
        loop.runner.modules[0].method.model.body.stages[0].register_forward_pre_hook(
            lambda stage, args, counts=counts: counts.update({stage.training: counts[stage.training] + 1})
        )
        loop.advance()
        assert counts == {True: sum(report.num_steps for report in loop.diary.reports.values()), False: 4}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_fedgh_trains_in_other_precisions(conv_net, run_federation, precision):
    loop = run_federation(lambda: FedGH(conv_net()), rounds=2, trainer={"precision": precision})
    head = loop.exchange.server.network
    assert head.weight.dtype == torch.float32
    assert head.weight.isfinite().all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("server_lr", 0.0),
        ("server_momentum", 1.0),
        ("server_epochs", -1),
        ("server_batch_size", 0),
        ("weighting", "some"),
    ],
)
def test_fedgh_rejects_bad_options(mlp, option, value):
    with pytest.raises(ConfigError, match=rf"^method\.{option}: must be .*got"):
        FedGH(mlp(), **{option: value})
