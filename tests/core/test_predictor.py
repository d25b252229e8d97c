"""The usual ways to predict."""

import torch

from fl_lightning.core.method import Seen, headline, personal_and_global, personal_only


def test_a_model_predicts_by_its_logits_and_a_function_by_its_scores(mlp):
    model, x = mlp(), torch.rand(2, 1, 8, 8)
    (way,) = personal_only(model).values()
    assert torch.equal(way.scores(Seen(x)), model(x))
    (way,) = personal_only(lambda seen: -seen.logits(model)).values()
    assert torch.equal(way.scores(Seen(x)), -model(x))


def test_the_global_model_gives_the_servers_figure_alone(mlp):
    ways = personal_and_global(mlp(), mlp())
    assert {figure: headline(ways, figure) for figure in ("Local-T", "Global-T", "Server-T")} == {
        "Local-T": "personal",
        "Global-T": "personal",
        "Server-T": "global",
    }
    assert headline(personal_only(mlp()), "Server-T") is None
