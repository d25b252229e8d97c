"""MOON's contrast: the specification's numbers (BASELINES-A.md, section 11) and edges."""

import math

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.losses.model_contrast import ModelContrast, model_contrast_loss
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.lstm import BiLSTM
from fl_lightning.models.wrapped import WrappedModel


def z(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_contrast_matches_hand_computed_values():
    """softplus((−1 − 1)/0.5) = log(1 + e⁻⁴); log 2 where both models agree."""
    own = z(4, 3)
    assert model_contrast_loss(own, own, [-own], 0.5).item() == pytest.approx(0.0181499, abs=1e-6)
    assert model_contrast_loss(own, z(4, 3) + 1, [z(4, 3) + 1], 0.5).item() == pytest.approx(0.6931472, abs=1e-6)


def test_contrast_of_one_earlier_model_is_softplus():
    own, received, previous = z(3, 5, 4)
    cosine = torch.nn.functional.cosine_similarity
    expected = torch.nn.functional.softplus((cosine(own, previous) - cosine(own, received)) / 0.3).mean()
    torch.testing.assert_close(model_contrast_loss(own, received, [previous], 0.3), expected)


def test_contrast_of_several_earlier_models_has_them_all_as_negatives():
    """Cosines 1, 0, −1 at τ = 1: −log(e / (e + 1 + 1/e))."""
    own = torch.tensor([[1.0, 0.0]])
    loss = model_contrast_loss(own, own, [torch.tensor([[0.0, 5.0]]), -own], 1.0)
    assert loss.item() == pytest.approx(-math.log(math.e / (math.e + 1 + 1 / math.e)), abs=1e-6)
    assert model_contrast_loss(own, own, [], 1.0).item() == 0


def test_contrast_of_equal_models_has_no_gradient():
    own, same = z(4, 3).requires_grad_(), z(4, 3) + 1
    model_contrast_loss(own, same, [same], 0.5).backward()
    assert own.grad.abs().max().item() < 1e-7


def test_contrast_is_finite_at_a_small_temperature_and_on_dead_embeddings():
    own, received, previous = z(3, 5, 4)
    for left in (own, torch.zeros_like(own)):
        left = left.clone().requires_grad_()
        loss = model_contrast_loss(left, received, [previous], 1e-3)
        loss.backward()
        assert loss.isfinite()
        assert left.grad.isfinite().all()


def test_contrast_gradients_match_finite_differences_and_reach_no_teacher():
    own, received, previous = (x.double().requires_grad_() for x in z(3, 4, 3))
    assert torch.autograd.gradcheck(lambda x: model_contrast_loss(x, received, [previous], 0.5), own)
    model_contrast_loss(own, received, [previous], 0.5).backward()
    assert received.grad is None
    assert previous.grad is None


def test_contrast_of_narrow_embeddings_is_computed_in_float32():
    own, received, previous = z(3, 4, 3).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model_contrast_loss(own, received, [previous], 0.5)
    assert loss.dtype == torch.float32
    assert loss == model_contrast_loss(own.float(), received.float(), [previous.float()], 0.5)


def test_contrast_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="`temperature` must be > 0, got 0"):
        model_contrast_loss(z(2, 2), z(2, 2), [z(2, 2)], 0)
    with pytest.raises(ValueError, match=r"`z` is \(2, 2\)"):
        model_contrast_loss(z(2, 2), z(3, 2), [z(2, 2)], 1.0)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"weight": -1.0}, ">"),
        ({"temperature": 0.0}, ">"),
        ({"previous_models": 0}, "from 1 to 64"),
        ({"previous_models": 65}, "from 1 to 64"),
    ],
)
def test_term_rejects_bad_values(option, said):
    with pytest.raises(ConfigError, match=rf"ModelContrast\.{next(iter(option))}: must be {said}"):
        ModelContrast(**option)


def test_received_model_is_in_no_state_and_no_optimizer(conv_net, make_client):
    """Only the own last model is kept, and neither is trained."""
    method = FedAvg(conv_net(), extra_terms=[ModelContrast()])
    client = make_client(method)
    body = set(conv_net().body.state_dict())
    own = {name for name in client.entries if name.startswith("terms.")}
    assert own == {"terms.1.num_known", *(f"terms.1.previous.0.{name}" for name in body)}
    assert not any(p.requires_grad for p in method.terms[1].parameters())
    assert client.division.shared == tuple(f"model.{name}" for name in method.model.state_dict())


def test_term_works_on_a_recurrent_body(make_client, data):
    """An LSTM keeps a list of its weights beside them."""
    method = FedAvg(BiLSTM((6,), 3, 20), extra_terms=[ModelContrast()])
    client, term, x = make_client(method), method.terms[1], torch.arange(12).reshape(2, 6)
    client.train()
    term.after_fit(method)
    with torch.no_grad():
        for parameter in method.model.parameters():
            parameter.add_(0.01)
    client.receive(client.initial_message().clone(), data.clients[0])
    body = method.model.body.eval()
    # An LSTM that builds a graph may take another kernel, which rounds otherwise; the last model is 1e-2 away.
    torch.testing.assert_close(term.received(x), body(x), rtol=0, atol=1e-6)
    assert (term.previous[0](x) - body(x)).abs().max() > 1e-3


def test_term_without_weight_has_no_state(mlp, make_client):
    without, at_zero = make_client(FedRep(mlp())), make_client(FedRep(mlp(), extra_terms=[ModelContrast(0.0)]))
    assert at_zero.entries.keys() == without.entries.keys()


def test_term_is_refused_where_no_body_comes_in(mlp, make_client):
    with pytest.raises(ConfigError, match=r"^method\.extra_terms: ModelContrast .* Local shares none: leave it out"):
        make_client(Local(mlp(), extra_terms=[ModelContrast()]))
    make_client(Local(mlp(), extra_terms=[ModelContrast(0.0)]))


def test_term_remembers_so_many_own_models_newest_first(mlp, run_federation):
    term = lambda: ModelContrast(1.0, previous_models=2)  # noqa: E731
    loop = run_federation(lambda: FedAvg(mlp(), extra_terms=[term()]), rounds=3)
    for client in range(4):
        kept = loop.runner.pool.get(client)
        assert kept["terms.1.num_known"] == 2
        for index, round in ((0, 3), (1, 2)):
            sent = loop.diary.sent[round, client].weights
            for name, tensor in sent.items():
                if name.startswith("model.body."):
                    place = name.replace("model.body", f"terms.1.previous.{index}")
                    assert torch.equal(kept[place], tensor)


def test_term_works_where_a_buffer_of_the_body_has_two_names(run_federation):
    """Only the first of the two was found."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(64, 5), nn.Linear(5, 4)
            self.register_buffer("shift", torch.ones(5))
            self.register_buffer("again", self.shift)

        def forward(self, x):
            return self.fc(self.first(x.flatten(1)) + self.shift + self.again)

    make = lambda: FedAvg(WrappedModel((1, 8, 8), 4, Shares(), "fc"), extra_terms=[ModelContrast()])  # noqa: E731
    assert len(run_federation(make, 2).diary.rows) == 2
