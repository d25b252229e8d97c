"""Embeddings in the plane."""

import numpy as np
import pytest

from fl_lightning.embedding import plane


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
