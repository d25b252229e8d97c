"""Drawing embeddings to a client's own class means."""

import torch

from fl_lightning.losses.class_alignment import class_alignment_loss


def test_class_alignment_by_hand():
    """Class 0: (1, 0) and (3, 2) around (2, 0); class 2: (0, 4) around (0, 0). D = 2."""
    z, y = torch.tensor([[1.0, 0.0], [0.0, 4.0], [3.0, 2.0]]), torch.tensor([0, 2, 0])
    means = torch.tensor([[2.0, 0.0], [9.0, 9.0], [0.0, 0.0]])
    assert class_alignment_loss(z, y, means) == (1 / 2 + 5 / 2) / 2 + 16 / 2
    assert class_alignment_loss(z, y, means, "means") == 1 / 2 + 16 / 2
