"""The tests that the specification of MOON promises (BASELINES-A.md, section 11)."""

import math

import pytest
import torch
from torch import nn

from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import Distillation, FeatureDistillation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.moon import MOON
from fl_lightning.models.wrapped import WrappedModel
from fl_lightning.sealed import load_tensors


def test_moon_without_a_term_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    plain = run_federation(lambda: FedAvg(conv_net()), participation=0.5)
    assert_identical(outcome(run_federation(lambda: MOON(conv_net(), mu=0), participation=0.5)), outcome(plain))


def test_moon_first_round_is_fedavgs_at_a_loss_of_log_2_more(mlp, run_federation, assert_identical):
    plain, loop = run_federation(lambda: FedAvg(mlp()), rounds=1), run_federation(lambda: MOON(mlp(), mu=5.0), rounds=1)
    assert_identical(loop.exchange.global_message().weights, plain.exchange.global_message().weights)
    assert loop.diary.rows[0]["loss/model_contrast"] == pytest.approx(math.log(2))
    assert loop.diary.rows[0]["loss"] == pytest.approx(plain.diary.rows[0]["loss"] + 5 * math.log(2), rel=1e-6)


def test_moon_model_file_of_a_first_fit_holds_the_body_that_came_in_and_no_other_clients(mlp, run_federation, tmp_path):
    loop = run_federation(lambda: MOON(mlp()), rounds=2, participation=0.5, folder=tmp_path)
    participants = [{client for round, client in loop.diary.received if round == number} for number in (1, 2)]
    new = participants[1] - participants[0]
    assert new
    for client in new:
        state = load_tensors(tmp_path / "models" / f"{client:05d}.pt", "test")
        kept = {n.removeprefix("terms.1.received."): t for n, t in state.items() if n.startswith("terms.1.received.")}
        came = loop.diary.received[2, client].weights
        assert kept
        assert all(torch.equal(tensor, came[f"model.body.{name}"]) for name, tensor in kept.items())


def test_moon_term_is_lower_where_it_weighs_more(mlp, run_federation):
    def last(mu):
        rows = run_federation(lambda: MOON(mlp(), mu=mu), rounds=3, local_epochs=4, evaluate_every=3).diary.rows
        return rows[-1]["loss/model_contrast"]

    assert last(5.0) < last(1e-6) - 0.05


def test_moon_teachers_are_left_as_they_are_by_a_fit(conv_net, run_federation):
    """No gradient reaches them, and their running statistics stand still; MOON's term would move both otherwise."""
    seen = []

    class Watches(Term):
        def forward(self, host, out):
            term = host.terms[1]
            teachers = (term.received, *term.previous)
            state = [t.clone() for teacher in teachers for t in (*teacher.parameters(), *teacher.buffers())]
            assert not any(module.training for teacher in teachers for module in teacher.modules())
            assert not any(t.requires_grad for teacher in teachers for t in (*teacher.parameters(), *teacher.buffers()))
            seen.append((host.facts.round, out.y.sum().item(), state))
            return out.logits.sum() * 0

    loop = run_federation(
        lambda: MOON(conv_net(), extra_terms=[Watches()]), rounds=2, participation=0.25, local_epochs=3
    )
    second = [state for round, _, state in seen if round == 2]
    assert len(second) > 2
    for state in second[1:]:
        assert all(torch.equal(one, other) for one, other in zip(state, second[0], strict=True))
    assert loop.done


def test_moon_received_teacher_is_the_received_body(conv_net, run_federation):
    loop = run_federation(lambda: MOON(conv_net()), rounds=2)
    module = loop.runner.load(0)
    module.receive(loop.exchange.inbox(0), loop.data.clients[0])
    received = dict(module.method.terms[1].received.named_buffers())
    for name, tensor in loop.exchange.inbox(0).weights.items():
        if name.startswith("model.body."):
            assert torch.equal(received[name.removeprefix("model.body.")], tensor)


def test_moon_client_that_sat_out_keeps_the_model_of_its_last_fit(conv_net, run_federation):
    loop = run_federation(lambda: MOON(conv_net()), rounds=4, participation=0.5)
    last = {client: loop.diary.sent[round, client] for round, client in sorted(loop.diary.sent)}
    assert {round for round, _ in loop.diary.sent} == {1, 2, 3, 4}
    for client, message in last.items():
        kept = loop.runner.pool.get(client)
        body = {name: tensor for name, tensor in message.weights.items() if name.startswith("model.body.")}
        assert set(kept) == {
            "terms.1.num_known",
            *(name.replace("model.body", "terms.1.previous.0") for name in body),
        }
        for name, tensor in body.items():
            assert torch.equal(kept[name.replace("model.body", "terms.1.previous.0")], tensor)


@pytest.mark.parametrize(
    ("net", "options"), [("conv_net", {"attention": "inline"}), ("mlp", {"tap": "preact"})], ids=str
)
def test_moon_compares_bodies_that_another_term_has_altered(request, assert_resumes, net, options):
    model = request.getfixturevalue(net)
    make = lambda: MOON(model(), extra_terms=[FeatureDistillation(distillation=Distillation(**options))])  # noqa: E731
    loop = assert_resumes(make, stopped_after=1, rounds=2)
    method = loop.runner.modules[0].method
    names = [name for name, _ in method.model.body.named_parameters()]
    assert len(method.model.body.stages) == 2  # more than the one it was made of
    assert [name for name, _ in method.terms[1].previous[0].named_parameters()] == names
    assert set(names) <= {name for name, _ in method.terms[1].received.named_buffers()}
    assert [row["round"] for row in loop.diary.rows] == [1, 2]
    assert loop.diary.rows[1]["loss/model_contrast"] != pytest.approx(math.log(2), abs=1e-6)
    assert loop.diary.rows[1]["loss/feature_distillation"] > 0


@pytest.mark.parametrize(("projection", "previous"), [(None, 1), (7, 1), (None, 2)])
def test_moon_sends_the_model_and_no_teacher(conv_net, run_federation, projection, previous):
    client = lambda: MOON(conv_net(), projection=projection, previous_models=previous)  # noqa: E731
    loop = run_federation(client, rounds=2)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    if projection is not None:
        size += (6 * 6 + 6) + (6 * 7 + 7) + (7 * 4 + 4) - (6 * 4 + 4)
    assert {message.num_params for message in loop.diary.sent.values()} == {size}
    assert {message.num_params for message in loop.diary.received.values()} == {size}


def test_moon_costs_two_more_forward_passes_through_the_body(mlp, make_data, set_up_federation, count_passes):
    """None before the first own model; no gradient goes back through a teacher, nor any pass through its head."""
    data = make_data(counts=((12, 12),), test_fraction=0.0)
    loop = set_up_federation(lambda: MOON(mlp(num_classes=2)), rounds=2, data=data)
    module = loop.runner.modules[0]
    method = module.method
    term = method.terms[1]
    layers = {"own": method.model.body, "received": term.received, "previous": term.previous[0]}
    counted = {name: count_passes(body.neck) for name, body in layers.items()}
    head = count_passes(method.model.head)
    for passes in (0, 24):
        for count in (*counted.values(), head):
            count.forward = count.backward = 0
        module.receive(loop.exchange.inbox(0), data.clients[0])
        loop.runner.fit(module, data.clients[0], 1)
        assert counted["own"].forward == counted["own"].backward == head.forward == 24
        assert counted["received"].forward == counted["previous"].forward == passes
        assert counted["received"].backward == counted["previous"].backward == 0


def test_moon_projection_is_on_the_way_to_the_classifier(mlp, make_client):
    """Linear(5, 5), ReLU, Linear(5, 7) = z, Linear(7, 4)."""
    method = make_client(MOON(mlp(), projection=7)).method
    x = torch.rand(3, 1, 8, 8)
    z = method.model.embed(x)
    assert z.shape == (3, 7)
    assert method.model.embedding_size == 7
    assert method.model.head.weight.shape == (4, 7)
    torch.testing.assert_close(method.model(x), method.model.head(z))
    torch.testing.assert_close(method.terms[1].received(x), z)
    features, same = method.model.forward_features(x)
    assert len(features) == 1
    torch.testing.assert_close(same, z)


def test_moon_projection_leaves_a_wrapped_models_feature_maps():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 4))
    method = MOON(WrappedModel((1, 8, 8), 4, network, head="3", features=["1"]), projection=7)
    features, z = method.model.forward_features(torch.rand(3, 1, 8, 8))
    assert [feature.shape for feature in features] == [(3, 5)]
    assert z.shape == (3, 7)


def test_moon_projection_keeps_a_head_without_bias(mlp):
    model = mlp()
    model.head.bias = None
    assert MOON(model, projection=7).model.head.bias is None


def test_moon_trains_in_mixed_precision(conv_net, run_federation):
    loop = run_federation(lambda: MOON(conv_net(), projection=8), trainer={"precision": "bf16-mixed"}, local_epochs=2)
    assert loop.diary.rows[-1]["loss"] < loop.diary.rows[0]["loss"]


def test_moon_projection_needs_a_linear_head(mlp):
    model = mlp()
    model.head = nn.Sequential(model.head)
    with pytest.raises(ConfigError, match=r"method\.projection: needs a head of one linear layer"):
        MOON(model, projection=7)


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"mu": -1.0}, r"method\.mu: must be >= 0"),
        ({"temperature": 0.0}, r"method\.temperature: must be > 0, got 0\.0"),
        ({"previous_models": 0}, r"method\.previous_models: must be from 1 to 64, got 0"),
        ({"projection": 0}, r"method\.projection: must be >= 1 or null, got 0"),
    ],
    ids=str,
)
def test_moon_rejects_bad_values(mlp, option, rule):
    with pytest.raises(ConfigError, match=rule):
        MOON(mlp(), **option)
