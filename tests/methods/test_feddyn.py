"""FedDyn, beside its algorithm in the paper's own words: g_k and h, and not what has moved."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddyn import FedDyn

ALPHA = 0.3


def flat(model):
    return torch.cat([p.reshape(-1) for p in model.parameters()])


def by_hand(model, data, participants, sgd, train_by_hand):
    """Algorithm 1: θ after every round."""
    size, m, outcome = len(flat(model)), 4, []
    gradients, h = [torch.zeros(size) for _ in range(m)], torch.zeros(size)
    for round, drawn in enumerate(participants, 1):
        start, models = flat(model).detach(), []
        for client in drawn:
            own, g = copy.deepcopy(model), gradients[client]

            def loss(x, y, own=own, g=g, start=start):
                theta = flat(own)
                penalty = ALPHA / 2 * (theta - start).square().sum() - g @ theta
                return nn.functional.cross_entropy(own(x), y) + penalty

            train_by_hand(own, data.clients[client], sgd(), round, loss=loss)
            gradients[client] = g - ALPHA * (flat(own).detach() - start)
            models.append(flat(own).detach())
        h = h - ALPHA / m * sum(theta - start for theta in models)
        nn.utils.vector_to_parameters(sum(models) / len(models) - h / ALPHA, model.parameters())
        outcome.append(flat(model).detach().clone())
    return outcome


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_three_rounds_are_those_of_the_paper(participation, mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedDyn(mlp(), ALPHA), data=data, participation=participation)
    start = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    participants = [loop.calendar.participants(round) for round in (1, 2, 3)]
    thetas = by_hand(start, data, participants, sgd, train_by_hand)
    weights = [loop.diary.received[t, loop.calendar.participants(t)[0]].weights for t in (2, 3)]
    for theta, message in zip(thetas, [*weights, loop.exchange.global_message().weights], strict=True):
        here = torch.cat([message[f"model.{name}"].reshape(-1) for name, _ in start.named_parameters()])
        torch.testing.assert_close(here, theta, rtol=1e-4, atol=1e-5)


def test_one_of_four_moves_the_mean_by_a_quarter_more(on_a_parabola, run_federation, number):
    """From 0 one client of four goes to θ: h = −α/4 θ, so that the server is at θ − h/α."""
    loop = run_federation(on_a_parabola(FedDyn, start=0, optimum=1, alpha=1.0), rounds=1, participation=0.25)
    moved = loop.diary.sent[1, loop.calendar.participants(1)[0]].weights["model.head.w"].item()
    assert number(loop) == pytest.approx(moved + moved / 4)


def test_first_fit_is_fedproxs_and_a_step_of_zero_moves_nothing(mlp, run_federation, sgd, assert_identical):
    still = run_federation(lambda: FedDyn(mlp()), rounds=2, optimizer=sgd(0.0))
    first = still.diary.received[1, 0].weights
    assert_identical(still.exchange.global_message().weights, first)
    fedavg = run_federation(lambda: FedAvg(mlp()), rounds=1)
    size = fedavg.diary.sent[1, 0].num_params
    assert still.diary.sent[1, 0].num_params == size


def test_what_a_term_shares_is_averaged_plainly(conv_net, run_federation):
    """No penalty holds it, and what the server adds for one drove it on by all that it had ever moved."""
    term = partial(FeatureDistillation, distillation=Distillation(parameters="shared", mid_channels=2))
    loop = run_federation(lambda: FedDyn(conv_net(), extra_terms=[term()]), rounds=3)
    sent = [loop.diary.sent[3, client].weights for client in range(4)]
    server = loop.exchange.global_message().weights
    names = [name for name in server if name.startswith("terms.")]
    assert names
    for name in names:
        mean = torch.stack([weights[name] for weights in sent]).mean(0)
        torch.testing.assert_close(server[name], mean, rtol=0, atol=1e-6)


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedDyn(mlp()), participation=0.5)


def test_range_is_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.alpha: must be > 0"):
        FedDyn(mlp(), alpha=0.0)
