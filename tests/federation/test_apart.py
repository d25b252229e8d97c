"""What adds up over processes by itself must not, where each fits clients of its own."""

import pytest
from torch import nn


class Normed(nn.Sequential):
    """A network with a layer that asks all processes of a group for their mini-batches."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.SyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("method", ["FedAvg", "FedRep"])
def test_batch_norm_counts_the_client_alone(method, trial):
    module = {"class_path": f"{__name__}.Normed"}
    model = {"class_path": "WrappedModel", "init_args": {"module": module, "head": "4"}}
    runs = [
        trial(
            name=f"normed-{method}-{n}", method=method, model=model, federation__rounds=2, federation__workers=n
        ).fit()
        for n in (1, 2)
    ]
    one, two = ([(row["Local-T"], row["loss"]) for row in run.rounds] for run in runs)
    assert one == two
