"""FedKD: two models that teach each other as far as they are wrong, and low-rank changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.core.facts import Facts
from fl_lightning.core.low_rank import LowRankServer, approximated, low_rank
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import Quantize
from fl_lightning.methods.fedkd import FedKD


def taught(student, teacher):
    """KL(teacher ‖ student), as it is defined."""
    p, q = F.softmax(teacher, 1), F.softmax(student, 1)
    return (p * (p / q).log()).sum(1).mean()


def void(value):
    """Nothing: what a hook must return."""


def least_rank(change, energy):
    """A matrix by the fewest singular values that exceed the share, one after another."""
    u, s, v = torch.linalg.svd(change.double().flatten(1), full_matrices=False)
    rank = next(k for k in range(len(s) + 1) if k == len(s) or s[:k].square().sum() > energy * s.square().sum())
    return (u[:, :rank] @ s[:rank].diag() @ v[:rank]).view_as(change).float(), rank


@pytest.mark.parametrize(("gradients", "clip"), [("joint", None), ("own", 0.5)])
def test_two_rounds_are_those_of_the_paper(gradients, clip, mlp, data, set_up_federation, sgd, train_by_hand):
    """The teacher's gradients, and those of the student and W, are clipped by themselves."""
    clips = {"gradient_clip_val": clip}
    loop = set_up_federation(lambda: FedKD(mlp(), 0.5, 0.9, gradients), data=data, rounds=2, trainer=clips)
    method = loop.runner.modules[0].method
    three = nn.ModuleList([copy.deepcopy(method.model), copy.deepcopy(method.model), copy.deepcopy(method.transform)])
    loop.run()
    t, s, w = three

    def clipped(parameters):
        stepper = sgd()(parameters)
        groups = [] if clip is None else [[*t.parameters()], [*s.parameters(), *w.parameters()]]
        for group in groups:
            stepper.register_step_pre_hook(lambda *_, group=group: void(nn.utils.clip_grad_norm_(group, clip)))
        return stepper

    cut = torch.Tensor.detach if gradients == "own" else lambda x: x
    for round, energy in ((1, 0.7), (2, 0.9)):
        received = loop.diary.received[round, 0].weights
        s.load_state_dict({n.removeprefix("model."): own for n, own in received.items()})

        def loss(x, y):
            z_t, z_s = t.embed(x), s.embed(x)
            g_t, g_s = t.head(z_t), s.head(z_s)
            ce_t, ce_s = F.cross_entropy(g_t, y), F.cross_entropy(g_s, y)
            of_t = ce_t + (taught(g_t, cut(g_s)) + F.mse_loss(z_t, cut(w(z_s)))) / (ce_t + cut(ce_s))
            return of_t + ce_s + (taught(g_s, cut(g_t)) + F.mse_loss(cut(z_t), w(z_s))) / (cut(ce_t) + ce_s)

        train_by_hand(three, data.clients[0], clipped, round, loss=loss)
        sent, values = loop.diary.sent[round, 0], 0
        for name, tensor in s.state_dict().items():
            change, rank = tensor - received[f"model.{name}"], 0
            if tensor.ndim > 1:
                change, rank = least_rank(change, energy)
            values += min(rank * (sum(tensor.shape) + 1), tensor.numel()) if rank else tensor.numel()
            there = received[f"model.{name}"] + change
            torch.testing.assert_close(sent.weights[f"model.{name}"], there, rtol=1e-4, atol=1e-5)
        assert sent.num_params == values
        assert sent.num_bytes == 4 * values
    kept = {f"personal.{n}": own for n, own in t.state_dict().items()} | {"transform.weight": w.weight.detach()}
    torch.testing.assert_close(dict(loop.runner.pool.get(0)), kept, rtol=1e-4, atol=1e-5)


def test_values_that_a_matrix_takes():
    """Of squares 9, 4, 1: 0.6 of 14 takes the first, 0.65 two, and all are no more than the matrix itself."""
    matrix = torch.zeros(3, 8)
    matrix[range(3), range(3)] = torch.tensor([3.0, 2.0, 1.0])
    assert [low_rank(matrix, energy)[1] for energy in (0.0, 0.6, 0.65, 0.99, 1.0)] == [12, 12, 24, 24, 24]
    assert low_rank(matrix, 0.65)[0].diagonal().tolist() == pytest.approx([3.0, 2.0, 0.0], abs=1e-6)
    assert low_rank(torch.zeros(2, 2), 0.9)[1] == 0


def test_a_kernel_is_a_matrix_and_the_rest_travels_as_it_is():
    before = {"kernel": torch.ones(2, 1, 2, 2), "bias": torch.zeros(2), "steps": torch.tensor(1)}
    row = torch.tensor([1.0, 0.0, 2.0, 0.0]).view(1, 2, 2)
    after = {"kernel": before["kernel"] + torch.stack([row, 3 * row]), "bias": torch.ones(2), "steps": torch.tensor(4)}
    message = approximated(Message(after, {}, 3), before, 0.9)
    torch.testing.assert_close(message.weights, after)
    assert (message.num_params, message.num_bytes) == (7 + 2 + 1, 4 * 9 + 8)
    assert approximated(Message(after, {}, 3), before, 1.0).weights is after


def test_who_sat_out_gets_the_model_whole():
    server = LowRankServer(Message({"w": torch.zeros(4, 5)}), lambda round: 0.9)
    server.setup(Facts(num_clients=3))
    column = torch.arange(4.0)[:, None].expand(4, 5)
    server.aggregate({0: Message({"w": column}, {}, 1), 2: Message({"w": 3 * column}, {}, 9)})
    assert [server.message_for(client).num_params for client in range(3)] == [10, 20, 10]
    torch.testing.assert_close(server.message_for(1).weights["w"], 2 * column)  # all alike
    server.aggregate({1: Message({"w": column}, {}, 1)})
    assert [server.message_for(client).num_params for client in range(3)] == [20, 10, 20]  # of the last round alone


def test_a_round_in_which_nobody_sends_makes_the_next_message_no_dearer(mlp, run_federation):
    plain = run_federation(lambda: FedKD(mlp()), rounds=4)
    idle = run_federation(lambda: FedKD(mlp()), rounds=4, failures=Failures(schedule={"3": [0, 1, 2, 3]}))
    bytes_down = [[row["downlink_bytes"] for row in loop.diary.rows] for loop in (plain, idle)]
    assert bytes_down[1] == [*bytes_down[0][:2], 0, bytes_down[0][2]]


def test_what_is_quantised_costs_what_whole_matrices_do(mlp, run_federation):
    def costs(energy, *filters):
        loop = run_federation(lambda: FedKD(mlp(), energy_start=energy, energy_end=energy), rounds=2, wire=filters)
        return [(row["uplink_bytes"], row["downlink_bytes"]) for row in loop.diary.rows]

    assert costs(0.1, Quantize()) == costs(1.0, Quantize())
    assert costs(0.1)[1] < costs(0.1, Quantize())[1]


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedKD(mlp()), participation=0.5)


def test_ranges_are_checked(mlp):
    for options in ({"energy_start": 1.5}, {"energy_end": -0.1}, {"gradients": "all"}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be"):
            FedKD(mlp(), **options)
