"""pFedMe: K steps near the local model, then a step of the local model, for every mini-batch."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.server_optimizer import ServerMomentum
from fl_lightning.errors import ConfigError
from fl_lightning.losses.model_contrast import ModelContrast
from fl_lightning.methods.pfedme import pFedMe
from fl_lightning.seeding import derive_seed

PERSONAL_LR, WEIGHT, STEPS, LR = 0.1, 5.0, 3, 0.02


def fit_by_hand(w, data, batches):
    """One client's round, by formulas: returns θ and w as lists of tensors."""
    theta = copy.deepcopy(w)
    local = [p.detach().clone() for p in w.parameters()]
    for x, y in batches(data):
        for _ in range(STEPS):
            gradients = torch.autograd.grad(F.cross_entropy(theta(x), y), list(theta.parameters()))
            with torch.no_grad():
                for p, g, anchor in zip(theta.parameters(), gradients, local, strict=True):
                    p -= PERSONAL_LR * (g + WEIGHT * (p - anchor))
        local = [p - LR * WEIGHT * (p - q.detach()) for p, q in zip(local, theta.parameters(), strict=True)]
    return theta, local


def batches_of(round):
    def batches(data):
        for bundle in data.bundles(derive_seed(0, "shuffle/0", round, data.client), 4):
            yield from bundle.steps()

    return batches


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_two_rounds_are_those_of_the_paper(beta, mlp, data, set_up_federation, sgd):
    optimizer = None if beta == 1 else ServerMomentum(beta, momentum=0.0)
    loop = set_up_federation(
        lambda: pFedMe(mlp(), WEIGHT, STEPS, PERSONAL_LR),
        rounds=2,
        data=data,
        optimizer=sgd(LR),
        server_optimizer=optimizer,
    )
    w = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    for round in (1, 2):
        ends = [fit_by_hand(w, client, batches_of(round)) for client in data.clients]
        with torch.no_grad():
            for index, p in enumerate(w.parameters()):
                p.copy_((1 - beta) * p + beta * sum(local[index] for _, local in ends) / 4)
    weights = loop.exchange.global_message().weights
    for name, tensor in w.state_dict().items():
        torch.testing.assert_close(weights[f"model.{name}"], tensor, rtol=1e-5, atol=1e-6)
    for client, (theta, _) in enumerate(ends):
        own = {f"personal.{name}": tensor for name, tensor in theta.state_dict().items()}
        torch.testing.assert_close(dict(loop.runner.pool.get(client)), own, rtol=1e-5, atol=1e-6)


def test_figures_say_which_model_they_are_of(mlp, run_federation):
    loop = run_federation(lambda: pFedMe(mlp()), rounds=2)
    row = loop.diary.rows[1]
    assert row["Local-T"] == row["Local-T/personal"]
    assert row["Global-T_received/global"] == pytest.approx(loop.diary.rows[0]["Server-T"])
    assert {name.split(".")[0] for name in loop.diary.sent[1, 0].weights} == {"model"}


def test_statistics_of_batch_norm_travel_with_the_local_model(conv_net, run_federation):
    loop = run_federation(lambda: pFedMe(conv_net()), rounds=1)
    sent = loop.diary.sent[1, 0].weights
    kept = loop.runner.pool.get(0)
    moved = [name for name in sent if name.endswith("running_mean")]
    assert moved
    for name in moved:
        assert torch.equal(sent[name], kept[name.replace("model.", "personal.", 1)])
        assert sent[name].any()


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.weight: must be > 0"):
        pFedMe(mlp(), weight=0.0)
    with pytest.raises(ConfigError, match=r"method\.inner_steps: must be >= 1"):
        pFedMe(mlp(), inner_steps=0)
    with pytest.raises(ConfigError, match=r"method\.personal_lr: must be > 0 and below 2 / weight \(0\.133333\)"):
        pFedMe(mlp(), personal_lr=0.2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_steps_of_w_are_clipped_though_the_other_part_has_no_gradient(algorithm, mlp, set_up_federation, sgd):
    flags = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    loop = set_up_federation(lambda: pFedMe(mlp(), WEIGHT, STEPS), rounds=1, optimizer=sgd(LR), trainer=flags)
    before = {name: tensor.clone() for name, tensor in loop.exchange.global_message().weights.items()}
    loop.run()
    moved = max(float((tensor - before[n]).abs().max()) for n, tensor in loop.exchange.global_message().weights.items())
    assert 0 < moved <= 4 * LR * 1.001e-3  # a round has at most four steps


def test_terms_keep_the_model_as_the_fit_has_left_it(conv_net, run_federation):
    """Its running statistics are θ's; the last model that a term compares with had those that came in."""
    loop = run_federation(lambda: pFedMe(conv_net(), extra_terms=[ModelContrast()]), rounds=1)
    kept, sent = loop.runner.pool.get(0), loop.diary.sent[1, 0].weights
    known = {name: tensor for name, tensor in kept.items() if ".previous.0." in name}
    assert any(name.endswith("running_mean") for name in known)
    for name, tensor in known.items():
        assert torch.equal(tensor, sent[name.replace("terms.1.previous.0.", "model.body.")]), name
