"""A run's models on their own: `fl_lightning.load` and what it gives."""

import io
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from every_method import METHODS
from tiny_optimizers import adam

import fl_lightning
from fl_lightning.classifier import classifier_of
from fl_lightning.errors import ConfigError
from fl_lightning.federation import saving
from fl_lightning.federation.attacks import Attack
from fl_lightning.report.page.classifier import heads_of
from fl_lightning.report.recorded_run import read_run
from fl_lightning.sealed import load_tensors, read_json, save_tensors, write_json

PLUGINS = "lightning.pytorch.plugins.precision."
SCALER = {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu"}}
MIXED = {
    "class_path": f"{PLUGINS}MixedPrecision",
    "init_args": {"precision": "16-mixed", "device": "cpu", "scaler": SCALER},
}
HALF = {"class_path": f"{PLUGINS}HalfPrecision", "init_args": {"precision": "16-true"}}


def accuracy(model, data, indices):
    x, y = data.store.gather(torch.as_tensor(indices))
    with torch.inference_mode():
        scores = model(x)
    with torch.no_grad():
        assert torch.equal(scores, model(x))
    return float((scores.argmax(1) == y).double().mean())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_classifier_predicts_as_the_evaluation_does(name, set_up_federation, conv_net, tmp_path):
    loop = set_up_federation(lambda: METHODS[name](conv_net()), rounds=1, folder=tmp_path, optimizer=adam)
    assert not loop.runner.evaluator.mixes
    loop.run()
    expected = loop.scores["Local-T"]
    server = loop.diary.rows[-1]["Server-T"]
    for client in range(loop.num_clients):
        model = classifier_of(loop, tmp_path, client)
        assert accuracy(model, loop.data, loop.data.clients[client].test) == expected[client]
        assert not model.training
    if server is None:
        with pytest.raises(ConfigError, match="no global model"):
            classifier_of(loop, tmp_path, None)
    else:
        assert accuracy(classifier_of(loop, tmp_path, None), loop.data, loop.data.server_test) == server


def test_attacker_is_personalised_on_what_it_trains_on(set_up_federation, mlp, tmp_path, sgd):
    attack = Attack(clients=[0, 3], kind="label_flip")
    options = {"folder": tmp_path, "optimizer": sgd(0.3), "attack": attack}
    loop = set_up_federation(lambda: METHODS["FedBABU"](mlp()), rounds=1, **options)
    loop.run()
    for client in range(loop.num_clients):
        test = loop.data.clients[client].test
        assert accuracy(classifier_of(loop, tmp_path, client), loop.data, test) == loop.scores["Local-T"][client]


@pytest.fixture(scope="module")
def run(trial):
    return trial(name="loaded", method="FedRep", federation__rounds=2).fit()


def test_load_gives_a_module_that_needs_nothing_of_the_run(run, trial):
    data = trial(name="loaded").data()
    model = fl_lightning.load(run.folder, client=3)
    assert model.input_shape == (1, 8, 8)
    assert model.classes == tuple("0123456789")
    raw = data.arrays.x[data.clients[3].test]
    x, y = data.store.gather(data.clients[3].test)
    assert torch.equal(model.normalise(raw), x)
    own = run.clients.query("client == 3")["Local-T"]
    assert float((model(x).argmax(1) == y).double().mean()) == own.iloc[-1]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert model(x).requires_grad  # it can be trained on


def test_load_gives_every_client_its_own(run):
    x = torch.randn(5, 1, 8, 8)
    assert not torch.equal(run.model(client=0)(x), run.model(client=1)(x))


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (99, "client: must be from 0 to 3, got 99"),
        (-1, "client: must be from 0 to 3, got -1"),
        ("3", "must be from 0"),
        (True, "client: must be from 0 to 3, got True"),
        (np.int64(4), "client: must be from 0 to 3, got "),
    ],
)
def test_load_refuses_a_client_that_is_not_there(run, client, said):
    with pytest.raises(ConfigError, match=said):
        fl_lightning.load(run.folder, client=client)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_client_may_be_numpys_number(run, tmp_path):
    """It was refused: "must be from 0 to 3, got np.int64(2)"."""
    model = run.model(client=np.argmax([0, 0, 1]))
    assert type(model.client) is int
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(model(x), run.model(client=2)(x))
    file = run.export(tmp_path / "model.pt", client=np.int32(2))
    assert torch.allclose(torch.jit.load(file)(x), model(x))


def test_load_refuses_a_global_model_where_there_is_none(run):
    with pytest.raises(ConfigError, match="client: this run has no global model; name a client"):
        fl_lightning.load(run.folder)


@pytest.mark.parametrize("way", [{"federation__cohort": 4}, {"federation__compile": True}])
def test_what_fits_nobody_says_nothing_of_fits(way, trial, capsys):
    """Each call said again why the run's clients had been fitted one by one."""
    name = "".join(way)
    run = trial(name=name, method="DRDFL", federation__rounds=1, federation__local_steps=1, **way).fit()
    assert "DRDFL runs" in capsys.readouterr().err
    for client in (0, 1):
        run.model(client=client)
    assert run.evaluate()["Local-T"] == run.summary["last"]["Local-T"]
    assert capsys.readouterr().err == ""


GPU = {"accelerator": "gpu", "devices": [1], "strategy": "ddp", "plugins": None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "16-true"])
def test_a_gpus_run_is_read_on_a_machine_without_one(precision, trial, monkeypatch, capsys):
    """It was refused: there was no GPU for a Trainer that fits nobody."""
    plugin = {"16-mixed": MIXED, "16-true": HALF}.get(precision)  # a flag would be refused without a GPU
    trainer = {"trainer__plugins": [plugin] if plugin else None}
    run = trial(name=f"gpus-{precision}", method="FedBABU", federation__rounds=1, **trainer).fit()
    config = {**run.config, "trainer": {**run.config["trainer"], **GPU, "precision": precision}}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(saving, "check_identity", lambda *_: None)  # to which the plugin belongs
    capsys.readouterr()
    model = fl_lightning.load(run.folder, client=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    float16 = "" if precision == "32-true" else ", float16 as float32"
    said = f"trainer: there is no GPU on this machine, so the CPU reads the run{float16}\n"
    assert capsys.readouterr().err == said
    figures = fl_lightning.Run.load(run.folder).evaluate()
    assert figures["Local-T"] == pytest.approx(run.summary["last"]["Local-T"], abs=0.02)
    assert capsys.readouterr().err == said


def test_a_run_with_flags_that_are_refused_by_now_is_read(run, tmp_path):
    """They changed nothing when it was made."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    idle = {"num_sanity_val_steps": 2, "limit_val_batches": 0.5, "inference_mode": False}
    config = {**run.config, "trainer": {**run.config["trainer"], **idle}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert fl_lightning.load(folder, client=1).num_classes == 10


def test_load_refuses_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="run: there is no run in that folder"):
        fl_lightning.load(tmp_path, client=0)


def test_another_data_set_is_blamed_on_no_option_of_fit(run, tmp_path):
    """`predict` and `export` named "--resume", which they have not."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    for file in (folder / "checkpoints").glob("*.ckpt"):
        save_tensors(file, {**load_tensors(file, "file"), "data": "others"})
    with pytest.raises(ConfigError, match=f"^{re.escape(str(folder))}: the data are not those that the run began with"):
        fl_lightning.load(folder, client=1)
    with pytest.raises(ConfigError, match=r"^--checkpoint: the data are not those"):
        fl_lightning.Run.load(folder).evaluate()


def test_a_model_of_another_client_or_run_is_refused_by_its_own_word(run, trial, tmp_path):
    """Files that were swapped, or copied from a run of another seed, were taken for the client's."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    own = folder / "models" / "00000.pt"
    shutil.copy(run.folder / "models" / "00001.pt", own)
    with pytest.raises(
        ConfigError, match=r"client: .*00000\.pt is another client's or run's: it is of client 1, not 0"
    ):
        fl_lightning.load(folder, client=0)
    with pytest.raises(ConfigError, match=r"evaluate: .*00000\.pt is another client's or run's"):
        fl_lightning.Run.load(folder).evaluate()
    other = trial(name="seeded", seed=5, method="FedRep", federation__rounds=1).fit()
    shutil.copy(other.folder / "models" / "00000.pt", own)
    with pytest.raises(ConfigError, match="is another client's or run's: it is of seed 5, not 0"):
        fl_lightning.load(folder, client=0)
    state = load_tensors(run.folder / "models" / "00001.pt", "test")
    save_tensors(own, state, round=2)  # as older versions did
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(fl_lightning.load(folder, client=0)(x), run.model(client=1)(x))


def test_other_data_are_refused_without_a_checkpoint_too(run, tmp_path):
    """Names of other classes were given."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    assert fl_lightning.load(folder, client=1).num_classes == 10
    record = read_json(folder / "partition.json", "test")
    for name in ("hash", "samples"):
        write_json(folder / "partition.json", {**record, name: "others"})
        with pytest.raises(ConfigError, match=f"^{re.escape(str(folder))}: the data are not those that the run began"):
            fl_lightning.load(folder, client=1)


def test_load_imports_nothing_that_is_not_trusted(run, tmp_path, monkeypatch):
    folder = tmp_path / "crafted"
    folder.mkdir()
    text = (run.folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("fl_lightning.models.mlp.MLP", "stranger.Net"))
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model: nothing is imported for a run that is read.*--trust stranger"):
        fl_lightning.load(folder, client=0)


def test_load_refuses_a_damaged_model(run, tmp_path):
    file = run.folder / "models" / "00002.pt"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        with pytest.raises(ConfigError, match=r"client: .* is damaged"):
            run.model(client=2)
    finally:
        file.write_bytes(whole)


ODD = {
    "of another shape": torch.zeros(1),  # which would be broadcast
    "that claims a terabyte": torch.zeros(1).expand(10**6, 10**6),
    "sparse": torch.zeros(10, 8).to_sparse(),
    "complex": torch.zeros(10, 8, dtype=torch.complex64),
    "without content": torch.zeros(10, 8, device="meta"),
    "no tensor": 3,
}


@pytest.mark.filterwarnings("ignore:.*sparse.*")
def test_model_that_is_another_one_is_refused_and_left_out_of_the_page(run):
    file = run.folder / "models" / "00002.pt"
    whole = file.read_bytes()
    state = load_tensors(file, "test")
    name = next(name for name in state if name.endswith("head.weight"))
    try:
        for what, odd in {**ODD, "missing": None}.items():
            save_tensors(file, {key: odd if key == name else value for key, value in state.items() if odd is not None})
            with pytest.raises(ConfigError, match=r"00002\.pt does not fit the model"):
                run.model(client=2)
            assert 2 not in heads_of(read_run(run.folder, "test")).own, what
    finally:
        file.write_bytes(whole)
