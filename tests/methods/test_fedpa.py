"""The tests that the specification of FedPA promises (BASELINES-B.md, section 3)."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sections import sectioned

from fl_lightning.building import build
from fl_lightning.core.facts import Facts
from fl_lightning.core.generating import label_shares, stacked_heads
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.losses.generated_features import Generator, diversity_loss
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedpa import FedPA, GeneratorServer, Training
from fl_lightning.models.generator import generate, num_generator_values

D, C = 5, 4  # of the small MLP
FEW = Training(server_steps=4, server_batch=8)
SMALL = {"generator": Generator(noise_size=3, hidden=6), "training": FEW}
ONE_CLIENT = ((12, 8, 5, 4),)


def size_of(model):
    return sum(tensor.numel() for tensor in model.state_dict().values())


def ready(client, valid=(1, 1, 1, 0), round=2):
    """The client when it has received prototypes and a generator."""
    method = client.method
    method.facts = replace(method.facts, round=round)
    generated = method.terms[1]
    means = ClassMeans(torch.rand(C, D), torch.tensor(valid))
    message = Message({}, {"prototypes": means, "generator": torch.randn(generated.generator.shape)})
    for term in list(method.terms)[1:]:
        term.receive(method, message)
    return client


def test_without_its_terms_it_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    ours = run_federation(lambda: FedPA(conv_net(), generator_weight=0.0, prototype_weight=0.0))
    theirs = run_federation(lambda: FedAvg(conv_net()))
    assert_identical(outcome(ours), outcome(theirs))
    assert_identical(ours.final, theirs.final)


def test_first_round_is_fedavgs_and_later_ones_are_not(conv_net, run_federation, assert_identical):
    ours, theirs = (
        run_federation(method, rounds=2) for method in (lambda: FedPA(conv_net(), **SMALL), lambda: FedAvg(conv_net()))
    )
    for client in range(4):
        assert_identical(ours.diary.sent[1, client].weights, theirs.diary.sent[1, client].weights)
        two = [loop.diary.sent[2, client].weights for loop in (ours, theirs)]
        assert not torch.equal(two[0]["model.head.weight"], two[1]["model.head.weight"])


def test_generated_term_trains_the_head_and_the_prototype_term_the_body(mlp, make_client, assert_trains_only):
    client = ready(make_client(FedPA(mlp(), **SMALL)))
    model = client.method.model
    _, generated, align = client.method.terms
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 3, 0, 1, 3])
    for term, trained, other in (
        (generated, model.head, model.body),
        (align, model.body, model.head),
    ):
        assert_trains_only(client, term, x, y, trained, other)
    assert not generated.generator.requires_grad
    assert generated.generator.grad is None
    assert not align.prototypes.requires_grad


def test_generated_term_is_the_heads_cross_entropy_on_the_generator(mlp, make_client):
    client = ready(make_client(FedPA(mlp(), generated_batch=12, **SMALL)))
    generated = client.method.terms[1]
    out = client.step(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 3, 0])).forward()
    torch.manual_seed(7)
    value = generated(client.method, out)
    torch.manual_seed(7)
    y, noise = torch.randint(3, (12,)), torch.rand(12, 3)  # class 3 has no prototype: it is not drawn
    z = generate(generated.generator, noise, y, C, D)
    torch.testing.assert_close(value, 12 / 4 * F.cross_entropy(client.method.model.head(z), y))


def test_prototype_term_is_a_mean_over_samples_that_have_a_prototype(mlp, make_client):
    client = ready(make_client(FedPA(mlp(), **SMALL)))
    align = client.method.terms[2]
    out = client.step(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 3, 3])).forward()
    expected = (out.z[:2] - align.prototypes[:2]).square().mean()
    torch.testing.assert_close(align(client.method, out), expected)


def test_terms_count_in_the_first_steps_of_a_fit_only(mlp, make_data, set_up_federation):
    """Six steps an epoch here; the third and the later ones have neither term."""
    loop = set_up_federation(lambda: FedPA(mlp(), steps=2, **SMALL), rounds=1, data=make_data(ONE_CLIENT))
    client = ready(loop.runner.modules[0])
    seen = []
    for term in list(client.method.terms)[1:]:
        term.register_forward_hook(lambda module, inputs, value: seen.append((module.name, value.item())))
    loop.runner.fit(client, loop.data.clients[0], 2)
    for name in ("generated_features", "early_alignment"):
        values = [value for own, value in seen if own == name]
        assert len(values) == client.meter.num_steps > 3
        assert min(values[:2]) > 0
        assert max(values[2:]) == 0


def messages_of(mlp, counts, seed=0):
    torch.manual_seed(seed)
    messages = {}
    for client, count in enumerate(counts):
        model = mlp()
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        prototypes = ClassMeans(torch.rand(C, D), torch.tensor(count))
        messages[client] = Message(weights, {"prototypes": prototypes}, sum(count))
    return messages


@pytest.fixture
def server_of(make_client):
    """A method's server, which has opened a round."""

    def make(method, round=1):
        facts = Facts(round=round)
        server = make_client(method).make_server(facts)
        server.setup(facts)
        server.open_round()
        return server

    return make


def test_server_loss_is_the_specifications(mlp, server_of):
    assert FEW.repulsion == 0.15
    server = server_of(FedPA(mlp(), **SMALL), round=11)
    messages = messages_of(mlp, [(3, 0, 1, 0), (1, 2, 0, 0)])
    old = ClassMeans(torch.rand(C, D), torch.tensor([1, 0, 1, 0]), sends_count=False)
    server.message = Message(server.message.weights, {"prototypes": old})
    noise, y = torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    features = server.network(noise, y)
    shares = label_shares(torch.tensor([[3, 0, 1, 0], [1, 2, 0, 0]]))
    loss = server.generator_loss(features, noise, y, stacked_heads(messages), shares)
    expected = diversity_loss(features, noise, y)
    for share, message in zip(shares, messages.values(), strict=True):
        logits = features @ message.weights["model.head.weight"].T + message.weights["model.head.bias"]
        expected = expected + 25 * 0.98**10 * (share[y] * F.cross_entropy(logits, y, reduction="none")).mean()
    kept = torch.tensor([0, 2, 3, 5])  # classes 0 and 2 have a prototype
    expected = expected - 0.15 * (features[kept] - old.mean[y[kept]]).square().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in server.network.parameters())
    assert all(p.grad is None for p in server.head.parameters())
    assert not any(tensor.requires_grad for message in messages.values() for tensor in message.weights.values())


def test_server_trains_with_the_old_prototypes_before_it_averages(mlp, server_of, monkeypatch):
    server = server_of(FedPA(mlp(), **SMALL))
    seen = []
    monkeypatch.setattr(
        GeneratorServer,
        "generator_loss",
        lambda self, features, *rest: seen.append(self.message) or features.square().mean(),
    )
    before = server.message
    first = server.aggregate(messages_of(mlp, [(3, 1, 0, 0)]))
    assert {id(message) for message in seen} == {id(before)}
    assert "prototypes" not in before.artifacts
    seen.clear()
    server.aggregate(messages_of(mlp, [(3, 1, 0, 0)], seed=1))
    assert {id(message) for message in seen} == {id(first)}
    assert len(seen) == FEW.server_steps


def test_server_step_lowers_its_loss_and_leaves_the_heads_alone(mlp, server_of, assert_identical):
    many = replace(FEW, server_steps=60, server_lr=0.01)
    server = server_of(FedPA(mlp(), **{**SMALL, "training": many}))
    messages = messages_of(mlp, [(3, 1, 2, 4), (1, 2, 5, 1)])
    before = copy.deepcopy(messages)
    losses = []
    plain = server.generator_loss
    server.generator_loss = lambda *arguments: losses.append(plain(*arguments)) or losses[-1]
    server.aggregate(messages)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    for client in messages:
        assert_identical(messages[client].weights, before[client].weights)


def test_server_generates_classes_that_somebody_holds(mlp, server_of):
    server = server_of(FedPA(mlp(), **SMALL))
    seen = []
    plain = server.generator_loss
    server.generator_loss = lambda features, noise, y, *rest: seen.append(y) or plain(features, noise, y, *rest)
    server.aggregate(messages_of(mlp, [(3, 0, 1, 0), (1, 0, 0, 0)]))
    assert set(torch.cat(seen).tolist()) == {0, 2}


def test_prototypes_are_weighted_by_samples(mlp, make_client):
    """Counts 3 and 1, prototypes 0 and 4: V = 1. Who lacks the class changes nothing, and a class unseen stays."""
    server = make_client(FedPA(mlp(), generator_weight=0.0)).make_server(Facts())
    server.message = Message()
    server.setup(Facts())
    for client, (count, value) in enumerate(((3, 0.0), (1, 4.0), (0, 99.0))):
        means = ClassMeans(torch.full((C, D), value), torch.tensor([count, 0, 0, 0]))
        server.collect(client, Message({}, {"prototypes": means}, 1))
    server.close_round()
    assert server.message.artifacts["prototypes"].mean[0].tolist() == [1.0] * D
    server.aggregate({0: Message({}, {"prototypes": ClassMeans(torch.ones(C, D), torch.tensor([0, 2, 0, 0]))}, 1)})
    merged = server.message.artifacts["prototypes"]
    assert merged.mean[:2].mean(1).tolist() == [1.0, 1.0]
    assert merged.valid.tolist() == [True, True, False, False]


def test_messages_hold_what_the_specification_counts(mlp, run_federation):
    """Up P + K_i d and the counts (of classes held: the zeros of the others say nothing), down P + P_G + C d."""
    loop = run_federation(lambda: FedPA(mlp(), **SMALL), rounds=2)
    size, generator = size_of(mlp()), num_generator_values(C, D, 3, 6)
    for (_, client), message in loop.diary.sent.items():
        held = int(loop.data.clients[client].held_classes.sum())
        assert message.num_params == size + held * D + held
    assert loop.diary.received[1, 0].num_params == size
    assert loop.diary.received[2, 0].num_params == size + generator + C * D


@pytest.mark.parametrize(("classes", "width", "generator"), [(10, 32, 19_744), (10, 512, 143_104), (100, 32, 42_784)])
def test_message_sizes_match_the_specification(mlp, make_client, server_of, classes, width, generator):
    method = FedPA(mlp(hidden=(width,), num_classes=classes))
    client = make_client(method)
    assert method.interface()["generator"] == (generator,)
    assert method.interface()["prototypes"] == (classes, width)
    server = server_of(FedPA(mlp(hidden=(width,), num_classes=classes)))
    assert server.publish(Message(client.division.weights())).num_params == size_of(method.model)
    server.trained = True
    down = server.publish(Message(client.division.weights()))
    assert down.num_params == size_of(method.model) + generator


@pytest.mark.parametrize("extra", [False, True])
def test_running_prototypes_are_means_over_the_whole_fit(mlp, run_federation, extra):
    """Every epoch's embeddings count, also where a term that is shared sends them."""
    terms = [PrototypeAlignment(0.5, collection="running")] if extra else None
    method = lambda: FedPA(mlp(), collection="running", extra_terms=terms, **SMALL)  # noqa: E731
    loop = run_federation(method, rounds=2, local_epochs=3)
    for (_, client), message in loop.diary.sent.items():
        assert torch.equal(message.artifacts["prototypes"].count, 3 * loop.data.clients[client].class_counts)


def test_generator_is_no_ones_private_state(mlp, run_federation):
    loop = run_federation(lambda: FedPA(mlp(), **SMALL), rounds=2)
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


def test_learning_rate_of_the_generator_falls_by_2_percent_a_round(mlp, server_of):
    server = server_of(FedPA(mlp(), **{**SMALL, "training": replace(FEW, server_lr=0.1)}))
    rates = []
    for seed in range(3):
        server.aggregate(messages_of(mlp, [(3, 1, 0, 0)], seed=seed))
        rates.append(server.network_optimizer.param_groups[0]["lr"] / 0.98 ** (server.round - 1))
    assert rates == pytest.approx([0.1] * 3)


def test_a_step_costs_one_pass_of_the_body_and_a_small_batch_of_the_head(mlp, make_data, set_up_federation):
    loop = set_up_federation(lambda: FedPA(mlp(), **SMALL), rounds=1, data=make_data(ONE_CLIENT))
    client = ready(loop.runner.modules[0])
    body, head = [], []
    model = client.method.model
    forward = model.body.forward_features
    model.body.forward_features = lambda x: body.append(len(x)) or forward(x)
    model.head.register_forward_hook(lambda module, inputs, output: head.append(len(output)))
    loop.runner.fit(client, loop.data.clients[0], 2)
    n = loop.data.clients[0].num_train
    assert sum(body) == n
    assert sum(head) == 2 * n


@pytest.mark.parametrize(
    "options",
    [
        {"generator_weight": -1},
        {"prototype_weight": -1},
        {"steps": 0},
        {"generated_batch": 0},
        {"repulsion": -1},
        {"noise_size": 0},
        {"hidden": 0},
        {"server_steps": 0},
        {"server_batch": 1},
        {"server_lr": -1},
        {"server_weight_decay": -1},
        {"collection": "never"},
    ],
    ids=str,
)
def test_bad_values_are_refused(mlp, options):
    (option,) = options
    kinds = (("generator", Generator), ("training", Training))
    sections = [name for name, kind in kinds if option in kind.__dataclass_fields__]
    with pytest.raises(ConfigError, match=rf"(^method|^Generator|\.training)\.{option}: must be"):
        FedPA(mlp(), **sectioned(FedPA, **options))
    given = {section: options for section in sections} or options
    with pytest.raises(ConfigError, match=rf"^{'.'.join(['method.init_args', *sections, option])}: must be"):
        build({"class_path": "fl_lightning.methods.fedpa.FedPA", "init_args": given}, "method", model=mlp())
