"""The tests that the specification of FedRep promises (BASELINES-A.md, section 7)."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.method import Method
from fl_lightning.core.term import CrossEntropy
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedrep import FedRep


class Epochs(L.Callback):
    """The state at the start and at the end of every epoch."""

    def __init__(self):
        self.starts, self.ends = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.starts.append({name: tensor.clone() for name, tensor in pl_module.entries.items()})

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append({name: tensor.clone() for name, tensor in pl_module.entries.items()})


def parameters_of(model, part):
    return [f"model.{name}" for name, _ in model.named_parameters() if name.startswith(part)]


def unchanged(one, two, names):
    return all(torch.equal(one[name], two[name]) for name in names)


def test_fedrep_freezes_the_body_over_the_head_phase_and_the_head_over_the_body_phase(conv_net, sgd, run_federation):
    seen = Epochs()
    run_federation(
        lambda: FedRep(conv_net(), head_epochs=2),
        rounds=2,
        optimizer=sgd(momentum=0.9, weight_decay=0.01),
        trainer={"callbacks": [seen]},
    )
    body, head = parameters_of(conv_net(), "body"), parameters_of(conv_net(), "head")
    for first in range(0, len(seen.starts), 3):
        start, between, end = seen.starts[first], seen.ends[first + 1], seen.ends[first + 2]
        assert unchanged(start, between, body)
        assert not unchanged(start, between, head)
        assert unchanged(between, end, head)
        assert not unchanged(between, end, body)


def test_fedrep_moves_the_statistics_of_the_frozen_body(conv_net, run_federation):
    """The frozen body stays in train mode, as in the authors' code."""
    seen = Epochs()
    run_federation(lambda: FedRep(conv_net()), rounds=1, trainer={"callbacks": [seen]})
    name = "model.body.stages.0.1.running_mean"
    assert not torch.equal(seen.starts[0][name], seen.ends[0][name])


def test_fedrep_without_body_epochs_sends_the_body_back_as_it_came(mlp, run_federation):
    loop = run_federation(lambda: FedRep(mlp(), body_epochs=0), rounds=2)
    first = loop.diary.received[1, 0].weights
    for message in (*loop.diary.sent.values(), loop.exchange.global_message()):
        assert message.weights.keys() == first.keys()
        assert unchanged(first, message.weights, first)


def test_fedrep_without_head_epochs_keeps_every_head_as_it_was_drawn(mlp, run_federation, set_up_federation):
    names = parameters_of(mlp(), "head")
    initial = set_up_federation(lambda: FedRep(mlp())).runner.modules[0].entries
    loop = run_federation(lambda: FedRep(mlp(), head_epochs=0), rounds=3)
    assert all(unchanged(initial, loop.runner.pool.get(client), names) for client in range(4))


def test_fedrep_without_any_epochs_changes_nothing(mlp, run_federation):
    loop = run_federation(lambda: FedRep(mlp(), head_epochs=0, body_epochs=0), rounds=2)
    first = loop.diary.received[1, 0].weights
    assert unchanged(first, loop.exchange.global_message().weights, first)
    assert {report.num_steps for report in loop.diary.reports.values()} == {0}


def test_fedrep_sends_the_body_with_its_buffers_and_no_head(conv_net, run_federation):
    loop = run_federation(lambda: FedRep(conv_net()), rounds=2)
    body = {f"model.{name}" for name in conv_net().state_dict() if name.startswith("body")}
    for message in (*loop.diary.sent.values(), *loop.diary.received.values()):
        assert set(message.weights) == body


def test_fedrep_keeps_the_heads_apart(mlp, run_federation):
    loop = run_federation(lambda: FedRep(mlp()))
    heads = [loop.runner.pool.get(client) for client in range(4)]
    assert all(set(head) == {"model.head.weight", "model.head.bias"} for head in heads)
    assert not torch.equal(heads[0]["model.head.weight"], heads[1]["model.head.weight"])


def test_fedrep_head_on_a_frozen_body_becomes_the_least_squares_head(mlp, sgd, make_data, run_federation):
    """With a squared loss and many full-batch steps, h solves min ‖Z h - Y‖² over the body's embeddings Z."""

    class Squared(CrossEntropy):
        def forward(self, host, out):
            return F.mse_loss(out.logits, F.one_hot(out.y, 4).float())

    class Regression(FedRep):
        def __init__(self):
            Method.__init__(self, mlp(hidden=(3,)))
            self.terms[0] = Squared()
            self.head_epochs, self.body_epochs = 150, 0

    data = make_data(counts=((6, 5, 9, 5),), batch_size=100)
    loop = run_federation(Regression, rounds=1, data=data, optimizer=sgd(0.5, momentum=0.9))
    x, y = data.store.gather(data.clients[0].train)
    module = loop.runner.load(0)
    module.load(loop.exchange.global_message().weights)
    with torch.no_grad():
        z = torch.cat([module.method.model.embed(x), torch.ones(len(x), 1)], 1).double()
        best = z @ torch.linalg.lstsq(z, F.one_hot(y, 4).double(), driver="gelsd").solution
        torch.testing.assert_close(module.method.model(x).double(), best, rtol=0, atol=5e-3)


def test_fedrep_has_no_server_accuracy(mlp, run_federation):
    assert run_federation(lambda: FedRep(mlp()), rounds=1).diary.rows[0]["Server-T"] is None


def test_fedrep_takes_the_local_epochs_of_the_federation_for_the_body(mlp, run_federation):
    loop = run_federation(lambda: FedRep(mlp(), head_epochs=3), rounds=1, local_epochs=2)
    assert loop.diary.reports[1, 0].num_steps == 5 * loop.data.clients[0].num_steps(4)


@pytest.mark.parametrize("option", ["head_epochs", "body_epochs"])
def test_fedrep_rejects_negative_epochs(mlp, option):
    with pytest.raises(ConfigError, match=rf"method\.{option}: must be >= 0.*got -1"):
        FedRep(mlp(), **{option: -1})
