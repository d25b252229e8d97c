"""User-level differential privacy: what leaves a client, what leaves the server, and what it is worth."""

import math
import sys
import time

import pytest
import torch
from every_method import METHODS
from tiny_optimizers import adam

from fl_lightning.core.coding import Coding, clipped, deviations
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.private_mean import CLIPPED, PrivateMean
from fl_lightning.core.server import Server
from fl_lightning.errors import ConfigError
from fl_lightning.federation.accounting import Mechanism, epsilon
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.filters import Quantize, TopK
from fl_lightning.federation.launch import launch
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.federation.privacy import Account, ClipAndNoise
from fl_lightning.federation.sickness import ClientError, ServerError
from fl_lightning.federation.team import Team
from fl_lightning.federation.wire import Wire
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedgen import FedGen
from fl_lightning.methods.fedgh import FedGH
from fl_lightning.methods.fedpa import FedPA
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedtgp import FedTGP

pytestmark = pytest.mark.usefixtures("plain_convolutions")
OWN = EvaluationPolicy(received=False, globally=False, server=False, loss=False, balanced_accuracy=False)
REFUSED = {
    "server": {"FedNova", "FedFed", "DisPFL", "SCAFFOLD", "FeSEM", "FedDistill", "FedDistillPlus"}
    | {"FedAMP", "FedFomo", "APPLE", "FedAS", "FedKD", "FedPAC", "FedDBE", "DRDFL", "DFedPGP", "FedCVAE"},
    "client": {"FedNova", "FedFed", "DisPFL", "SCAFFOLD", "FedDistill", "FedDistillPlus"}
    | {"FedFomo", "APPLE", "FedAS", "FedPAC"},
}
"""Methods that allow no such privacy, by where the noise is; the last three of the first have no server."""


@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_or_says_in_one_line_why_not(name, where, run_federation, conv_net, make_data):
    wire = [ClipAndNoise(clip=5.0, noise_multiplier=0.05, where=where)]
    options = {"wire": wire, "optimizer": adam, "data": make_data(batch_size=6), "evaluate": OWN}
    run = lambda: run_federation(lambda: METHODS[name](conv_net()), rounds=2, **options)  # noqa: E731
    if name in REFUSED[where]:
        with pytest.raises(ConfigError, match=r"^federation\.wire") as caught:
            run()
        assert len(str(caught.value)) <= 300
        return
    loop = run()
    spent = [row["epsilon"] for row in loop.diary.rows]
    assert 0 < spent[0] < spent[1] < math.inf
    assert all(math.isfinite(row["loss"]) and 0 <= row["Local-T"] <= 1 for row in loop.diary.rows)
    assert {report.message.num_samples for report in loop.diary.reports.values()} == {1}


class SendsOnce(FedAvg):
    """Sends something more in the first round."""

    def send(self, data):
        message = super().send(data)
        if self.facts.round == 1:
            message.artifacts["more"] = torch.ones(3)
        return message


def test_messages_that_change_their_layout_end_a_run_under_noise_at_the_server(set_up_federation, mlp):
    """A round of nobody had the layout of another one, and told by it that nobody came."""
    wire = [ClipAndNoise(clip=5.0, noise_multiplier=0.05, where="server")]
    loop = set_up_federation(lambda: SendsOnce(mlp()), rounds=2, wire=wire)
    loop.advance()
    with pytest.raises((ClientError, ServerError), match=r"messages are laid out otherwise than before \(more\)"):
        loop.advance()


# --- the vector -------------------------------------------------------------------------------------------------------


def message(scale=1.0, count=(4, 0, 2)):
    mean = torch.arange(6.0).view(3, 2) * scale
    mean[1] = 0
    artifacts = {"means": ClassMeans(mean, torch.tensor(count)), "control": torch.tensor([3.0])}
    weights = {"w": torch.tensor([1.0, 3.0]), "steps": torch.tensor(9)}
    return Message(weights, artifacts, 6)


REFERENCE = {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(2)}


def test_vector_is_update_then_artifacts_with_a_coordinate_for_each_class():
    """w moved by (0, 2); the artifacts by name: control, then which classes are held and their rows."""
    own = message()
    coding = Coding.of(own)
    assert coding.encoded(own, REFERENCE).tolist() == [0, 2, 3, 1, 0, 1, 0, 1, 0, 0, 4, 5]
    assert [(part.start, part.stop) for part in coding.groups] == [(0, 2), (2, 12)]


def test_counts_and_integers_are_not_in_it():
    other = message(count=(400, 0, 1))
    other.weights["steps"] = torch.tensor(77)
    coding = Coding.of(other)
    assert torch.equal(coding.encoded(other, REFERENCE), coding.encoded(message(), REFERENCE))
    back = coding.decoded(coding.encoded(other, REFERENCE), REFERENCE, torch.zeros(coding.size))
    assert back.artifacts["means"].count.tolist() == [1, 0, 1]
    assert not back.artifacts["means"].sends_count
    assert (int(back.weights["steps"]), back.num_samples) == (2, 1)


def test_without_noise_and_within_the_norm_all_comes_back():
    own = message()
    coding = Coding.of(own)
    vector = clipped(coding.encoded(own, REFERENCE), coding, (100.0, 100.0))
    back = coding.decoded(vector, REFERENCE, torch.zeros(coding.size))
    assert torch.equal(back.weights["w"], own.weights["w"])
    assert torch.equal(back.artifacts["means"].mean, own.artifacts["means"].mean)
    assert torch.equal(back.artifacts["control"], own.artifacts["control"])


def test_each_group_is_clipped_to_its_norm():
    """(0, 2) to a norm of 1; the artifacts, 9 + 1 + 1 + 1 + 16 + 25 = 53, to 0.5; class means are no shorter for it."""
    own = message()
    coding = Coding.of(own)
    vector = clipped(coding.encoded(own, REFERENCE), coding, (1.0, 0.5))
    assert vector[:2].norm() == pytest.approx(1, rel=2e-6)
    assert vector[2:].norm() == pytest.approx(0.5, rel=2e-6)
    back = coding.decoded(vector, REFERENCE, torch.zeros(coding.size))
    torch.testing.assert_close(back.artifacts["means"].mean, own.artifacts["means"].mean)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_vector_that_is_not_finite_becomes_zeros(odd):
    own = message(scale=odd)
    coding = Coding.of(own)
    vector = clipped(coding.encoded(own, REFERENCE), coding, (1.0, 1.0))
    assert vector[2:].abs().max() == 0
    assert vector[1] > 0


def test_noise_of_two_groups_is_wider_by_root_two():
    coding = Coding.of(message())
    wide = deviations(coding, (1.0, 3.0), 0.5)
    assert wide[:2].tolist() == [pytest.approx(0.5 * 2**0.5)] * 2
    assert wide[2:].tolist() == [pytest.approx(1.5 * 2**0.5)] * 10
    alone = Coding.of(Message({"w": torch.ones(2)}))
    assert deviations(alone, (1.0, 3.0), 0.5).tolist() == [0.5, 0.5]


def test_class_below_its_noise_is_not_held_but_one_always_is():
    coding = Coding.of(Message({}, {"means": ClassMeans(torch.zeros(3, 1), torch.ones(3).long())}))
    noise = torch.full((6,), 0.3, dtype=torch.float64)
    back = coding.decoded(torch.tensor([0.5, 0.7, -2.0, 1, 1.4, 9]).double(), {}, noise).artifacts["means"]
    assert back.valid.tolist() == [False, True, False]
    assert back.mean.flatten().tolist() == [0, 2, 0]
    back = coding.decoded(torch.tensor([0.1, 0.2, -2.0, 1, 1.2, 9]).double(), {}, noise).artifacts["means"]
    assert back.valid.tolist() == [False, True, False]
    assert back.mean[1].item() == pytest.approx(2.0)  # over twice the noise, not over a value that is noise


# --- clients and server -----------------------------------------------------------------------------------------------


def weights(loop):
    return loop.exchange.global_message().weights


def test_no_client_moves_the_mean_by_more_than_its_share(set_up_federation, mlp):
    """Whatever a client sends, and however many samples it says are behind it."""
    loop = set_up_federation(lambda: FedAvg(mlp()), wire=[ClipAndNoise(clip=0.5, noise_multiplier=0.0)])
    before = weights(loop)
    ends = []
    for size in (0.0, 1e-3, 1e9):
        loop.exchange.open(1, range(4))
        for client in range(3):
            moved = {name: t + 0.01 * (client + 1) for name, t in before.items()}
            loop.exchange.post(client, loop.wire.up(Message(moved, {}, 7), Message(before), {}))
        last = Message({name: t + size for name, t in before.items()}, {}, 10**9)
        loop.exchange.post(3, loop.wire.up(last, Message(before), {}))
        loop.exchange.close()
        ends.append(torch.cat([t.flatten() for t in weights(loop).values()]).double())
        loop.exchange.server.message = Message(before)
    assert 0 < (ends[1] - ends[0]).norm() < (ends[2] - ends[0]).norm() <= 0.5 / 4 * (1 + 1e-5)


def test_wide_clip_without_noise_is_the_plain_mean(run_federation, mlp, make_data):
    same = {"counts": ((6, 6), (8, 4))}  # as many samples each, so that FedAvg's own mean is the plain one
    data = make_data(**same)
    plain = run_federation(lambda: FedAvg(mlp(num_classes=2)), data=data)
    for where in ("server", "client"):
        filters = [ClipAndNoise(1e6, 0.0, where)]
        loop = run_federation(lambda: FedAvg(mlp(num_classes=2)), data=make_data(**same), wire=filters)
        for name, tensor in weights(plain).items():
            torch.testing.assert_close(weights(loop)[name], tensor, rtol=1e-5, atol=1e-6)
        assert loop.diary.rows[-1]["epsilon"] == math.inf


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_has_the_deviation_that_is_accounted_for(where, run_federation, mlp):
    """On the mean of 4 clients z C / 4 from the server, z C / √4 from clients; a fit without steps sends no update."""
    still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    model = lambda: FedAvg(mlp(hidden=(100, 5)))  # noqa: E731
    loop = run_federation(model, rounds=1, optimizer=still, wire=[ClipAndNoise(2.0, 3.0, where)])
    start = loop.runner.residents.shared[0]
    moved = torch.cat([(tensor - start[name]).flatten() for name, tensor in weights(loop).items()])
    assert len(moved) > 6000
    wanted = 2.0 * 3.0 / (4 if where == "server" else 2)
    assert moved.std() == pytest.approx(wanted, rel=0.04)
    assert moved.mean().abs() < 4 * wanted / len(moved) ** 0.5


def test_what_crosses_is_within_the_norm(run_federation, mlp):
    loop = run_federation(lambda: FedProto(mlp()), rounds=2, wire=[ClipAndNoise(0.3, 1.0, clip_artifacts=0.7)])
    for sent in loop.diary.sent.values():
        vector = sent.artifacts[CLIPPED]
        assert not sent.weights
        for part, norm in zip(vector.coding.groups, [0.7], strict=True):  # it shares no weights
            assert vector.vector[part].norm() <= norm


@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("kind", [FedAvg, FedProto])
def test_resumes_bit_for_bit(where, kind, assert_resumes, conv_net):
    options = {"participation": 0.5, "sampling": "poisson", "failures": Failures(probability=0.2)}
    loop = assert_resumes(lambda: kind(conv_net()), wire=[ClipAndNoise(1.0, 0.3, where)], rounds=4, **options)
    spent = [row["epsilon"] for row in loop.diary.rows]
    assert spent == sorted(spent)
    assert spent[-1] > 0


class Smoothed(Server):
    """Keeps a running mean of a weight, and takes back nothing but what it has given."""

    hears_mean = True
    mean = None

    def close_round(self):
        super().close_round()
        now = next(iter(self.message.weights.values()))
        self.mean = now.clone() if self.mean is None else torch.lerp(self.mean, now, 0.5)

    def state_dict(self):
        return {**super().state_dict(), "mean": self.mean}

    def load_state_dict(self, state):
        assert state.keys() == {"message", "memories", "mean"}
        super().load_state_dict(state)
        self.mean = state["mean"]


class Smooth(FedAvg):
    def make_server(self, initial, facts):
        return Smoothed(initial)


def test_what_a_server_keeps_is_not_taken_for_the_private_means(assert_resumes, mlp):
    """Its state stood among the server's own, under a name that a server may have, too."""
    loop = assert_resumes(lambda: Smooth(mlp()), wire=[ClipAndNoise(1.0, 0.3, "server")], rounds=4)
    assert loop.exchange.server.mean is not None


def test_state_in_which_the_servers_and_the_private_means_stand_in_one_is_read(run_federation, assert_identical, mlp):
    """Checkpoints were written like that once."""
    loop, other = (run_federation(lambda: FedAvg(mlp()), rounds=own, wire=[ClipAndNoise(1.0, 0.3)]) for own in (2, 1))
    state = loop.exchange.state_dict()
    other.exchange.load_state_dict({**state["server"], "mean": state["mean"]})
    assert_identical(other.exchange.state_dict(), state)


@pytest.mark.skipif(sys.platform != "linux", reason="functions are handed to forked processes")
def test_two_workers_give_the_same_bits(run_federation, outcome, assert_identical, conv_net, tmp_path):
    def run_all(folder):
        for where in ("server", "client"):
            filters = [ClipAndNoise(1.0, 0.3, where)]
            loop = run_federation(lambda: FedProto(conv_net()), rounds=2, wire=filters)
            if loop.workers.is_main:
                left = outcome(loop)
                torch.save({key: left[key] for key in ("rows", "exchange", "traffic")}, folder / f"{where}.pt")
        return 0

    for size in ("1", "2"):
        (tmp_path / size).mkdir()
    assert launch(run_all, Team(2, threads=1), tmp_path / "2") == 0
    run_all(tmp_path / "1")
    for where in ("server", "client"):
        alone, together = (torch.load(tmp_path / size / f"{where}.pt") for size in ("1", "2"))
        assert_identical(together, alone)


class Released(FederationCallback):
    """What the server gave away in each round."""

    def __init__(self):
        self.vectors = []

    def on_round_end(self, loop, row):
        self.vectors.append(loop.exchange.door.released)


def test_feddyn_moves_by_a_share_of_those_that_are_expected(set_up_federation, mlp):
    """Who comes is what ε hides; the mean is over those who are expected."""
    wire = [ClipAndNoise(1e6, 0.0)]
    loop = set_up_federation(lambda: FedDyn(mlp()), wire=wire, participation=0.5, sampling="poisson")
    server = loop.exchange.server
    for number in (1, 3):
        loop.exchange.open(number, range(number))
        server._step(dict(server.message.weights))
        assert server.optimizer.share == 2 / 4


def test_poisson_rounds_may_be_empty_and_still_give_noise(run_federation, mlp):
    watch = Released()
    options = {"participation": 0.2, "sampling": "poisson", "callbacks": [watch]}
    loop = run_federation(lambda: FedAvg(mlp()), rounds=8, wire=[ClipAndNoise(1.0, 1.0)], **options)
    sizes = [row["participants"] for row in loop.diary.rows]
    assert 0 in sizes
    assert len(set(sizes)) > 1
    assert watch.vectors[sizes.index(0)].std() == pytest.approx(1 / 0.8, rel=0.1)
    assert loop.account.mechanism(8) == Mechanism(1.0, 0.2, 8)
    assert loop.calendar.expected(1) == pytest.approx(0.8)


@pytest.mark.parametrize("method", [FedGH, FedTGP, FedGen, FedPA])
def test_a_server_that_trains_waits_for_who_comes_first(run_federation, mlp, method):
    """Nobody in the first round, so that noise alone came, without what such a server trains on: it broke off."""
    options = {"participation": 0.25, "sampling": "poisson", "seed": 8}
    loop = run_federation(lambda: method(mlp()), rounds=4, wire=[ClipAndNoise(1.0, 0.01)], **options)
    sizes = [row["participants"] for row in loop.diary.rows]
    assert sizes[0] == 0
    assert sum(sizes) > 0
    assert all(torch.isfinite(tensor).all() for tensor in loop.exchange.server.network.state_dict().values())


# --- what it is worth -------------------------------------------------------------------------------------------------

CASES = [(1.0, 1.0, 1), (1.0, 1.0, 12), (2.0, 1.0, 50), (1.0, 0.1, 100), (0.8, 0.05, 200), (1.0, 0.5, 12)]


@pytest.mark.parametrize("case", CASES)
def test_two_accountants_agree_within_a_thousandth(case):
    """Rényi orders of Opacus against those of dp-accounting, at the same orders: whole ones, where both are exact."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    from fl_lightning.federation.accounting import FINE_ORDERS, ORDERS, _best

    z, q, times = case
    event = accounting.GaussianDpEvent(z)
    orders = FINE_ORDERS if q == 1 else ORDERS
    other = rdp.RdpAccountant(list(orders))
    other.compose(event if q == 1 else accounting.PoissonSampledDpEvent(q, event), times)
    spent = epsilon(Mechanism(*case), 1e-5) if q == 1 else _best(Mechanism(*case), 1e-5, orders)[0]
    assert spent == pytest.approx(other.get_epsilon(1e-5), abs=1e-3)


@pytest.mark.parametrize(("z", "q", "order"), [(1.0, 0.1, 3.2), (0.8, 0.05, 2.9), (1.0, 0.5, 2.6), (0.5, 0.01, 1.7)])
def test_a_moment_between_whole_orders_is_its_integral(z, q, order):
    """A(α) = E over N(0, σ²) of ((1 − q) + q exp((2x − 1) / 2σ²))^α (Mironov, Talwar, Zhang, 2019, section 3.3)."""
    pytest.importorskip("opacus")
    from scipy import integrate

    from fl_lightning.federation.accounting import _moments

    def density(x):
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * z * z))
        return math.exp(-x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi)) * ratio**order

    whole, _ = integrate.quad(density, -40 * z, 60 * z, limit=2000, epsabs=0, epsrel=1e-12, points=[0, 1, order])
    assert _moments(z, q, (order,))[0] == pytest.approx(math.log(whole) / (order - 1), rel=1e-9)


@pytest.mark.parametrize("case", [(1.1, 0.2, 20), (1.1, 0.2, 100), (0.8, 0.05, 500), (0.5, 0.01, 100), (1.3, 0.05, 1)])
def test_epsilon_is_no_more_than_opacus_accountant_says(case):
    """Between the whole orders it looks at tenths; at whole ones alone ε was up to a third larger."""
    other = pytest.importorskip("opacus").accountants.RDPAccountant()
    other.history = [case]
    assert epsilon(Mechanism(*case), 1e-5) <= other.get_epsilon(1e-5) * (1 + 1e-9)


@pytest.mark.parametrize(("case", "at_whole_orders"), [((0.5, 0.1, 100), 53.04), ((0.3, 0.01, 20), 50.93)])
def test_little_noise_is_accounted_for_by_orders_below_two(case, at_whole_orders):
    """As Opacus' own accountant does, which knows orders from 1.1 on: at whole ones ε would be half as large again."""
    accountants = pytest.importorskip("opacus").accountants
    other = accountants.RDPAccountant()
    other.history = [case]
    spent = epsilon(Mechanism(*case), 1e-5)
    assert spent == pytest.approx(other.get_epsilon(1e-5), rel=1e-3)
    assert spent < 0.75 * at_whole_orders


@pytest.mark.parametrize("case", [(1.0, 1.0, 1), (1.0, 0.1, 30), (1.0, 0.5, 12)])  # 100 rounds take seconds
def test_two_tight_accountants_agree_within_a_thousandth(case):
    """Privacy-loss random variables of Opacus against privacy-loss distributions of dp-accounting."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    z, q, times = case
    event = accounting.GaussianDpEvent(z)
    other = pld.PLDAccountant()
    other.compose(event if q == 1 else accounting.PoissonSampledDpEvent(q, event), times)
    tight = epsilon(Mechanism(*case), 1e-5, "prv")
    assert tight == pytest.approx(other.get_epsilon(1e-5), abs=1e-3)
    assert tight < epsilon(Mechanism(*case), 1e-5)


def test_the_tight_accountant_gives_up_where_it_would_take_all_memory():
    """Both are bounds: the looser one stands in."""
    pytest.importorskip("opacus")
    start = time.monotonic()
    loose, tight = (epsilon(Mechanism(0.05, 0.1, 100), 1e-5, kind) for kind in ("rdp", "prv"))
    assert tight == loose
    assert time.monotonic() - start < 5


def test_one_gaussian_against_the_closed_form():
    """δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz) (Balle and Wang, 2018)."""
    phi = lambda x: 0.5 * math.erfc(-x / 2**0.5)  # noqa: E731
    for z, times in ((1.0, 1), (3.0, 4)):
        wide = z / times**0.5
        spent = epsilon(Mechanism(z, 1.0, times), 1e-5, "prv")
        delta = phi(0.5 / wide - spent * wide) - math.exp(spent) * phi(-0.5 / wide - spent * wide)
        assert delta == pytest.approx(1e-5, rel=0.02)
        assert delta <= 1e-5


def account(set_up_federation, mlp, filters, **options):
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=6, wire=[filters], **options)
    return loop, loop.account


def test_without_poisson_the_client_that_came_most_often_counts(set_up_federation, mlp):
    loop, own = account(set_up_federation, mlp, ClipAndNoise(1.0, 2.0), participation=0.5)
    taken = [sum(client in loop.calendar.participants(r) for r in range(1, 7)) for client in range(4)]
    assert 3 <= max(taken) <= 6
    assert own.mechanism(6) == Mechanism(2.0, 1.0, max(taken))
    assert own.mechanism(2).times <= 2
    assert Account(own.settings, own.calendar).mechanism(6) == own.mechanism(6)


def test_noise_of_clients_is_worth_half_and_gains_nothing_from_sampling(set_up_federation, mlp):
    _, own = account(set_up_federation, mlp, ClipAndNoise(1.0, 2.0, "client"), participation=0.5, sampling="poisson")
    mechanism = own.mechanism(6)
    assert (mechanism.noise_multiplier, mechanism.sampling_rate) == (1.0, 1.0)
    said = own.summary(6)
    assert (said["noise_multiplier"], said["sensitivity"]) == (2.0, 2)  # as it was configured, and what it counts for


def test_summary_says_what_epsilon_is_of(set_up_federation, mlp):
    _, own = account(set_up_federation, mlp, ClipAndNoise(1.0, 2.0), participation=0.5, sampling="poisson")
    said = own.summary(6)
    assert said["epsilon"] == own.epsilon(6) > 0
    assert (said["delta"], said["sampling_rate"], said["times"]) == (1e-5, 0.5, 6)
    assert own.epsilon(0) == 0


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"clip_artifacts": -1.0}, "clip_artifacts"),
        ({"noise_multiplier": -0.1}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"delta": 1.0}, "delta"),
        ({"where": "cloud"}, "where"),
        ({"accountant": "moments"}, "accountant"),
    ],
)
def test_bad_options_are_refused(options, key):
    with pytest.raises(ConfigError, match=rf"^federation\.wire\.{key}: must be"):
        ClipAndNoise(**options)


def test_place_on_the_wire_is_checked(set_up_federation, mlp):
    star = set_up_federation(lambda: FedAvg(mlp())).exchange
    for filters, words in [
        ([Quantize(), ClipAndNoise()], "must be the first filter"),
        ([ClipAndNoise(where="client"), ClipAndNoise(where="client")], "must be the first filter"),
        ([ClipAndNoise(), TopK()], "must be the only filter"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Wire(filters, star)
    Wire([ClipAndNoise(where="client"), Quantize()], star)
    Wire([ClipAndNoise(), Quantize(ways="down")], star)
    with pytest.raises(ConfigError, match="on a Ring has not: must be client"):
        set_up_federation(lambda: FedAvg(mlp()), exchange=Ring(), wire=[ClipAndNoise()])


def test_missing_accountant_is_said_before_training(monkeypatch, set_up_federation, mlp):
    monkeypatch.setitem(sys.modules, "opacus", None)
    epsilon.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'fl-lightning\[privacy\]'"):
        set_up_federation(lambda: FedAvg(mlp()), wire=[ClipAndNoise()])


def test_mean_forgets_an_open_round():
    mean = PrivateMean((1.0, 1.0), 0.0, lambda _: 2.0, seed=0)
    own = Message({"w": torch.ones(2)})
    sender = ClipAndNoise()
    mean.add(0, sender.change(own, Message({"w": torch.zeros(2)})))
    mean.open_round()
    ((_, released),) = mean.release(1, Message({"w": torch.zeros(2)}))
    assert released.weights["w"].tolist() == [0, 0]
