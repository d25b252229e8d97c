"""DRDFL's communication column: entries that 20 clients send in one round and one direction, over 2^20."""

import pytest

from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local
from fl_lightning.models.resnet import ResNet18


@pytest.mark.parametrize(
    ("kind", "entries", "published"),
    [
        (Local, 0, "0.00"),
        (FedAvg, 11_191_262, "213.46"),
        (FedNova, 11_191_262, "213.46"),
        (FedRep, 11_186_132, "213.36"),
        (DRDFL, 29_240 + 2 * 10 * 64, "0.58"),
    ],
)
def test_message_is_the_published_one(kind, entries, published, make_client):
    client = make_client(kind(ResNet18((3, 32, 32), 10, stem="imagenet")))
    shared = client.division.shapes()
    artifacts = [shape for name, shape in client.method.interface().items() if name not in shared]
    rows = sum(shape[0] * shape[1] for shape in artifacts if len(shape) == 2)  # the classes' means and variances
    sent = client.initial_message().num_params + rows
    assert sent == entries
    assert f"{20 * sent / 2**20:.2f}" == published


def test_fedbn_message_is_all_but_batch_norm(make_client):
    """213.09; the table has 213.06."""
    client = make_client(FedBN(ResNet18((3, 32, 32), 10, stem="imagenet")))
    sent = client.initial_message().num_params
    assert sent == 11_191_262 - 19_220
    assert sent == 11_172_042
    assert f"{20 * sent / 2**20:.2f}" == "213.09"
