"""Values that a message holds, for 10 and for 100 classes: item 5 of BASELINES-B.md, on messages that are really made.

FedDistill, FedGH, FedTGP, FedPA and FedHKD have theirs in their own files.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore
from fl_lightning.methods.fedcrl import FedCRL
from fl_lightning.methods.feddistillplus import FedDistillPlus
from fl_lightning.methods.fedfed import FedFed
from fl_lightning.methods.fedproc import FedProc
from fl_lightning.methods.fesem import FeSEM
from fl_lightning.models.cnn import CNN
from fl_lightning.models.resnet import ResNet18

CNN_SIZE = {10: 582_026, 100: 628_196}
D = 512  # of the CNN

# Beside the model: up for K classes held of C, down once all C are known.
BESIDE = {
    FedDistillPlus: (lambda k, c: k * c + k, lambda c: c * c + c),
    FeSEM: (lambda k, c: 0, lambda c: 1),
    FedProc: (lambda k, c: k * 256 + k, lambda c: c * 256),
    FedCRL: (lambda k, c: k * D + k, lambda c: c * D),
}


def client_data(classes, num_classes, shape=(1, 28, 28), client=0):
    y = torch.tensor(list(classes))
    x = torch.rand(len(y), *shape, generator=torch.Generator().manual_seed(0))
    store = TensorStore(Arrays(x, y, len(y), tuple(map(str, range(num_classes)))))
    nothing = np.empty(0, dtype=np.int64)
    return ClientData(client, store, num_classes, np.arange(len(y)), nothing, nothing)


def size_of(module):
    return sum(tensor.numel() for tensor in module.state_dict().values())


def server_of(client):
    server = client.make_server(Facts(num_clients=2))
    server.setup(Facts(num_clients=2))
    return server


@pytest.mark.parametrize("num_classes", [10, 100])
@pytest.mark.parametrize("kind", BESIDE, ids=lambda kind: kind.__name__)
def test_model_and_what_goes_beside_it(kind, num_classes, make_client):
    client = make_client(kind(CNN((1, 28, 28), num_classes)))
    up, down = BESIDE[kind]
    size, server = size_of(client.method.model), server_of(client)
    if kind is not FedProc:  # whose network has a projection
        assert size == CNN_SIZE[num_classes]
    assert server.message_for(0).num_params == size
    few = client.send(client_data([1, 4, 4, 7], num_classes))
    everything = client.send(client_data(range(num_classes), num_classes))
    assert few.num_params == size + up(3, num_classes)
    assert everything.num_params == size + up(num_classes, num_classes)
    server.aggregate({0: few, 1: everything})
    assert server.message_for(0).num_params == size + down(num_classes)


@pytest.mark.parametrize(("num_classes", "entries"), [(10, 23_832_949), (100, 23_879_119)])
def test_fedfeds_first_phase_is_classifier_and_autoencoder(num_classes, entries, make_client):
    """Either way. Of a ResNet-18 on 3x32x32 with statistics: 11,183,582 + 12,649,367 for ten classes."""
    client = make_client(FedFed(ResNet18((3, 32, 32), num_classes, stem="cifar")), round=1)
    assert client.send(client_data([0], num_classes, (3, 32, 32))).num_params == entries
    assert server_of(client).message_for(0).num_params == entries


@pytest.mark.parametrize("num_classes", [10, 100])
def test_fedfeds_copies_go_up_once_and_those_of_the_others_come_down_once(mlp, make_client, num_classes):
    """n (2 · 64 + 1) values for n images of 8x8, and the final autoencoder to make them with."""
    client = make_client(FedFed(mlp(num_classes=num_classes), feature_rounds=1, latent_size=4))
    w, q = size_of(client.method.model), size_of(client.method.vae)
    data = [client_data(range(own), num_classes, (1, 8, 8), index) for index, own in enumerate((3, num_classes))]
    server, up, down = server_of(client), [], []
    for round in range(1, 5):
        facts = server.facts = replace(server.facts, round=round, participants=(0, 1))
        server.open_round()
        for index, own in enumerate(data):
            client.method.facts = replace(facts, client=index)
            message = server.message_for(index)
            client.receive(message, own)
            down.append(message.num_params)
            sent = client.send(own)
            up.append(sent.num_params)
            server.collect(index, Message(sent.weights, sent.artifacts, own.num_train))
        server.close_round()
    one, other = (n * (2 * 64 + 1) for n in (3, num_classes))
    assert up == [w + q, w + q, w + one, w + other, w, w, w, w]
    assert down == [w + q, w + q, w + q, w + q, w + other, w + one, w, w]
