"""What a recorder tells of the classes, and of the end."""

import numpy as np
import pytest
import torch

from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.term import Term
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loggers import Loggers
from fl_lightning.federation.recorder import Recorder, Shared, shared_by_class
from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.mlp import MLP
from fl_lightning.report.run_logger import RunLogger

CLASSES = 3


NOTHING = Shared({}, frozenset())


@pytest.fixture
def template(make_client):
    """A client with extra terms."""
    return lambda *terms: make_client(FedAvg(MLP((4,), CLASSES, hidden=[5]), extra_terms=list(terms)))


def means(columns, count, **options):
    values = torch.arange(CLASSES * columns, dtype=torch.float32).reshape(CLASSES, columns)
    return ClassMeans(values, torch.tensor(count), **options)


def weights_of(client):
    return {name: tensor.clone() for name, tensor in client.entries.items()}


def test_nothing_is_shared_without_a_global_message(template):
    assert shared_by_class(None, template()) == NOTHING
    assert shared_by_class(Message(), template()) == NOTHING


def test_rows_of_absent_classes_are_nan(template):
    message = Message({}, {"prototypes": means(5, [1, 0, 2]), "push_weight": torch.ones(2)})
    found = shared_by_class(message, template())
    assert list(found.rows) == ["prototypes"]
    np.testing.assert_array_equal(found.rows["prototypes"][[0, 2]], [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])
    assert np.isnan(found.rows["prototypes"][1]).all()
    assert found.relations == frozenset()


def test_rows_are_a_copy(template):
    prototypes = means(5, [1, 0, 2])
    shared_by_class(Message({}, {"prototypes": prototypes}), template())
    assert prototypes.mean[1].tolist() == [5, 6, 7, 8, 9]


def test_one_number_a_class_is_no_row(template):
    sizes = ClassMeans(torch.ones(CLASSES), torch.tensor([1, 1, 1]))
    assert shared_by_class(Message({}, {"sizes": sizes}), template()) == NOTHING


def test_class_relation_stands_beside_the_soft_labels_of_its_term(template):
    client = template(ClassRelation())
    weights = weights_of(client)
    message = Message(weights, {"soft_labels": means(CLASSES, [1, 1, 1], relates_classes=True)})
    with torch.no_grad():
        client.method.model.classification_layer.weight.zero_()  # the message counts, not the module
    found = shared_by_class(message, client)
    w = weights["model.head.weight"].numpy().astype(np.float64)
    expected = np.exp(w @ w.T)
    np.testing.assert_allclose(found.rows["class_relation"], expected / expected.sum(1, keepdims=True), rtol=1e-5)
    assert list(found.rows) == ["soft_labels", "class_relation"]
    assert found.relations == {"soft_labels", "class_relation"}


def test_term_of_weight_0_draws_nothing(template):
    client = template(ClassRelation(weight=0))
    message = Message(weights_of(client), {"soft_labels": means(CLASSES, [1, 1, 1], relates_classes=True)})
    found = shared_by_class(message, client)
    assert list(found.rows) == ["soft_labels"]
    assert found.relations == {"soft_labels"}


def test_prototypes_relate_no_classes_whatever_their_size(template):
    client = template(ClassRelation())
    message = Message(weights_of(client), {"prototypes": means(CLASSES, [1, 1, 1])})
    found = shared_by_class(message, client)
    assert list(found.rows) == ["prototypes"]
    assert found.relations == frozenset()


def test_class_relation_is_left_out_where_heads_are_private(template):
    soft_labels = means(CLASSES, [1, 1, 1], relates_classes=True)
    message = Message({"model.body.weight": torch.ones(2)}, {"soft_labels": soft_labels})
    found = shared_by_class(message, template(ClassRelation()))
    assert list(found.rows) == ["soft_labels"]
    assert found.relations == {"soft_labels"}


def test_what_a_term_of_your_own_draws_relates_classes(template):
    class Confusion(Term):
        def drawn(self, host, message):
            return {"confusion": np.eye(host.model.num_classes)}

    found = shared_by_class(Message({}, {}), template(Confusion()))
    np.testing.assert_array_equal(found.rows["confusion"], np.eye(CLASSES))
    assert found.relations == {"confusion"}


class Enough(FederationCallback):
    """Asks to stop in the course of the second round, or at its end."""

    def __init__(self, hook):
        setattr(self, hook, lambda loop, *_: loop.stop() if loop.round + (hook != "on_round_end") == 2 else None)


@pytest.mark.parametrize("hook", ["on_client_fit_end", "on_round_end"])
def test_loggers_know_of_the_round_that_a_callback_ends_a_run_with(hook, mlp, run_federation, tmp_path):
    """W&B had no table of it."""

    class Told(RunLogger):
        begin = end = finalize = print
        wants_shared = bool

        def log_round(self, record):
            ends.append(record.ends_early)

    ends = []
    run_federation(lambda: FedAvg(mlp()), 4, callbacks=[Enough(hook), Recorder(tmp_path, {}, Loggers([Told()]))])
    assert ends == [False, True]
