"""What every method must obey. Methods find themselves: a new file in `methods/` is tested without a word here."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from every_method import METHODS
from tiny_optimizers import adam

from fl_lightning.core import division
from fl_lightning.core.coordinate_rules import TrimmedMean
from fl_lightning.core.lending import as_vector, lent_models
from fl_lightning.core.selection_rules import Krum
from fl_lightning.core.term import Term
from fl_lightning.data.digits import Digits
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.graphs import DirectedGraph
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.federation.settings import Newcomers
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.methods.dispfl import MaskedWeights
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.models.mlp import MLP
from fl_lightning.report.columns import may_exist

pytestmark = pytest.mark.usefixtures("plain_convolutions")
NOT_AVERAGED = {
    "DFedPGP", "DRDFL", "DisPFL", "FeSEM", "FedCVAE", "FedDistill", "FedDistillPlus", "FedFed", "FedNova",
    "FedAMP", "FedFomo", "APPLE", "FedAS", "FedKD", "FedPAC", "Local",
}  # fmt: skip
"""Methods without a server, or whose server makes more than means of messages: no robust rule suits them."""


OWN = EvaluationPolicy(globally=False, server=False, loss=False, balanced_accuracy=False)
"""For runs of which no figure is looked at but Local-T."""
NOTHING = EvaluationPolicy(trained=False, received=False, globally=False, server=False)


@pytest.fixture(scope="module", params=sorted(METHODS))
def method(request, conv_net):
    """A factory of one method, on a model with batch norm and dropout."""
    return lambda: METHODS[request.param](conv_net())


@pytest.fixture(scope="module")
def set_up_federation(set_up_federation, make_data):
    """The usual one with Adam, whose steps are small whatever the scale of a method's losses, and fewer of them.

    Batches of 6, too, leave client 1 with a last one of a single sample, and all others with a smaller one.
    """
    usual = make_data(batch_size=6)
    assert [client.num_train % 6 for client in usual.clients] == [3, 1, 2, 4]

    def set_up(method, optimizer=None, data=usual, **options):
        return set_up_federation(method, optimizer=optimizer or adam, data=data, **options)

    return set_up


@pytest.fixture(scope="module")
def run_federation(set_up_federation):
    """Set a federation up, run it, return the loop."""

    def run(method, **options):
        loop = set_up_federation(method, **options)
        loop.final = loop.run()
        return loop

    return run


class WatchesResting(FederationCallback):
    """Remembers the private states of clients before and after each round that they sit out."""

    def __init__(self):
        self.before, self.after = {}, {}

    def on_round_start(self, loop, round, participants):
        self.resting = sorted(set(range(loop.num_clients)) - set(participants))
        self.before |= {(round, client): self.state(loop, client) for client in self.resting}

    def on_round_end(self, loop, row):
        self.after |= {(row["round"], client): self.state(loop, client) for client in self.resting}

    @staticmethod
    def state(loop, client):
        return {name: tensor.clone() for name, tensor in (loop.runner.pool.get(client) or {}).items()}


@pytest.fixture(scope="module")
def full(method, run_federation):
    """Two rounds of all clients: the run to which the others of this file are compared."""
    return run_federation(method, rounds=2)


@pytest.fixture(scope="module")
def half(method, run_federation):
    """Three rounds of two of the four clients."""
    watch = WatchesResting()
    loop = run_federation(method, rounds=3, participation=0.5, callbacks=[watch])
    loop.watch = watch
    return loop


def states(loop):
    return {client: dict(loop.runner.pool.get(client) or {}) for client in range(loop.num_clients)}


def all_finite(loop):
    return all(tensor.isfinite().all() for state in states(loop).values() for tensor in state.values())


def test_methods_are_found():
    assert {"FedAvg", "FedRep"} <= METHODS.keys()


def test_method_runs(full):
    assert full.done
    assert [row["round"] for row in full.diary.rows] == [1, 2]
    for row in full.diary.rows:
        assert math.isfinite(row["loss"])
        assert 0 <= row["Local-T"] <= 1
        assert 0 <= row["Global-T_received"] <= 1
        assert row["participants"] == 4
    assert all_finite(full)


@pytest.fixture(scope="module")
def digits():
    """1,797 real digits among six clients."""
    data = FederatedData(Digits(), Dirichlet(0.3, min_samples=40), num_clients=6, batch_size=64)
    data.setup(0)
    return data


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_learns_digits_in_three_rounds(name, digits, run_federation):
    faster = lambda parameters: adam(parameters, lr=2e-2)  # noqa: E731
    make = lambda: METHODS[name](MLP(digits.arrays.spec.input_shape, 10, hidden=[64, 32]))  # noqa: E731
    own = replace(OWN, received=False)
    loop = run_federation(make, rounds=3, data=digits, optimizer=faster, evaluate_every=3, evaluate=own)
    counts = digits.class_counts()
    without_learning = (counts.max(1) / counts.sum(1)).mean()  # every client's most frequent class, 0.45
    assert loop.diary.rows[-1]["Local-T"] > without_learning


def test_rows_hold_no_column_that_was_not_announced(full):
    announced = set(full.row_columns)
    assert [name for row in full.diary.rows for name in row if name not in announced] == []
    assert [name for name in announced if not may_exist(name)] == []  # a table may print it


def travel_sparse(message):
    """The entries that travel as artifacts of their names."""
    return {name for name, value in message.artifacts.items() if isinstance(value, MaskedWeights)}


def test_messages_hold_the_shared_weights_and_no_private_entry(full):
    method = full.runner.modules[0].method
    owners = dict(method.named_modules())
    shared = {name for name in method.state_dict() if method.is_shared(name, owners[name.rpartition(".")[0]])}
    for message in full.diary.sent.values():
        sparse = travel_sparse(message)
        assert set(message.artifacts) & set(method.state_dict()) == sparse
        assert set(message.weights) == shared - sparse
        assert sparse <= shared
        assert message.num_samples > 0


def test_what_a_client_keeps_and_what_it_receives_are_its_whole_state(full, assert_identical):
    module = full.runner.modules[0]
    for client in range(4):
        kept = set(full.runner.pool.get(client) or {})
        assert set(module.division.kept) <= kept
        made_anew = set(module.entries) - kept - set(module.division.shared)
        assert made_anew <= set(module.division.anew)
        before = {name: module.entries[name].clone() for name in made_anew}
        for name in made_anew:  # a receive must know what these are without having kept them
            module.entries[name].fill_(7)
        full.runner.load(client).receive(full.exchange.inbox(client), full.data.clients[client])
        assert_identical({name: module.entries[name] for name in made_anew}, before)


def test_messages_share_no_memory_with_the_client(full):
    client = full.runner.load(3)
    client.receive(full.exchange.inbox(3), full.data.clients[3])
    own = {tensor.data_ptr() for tensor in (*client.state_dict().values(), *client.buffers())}
    message = client.send(full.data.clients[3])
    tensors = list(message.weights.values())
    for artifact in message.artifacts.values():
        fields = [artifact] if isinstance(artifact, torch.Tensor) else vars(artifact).values()
        tensors += [value for value in fields if isinstance(value, torch.Tensor)]
    assert [tensor for tensor in tensors if tensor.numel() and tensor.data_ptr() in own] == []
    assert not any(tensor.requires_grad for tensor in tensors)


def test_result_depends_neither_on_the_order_of_clients_nor_on_how_many_steps_are_gathered_at_once(
    method, full, set_up_federation, outcome, assert_identical
):
    other = set_up_federation(method, rounds=2, steps_per_bundle=2)
    other.fit_order = lambda clients: sorted(clients, key=lambda c: (3 * c + 2) % 4)
    other.final = other.run()
    assert_identical(outcome(other), outcome(full))
    assert_identical(other.final, full.final)


def test_result_depends_on_the_seed(method, full, run_federation):
    other = run_federation(method, rounds=1, seed=1, evaluate=NOTHING)
    assert other.diary.rows[0]["loss"] != full.diary.rows[0]["loss"]


def test_what_is_evaluated_does_not_change_what_is_trained(method, half, run_federation, assert_identical):
    seldom = run_federation(method, rounds=3, participation=0.5, evaluate_every=3)
    assert_identical(seldom.exchange.state_dict(), half.exchange.state_dict())
    assert_identical(states(seldom), states(half))
    hurt = {"Local-T_hurt": None, "Local-T_received_hurt": None}  # needs what round 1 reached
    apart = {**dict.fromkeys(COLUMNS), "receive_drop": None, **hurt}  # the drop needs the round before
    assert_identical({**seldom.diary.rows[-1], **apart}, {**half.diary.rows[-1], **apart})


def test_client_that_sits_a_round_out_keeps_its_state(half, assert_identical):
    assert len(half.watch.before) == 3 * 2
    assert_identical(half.watch.after, half.watch.before)


def test_clients_of_one_class_and_of_one_sample_survive(method, make_data, run_federation):
    data = make_data(counts=((9, 0, 0, 0), (0, 1, 0, 0), (6, 6, 6, 6)))
    assert [client.num_train for client in data.clients][:2] == [7, 1]
    loop = run_federation(method, rounds=2, data=data, evaluate=OWN)
    assert all_finite(loop)
    assert math.isfinite(loop.diary.rows[-1]["loss"])


def test_all_that_trains_obeys_drop_last(method, make_data, run_federation):
    """Fits, and what a method does with a client's own batches in a receive or before an evaluation."""
    sizes = set()

    def watched():
        made = method()
        watch = lambda stage, inputs: sizes.add(len(inputs[0])) if stage.training else None  # noqa: E731
        made.model.body.stages[0].register_forward_pre_hook(watch)
        return made

    data = make_data(drop_last=True)
    assert all(client.num_train > 4 for client in data.clients)
    assert any(client.num_train % 4 for client in data.clients)
    run_federation(watched, rounds=2, data=data, evaluate=OWN)
    assert sizes
    assert {size % 4 for size in sizes} == {0}  # FedFed puts copies of others' images beside its own


def test_federation_of_one_client_survives(method, make_data, run_federation):
    loop = run_federation(method, rounds=2, data=make_data(counts=((6, 6, 6, 6),)), evaluate=OWN)
    assert all_finite(loop)
    assert 0 <= loop.diary.rows[-1]["Local-T"] <= 1


@pytest.mark.parametrize("run", ["full", "half"])
def test_traffic_is_the_size_of_the_messages(run, full, half):
    loop = {"full": full, "half": half}[run]
    if loop.exchange.between_clients:
        assert_every_copy_is_counted_once(loop)
        return
    for row in loop.diary.rows:
        for direction, messages in (("uplink", loop.diary.sent), ("downlink", loop.diary.received)):
            own = [message for (round, _), message in messages.items() if round == row["round"]]
            assert len(own) == row["participants"]
            assert row[f"{direction}_params"] == sum(message.num_params for message in own)
            assert row[f"{direction}_bytes"] == sum(message.num_bytes for message in own)
    assert loop.traffic["uplink_params"] == sum(row["uplink_params"] for row in loop.diary.rows)


def assert_every_copy_is_counted_once(loop):
    """A message goes to several clients, maybe with a push-sum weight, and waits there for their next round."""
    for round, hops in loop.diary.hops.items():
        row = loop.diary.rows[round - 1]
        assert row["uplink_params"] == sum(hop.num_params for hop in hops)
        assert row["uplink_bytes"] == sum(hop.num_bytes for hop in hops)
        for hop in hops:
            sent = {message.num_params for (_, sender), message in loop.diary.sent.items() if sender == hop.sender}
            assert {hop.num_params, hop.num_params - 1} & sent
    waiting = [loop.exchange.downlink(client) for client in {client for _, client in loop.diary.sent}]
    for unit in ("params", "bytes"):
        arrived = sum(getattr(size, f"num_{unit}") for size in waiting)
        assert loop.traffic[f"uplink_{unit}"] == loop.traffic[f"downlink_{unit}"] + arrived


def test_client_joins_late(method, run_federation):
    loop = run_federation(method, rounds=2, newcomers=Newcomers(clients=1, after=1), evaluate=OWN)
    assert [row["participants"] for row in loop.diary.rows] == [3, 4]
    assert all_finite(loop)
    assert 0 <= loop.diary.rows[-1]["Local-T_newcomers"] <= 1


@pytest.mark.parametrize("make", [Ring, lambda: DirectedGraph(2)])
def test_method_runs_without_a_server_or_says_that_it_cannot(make, method, full, run_federation):
    options = {"rounds": 2, "participation": 0.75, "exchange": make(), "evaluate": replace(OWN, server=True)}
    if full.runner.modules[0].make_server(full.runner.facts).mixer() is None:
        rule = r"cannot do without its server(, which must remember .*)?: must be Star, got"
        with pytest.raises(ConfigError, match=rule):
            run_federation(method, **options)
        return
    loop = run_federation(method, **options)
    assert all_finite(loop)
    assert 0 <= loop.diary.rows[-1]["Local-T"] <= 1
    assert loop.diary.rows[-1]["Server-T"] is None
    assert_every_copy_is_counted_once(loop)


def test_run_resumes_exactly_from_a_checkpoint(method, set_up_federation, outcome, assert_identical, tmp_path):
    """What a kill in the second round leaves behind: the checkpoint of the first, and what came after it."""
    failures = Failures(schedule={"2": [0, 1]})
    options = {"rounds": 3, "participation": 0.5, "local_epochs": 2, "lr_decay": 0.9, "failures": failures}
    straight = set_up_federation(method, folder=tmp_path / "straight", **options)
    for _ in range(2):
        straight.advance()
    left = shutil.copytree(tmp_path / "straight", tmp_path / "left")
    resumed = set_up_federation(method, folder=left, **options)
    resumed.load_state_dict(resumed.checkpoints.load(left / "checkpoints" / "round-0001.ckpt"))
    assert resumed.round == 1
    straight.final, resumed.final = straight.run(), resumed.run()
    resumed.diary.rows = straight.diary.rows[:1] + resumed.diary.rows
    assert_identical(outcome(resumed), outcome(straight))
    assert_identical(resumed.final, straight.final)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_weights_that_all_send_back_unchanged_stay_as_they_are(name, mlp, sgd, set_up_federation, assert_identical):
    """Learning rate 0: the aggregate is what went out, bit for bit, but for the statistics of batch norm.

    What a server trains by itself comes down beside it, and so does what travels sparse.
    """
    loop = set_up_federation(lambda: METHODS[name](mlp()), rounds=2, optimizer=sgd(0.0), evaluate=NOTHING)
    module = loop.runner.modules[0]
    module.method.facts = replace(module.method.facts, round=1)
    rates = [group["lr"] for optimizer in module.configure_optimizers() for group in optimizer.param_groups]
    if any(rates) or getattr(module.method, "alignment_lr", 0):
        pytest.skip("brings an optimizer of its own, at a learning rate of its own")
    parameters = dict(module.method.named_parameters())
    before = {name: tensor for name, tensor in module.division.weights().items() if name in parameters}
    loop.run()
    sparse = travel_sparse(loop.diary.sent[1, 0])
    before = {entry: tensor for entry, tensor in before.items() if entry not in sparse}
    for client in range(4):
        message = loop.exchange.inbox(client)
        lent = lent_models(message).values()  # in the place of weights
        if lent:
            assert {tuple(model.tolist()) for model in lent} == {tuple(as_vector(before).tolist())}
            continue
        weights = message.weights
        assert_identical({entry: weights[entry] for entry in before}, before)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_comes_frozen_does_not_travel_and_no_figure_moves(name, mlp, run_federation, monkeypatch):
    """Beside the same run that sends it; what a method averages, compares or lends may not count on its name."""

    def make():
        model = mlp()
        model.body.stages[0].requires_grad_(False)
        return METHODS[name](model)

    loop = run_federation(make, rounds=2)
    fixed = set(loop.runner.modules[0].division.fixed)
    assert not fixed & {entry for message in loop.diary.sent.values() for entry in message.weights}
    monkeypatch.setattr(division, "_fixed", lambda method, shared: ())
    whole = run_federation(make, rounds=2)
    shared = whole.runner.modules[0].division.shared
    assert fixed == {entry for entry in shared if entry.startswith("model.body.stages.0.")}
    for row, other in zip(loop.diary.rows, whole.diary.rows, strict=True):
        figures = [n for n in row if not n.startswith("seconds") and not n.endswith(("_params", "_bytes"))]
        assert {n: repr(row[n]) for n in figures} == {n: repr(other[n]) for n in figures}


@pytest.mark.parametrize("rule", [lambda: TrimmedMean(0.2), lambda: Krum(0, 2)], ids=["trimmed", "krum"])
def test_method_runs_under_a_robust_rule_or_says_why_not(method, set_up_federation, rule):
    if type(method()).__name__ in NOT_AVERAGED:
        with pytest.raises(ConfigError, match=r"^federation\.aggregator: ") as refused:
            set_up_federation(method, aggregator=rule())
        assert len(str(refused.value)) <= 300
        return
    loop = set_up_federation(method, rounds=1, aggregator=rule(), evaluate=NOTHING)
    loop.run()
    assert all_finite(loop)
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)


class ComparesPasses(Term):
    """How far the method's `network` is from what the losses see, at the largest."""

    def setup(self, host):
        self.apart = []

    @torch.no_grad()
    def forward(self, host, out):
        pairs = (host.network().embed(out.x), out.z), (host.network().head(out.z), out.logits)
        self.apart += [float((own - seen).abs().max()) for own, seen in pairs]
        return torch.zeros(())


def test_what_terms_send_is_of_the_passes_that_they_are_trained_on(method, mlp, run_federation):
    kind = type(method())
    options = {"noisy": False} if kind is FedCP else {}
    loop = run_federation(lambda: kind(mlp(), extra_terms=[ComparesPasses()], **options), rounds=2, evaluate=NOTHING)
    for client in loop.runner.modules:
        apart = next(term.apart for term in client.method.terms if isinstance(term, ComparesPasses))
        assert apart
        assert max(apart) < 1e-5
