"""The tests that the specification of FedBABU promises (BASELINES-A.md, section 8)."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedbabu import FedBABU

HEAD = ("model.head.weight", "model.head.bias")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.01)


def accuracy(model, data, indices):
    x, y = data.store.gather(indices)
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).double().mean().item()


def after_one_more_receive(loop, client):
    module = loop.runner.load(client)
    module.receive(loop.exchange.inbox(client), loop.data.clients[client])
    return module


@pytest.mark.parametrize("init", ["common", "own"])
def test_fedbabu_head_never_moves_and_is_everybodys(conv_net, set_up_federation, init):
    """With Adam and weight decay, after fine-tuning for evaluations, and where clients draw weights of their own."""
    loop = set_up_federation(lambda: FedBABU(conv_net(), finetune_epochs=1), rounds=2, optimizer=adam, init=init)
    before = {name: loop.runner.modules[0].entries[name].clone() for name in HEAD}
    body = loop.exchange.global_message().weights["model.body.neck.2.weight"].clone()
    loop.run()
    for client in range(4):
        entries = after_one_more_receive(loop, client).entries
        assert all(torch.equal(entries[name], tensor) for name, tensor in before.items())
    assert not torch.equal(loop.exchange.global_message().weights["model.body.neck.2.weight"], body)


def test_fedbabu_sends_the_body_with_its_buffers_and_no_head(conv_net, run_federation):
    loop = run_federation(lambda: FedBABU(conv_net(), finetune_epochs=0), rounds=2)
    body = {f"model.{name}": tensor for name, tensor in conv_net().state_dict().items() if name.startswith("body")}
    for message in (*loop.diary.sent.values(), *loop.diary.received.values()):
        assert set(message.weights) == set(body)
        assert message.num_params == sum(tensor.numel() for tensor in body.values())


def test_fedbabu_keeps_no_head_for_any_client(mlp, run_federation):
    """A thousand clients cost one head."""
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=0), rounds=1)
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


@pytest.mark.parametrize("finetune", ["full", "head", "body"])
def test_fedbabu_evaluation_leaves_state_and_streams_and_repeats_itself(conv_net, run_federation, unchanged, finetune):
    loop = run_federation(lambda: FedBABU(conv_net(), finetune_epochs=2, finetune=finetune), rounds=1)
    module = after_one_more_receive(loop, 0)
    with unchanged(module):
        one = loop.runner.evaluator.client(module, 0, "received")
        other = loop.runner.evaluator.client(module, 0, "received")
    assert one == other
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("finetune", ["full", "head", "body"])
def test_fedbabu_fine_tunes_what_it_is_told(conv_net, sgd, run_federation, finetune):
    optimizer = sgd(0.2, momentum=0.9, weight_decay=0.01)
    client = lambda: FedBABU(conv_net(), finetune_epochs=2, finetune=finetune)  # noqa: E731
    loop = run_federation(client, rounds=1, optimizer=optimizer)
    module = after_one_more_receive(loop, 0)
    before = {name: p.detach().clone() for name, p in module.method.model.named_parameters()}
    module.adapt(loop.data.clients[0])
    moved = {name for name, p in module.method.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if finetune == "full" or name.startswith(finetune)}
    if finetune == "full":
        assert not torch.equal(module.method.model.body.stages[0][1].running_var, torch.ones(3))


@pytest.mark.parametrize("drop_last", [False, True])
def test_fedbabu_fine_tunes_on_the_batches_of_a_fit(mlp, make_data, run_federation, count_passes, drop_last):
    data = make_data(drop_last=drop_last)
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=2), rounds=1, data=data)
    num_train = data.clients[0].num_train
    assert num_train % 4 > 1
    module = after_one_more_receive(loop, 0)
    passes = count_passes(module.method.model.head)
    module.adapt(data.clients[0])
    assert passes.forward == 2 * (num_train // 4 * 4 if drop_last else num_train)


def test_fedbabu_personalised_accuracy_is_that_of_the_fine_tuned_model(mlp, sgd, make_data, run_federation):
    """Full batches, so that no shuffle matters: F = 4 plain steps on the training part, with a rate of its own."""
    data = make_data(batch_size=100)
    client = lambda: FedBABU(mlp(), finetune_epochs=4, finetune_lr=0.7)  # noqa: E731
    loop = run_federation(client, rounds=2, data=data, optimizer=sgd(0.1))
    for index in range(4):
        model = copy.deepcopy(after_one_more_receive(loop, index).method.model)
        x, y = data.store.gather(data.clients[index].train)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        expected = accuracy(model, data, data.clients[index].test)
        assert loop.final_scores["Local-T_received"][index] == pytest.approx(expected)
        expected = accuracy(model, data, data.server_test)
        assert loop.final_scores["Global-T_received"][index] == pytest.approx(expected)


def test_fedbabu_fine_tunes_from_the_own_body_after_the_fit(mlp, run_federation):
    """At learning rates that can be told apart, Local-T and the receive's figure differ."""
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=1), rounds=2)
    assert any(row["Global-T"] != row["Global-T_received"] for row in loop.diary.rows)


def test_fedbabu_fine_tuning_does_not_follow_the_decay(mlp, run_federation):
    """So that a resumed run, or `evaluate`, fine-tunes as the run did."""
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=2), rounds=1)
    module = after_one_more_receive(loop, 0)
    scores = loop.runner.evaluator.client(module, 0, "received")
    module.lr_factor = 1e-9
    assert loop.runner.evaluator.client(module, 0, "received") == scores


def test_fedbabu_without_fine_tuning_is_the_initial_model(mlp, run_federation):
    """Every client then predicts as (φ^t, h⁰) does, whose accuracy is Server-T."""
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=0), rounds=2)
    assert loop.final["Global-T_received"] == pytest.approx(loop.diary.rows[-1]["Server-T"], abs=1e-12)
    assert loop.final["Global-T_received_std"] == 0.0


def test_fedbabu_server_accuracy_is_that_of_the_body_under_the_first_head(mlp, run_federation):
    loop = run_federation(lambda: FedBABU(mlp(), finetune_epochs=2), rounds=2)
    model = after_one_more_receive(loop, 0).method.model
    expected = accuracy(model, loop.data, loop.data.server_test)
    assert loop.diary.rows[-1]["Server-T"] == pytest.approx(expected)


def test_fedbabu_with_a_frozen_body_is_refused(mlp, run_federation):
    def client():
        model = mlp()
        model.body.requires_grad_(False)
        return FedBABU(model)

    with pytest.raises(ConfigError, match=r"^method: FedBABU trains model.body and terms, where no parameter learns"):
        run_federation(client, rounds=1)


def test_fedbabu_costs_a_fit_of_the_body_alone(mlp, run_federation):
    """Plain FedAvg's passes; the head's weights get no gradient."""

    class Watched(FedBABU):
        def local_step(self, step):
            super().local_step(step)
            assert self.model.head.weight.grad is None

    loop = run_federation(lambda: Watched(mlp(), finetune_epochs=0), rounds=1)
    assert loop.diary.reports[1, 0].num_steps == loop.data.clients[0].num_steps(4)
    trained = [p for planned in loop.runner.modules[0].plan() for p in planned.parameters]
    assert {id(p) for p in trained} == {id(p) for p in loop.runner.modules[0].method.model.body.parameters()}


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"finetune_epochs": -1}, r"method\.finetune_epochs: must be >= 0, got -1"),
        ({"finetune": "all"}, r"method\.finetune: must be one of full, head, body, got 'all'"),
        ({"finetune_lr": 0.0}, r"method\.finetune_lr: must be > 0 or null, got 0\.0"),
    ],
    ids=str,
)
def test_fedbabu_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        FedBABU(mlp(), **option)
