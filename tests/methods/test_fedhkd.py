"""The tests that the specification of FedHKD promises (BASELINES-B.md, section 9d)."""

import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedhkd import FedHKD

ONE_CLIENT = ((12, 8, 5, 4),)
D, C = 5, 4  # of the small MLP


def knowledge(message):
    return message.artifacts["hyper_knowledge"]


def test_without_its_terms_it_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    ours = run_federation(lambda: FedHKD(conv_net(), prediction_weight=0.0, feature_weight=0.0))
    theirs = run_federation(lambda: FedAvg(conv_net()))
    assert_identical(outcome(ours), outcome(theirs))
    assert_identical(ours.final, theirs.final)


def test_with_a_share_above_one_nothing_is_sent_and_it_is_fedavg(conv_net, run_federation, assert_identical):
    ours = run_federation(lambda: FedHKD(conv_net(), min_share=1.01))
    theirs = run_federation(lambda: FedAvg(conv_net()))
    for key, message in theirs.diary.sent.items():
        assert_identical(ours.diary.sent[key].weights, message.weights)
        assert ours.diary.sent[key].num_params == message.num_params
    for mine, other in zip(ours.diary.rows, theirs.diary.rows, strict=True):
        assert mine["downlink_params"] == other["downlink_params"]
        assert mine["Local-T"] == other["Local-T"]


def test_first_round_is_fedavgs_and_later_ones_are_not(mlp, run_federation, assert_identical):
    ours, theirs = (run_federation(lambda m=m: m(mlp()), rounds=2) for m in (FedHKD, FedAvg))
    for client in range(4):
        assert_identical(ours.diary.sent[1, client].weights, theirs.diary.sent[1, client].weights)
        two = [loop.diary.sent[2, client].weights for loop in (ours, theirs)]
        assert not torch.equal(two[0]["model.head.weight"], two[1]["model.head.weight"])


def test_of_one_client_without_noise_a_class_has_its_own_means(mlp, make_data, run_federation):
    loop = run_federation(lambda: FedHKD(mlp(), noise_std=0.0, min_share=0.0), rounds=1, data=make_data(ONE_CLIENT))
    client = loop.runner.modules[0]
    client.load(loop.diary.sent[1, 0].weights)
    x, y = next(iter(loop.data.clients[0].batches("train")))
    z = client.method.model.embed(x).detach()
    soft = torch.softmax(client.method.model.head(z) / 0.5, 1).detach()
    merged = knowledge(loop.exchange.inbox(0)).mean
    for c in range(C):
        torch.testing.assert_close(merged[c, :D], z[y == c].mean(0))
        torch.testing.assert_close(merged[c, D:], soft[y == c].mean(0))


def test_server_weighs_by_samples(mlp, make_client):
    """30 samples with H = 0 and 10 with H = 4 give 1, in either order; nobody overwrites anybody."""
    for order in (0, 1), (1, 0):
        server = make_client(FedHKD(mlp())).make_server(Facts())
        for client in order:
            mean = torch.full((C, D + C), (0.0, 4.0)[client])
            count = torch.tensor([(30, 10)[client], 0, 0, 0])
            server.collect(client, Message({}, {"hyper_knowledge": ClassMeans(mean, count)}, 40))
        server.close_round()
        merged = knowledge(server.message)
        assert merged.mean[0].tolist() == [1.0] * (D + C)
        assert merged.valid.tolist() == [True, False, False, False]


def test_class_that_nobody_sent_keeps_its_pair(mlp, make_client):
    server = make_client(FedHKD(mlp())).make_server(Facts())
    first = ClassMeans(torch.full((C, D + C), 2.0), torch.tensor([3, 3, 0, 0]))
    second = ClassMeans(torch.full((C, D + C), 5.0), torch.tensor([0, 3, 0, 0]))
    for means in first, second:
        server.aggregate({0: Message({}, {"hyper_knowledge": means}, 6)})
    assert knowledge(server.message).mean[:, 0].tolist() == [2.0, 5.0, 0.0, 0.0]


def test_only_classes_with_a_large_enough_share_are_sent(mlp, make_data, run_federation):
    loop = run_federation(lambda: FedHKD(mlp(), min_share=0.25), rounds=1, data=make_data(ONE_CLIENT))
    counts = loop.data.clients[0].class_counts
    sent = knowledge(loop.diary.sent[1, 0])
    assert torch.equal(sent.count, torch.where(counts >= 0.25 * counts.sum(), counts, 0))
    assert 0 < int(sent.valid.sum()) < C
    assert sent.mean[~sent.valid].abs().max() == 0  # neither values nor noise


def test_every_class_has_noise_of_its_own_on_the_features_alone(mlp, run_federation):
    clean, noisy = (
        run_federation(lambda s=std: FedHKD(mlp(), noise_std=s, min_share=0.0), rounds=1) for std in (0.0, 0.5)
    )
    for client in range(4):
        one, other = (knowledge(loop.diary.sent[1, client]) for loop in (clean, noisy))
        noise = (other.mean - one.mean)[one.valid]
        assert noise[:, D:].abs().max() == 0
        assert noise[:, :D].abs().min() > 0
        assert len(noise[:, 0].unique()) == len(noise)


def test_messages_hold_d_c_and_one_value_a_class(conv_net, run_federation):
    loop = run_federation(lambda: FedHKD(conv_net(), min_share=0.0), rounds=2)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for (_, client), message in loop.diary.sent.items():
        held = int(loop.data.clients[client].held_classes.sum())
        assert message.num_params == size + held * (6 + 4 + 1)
    assert loop.diary.received[2, 0].num_params == size + 4 * (6 + 4)


@pytest.mark.parametrize("classes", [10, 100])
def test_message_sizes_match_the_specification(mlp, make_client, classes):
    client = make_client(FedHKD(mlp(hidden=(8,), num_classes=classes)))
    size = sum(tensor.numel() for tensor in client.method.model.state_dict().values())
    means = ClassMeans(torch.zeros(client.method.interface()["hyper_knowledge"]), torch.ones(classes, dtype=torch.long))
    up = Message(client.division.weights(), {"hyper_knowledge": means})
    assert up.num_params == size + classes * (8 + classes + 1)
    down = Message(up.weights, {"hyper_knowledge": means.without_counts()})
    assert down.num_params == size + classes * (8 + classes)


def test_each_term_trains_its_own_part(mlp, make_client, assert_trains_only):
    client = make_client(FedHKD(mlp()))
    method = client.method
    means = ClassMeans(torch.rand(C, D + C), torch.tensor([2, 1, 0, 1]))
    predictions, features = own = list(method.terms)[1:]
    for term in own:
        term.receive(method, Message({}, {"hyper_knowledge": means}))
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 3, 0, 1, 3])
    for term, trained, other in (
        (predictions, method.model.head, method.model.body),
        (features, method.model.body, method.model.head),
    ):
        assert_trains_only(client, term, x, y, trained, other)
        assert not any(tensor.requires_grad for tensor in (term.features, term.predictions))


def test_a_step_costs_one_pass_of_the_body(mlp, make_data, set_up_federation):
    """And a send one pass over the training part; nothing for evaluations, which are off here."""
    seen = []

    def counted():
        method = FedHKD(mlp())
        method.model.body.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        forward = method.model.body.forward_features
        method.model.body.forward_features = lambda x: seen.append(len(x)) or forward(x)
        return method

    quiet = EvaluationPolicy(trained=False, received=False, server=False)
    loop = set_up_federation(counted, rounds=2, data=make_data(ONE_CLIENT), evaluate=quiet)
    seen.clear()  # a loop that is set up has looked at what predictions rest on
    loop.run()
    assert sum(seen) == 2 * 2 * loop.data.clients[0].num_train


@pytest.mark.parametrize(
    "options",
    [{"prediction_weight": -1}, {"feature_weight": -1}, {"temperature": 0}, {"min_share": -1}, {"noise_std": -1}],
    ids=str,
)
def test_bad_values_are_refused(mlp, options):
    with pytest.raises(ConfigError, match=rf"^method\.{next(iter(options))}: must be"):
        FedHKD(mlp(), **options)
