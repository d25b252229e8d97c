import pytest
import torch

from fl_lightning.core.meter import LossMeter


def test_means_are_over_samples_and_not_over_steps():
    """(4 · 1 + 1 · 6) / 5 = 2."""
    meter = LossMeter()
    meter.add({"loss": torch.tensor(1.0)}, 4)
    meter.add({"loss": torch.tensor(6.0)}, 1)
    assert meter.means() == {"loss": 2.0}
    assert meter.num_steps == 2


def test_a_loss_that_only_some_steps_have_is_a_mean_over_those():
    meter = LossMeter()
    meter.add({"loss": torch.tensor(1.0), "rare": torch.tensor(8.0)}, 2)
    meter.add({"loss": torch.tensor(3.0)}, 2)
    assert meter.means() == {"loss": 2.0, "rare": 8.0}


def test_an_epochs_means_are_of_its_own_steps():
    meter = LossMeter()
    meter.add({"loss": torch.tensor(1.0), "early": torch.tensor(8.0)}, 4)
    assert meter.epoch_means() == {"loss": 1.0, "early": 8.0}
    meter.end_epoch()
    assert meter.epoch_means() == {}
    meter.add({"loss": torch.tensor(5.0)}, 1)
    meter.add({"loss": torch.tensor(2.0)}, 2)
    assert meter.epoch_means() == {"loss": 3.0}
    assert meter.means() == {"loss": 13 / 7, "early": 8.0}


def test_means_are_taken_in_double_precision():
    meter = LossMeter()
    for _ in range(3):
        meter.add({"loss": torch.tensor(0.1)}, 1)
    assert meter.means()["loss"] == pytest.approx(float(torch.tensor(0.1)), abs=1e-15)


def test_what_is_taken_down_holds_no_graph():
    meter = LossMeter()
    meter.add({"loss": torch.ones((), requires_grad=True) * 2}, 1)
    assert not meter.losses["loss"][0][0].requires_grad


def test_devices_add_their_sums_before_they_divide():
    """The other device has 3 samples of loss 5: (1 · 1 + 3 · 5) / 4."""

    class Devices:
        def total(self, sums):
            return sums + torch.tensor([15.0, 3.0], dtype=torch.float64)

    meter = LossMeter(Devices())
    meter.add({"loss": torch.tensor(1.0)}, 1)
    assert meter.means() == {"loss": 4.0}


def test_a_meter_without_steps_has_no_means():
    assert LossMeter().means() == {}


def broken_at(*steps):
    meter = LossMeter()
    for a, b in steps:
        meter.add({"loss": torch.tensor(a + b), "a": torch.tensor(a), "b": torch.tensor(b)}, 1)
    return meter.first_broken({"loss", "a", "b"})


def test_first_broken_loss_is_the_earliest_and_a_part_before_the_sum():
    inf = float("inf")
    assert broken_at((1.0, 2.0), (1.0, 2.0)) is None
    assert broken_at((1.0, 2.0), (1.0, inf), (inf, inf)) == ("b", 2, inf)
    assert broken_at((3e38, 3e38)) == ("loss", 1, inf)


def test_what_only_some_steps_have_is_broken_at_its_step():
    meter = LossMeter()
    meter.add({"loss": torch.tensor(1.0)}, 1)
    meter.add({"loss": torch.tensor(float("nan")), "rare": torch.tensor(float("inf"))}, 1)
    assert meter.first_broken({"loss", "rare"}) == ("rare", 2, float("inf"))
    assert meter.first_broken({"rare"}) == ("rare", 2, float("inf"))
    assert meter.first_broken(()) is None
