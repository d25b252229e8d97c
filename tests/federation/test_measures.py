"""Measures beside accuracy: test loss, balanced accuracy, torchmetrics' metrics, validation parts, fairness."""

import csv
import math
import warnings
from functools import partial
from shutil import rmtree

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from fl_lightning.core.method import Seen
from fl_lightning.errors import ConfigError
from fl_lightning.federation.measures import Measures, Reading
from fl_lightning.federation.remarks import remarks
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.metrics import build_metrics, column_names
from fl_lightning.parser import resolve
from fl_lightning.report.columns import may_exist
from fl_lightning.sealed import write_json
from fl_lightning.trust import Trust

CLASSES = 5
MACRO = {"class_path": "torchmetrics.F1Score", "init_args": {"average": "macro"}}
AUROC = {"class_path": "torchmetrics.AUROC"}
ERROR = {"class_path": "torchmetrics.CalibrationError"}


class ShareOfTheFirst(Metric):
    """A metric of somebody's own: how often the first class is predicted."""

    full_state_update = False

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.add_state("first", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, scores, y):
        self.first += (scores.argmax(1) == 0).sum()
        self.total += len(y)

    def compute(self):
        return self.factor * self.first / self.total


OWN = {"class_path": f"{__name__}.ShareOfTheFirst"}


@pytest.fixture
def predicted():
    """Scores and classes of samples; the last class does not occur."""
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(CLASSES - 1, (40,), generator=draw)
    scores = 2 * torch.randn(40, CLASSES, generator=draw)
    return scores + 2 * torch.nn.functional.one_hot(y, CLASSES), y


def measured(scores, y, *nodes, **options):
    measures = Measures(CLASSES, metrics=build_metrics(nodes, CLASSES), **options)
    return measures.of(measures.outcome(scores, y), measures.balance(y))


# --- what is computed -------------------------------------------------------------------------------------------------


def test_measures_equal_torch_scikit_learn_and_torchmetrics(predicted):
    scores, y = predicted
    found = measured(scores, y, MACRO, AUROC, {"class_path": "torchmetrics.Accuracy"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class is predicted that does not occur
        balanced = balanced_accuracy_score(y, scores.argmax(1))
    guess, probabilities = scores.argmax(1), scores.double().softmax(1).numpy()
    there = range(CLASSES - 1)
    areas = [roc_auc_score(y == each, probabilities[:, each]) for each in there]
    assert found[""] == float((guess == y).double().mean()) == found["Accuracy"]
    assert found[""] == pytest.approx(float(MulticlassAccuracy(CLASSES, average="micro")(guess, y)))
    assert found["balanced_accuracy"] == pytest.approx(balanced, abs=1e-12)
    assert found["eval_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, y)), rel=1e-6)
    assert found["F1Score"] == pytest.approx(f1_score(y, guess, average="macro"), abs=1e-12)
    assert found["AUROC"] == pytest.approx(np.mean(areas), abs=1e-6)  # torchmetrics adds in single precision


def test_batches_and_samples_of_a_client_are_those_of_a_whole(predicted):
    scores, y = predicted
    measures = Measures(CLASSES, metrics=build_metrics([MACRO, AUROC, ERROR], CLASSES))
    whole = measures.outcome(scores, y)
    parts = [measures.outcome(*part) for part in zip(scores.split(7), y.split(7), strict=True)]
    assert measures.of(whole.join(parts), measures.balance(y)) == measures.of(whole, measures.balance(y))
    some = torch.tensor([1, 5, 6, 30])
    alone, balance = measures.outcome(scores[some], y[some]), measures.balance(y[some])
    assert measures.of(whole.at(some), balance) == measures.of(alone, balance)


@pytest.mark.parametrize(
    ("name", "options"),
    [("AUROC", {}), ("AUROC", {"thresholds": 50}), ("AveragePrecision", {}), ("AveragePrecision", {"thresholds": 50})],
)
def test_areas_are_over_the_classes_that_the_samples_have(name, options):
    y = torch.tensor([0, 1] * 10)
    scores = 8.0 * torch.nn.functional.one_hot(y, CLASSES)
    found = measured(scores, y, {"class_path": f"torchmetrics.{name}", "init_args": options})
    assert found[name] == pytest.approx(1, abs=1e-6)
    # An ignored class has no samples: it counted as 0, and areas of one class alone were 0, not undefined.
    ignoring = {"class_path": f"torchmetrics.{name}", "init_args": {**options, "ignore_index": 2}}
    y = torch.tensor([0, 1, 2] * 10)
    assert measured(scores.repeat(2, 1)[:30], y, ignoring)[name] == pytest.approx(
        measured(scores.repeat(2, 1)[:30][y != 2], y[y != 2], {**ignoring, "init_args": options})[name], abs=1e-6
    )
    if name == "AUROC":
        assert math.isnan(measured(scores[:4], torch.tensor([2, 2, 1, 1]), ignoring)[name])


@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_there_is_no_area_of_samples_of_one_class(average, predicted):
    """Weighted by samples, the one class there was had an area of 0."""
    scores, y = predicted
    auroc = {"class_path": "torchmetrics.AUROC", "init_args": {"average": average}}
    assert math.isnan(measured(scores[y == 1], y[y == 1], auroc)["AUROC"])
    assert 0 < measured(scores, y, auroc)["AUROC"] < 1


@pytest.mark.parametrize(
    "name", ["F1Score", "Accuracy", "HammingDistance", "ExactMatch", "HingeLoss", "AUROC", "AveragePrecision"]
)
@pytest.mark.parametrize("average", ["macro", "micro"])
def test_of_samples_that_are_all_left_out_nothing_has_a_value(name, average, predicted):
    """Counts without a sample were shares of 0 or 1, which went into the means; others ended the run."""
    scores, y = predicted
    given = {} if name in ("HingeLoss", "ExactMatch") else {"average": average}
    given |= {"average": "macro"} if name in ("AUROC", "AveragePrecision") else {}
    node = {"class_path": f"torchmetrics.{name}", "init_args": {**given, "ignore_index": 1}}
    if name == "ExactMatch":
        node["init_args"]["multidim_average"] = "global"
    assert math.isnan(measured(scores[y == 1], y[y == 1], node)[name])


LOG_AREA = {"class_path": "torchmetrics.LogAUC", "init_args": {"average": "macro"}}


@pytest.mark.skipif(not hasattr(torchmetrics, "LogAUC"), reason="torchmetrics has it from 1.6 on")
def test_the_area_of_a_log_scale_of_one_class_is_no_number(predicted):
    scores, y = predicted
    assert math.isnan(measured(scores[y == 1], y[y == 1], LOG_AREA)["LogAUC"])


class Failing(Metric):
    """Fails for samples of one class."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.zeros(()))

    def update(self, scores, y):
        self.right += (y != y[0]).nonzero()[0, 0]

    def compute(self):
        return self.right


def test_a_metric_that_fails_is_no_clients_sickness(predicted, capsys):
    scores, y = predicted
    one, mine = y == 1, Reading(Failing(), CLASSES)
    theirs = Reading(torchmetrics.classification.MulticlassHingeLoss(CLASSES), CLASSES)
    mine.is_tried = theirs.is_tried = True
    own = Measures(CLASSES, metrics={"Failing": mine})
    with pytest.raises(ConfigError, match=r"metrics: Failing fails \(IndexError: "):
        own.of(own.outcome(scores[one], y[one]), own.balance(y[one]))
    theirs.metric.update = Failing().update
    measures = Measures(CLASSES, metrics={"HingeLoss": theirs})
    for _ in range(2):
        assert math.isnan(
            measures.of(measures.outcome(scores[y == 1], y[y == 1]), measures.balance(y[y == 1]))["HingeLoss"]
        )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("fl-lightning: metrics: MulticlassHingeLoss fails (IndexError: ")


class WritesToClasses(ShareOfTheFirst):
    """Works in place on the classes that it is given."""

    def update(self, scores, y):
        super().update(scores, y.sub_(1))


def test_what_a_metric_writes_in_place_the_next_one_does_not_see(predicted):
    after = measured(*predicted, {"class_path": f"{__name__}.WritesToClasses"}, MACRO, AUROC)
    alone = measured(*predicted, MACRO, AUROC)
    assert {name: after[name] for name in alone} == alone


def test_what_is_not_defined_is_no_number(predicted):
    scores, y = predicted
    one_class = measured(scores[y == 1], y[y == 1], AUROC)
    assert math.isnan(one_class["AUROC"])
    assert one_class[""] == pytest.approx(one_class["balanced_accuracy"], abs=1e-12)
    nobody = measured(scores[:0], y[:0], MACRO, AUROC)
    assert len(nobody) == 5
    assert all(math.isnan(value) for value in nobody.values())
    hopeless = torch.full((3, CLASSES), -math.inf)
    hopeless[:, 0] = 0.0
    assert math.isnan(measured(hopeless, torch.tensor([1, 2, 3]))["eval_loss"])


def test_a_metric_of_ones_own_is_named_by_its_class_and_arguments(predicted):
    scores, y = predicted
    other = {**OWN, "init_args": {"factor": 2.0}}
    assert column_names([OWN, AUROC]) == ["ShareOfTheFirst", "AUROC"]
    assert column_names([{**OWN, "init_args": {"factor": 1.0}}, other]) == [
        "ShareOfTheFirst_factor_1.0",
        "ShareOfTheFirst_factor_2.0",
    ]
    share = float((scores.argmax(1) == 0).double().mean())
    assert measured(scores, y, other)["ShareOfTheFirst"] == pytest.approx(2 * share)


class ConfidentAccuracy(MulticlassAccuracy):
    """Accuracy over the samples whose largest score is above a half."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, average="micro")

    def update(self, scores, y):
        sure = scores.max(1).values > 0.5
        super().update(scores[sure], y[sure])


class Gini(MulticlassAUROC):
    """2 AUROC − 1, of torchmetrics' macro average."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, average="macro")

    def compute(self):
        assert self.average == "macro"
        return 2 * super().compute() - 1


def test_what_derives_from_a_metric_of_torchmetrics_is_given_scores_and_left_as_it_is(predicted):
    scores, y = predicted
    found = measured(scores, y, *({"class_path": f"{__name__}.{own}"} for own in ("ConfidentAccuracy", "Gini")))
    sure = scores.softmax(1).max(1).values > 0.5
    assert 0 < sure.sum() < len(y)
    assert found["ConfidentAccuracy"] == pytest.approx((scores.argmax(1) == y)[sure].double().mean().item())
    areas = MulticlassAUROC(CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last class does not occur
        assert found["Gini"] == pytest.approx(2 * areas(scores.softmax(1), y).item() - 1)


class Cost(ShareOfTheFirst):
    higher_is_better = False


class CostOfErrors(Cost):
    """Its name says so, too."""


class LossReduction(ShareOfTheFirst):
    higher_is_better = True


def test_a_metric_s_name_must_say_what_its_class_does_of_more_or_less():
    """Tables, best rounds and early stopping go by the name of the column."""
    for kind, way in ((Cost, "less"), (LossReduction, "more")):
        with pytest.raises(ConfigError, match=rf"^metrics\.0: {way} of it is better .* got '{kind.__name__}'"):
            build_metrics([{"class_path": f"{__name__}.{kind.__name__}"}], CLASSES)
    usual = [f"torchmetrics.{name}" for name in ("HammingDistance", "CalibrationError", "CohenKappa", "AUROC")]
    for path in (f"{__name__}.CostOfErrors", *usual, "torchmetrics.classification.MulticlassHingeLoss"):
        assert build_metrics([{"class_path": path}], CLASSES)


class CountsOn(Metric):
    """Counts in attributes, which `reset` knows nothing of."""

    def __init__(self):
        super().__init__()
        self.wrong, self.all = 0, 0

    def update(self, scores, y):
        self.wrong += int((scores.argmax(1) != y).sum())
        self.all += len(y)

    def compute(self):
        return torch.tensor(self.wrong / self.all)


class Draws(Metric):
    """Draws, and keeps nothing."""

    full_state_update = False

    def update(self, scores, y):
        pass

    def compute(self):
        return torch.rand(())


def test_a_metric_that_counts_on_over_clients_is_refused():
    """Its column said 0.735 where the error was 0.3."""
    rule = r"^metrics\.0: CountsOn keeps something that reset\(\) does not clear"
    with pytest.raises(ConfigError, match=rule):
        build_metrics([{"class_path": f"{__name__}.CountsOn"}], 4)
    assert list(build_metrics([{"class_path": f"{__name__}.Draws"}], 4)) == ["Draws"]


def test_names_are_resolved_and_what_the_data_say_is_filled_in():
    base = {"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}}
    nodes = ["Accuracy", {"class_path": "F1Score", "init_args": {"average": "macro"}}, OWN]
    found = resolve({**base, "metrics": nodes}, Trust((__name__.partition(".")[0],)))["metrics"]
    assert [node["class_path"].rpartition(".")[2] for node in found] == ["Accuracy", "F1Score", "ShareOfTheFirst"]
    assert found[1]["init_args"]["average"] == "macro"
    assert {"task", "num_classes", "validate_args"}.isdisjoint(found[0]["init_args"])
    built = build_metrics(found, 3)
    assert built["F1Score"].metric.num_classes == 3
    assert resolve(base, Trust())["metrics"] == []
    with pytest.raises(ConfigError, match="--trust"):
        resolve({**base, "metrics": ["somebody.of.AMetric"]}, Trust())


def test_no_best_class_of_all_is_no_metric():
    """The line spoke of the sizes of torch's tensors."""
    node = {"class_path": "torchmetrics.Accuracy", "init_args": {"top_k": 0}}
    with pytest.raises(ConfigError, match=r"^metrics\.0\.top_k: must be at least 1, got 0"):
        build_metrics([node], CLASSES)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("F1Scor", "metrics.0: there is no metric of that name; did you mean F1Score"),
        ("BinaryAccuracy", "metrics.0: there is no metric of that name; did you mean Accuracy"),
        ({"class_path": "F1Score", "init_args": {"averag": "macro"}}, "metrics.0.init_args.averag: there is no such"),
        ({"class_path": "F1Score", "init_args": {"num_classes": 3}}, "metrics.0.init_args.num_classes: comes from the"),
        ({"class_path": "F1Score", "init_args": {"average": "none"}}, "metrics.0: MulticlassF1Score must give one num"),
        ({"class_path": "FBetaScore", "init_args": {"beta": -1.0}}, "metrics.0: FBetaScore: Expected argument `beta`"),
        ({"class_path": "CalibrationError", "init_args": {"n_bins": 0}}, "metrics.0: CalibrationError: Expected argum"),
        ("torchmetrics.classification.BinaryF1Score", "metrics.0: must be a metric of single-label classification"),
        ("torchmetrics.MeanSquaredError", "metrics.0: must be a metric of single-label classification"),
        ("ConfusionMatrix", "metrics.0: MulticlassConfusionMatrix must give one number"),
    ],
)
def test_what_is_no_metric_is_refused_in_one_line(node, said):
    base = {"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}}
    with pytest.raises(ConfigError) as caught:
        build_metrics(resolve({**base, "metrics": [node]}, Trust())["metrics"], CLASSES)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) <= 300
    with pytest.raises(ConfigError, match=r"^metrics\.1: is there already"):
        column_names([AUROC, AUROC])


# --- in a federation --------------------------------------------------------------------------------------------------

ONE_CLASS = ((8, 0, 0, 0), (8, 8, 8, 8), (0, 8, 8, 0), (1, 0, 0, 0))
"""Client 0 has one class, client 3 no test sample."""


def by_hand(module, data, indices):
    """Logits and classes of some samples."""
    x, y = data.store.gather(indices)
    module.eval()
    with torch.no_grad():
        return next(iter(module.predictors.values())).scores(Seen(x)), y


def test_columns_are_means_over_the_clients_that_have_a_value(mlp, make_data, run_federation):
    make = partial(build_metrics, [AUROC])
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, data=make_data(ONE_CLASS), make_metrics=make)
    row, scores = loop.diary.rows[-1], loop.scores
    for name in ("eval_loss/Local-T", "balanced_accuracy/Local-T_received", "AUROC/Local-T"):
        known = scores[name][~np.isnan(scores[name])]
        weights = loop.num_test[~np.isnan(scores[name])]
        assert row[name] == pytest.approx(known.mean())
        assert row[f"{name}_std"] == pytest.approx(known.std())
        assert row[f"{name}_weighted"] == pytest.approx((known * weights).sum() / weights.sum())
    assert [row[f"{name}/Local-T_undefined"] for name in ("eval_loss", "AUROC")] == [0, 1]
    assert np.isnan(scores["AUROC/Local-T"]).tolist() == [True, False, False, True]
    assert set(row) - {"round"} <= set(loop.row_columns)
    assert all(map(may_exist, row))
    module = loop.runner.residents.load_global(loop.exchange.global_message())
    logits, y = by_hand(module, loop.data, loop.data.server_test)
    assert row["eval_loss/Server-T"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)
    assert loop.final["eval_loss/Local-T_received"] == pytest.approx(
        np.nanmean(loop.final_scores["eval_loss/Local-T_received"])
    )


def test_every_way_to_predict_has_its_measures(mlp, run_federation):
    row = run_federation(lambda: FedProto(mlp()), rounds=2).diary.rows[-1]
    for way in ("", "/prototype", "/classifier"):
        assert 0 <= row[f"balanced_accuracy/Local-T{way}"] <= 1
    assert row["eval_loss/Local-T"] == row["eval_loss/Local-T/prototype"] != row["eval_loss/Local-T/classifier"]


def test_other_measures_change_no_accuracy(mlp, run_federation):
    quiet = EvaluationPolicy(loss=False, balanced_accuracy=False)
    plain = run_federation(lambda: FedAvg(mlp()), rounds=2, evaluate=quiet)
    full = run_federation(lambda: FedAvg(mlp()), rounds=2, make_metrics=partial(build_metrics, [MACRO, AUROC, ERROR]))
    assert not any("/Local-T" in name for name in plain.row_columns)
    for bare, rich in zip(plain.diary.rows, full.diary.rows, strict=True):
        assert {name: rich[name] for name in bare if not name.startswith("seconds")} == {
            name: value for name, value in bare.items() if not name.startswith("seconds")
        }


def test_measures_resume_exactly(mlp, assert_resumes):
    assert_resumes(lambda: FedAvg(mlp()), make_metrics=partial(build_metrics, [AUROC]), participation=0.5)


def test_validation_parts_are_evaluated_beside_the_test_parts(mlp, make_data, run_federation):
    data = make_data(validation_fraction=0.25)
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, data=data)
    plain = run_federation(lambda: FedAvg(mlp()), rounds=2, data=data, evaluate=EvaluationPolicy(validation=False))
    row = loop.diary.rows[-1]
    assert not any("-V" in name for name in plain.row_columns)
    assert row["Local-T"] == plain.diary.rows[-1]["Local-T"]
    module = loop.runner.residents.load_global(loop.exchange.global_message())
    union = torch.cat([client.validation for client in data.clients])
    logits, y = by_hand(module, data, union)
    assert row["Server-V"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    scores = loop.runner.evaluator.client(module, 1, "trained")
    logits, y = by_hand(module, data, data.clients[1].validation)
    assert scores["Local-V"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    # read off what the global model makes of everybody's, or tested by itself: the same
    read_off = loop.runner.evaluator.scores(module, 1, "trained", loop.examiner.global_outcomes())
    assert read_off["Local-V"] == scores["Local-V"]
    sizes = np.array([len(client.validation) for client in data.clients])
    assert row["Local-V_weighted"] == pytest.approx((loop.scores["Local-V"] * sizes).sum() / sizes.sum())


# --- who was hurt -----------------------------------------------------------------------------------------------------


def test_hurt_is_the_share_below_the_own_first_fit(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=3)
    first = run_federation(lambda: FedAvg(mlp()), rounds=1)
    alone = first.scores["Local-T"]
    assert first.diary.rows[0]["Local-T_hurt"] == 0
    for name in ("Local-T", "Local-T_received"):
        assert loop.diary.rows[-1][f"{name}_hurt"] == (loop.scores[name] < alone).mean()


def test_hurt_is_measured_against_a_run_of_the_same_clients(mlp, data, set_up_federation, tmp_path):
    write_json(tmp_path / "partition.json", {"hash": data.partition_hash})
    with (tmp_path / "clients.csv").open("w", newline="") as file:
        rows = [[1, client, 0.0] for client in range(4)] + [[2, client, 2.0 * (client < 3)] for client in range(4)]
        csv.writer(file, lineterminator="\n").writerows([["round", "client", "Local-T"], *rows])
    policy = EvaluationPolicy(reference=str(tmp_path))
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, data=data, evaluate=policy)
    loop.run()
    assert loop.diary.rows[0]["Local-T_hurt"] == 0.75
    write_json(tmp_path / "partition.json", data.partition_record())
    set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    for other in ({"hash": "another"}, {"hash": data.partition_hash, "samples": "of other data"}):
        write_json(tmp_path / "partition.json", other)
        with pytest.raises(
            ConfigError, match=r"^federation\.evaluate\.reference: that run's clients hold other samples"
        ):
            set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    write_json(tmp_path / "partition.json", {**data.partition_record(), "evaluate_on": "validation"})
    rule = r"reference: that run was evaluated on validation parts, and data\.evaluate_on is test"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    write_json(tmp_path / "partition.json", data.partition_record())
    (tmp_path / "metrics.csv").write_text("round,Local-T\n1,0.0\n2,0.5\n")
    (tmp_path / "config.yaml").write_text("federation: {rounds: 80}\n")
    rule = r"reference: must name a run that is over: it is not finished: 2 of its 80 rounds are done"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    (tmp_path / "config.yaml").write_text("federation: {rounds: 2}\n")
    set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    head = "round,client,participated,failed,Local-T\n"
    (tmp_path / "clients.csv").write_text(head + "1,0,1,0,2\n1,1,0,0,2\n1,2,1,1,2\n1,3,1,0,0\n2,1,0,0,2\n")
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, data=data, evaluate=policy)
    loop.run()  # clients 1 and 2 never came through a fit there: their models are those they started from
    assert loop.diary.rows[0]["Local-T_hurt"] == 0.5
    (tmp_path / "clients.csv").write_text(head + "1,0,0,0,2\n1,1,1,1,2\n")
    with pytest.raises(ConfigError, match=r"reference: nobody came through a local fit in that run"):
        set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=policy)
    with pytest.raises(ConfigError, match=r"^federation\.evaluate\.reference: there is no run in that folder"):
        set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=EvaluationPolicy(reference="nowhere"))


def test_what_clients_reach_alone_stays_what_a_run_began_with(mlp, data, set_up_federation, tmp_path):
    """A reference that was gone stopped a resumption, and what only reads the run; another one was not noticed."""
    local, folder = tmp_path / "local", tmp_path / "run"
    local.mkdir()
    write_json(local / "partition.json", data.partition_record())

    def write(accuracy):
        lines = [f"1,{client},{accuracy}" for client in range(4)]
        (local / "clients.csv").write_text("\n".join(["round,client,Local-T", *lines, ""]))

    options = {"rounds": 3, "data": data, "folder": folder, "evaluate": EvaluationPolicy(reference=str(local))}
    write(2.0)
    first = set_up_federation(lambda: FedAvg(mlp()), **options)
    first.advance()
    key = f"federation.evaluate.reference: {local} "
    said = "; clients are compared with the figures that this run began with"
    for change, what in ((lambda: write(0.0), "has other figures now"), (partial(rmtree, local), "cannot be read any")):
        change()
        loop = set_up_federation(lambda: FedAvg(mlp()), **options)
        loop.load_state_dict(loop.checkpoints.load(loop.checkpoints.find("auto")))
        assert [line.startswith(key + what) and line.endswith(said) for line in remarks(loop)] == [True]
        loop.advance()
        assert loop.board.figures([], True)["Local-T_hurt"] == 1
    with pytest.raises(ConfigError, match=r"reference: there is no run in that folder"):
        set_up_federation(lambda: FedAvg(mlp()), **{**options, "folder": tmp_path / "other"})


def test_a_reference_in_which_clients_did_not_train_alone_or_otherwise_is_remarked(
    mlp, data, set_up_federation, tmp_path
):
    """A run of FedAvg, of another model or of other epochs was taken for it in silence."""
    write_json(tmp_path / "partition.json", data.partition_record())
    (tmp_path / "clients.csv").write_text("round,client,Local-T\n1,0,0.5\n")

    def said(uplink, epochs, rate):
        config = f"method: {{class_path: FedAvg}}\noptimizer: {{init_args: {{lr: {rate}}}}}\ndata: {{batch_size: 8}}\n"
        (tmp_path / "config.yaml").write_text(f"{config}federation: {{rounds: 1, local_epochs: {epochs}}}\n")
        (tmp_path / "metrics.csv").write_text(f"round,uplink_params\n1,{uplink}\n")
        loop = set_up_federation(lambda: FedAvg(mlp()), data=data, evaluate=EvaluationPolicy(reference=str(tmp_path)))
        loop.identity = {"optimizer.init_args.lr": 0.1, "federation.local_epochs": 1, "data.batch_size": 8}
        return [line.removeprefix(f"federation.evaluate.reference: {tmp_path} ") for line in remarks(loop)]

    assert said(0, 1, 0.1) == []
    assert said(100, 1, 0.1) == ["is of FedAvg, whose clients do not train alone"]
    assert said(0, 5, 0.2) == ["differs in optimizer, federation.local_epochs"]
