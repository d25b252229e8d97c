"""SCAFFOLD, option II, beside an algorithm that is written out here."""

import copy

import pytest
import torch
from torch import nn

from fl_lightning.core.server_optimizer import ServerMomentum
from fl_lightning.errors import ConfigError
from fl_lightning.federation.peers import Ring
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.scaffold import SCAFFOLD

LR = 0.1


def flat(model):
    return torch.cat([p.reshape(-1) for p in model.parameters()])


def by_hand(
    model, data, participants, optimizer, train_by_hand, server_lr=1.0, accumulate=1, in_loss=True, by_samples=False
):
    """Algorithm 1: x and c after every round. `optimizer(client, c − c_i)` makes a client's."""
    x, size = model, len(flat(model))
    c, own = torch.zeros(size), [torch.zeros(size) for _ in range(4)]
    for round, drawn in enumerate(participants, 1):
        models, changes = [], []
        for client in drawn:
            y = copy.deepcopy(x)
            correction = c - own[client]

            def loss(inputs, labels, y=y, correction=correction):
                drift = correction @ flat(y) if in_loss else 0
                return nn.functional.cross_entropy(y(inputs), labels) / accumulate + drift

            train_by_hand(y, data.clients[client], optimizer(client, correction), round, loss=loss)
            steps = -(-data.clients[client].num_train // (4 * accumulate))
            new = own[client] - c + (flat(x) - flat(y)).detach() / (steps * LR)
            changes.append(new - own[client])
            own[client] = new
            models.append(flat(y).detach())
        sizes = torch.tensor([float(data.clients[client].num_train) if by_samples else 1.0 for client in drawn])
        share = sizes / sizes.sum()
        moved = flat(x).detach() + server_lr * (share @ torch.stack(models) - flat(x).detach())
        nn.utils.vector_to_parameters(moved, x.parameters())
        c = c + len(sizes) / 4 * (share @ torch.stack(changes))
    return flat(x).detach(), c


def outcome(loop):
    message = loop.exchange.global_message()
    model = loop.runner.modules[0].method.model
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    return torch.cat([message.weights[name].reshape(-1) for name in names]), message.artifacts["control"]


@pytest.mark.parametrize(("participation", "server_lr"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)])
def test_three_rounds_are_those_of_the_paper(
    participation, server_lr, mlp, data, set_up_federation, sgd, train_by_hand
):
    optimizer = None if server_lr == 1 else ServerMomentum(server_lr, momentum=0.0)
    options = {"participation": participation, "server_optimizer": optimizer}
    loop = set_up_federation(lambda: SCAFFOLD(mlp()), data=data, optimizer=sgd(LR), **options)
    start = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    participants = [loop.calendar.participants(round) for round in (1, 2, 3)]
    x, c = by_hand(start, data, participants, lambda *_: sgd(LR), train_by_hand, server_lr)
    torch.testing.assert_close(outcome(loop), (x, c), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_clients_may_weigh_by_their_samples(participation, mlp, data, set_up_federation, sgd, train_by_hand):
    assert len({client.num_train for client in data.clients}) > 1
    options = {"participation": participation, "optimizer": sgd(LR)}
    loop = set_up_federation(lambda: SCAFFOLD(mlp(), weighting="samples"), data=data, **options)
    start = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    participants = [loop.calendar.participants(round) for round in (1, 2, 3)]
    x, c = by_hand(start, data, participants, lambda *_: sgd(LR), train_by_hand, by_samples=True)
    torch.testing.assert_close(outcome(loop), (x, c), rtol=1e-4, atol=1e-5)


class Corrected(torch.optim.SGD):
    """y ← y − η m − η (c − c_i) with m ← ρ m + g, once in so many mini-batches of a round, and at its end."""

    def __init__(self, parameters, correction, momentum, accumulate, batches):
        super().__init__(parameters, LR, momentum=momentum)
        self.correction, self.accumulate, self.batches, self.seen = correction, accumulate, batches, 0

    def zero_grad(self, *_):
        """Gradients add up until a step."""

    def step(self, *_):
        self.seen += 1
        if self.seen % self.accumulate and self.seen != self.batches:
            return
        super().step()
        super().zero_grad()
        own = self.param_groups[0]["params"]
        moved = torch.nn.utils.parameters_to_vector(own) - LR * self.correction
        torch.nn.utils.vector_to_parameters(moved.detach(), own)


@pytest.mark.parametrize(("momentum", "accumulate"), [(0.0, 1), (0.9, 1), (0.9, 2)])
def test_a_correction_after_the_step_passes_momentum_by(
    momentum, accumulate, mlp, data, set_up_federation, sgd, train_by_hand
):
    options = {"optimizer": sgd(LR, momentum=momentum), "trainer": {"accumulate_grad_batches": accumulate}}
    loop = set_up_federation(lambda: SCAFFOLD(mlp(), "step"), data=data, **options)
    start = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()

    def of_client(client, correction):
        batches = -(-data.clients[client].num_train // 4)
        return lambda parameters: Corrected(parameters, correction, momentum, accumulate, batches)

    x, c = by_hand(start, data, [range(4)] * 3, of_client, train_by_hand, accumulate=accumulate, in_loss=False)
    torch.testing.assert_close(outcome(loop), (x, c), rtol=1e-4, atol=1e-5)
    assert c.abs().max() > 0.1
    assert "loss/control" not in loop.diary.rows[0]


def test_without_momentum_both_corrections_are_the_paper_s(mlp, run_federation, sgd):
    one, other = (run_federation(lambda w=w: SCAFFOLD(mlp(), w), optimizer=sgd(LR)) for w in ("gradient", "step"))
    torch.testing.assert_close(outcome(one), outcome(other), rtol=1e-4, atol=1e-5)


def test_an_unknown_correction_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"method\.correction: must be .*gradient.*step.*, got 'loss'"):
        SCAFFOLD(mlp(), "loss")
    with pytest.raises(ConfigError, match=r"method\.weighting: must be .*samples.*uniform.*, got 'count'"):
        SCAFFOLD(mlp(), weighting="count")


def test_first_round_steps_as_fedavg(mlp, run_federation, assert_identical):
    """All control variates are 0 then."""
    one, other = run_federation(lambda: SCAFFOLD(mlp()), rounds=1), run_federation(lambda: FedAvg(mlp()), rounds=1)
    for client in range(4):
        a, b = one.diary.sent[1, client].weights, other.diary.sent[1, client].weights
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_message_is_twice_the_model(mlp, run_federation):
    loop = run_federation(lambda: SCAFFOLD(mlp()), rounds=2)
    size = sum(p.numel() for p in mlp().parameters())
    assert loop.diary.sent[1, 0].num_params == 2 * size
    assert loop.diary.received[1, 0].num_params == size
    assert loop.diary.received[2, 0].num_params == 2 * size


def test_who_makes_no_step_keeps_its_control(mlp, run_federation, sgd):
    loop = run_federation(lambda: SCAFFOLD(mlp()), rounds=2, optimizer=sgd(0.0))
    assert not loop.exchange.global_message().artifacts["control"].any()


def test_who_makes_no_step_keeps_its_control_beside_another_of_the_server(mlp, data, make_client):
    client = make_client(SCAFFOLD(mlp()))
    client.method.own_control.fill_(0.5)
    client.method.control.fill_(2.0)
    assert not client.send(data.clients[0]).artifacts["control"].any()
    assert (client.method.own_control == 0.5).all()


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: SCAFFOLD(mlp()), participation=0.5)


def test_it_cannot_do_without_its_server(mlp, set_up_federation):
    rule = "SCAFFOLD cannot do without its server, which must remember control .*: must be Star, got 'Ring'"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: SCAFFOLD(mlp()), exchange=Ring())
