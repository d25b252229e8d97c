"""A run with metrics, validation parts and early stopping, from its configuration to what is read of it."""

import csv
import json

NODES = ["AUROC", {"class_path": "F1Score", "init_args": {"average": "macro"}}]


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_run_is_measured_stopped_early_and_read_again(workplace):
    workplace.change(
        metrics=NODES,
        data={"validation_fraction": 0.2},
        optimizer={"class_path": "SGD", "init_args": {"lr": 1e-12}},
        federation={"rounds": 9, "early_stopping": {"patience": 1}},
    )
    out = workplace.fit()
    assert "early stopping: Local-V has not become better since round 1" in out
    assert "chosen on the validation parts" in out
    assert "Gini" in out
    summary = json.loads((workplace.run / "summary.json").read_text())
    assert (summary["finished"], summary["rounds"]) == (True, 2)
    assert summary["stopped"].startswith("early stopping: Local-V")
    assert (summary["best_on"], summary["best_by"], summary["best"]["Local-T"]["round"]) == ("validation", "Local-V", 1)
    assert summary["last"]["F1Score/Local-T"] == float(rows(workplace.run / "metrics.csv")[-1]["F1Score/Local-T"])
    client = rows(workplace.run / "clients.csv")[0]
    assert {"AUROC/Local-T", "F1Score/Local-V_received", "eval_loss/Global-T", "Local-V"} <= set(client)
    assert (workplace.run / "curves.png").is_file()

    code, out, err = workplace.call("evaluate", str(workplace.run))
    assert (code, err) == (0, "")
    assert "AUROC/Local-V" in out
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--resume", "auto", "--metrics", "[AUROC]")
    assert code == 2
    assert "--resume: the checkpoint belongs to another configuration: metrics" in err
