"""Every file of experiments/ can be run, and the README files show the files and commands that exist."""

import inspect
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning import catalog
from fl_lightning.command_line import CommandLine
from fl_lightning.configuration import short_name
from fl_lightning.core.client import ClientModule
from fl_lightning.data.arrays import Arrays
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.parser import resolve
from fl_lightning.precheck import FILLED_IN, check_names
from fl_lightning.trust import Trust, import_name

ROOT = Path(__file__).parents[2]
YAMLS = sorted(path.relative_to(ROOT) for path in (ROOT / "experiments").rglob("*.yaml"))
FILES = [path.as_posix() for path in YAMLS if not {"tables", "tunes"} & {*path.parts}]
"""Configurations; files of tables and of searches have tests of their own (tests/table, tests/tune)."""
COMMAND = re.compile(r"fl-lightning fit ((?:\\\n|[^\n`])+)")
SHAPES = {
    "MNIST": (1, 28, 28),
    "FashionMNIST": (1, 28, 28),
    "EMNIST": (1, 28, 28),
    "CIFAR10": (3, 32, 32),
    "CIFAR100": (3, 32, 32),
    "SVHN": (3, 32, 32),
    "ImageFolder": (3, 32, 32),  # CIFAR-10 in folders
    "Digits": (1, 8, 8),
    "IMDB": (200,),
}
CLASSES = {"EMNIST": 62, "CIFAR100": 100, "IMDB": 2}
OPTIONS = {
    "experiments/fedcpd/fmnist_dirichlet01.yaml": [["--method", name] for name in ("Local", "FedAvg", "FedRep")],
    "experiments/feddw/cifar100_practical.yaml": [
        ["--method", name] for name in ("FedAvg", "FedBABU", "FedUV", "FedProx")
    ],
    "experiments/feddw/cifar100_pathological.yaml": [["--method", "FedAvg"]],
    "experiments/drdfl/cifar10_dirichlet01.yaml": [["--method", "Local"]],
    "experiments/fedproto/mnist.yaml": [["--method", name] for name in ("Local", "FedAvg", "FedRep")],
}
"""What the files' comments say may be added, beyond the commands that they show in full."""


def is_whole(file):
    """Whether a file is an experiment, not something to be laid over one."""
    content = yaml.safe_load((ROOT / file).read_text())
    return {"method", "model", "data"} <= content.keys() and "dataset" in content["data"]


def commands(text):
    """The options of every `fl-lightning fit` that a text shows, without comments and ends of lines."""
    return [re.sub(r"\s#.*", "", re.sub(r"\\\n#?", " ", found)).split() for found in COMMAND.findall(text)]


def shown_in(file):
    """The commands at the top of a file; each is one that a reader copies."""
    return commands((ROOT / file).read_text())


def resolved(argv):
    """What `fit` would run."""
    given = CommandLine(argv)
    check_names(given)
    return resolve(given.tree, Trust())


def without_data(config):
    """The experiment with one made-up sample of the right shape in place of its data set."""
    experiment = BuiltExperiment(config)
    node = config["data"]["dataset"]
    while short_name(node) == "Sample":
        node = node["init_args"]["dataset"]
    dataset, vocabulary = short_name(node), node.get("init_args", {}).get("vocabulary", 0)
    x = torch.zeros((1, *SHAPES[dataset]), dtype=torch.int64 if vocabulary else torch.uint8)
    classes = tuple(map(str, range(CLASSES.get(dataset, 10))))
    experiment.data.arrays = Arrays(x, torch.zeros(1, dtype=torch.int64), 1, classes, vocabulary_size=vocabulary)
    return experiment


def check(argv):
    """Parse everything, and build all that can be built without data: clients, optimizer, federation, exchange."""
    experiment = without_data(resolved(argv))
    for architecture in set(experiment.architecture or [0]):
        client = ClientModule(experiment._make_method(architecture))
        assert client.method.phases()
        experiment._make_optimizer(client.parameters())
    return experiment


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", FILES)
def test_experiment_is_built_as_its_first_lines_say(file):
    """A file that is laid over others shows on which one; so every file is read at least once."""
    shown = shown_in(file)
    assert shown, "the file does not say how to run it"
    for argv in shown:
        assert file in argv
        experiment = check(argv)
        assert experiment.loop.settings.rounds >= 1
        assert experiment.folder.parts[0] == "runs"
    if is_whole(file):
        assert shown[0] == ["--config", file]


@pytest.mark.parametrize(("file", "options"), [(file, options) for file, more in OPTIONS.items() for options in more])
def test_other_methods_take_over_an_experiment(file, options):
    """With their own defaults: no weight of the file's method gets into theirs."""
    method = check(["--config", file, *options]).config["method"]
    parameters = inspect.signature(import_name(method["class_path"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "model"}
    assert method["init_args"] == {name: asdict(own) if is_dataclass(own) else own for name, own in defaults.items()}


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("FedCPD", "mid_channels", "distillation.mid_channels"),
        ("FedCPD", "distillation_reduction", "distillation.reduction"),
        ("FedCPD", "distillation_parameters", "distillation.parameters"),
        ("FedCPD", "alternation", "reading.alternation"),
        ("FedCPD", "temperature", "reading.temperature"),
        ("FedCPD", "weighting", "prototypes.weighting"),
        ("FedDW", "soft_labels_init", "soft_labels.soft_labels_init"),
        ("FedDW", "history", "soft_labels.history"),
        ("FedDW", "bias", "relation.bias"),
        ("FedProto", "collection", "prototypes.collection"),
        ("DRDFL", "kl_weight", "weights.kl_weight"),
        ("DRDFL", "ema", "mixture.ema"),
        ("DRDFL", "predict_from", "decoding.predict_from"),
        ("DRDFL", "personal_size", "latents.personal_size"),
        ("DRDFL", "update_order", "updates.update_order"),
        ("FedFed", "protected_weight", "weights.protected_weight"),
        ("FedCVAE", "cvae_epochs", "epochs.cvae_epochs"),
        ("FedPA", "hidden", "generator.hidden"),
        ("FedPA", "server_lr", "training.server_lr"),
    ],
)
def test_option_that_has_moved_into_a_section_is_named_with_its_new_place(method, old, new):
    with pytest.raises(ConfigError, match=rf"^method\.{old}: has moved, it is {new} of {method} now$"):
        check_names(CommandLine(["--method", method, f"--method.{old}", "1"]))


def test_no_constructor_has_more_than_ten_parameters():
    """Of methods and terms: more of them are sections, which a reader can take in one at a time."""
    for kind in ("methods", "terms"):
        for entry in catalog.entries(kind):
            assert len(inspect.signature(import_name(entry.class_path)).parameters) <= 10, entry.name


@pytest.mark.parametrize("file", FILES)
def test_files_that_an_experiment_names_are_there(file):
    for name in re.findall(r"experiments/[\w/]+\.yaml", (ROOT / file).read_text()):
        assert Path(name) in YAMLS, name


@pytest.mark.parametrize("file", FILES)
def test_experiment_types_nothing_that_follows_from_the_data(file):
    members = {key.rpartition(".")[2] for key, _ in CommandLine(["--config", file]).settings if "." in key}
    assert members.isdisjoint(FILLED_IN)


def test_runs_of_different_files_have_folders_of_their_own():
    folders = [yaml.safe_load((ROOT / file).read_text()).get("output") for file in FILES if is_whole(file)]
    own = [folder for folder in folders if folder not in ("runs", "runs/fedproto/n3_std2")]  # named by data set below
    assert len(set(own)) == len(own)


def test_every_overlay_of_fedproto_suits_every_data_set():
    """Tasks, models and newcomers over each of the three; a list of models in either order."""
    for base in ("mnist", "femnist", "cifar10"):
        first = ["--config", f"experiments/fedproto/{base}.yaml"]
        tasks = ["--config", "experiments/fedproto/tasks/n5_std1.yaml"]
        models = ["--config", f"experiments/fedproto/{base}_models.yaml"]
        for argv in ([*first, *tasks, *models], [*first, *models, *tasks]):
            config = resolved(argv)
            assert len(config["model"]) == (2 if base == "cifar10" else 3)
            assert config["data"]["partition"]["init_args"]["n"] == 5
        assert check([*first, "--config", "experiments/fedproto/new_clients.yaml"]).loop.settings.newcomers.clients == 5


def test_dispfl_renews_masks_over_the_rounds_of_the_run():
    """A length of its own would go on as if a shorter run, small.yaml's, were the paper's 300 rounds."""
    files = ("cifar10_shards4", "methods/dispfl", "small")
    config = resolved([word for file in files for word in ("--config", f"experiments/drdfl/{file}.yaml")])
    assert config["federation"]["rounds"] == 100
    assert config["method"]["init_args"]["anneal_rounds"] is None


@pytest.mark.parametrize("readme", ["README.md", "experiments/README.md"])
def test_readme_names_files_that_exist_and_commands_that_work(readme):
    text = (ROOT / readme).read_text()
    for name in re.findall(r"experiments/[\w/]+\.yaml", text):
        assert Path(name) in YAMLS, name
    for argv in commands(text):
        if argv[:1] == ["--config"] and argv[1].startswith("experiments/"):
            resolved([word for word in argv if word not in ("--overwrite", "--quiet")])


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
def test_page_names_files_that_exist(page):
    """Their commands are checked in tests/docs."""
    for name in re.findall(r"experiments/[\w/]+\.yaml", (ROOT / page).read_text()):
        assert Path(name) in YAMLS, name


def test_readme_of_the_experiments_names_every_file():
    """By its path in the folder; a pattern in braces stands for several."""
    text = (ROOT / "experiments/README.md").read_text()
    named = set()
    for pattern in re.findall(r"`([\w/{},]+\.yaml)`", text):
        head, *rest = re.split(r"\{([^}]*)\}", pattern)
        names = [head]
        for index in range(0, len(rest), 2):
            names = [name + choice + rest[index + 1] for name in names for choice in rest[index].split(",")]
        named |= {f"experiments/{name}" for name in names}
    there = {path.as_posix() for path in YAMLS if path.parent.parent.name != "tunes"}  # what searches chose
    assert sorted(there - named) == []
    assert sorted(named - there) == []


def test_getting_started_shows_the_quickstart_file():
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/start.md").read_text(), flags=re.DOTALL)
    assert yaml.safe_load((ROOT / "experiments/quickstart.yaml").read_text()) in [
        yaml.safe_load(text) for text in shown
    ]


def test_readme_names_pictures_and_targets_that_exist():
    readme = (ROOT / "README.md").read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme):
        assert (ROOT / picture).is_file(), picture
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", readme, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
