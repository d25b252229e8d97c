"""What methods, terms, servers and loggers of one's own say at setup: refused by name, or kept from doing harm."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.core.aggregation import TensorMean
from fl_lightning.core.facts import Phase
from fl_lightning.core.server import Server, TrainingServer
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation.loggers import Loggers
from fl_lightning.methods.fedavg import FedAvg


class Pulls(Term):
    """A term whose rules are given."""

    given = None

    def forward(self, host, out):
        return out.z.square().mean()

    def rules(self):
        return self.given


class Trains(TrainingServer):
    """Names what it trains on without the comma that makes a tuple of it."""

    trains_on = "logits"

    def build(self):
        return torch.nn.Linear(1, 1)

    def make_optimizer(self, parameters):
        return torch.optim.SGD(parameters, 0.1)

    def train(self, messages):
        raise AssertionError


class GivesNothing(Trains):
    trains_on = ("logits",)

    def publish(self, message):
        return None


ONE = TensorMean()


def method_with(make):
    """FedAvg with a server of one's own."""
    return type("Mine", (FedAvg,), {"make_server": lambda self, initial, facts: make(initial)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Trains, r"Trains\.trains_on must list artifacts' names, as in \('logits',\), and is one text, got 'logits'"),
        (GivesNothing, r"GivesNothing\.message must be a Message once it is set up, got 'NoneType'"),
        (
            lambda initial: Server(initial, rules={"a": lambda: ONE}),
            r"Server's rule of artifact 'a' must make an .*, a new one for every round, and gives the same one twice",
        ),
    ],
)
def test_server_that_could_not_do_what_it_says_is_refused(make, said, set_up_federation, mlp):
    with pytest.raises(ConfigError, match=rf"^method: {said}$"):
        set_up_federation(lambda: method_with(make)(mlp()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"a": TensorMean()},
            r"Pulls\.rules\(\) must give for 'a' what makes a rule for every round: .*, got 'TensorMean'",
        ),
        ([TensorMean], r"Pulls\.rules\(\) must give rules by artifacts' names, got .*"),
    ],
)
def test_rules_of_a_term_that_are_none_are_refused_by_its_name(given, said, set_up_federation, mlp, monkeypatch):
    monkeypatch.setattr(Pulls, "given", given)
    with pytest.raises(ConfigError, match=rf"^method: {said}$"):
        set_up_federation(lambda: FedAvg(mlp(), extra_terms=[Pulls(0.1)]))


def test_exchange_that_there_is_none_of_is_refused(set_up_federation, mlp):
    mine = type("Mine", (FedAvg,), {"exchange": "RandomPeer"})
    with pytest.raises(
        ConfigError, match=r"^method: Mine\.exchange names none; did you mean RandomPeers\? \(choose from"
    ):
        set_up_federation(lambda: mine(mlp()))


@pytest.mark.parametrize("phase", [{"settings": {"all": {"lr": -0.1}}}, {"settings": {"all": {"lr": 0.0}}}])
def test_phase_that_would_climb_is_refused(phase, set_up_federation, mlp):
    mine = type("Mine", (FedAvg,), {"phases": lambda self: [Phase("all", parts={"all": ("",)}, **phase)]})
    with pytest.raises(ConfigError, match=r"^method: a phase's learning rate must be above 0 \(all\), got -?0\.[01]$"):
        set_up_federation(lambda: mine(mlp()))


def test_a_logger_changes_no_run(tmp_path):
    """Rounding what it shows, it rounded what was trained with."""

    class Rounds(CSVLogger):
        def log_hyperparams(self, params=None):
            params["optimizer"]["lr"] = 0

    config = {"optimizer": {"lr": 0.1}}
    Loggers([Rounds(tmp_path)]).log_hyperparams(config)
    assert config == {"optimizer": {"lr": 0.1}}
