"""The tests that the specification of Local promises (BASELINES-A.md, section 1)."""

import copy

import pytest
import torch

from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.local import Local


def test_local_sends_and_receives_nothing(mlp, run_federation):
    loop = run_federation(lambda: Local(mlp()))
    assert set(loop.traffic.values()) == {0}
    assert all(message.weights == {} and message.artifacts == {} for message in loop.diary.sent.values())


def test_local_sends_nothing_with_an_extra_term_either(mlp, run_federation):
    """The class says that artifacts of extra terms stay with the client, for nothing is exchanged."""
    loop = run_federation(lambda: Local(mlp(), extra_terms=[PrototypeAlignment()]))
    assert set(loop.traffic.values()) == {0}


def test_local_client_does_not_feel_the_data_of_another(mlp, make_data, run_federation, assert_identical):
    def scramble(arrays):
        arrays.x[20:37] = torch.randn(17, 1, 8, 8, generator=torch.Generator().manual_seed(9))  # client 1's samples

    plain = run_federation(lambda: Local(mlp()))
    other = run_federation(lambda: Local(mlp()), data=make_data(edit=scramble))
    for client in (0, 2, 3):
        assert_identical(plain.runner.pool.get(client), other.runner.pool.get(client))
    name = "model.head.weight"
    assert not torch.equal(plain.runner.pool.get(1)[name], other.runner.pool.get(1)[name])


def test_local_equals_a_plain_loop_with_an_optimizer_made_anew_every_round(
    mlp, sgd, set_up_federation, train_by_hand, assert_identical
):
    optimizer = sgd(momentum=0.9)
    loop = set_up_federation(lambda: Local(mlp()), rounds=3, optimizer=optimizer, local_epochs=2)
    models = [copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(4)]
    loop.run()
    for client, model in enumerate(models):
        for round in (1, 2, 3):
            train_by_hand(model, loop.data.clients[client], optimizer, round, epochs=2)
        trained = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        assert_identical(loop.runner.pool.get(client), trained)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_local_drops_nothing_at_the_receive(mlp, run_federation, participation):
    loop = run_federation(lambda: Local(mlp()), rounds=5, participation=participation)
    drops = [row["receive_drop"] for row in loop.diary.rows]
    assert drops == [None, 0.0, 0.0, 0.0, 0.0]
    assert loop.final["Local-T_received"] == loop.diary.rows[-1]["Local-T"]


def test_local_has_no_server_accuracy(mlp, run_federation):
    loop = run_federation(lambda: Local(mlp()))
    assert [row["Server-T"] for row in loop.diary.rows] == [None] * 3


def test_local_trains_the_participants_that_fedavg_trains(mlp, run_federation):
    local, average = (run_federation(lambda m=m: m(mlp()), rounds=6, participation=0.5) for m in (Local, FedAvg))
    assert list(local.diary.sent) == list(average.diary.sent)
