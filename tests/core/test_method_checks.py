"""What a method of somebody's own says wrongly is refused in one line, and nothing of it is passed over."""

import pytest
import torch

from fl_lightning.core.method import Phase, Predictor
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg


def own(**says):
    return type("Own", (FedAvg,), says)


def adds(self, step):
    out = step.forward()
    step.descend({**step.values(out), "pull": out.z.square().mean()})


def by_phases(*phases):
    return own(phases=lambda self: list(phases))


def by_scores(scores):
    return own(predictors=lambda self: {"": Predictor(lambda seen: scores(self, seen))})


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (by_phases(Phase("all", epochs=-1)), "phase 'all' must have a whole number of epochs, 0 or more, got -1"),
        (by_phases(Phase("all", epochs=1.5)), "phase 'all' must have a whole number of epochs, 0 or more, got 1.5"),
        (by_phases(Phase("all", lr=-0.1)), "phase 'all' must have a learning rate above 0, got -0.1"),
        (
            by_phases(Phase("all", terms=("cross-entropy",))),
            r"phase 'all' \(terms\) names 'cross-entropy', which",
        ),
        (own(losses=lambda self: None), r"Own\.losses\(\) must give each loss of local_step its weight"),
        (own(losses=lambda self: ["pull"]), r"Own\.losses\(\) must give each loss of local_step its weight"),
        (own(losses=lambda self: {"pull": None}), "weighs its loss 'pull' by no number, got None"),
        (own(losses=lambda self: {"pull": -1.0}), "weighs its loss 'pull' by less than 0: negate the loss itself"),
        (by_scores(lambda self, seen: seen.logits(self.model).argmax(1)), r"predictor '' must give .*, got \[1\]"),
        (by_scores(lambda self, seen: seen.logits(self.model)[:, :2]), r"predictor '' must give .*, got \[1, 2\]"),
        (by_scores(lambda self, seen: self.model(seen)), r"Own\.predictors\(\) raises AttributeError: 'Seen' object"),
    ],
)
def test_it_is_refused_before_anything_is_trained(kind, rule, mlp, set_up_federation):
    with pytest.raises(ConfigError, match=rf"^method: Own.*{rule}" if rule[:3] != "Own" else rf"^method: {rule}"):
        set_up_federation(lambda: kind(mlp()))


def test_loss_without_a_weight_is_not_left_out_in_silence(mlp, set_up_federation):
    rule = r"method: Own\.local_step\(\) has a loss 'pull' to which losses\(\) gives no weight"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: own(local_step=adds)(mlp())).run()


def test_weight_that_falls_below_zero_ends_the_run(mlp, set_up_federation):
    falls = own(local_step=adds, losses=lambda self: {"pull": 2.5 - self.facts.round})
    with pytest.raises(ConfigError, match=r"weighs its loss 'pull' by less than 0: negate the loss itself, got -0\.5"):
        set_up_federation(lambda: falls(mlp())).run()


def test_weight_may_be_a_tensor(mlp, set_up_federation):
    set_up_federation(
        lambda: own(local_step=adds, losses=lambda self: {"pull": torch.tensor(0.5)})(mlp()), rounds=1
    ).run()
