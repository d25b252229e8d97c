"""Any term on any method: every term of the package, found by itself, beside methods of each kind.

Each pair runs, or is refused in one line that says why the two do not go together.
"""

import math
import sys
from functools import lru_cache

import pytest
import torch
from tiny_optimizers import adam

from fl_lightning import catalog
from fl_lightning.core.predictor import Seen
from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.launch import launch
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.federation.team import Team
from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.losses.label_distillation import LabelDistillation
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.apple import APPLE
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.methods.feddbe import FedDBE
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.gpfl import GPFL
from fl_lightning.methods.pfedme import pFedMe
from fl_lightning.trust import import_name

pytestmark = pytest.mark.usefixtures("plain_convolutions")

TERMS = {entry.name: entry.class_path for entry in catalog.entries("terms")}
METHODS = {entry.name: entry.class_path for entry in catalog.entries("methods")}
# Weights shared, with a term of its own, with teachers; heads at home; artifacts alone; many losses; two models.
KINDS = ("FedAvg", "FedProx", "MOON", "FedRep", "FedProto", "DRDFL", "Ditto")
PAIRS = [(method, term) for method in KINDS for term in TERMS]
LATENT = {"Adversarial", "KLToStandardNormal", "Reconstruction", "UniformAdversarial"}
REFUSED = {
    **{(method, term): "needs a method with a latent part" for method in KINDS for term in LATENT if method != "DRDFL"},
    **{("DRDFL", term): "each term may occur once only" for term in (*LATENT, "GaussianMixture")},
    ("FedProx", "Proximal"): "each term may occur once only",
    ("MOON", "ModelContrast"): "each term may occur once only",
    ("FedProto", "PrototypeAlignment"): "each term may occur once only",
    **{(method, "Proximal"): "shares nothing of it" for method in ("FedProto", "DRDFL")},
    **{(method, "ModelContrast"): "shares none" for method in ("FedProto", "DRDFL")},
}
"""Pairs that do not go together, and why."""
SOME = [
    pair
    for n, pair in enumerate(PAIRS)
    if (n // len(TERMS) + n % len(TERMS)) % len(KINDS) in (0, 3) and pair not in REFUSED
]
"""Of every term two methods, where they suit it, and of every method some terms."""
TRAINED = EvaluationPolicy(received=False, globally=False, server=False, loss=False, balanced_accuracy=False)
COUNTS = ((6, 4, 0, 0), (0, 0, 5, 5), (3, 3, 3, 0))


class WatchesLosses(FederationCallback):
    """Remembers the dtype of every loss that was logged."""

    def __init__(self):
        self.dtypes = {}

    def on_client_fit_end(self, loop, report):
        for name, pairs in loop.runner.module(report.client).meter.losses.items():
            self.dtypes.setdefault(name, set()).update(value.dtype for value, _ in pairs)


@pytest.fixture(scope="module")
def set_up_pair(set_up_federation, make_data, mlp):
    """The loop of a method with a term, or without one: `set_up(method, term, weight, …)`."""
    data = make_data(COUNTS)

    def set_up(method, term, weight=None, **options):
        def make():
            weights = {} if weight is None else {"weight": weight}
            extra = [] if term is None else [import_name(TERMS[term])(**weights)]
            return import_name(METHODS[method])(mlp(), extra_terms=extra or None)

        return set_up_federation(make, data=data, optimizer=adam, evaluate=TRAINED, **options)

    return set_up


@pytest.fixture(scope="module")
def one_round(set_up_pair):
    """A round's row and messages of a method with a term at weight 0, or without one; the latter is run once."""

    def run(method, term, weight=None):
        loop = set_up_pair(method, term, weight, rounds=1)
        loop.run()
        row = {k: v for k, v in loop.diary.rows[0].items() if not k.startswith("seconds")}
        return row, [loop.diary.sent[1, client].state_dict() for client in range(3)]

    plain = lru_cache(lambda method: run(method, None))
    return lambda method, term, weight: plain(method) if term is None else run(method, term, weight)


@pytest.fixture(scope="module", params=PAIRS, ids=" and ".join)
def pair(request):
    return request.param


@pytest.fixture(scope="module")
def loop(pair, set_up_pair, alone, make_folder):
    """Two rounds of the pair, or None where it is refused as it should be."""
    folder = make_folder("pair")
    if pair in REFUSED:
        with pytest.raises(ConfigError) as caught:
            set_up_pair(*pair)
        assert caught.value.key.startswith("method.extra_terms")
        assert "\n" not in str(caught.value)
        assert REFUSED[pair] in str(caught.value)
        return None
    loop = set_up_pair(*pair, rounds=2, folder=folder if pair in SOME else None)  # those are resumed
    loop.final = loop.run()
    loop.folder = folder
    if pair in SOME:
        alone[pair] = what_is_left(loop)
    return loop


@pytest.fixture(scope="module")
def alone():
    """What is left of the runs of `SOME` that there were, on one process."""
    return {}


def what_is_left(loop):
    rows = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in loop.diary.rows]
    return {"rows": dict(enumerate(rows)), "exchange": loop.exchange.state_dict()}


def test_pair_runs_and_logs_the_term_or_says_why_not(loop, pair):
    if loop is None:
        return
    name = import_name(TERMS[pair[1]])().name
    for row in loop.diary.rows:
        assert math.isfinite(row[f"loss/{name}"])
        assert math.isfinite(row["loss"])
    for client in range(3):
        assert all(tensor.isfinite().all() for tensor in (loop.runner.pool.get(client) or {}).values())


@pytest.mark.parametrize("pair", SOME, indirect=True, ids=" and ".join)
def test_pair_resumes(loop, pair, set_up_pair, outcome, assert_identical):
    again = set_up_pair(*pair, rounds=2, folder=loop.folder)
    checkpoints = Checkpoints(loop.folder / "checkpoints")
    again.load_state_dict(checkpoints.load(loop.folder / "checkpoints" / "round-0001.ckpt"))
    again.final = again.run()
    again.diary.rows = loop.diary.rows[:1] + again.diary.rows
    assert_identical(outcome(again), outcome(loop))
    assert_identical(again.final, loop.final)


def test_weight_of_zero_is_the_method_without_the_term(pair, set_up_pair, one_round, assert_identical):
    if pair in REFUSED and "once only" in REFUSED[pair]:
        return
    if pair[1] in LATENT:
        with pytest.raises(ConfigError, match=REFUSED[pair]):
            set_up_pair(*pair, 0.0, rounds=1)
        return
    (row, sent), (plain_row, plain_sent) = one_round(*pair, 0.0), one_round(pair[0], None, None)
    assert_identical(row, plain_row)
    for own, plain in zip(sent, plain_sent, strict=True):
        assert_identical(own, plain)


@pytest.mark.parametrize("pair", SOME, ids=" and ".join)
def test_losses_are_wide_under_autocast(pair, set_up_pair):
    watch = WatchesLosses()
    loop = set_up_pair(*pair, rounds=2, trainer={"precision": "bf16-mixed"}, callbacks=[watch])
    loop.run()
    assert {dtype for dtypes in watch.dtypes.values() for dtype in dtypes} == {torch.float32}
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("term", TERMS)
def test_every_term_runs_in_half_and_in_double_precision(term, precision, set_up_pair):
    if ("FedAvg", term) in REFUSED:
        return
    watch = WatchesLosses()
    loop = set_up_pair("FedAvg", term, rounds=2, trainer={"precision": precision}, callbacks=[watch])
    loop.run()
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)
    narrow = {name for name, dtypes in watch.dtypes.items() if dtypes - {torch.float32, torch.float64}}
    assert narrow == set()


@pytest.mark.parametrize("kind", [APPLE, FedCP, FedDBE, GPFL, pFedMe])
def test_what_a_client_sends_of_its_own_data_is_what_it_predicts(kind, mlp, data, run_federation):
    loop = run_federation(lambda: kind(mlp(), extra_terms=[LabelDistillation()]), data=data, rounds=2, optimizer=adam)
    client, source = loop.runner.modules[0], data.clients[0]
    seen, (x, _) = client.bound(source).collected(), data.store.gather(source.train)
    client.eval()
    with torch.no_grad():
        predicted = next(way for way in client.predictors.values() if "Local-T" in way.figures).scores(Seen(x))
        plain = client.method.model(x)
    torch.testing.assert_close(seen.logits, predicted)
    assert (seen.logits - plain).abs().max() > 1e-4  # the body and the head alone are not the client's way to predict


@pytest.mark.parametrize("term", [LabelDistillation, PrototypeAlignment, ClassRelation])
def test_what_an_artifact_remembers_of_itself_is_not_sent(term, mlp, run_federation):
    """FedKD looks at what it sends before it goes out, and class means had read off their counts."""
    loop = run_federation(lambda: FedKD(mlp(), extra_terms=[term()]), rounds=2)
    assert math.isfinite(loop.diary.rows[-1]["loss"])
    assert {name for message in loop.diary.sent.values() for name in message.artifacts}


@pytest.mark.skipif(sys.platform != "linux", reason="the function below is handed to forked processes")
def test_two_workers_give_the_same_bits(set_up_pair, alone, assert_identical, tmp_path):
    taken = {pair[1] for pair in PAIRS if pair not in REFUSED}
    assert ({method for method, _ in SOME}, {term for _, term in SOME}) == (set(KINDS), taken)

    def run(pair):
        loop = set_up_pair(*pair, rounds=2, folder=tmp_path / "-".join(pair))
        loop.run()
        return loop

    def run_all():
        for pair in SOME:
            loop = run(pair)
            if loop.workers.is_main:
                torch.save(what_is_left(loop), tmp_path / f"{'-'.join(pair)}.pt")
        return 0

    assert launch(run_all, Team(2, threads=1)) == 0
    for pair in SOME:
        together = torch.load(tmp_path / f"{'-'.join(pair)}.pt")
        assert_identical(together, alone[pair] if pair in alone else what_is_left(run(pair)))
