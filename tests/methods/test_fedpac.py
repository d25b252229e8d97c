"""FedPAC, beside its algorithm written out here."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.losses.head_combination import head_combination, scaled_means
from fl_lightning.methods.fedpac import FedPAC
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.seeding import derive_seed

COUNTS = ((12, 8, 0), (6, 14, 0), (0, 4, 16))
LR, HEAD_LR, WEIGHT = 0.1, 0.3, 2.0


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_shares_of_classes_are_as_precise_as_means(default):
    """They went by torch's default, which is another one in a client's fit under 64-true than at the server."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        scaled = scaled_means(torch.ones(2, 1, dtype=torch.float64), torch.tensor([1, 2]))
    finally:
        torch.set_default_dtype(before)
    assert scaled.flatten().tolist() == [1 / 3, 2 / 3]


def class_means(model, data):
    """Embeddings z, classes y, and the means of z by class, zeros where there are none."""
    x, y = (torch.cat(parts) for parts in zip(*data.batches("train"), strict=True))
    with torch.no_grad():
        z = model.embed(x)
    return z, y, torch.stack([z[y == c].mean(0) if (y == c).any() else torch.zeros(z.shape[1]) for c in range(3)])


def statistics(model, data):
    """h and V, class by class, from what is said of them in the paper."""
    z, y, means = class_means(model, data)
    share = torch.bincount(y, minlength=3) / len(y)
    held = [c for c in range(3) if share[c]]
    squares = sum(share[c] * z[y == c].square().sum(1).mean() for c in held)
    return share[:, None] * means, (squares - sum(share[c] ** 2 * means[c].square().sum() for c in held)) / len(y)


def fit(model, data, centres, round):
    """One epoch of the head, then one of the body with the pull."""
    for epoch, (part, lr) in enumerate(((model.head, HEAD_LR), (model.body, LR))):
        parameters = list(part.parameters())
        for bundle in data.bundles(derive_seed(0, f"shuffle/{epoch}", round, data.client), 4):
            for x, y in bundle.steps():
                z = model.embed(x)
                loss = F.cross_entropy(model.head(z), y)
                if epoch and centres is not None:
                    loss = loss + WEIGHT * F.mse_loss(z, centres[y])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        p -= lr * g


def by_hand(models, data):
    """Two rounds of three clients, in place."""
    centres = None
    sizes = torch.tensor([float(client.num_train) for client in data.clients])
    counts = torch.stack([client.class_counts for client in data.clients]).float()
    for round in (1, 2):
        h, v = zip(*(statistics(m, d) for m, d in zip(models, data.clients, strict=True)), strict=True)
        for model, client in zip(models, data.clients, strict=True):
            fit(model, client, centres, round)
        means = torch.stack([class_means(m, d)[2] for m, d in zip(models, data.clients, strict=True)])
        centres = (means * counts[:, :, None]).sum(0) / counts.sum(0)[:, None]
        shares = head_combination(torch.stack(h), torch.stack(v)).float()
        heads = [copy.deepcopy(model.head.state_dict()) for model in models]
        bodies = [model.body.state_dict() for model in models]
        body = {name: sum(s * b[name] for s, b in zip(sizes / sizes.sum(), bodies, strict=True)) for name in bodies[0]}
        for model, own in zip(models, shares, strict=True):
            model.body.load_state_dict(body)
            model.head.load_state_dict({n: sum(a * k[n] for a, k in zip(own, heads, strict=True)) for n in heads[0]})
    return shares


def test_two_rounds_are_those_of_the_paper(mlp, make_data, set_up_federation, sgd):
    data = make_data(COUNTS)
    make = lambda: FedPAC(mlp(num_classes=3), WEIGHT, head_lr=HEAD_LR)  # noqa: E731
    loop = set_up_federation(make, data=data, rounds=2, optimizer=sgd(LR))
    models = [copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(3)]
    loop.run()
    shares = by_hand(models, data)
    assert 0 < shares[0, 1] < shares[0, 0]
    for client, model in enumerate(models):
        own = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(loop.exchange.inbox(client).weights, own, rtol=1e-4, atol=1e-5)


def test_combination_is_the_best_there_is():
    """The objective as the authors' code sums it up, at the weights that were found and at many others."""
    generator = torch.Generator().manual_seed(1)
    h, v = torch.randn(4, 3, 2, generator=generator), 3 * torch.rand(4, generator=generator)
    found = head_combination(h, v)
    others = torch.distributions.Dirichlet(torch.full((4,), 0.5)).sample((2000,)).double()
    for i in range(4):
        form = torch.diag(v.double())
        for j in range(4):
            for k in range(4):
                form[j, k] += sum((h[i, c] - h[j, c]).double() @ (h[i, c] - h[k, c]).double() for c in range(3))
        least = found[i] @ form @ found[i]
        assert found[i].min() >= 0
        assert found[i].sum() == pytest.approx(1)
        assert ((others @ form * others).sum(1) >= least - 1e-9).all()


def test_without_a_pull_and_alone_it_is_fedrep(mlp, make_data, run_federation, assert_identical):
    """A head comes back to its only client; the body's fit is FedRep's."""
    data = make_data(((6, 6, 6, 6),))
    one = run_federation(lambda: FedPAC(mlp(), 0.0), data=data)
    other = run_federation(lambda: FedRep(mlp()), data=data)
    body = {n: t for n, t in one.diary.sent[3, 0].weights.items() if n.startswith("model.body")}
    torch.testing.assert_close(body, other.diary.sent[3, 0].weights)


def test_who_sits_out_keeps_its_head_and_who_is_new_hears_the_mean(mlp, run_federation, assert_identical):
    loop = run_federation(lambda: FedPAC(mlp()), rounds=1, participation=0.5)
    drawn = loop.calendar.participants(1)
    sent = [loop.diary.sent[1, client] for client in drawn]
    sizes = [message.num_samples for message in sent]
    name = "model.head.weight" if "model.head.weight" in sent[0].weights else "model.head.0.weight"
    mean = sum(s * m.weights[name] for s, m in zip(sizes, sent, strict=True)) / sum(sizes)
    for client in set(range(4)) - set(drawn):
        torch.testing.assert_close(loop.exchange.inbox(client).weights[name], mean)
    before = {client: loop.exchange.inbox(client).weights[name].clone() for client in drawn}
    assert not any(torch.allclose(head, mean) for head in before.values())
    assert set(loop.exchange.global_message().artifacts) == {"prototypes"}


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedPAC(mlp()), participation=0.5)


def test_ranges_are_checked(mlp):
    for options in ({"head_epochs": -1}, {"body_epochs": -1}, {"head_lr": 0.0}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be >"):
            FedPAC(mlp(), **options)
