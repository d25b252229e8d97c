"""The tests and invariants that the specification of FedProto promises (FedProto.md, section 8)."""

import copy

import numpy as np
import pytest
import torch
from sections import sectioned

from fl_lightning.building import build
from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Seen, headline
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import PrototypeAlignment, Prototypes
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import FedProtoCNN

PRESETS = {
    "paper": {"candidates": "local"},
    "pfllib": {"prototypes": Prototypes("running", "uniform"), "candidates": "global"},
    "feddw_table": {"prototypes": Prototypes("post", "count"), "inference": "classifier"},
}


def client_data(shape, num_classes, classes, per_class=4):
    y = torch.tensor(classes).repeat(per_class)
    x = torch.rand(len(y), *shape, generator=torch.Generator().manual_seed(0))
    store = TensorStore(Arrays(x, y, len(y), tuple(map(str, range(num_classes)))))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(0, store, num_classes, np.arange(len(y)), nothing, nothing)


def with_prototypes(client, mean, count):
    method = client.method
    method.alignment[0].receive(method, Message({}, {"prototypes": ClassMeans(mean, torch.tensor(count))}))
    return client


def scores(method, x, figure="Local-T"):
    """Of the predictor that gives a figure."""
    ways = method.predictors()
    return ways[headline(ways, figure)].scores(Seen(x))


def prototypes_of(loop):
    return loop.exchange.global_message().artifacts["prototypes"]


@pytest.fixture
def two_inputs(mlp):
    """FedProto of a client on the plane whose embedding is its input, three classes."""

    def make(**options):
        client = ClientModule(FedProto(mlp(hidden=(), shape=(2,), num_classes=3), **options))
        return with_prototypes(client, torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]), [1, 1, 1]).method

    return make


# --- what travels ----------------------------------------------


@pytest.mark.parametrize(("weighting", "params", "size"), [("count", 153, 150 * 4 + 3 * 8), ("uniform", 150, 150 * 4)])
def test_fedproto_client_of_three_classes_sends_150_values_and_its_counts(make_client, weighting, params, size):
    client = make_client(FedProto(FedProtoCNN((1, 28, 28), 10), prototypes=Prototypes(weighting=weighting)))
    message = client.send(client_data((1, 28, 28), 10, classes=[1, 4, 9]))
    assert (message.num_params, message.num_bytes) == (params, size)
    assert message.weights == {}
    assert message.artifacts["prototypes"].valid.nonzero().flatten().tolist() == [1, 4, 9]


@pytest.mark.parametrize(("shape", "classes", "size"), [((1, 28, 28), 10, 21_840), ((1, 128, 128), 62, 849_332)])
def test_fedproto_models_have_the_published_sizes(shape, classes, size):
    kernel = {} if shape[1] == 28 else {"kernel_size": 3}
    model = FedProtoCNN(shape, classes, **kernel)
    assert sum(p.numel() for p in model.parameters()) == size


def test_fedproto_traffic_counts_rows_of_held_classes_up_and_of_valid_classes_down(mlp, run_federation):
    """D = 5; the clients hold 2, 3, 3 and at most 2 classes; counts go up, none come down."""
    loop = run_federation(lambda: FedProto(mlp()), rounds=2)
    held = sum(int(client.held_classes.sum()) for client in loop.data.clients)
    first, second = loop.diary.rows
    assert first["uplink_params"] == second["uplink_params"] == held * (5 + 1)
    assert first["downlink_params"] == 0
    assert second["downlink_params"] == 4 * 4 * 5


def test_fedproto_with_uniform_weights_sends_no_counts(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp(), prototypes=Prototypes(weighting="uniform")), rounds=1)
    held = sum(int(client.held_classes.sum()) for client in loop.data.clients)
    assert loop.diary.rows[0]["uplink_params"] == held * 5
    assert all(set(m.artifacts["prototypes"].count.tolist()) <= {0, 1} for m in loop.diary.sent.values())


def test_fedproto_sends_a_client_only_its_own_classes_if_asked_for(mlp, run_federation):
    loop = run_federation(lambda: FedProto(mlp(), download="local"), rounds=3)
    held = sum(int(client.held_classes.sum()) for client in loop.data.clients)
    assert [row["downlink_params"] for row in loop.diary.rows] == [0, held * 5, held * 5]
    for client in loop.data.clients:
        received = loop.exchange.inbox(client.client).artifacts["prototypes"]
        assert torch.equal(received.valid, client.held_classes)


def test_fedproto_of_own_classes_resumes_exactly(
    mlp, run_federation, set_up_federation, outcome, assert_identical, tmp_path
):
    options = {"rounds": 4, "participation": 0.5}
    method = lambda: FedProto(mlp(), download="local")  # noqa: E731
    straight = run_federation(method, **options)
    halves = [set_up_federation(method, folder=tmp_path, **options) for _ in range(2)]
    for _ in range(2):
        halves[0].advance()
    halves[1].load_state_dict(halves[1].checkpoints.load(halves[1].checkpoints.find("auto")))
    halves[1].run()
    halves[1].diary.rows = halves[0].diary.rows + halves[1].diary.rows
    assert_identical(outcome(halves[1]), outcome(straight))


def test_fedproto_leaves_the_model_alone_when_messages_come_and_go(conv_net, data, make_client, assert_identical):
    client = make_client(FedProto(conv_net())).train()
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    message = client.send(data.clients[0])
    client.receive(message, data.clients[0])
    assert_identical(dict(client.entries), before)
    assert client.method.training


# --- collection and aggregation ----------------------------------------------


def test_fedproto_prototypes_of_clients_with_one_extractor_are_the_means_of_the_pooled_data(mlp, sgd, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=1, optimizer=sgd(0.0))
    module = loop.runner.load(0)
    x, y = loop.data.store.gather(torch.cat([client.train for client in loop.data.clients]))
    with torch.no_grad():
        pooled = ClassMeans.from_samples(module.method.model.embed(x), y, 4)
    torch.testing.assert_close(prototypes_of(loop).mean, pooled.mean, rtol=1e-6, atol=1e-7)


def test_fedproto_collects_after_the_fit_in_eval_mode(conv_net, run_federation):
    loop = run_federation(lambda: FedProto(conv_net()), rounds=2)
    for client in loop.data.clients:
        module = loop.runner.load(client.client).eval()
        x, y = loop.data.store.gather(client.train)
        with torch.no_grad():
            expected = ClassMeans.from_samples(module.method.model.embed(x), y, 4)
        sent = loop.diary.sent[2, client.client].artifacts["prototypes"]
        torch.testing.assert_close(sent.mean, expected.mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(sent.count, expected.count)


def test_fedproto_collects_over_the_last_epoch_of_the_moving_model(
    mlp, sgd, set_up_federation, train_by_hand, assert_identical
):
    loop = set_up_federation(lambda: FedProto(mlp(), prototypes=Prototypes("running")), rounds=1, local_epochs=2)
    model = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    client = loop.data.clients[0]
    seen = []

    def loss(x, y):
        z = model.embed(x)
        seen.append((z.detach(), y))
        return torch.nn.functional.cross_entropy(model.head(z), y)

    train_by_hand(model, client, sgd(), 1, epochs=2, loss=loss)
    last = seen[len(seen) // 2 :]
    expected = ClassMeans.from_samples(torch.cat([z for z, _ in last]), torch.cat([y for _, y in last]), 4)
    sent = loop.diary.sent[1, 0].artifacts["prototypes"]
    assert sent.count.sum() == client.num_train
    assert torch.equal(sent.count, expected.count)
    torch.testing.assert_close(sent.mean, expected.mean, rtol=1e-6, atol=1e-7)
    after = ClassMeans.from_samples(
        model.embed(loop.data.store.gather(client.train)[0]), client.store.y[client.train], 4
    )
    assert not torch.allclose(sent.mean, after.mean)


def test_fedproto_class_of_one_holder_keeps_its_prototype(mlp, make_data, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=1, data=make_data(((9, 8, 0, 0), (0, 8, 6, 6))))
    merged = prototypes_of(loop).mean
    for client, classes in ((0, [0]), (1, [2, 3])):
        assert torch.equal(merged[classes], loop.diary.sent[1, client].artifacts["prototypes"].mean[classes])


@pytest.mark.parametrize(("missing", "kept"), [("keep", [True, True]), ("drop", [False, True])])
def test_fedproto_class_that_no_participant_held_is_kept_or_dropped(mlp, make_data, set_up_federation, missing, kept):
    """Two clients of one class each, one of which takes part in a round."""
    data = make_data(counts=((8, 0), (0, 8)))
    loop = set_up_federation(
        lambda: FedProto(mlp(num_classes=2), prototypes=Prototypes(missing=missing)),
        rounds=9,
        data=data,
        participation=0.5,
    )
    while len({client for _, client in loop.diary.sent}) < 2:
        loop.advance()
    last = [client for _, client in loop.diary.sent][-1]
    valid = prototypes_of(loop).valid.tolist()
    assert valid == (kept if last == 1 else kept[::-1])


def test_fedproto_globally_absent_class_is_never_valid_and_never_predicted(mlp, make_data, run_federation):
    data = make_data(counts=((9, 8, 0), (8, 9, 0)))
    loop = run_federation(lambda: FedProto(mlp(num_classes=3)), data=data)
    assert prototypes_of(loop).valid.tolist() == [True, True, False]
    module = loop.runner.load(0)
    module.receive(loop.exchange.inbox(0), data.clients[0])
    assert (scores(module.method, torch.randn(200, 1, 8, 8)).argmax(1) < 2).all()


# --- loss ----------------------------------------------


def test_fedproto_equals_local_when_weight_is_zero(conv_net, run_federation, assert_identical):
    local = run_federation(lambda: Local(conv_net()), rounds=3)
    proto = run_federation(lambda: FedProto(conv_net(), weight=0.0), rounds=3)
    for client in range(4):
        assert_identical(proto.runner.pool.get(client), local.runner.pool.get(client))
    for column in ("Local-T", "Global-T"):
        theirs = [row[f"{column}/classifier"] for row in proto.diary.rows]
        assert theirs == [row[column] for row in local.diary.rows]
    assert [row["loss"] for row in proto.diary.rows] == [row["loss"] for row in local.diary.rows]


def test_fedproto_first_round_equals_local(mlp, run_federation, assert_identical):
    """No prototype was received yet, so the term is zero."""
    local, proto = (run_federation(lambda m=m: m(mlp()), rounds=1) for m in (Local, FedProto))
    for client in range(4):
        assert_identical(proto.runner.pool.get(client), local.runner.pool.get(client))
    assert proto.diary.rows[0]["loss/prototype_alignment"] == 0.0


def test_fedproto_pulls_embeddings_towards_the_prototypes(mlp, run_federation):
    loose, tight = (
        run_federation(lambda w=w: FedProto(mlp(), weight=w), rounds=4).diary.rows[-1]["loss/prototype_alignment"]
        for w in (0.01, 2.0)
    )
    assert tight < loose


def test_fedproto_alignment_alone_gives_the_head_no_gradient(conv_net, data, make_client):
    client = with_prototypes(make_client(FedProto(conv_net())), torch.randn(4, 6), [1, 1, 1, 1])
    x, y = next(data.clients[0].batches("train"))
    method = client.method
    method.alignment[0](method, client.step(x, y).forward()).backward()
    assert all(p.grad is None for p in method.model.head.parameters())
    assert all(p.grad is not None for p in method.model.body.parameters())


@pytest.mark.parametrize("distance", ["sample_mse", "sample_sq", "batch_proto_l2"])
def test_fedproto_loss_is_cross_entropy_plus_the_weighted_term(mlp, run_federation, distance):
    loop = run_federation(lambda: FedProto(mlp(), weight=0.5, distance=distance), rounds=2)
    row = loop.diary.rows[-1]
    assert row["loss"] == pytest.approx(row["loss/cross_entropy"] + 0.5 * row["loss/prototype_alignment"], rel=1e-5)
    assert row["loss/prototype_alignment"] > 0


# --- prediction ----------------------------------------------


def test_fedproto_predicts_the_nearest_prototype(two_inputs):
    """Distances 2.0518, 2.1932, 2.8653 from (1.4, 1.5)."""
    x = torch.tensor([[1.4, 1.5]])
    method = two_inputs()
    assert scores(method, x).argmax(1).item() == 0
    method.alignment[0].valid[0] = False
    assert scores(method, x).argmax(1).item() == 1


def test_fedproto_predicts_among_the_classes_of_its_training_part_if_asked_for(two_inputs):
    method = two_inputs(candidates="local")
    method.held.copy_(torch.tensor([False, True, True]))
    x = torch.tensor([[1.4, 1.5]])
    ways = method.predictors()
    assert scores(method, x).argmax(1).item() == 1
    assert ways["prototype"].scores(Seen(x)).argmax(1).item() == 0
    assert (headline(ways, "Local-T"), headline(ways, "Global-T")) == ("prototype_held", "prototype")


def test_fedproto_vector_of_an_invalid_class_does_not_change_predictions(two_inputs):
    method = two_inputs()
    method.alignment[0].valid[0] = False
    x = torch.randn(50, 2)
    before = scores(method, x)
    method.alignment[0].prototypes[0] = torch.nan
    assert torch.equal(scores(method, x), before)


def test_fedproto_without_a_prototype_falls_back_to_the_classifier(two_inputs):
    method = two_inputs()
    method.alignment[0].valid.zero_()
    x = torch.randn(20, 2)
    assert torch.equal(scores(method, x), method.model(x))


def test_fedproto_logs_both_inferences(mlp, run_federation):
    nearest = run_federation(lambda: FedProto(mlp()), rounds=3).diary.rows[-1]
    classifier = run_federation(lambda: FedProto(mlp(), inference="classifier"), rounds=3).diary.rows[-1]
    for column in ("Local-T", "Global-T", "Local-T_received", "Global-T_received"):
        assert nearest[column] == nearest[f"{column}/prototype"] == classifier[f"{column}/prototype"]
        assert classifier[column] == classifier[f"{column}/classifier"] == nearest[f"{column}/classifier"]


def test_fedproto_received_accuracy_is_that_of_own_models_with_the_newest_prototypes(mlp, run_federation):
    """The public code's figure: models after their fit, prototypes aggregated in the same round."""
    loop = run_federation(lambda: FedProto(mlp()), rounds=3)
    accuracies = []
    for client in loop.data.clients:
        module = loop.runner.load(client.client).eval()
        x, y = loop.data.store.gather(client.test)
        with torch.no_grad():
            distances = torch.cdist(module.method.model.embed(x), prototypes_of(loop).mean)
        accuracies.append((distances.argmin(1) == y).double().mean().item())
    assert loop.final["Local-T_received"] == pytest.approx(np.mean(accuracies))


# --- running ----------------------------------------------


def test_fedproto_client_that_sat_out_gets_the_newest_prototypes_at_its_next_turn(mlp, make_client, run_federation):
    loop = run_federation(lambda: FedProto(mlp()), rounds=6, participation=0.5)
    server = make_client(FedProto(mlp())).make_server(Facts())
    server.setup(Facts())
    for round in range(1, 7):
        newest = server.message.artifacts.get("prototypes")
        for client in (c for r, c in loop.diary.received if r == round):
            received = loop.diary.received[round, client].artifacts.get("prototypes")
            assert (received is None) == (newest is None)
            assert received is None or torch.equal(received.mean, newest.mean)
        server.aggregate({c: message for (r, c), message in loop.diary.sent.items() if r == round})


def test_fedproto_mixes_architectures_of_one_embedding_size(mlp, run_federation):
    sizes = ((8, 5), (11, 5))
    loop = run_federation(lambda a: FedProto(mlp(hidden=sizes[a])), architecture=[0, 1, 0, 1], rounds=2)
    widths = [len(loop.runner.pool.get(c)["model.body.stages.0.1.bias"]) for c in range(4)]
    assert widths == [8, 11, 8, 11]
    assert prototypes_of(loop).mean.shape == (4, 5)
    assert 0 <= loop.final["Local-T_received"] <= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_fedproto_preset_runs(mlp, run_federation, preset):
    optimizer = (lambda ps: torch.optim.Adam(ps, lr=0.001)) if preset == "feddw_table" else None
    loop = run_federation(lambda: FedProto(mlp(), **PRESETS[preset]), optimizer=optimizer)
    assert 0 <= loop.diary.rows[-1]["Local-T"] <= 1
    assert prototypes_of(loop).valid.all()


def test_fedproto_in_bfloat16_sends_finite_float32_prototypes(conv_net, run_federation):
    for collection in ("post", "running"):
        loop = run_federation(
            lambda c=collection: FedProto(conv_net(), prototypes=Prototypes(c)),
            rounds=2,
            trainer={"precision": "bf16-mixed"},
        )
        assert prototypes_of(loop).mean.dtype == torch.float32
        assert prototypes_of(loop).mean.isfinite().all()
        assert loop.diary.rows[-1]["loss/prototype_alignment"] > 0


def test_fedproto_collects_in_float64_where_all_is(mlp, run_federation):
    """`collection: running` adds up embeddings of the precision that the run has."""
    method = lambda: FedProto(mlp(), prototypes=Prototypes("running"))  # noqa: E731
    loop = run_federation(method, rounds=2, trainer={"precision": "64-true"})
    for (_, client), message in loop.diary.sent.items():
        assert torch.equal(message.artifacts["prototypes"].count, loop.data.clients[client].class_counts)
    assert prototypes_of(loop).mean.isfinite().all()
    assert loop.diary.rows[-1]["loss/prototype_alignment"] > 0


@pytest.mark.parametrize("distance", ["sample_mse", "batch_proto_l2"])
def test_fedproto_survives_embeddings_that_are_all_zero(mlp, run_federation, distance):
    def dead():
        model = mlp()
        torch.nn.init.zeros_(model.body.neck[0].weight)
        torch.nn.init.constant_(model.body.neck[0].bias, -1.0)
        return FedProto(model, distance=distance)

    loop = run_federation(dead, rounds=2)
    assert torch.equal(prototypes_of(loop).mean, torch.zeros(4, 5))
    assert all(t.isfinite().all() for t in loop.runner.pool.get(0).values())


@pytest.mark.parametrize("option", ["download", "candidates", "inference"])
def test_fedproto_rejects_unknown_options(mlp, option):
    with pytest.raises(ConfigError, match=rf"method\.{option}: must be one of"):
        FedProto(mlp(), **{option: "some"})


@pytest.mark.parametrize("option", ["collection", "weighting", "missing"])
def test_fedproto_rejects_unknown_options_of_its_prototypes(mlp, option):
    with pytest.raises(ConfigError, match=rf"^Prototypes\.{option}: must be one of"):
        FedProto(mlp(), **sectioned(FedProto, **{option: "some"}))
    node = {"class_path": "fl_lightning.methods.fedproto.FedProto", "init_args": {"prototypes": {option: "some"}}}
    with pytest.raises(ConfigError, match=rf"^method\.init_args\.prototypes\.{option}: must be one of .*, got 'some'$"):
        build(node, "method", model=mlp())


def test_fedproto_rejects_a_second_alignment_term(mlp):
    with pytest.raises(ConfigError, match="prototype_alignment"):
        FedProto(mlp(), extra_terms=[PrototypeAlignment()])
