"""A server of somebody's own that remembers more than its checkpoint does says so, and no other one."""

import pytest
import torch

from fl_lightning.core.server import Server
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg


class Remembers(Server):
    """Keeps a mean of the means."""

    rate = 0.5

    def __init__(self, initial):
        super().__init__(initial)
        self.velocity, self.options = {}, {"rate": 0.5}

    def open_round(self):
        super().open_round()
        self.seen, self.total = [], torch.zeros(2)

    def weight_of(self, message):
        self.seen.append(message.num_samples)
        self.total += 1
        return message.num_samples

    def close_round(self):
        super().close_round()
        self.velocity = {name: self.rate * tensor for name, tensor in self.message.weights.items()}


class Saves(Remembers):
    def state_dict(self):
        return {**super().state_dict(), "velocity": self.velocity}


class ForOneRound(Remembers):
    def close_round(self):
        Server.close_round(self)


class Forgetful(FedAvg):
    def make_server(self, initial, facts):
        Server(initial)


def with_server(kind):
    return type("Own", (FedAvg,), {"make_server": lambda self, initial, facts: kind(initial)})


@pytest.mark.parametrize(("kind", "times"), [(Remembers, 1), (Saves, 0), (ForOneRound, 0), (Server, 0)])
def test_state_that_a_resumed_run_would_lack_is_said_once(kind, times, mlp, set_up_federation, capsys):
    set_up_federation(lambda: with_server(kind)(mlp()), rounds=3).run()
    said = "fl-lightning: Remembers.velocity changes from round to round and is not in Remembers.state_dict()"
    assert capsys.readouterr().err.count(said) == times


def test_method_that_gives_no_server_is_refused(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"method: Forgetful\.make_server\(\) gives NoneType, and must give a Server"):
        set_up_federation(lambda: Forgetful(mlp()))
