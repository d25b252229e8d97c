"""The commands: what each of them is for, and who runs it, by name, so that only a command's own imports are made."""

from __future__ import annotations

from typing import NamedTuple

from fl_lightning.catalog import KINDS


class Command(NamedTuple):
    """One command.

    Args:
        says: what it is for, in a line.
        run: ``module:function``, which takes the words after the command and returns the exit code.
        runs_others: whether it takes the whole command line beside them, as it runs other commands.
    """

    says: str
    run: str
    runs_others: bool = False


COMMANDS = {
    "fit": Command(
        "run a federation: fl-lightning fit --config exp.yaml [--method.init_arg value …]",
        "fl_lightning.config_commands:fit",
    ),
    "evaluate": Command(
        "compute a run's accuracies again from its folder: fl-lightning evaluate runs/quickstart",
        "fl_lightning.run_commands:evaluate",
    ),
    "partition": Command(
        "show who holds what, as a table and a picture: fl-lightning partition --config exp.yaml",
        "fl_lightning.config_commands:partition",
    ),
    "table": Command(
        "run a table of methods, settings and seeds, beside the published one: fl-lightning table FILE --jobs 2",
        "fl_lightning.table.command:table",
        runs_others=True,
    ),
    "report": Command(
        "show runs, or a table with its runs, on one HTML page: fl-lightning report runs/a runs/b | TABLE",
        "fl_lightning.reporting:report",
    ),
    "tune": Command(
        "search hyperparameters on validation parts: fl-lightning tune FILE --jobs 2",
        "fl_lightning.tune.command:tune",
        runs_others=True,
    ),
    "compare": Command(
        "say whether two runs are equal, and where they first differ: fl-lightning compare runs/a runs/b",
        "fl_lightning.run_commands:compare",
    ),
    "dashboard": Command(
        "make the W&B dashboard, or draw it: fl-lightning dashboard --project P | --picture FILE runs/a …",
        "fl_lightning.run_commands:dashboard",
    ),
    "predict": Command(
        "classes of new samples by a run's models: fl-lightning predict runs/a --client 3 DATA",
        "fl_lightning.model_commands:predict",
    ),
    "export": Command(
        "a run's model as ONNX or TorchScript: fl-lightning export runs/a --client 3 --output model.onnx",
        "fl_lightning.model_commands:export",
    ),
    "audit": Command(
        "what runs give away: fl-lightning audit runs/a runs/b --output FOLDER [--canaries 1000]",
        "fl_lightning.run_commands:audit",
    ),
    "list": Command(
        f"what there is: fl-lightning list {'|'.join(KINDS)}",
        "fl_lightning.cli:show_list",
    ),
}

TRUST = "a package of your own that the run's configuration may import; may be given several times"
