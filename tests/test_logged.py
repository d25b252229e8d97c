"""What a module of one's own and Lightning's callbacks log in their fits: `logged.csv`, loggers, pages."""

import csv

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.report.page.curves import logged
from fl_lightning.report.record import read_logged, read_metrics
from fl_lightning.report.recorded_run import read_run
from fl_lightning.report.series import Member, series_of


class Own(L.LightningModule):
    """Logs a metric, a loss, and a number under a name that a CSV file has to quote."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.hits = torchmetrics.Accuracy("multiclass", num_classes=10)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.hits(logits, y)
        self.log("hits", self.hits)
        self.log_dict({"mine/loss": loss, 'a "quoted",\nname': 2.0, "broken": torch.nan})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sizes(Callback):
    """Logs each mini-batch's size, and each epoch by its number."""

    def __init__(self):
        self.largest = torchmetrics.MaxMetric()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("size", float(len(batch[1])), on_step=False, on_epoch=True, batch_size=1)
        pl_module.log("both", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        pl_module.log("hidden_both", 1.0, logger=False, on_step=True, on_epoch=True, batch_size=1)
        pl_module.log("by_step", 1.0, batch_size=1)
        self.largest.update(len(batch[1]))

    def on_train_epoch_end(self, trainer, pl_module):
        assert {"loss", "loss/cross_entropy", "size", "hidden_both_epoch"} <= trainer.callback_metrics.keys()
        assert "epoch" not in trainer.callback_metrics or trainer.current_epoch == 1
        pl_module.log("epoch", float(trainer.current_epoch))
        pl_module.log("largest", self.largest.compute())
        pl_module.log("hidden", 1.0, logger=False)
        self.largest.reset()


OWN = {"class_path": "WrappedLightningModule", "init_args": {"module": {"class_path": f"{__name__}.Own"}}}
SIZES = [{"class_path": f"{__name__}.Sizes"}]


@pytest.fixture
def own(trial):
    """A trial of two rounds in which a module and a callback log."""

    def make(name, rounds=2, **options):
        known = {"method": "FedAvg", "model": OWN, "trainer__callbacks": SIZES, "federation__local_epochs": 2}
        return trial(name=name, federation__rounds=rounds, **{**known, **options})

    return make


def of(rows, name, round=1):
    return {row["client"]: row["value"] for row in rows if row["name"] == name and row["round"] == round}


def test_what_fits_log_is_written_by_client_and_as_the_mean(own):
    run = own("logged-logs").fit()
    rows = read_logged(run.folder / "logged.csv")
    assert {row["name"] for row in rows} == {
        "hits",
        "mine/loss",
        'a "quoted", name',
        "broken",
        "size",
        "both",
        "both_step",
        "both_epoch",
        "by_step",
        "epoch",
        "largest",
    }
    assert {row["round"] for row in rows} == {1, 2}
    clients = {row["client"] for row in run.clients.to_dict("records")}
    hits = of(rows, "hits")
    assert hits.keys() == {*clients, None}
    mean = sum(hits[client] for client in clients) / len(clients)
    assert hits[None] == pytest.approx(mean, rel=1e-12)
    assert set(of(rows, "epoch", 2).values()) == {1.0}  # of the last of two epochs
    sizes, batch_size = of(rows, "size"), run.config["data"]["batch_size"]
    for row in run.clients.query("round == 1").to_dict("records"):
        batches = -(-row["num_train"] // batch_size)
        assert sizes[row["client"]] == pytest.approx(row["num_train"] / batches)
    broken = of(rows, "broken")
    assert None not in broken
    assert all(value != value for value in broken.values())
    read = read_metrics(run.folder)
    assert [row["log/hits"] for row in read] == [of(rows, "hits", round)[None] for round in (1, 2)]
    assert "log/hits" not in (run.folder / "metrics.csv").read_text()
    assert run.metrics["log/hits"].tolist() == [row["log/hits"] for row in read]
    assert set(run.logged["name"]) == {row["name"] for row in rows}


def test_the_same_is_written_resumed_and_by_several_workers(own):
    whole = (own("logged-whole", rounds=3).fit().folder / "logged.csv").read_text()
    longer = own("logged-longer", rounds=2)
    longer.fit()
    (longer.folder / "logged.csv").write_text("damaged\n1,")
    assert (own("logged-longer", rounds=3).fit(resume="auto").folder / "logged.csv").read_text() == whole
    shared = own("logged-shared", rounds=3, federation__workers=2).fit()
    assert (shared.folder / "logged.csv").read_text() == whole


class Smooth(FederationCallback):
    """The mean over rounds of what a round's row says was logged."""

    def __init__(self):
        self.mean = torchmetrics.MeanMetric()
        self.seen = []

    def on_round_end(self, loop, row):
        self.mean.update(row["log/hits"])
        self.seen.append((row["log/hits"], float(self.mean.compute())))


def test_metrics_of_the_main_process_wait_for_nobody(own):
    watch = Smooth()
    run = own("logged-smoothed", federation__workers=2).fit(callbacks=[watch])
    hits = [row["log/hits"] for row in run.rounds]
    assert watch.seen == [(hits[0], pytest.approx(hits[0])), (hits[1], pytest.approx(sum(hits) / 2))]


def test_loggers_and_pages_have_the_means(own, tmp_path):
    csv_logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    run = own("logged-paged", logger=csv_logger).fit()
    (written,) = tmp_path.rglob("metrics.csv")
    assert "log/hits" in written.read_text()
    (figure,) = logged(series_of([Member(read_run(run.folder, "report"))]))
    titles = {row["term"] for row in figure.rows(series_of([Member(read_run(run.folder, "report"))]))}
    assert {"log/hits", "log/size"} <= titles
    assert "log/broken" not in titles
    assert "Logged in the fits" in run.report().read_text()


def test_name_with_odd_letters_is_the_same_to_loggers_live_and_after_a_resumption(own, tmp_path):
    csv_logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    own("logged-odd", rounds=1, logger=csv_logger).fit()
    own("logged-odd", rounds=2, logger=csv_logger).fit(resume="auto")
    (written,) = tmp_path.rglob("metrics.csv")
    with written.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Local-T"]]
    assert [row['log/a "quoted", name'] for row in rows] == ["2.0", "2.0"]


def test_what_logs_nothing_has_no_file(trial):
    run = trial(name="logged-silent", federation__rounds=1).fit()
    assert not (run.folder / "logged.csv").exists()
    assert not any(name.startswith("log/") for row in run.rounds for name in row)


def test_rows_that_are_damaged_are_left_out(tmp_path):
    file = tmp_path / "logged.csv"
    file.write_text('round,client,value,name\n1,0,0.5,hits\nx,1,0.5,hits\n1,2\n1,,0.5,hits\n1,3,0.25,"cut sh')
    assert [(row["client"], row["value"]) for row in read_logged(file)] == [(0, 0.5), (None, 0.5)]


class Looks(FedAvg):
    """Logs what its `losses()` does not name."""

    def local_step(self, step):
        out = step.forward()
        step.descend(step.values(out))
        step.log({"size": out.z.detach().square().mean()})


def test_what_a_step_logs_is_written_though_losses_does_not_name_it(trial):
    """It was written nowhere."""
    run = trial(name="logged-step", federation__rounds=2, method=f"{__name__}.Looks").fit()
    rows = read_logged(run.folder / "logged.csv")
    assert {row["name"] for row in rows} == {"size"}
    for round in (1, 2):
        values = of(rows, "size", round)
        assert values.pop(None) == pytest.approx(sum(values.values()) / len(values))
        assert min(values.values()) > 0
