"""`fl-lightning report` on real runs."""

import shutil

import numpy as np
import pytest
import torch

from fl_lightning.trust import Trust

pytest.importorskip("vl_convert")


def test_report_of_a_real_run(finished, workplace):
    page, pictures = workplace.path / "page.html", workplace.path / "pictures"
    code, out, err = workplace.call("report", finished.run, "--output", page, "--figures", pictures)
    assert (code, err) == (0, "")
    assert "1 runs" in out
    text = page.read_text(encoding="utf-8")
    for said in (
        "Local-T against communication",
        "Norm of weights against share",
        "fl-lightning fit --config",
        "FedRep",
    ):
        assert said in text
    assert (pictures / "norms.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name runs' folders or a table"),
        (["nowhere"], "there is no such folder or file"),
        (["empty"], "neither a run nor a table"),
        (["exp.yaml"], "belongs to a run's file: fl-lightning fit --config FILE runs it"),
        (["damaged"], "there is no run with at least one round"),
        (["--figure", "x"], "did you mean"),
    ],
)
def test_mistake_is_one_line(workplace, argv, said):
    (workplace.path / "empty").mkdir(exist_ok=True)
    workplace.write("damaged/metrics.csv", b"\x00\xff\n1,2")
    before = workplace.files()
    code, out, err = workplace.call("report", *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
    assert len(err) <= 330
    assert workplace.files() == before


def test_a_file_in_place_of_the_folder_of_figures_is_said_before_the_page_is_written(finished, workplace):
    place = workplace.write("afile", "mine")
    code, out, err = workplace.call("report", finished.run, "--output", "early.html", "--figures", place)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--figures: must be a folder: " in err
    assert not (workplace.path / "early.html").exists()


def test_embeddings_without_models_are_refused(finished, workplace):
    run = workplace.path / "bare"
    shutil.copytree(finished.run, run, ignore=shutil.ignore_patterns("models"))
    code, _, err = workplace.call("report", run, "--embed")
    assert code == 2
    assert err.count("\n") == 1
    assert "needs the clients' models" in err
    assert not (run / "report.html").exists()


def test_code_that_a_run_names_is_not_imported(finished, workplace):
    run = workplace.path / "foreign"
    shutil.copytree(finished.run, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("fl_lightning.methods.fedrep.FedRep", "harm.Method"))
    workplace.write("harm.py", b"open('harmed', 'w')")
    assert workplace.call("report", run)[0] == 0
    code, _, err = workplace.call("report", run, "--embed")
    assert code == 2
    assert "--trust harm" in err
    assert not (workplace.path / "harmed").exists()


SMALL = """
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.layer(x).relu())
"""


def test_embeddings_and_attention_where_clients_have_different_models(workplace):
    """Both ended in a traceback: a client without a convolution, and embeddings of two sizes."""
    pytest.importorskip("captum")
    workplace.write("small.py", SMALL)
    mine = {"class_path": "WrappedModel", "init_args": {"module": "small.Small", "head": "fc"}}
    mlp = {"class_path": "MLP", "init_args": {"hidden": [8]}}
    models = [{**mlp, "clients": 2}, {**mine, "clients": 4}]
    workplace.change(method="Local", model=models, federation={"rounds": 1})
    workplace.fit()
    page, pictures = workplace.path / "page.html", workplace.path / "pictures"
    trust = ["--trust", "small", "--output", page]
    code, _, err = workplace.call("report", workplace.run, "--attention", "3", *trust, "--figures", pictures)
    assert (code, err) == (0, "")
    assert "model: agreement" in page.read_text(encoding="utf-8")
    assert (pictures / "attention.svg").read_text().count("<image") == 5 + 3  # five images, and three clients' maps
    code, _, err = workplace.call("report", workplace.run, "--embed", *trust)
    assert (code, err.count("\n")) == (2, 1)
    assert "embeddings of several sizes, [8, 16]" in err


def test_embeddings_and_attention_of_a_real_run(workplace):
    pytest.importorskip("captum")
    adam = {"class_path": "Adam", "init_args": {"lr": 0.001}}
    short = {"rounds": 1, "local_steps": 3}
    few = {"class_path": "Sample", "init_args": {"dataset": "Digits", "samples": 600}}
    workplace.change(method="DRDFL", optimizer=adam, federation=short, data={"num_clients": 3, "dataset": few})
    workplace.fit()
    page, pictures = workplace.path / "page.html", workplace.path / "pictures"
    options = ["--embed", "--attention", "3", "--output", page, "--figures", pictures]
    code, _, err = workplace.call("report", workplace.run, *options)
    assert (code, err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "Test samples and prototypes" in text
    assert "learngene: agreement" in text
    assert ">SL<" in (pictures / "class-relation-measured.svg").read_text()
    assert (pictures / "embedding.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in (pictures / "attention.svg").read_text()
    code, _, err = workplace.call("report", workplace.run, "--attention", "bird", "--output", workplace.path / "b.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "--attention" in err
    assert "bird" in err


def test_images_of_floats_are_drawn_between_their_least_and_their_largest_value(workplace):
    """What lies below 0 was black."""
    pytest.importorskip("captum")
    from fl_lightning.attention import attend

    rows = torch.linspace(-1, 1, 64).reshape(8, 8)
    images = torch.stack([rows if n % 2 else rows.flip(0) for n in range(32)])[:, None]
    torch.save({"x": images, "y": torch.arange(32) % 2}, workplace.path / "a.pt")
    dataset = {"class_path": "ArrayFile", "init_args": {"path": str(workplace.path / "a.pt")}}
    model = {"class_path": "CNN", "init_args": {"channels": [2, 2], "kernel_size": 3, "padding": 1, "hidden": 4}}
    workplace.change(data={"dataset": dataset, "partition": "IID", "num_clients": 2}, model=model)
    workplace.fit("--quiet", "--method", "FedAvg", "--federation.rounds", "1")
    drawn = attend(workplace.run, "1", Trust()).images[0]
    np.testing.assert_allclose(drawn[..., 0], (rows.numpy() + 1) / 2, atol=1e-6)
