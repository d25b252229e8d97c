"""What runs give away: images sought in messages, canaries sought in means."""

import json
import math
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from harnesses import harness

from fl_lightning.audit.canaries import audit_canaries, directions, estimate, null_deviation, told_apart
from fl_lightning.audit.command import run_audit
from fl_lightning.audit.matching import Attack, best_order, psnr, total_variation
from fl_lightning.audit.page import as_array
from fl_lightning.core.coding import Coding
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.parser import configured

CONFIG = """\
seed: 0
method: {class_path: FedAvg}
model: {class_path: MLP, init_args: {hidden: [64, 32]}}
optimizer: {class_path: SGD, init_args: {lr: 0.2}}
data:
  dataset: Digits
  partition: {class_path: Dirichlet, init_args: {beta: 0.5, min_samples: 20}}
  num_clients: 6
  batch_size: 64
federation: {rounds: 2, evaluate: {globally: false}}
trainer: {accelerator: cpu}
"""

emulator = harness("emulated_gpu")


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder, of which an audit reads the configuration alone: `run_folder("a", "--method=FedNova")`."""

    def make(name, *options):
        file = tmp_path / "exp.yaml"
        file.write_text(CONFIG)
        _, config = configured("fit", "", [f"--config={file}", f"--name={name}", *options])
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return folder

    return make


def experiment(folder):
    from fl_lightning.configuration import read_config

    return BuiltExperiment(read_config(folder / "config.yaml"))


def wire(**options):
    filters = [{"class_path": "ClipAndNoise", "init_args": options}]
    return "--federation.wire=" + json.dumps(filters)


# --- measures ---------------------------------------------------------------------------------------------------------


def test_images_of_a_class_are_matched_in_the_best_order():
    truth = torch.stack([torch.full((1, 2, 2), value) for value in (0.0, 1.0, 0.5)])
    y = torch.tensor([3, 3, 5])
    found = truth[[1, 0, 2]] * 0.9  # the two of class 3 the other way round
    assert best_order(found, truth, y).tolist() == [1, 0, 2]
    assert psnr(found, truth, y).tolist() == [pytest.approx(v, abs=1e-3) for v in (100.0, 20.0, 26.0206)]
    alone = best_order(truth[[2, 1, 0]], truth, y)
    assert int(alone[2]) == 2  # never across classes, however much nearer


def test_total_variation_of_a_step():
    """Half of 3 differences a row are 1 across the step: mean 1/3 along width, 0 along height."""
    x = torch.zeros(1, 1, 4, 4)
    x[..., 2:] = 1
    assert float(total_variation(x)) == pytest.approx(1 / 3)
    assert float(total_variation(torch.ones(3, 5))) == 0


def test_two_gaussians_match_numerical_integration():
    """δ(ε) of N(1, 1.2²) against N(0, 1), by sums over a fine grid, both ways round."""
    for mean, std in ((1.0, 1.2), (1.0, 0.8), (0.3, 1.0), (2.0, 1.0)):
        epsilon = told_apart(mean, std, 1.0, 1e-4)
        x = np.linspace(-15, 15, 400_001)
        p = np.exp(-0.5 * ((x - mean) / std) ** 2) / std / math.sqrt(2 * math.pi)
        q = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        step = x[1] - x[0]
        deltas = [float(np.clip(a - math.exp(epsilon) * b, 0, None).sum() * step) for a, b in ((p, q), (q, p))]
        assert max(deltas) == pytest.approx(1e-4, rel=1e-2)
    assert told_apart(0.0, 1.0, 1.0, 1e-5) == 0


def test_estimate_claims_less_than_it_sees():
    """Cosines of directions that took no part claim nothing."""
    rng = np.random.default_rng(0)
    assert estimate(rng.normal(0, 0.01, 500), 10_000, 5.0, 1e-5).epsilon_at_least == pytest.approx(0, abs=0.3)
    there = estimate(rng.normal(0.01, 0.01, 500), 10_000, 5.0, 1e-5)
    assert 0 < there.epsilon_at_least < there.epsilon_point < 6
    assert there.epsilon_at_least < 4.38  # of one Gaussian mechanism of z = 1, which this is
    assert there.as_dict()["canaries"] == 500


def test_canaries_are_as_long_as_a_clipped_message_may_be():
    own = Message({"w": torch.zeros(50)}, {"means": ClassMeans(torch.zeros(3, 4), torch.ones(3).long())})
    coding = Coding.of(own)
    drawn = directions(coding, 5, seed=0)
    for part in coding.groups:
        lengths = drawn[:, part].norm(dim=1)
        assert lengths.max() <= 1
        assert lengths.min() > 0.999
    assert torch.equal(drawn, directions(coding, 5, seed=0))
    assert not torch.equal(drawn, directions(coding, 5, seed=1))


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def figure(run_folder, tmp_path):
    """The mean PSNR of each attack by its label: `figure(["--method=FedAvg"], steps=80)`."""

    def audit(*runs, **options):
        folders = [run_folder(f"run{index}", *own) for index, own in enumerate(runs)]
        objective = options.pop("objective", "cosine")
        attack = Attack(options.pop("steps", 60), objective, 0.3 if objective == "cosine" else None)
        said = run_audit(folders, tmp_path / "audit", attack, **{"images": 3, "noise": 0.0, **options})
        names = [re.sub(r" \(run\d\)", "", own["label"]) for own in said["inversion"]]
        means = [None if own["psnr"] is None else np.mean(own["psnr"]) for own in said["inversion"]]
        return dict(zip(names, means, strict=True))

    return audit


def test_what_is_sent_decides_what_is_found(figure):
    """Weights give images away, noise hides some of them, class means and a small encoder give little, nothing none."""
    runs = [["--method=FedNova"], ["--method=FedProto"], ["--method=DRDFL"], ["--method=Local"]]
    found = figure(*runs, images=2)
    assert found["FedNova"] > 18
    assert found["FedProto"] < found["FedNova"] - 7
    assert found["DRDFL"] < found["FedNova"] - 7
    assert found["Local"] is None


def test_squared_distance_finds_images_too(figure):
    assert figure(["--method=FedAvg"], steps=15, objective="dlg", images=2)["FedAvg"] > 30


def test_noise_on_the_message_hides_images(figure):
    found = figure(["--method=FedRep"], noise=3.0, images=2)
    assert found["FedRep"] > found["FedRep + noise 3"] + 5


def test_runs_of_one_name_are_told_apart_by_their_folders(run_folder, tmp_path):
    """The second's figures stood in place of the first's."""
    first = run_folder("run")
    second = Path(shutil.copytree(first, tmp_path / "elsewhere" / "run"))
    said = run_audit([first, second], tmp_path / "audit", Attack(1), images=0, canaries=20)
    assert list(said["canaries"]) == ["run", "elsewhere/run"]


@pytest.mark.parametrize("where", ["server", "client"])
def test_clip_and_noise_on_the_wire_hides_images(where, figure):
    found = figure(["--method=FedAvg", wire(clip=0.01, noise_multiplier=1.0, where=where)], images=2, steps=30)
    assert found["FedAvg"] < 12


def test_audit_repeats_bit_for_bit_and_writes_nothing_into_runs(run_folder, tmp_path):
    folder = run_folder("run")
    for name in ("a", "b"):
        run_audit([folder], tmp_path / name, Attack(10), 2, 1.0, 20)
    first, second = ((tmp_path / name / "audit.json").read_text() for name in ("a", "b"))
    assert first == second
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    names = {"audit.json", "index.html", "psnr.png", "reconstructions.png"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    said = json.loads(first)
    assert said["canaries"] == {"run": None}
    assert [own["label"] for own in said["inversion"]] == ["FedAvg (run)", "FedAvg (run) + noise 1"]
    page = (tmp_path / "a" / "index.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64,") == 6
    assert "no ClipAndNoise" in page


def test_audit_of_a_run_on_a_gpu_with_states_on_disk(run_folder, tmp_path):
    """As it is on the CPU: on an emulated GPU the search comes to the same, and states need no folder."""
    audited = []
    for accelerator, place in (("cpu", nullcontext()), ("gpu", emulator.emulated_gpu())):
        options = ["--method=FedProto", f"--trainer.accelerator={accelerator}", "--federation.pool=disk"]
        with place:
            audited.append(run_audit([run_folder(accelerator, *options)], tmp_path / "audit", Attack(3), 2, 1.0, 0))
    here, there = ([run["psnr"] for run in own["inversion"]] for own in audited)
    assert here == there


def test_other_images_are_not_compared(run_folder, tmp_path):
    runs = [run_folder("a"), run_folder("b", "--seed=1")]
    with pytest.raises(ConfigError, match="must share data, partition and seed"):
        run_audit(runs, tmp_path / "audit", Attack(1))


def test_what_was_found_before_a_later_part_breaks_off_is_written(run_folder, tmp_path, monkeypatch):
    """Hours of search were lost with it."""
    monkeypatch.setattr("fl_lightning.audit.command.audit_canaries", lambda *_: 1 / 0)
    said = []
    with pytest.raises(ZeroDivisionError):
        run_audit([run_folder("a")], tmp_path / "audit", Attack(1), 2, 0.0, 20, said.append)
    assert said[-1] == f"what was found before is in {tmp_path / 'audit'}"
    check_found(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_audit([run_folder("b")], tmp_path / "none", Attack(1), 0, 0.0, 20)
    assert not (tmp_path / "none").exists()


def check_found(tmp_path):
    written = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert ([own["label"] for own in written["inversion"]], written["canaries"]) == (["FedAvg (a)"], {})


def test_what_was_found_is_written_where_its_pictures_cannot_be(run_folder, tmp_path, monkeypatch):
    """A disk that was full by then took the search with them."""
    monkeypatch.setattr("fl_lightning.audit.command.draw_reconstructions", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_audit([run_folder("a")], tmp_path / "audit", Attack(1), 2, 0.0)
    check_found(tmp_path)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"images": -1}, "audit --images"),
        ({"images": 10**6}, "audit --images"),
        ({"images": 0}, "audit"),
        ({"noise": -1.0}, "audit --noise"),
        ({"canaries": 3}, "audit --canaries"),
        ({"attack": Attack(0)}, "audit --steps"),
        ({"attack": Attack(1, lr=0.0)}, "audit --lr"),
        ({"attack": Attack(1, lr=math.inf)}, "audit --lr"),
        ({"attack": Attack(1, variation=math.nan)}, "audit --variation"),
    ],
)
def test_bad_options_are_refused(options, key, run_folder, tmp_path):
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        run_audit([run_folder("run")], tmp_path / "audit", **{"attack": Attack(1), **options})
    assert not (tmp_path / "audit").exists()


def test_folder_that_cannot_be_written_to_is_refused_before_the_search(run_folder, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"^audit --output: .*notes\.txt is no folder that can be written to"):
        run_audit([run_folder("run")], file / "audit", Attack(10**6))
    assert file.read_text() == "mine"


def test_method_that_sends_nothing_is_shown_as_one_that_gives_nothing_away(run_folder, tmp_path):
    said = run_audit([run_folder("run", "--method=Local")], tmp_path / "audit", Attack(1), images=1)
    (own,) = said["inversion"]
    assert (own["label"], own["attacked_values"], own["psnr"]) == ("Local (run)", 0, None)
    assert "nothing was sent that it could follow" in (tmp_path / "audit" / "index.html").read_text()
    assert (tmp_path / "audit" / "psnr.png").exists()


def test_what_a_message_holds_that_the_search_cannot_follow_is_said(run_folder, tmp_path):
    """It was said to send nothing, and the image can be read off it in closed form."""
    heard = []
    run = run_folder("run", "--method=DisPFL")
    (own,) = run_audit([run], tmp_path / "audit", Attack(1), images=1, tell=heard.append)["inversion"]
    assert (own["attacked_values"], own["psnr"]) == (0, None)
    assert own["sent_values"] > 1000
    assert f"sends {own['sent_values']} values that this search cannot follow: another one might" in heard[-1]
    assert "values were sent, and none that it could follow" in (tmp_path / "audit" / "index.html").read_text()


@pytest.mark.parametrize("option", ["--federation.local_epochs=5", "--data.batch_size=1", "--federation.local_steps=3"])
def test_the_client_makes_one_step_whatever_the_run_says(option, run_folder, tmp_path):
    """It made as many as in the run, and the search followed one."""
    runs = [run_folder("one"), run_folder("other", option)]
    attack = Attack(6, "dlg")
    one, other = run_audit(runs, tmp_path / "audit", attack, images=3, noise=0)["inversion"]
    assert one["curves"] == other["curves"]


def test_under_filters_the_step_is_as_large_as_in_the_run(run_folder, tmp_path):
    """One of 0.001 was lost in the grid of eight bits, which was taken for protection."""
    runs = [run_folder("plain"), run_folder("coarse", '--federation.wire=[{"class_path": "Quantize"}]')]
    plain, coarse = run_audit(runs, tmp_path / "audit", Attack(60), images=1, noise=0)["inversion"]
    assert (plain["step"], coarse["step"]) == (1e-3, 0.2)
    assert coarse["psnr"][0] > plain["psnr"][0] - 2
    assert "FedAvg (coarse) 0.2." in (tmp_path / "audit" / "index.html").read_text()


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_audit_of_other_precisions(precision, run_folder, tmp_path):
    """The search ended in torch's words about types."""
    run = run_folder("run", f"--trainer.precision={precision}")
    plain, blurred = run_audit([run], tmp_path / "audit", Attack(2), images=2)["inversion"]
    assert len(plain["psnr"]) == len(blurred["psnr"]) == 2


def test_step_that_cannot_be_followed_is_said(run_folder, tmp_path):
    with pytest.raises(ConfigError, match="gradients of its own"):
        run_audit([run_folder("run", "--method=PerFedAvg")], tmp_path / "audit", Attack(1))


# --- canaries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--method=FedAvg", wire(noise_multiplier=1.0)],
        ["--method=FedAvg", wire(noise_multiplier=0.7), "--federation.sampling=poisson"],
        ["--method=FedAvg", wire(noise_multiplier=2.0, where="client")],
        ["--method=FedProto", wire(noise_multiplier=1.0)],
    ],
    ids=["server", "poisson", "client", "class means"],
)
def test_claim_stays_below_the_accountant(options, run_folder):
    if "poisson" in options[-1]:
        options = [*options, "--federation.participation=0.5"]
    for seed in (0, 1):
        found = audit_canaries(experiment(run_folder(f"run{seed}", *options, f"--seed={seed}")), 60, lambda _: None)
        assert 0.2 < found.epsilon_at_least < found.epsilon_accounted
        assert found.mean > 3 * found.std / 60**0.5


def test_what_did_not_take_part_spreads_as_the_groups_of_a_message_have_it(run_folder):
    """Groups of unlike sizes were taken to spread as one: more was claimed than the accountant allows."""
    own = experiment(run_folder("run", "--method=FedCPD", wire(noise_multiplier=3.0), "--federation.rounds=10"))
    found = audit_canaries(own, 1000, lambda _: None)
    coding = own.loop.exchange.door.coding
    assert len(coding.groups) == 2
    stream = torch.Generator().manual_seed(0)
    released = torch.randn(coding.size, generator=stream, dtype=torch.float64)
    released[coding.groups[1]] *= 5
    others = directions(coding, 2000, 7).double()
    cosines = (others @ released) / (others.norm(dim=1) * released.norm())
    assert float(cosines.std()) == pytest.approx(null_deviation(coding, released), rel=0.06)
    assert float(cosines.std()) > 1.2 * coding.size**-0.5
    assert found.null > coding.size**-0.5
    assert found.epsilon_at_least < found.epsilon_accounted


def test_canaries_take_part_in_the_rounds_that_the_run_has_made(run_folder, tmp_path):
    """A run that had ended early was audited over all its rounds, and claimed more than it was charged."""
    run = run_folder("run", wire(noise_multiplier=1.0), "--federation.rounds=3")
    whole = run_audit([run], tmp_path / "whole", Attack(1), images=0, canaries=60)["canaries"]["run"]
    (run / "metrics.csv").write_text("round,Local-T\n1,0.5\n2,0.6\n")
    made = run_audit([run], tmp_path / "made", Attack(1), images=0, canaries=60)["canaries"]["run"]
    assert (whole["rounds"], made["rounds"]) == (3, 2)
    assert made["epsilon_accounted"] < whole["epsilon_accounted"]


SEED_OF_AN_EMPTY_ROUND = 8


@pytest.mark.parametrize("method", ["FedProto", "FedGH", "FedCPD"])
def test_canaries_are_laid_out_as_what_clients_send(run_folder, method):
    """They were as the weights that they begin with, of which some methods send none."""
    own = [f"--method={method}"] + (["--method.gamma=0"] if method == "FedCPD" else [])
    found = audit_canaries(experiment(run_folder("run", *own, wire(where="client"))), 60, lambda _: None)
    assert found.dimensions > 10 * 32
    assert 0.2 < found.epsilon_at_least < found.epsilon_accounted
    late = [*own, wire(), "--federation.sampling=poisson", "--federation.participation=0.2", "--federation.rounds=4"]
    made = experiment(run_folder("late", *late, f"--seed={SEED_OF_AN_EMPTY_ROUND}"))
    found = audit_canaries(made, 60, lambda _: None)
    assert made.loop.calendar.participants(1) == []  # and somebody to later ones
    assert found.dimensions > 10 * 32
    assert found.epsilon_at_least < found.epsilon_accounted


def test_canaries_need_somebody_who_takes_part(run_folder):
    nobody = ["--federation.sampling=poisson", "--federation.participation=0.001"]
    for where in ("server", "client"):
        with pytest.raises(ConfigError, match=r"audit --canaries: nobody takes part in any round"):
            audit_canaries(experiment(run_folder(where, wire(where=where), *nobody)), 60, lambda _: None)


def test_more_noise_claims_less(run_folder):
    claims = []
    for z in (0.5, 2.0):
        own = experiment(run_folder(f"z{z}", wire(noise_multiplier=z)))
        claims.append(audit_canaries(own, 60, lambda _: None).epsilon_point)
    assert claims[0] > 2 * claims[1]


@pytest.mark.parametrize(("channels", "shape"), [(1, (4, 5)), (2, (4, 5)), (3, (4, 5, 3)), (5, (4, 5, 3))])
def test_images_of_any_number_of_channels_are_drawn(channels, shape):
    """Two channels ended in a traceback, after the whole attack."""
    assert as_array(torch.rand(channels, 4, 5)).shape == shape
