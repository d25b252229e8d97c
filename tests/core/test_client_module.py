"""What a client is: its loss, what it shares, how it takes messages in."""

import pytest
import torch

from fl_lightning.core.client import ClientModule, FitSettings, Phase
from fl_lightning.core.message import Message
from fl_lightning.core.term import Forward, Term
from fl_lightning.errors import ConfigError


class Constant(Term):
    """A term whose value is known."""

    def forward(self, client, out):
        return torch.tensor(2.0)


class OnlyHead(ClientModule):
    shared = ("model.head",)


class OnlyNorm(ClientModule):
    """Shares by layer type, not by name."""

    def is_shared(self, name, module):
        return isinstance(module, torch.nn.BatchNorm2d)


class TwoPhases(ClientModule):
    def phases(self):
        return [
            Phase("head", trains=("model.head",), epochs=2),
            Phase("nothing", trains=("model.absent",)),
            Phase("off", epochs=0),
            Phase("body", trains=("model.body",)),
        ]


def settings(sgd, **options):
    return FitSettings(sgd(), **options)


def test_shared_and_private_names_are_the_whole_state(conv_net):
    for method in (ClientModule, OnlyHead, OnlyNorm):
        client = method(conv_net())
        assert sorted((*client.shared_names, *client.private_names)) == sorted(client.state_dict())


def test_shared_names_go_by_submodule(mlp):
    client = OnlyHead(mlp())
    assert client.shared_names == ("model.head.weight", "model.head.bias")


def test_shared_prefix_matches_whole_names_only(mlp):
    class Prefix(ClientModule):
        shared = ("model.he",)

    assert Prefix(mlp()).shared_names == ()


def test_shared_names_go_by_layer_type(conv_net):
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert OnlyNorm(conv_net()).shared_names == tuple(f"model.body.stages.0.1.{name}" for name in names)


def test_message_holds_copies_of_the_shared_weights(mlp, data):
    client = OnlyHead(mlp())
    message = client.send(data.clients[0])
    assert set(message.weights) == set(client.shared_names)
    assert message.num_samples == data.clients[0].num_train
    message.weights["model.head.weight"].zero_()
    assert client.model.head.weight.abs().sum() > 0


def test_received_weights_are_copied_in(mlp, data):
    client = OnlyHead(mlp())
    own_body = client.model.body.neck[0].weight.clone()
    received = {"model.head.weight": torch.ones(4, 5)}
    client.receive(Message(received), data.clients[0])
    assert torch.equal(client.model.head.weight, torch.ones(4, 5))
    assert torch.equal(client.model.body.neck[0].weight, own_body)
    received["model.head.weight"].zero_()
    assert client.model.head.weight.sum() == 20


def test_unknown_weights_are_refused(mlp):
    with pytest.raises(ValueError, match=r"received 'model.tail' of shape \(2,\).*does not have it"):
        ClientModule(mlp()).load_weights({"model.tail": torch.zeros(2)})


def test_weights_of_another_shape_are_refused(mlp):
    with pytest.raises(ValueError, match=r"'model.head.bias' of shape \(1,\), but this client has \(4,\)"):
        ClientModule(mlp()).load_weights({"model.head.bias": torch.zeros(1)})


def test_state_round_trips_through_load_weights(conv_net, assert_identical):
    torch.manual_seed(1)
    one, two = ClientModule(conv_net()), ClientModule(conv_net())
    one.model.body.stages[0][1].num_batches_tracked.fill_(2**40 + 1)
    two.load_weights(one.entries)
    assert_identical(dict(two.entries), dict(one.entries))


def test_second_term_of_a_kind_is_refused(mlp):
    with pytest.raises(ConfigError, match="each term may occur once only, got 'constant'"):
        ClientModule(mlp(), terms=[Constant()], extra_terms=[Constant(0.5)])


def test_loss_is_the_weighted_sum_of_the_terms_that_count(mlp, data):
    class Another(Constant):
        pass

    client = ClientModule(mlp(), terms=[Constant(3.0)], extra_terms=[Another(0.0)])
    assert client.loss_names == ("loss", "cross_entropy", "constant")
    x, y = next(data.clients[0].batches("train"))
    client._active = [t for t in client.all_terms if t.weight > 0]
    client._term_weights = {t.name: t.weight for t in client.all_terms}
    out = client.forward_pass(x, y)
    expected = torch.nn.functional.cross_entropy(client.model(x), y) + 6
    assert client.composite_loss(out).item() == pytest.approx(expected.item())
    assert client.mean_losses()["constant"] == 2.0


def test_forward_pass_holds_what_terms_ask_for(mlp, data):
    client = ClientModule(mlp())
    x, y = next(data.clients[0].batches("train", 3))
    out = client.forward_pass(x, y)
    assert isinstance(out, Forward)
    assert [tuple(f.shape) for f in out.features] == [(3, 8)]
    assert (tuple(out.z.shape), tuple(out.logits.shape)) == ((3, 5), (3, 4))
    assert torch.equal(out.logits, client.model(x))


def test_phases_without_epochs_or_parameters_are_left_out(mlp, sgd):
    client = TwoPhases(mlp())
    client.settings = settings(sgd, local_epochs=3)
    assert [(p.phase.name, p.epochs) for p in client.plan()] == [("head", 2), ("body", 3)]
    assert client.fit_epochs == 5


def test_every_phase_has_an_optimizer_of_its_own_parameters(mlp, sgd):
    client = TwoPhases(mlp())
    client.settings = settings(sgd)
    head, body = client.configure_optimizers()
    assert {id(p) for p in head.param_groups[0]["params"]} == {id(p) for p in client.model.head.parameters()}
    assert {id(p) for p in body.param_groups[0]["params"]} == {id(p) for p in client.model.body.parameters()}


def test_optimizers_are_made_anew(mlp, sgd):
    client = ClientModule(mlp())
    client.settings = settings(sgd)
    assert client.configure_optimizers()[0] is not client.configure_optimizers()[0]


def test_learning_rate_factor_is_applied_to_every_group(mlp):
    client = ClientModule(mlp())
    groups = lambda ps: torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(ps)])  # noqa: E731
    client.settings = FitSettings(groups)
    client.lr_factor = 0.5
    rates = [group["lr"] for group in client.configure_optimizers()[0].param_groups]
    assert rates == pytest.approx([0.05 * (i + 1) for i in range(6)])


def test_parameters_that_the_model_froze_stay_frozen(mlp, sgd):
    model = mlp()
    model.head.requires_grad_(False)
    client = ClientModule(model)
    client.settings = settings(sgd)
    frozen = {id(p) for p in model.head.parameters()}
    assert frozen.isdisjoint(id(p) for p in client.plan()[0].parameters)


def test_whole_training_part_is_collected_in_eval_mode(conv_net, data, assert_identical):
    client = ClientModule(conv_net()).train()
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    seen = client.collect(data.clients[0])
    assert client.training
    assert_identical(dict(client.entries), before)
    client.eval()
    x, y = data.store.gather(data.clients[0].train)
    assert torch.equal(seen.y, y)
    torch.testing.assert_close(seen.z, client.model.embed(x))
    torch.testing.assert_close(seen.logits, client.model(x))
    assert not seen.z.requires_grad


def test_the_training_part_is_collected_once_for_all_terms_of_a_send_and_anew_for_the_next(mlp, data):
    calls = []

    class Looks(Term):
        def send(self, client, data):
            calls.append(client.collect(data))
            return {}

    class LooksToo(Looks):
        pass

    client = ClientModule(mlp(), terms=[Looks(), LooksToo()])
    client.send(data.clients[0])
    client.send(data.clients[0])
    assert calls[0] is calls[1]
    assert calls[2] is calls[3]
    assert calls[0] is not calls[2]


def test_global_model_is_there_only_if_the_whole_model_is_shared(mlp):
    assert ClientModule(mlp()).has_global_model
    assert not OnlyHead(mlp()).has_global_model


def test_received_model_is_the_global_one_only_if_nothing_is_personal(mlp):
    class Predicts(ClientModule):
        def predict(self, x):
            return -self.model(x)

    assert ClientModule(mlp()).received_is_global
    assert not OnlyHead(mlp()).received_is_global
    assert not Predicts(mlp()).received_is_global


# --- steps of a method's own ----------------------------------------------


def test_own_batches_follow_the_global_stream_and_repeat_themselves(conv_net, data):
    client, own = ClientModule(conv_net()), data.clients[1]
    torch.manual_seed(0)
    one, other = client.own_batches(own), client.own_batches(own)
    torch.manual_seed(0)
    again = client.own_batches(own)
    ys = [[bundle.y.tolist() for bundle in batches] for batches in (one, one, again, other)]
    assert ys[0] == ys[1] == ys[2]
    assert ys[0] != ys[3]
    assert [len(y) for y in ys[0]] == [4, 4, 4]  # 13 samples; batch norm cannot train on a batch of one


def test_gradients_reach_the_parameters_asked_for_and_are_left_nowhere(mlp):
    client = ClientModule(mlp())
    x, parameters = torch.rand(3, 1, 8, 8), [client.model.head.bias, client.model.body.neck[0].weight]
    found = client.gradients(client.model.head(torch.zeros(3, 5)).sum() + 0 * x.sum(), parameters)
    assert found[0].tolist() == [3.0] * 4
    assert not found[1].any()  # not reached
    assert all(parameter.grad is None for parameter in client.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_those_of_the_loss(mlp, dtype):
    """A loss so small that float16 would lose its gradient."""
    client = ClientModule(mlp())
    z = torch.ones(3, 5)
    with torch.autocast("cpu", dtype=dtype):
        loss = client.model.head(z).float().sum() * 2**-20
        found = client.gradients(loss, [client.model.head.bias])
    torch.testing.assert_close(found[0], torch.full((4,), 3 * 2.0**-20), rtol=2e-2, atol=0)


def test_only_builds_a_graph_for_what_it_is_given_and_thaws_the_rest(conv_net):
    client = ClientModule(conv_net())
    frozen = client.model.head.bias.requires_grad_(False)
    with client.only([client.model.head.weight]):
        assert [name for name, p in client.named_parameters() if p.requires_grad] == ["model.head.weight"]
    assert [p for p in client.parameters() if not p.requires_grad] == [frozen]


def test_keeping_statistics_puts_batch_norm_back(conv_net):
    client = ClientModule(conv_net())
    client.model(torch.rand(4, 1, 8, 8))
    norm = client.model.body.stages[0][1]
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    with client.keeping_statistics():
        client.model(torch.rand(4, 1, 8, 8))
        assert not torch.equal(norm.running_mean, before["running_mean"])
    assert all(torch.equal(norm.state_dict()[name], tensor) for name, tensor in before.items())
