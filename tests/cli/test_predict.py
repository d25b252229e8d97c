"""``fl-lightning predict``: classes of new samples by a run's models."""

import csv

import numpy as np
import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.model_commands import export, predict


@pytest.fixture(scope="module")
def run(trial):
    return trial(name="predicts", method="FedAvg", federation__rounds=2).fit()


@pytest.fixture(scope="module")
def data(trial):
    return trial(name="predicts").data()


@pytest.fixture
def own(data, tmp_path):
    """Client 3's test images, as bytes."""
    path = tmp_path / "own.npz"
    np.savez(path, x=data.arrays.x[data.clients[3].test].numpy())
    return str(path)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def accuracy(rows, data):
    classes = [data.arrays.classes[label] for label in data.arrays.y[data.clients[3].test].tolist()]
    return np.mean([row["class"] == label for row, label in zip(rows, classes, strict=True)])


def test_a_clients_model_predicts_as_it_was_evaluated(run, data, own, tmp_path, capsys):
    output = tmp_path / "out.csv"
    assert predict([str(run.folder), own, "--client", "3", "--output", str(output), "--batch-size", "7"]) == 0
    rows = rows_of(output)
    assert accuracy(rows, data) == run.clients.query("client == 3")["Local-T"].iloc[-1]
    assert [row["sample"] for row in rows] == [str(index) for index in range(len(rows))]
    shares = [[float(row[f"p({name})"]) for name in "0123456789"] for row in rows]
    assert np.allclose(np.sum(shares, axis=1), 1, atol=1e-4)
    assert [int(row["class"]) for row in rows] == np.argmax(shares, axis=1).tolist()
    assert capsys.readouterr().out == f"{len(rows)} samples, {len(rows)} predictions in {output}\n"


def test_all_clients_and_the_global_model(run, data, own, tmp_path):
    assert predict([str(run.folder), own, "--client", "all", "--output", str(tmp_path / "all.csv")]) == 0
    rows = rows_of(tmp_path / "all.csv")
    assert [row["client"] for row in rows] == [c for c in "0123" for _ in range(len(rows) // 4)]
    by_client = run.clients.query("client == 3")["Local-T"].iloc[-1]
    assert accuracy([row for row in rows if row["client"] == "3"], data) == by_client
    assert predict([str(run.folder), own, "--output", str(tmp_path / "global.csv")]) == 0
    assert "client" not in rows_of(tmp_path / "global.csv")[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "x.npz"], "predict: there is no run in that folder, got 'nowhere'"),
        (["RUN", "nowhere.npz"], "DATA: there is no such file or folder"),
        (["RUN", "OWN", "--client", "some"], "--client: must be a client's number, all or global, got 'some'"),
        (["RUN", "OWN", "--client", "9"], "client: must be from 0 to 3, got 9"),
        (["RUN", "OWN", "--batch-size", "0"], "--batch-size: must be at least 1"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(run, own, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        predict([{"RUN": str(run.folder), "OWN": own}.get(word, word) for word in words])
    assert not (tmp_path / "predictions.csv").exists()


def test_predictions_do_not_replace_the_samples(tmp_path, monkeypatch):
    """A table that is called as predictions are was lost, in silence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "predictions.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"--output: is DATA itself, whose .*, got 'predictions\.csv'"):
        predict([".", str(tmp_path / "predictions.csv")])
    assert (tmp_path / "predictions.csv").read_text() == "a,b\n1,2\n"


def test_who_fell_sick_in_its_last_round_is_left_out_of_all(trial, own, tmp_path, capsys):
    """All were refused, because the run kept no models or was not finished, neither of which was so."""
    run = trial(name="sick", federation__rounds=1, federation__on_client_error="skip").fit()
    (run.folder / "models" / "00002.pt").unlink()
    output = tmp_path / "all.csv"
    assert predict([str(run.folder), own, "--client", "all", "--output", str(output)]) == 0
    assert {row["client"] for row in rows_of(output)} == {"0", "1", "3"}
    assert "left out: client 2 fell sick in its last round" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="client 2 fell sick in its last round"):
        run.model(client=2)


def test_classes_are_those_of_the_images_where_clients_have_other_labels_for_them(trial, data, own, tmp_path, capsys):
    """A client that was right by its own labels was right of 1 % of the images."""
    swap = {"class_path": "ConceptShift", "init_args": {"concepts": 2}}
    run = trial(name="concepts", method="Local", federation__rounds=20, data__shift=swap).fit()
    output = tmp_path / "out.csv"
    for client in ("3", "all"):
        assert predict([str(run.folder), own, "--client", client, "--output", str(output)]) == 0
        rows = [row for row in rows_of(output) if row.get("client", "3") == "3"]
        assert accuracy(rows, data) == run.clients.query("client == 3")["Local-T"].iloc[-1] > 0.5
        assert all(float(row[f"p({row['class']})"]) > 0.09 for row in rows)
    assert run.model(client=2).classes == tuple("0123456789")
    assert sorted(run.model(client=3).classes) == list("0123456789") != list(run.model(client=3).classes)
    assert "data.shift" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shift", "client", "said"),
    [
        (
            "RotationSkew",
            "3",
            "samples are taken as they are, and client 3 was trained on what RotationSkew makes of them",
        ),
        ("NoiseSkew", "all", "samples are taken as they are, and clients were trained on what NoiseSkew makes of them"),
        ("ConceptShift", "global", "the global model was trained on labels that differ from client to client"),
    ],
)
def test_a_line_says_what_a_shift_made_of_the_samples_that_were_trained_on(
    trial, own, tmp_path, capsys, shift, client, said
):
    run = trial(name=f"shifted-{shift}", method="FedAvg", federation__rounds=1, data__shift=shift).fit()
    assert predict([str(run.folder), own, "--client", client, "--output", str(tmp_path / "out.csv")]) == 0
    noted = [line for line in capsys.readouterr().err.splitlines() if "data.shift" in line]
    assert len(noted) == 1
    assert noted[0].startswith("fl-lightning: note: data.shift: ")
    assert said in noted[0]
    if client == "3":
        assert export([str(run.folder), "--client", client, "--output", str(tmp_path / "model.pt")]) == 0
        assert noted[0] in capsys.readouterr().err


def test_without_any_clients_model_a_good_file_stays(trial, own, tmp_path):
    """It became an empty one, of "-1 predictions"."""
    run = trial(name="all-sick", federation__rounds=1, federation__on_client_error="skip").fit()
    for file in (run.folder / "models").iterdir():
        file.unlink()
    output = tmp_path / "all.csv"
    output.write_text("good")
    with pytest.raises(ConfigError, match="--client: there is no client's model to predict by; nothing is written"):
        predict([str(run.folder), own, "--client", "all", "--output", str(output)])
    assert output.read_text() == "good"


def test_command_line_says_it_in_one_line(workplace):
    code, out, err = workplace.call("predict", "nowhere", "x.npz")
    assert (code, out) == (2, "")
    assert err == "fl-lightning: error: predict: there is no run in that folder, got 'nowhere'\n"
