"""The tests that the specification of FeSEM promises (BASELINES-B.md, section 4)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fesem import CentresServer, FeSEM
from fl_lightning.methods.local import Local
from fl_lightning.models.cnn import CNN


def scalar(value, samples=1):
    return Message({"w": torch.tensor([float(value)])}, {}, samples)


def scalar_server(num_centres, centres=None, seed=0, **options):
    """A server of models of one weight, whose centres are given."""
    options = {"start": "kmeans++", "compared": ("w",), "weighting": "uniform", "redraw": dict, **options}
    server = CentresServer(scalar(0), num_centres, **options)
    server.setup(Facts(seed=seed))
    server.centres = [{"w": torch.tensor([float(centre)])} for centre in centres or ()]
    return server


def values(server):
    return [centre["w"].item() for centre in server.centres]


def weights_of(loop, client):
    return dict(loop.exchange.inbox(client).weights)


def server_of(loop):
    return loop.exchange.server


# --- E-step and M-step ----------------------------------------------


def test_fesem_assigns_to_the_nearest_centre_and_averages():
    server = scalar_server(2, [0, 10])
    server.aggregate({0: scalar(1), 1: scalar(2), 2: scalar(9)})
    assert server.assignment == {0: 0, 1: 0, 2: 1}
    assert values(server) == [1.5, 9.0]


def test_fesem_weighs_clients_alike_or_by_samples():
    """Centre 0: 0 and 4 of 1 and 3 samples."""
    for weighting, expected in (("uniform", 2.0), ("samples", 3.0)):
        server = scalar_server(2, [0, 100], weighting=weighting)
        server.aggregate({0: scalar(0, 1), 1: scalar(4, 3)})
        assert values(server) == [expected, 100.0]


def test_fesem_centre_without_clients_stays():
    server = scalar_server(3, [0, 10, 1000])
    server.aggregate({0: scalar(1), 1: scalar(9)})
    assert values(server) == [1.0, 9.0, 1000.0]


def test_fesem_tie_keeps_the_client_where_it_is_else_takes_the_lowest_centre():
    server = scalar_server(2, [0, 10])
    server.assignment = {0: 1}
    assert server.nearest(0, scalar(5).weights) == 1
    assert server.nearest(7, scalar(5).weights) == 0


def test_fesem_client_that_sat_out_keeps_its_centre_and_is_in_no_mean():
    server = scalar_server(2, [0, 10])
    server.aggregate({0: scalar(1), 1: scalar(9)})
    server.aggregate({1: scalar(8)})
    assert server.assignment == {0: 0, 1: 1}
    assert values(server) == [1.0, 8.0]
    assert server.message_for(0).weights["w"].item() == 1.0


def test_fesem_client_without_a_centre_gets_that_of_most_clients():
    server = scalar_server(3, [0, 10, 20])
    server.aggregate({0: scalar(9), 1: scalar(11), 2: scalar(0)})
    assert server.message_for(5).artifacts["centre"].item() == 1
    assert server.message_for(5).weights["w"].item() == 10.0


def test_fesem_hears_nothing_of_a_round_before_it_closes():
    """Who is asked for its centre in mid-round gets last round's, in whatever order clients are fitted."""
    server = scalar_server(2, [0, 10])
    server.assignment = {0: 0, 1: 0, 2: 1}
    server.facts = replace(server.facts, round=1)
    server.open_round()
    for client in (0, 1):
        server.collect(client, scalar(11))
    assert server.message_for(5).artifacts["centre"].item() == 0
    assert server.message_for(1).weights["w"].item() == 0.0


def test_fesem_objective_falls_in_both_steps():
    """Σ_i ‖W_i − W̃_{r_i}‖² under full participation and unweighted means."""
    rng = np.random.default_rng(0)
    uploads = [Message({"w": torch.from_numpy(rng.normal(size=4)).float()}, {}, 1) for _ in range(12)]
    server = scalar_server(3)
    server.aggregate(dict(enumerate(uploads)))
    for _ in range(3):
        uploads = [Message({"w": u.weights["w"] + 0.4 * torch.from_numpy(rng.normal(size=4)).float()}) for u in uploads]
        old_centres, old = server.centres, dict(server.assignment)

        def objective(centres, assignment, uploads=uploads):
            return sum(server.distance(u.weights, centres[assignment[i]]) for i, u in enumerate(uploads))

        server.aggregate(dict(enumerate(uploads)))
        before, after_e = objective(old_centres, old), objective(old_centres, server.assignment)
        assert objective(server.centres, server.assignment) <= after_e <= before


def test_fesem_compares_parameters_not_running_statistics(conv_net, make_client):
    client = make_client(FeSEM(conv_net()))
    server = client.make_server(Facts())
    assert set(server.compared) == {name for name, _ in client.method.named_parameters()}
    assert "model.body.stages.0.1.running_mean" in client.division.shared
    assert make_client(FeSEM(conv_net(), compare="head")).make_server(Facts()).compared == ("model.head.weight",)
    own = {**client.division.weights(), "model.body.stages.0.1.running_mean": torch.full((3,), 9.0)}
    assert server.distance(own, client.division.weights()) == 0


# --- how centres start ----------------------------------------------


def test_fesem_compares_a_parametrized_head_and_no_frozen_one(mlp):
    """Nothing was compared, so that all clients were of one centre."""

    def compared(edit):
        method = FeSEM(edit(mlp()), compare="head")
        return method.make_server(Message(method.state_dict()), Facts()).compared

    def parametrized(model):
        nn.utils.parametrizations.weight_norm(model.head)
        return model

    def adapted(model):
        model.head.weight.requires_grad_(False)
        return model

    assert compared(lambda model: model) == ("model.head.weight",)
    assert compared(parametrized) == tuple(f"model.head.parametrizations.weight.original{i}" for i in (0, 1))
    assert compared(adapted) == ("model.head.weight",)  # in this message, which is whole
    method = FeSEM(adapted(mlp()), compare="head")
    left = Message({n: t for n, t in method.state_dict().items() if n != "model.head.weight"})
    with pytest.raises(ConfigError, match=r"^method\.compare: must be all: the head's last linear layer has no weight"):
        method.make_server(left, Facts())


def test_fesem_first_centres_are_uploads_far_apart():
    for seed in range(5):
        server = scalar_server(2, seed=seed)
        server.aggregate({0: scalar(0.0), 1: scalar(0.001), 2: scalar(50.0), 3: scalar(50.001)})
        assert sorted(values(server)) == pytest.approx([0.0005, 50.0005])


def test_fesem_survives_fewer_uploads_than_centres():
    server = scalar_server(3)
    server.aggregate({0: scalar(1), 1: scalar(2)})
    assert set(values(server)) == {1.0, 2.0}
    server.aggregate({0: scalar(3), 1: scalar(4), 2: scalar(1)})
    assert all(np.isfinite(values(server)))


def test_fesem_random_start_has_different_centres_and_spreads_clients(mlp, set_up_federation):
    loop = set_up_federation(lambda: FeSEM(mlp(), start="random"), rounds=1)
    heads = [centre["model.head.weight"] for centre in server_of(loop).centres]
    assert len(heads) == 3
    assert torch.equal(heads[0], loop.runner.modules[0].method.model.head.weight)
    assert not any(torch.equal(heads[i], heads[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    server = server_of(loop)
    assert {server.centre_of(client) for client in range(40)} == {0, 1, 2}
    assert server.centre_of(7) == server.centre_of(7)


def test_fesem_random_start_spreads_clients_who_come_later_too(mlp, make_data, run_federation):
    """All but the first round's participants went to the centre that had most of them."""
    data = make_data(((4, 4, 2, 2),) * 8)
    loop = run_federation(lambda: FeSEM(mlp(), start="random"), 6, data=data, participation=0.25)
    server, first = loop.exchange.server, loop.diary.rows[0]["participants"]
    assert first < len(server.assignment)
    heard = {(round, client): int(m.artifacts["centre"]) for (round, client), m in loop.diary.received.items()}
    begins = {client: heard[min(r for r, c in heard if c == client), client] for _, client in heard}
    assert begins == {client: server._random_centre(client) for client in begins}


def test_fesem_random_centres_leave_statistics_at_home_that_are_not_shared(conv_net, run_federation):
    loop = run_federation(lambda: FeSEM(conv_net(), start="random"), rounds=1, share_buffers=False)
    size = sum(p.numel() for p in conv_net().parameters())
    assert loop.diary.rows[0]["downlink_params"] == 4 * (size + 1)
    for client in range(4):
        assert loop.diary.received[1, client].weights.keys() == loop.diary.sent[1, client].weights.keys()


def test_fesem_random_partition_start(mlp, run_federation):
    loop = run_federation(lambda: FeSEM(mlp(), num_centres=2, start="assign"), rounds=1)
    server = server_of(loop)
    for centre in range(2):
        own = [loop.diary.sent[1, c].weights for c in range(4) if server.assignment[c] == centre]
        for name, tensor in server.centres[centre].items():
            parts = [weights[name] for weights in own] or [loop.diary.received[1, 0].weights[name]]
            torch.testing.assert_close(tensor, torch.stack(parts).mean(0))


@pytest.mark.parametrize("start", ["kmeans++", "random", "assign"])
def test_fesem_resumes_exactly(mlp, assert_resumes, start):
    assert_resumes(lambda: FeSEM(mlp(), num_centres=2, start=start), rounds=4, participation=0.5)


# --- degenerate cases ----------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("start", ["kmeans++", "random", "assign"])
def test_fesem_with_one_centre_by_samples_equals_fedavg(
    conv_net, run_federation, assert_identical, participation, start
):
    one = run_federation(
        lambda: FeSEM(conv_net(), num_centres=1, start=start, weighting="samples"), participation=participation
    )
    plain = run_federation(lambda: FedAvg(conv_net()), participation=participation)
    traffic = ("downlink_params", "downlink_bytes", *COLUMNS)  # the centre's number comes down as well
    for row, other in zip(one.diary.rows, plain.diary.rows, strict=True):
        assert {k: v for k, v in row.items() if k not in traffic} == {
            k: v for k, v in other.items() if k not in traffic
        }
    assert one.final == plain.final
    for client in range(4):
        assert_identical(weights_of(one, client), weights_of(plain, client))


def test_fesem_with_one_unweighted_centre_sends_the_mean(mlp, run_federation):
    loop = run_federation(lambda: FeSEM(mlp(), num_centres=1), rounds=2)
    for name, tensor in weights_of(loop, 0).items():
        expected = torch.stack([loop.diary.sent[2, client].weights[name] for client in range(4)]).double().mean(0)
        assert torch.equal(tensor, expected.float())


def test_fesem_with_as_many_centres_as_clients_equals_local(conv_net, run_federation, assert_identical):
    apart = run_federation(lambda: FeSEM(conv_net(), num_centres=4))
    alone = run_federation(lambda: Local(conv_net()))
    assert sorted(server_of(apart).assignment.values()) == [0, 1, 2, 3]
    for client in range(4):
        assert_identical(weights_of(apart, client), dict(alone.runner.pool.get(client)))


def test_fesem_with_mu_and_one_centre_is_fedprox(mlp, run_federation, assert_identical):
    one = run_federation(lambda: FeSEM(mlp(), num_centres=1, weighting="samples", mu=0.5))
    prox = run_federation(lambda: FedProx(mlp(), mu=0.5))
    assert_identical(weights_of(one, 0), weights_of(prox, 0))


# --- what travels, what is evaluated ----------------------------------------------


def test_fesem_sends_the_model_and_receives_a_centre_and_its_number(mlp, run_federation):
    loop = run_federation(lambda: FeSEM(mlp()), rounds=2)
    size = sum(p.numel() for p in mlp().parameters())
    first, second = loop.diary.rows
    assert (first["uplink_params"], first["downlink_params"]) == (4 * size, 4 * size)
    assert (second["uplink_params"], second["downlink_params"]) == (4 * size, 4 * (size + 1))


def test_fesem_full_size():
    method = FeSEM(CNN((1, 28, 28), 10))
    assert method.send(type("Data", (), {"num_train": 1})()).num_params == 582_026


def test_fesem_has_no_global_model_and_evaluates_centres_after_the_receive(mlp, run_federation):
    loop = run_federation(lambda: FeSEM(mlp(), num_centres=2), rounds=2)
    assert loop.diary.rows[-1]["Server-T"] is None
    hits = []
    for data in loop.data.clients:
        client = loop.runner.modules[0]
        client.load(server_of(loop).centres[server_of(loop).assignment[data.client]])
        model = client.method.model.eval()
        x, y = loop.data.store.gather(data.test)
        with torch.no_grad():
            hits.append((model(x).argmax(1) == y).double().mean().item())
    assert loop.final["Local-T_received"] == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_fesem_trains_in_other_precisions(conv_net, run_federation, precision):
    loop = run_federation(lambda: FeSEM(conv_net(), num_centres=2), rounds=2, trainer={"precision": precision})
    centres = server_of(loop).centres
    assert all(tensor.isfinite().all() for centre in centres for tensor in centre.values())


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_centres", 0), ("start", "zeros"), ("compare", "body"), ("weighting", "some"), ("mu", -1.0)],
)
def test_fesem_rejects_bad_options(mlp, option, value):
    with pytest.raises(ConfigError, match=rf"^method\.{option}: must be .*got"):
        FeSEM(mlp(), **{option: value})
