"""Every block of code in the documentation is run: YAML is resolved, commands are parsed, Python is executed.

A page is one test, in a folder of its own, from its first block to its last: what one block writes the next may read. A
YAML block without method, model and data is laid over the quickstart. A comment before a block, ``<!-- test: … -->``,
says more: ``setup`` also loads the data and builds the clients of a YAML block, ``run`` runs a command in a process of
its own, ``skip, REASON`` does neither.
"""

import inspect
import os
import re
import sys

import pytest
import yaml
from builder import pages
from cli.forked import Running, start_server

import fl_lightning
from docs.blocks import ROOT, blocks_of, commands_of, own_words
from fl_lightning import catalog, cli
from fl_lightning.command_line import CommandLine, flatten
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.parser import OneLineParser, check_options, resolve
from fl_lightning.precheck import check_names
from fl_lightning.table.definition import read_definition
from fl_lightning.trust import Trust, import_name

QUICKSTART = "experiments/quickstart.yaml"
WRITTEN = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
WRITTEN["README.md"] = (ROOT / "README.md").read_text()
MADE = {f"docs/{path}": text for path, text in pages.generated().items() if path not in pages.OUTSIDE}
OTHERS = {"make", "pip", "pytest", "torchrun", "srun", "if", "wandb", "git", "python"}
"""Programs that a shell block may call beside ours."""
OWN = ["config", "print_config", "resume", "overwrite", "quiet", "figure"]
"""Options of `fit` and `partition` that are no part of the configuration."""


class ParsedError(Exception):
    """A command line that its parser has taken."""


class Page:
    """The folder in which a page's blocks are run, one after another."""

    def __init__(self, folder, environment) -> None:
        self.folder = folder
        self.environment = environment
        self.names = {"__name__": "page"}
        self.files = set()

    def check(self, block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.body)
            self.files.add(block.title)
        if block.mark.startswith("skip"):
            assert re.fullmatch(r"skip, \w.+", block.mark), "say why it is not run"
        else:
            getattr(self, f"check_{block.language}")(block)

    def check_text(self, block) -> None:
        """What is printed; nothing to run."""

    def check_python(self, block) -> None:
        compiled = compile(block.body, block.title or "page", "exec")
        if not block.title:  # a file is imported by what names it
            exec(compiled, self.names)

    def check_yaml(self, block) -> None:
        content = yaml.safe_load(block.body)
        if "rows" in content:
            path = self.folder / (block.title or "table.yaml")
            path.write_text(block.body)
            read_definition(path)
            return
        path = self.folder / (block.title or "block.yaml")
        path.write_text(block.body)
        whole = {"method", "model", "data"} <= content.keys() and "dataset" in content["data"]
        config = resolved([*([] if whole else ["--config", QUICKSTART]), "--config", str(path)])
        if block.mark == "setup":
            BuiltExperiment(config).setup()

    def check_bash(self, block) -> None:
        for words in commands_of(block.body):
            own = own_words(words)
            if own is None:
                assert words[0] in OTHERS, words
                if words[0] == "make":
                    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
            elif block.mark == "run":
                code, out, err = Running(own, self.folder, self.environment, self.folder.parent / "out").result()
                assert code == 0, err + out
            else:
                parse(own)


def parse(words) -> None:
    """Take a command line as far as it can be taken without running it."""
    command, *rest = words
    assert command in cli.COMMANDS, command
    if command in ("fit", "partition"):
        if "--resume" not in rest or "--config" in rest:  # else the configuration is the run's own
            resolved(rest)
    elif command == "list":
        assert rest[0] in catalog.KINDS
    else:
        with pytest.raises(ParsedError):
            cli._dispatch(words)
    if command == "table":
        read_definition(pages.Path(rest[0]))


def resolved(argv):
    given = CommandLine(argv)
    check_options(given.words, OWN)
    check_names(given)
    return resolve(given.tree, Trust(own=True))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    start_server()
    return {
        "FL_LIGHTNING_CACHE": str(tmp_path_factory.mktemp("docs-cache")),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


@pytest.fixture
def page(tmp_path, monkeypatch, request):
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    taken = OneLineParser.parse_args

    def parse_args(self, args=None, namespace=None):
        taken(self, args, namespace)
        raise ParsedError

    monkeypatch.setattr(OneLineParser, "parse_args", parse_args)
    runs = "test: run" in {**WRITTEN, **MADE}[request.node.callspec.params["name"]]
    yield Page(folder, request.getfixturevalue("environment") if runs else None)
    for name in set(sys.modules) - known:
        if (folder / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:builtin type swigvarlink has no __module__ attribute")
@pytest.mark.parametrize("name", sorted({*WRITTEN, *MADE}))
def test_blocks_of_a_page_are_run(name, page):
    text = pages.filled({**WRITTEN, **MADE}[name], name) if name in MADE else WRITTEN[name]
    for block in blocks_of(text):
        if name == "README.md" and not block.language:
            continue  # tests/cli/test_experiments.py reads its commands
        try:
            page.check(block)
        except BaseException as error:
            if hasattr(error, "add_note"):
                error.add_note(f"{name}, line {block.line}")
            raise
    for file in page.files:
        if file.endswith(".py"):
            assert file.removesuffix(".py") in sys.modules or "test: run" in text, f"nothing imports {file}"


# --- links ----------------------------------------------------------------------------------------------------------


def anchors(text):
    """Of a page's headings, as mkdocs makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", head)).strip().lower() for head in heads]
    return {re.sub(r"[-\s]+", "-", head) for head in plain}


def links_of(text):
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)) if "://" not in link]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_links_of_a_page_lead_somewhere_in_the_repository(name):
    for target in links_of(WRITTEN[name]):
        path, _, anchor = target.partition("#")
        found = ((ROOT / name).parent / path).resolve().relative_to(ROOT).as_posix() if path else name
        assert found in MADE or (ROOT / found).is_file(), target
        if anchor:
            text = MADE.get(found) or pages.filled((ROOT / found).read_text(), found.removeprefix("docs/"))
            assert anchor in anchors(text), target


def test_links_of_the_site_stay_in_it():
    """mkdocs says nothing of a link that leaves the site upwards."""
    site = {name.removeprefix("docs/"): text for name, text in WRITTEN.items() if name != "README.md"}
    site |= pages.generated()
    known = {*site, *(f"pictures/{path.name}" for path in (ROOT / pages.PICTURES).iterdir())}
    for name, text in site.items():
        for target in links_of(pages.filled(text, name)):
            path = target.partition("#")[0]
            found = os.path.normpath(f"{os.path.dirname(name)}/{path}".lstrip("/")) if path else name
            assert found in known, (name, target)


# --- what must be there ---------------------------------------------------------------------------------------------


def test_readme_is_short():
    assert (ROOT / "README.md").stat().st_size < 8000


def test_every_command_is_named():
    shown = re.findall(r"^fl-lightning (\w+)", WRITTEN["docs/guides/configuration.md"], re.MULTILINE)
    assert set(cli.COMMANDS) <= set(shown)


def test_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert citation["version"] == fl_lightning.__version__ == version


def test_every_page_is_in_the_navigation():
    content = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w/]+\.md", str(content["nav"]) + str(pages.navigation())))
    assert {name.removeprefix("docs/") for name in WRITTEN if name != "README.md"} | set(pages.generated()) == named


def test_every_method_has_its_page_its_row_and_its_equation():
    for entry in catalog.entries("methods"):
        text = MADE[f"docs/methods/{entry.name.lower()}.md"]
        for heading in ("Equation", "What travels", "How to run it", "Options", "What was measured here"):
            assert f"## {heading}\n" in text, (entry.name, heading)
        assert "<svg" in text, entry.name
        assert entry.name in pages.summary_rows(), entry.name
    assert set(pages.summary_rows()) == {entry.name for entry in catalog.entries("methods")}


def test_a_method_without_a_row_and_a_curve_has_a_page(monkeypatch):
    entry = next(entry for entry in catalog.entries("methods") if entry.name == "Ditto")
    monkeypatch.setattr(pages, "summary_rows", dict)
    monkeypatch.setattr(pages.curve, "golden", lambda name: None)
    monkeypatch.setattr(pages, "compared", lambda name: "")
    text = pages.method_page(entry)
    assert "Nothing yet." in text
    assert "| `weight` | float | `1.0` |" in text


def test_a_new_kind_of_classes_has_a_page(monkeypatch):
    written = "<!-- catalog: terms -->"
    monkeypatch.setattr(pages.Path, "read_text", lambda path, encoding=None: written)
    assert ("filters", "# Filters") in pages.unlisted()
    assert not {"terms", "methods"} & {kind for kind, _ in pages.unlisted()}
    entries = pages.navigation()["generated: kinds"]
    assert {"Server optimizers": "reference/server_optimizers.md"} in entries


def test_lists_name_every_class():
    for kind, name in (("datasets", "datasets"), ("partitions", "partitions"), ("shifts", "partitions")):
        text = pages.filled(WRITTEN[f"docs/reference/{name}.md"], "reference")
        classes = [entry for entry in catalog.entries(kind) if not inspect.isabstract(import_name(entry.class_path))]
        assert all(f"## {entry.name}\n" in text for entry in classes)
    text = pages.filled(WRITTEN["docs/reference/options.md"], "reference")
    assert "| `federation.checkpoint.seconds` |" in text
    assert "| `data.batch_size` | int | `10` | samples in a mini-batch. |" in text


def test_options_have_the_defaults_of_a_run_that_says_nothing_of_them():
    """A client's fit was said to take all devices, as in Lightning."""
    text = pages.filled(WRITTEN["docs/reference/options.md"], "reference")
    said = dict(re.findall(r"^\| `(\S+)` \| .*? \| `([^`]*)` \| ", text, re.MULTILINE))
    config = resolved(["--method", "FedAvg", "--model", "MLP", "--data.dataset", "Digits", "--data.partition", "IID"])
    meant = dict(flatten({section: config[section] for section in ("data", "federation", "trainer")}))
    shared = said.keys() & meant.keys()
    assert {"trainer.devices", "federation.rounds", "data.batch_size"} <= shared
    assert {key: yaml.safe_load(said[key]) for key in shared} == {key: meant[key] for key in shared}
