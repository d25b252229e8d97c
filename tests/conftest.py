"""What every process of pytest needs at once; the fixtures, which import torch, are in `shared_fixtures.py`."""

import gc
import os

os.environ["FL_LIGHTNING_CHECK_SHAPES"] = "1"  # before anything of the package is imported
gc.disable()  # until all is imported and collected: none of it is garbage


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="record tests/golden anew")


def pytest_configure(config):
    """The fixtures, where tests are run; a process that only hands them out to others starts those at once."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")


# Files that take long (seconds on one core), which a run on several cores must not leave for the end.
LONG = {
    "methods/test_contract.py": 100,
    "golden/test_trajectories.py": 41,
    "federation/test_workers.py": 38,
    "methods/test_composition.py": 28,
    "cli/test_workers.py": 28,
    "methods/test_precision.py": 27,
    "cli/test_table.py": 25,
    "cli/test_resume.py": 21,
    "cli/test_bad_input.py": 20,
    "cli/test_wandb.py": 19,
    "cli/test_fit.py": 18,
    "cli/test_report.py": 17,
    "federation/test_cohort.py": 16,
    "federation/test_wire.py": 15,
    "methods/test_drdfl.py": 15,
    "cli/test_signals.py": 14,
    "federation/test_privacy.py": 13,
    "cli/test_commands.py": 12,
    "federation/test_launch.py": 10,
    "federation/test_schedules.py": 9,
    "federation/test_peers.py": 8,
    "federation/test_devices.py": 8,
}


def pytest_collection_modifyitems(items):
    """The longest files first, each in its own order."""

    def seconds(item):
        return next((time for name, time in LONG.items() if item.path.as_posix().endswith(f"tests/{name}")), 0)

    items.sort(key=seconds, reverse=True)


def pytest_collection_finish():
    """What is there by now stays: collecting garbage need not look at it again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries that count their objects find some left over
