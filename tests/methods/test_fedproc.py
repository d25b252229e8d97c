"""The tests that the specification of FedProc promises (BASELINES-B.md, section 9b)."""

import math
from dataclasses import replace

import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.losses.prototype import PrototypeContrast
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproc import FedProc
from fl_lightning.models.projection import add_projection

SMALL = {"projection_size": 3}


def centres_of(loop):
    return loop.exchange.global_message().artifacts["prototypes"]


def weights_of(loop):
    return dict(loop.exchange.global_message().weights)


def shares_of(method, rounds):
    """α of every round of a run."""
    shares = []
    for round in range(1, rounds + 1):
        method.facts = replace(method.facts, rounds=rounds, round=round)
        weights = method.term_weights()
        assert weights["cross_entropy"] + weights["prototype_contrast"] == 1
        shares.append(weights["cross_entropy"])
    return shares


def test_fedproc_schedule_goes_from_the_contrast_to_cross_entropy(mlp):
    """α = min(t / T, 1), but 1 in the first round, which has no centres."""
    assert shares_of(FedProc(mlp(), anneal_rounds=4, **SMALL), rounds=7) == [1.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_fedproc_schedule_takes_all_rounds_of_the_run_by_default(mlp):
    """The cross-entropy's share is 1 − 1/T in the last one."""
    assert FedProc(mlp(), **SMALL).anneal_rounds is None
    assert shares_of(FedProc(mlp(), **SMALL), rounds=5) == [1.0, 0.2, 0.4, 0.6, 0.8]
    assert shares_of(FedProc(mlp(), **SMALL), rounds=1) == [1.0]


def test_fedproc_contrast_has_no_temperature_and_normalised_centres(mlp, make_client):
    """z = v_0 = (1, 0), v_1 = (0, 5) / 5: log(1 + e^−1)."""
    method = make_client(FedProc(mlp(num_classes=3), projection_size=2)).method
    term = method.contrast[0]
    centres = torch.tensor([[1.0, 0.0], [0.0, 5.0], [9.0, 9.0]])
    term.receive(method, Message({}, {"prototypes": ClassMeans(centres, torch.tensor([1, 1, 0]))}))
    z, y = torch.tensor([[1.0, 0.0], [0.3, 0.4]]), torch.tensor([0, 2])
    loss = term(method, Forward(z, y, [], z, z))  # class 2 has no centre: its sample does not count
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-6)


@pytest.mark.parametrize(("anneal_rounds", "alphas"), [(4, (0.25, 0.5)), (None, (1 / 3, 2 / 3))])
def test_fedproc_loss_is_the_mixture(mlp, run_federation, anneal_rounds, alphas):
    rows = run_federation(lambda: FedProc(mlp(), anneal_rounds=anneal_rounds, **SMALL), rounds=3).diary.rows
    assert rows[0]["loss"] == rows[0]["loss/cross_entropy"]
    for row, alpha in zip(rows[1:], alphas, strict=True):
        total = alpha * row["loss/cross_entropy"] + (1 - alpha) * row["loss/prototype_contrast"]
        assert row["loss"] == pytest.approx(total, rel=1e-5)
        assert row["loss/prototype_contrast"] > 0


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedproc_without_annealing_equals_fedavg_of_the_projected_network(
    conv_net, run_federation, outcome, assert_identical, participation
):
    own = run_federation(lambda: FedProc(conv_net(), anneal_rounds=0, **SMALL), participation=participation)
    plain = run_federation(lambda: FedAvg(add_projection(conv_net(), 3)), participation=participation)
    assert_identical(outcome(own), outcome(plain))


def test_fedproc_is_fedavg_once_annealed(mlp, run_federation, assert_identical):
    """Rounds 1 (no centres) and 2 (t = T) of T = 1."""
    own = run_federation(lambda: FedProc(mlp(), anneal_rounds=1, **SMALL), rounds=3)
    plain = run_federation(lambda: FedAvg(add_projection(mlp(), 3)), rounds=3)
    assert_identical(weights_of(own), weights_of(plain))


def test_fedproc_centres_are_means_of_all_samples(mlp, run_federation):
    """Sums and counts of the clients; on round 2's uploads."""
    loop = run_federation(lambda: FedProc(mlp(), **SMALL), rounds=2)
    sums, counts = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    module = loop.runner.modules[0].eval()
    for data in loop.data.clients:
        module.load(loop.diary.sent[2, data.client].weights)
        x, y = loop.data.store.gather(data.train)
        with torch.no_grad():
            z = module.method.model.embed(x)
        torch.testing.assert_close(z.norm(dim=1), torch.ones(len(z)))
        sums.index_add_(0, y, z.double())
        counts += torch.bincount(y, minlength=4)
    torch.testing.assert_close(centres_of(loop).mean, (sums / counts[:, None]).float())


def test_fedproc_server_merges_by_samples(mlp, make_client):
    """Client sums 2 of one sample and 4 of three: 6 / 4; a class that nobody holds keeps its centre."""
    server = make_client(FedProc(mlp(num_classes=2), projection_size=1)).make_server(Facts())
    server.aggregate(
        {0: Message({}, {"prototypes": ClassMeans(torch.tensor([[0.0], [7.0]]), torch.tensor([0, 2]))}, 2)}
    )
    uploads = [(2.0, 1), (4 / 3, 3)]
    out = server.aggregate(
        {
            index: Message({}, {"prototypes": ClassMeans(torch.tensor([[mean], [0.0]]), torch.tensor([n, 0]))}, n)
            for index, (mean, n) in enumerate(uploads)
        }
    )
    torch.testing.assert_close(out.artifacts["prototypes"].mean, torch.tensor([[1.5], [7.0]]))


def test_fedproc_traffic_is_the_network_and_its_centres(mlp, run_federation):
    loop = run_federation(lambda: FedProc(mlp()), rounds=2)
    size = sum(p.numel() for p in add_projection(mlp(), 256).parameters())
    held = sum(int(client.held_classes.sum()) for client in loop.data.clients)
    for row, down in zip(loop.diary.rows, (0, 4 * 256), strict=True):
        assert row["uplink_params"] == 4 * size + held * 257
        assert row["downlink_params"] == 4 * (size + down)


def test_fedproc_evaluates_the_global_model_too(mlp, run_federation):
    loop = run_federation(lambda: FedProc(mlp(), **SMALL), rounds=2)
    assert loop.examiner.has_global_model
    assert loop.examiner.may_predict_as_global(0)
    assert loop.diary.rows[-1]["Server-T"] == pytest.approx(loop.final["Global-T_received"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_fedproc_trains_in_other_precisions(conv_net, run_federation, precision):
    loop = run_federation(lambda: FedProc(conv_net(), **SMALL), rounds=2, trainer={"precision": precision})
    assert centres_of(loop).mean.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    assert centres_of(loop).mean.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in weights_of(loop).values())


@pytest.mark.parametrize(("option", "value"), [("anneal_rounds", -1), ("projection_size", 0)])
def test_fedproc_rejects_bad_options(mlp, option, value):
    with pytest.raises(ConfigError, match=rf"^method\.{option}: must be .*got"):
        FedProc(mlp(), **{option: value})


def test_a_contrast_of_ones_own_keeps_its_weight(mlp):
    """With `anneal_rounds: 0` the method has none, and one of `extra_terms` stands in its place."""
    method = FedProc(mlp(), anneal_rounds=0, extra_terms=[PrototypeContrast(10.0)], **SMALL)
    method.facts = replace(method.facts, rounds=4, round=3)
    assert method.term_weights()["prototype_contrast"] == 10.0
