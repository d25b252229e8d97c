"""Memory and files do not grow with the participants of a round."""

import weakref

import pytest

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto


class Alive(FederationCallback):
    """Counts, as each participant has sent, how many messages of the round are still held by anybody."""

    def __init__(self) -> None:
        self.messages, self.most = [], 0

    def on_client_fit_end(self, loop, report):
        tensors = [*report.message.weights.values(), *(a.mean for a in report.message.artifacts.values())]
        assert tensors
        self.messages.append(weakref.ref(tensors[0]))
        self.most = max(self.most, sum(reference() is not None for reference in self.messages))


@pytest.mark.parametrize("method", [FedAvg, FedProto])
def test_message_is_dropped_once_it_is_posted(method, mlp, set_up_federation):
    alive = Alive()
    loop = set_up_federation(lambda: method(mlp()), callbacks=[alive])
    loop.callbacks.remove(loop.diary)  # it keeps the reports
    loop.run()
    assert alive.most == 1


def test_method_without_private_state_keeps_nothing_of_its_clients(mlp, run_federation, tmp_path):
    loop = run_federation(lambda: FedAvg(mlp()), folder=tmp_path)
    assert loop.runner.pool.flush(3) == {}
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4
