"""Embeddings in the plane."""

import numpy as np
import pytest
import torch
from report.run_folders import make_run

import fl_lightning
from fl_lightning.embedding import MOST_SAMPLES, Embedded, embed_run, embeddings, plane, some_of
from fl_lightning.errors import ConfigError
from fl_lightning.report.recorded_run import read_run
from fl_lightning.report.series import Member, series_of
from fl_lightning.trust import Trust


def test_plane_keeps_clusters_apart_and_is_the_same_every_time():
    draw = np.random.default_rng(0)
    z = np.concatenate([draw.normal(size=(20, 8)), 50 + draw.normal(size=(20, 8))]).astype(np.float32)
    points = plane(z)
    assert points.shape == (40, 2)
    np.testing.assert_array_equal(points, plane(z))
    near = [int(np.argsort(np.linalg.norm(points - point, axis=1))[1]) for point in points]
    assert all((other < 20) == (place < 20) for place, other in enumerate(near))


@pytest.mark.parametrize("count", [1, 3])
def test_few_points_stay_where_they_are(count):
    z = np.arange(3.0 * count).reshape(count, 3)
    np.testing.assert_array_equal(plane(z), z[:, :2])


@pytest.mark.parametrize("z", [np.zeros((6, 5)), np.arange(6.0)[:, None]], ids=["one point", "one coordinate"])
def test_points_without_two_components_stay_where_they_are(z):
    """A body that has died embeds all samples as one: the process ended in scikit-learn."""
    np.testing.assert_array_equal(plane(z), np.pad(z, ((0, 0), (0, 2)))[:, :2])


def test_some_samples_of_a_data_set_that_is_sorted_by_class_are_of_every_class():
    """The first 600 images of folders are of the first few classes: the others had rows of zeros as soft labels."""
    labels = torch.arange(10).repeat_interleave(100)
    indices = torch.arange(0, 1000, 2)
    drawn = some_of(indices, labels, 50)
    assert torch.bincount(labels[drawn]).tolist() == [5] * 10
    assert len(drawn.unique()) == 50
    assert torch.isin(drawn, indices).all()
    assert torch.equal(some_of(indices, labels, 500), indices)


@pytest.mark.parametrize("method", ["Ditto", "FedRep", "APPLE", "FedRoD"])
def test_a_client_is_shown_by_the_model_that_it_predicts_by(method, trial):
    """Of a personal model beside the shared one the latter's copy was shown, of mixed weights one that is mixed in."""
    run = trial(name=f"embedded-{method}", method=method, federation__rounds=1).fit()
    found, _ = embed_run(run.folder, Trust())
    data = trial(name=f"embedded-{method}").data()
    said = torch.zeros(10, 10, dtype=torch.float64)
    for client, own in enumerate(data.clients):
        x, y = data.store.gather(own.train)
        with torch.no_grad():
            said.index_add_(0, y, fl_lightning.load(run, client=client)(x).double().softmax(1))
    np.testing.assert_allclose(found.soft_labels, said / said.sum(1, keepdim=True), atol=1e-6)


def test_mixed_weights_are_shown_as_the_one_network_that_they_make(trial):
    run = trial(name="embedded-mixed", method="APPLE", federation__rounds=1).fit()
    found, _ = embed_run(run.folder, Trust())
    data = trial(name="embedded-mixed").data()
    x, _ = data.store.gather(some_of(data.clients[1].test, data.store.y, MOST_SAMPLES // len(data.clients)))
    with torch.no_grad():
        z = fl_lightning.load(run, client=1).in_one().alone.embed(x).flatten(1)
    np.testing.assert_allclose(found.z[found.client == 1], z.numpy(), atol=1e-6)


def test_models_of_later_rounds_than_are_shown_are_left_out(tmp_path, monkeypatch):
    """A table's cell that somebody had extended was shown by the models of its later rounds, without a word."""
    runs = [read_run(make_run(tmp_path / name, name, rounds=3), "report") for name in ("Alpha", "Beta")]
    some = Embedded(np.eye(3), np.arange(3), np.zeros(3, dtype=int), np.eye(3), 1)
    monkeypatch.setattr("fl_lightning.embedding.embed_run", lambda folder, trust: (some, ["0", "1", "2"]))
    lines = series_of([Member(runs[0].first(2)), Member(runs[1])])
    figure = next(iter(embeddings(lines, Trust())))
    assert (figure.columns["s"], list(figure.picks)) == ([1, 1, 1], ["Beta, seed 0"])
    (said,) = figure.facts
    assert said.startswith("Alpha, seed 0: the models are of later rounds")
    with pytest.raises(ConfigError, match=r"--embed: the models are of later rounds.*Alpha"):
        list(embeddings(lines[:1], Trust()))
    assert [*embeddings([], Trust())] == []


def test_clients_that_are_not_shown_are_counted(trial):
    """Of eight clients two had taken part, and nothing said that the picture is of them alone."""
    run = trial(name="embedded-few", method="FedAvg", federation={"rounds": 1, "participation": 0.5}).fit()
    figure = next(iter(embeddings(series_of([Member(read_run(run.folder, "report"))]), Trust())))
    (said,) = figure.facts
    assert said.startswith("FedAvg, seed 0: 2 of its 4 clients are shown; ")
