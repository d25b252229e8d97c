"""What counts as a sign of life; processes that are lost or suspended are in `tests/cli/test_workers.py`."""

from contextlib import contextmanager

from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.transport import Waiting
from fl_lightning.methods.fedavg import FedAvg


def test_disk_that_is_slow_counts_as_alive(set_up_federation, mlp, monkeypatch, tmp_path):
    depth, seen = [], []

    @contextmanager
    def waiting():
        depth.append(None)
        yield
        depth.pop()

    def noting(name, method):
        return lambda *arguments, **options: seen.append((name, bool(depth))) or method(*arguments, **options)

    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, folder=tmp_path)
    monkeypatch.setattr(Waiting, "context", waiting)
    monkeypatch.setattr(Checkpoints, "save", noting("checkpoint", Checkpoints.save))
    monkeypatch.setattr(loop.runner.pool, "flush", noting("states", loop.runner.pool.flush))
    loop.advance()
    assert seen == [("states", True), ("checkpoint", True)]
