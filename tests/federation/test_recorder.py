"""What a recorder tells of the classes."""

import numpy as np
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.federation.recorder import shared_by_class
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.mlp import MLP

CLASSES = 3


def template():
    return FedAvg(MLP((4,), CLASSES, hidden=[5]))


def means(columns, count):
    values = torch.arange(CLASSES * columns, dtype=torch.float32).reshape(CLASSES, columns)
    return ClassMeans(values, torch.tensor(count))


def test_nothing_is_shared_without_a_global_message():
    assert shared_by_class(None, template()) == {}
    assert shared_by_class(Message(), template()) == {}


def test_rows_of_absent_classes_are_nan():
    message = Message({}, {"prototypes": means(5, [1, 0, 2]), "push_weight": torch.ones(2)})
    found = shared_by_class(message, template())
    assert list(found) == ["prototypes"]
    np.testing.assert_array_equal(found["prototypes"][[0, 2]], [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])
    assert np.isnan(found["prototypes"][1]).all()


def test_class_relation_stands_beside_what_relates_classes():
    module = template()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    message = Message(weights, {"soft_labels": means(CLASSES, [1, 1, 1])})
    with torch.no_grad():
        module.model.classification_layer.weight.zero_()  # the message counts, not the module
    found = shared_by_class(message, module)
    w = weights["model.head.weight"].numpy().astype(np.float64)
    expected = np.exp(w @ w.T)
    np.testing.assert_allclose(found["class_relation"], expected / expected.sum(1, keepdims=True), rtol=1e-5)


def test_prototypes_relate_no_classes_whatever_their_size():
    weights = {name: tensor.clone() for name, tensor in template().state_dict().items()}
    message = Message(weights, {"prototypes": means(CLASSES, [1, 1, 1])})
    assert list(shared_by_class(message, template())) == ["prototypes"]


def test_class_relation_is_left_out_where_heads_are_private():
    message = Message({"model.body.weight": torch.ones(2)}, {"soft_labels": means(CLASSES, [1, 1, 1])})
    assert list(shared_by_class(message, template())) == ["soft_labels"]
