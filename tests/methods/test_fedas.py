"""FedAS: bodies that are aligned to what the client knew, and weighed by Fisher information."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedas import FedAS
from fl_lightning.methods.fedper import FedPer

COUNTS = ((12, 8, 0), (6, 8, 10))


@pytest.mark.parametrize("aligned", ["samples", "means"])
def test_two_rounds_are_those_of_the_paper(aligned, mlp, make_data, set_up_federation, sgd, train_by_hand):
    """One mini-batch a pass."""
    data = make_data(COUNTS, batch_size=64)
    loop = set_up_federation(lambda: FedAS(mlp(num_classes=3), 0.2, 2, aligned), data=data, rounds=2)
    models = [copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(2)]
    loop.run()
    server = copy.deepcopy(models[0].body)
    for round in (1, 2):
        traces = []
        for i, (model, client) in enumerate(zip(models, data.clients, strict=True)):
            x, y = next(client.batches("train"))
            with torch.no_grad():
                old = model.embed(x)
            means = [old[y == c].mean(0) for c in range(3)]
            model.body.load_state_dict(server.state_dict())
            body = list(model.body.parameters())
            for _ in range(2):
                z, loss = model.embed(x), 0
                for c in y.unique():
                    here = z[y == c] if aligned == "samples" else z[y == c].mean(0)
                    loss = loss + (here - means[c]).square().mean()
                for p, slope in zip(body, torch.autograd.grad(loss, body), strict=True):
                    p.data -= 0.2 * slope
            train_by_hand(model, client, sgd(), round, batch_size=64)
            slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            traces.append(sum(slope.square().sum() for slope in slopes))
            sent = loop.diary.sent[round, i]
            torch.testing.assert_close(sent.artifacts["trace"], traces[-1], rtol=1e-3, atol=0)
            assert {name.split(".")[1] for name in sent.weights} == {"body"}
        for name, tensor in server.state_dict().items():
            tensor.copy_(sum(t * m.body.state_dict()[name] for t, m in zip(traces, models, strict=True)) / sum(traces))
    for name, tensor in server.state_dict().items():
        there = loop.exchange.global_message().weights[f"model.body.{name}"]
        torch.testing.assert_close(there, tensor, rtol=1e-4, atol=1e-5)


def test_traces_weigh(mlp, make_client):
    server = make_client(FedAS(mlp())).make_server(Facts(num_clients=3))
    server.setup(Facts(num_clients=3))
    messages = {
        client: Message({"w": torch.full((1,), float(client))}, {"trace": torch.tensor(trace)}, 99 * client + 1)
        for client, trace in enumerate((1.0, 0.25, -4.0))
    }
    assert server.aggregate(messages).weights["w"].item() == pytest.approx(0.2)


def test_alone_and_without_alignment_it_is_fedper(mlp, make_data, run_federation, assert_identical):
    data = make_data(((6, 6, 6, 6),))
    one = run_federation(lambda: FedAS(mlp(), alignment_lr=0.0), 2, data=data)
    other = run_federation(lambda: FedPer(mlp()), 2, data=data)
    assert_identical(one.diary.sent[2, 0].weights, other.diary.sent[2, 0].weights)


def test_ranges_are_checked(mlp):
    for options in ({"alignment_lr": -1.0}, {"alignment_epochs": -1}, {"aligned": "none"}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be"):
            FedAS(mlp(), **options)


def test_who_never_took_part_counts_with_its_initial_model(mlp, set_up_federation):
    """Nothing was heard, so there is nothing to align."""
    loops = [set_up_federation(lambda m=m: m(mlp()), rounds=2) for m in (FedAS, FedPer)]
    for client in range(4):
        own, plain = (loop.runner.evaluate_resting(client) for loop in loops)
        assert own == plain


def test_what_comes_down_is_the_body_alone(mlp, run_federation):
    loop = run_federation(lambda: FedAS(mlp()), 2)
    assert set(loop.diary.sent[2, 0].artifacts) == {"trace"}
    assert all(not message.artifacts for message in loop.diary.received.values())
    assert loop.diary.rows[-1]["uplink_params"] == loop.diary.rows[-1]["downlink_params"] + 4
