"""Pages that come from the sources: a page a method, lists of classes, every option, and files from outside docs/."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from builder import curve, notebook
from builder.docstrings import is_equation, markdown, of_class, of_module
from builder.options import options, shown, table
from fl_lightning import catalog
from fl_lightning.explained import trainer_flags
from fl_lightning.trust import import_name

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "experiments/RESULTS.md",
    "experiments/drdfl/results/README.md",
    "experiments/fedcpd/README.md",
    "experiments/fedcpd/results/README.md",
    "experiments/fedcpd/results/cifar10.md",
    "experiments/fedcpd/results/fashion_mnist.md",
    "experiments/fedcpd/results/weights.md",
    "experiments/feddw/results/README.md",
    "experiments/niid_bench/results/README.md",
    "experiments/fedproto/results/README.md",
    "experiments/leaderboard/README.md",
)
"""Files of the repository that are pages, too."""
NOTEBOOK = "experiments/notebooks/compare.ipynb"
PICTURES = "experiments/pictures"
_MARK = re.compile(r"^<!-- catalog: (\w+)( below)? -->$", re.MULTILINE)
_OPTIONS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_TEST = re.compile(r"^<!-- test: .*? -->\n", re.MULTILINE | re.DOTALL)
HEADINGS = ("shared", "local fit", "terms beside cross-entropy")


def generated() -> dict[str, str]:
    """Path below docs/ -> Markdown, of every page that no file there holds."""
    found = {f"methods/{entry.name.lower()}.md": method_page(entry) for entry in catalog.entries("methods")}
    found |= {f"api/{name}.md": text for name, text in api_pages()}
    found |= {f"reference/{kind}.md": f"{title}\n\n{catalog_list(kind, 2)}\n" for kind, title in unlisted()}
    found["guides/notebook.md"] = notebook.page(ROOT / NOTEBOOK, NOTEBOOK)
    return found | {path: outside(path) for path in OUTSIDE}


def unlisted() -> list[tuple[str, str]]:
    """Kinds of classes that no page of docs/ lists, each with the heading of its page."""
    written = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    listed = {"methods", *(match[0] for match in _MARK.findall(written))}
    return [(kind, f"# {kind.replace('_', ' ').capitalize()}") for kind in catalog.KINDS if kind not in listed]


def filled(text: str, path: str) -> str:
    """A page as the site shows it: lists filled in, comments for tests taken out, pictures where the site has them."""
    text = _MARK.sub(lambda match: catalog_list(match[1], 3 if match[2] else 2), text)
    text = _OPTIONS.sub(lambda match: option_table(match[1]), text)
    text = _TEST.sub("", text)
    up = "../" * path.count("/")
    for name in OUTSIDE:
        text = text.replace(f"]({up}../{name}", f"]({up}{name}")
    return text.replace(f"]({up}../{PICTURES}/", f"]({up}pictures/")


# --- methods --------------------------------------------------------------------------------------------------------


def method_page(entry: catalog.Entry) -> str:
    """Everything about one method."""
    prose, own = of_module(entry.class_path), of_class(entry.class_path)
    title, _, rest = prose.partition("\n\n")
    summary = re.sub(r"^[\w+\- ()]+: ", "", title.replace("\n", " "))
    paragraphs = own.split("\n\n")
    first = next((n for n, paragraph in enumerate(paragraphs) if is_equation(paragraph)), len(paragraphs))
    does, equation = ("\n\n".join(part) for part in (paragraphs[:first], paragraphs[first:]))
    parts = [f"# {entry.name}", f"*{summary[:1].upper()}{summary[1:]}*", markdown(rest)]
    parts += ["## What it does", markdown(does)]
    if equation:
        parts += ["## Equation", markdown(equation)]
    parts += ["## What travels", travels(entry.name), "## How to run it", how_to_run(entry.name)]
    parts += ["## Options", table(options(import_name(entry.class_path))), "## What was measured here"]
    parts += [measured(entry.name), f"API: [`{entry.class_path}`](../api/methods.md#{entry.class_path})"]
    return "\n\n".join(part for part in parts if part) + "\n"


@lru_cache
def summary_rows() -> dict[str, list[str]]:
    """Method -> the cells of its row in docs/methods/index.md."""
    text = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[(\w+)\]\([^)]*\)[^|]*\|(.*)\|$", text, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def travels(name: str) -> str:
    """What is shared, and how many values that is in the golden federation."""
    lines = []
    if name in summary_rows():
        cells = zip(HEADINGS, summary_rows()[name], strict=False)
        lines = [f"- **{heading}**: {cell}" for heading, cell in cells]
    recorded = curve.golden(name)
    if recorded is not None:
        rounds = curve.rounds_of(recorded)
        sent = [f"{row['uplink_params'] // row['participants']:,}" for row in (rounds[0], rounds[-1])]
        heard = [f"{row['downlink_params'] // row['participants']:,}" for row in (rounds[0], rounds[-1])]
        lines.append(
            f"- **values that a client sends and hears** in the small federation of the picture below: "
            f"{sent[0]} and {heard[0]} in round 1, {sent[1]} and {heard[1]} in round {len(rounds)}"
        )
    return "\n".join(lines)


def how_to_run(name: str) -> str:
    """The quickstart with this method, and the files that are made for it."""
    option = "" if name == "FedCPD" else f" --method {name}"
    text = f"```bash\nfl-lightning fit --config experiments/quickstart.yaml{option}\n```"
    pattern = re.compile(rf"(class_path|method): {name}\b")
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "experiments").rglob("*.yaml"))]
    files = [path for path in names if pattern.search((ROOT / path).read_text(encoding="utf-8"))]
    made = [path for path in files if "/tables/" not in path and not path.endswith("quickstart.yaml")]
    if not made:
        return text
    return text + "\n\nFiles that are made for it:\n\n" + "\n".join(f"- `{path}`" for path in made)


def measured(name: str) -> str:
    """The golden trajectory, and the method's row in the comparison of all methods."""
    parts = []
    recorded = curve.golden(name)
    if recorded is not None:
        title = f"{name}: accuracy over six rounds of the golden federation"
        parts.append(curve.svg(curve.rounds_of(recorded), title))
        parts.append(
            "Six rounds of 4 clients on Digits with the method's defaults (`tests/golden`): the trajectory that every "
            "change of the code must leave as it is. It is a test, no tuned result."
        )
    row = compared(name)
    if row:
        parts.append(
            "FedCPD's FashionMNIST protocol, 20 rounds on a sample of 7,000 images, defaults, one seed; differences "
            "below 2 points say nothing. [All methods, and how](../experiments/fedcpd/README.md)."
        )
        parts.append(row)
    return "\n\n".join(parts) or "Nothing yet."


def compared(name: str) -> str:
    """The method's row of experiments/fedcpd/README.md, with the table's head; empty where it has none."""
    lines = (ROOT / "experiments/fedcpd/README.md").read_text(encoding="utf-8").splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| method |"))
    row = next((line for line in lines[head:] if line.startswith(f"| {name} |")), None)
    return "\n".join([*lines[head : head + 2], row]) if row else ""


# --- lists ----------------------------------------------------------------------------------------------------------


def catalog_list(kind: str, level: int) -> str:
    """Every class of a kind that can be built: what it is, whom to cite, its options."""
    parts = []
    for entry in catalog.entries(kind):
        cls = import_name(entry.class_path)
        if not inspect.isabstract(cls):
            parts += [f"{'#' * level} {entry.name}", markdown(of_class(entry.class_path))]
            parts += [f"Source: {entry.paper}."] if entry.paper else []
            parts.append(table(options(cls)))
    return "\n\n".join(parts)


def option_table(section: str) -> str:
    """The keys of a section of the configuration."""
    if section in catalog.GROUPS:
        return table(options(import_name(catalog.GROUPS[section]), f"{section}."))
    return table(shown(trainer_flags(), "trainer."))


# --- files from outside ---------------------------------------------------------------------------------------------


def outside(path: str) -> str:
    """A file of the repository; what it links to and the site lacks becomes plain text."""
    text = (ROOT / path).read_text(encoding="utf-8")
    folder = (ROOT / path).parent

    def link(match: re.Match[str]) -> str:
        mark, said, full = match.groups()
        target = full.partition("#")[0]
        if "://" in target or not target:
            return match[0]
        name = (folder / target).resolve().relative_to(ROOT).as_posix()
        if name in OUTSIDE:
            return match[0]
        up = "../" * path.count("/")
        if name.startswith("docs/"):
            return f"{mark}[{said}]({up}{full.removeprefix('docs/')})"
        if name.startswith(f"{PICTURES}/"):
            return f"{mark}[{said}]({up}{name.removeprefix('experiments/')})"
        return f"`{name}`"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


# --- API ------------------------------------------------------------------------------------------------------------

FLOORS = {
    "core": "The contract: methods, clients, steps, terms, messages, servers",
    "methods": "Methods",
    "losses": "Losses and terms",
    "models": "Models",
    "data": "Data",
    "federation": "The federation",
    "report": "Reports",
    "table": "Tables",
}


def api_pages() -> Iterator[tuple[str, str]]:
    """A page a floor of the package, and one for what stands at its root."""
    for floor, title in FLOORS.items():
        yield floor, _api(title, sorted((catalog.ROOT / floor).rglob("*.py")))
    yield "root", _api("Configuration and command line", sorted(catalog.ROOT.glob("*.py")))


def _api(title: str, files: list[Path]) -> str:
    modules = [path for path in files if not path.stem.startswith("_")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)]) + "\n"


def navigation() -> dict[str, list[dict[str, str] | str]]:
    """What stands in mkdocs.yml for pages that are made: its words -> their entries."""
    methods = [{entry.name: f"methods/{entry.name.lower()}.md"} for entry in catalog.entries("methods")]
    api = [{title: f"api/{floor}.md"} for floor, title in FLOORS.items()]
    return {
        "generated: methods": ["methods/index.md", *methods],
        "generated: kinds": [{title.removeprefix("# "): f"reference/{kind}.md"} for kind, title in unlisted()],
        "generated: api": [*api, {"Configuration and command line": "api/root.md"}],
    }
