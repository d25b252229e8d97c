"""``fl-lightning export``: TorchScript and ONNX files that give the model's own scores."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.data.datasets import CSVTable
from fl_lightning.errors import ConfigError
from fl_lightning.exporting import _difference, _require_alike, _scale_and_shift
from fl_lightning.model_commands import export

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.fixture(scope="module")
def runs(trial):
    made = {}

    def of(method, **options):
        key = method, str(options)
        if key not in made:
            adam = {"class_path": "Adam", "init_args": {"lr": 1e-3}}  # small steps for every method
            options = {"name": f"exported-{len(made)}", "method": method, "optimizer": adam, **options}
            made[key] = trial(federation__rounds=1, **options).fit()
        return made[key]

    return of


def scores_of(path, x):
    if path.suffix != ".onnx":
        about = {"about.json": ""}
        model = torch.jit.load(path, _extra_files=about)
        return model(x).detach(), {name: json.loads(text) for name, text in json.loads(about["about.json"]).items()}
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    known = session.get_modelmeta().custom_metadata_map
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), {n: json.loads(text) for n, text in known.items()}


@pytest.mark.parametrize("ending", [".onnx", ".pt"])
@pytest.mark.parametrize("method", ["FedRep", "FedProto", "DRDFL"])
def test_file_gives_the_models_scores(method, ending, runs, tmp_path, capsys):
    path = tmp_path / f"model{ending}"
    run = runs(method)
    assert export([str(run.folder), "--client", "2", "--output", str(path)]) == 0
    x = torch.randn(11, 1, 8, 8)
    model = run.model(client=2)
    scores, about = scores_of(path, x)
    assert torch.allclose(scores, model(x), atol=1e-4)
    assert about["classes"] == list("0123456789")
    assert about["client"] == 2
    raw = torch.randint(0, 255, (3, 1, 8, 8), dtype=torch.uint8)
    assert np.allclose(raw * about["scale"][0] + about["shift"][0], model.normalise(raw), atol=1e-5)
    assert capsys.readouterr().out.startswith(f"written to {path} (")


def test_a_file_says_how_features_are_scaled(runs, tmp_path):
    """It said a scale of 1 and a shift of 0, so that features as they were measured got any scores."""
    rows = [f"{1000 + 50 * (n % 7)},{n % 3 / 1000},{'ab'[n % 2]},{'no' if n % 2 else 'yes'}" for n in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y,z,label", *rows]))
    table = {"class_path": "CSVTable", "init_args": {"path": str(tmp_path / "a.csv"), "label": "label"}}
    run = runs("FedAvg", data={"dataset": table, "partition": "IID", "num_clients": 2, "batch_size": 16})
    raw, scaled = (CSVTable(**table["init_args"], normalize=normalize).arrays().x for normalize in ("none", "standard"))
    path = run.export(tmp_path / "model.pt")
    about = scores_of(path, scaled)[1]
    assert np.allclose(raw.double() * torch.tensor(about["scale"]) + torch.tensor(about["shift"]), scaled, atol=1e-4)


def test_what_takes_gradients_as_a_run_is_built_again_has_them(runs, tmp_path):
    """Under DP-SGD per-sample gradients are tried out: no model of such a run could be written."""
    pytest.importorskip("opacus")
    model = {"class_path": "MLP", "init_args": {"hidden": [8]}}
    run = runs("FedAvg", model=model, federation__record_privacy={"noise_multiplier": 1.0})
    assert run.export(tmp_path / "model.pt").is_file()


def test_a_file_says_no_scale_where_nobody_knows_one():
    data = SimpleNamespace(arrays=SimpleNamespace(x=torch.zeros(3, 2)), dataset=SimpleNamespace())
    assert _scale_and_shift(SimpleNamespace(), data) == (None, None)


@pytest.mark.parametrize("method", ["APFL", "APPLE"])
def test_mixed_weights_are_written_as_one_network(method, runs, tmp_path):
    run = runs(method)
    path = run.export(tmp_path / "model.pt", client=1)
    x, model = torch.randn(5, 1, 8, 8), run.model(client=1)
    assert torch.allclose(scores_of(path, x)[0], model(x), atol=1e-6)
    held = sum(tensor.numel() for tensor in torch.jit.load(path).parameters())
    assert held == sum(tensor.numel() for tensor in model.method.model.parameters())


def test_global_model_and_a_lightning_module(runs, tmp_path):
    module = {"class_path": "WrappedLightningModule", "init_args": {"module": "tutorial_modules.PlainTen"}}
    run = runs("FedAvg", model=module)
    path = run.export(tmp_path / "model.ts")
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(scores_of(path, x)[0], run.model()(x), atol=1e-5)


def test_attention_is_written_in_operations_that_onnx_has(runs, tmp_path, capfd):
    """Torch's fused one is none of them; the vision transformer of the guide could not be written."""
    module = {"class_path": "WrappedModel", "init_args": {"module": "tutorial_modules.Attends", "head": "fc"}}
    run = runs("FedAvg", model=module)
    fused = torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(scores_of(run.export(tmp_path / "model.onnx"), x)[0], run.model()(x), atol=1e-4)
    assert torch.backends.mha.get_fastpath_enabled() is fused
    module["init_args"]["module"] = "tutorial_modules.Solves"
    run = runs("FedAvg", model=module)
    capfd.readouterr()
    with pytest.raises(ConfigError, match=r"export: FedAvg's WrappedModel cannot be written as \.onnx: "):
        run.export(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ending", [".onnx", ".pt"])
@pytest.mark.parametrize("longest", [6, 2])  # of the test part: the second has no long text to show it
def test_a_network_that_cuts_padding_away_is_refused_whatever_order_the_texts_are_in(ending, longest, runs, tmp_path):
    """The first 17 test samples were compared, short ones where a file is sorted by length."""
    x, rng = np.zeros((120, 8), dtype=np.int64), np.random.default_rng(0)
    for row, length in enumerate([2] * 90 + [longest] * 30):
        x[row, :length] = rng.integers(1, 9, length)
    np.savez(tmp_path / "a.npz", x=x, y=x[:, 0] % 2)
    data = {"dataset": {"class_path": "ArrayFile", "init_args": {"path": str(tmp_path / "a.npz")}}, "partition": "IID"}
    module = {"class_path": "WrappedModel", "init_args": {"module": "tutorial_modules.Trims", "head": "fc"}}
    run = runs("FedAvg", model=module, data={**data, "num_clients": 2, "batch_size": 16})
    with pytest.raises(ConfigError, match="what it does depends on the samples, scores differ"):
        run.export(tmp_path / f"model{ending}")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_onnx_has_what_half_precision_trained_in_float32(precision, runs, tmp_path, capsys):
    """Autocast was traced, too: no runtime read the file, which was written where none was there to try it."""
    run = runs("FedProto", trainer={"accelerator": "cpu", "precision": precision})
    path, model = run.export(tmp_path / "model.onnx", client=1), run.model(client=1)
    moved = "note: ONNX has the model in float32; the run's precision rounds scores by up to "
    assert (moved in capsys.readouterr().err) is (precision != "64-true")
    x = model.normalise(torch.randint(0, 255, (5, 1, 8, 8), dtype=torch.uint8))
    assert x.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    assert torch.allclose(scores_of(path, x)[0], model(x).to(x), atol=1e-6 if precision == "64-true" else 0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "export: there is no run in that folder, got 'nowhere'"),
        (["RUN", "--output", "model.h5"], r"--output: must end in \.onnx, \.pt or \.ts, got 'model.h5'"),
        (["RUN", "--client", "all"], "--client: must be a client's number, or global, got 'all'"),
        (["RUN", "--client", "7"], "client: must be from 0 to 3, got 7"),
        (["RUN"], "client: this run has no global model; name a client"),
    ],
)
def test_mistakes_are_one_line(words, said, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        export([str(runs("FedRep").folder) if word == "RUN" else word for word in words])
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_the_extra_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"export: ONNX needs the package onnx: pip install 'fl-lightning\[export\]'"):
        runs("FedRep").export(tmp_path / "model.onnx", client=0)


def test_a_model_that_draws_random_numbers_is_refused(runs, tmp_path):
    run = runs(
        "FedAvg", model={"class_path": "WrappedModel", "init_args": {"module": "tutorial_modules.Noisy", "head": "fc"}}
    )
    with pytest.raises(ConfigError, match="export: FedAvg's WrappedModel draws random numbers when it predicts"):
        run.export(tmp_path / "model.pt")


def test_a_file_is_compared_on_a_batch_though_a_client_has_one_sample(runs, tmp_path):
    """A file that holds for one sample alone was written as one for any number."""
    run = runs(
        "FedAvg",
        model={"class_path": "WrappedModel", "init_args": {"module": "tutorial_modules.Batchwise", "head": "fc"}},
        data={
            "dataset": {"class_path": "Sample", "init_args": {"dataset": {"class_path": "Digits"}, "samples": 240}},
            "partition": {"class_path": "IID"},
            "num_clients": 40,
        },
    )
    with pytest.raises(ConfigError, match=r"cannot be written as \.pt"):
        run.export(tmp_path / "model.pt", client=1)


def test_a_model_that_gives_nan_is_not_said_to_draw_random_numbers():
    class Broken(SimpleNamespace):
        def __call__(self, x):
            return x.log()

    model = Broken(method=SimpleNamespace(model=None))
    _require_alike(model, torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="export: SimpleNamespace's NoneType gives NaN as scores of test samples"):
        _require_alike(model, -torch.ones(2, 3))


@pytest.mark.parametrize(
    ("written", "own", "difference"),
    [
        ([-math.inf, 2.0], [-math.inf, 1.0], 1.0),  # a masked class
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([1.0, 1.0], [math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_scores_that_are_not_finite_are_compared(written, own, difference):
    assert _difference(torch.tensor(written), torch.tensor(own)) == difference
