"""Constructors that take frozen dataclasses: sections inside a class's arguments."""

import ast
import re
import subprocess
import sys
from enum import Enum
from functools import cache
from pathlib import Path

import pytest
import yaml

from cli.test_bad_input import refused
from fl_lightning import catalog, config_commands
from fl_lightning.building import build
from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.precheck import check_argument, check_names
from fl_lightning.schema import options
from fl_lightning.trust import import_name

MINE = """\
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.proximal import Proximal


@dataclass(frozen=True)
class Fusion:
    levels: int = 2


@dataclass(frozen=True)
class Blend:
    mid_channels: int = 64
    attention: Literal["side", "inline"] = "side"
    fusion: Fusion = Fusion()

    def __post_init__(self):
        require(self.mid_channels >= 1, "method.blend.mid_channels", "must be >= 1", self.mid_channels)


@dataclass(frozen=True)
class Decay:
    rate: float = 0.5

    def __post_init__(self):
        require(self.rate <= 1, "method.extra_terms.decay.rate", "must be <= 1", self.rate)


class Fading(Proximal):
    def __init__(self, weight: float = 0.1, decay: Decay | None = None) -> None:
        assert decay is None or isinstance(decay, Decay)
        super().__init__(weight)


class Blended(Method):
    shared = ("model.body",)

    def __init__(self, model, alpha: float = 1.0, blend: Blend = Blend(), extra_terms: list[Term] | None = None):
        assert isinstance(blend, Blend)
        assert isinstance(blend.fusion, Fusion)
        super().__init__(model, extra_terms=extra_terms)
"""
BLEND = {"mid_channels": 16, "attention": "inline", "fusion": {"levels": 2}}


@pytest.fixture
def place(workplace):
    """`exp.yaml` with a method of the user's own that has options inside options."""
    workplace.draws = False
    workplace.write("mine.py", MINE)
    given = {"alpha": 2.0, "blend": {"mid_channels": 16, "attention": "inline"}}
    workplace.change(method={"class_path": "mine.Blended", "init_args": given}, federation={"rounds": 1})
    return workplace


def set_in(place, **arguments):
    """More arguments of the method in `exp.yaml`."""
    method = yaml.safe_load((place.path / "exp.yaml").read_text())["method"]
    place.change(method={**method, "init_args": {**method["init_args"], **arguments}})


def printed(place, *argv):
    code, out, err = place.call("fit", "--config", "exp.yaml", *argv, "--print_config")
    assert code == 0, err
    return yaml.safe_load(out)["method"]["init_args"]


def test_run_keeps_plain_mappings_and_is_built_from_them_again(place):
    term = {"class_path": "mine.Fading", "init_args": {"decay": {"rate": 0.25}}}
    set_in(place, extra_terms=[term])
    place.fit("--quiet")
    kept = yaml.safe_load((place.run / "config.yaml").read_text())["method"]["init_args"]
    assert kept == {
        "alpha": 2.0,
        "blend": BLEND,
        "extra_terms": [{**term, "init_args": {"weight": 0.1, "decay": {"rate": 0.25}}}],
    }
    assert place.call("evaluate", "runs/run", "--trust", "mine")[0] == 0
    place.fit("--quiet", "--overwrite", config="runs/run/config.yaml")


def test_options_inside_options_are_given_on_the_command_line(place):
    argv = ["--method.blend.mid_channels", "17", "--method.init_args.blend.fusion.levels=3"]
    assert printed(place, *argv)["blend"] == {"mid_channels": 17, "attention": "inline", "fusion": {"levels": 3}}


def test_later_file_changes_one_field_and_leaves_the_others(place):
    place.write("more.yaml", {"method": {"init_args": {"blend": {"mid_channels": 5}}}})
    assert printed(place, "--config", "more.yaml")["blend"] == {**BLEND, "mid_channels": 5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"blend": {"mid_chanels": 3}}, ["method.init_args.blend.mid_chanels:", "did you mean mid_channels?"]),
        ({"blend": {"fusion": {"level": 3}}}, ["method.init_args.blend.fusion.level:", "did you mean levels?"]),
        ({"mid_channels": 3}, ["method.init_args.mid_channels: has moved, it is blend.mid_channels of Blended now"]),
        ({"blend": {"levels": 3}}, ["method.init_args.blend.levels: has moved, it is method.init_args.blend.fusion."]),
        ({"blend": {"mid_channels": "many"}}, ["method.init_args.blend.mid_channels:", "int", "many"]),
        ({"blend": {"mid_channels": 0}}, ["method.init_args.blend.mid_channels: must be >= 1, got 0"]),
        ({"blend": 3}, ["method.init_args.blend: must hold Blend's fields by name, got 3"]),
        (
            {"extra_terms": [{"class_path": "mine.Fading", "init_args": {"rate": 0.1}}]},
            ["method.init_args.extra_terms.0.init_args.rate: has moved, it is decay.rate of Fading now"],
        ),
        (
            {"extra_terms": [{"class_path": "mine.Fading", "init_args": {"decay": {"rate": 2.0}}}]},
            ["method.init_args.extra_terms.0.init_args.decay.rate: must be <= 1, got 2.0"],
        ),
        (
            {"extra_terms": ["Proximal", {"class_path": "Proximal", "init_args": {"wait": 2.0}}]},
            ["method.init_args.extra_terms.1.init_args.wait:", "of Proximal", "(choose from weight)"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_wrong_option_inside_options_is_refused(place, arguments, said):
    set_in(place, **arguments)
    line = refused(place)
    assert [part for part in said if part not in line] == [], line


def test_wrong_option_inside_options_is_refused_on_the_command_line(place):
    assert "method.mid_channels: has moved, it is blend.mid_channels of Blended" in refused(
        place, "--method.mid_channels=1"
    )
    assert "method.blend.mid_chanels: there is no such key" in refused(place, "--method.blend.mid_chanels", "1")
    assert refused(place, "--method.blend", "3") == "method.blend: must hold Blend's fields by name, got 3\n"


def test_terms_named_on_the_command_line_are_checked_and_taken(workplace):
    given = ["--method", "FedAvg", "--method.extra_terms", "[{class_path: Proximal, init_args: {weight: 1e-2}}]"]
    assert printed(workplace, *given)["extra_terms"][0]["init_args"] == {"weight": 0.01}
    wrong = [*given[:3], "[Proximal, Proximol]"]
    assert "method.extra_terms.1: there is no term of that name; did you mean Proximal?" in refused(workplace, *wrong)


def test_key_of_a_section_that_has_moved_is_named_with_its_new_place(workplace):
    line = refused(workplace, "--federation.received", "false")
    assert line == "federation.received: has moved, it is federation.evaluate.received now\n"


def test_options_inside_options_of_the_package_are_known_without_torch(workplace):
    command = (
        "from fl_lightning.cli import main; import sys, atexit; atexit.register(lambda: print('torch' in sys.modules))"
    )
    argv = ["fit", "--config", "exp.yaml", "--federation.evaluate.recieved", "false"]
    done = subprocess.run(
        [sys.executable, "-c", f"{command}; main({argv})"],
        cwd=workplace.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "federation.evaluate.recieved: there is no such key; did you mean received?" in done.stderr
    assert done.stdout == "False\n"


# --- the parts ------------------------------------------------------------------------------------------------------

SOURCE = """\
from dataclasses import dataclass

from fl_lightning.federation.checkpoint import CheckpointPolicy as Saving

@dataclass(frozen=True)
class Options:
    size: int = 1
    saving: Saving | None = None

class Base:
    def __init__(self, model, options: Options = Options(), *, saving: None | Saving = None, weight: float = 1.0): ...

class Thing(Base):
    pass
"""


@pytest.fixture
def things(tmp_path, monkeypatch):
    """The package's sources with one more file, which nobody could import."""
    for name in ("losses/thing.py", "federation/checkpoint.py"):
        path = tmp_path / "fl_lightning" / name
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE if name.startswith("losses") else (catalog.ROOT / name).read_text())
    for name in ("options", "find"):  # caches of its own: a class that is found anew is another class
        monkeypatch.setattr(catalog, name, cache(getattr(catalog, name).__wrapped__))

    def body(module):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        return tuple(ast.parse(file.read_text()).body) if file.is_file() else ()

    monkeypatch.setattr(catalog, "body", body)
    return "fl_lightning.losses.thing"


def test_dataclasses_are_read_from_the_sources(things):
    saving = "fl_lightning.federation.checkpoint.CheckpointPolicy"
    known = {"model": None, "options": f"{things}.Options", "saving": saving, "weight": None}
    assert catalog.options(f"{things}.Thing") == known
    assert catalog.options(f"{things}.Options") == {"size": None, "saving": saving}
    assert "keep" in catalog.options(saving)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("options.sise", "method.options.sise: there is no such key; did you mean size?"),
        ("options.saving.keeep", "method.options.saving.keeep: there is no such key; did you mean keep?"),
        ("size", "method.size: has moved, it is options.size of Thing now"),
        ("weigth", "method.weigth: there is no such key of Thing; did you mean weight?"),
        ("weigth.more", "method.weigth: there is no such key of Thing; did you mean weight?"),
        ("model", "method.model: there is no such key of Thing"),
    ],
)
def test_wrong_key_of_a_class_of_the_package(things, path, said):
    with pytest.raises(ConfigError) as error:
        check_argument(f"method.{path}", path, f"{things}.Thing", catalog.options, " of Thing")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("path", ["options", "options.size", "options.saving.keep", "saving.keep", "weight.any"])
def test_right_key_of_a_class_of_the_package(things, path):
    check_argument(f"method.{path}", path, f"{things}.Thing", catalog.options, " of Thing")


def test_source_and_import_agree_on_every_class():
    paths = [entry.class_path for kind in catalog.KINDS for entry in catalog.entries(kind)]
    for path in (*paths, *catalog.GROUPS.values()):
        read = {name: nested and nested.rpartition(".")[2] for name, nested in catalog.options(path).items()}
        imported = {name: nested and nested.__name__ for name, nested in options(import_name(path)).items()}
        assert read == imported, path


def test_build_takes_a_mapping_for_a_mapping_where_no_dataclass_is_asked_for():
    node = {"class_path": "torch.nn.ParameterDict", "init_args": {"parameters": {"b": 1}}}
    assert dict(build(node, "x")) == {"b": 1}


def test_build_hands_on_what_is_behind_a_constructors_keywords():
    node = {"class_path": "collections.OrderedDict", "init_args": {"a": {"b": 1}}}
    assert build(node, "x") == {"a": {"b": 1}}
    assert build({**node, "dict_kwargs": {"key": 2}}, "x")["key"] == 2


def test_variable_says_an_argument_of_a_class_that_a_file_names(tmp_path, monkeypatch):
    """What a file says wins; another class than the file's takes nothing of it."""
    file = tmp_path / "exp.yaml"
    file.write_text("method: {class_path: DRDFL, init_args: {mixture: {ema: 0.9}}}\n")
    monkeypatch.setenv("FL_LIGHTNING_FIT__METHOD__MIXTURE__LIKELIHOOD_WEIGHT", "0.5")
    monkeypatch.setenv("FL_LIGHTNING_FIT__METHOD__MIXTURE__EMA", "0.1")
    prefix = "FL_LIGHTNING_FIT__"
    given = CommandLine(["--config", str(file)], prefix).tree["method"]
    mixture = {name: float(value) for name, value in given["init_args"]["mixture"].items()}
    assert (given["class_path"], mixture) == ("DRDFL", {"likelihood_weight": 0.5, "ema": 0.9})
    other = CommandLine(["--config", str(file), "--method", "FedAvg"], prefix).tree["method"]
    assert other == {"class_path": "FedAvg"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("FedProx", "fl_lightning.methods.fedprox.FedProx", True),
        ("FedProx", "mine.FedProx", False),
        ("mine.FedProx", "mine.FedProx", True),
        ("mine.FedProx", "yours.FedProx", False),
    ],
)
def test_a_class_of_ones_own_takes_nothing_of_ours_of_its_name(one, other, same):
    """It had the weight that was meant for ours."""
    first = {"method": {"class_path": one, "init_args": {"mu": 5.0}}}
    found = CommandLine([first, "--method", other]).tree["method"]
    assert found == ({"class_path": other, "init_args": {"mu": 5.0}} if same else {"class_path": other})


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        ([], {"lr": 0.01}),
        (["--optimizer", "Adam"], {}),
        (["--optimizer", "SGD"], {"lr": 0.01}),
        (["--optimizer.momentum", "0.5"], {"lr": 0.01, "momentum": "0.5"}),
        (["--optimizer.lr", "0.3", "--optimizer", "Adam"], {"lr": "0.3"}),
        (["--optimizer", "Adam", "--optimizer.weight_decay", "0.1"], {"weight_decay": "0.1"}),
        (["--optimizer", "Adam", "--optimizer", "SGD"], {"lr": 0.01}),
    ],
)
def test_an_optimizer_that_is_named_has_defaults_of_its_own(argv, arguments):
    """Adam had SGD's learning rate, ten times its own."""
    found = CommandLine(argv).tree["optimizer"]
    assert {name: str(value) for name, value in dict(found.get("init_args") or {}).items()} == {
        name: str(value) for name, value in arguments.items()
    }


def test_an_optimizer_of_a_file_that_names_no_class_is_the_usual_one():
    """Adam took over the learning rate that a file gives SGD."""
    usual = {"optimizer": {"init_args": {"lr": 0.3}}}
    assert CommandLine([usual, "--optimizer", "Adam"]).tree["optimizer"] == {"class_path": "Adam"}
    assert CommandLine([usual]).tree["optimizer"]["init_args"] == {"lr": 0.3}
    assert CommandLine([usual, "--optimizer", "SGD"]).tree["optimizer"]["init_args"] == {"lr": 0.3}


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["--method.mu", "0.1", "--method", "FedProx"], {"mu": "0.1"}),
        (["--method.init_args.mu", "0.1", "--method.class_path", "FedProx", "--method.mu", "0.2"], {"mu": "0.2"}),
        (["--method", "Ditto", "--method.mu", "0.1", "--method", "FedProx"], {}),
        (["--method.mu", "0.1", {"method": "FedProx"}], {}),
        (["--method.mu", "0.1", {"method": {"init_args": {"beta": 2}}}, "--method", "FedProx"], {}),
    ],
)
def test_options_before_their_class_are_said_of_it(argv, arguments):
    """They were dropped in silence, as what a file says of its own class is."""
    method = CommandLine([{"method": {"class_path": "FedCPD", "init_args": {"beta": 1}}}, *argv]).tree["method"]
    assert method == {"class_path": "FedProx", **({"init_args": arguments} if arguments else {})}


@pytest.mark.parametrize(
    ("argv", "idle"),
    [
        (["--optimizer.lr", "0.3", {"optimizer": {"init_args": {"lr": 0.1}}}], ["optimizer.lr"]),
        (["--method", "FedProx", "--method.mu", "1", {"method": "FedAvg"}], ["method", "method.mu"]),
        (["--data.batch_size", "8", {"optimizer": {"init_args": {"lr": 0.1}}}], []),
        ([{"optimizer": {"init_args": {"lr": 0.1}}}, "--optimizer.lr", "0.3"], []),
        (["--federation.rounds", "3", {"seed": 1}, "--federation.rounds", "4"], []),
    ],
)
def test_options_that_a_file_behind_them_overrules_are_named(argv, idle):
    assert CommandLine(argv).idle() == idle


def test_fit_says_what_changes_nothing(tmp_path, monkeypatch, capsys):
    """It ran with the file's rate, and said nothing."""
    file = tmp_path / "own.yaml"
    file.write_text("optimizer: {class_path: SGD, init_args: {lr: 0.1}}")
    monkeypatch.setattr(config_commands, "_start", lambda *arguments: 0)
    assert config_commands.fit(["--config", "quickstart", "--optimizer.lr", "0.3", "--config", str(file)]) == 0
    said = "--optimizer.lr changes nothing: a --config behind it says otherwise; give options behind files"
    assert capsys.readouterr().err == f"fl-lightning: note: {said}\n"


def test_options_before_a_list_of_models_would_change_all_of_them():
    with pytest.raises(ConfigError, match=r"model\.hidden: `model` is a list here"):
        CommandLine([{"model": "CNN"}, "--model.hidden", "3", "--model", "[MLP, CNN]"])


QUANTIZE = {"class_path": "Quantize", "init_args": {"bits": "8"}}


@pytest.mark.parametrize("given", ["Quantize", "{class_path: Quantize, init_args: {bits: '8'}}"])
def test_a_filter_is_added_as_callbacks_are(given):
    """A filter with arguments was refused: the wire is a list, it said."""
    line = CommandLine(["--federation.wire+", "TopK", "--federation.wire+", given])
    check_names(line)
    assert line.tree["federation"]["wire"] == ["TopK", QUANTIZE if "{" in given else "Quantize"]
    with pytest.raises(ConfigError, match=r"federation\.wire\.0\.init_args\.bts: there is no such key of Quantize"):
        check_names(CommandLine(["--federation.wire+", "{class_path: Quantize, init_args: {bts: 8}}"]))


@pytest.mark.parametrize(
    ("before", "added", "key"),
    [
        ({"federation": {"wire": ["Quantize"]}}, "--federation.wire+", "federation.wire.1"),
        ({"federation": {"wire": ["Quantize", "Quantize"]}}, "--federation.wire+", "federation.wire.2"),
        ({"model": [{"class_path": "MLP"}, "MLP"]}, "--model+", "model.2"),
        ({"model": {"class_path": "MLP"}}, "--model+", "model.1"),
        ({"method": "FedAvg", "method.extra_terms": ["Proximal"]}, "--method.extra_terms+", "method.extra_terms.1"),
    ],
)
def test_what_is_added_to_a_list_counts_on_from_the_entries_before_it(before, added, key):
    """It went by the place 0, so that an option of the first entry was refused as one of the added class."""
    keyed = [f"--{name}={value}" for name, value in before.items() if "." in name]
    file = {name: value for name, value in before.items() if "." not in name}
    kind = "CNN" if "model" in added else "ModelContrast" if "terms" in added else "TopK"
    line = CommandLine([file, *keyed, added, f"{{class_path: {kind}, init_args: {{bts: 8}}}}"])
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}\.init_args\.bts: there is no such key"):
        check_names(line)


def test_an_option_of_the_first_filter_is_its_own_where_one_was_added():
    file = {"federation": {"wire": ["Quantize"]}}
    line = CommandLine([file, "--federation.wire+", "TopK", "--federation.wire.0.bits", "4"])
    check_names(line)
    assert line.tree["federation"]["wire"] == [{"class_path": "Quantize", "init_args": {"bits": "4"}}, "TopK"]


def test_a_raised_digit_is_no_place_in_a_list():
    """It ended in a traceback."""
    line = CommandLine(["--trainer.callbacks=[Timer]", "--trainer.callbacks.²=1"])
    assert line.tree["trainer"]["callbacks"] == [{"class_path": "Timer", "init_args": {"²": "1"}}]


def test_a_model_is_added_to_those_before_it():
    """It took their place."""
    line = CommandLine([{"model": {"class_path": "MLP", "init_args": {"hidden": [8]}}}, "--model+", "CNN"])
    assert line.tree["model"] == [{"class_path": "MLP", "init_args": {"hidden": [8]}}, "CNN"]
    with pytest.raises(ConfigError, match=r"model\.hidden: `model` is a list here"):
        CommandLine(["--model", "MLP", "--model+", "CNN", "--model.hidden", "[3]"])


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        (["--federation.failures.schedule", "{}"], {"schedule": {}, "clients": [7]}),
        (["--federation.failures", "{}"], {}),
        (["--federation.failures.schedule", "{}", "--federation.failures.schedule", "{2: [1]}"], {"2": [1]}),
        ([{"federation": {"failures": {"schedule": {}}}}], {"schedule": {"3": [0]}, "clients": [7]}),
    ],
)
def test_empty_braces_of_an_option_take_back_what_a_file_says(argv, left):
    """They said nothing, and clients of a file's schedule were out all the same; a later file's do say nothing."""
    file = {"federation": {"failures": {"schedule": {"3": [0]}, "clients": [7]}}}
    found = CommandLine([file, *argv]).tree["federation"]["failures"]
    assert found == left or {str(key): value for key, value in found["schedule"].items()} == left


class Colour(Enum):
    RED = "red"
    BLUE = 2


class Asks(dict):
    """Says what it was given."""

    def __init__(
        self,
        colour: Colour = Colour.RED,
        colours: list[Colour] | None = None,
        pair: tuple[int, Colour] = (1, Colour.RED),
        sizes: tuple[int, ...] = (),
        names: set[str] = frozenset(),
        path: Path | None = None,
        text: str | Path = "",
        by_name: dict[str, Path] | None = None,
    ) -> None:
        super().__init__({name: value for name, value in locals().items() if name not in ("self", "__class__")})


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"colour": "red"}, {"colour": Colour.RED}),
        ({"colours": ["red", 2]}, {"colours": [Colour.RED, Colour.BLUE]}),
        ({"pair": [3, 2], "sizes": [1, 2]}, {"pair": (3, Colour.BLUE), "sizes": (1, 2)}),
        ({"names": ["a", "b"], "path": "x", "text": "y"}, {"names": {"a", "b"}, "path": Path("x"), "text": "y"}),
        ({"by_name": {"a": "x"}}, {"by_name": {"a": Path("x")}}),
        ({"colours": None, "path": None}, {"colours": None, "path": None}),
    ],
)
def test_a_constructor_is_given_what_its_annotation_says(said, wanted):
    made = build({"class_path": f"{__name__}.Asks", "init_args": said}, "x")
    given = {name: made[name] for name in wanted}
    assert given == wanted
    assert [type(value) for value in given.values()] == [type(value) for value in wanted.values()]
