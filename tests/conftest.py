"""What every process of pytest needs at once; the fixtures, which import torch, are in `shared_fixtures.py`."""

import atexit
import gc
import os

os.environ["FL_LIGHTNING_CHECK_SHAPES"] = "1"  # before anything of the package is imported
gc.disable()  # until all is imported and collected: none of it is garbage


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="record tests/golden anew")


def pytest_configure(config):
    """The fixtures, where tests are run; a process that only hands them out to others starts those at once."""
    is_worker = hasattr(config, "workerinput")
    if is_worker:  # its results are with the process that hands out by then; taking Python apart takes ten seconds more
        atexit.register(os._exit, 0)  # done last: what registers later is done before
    if is_worker or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")


# Files that take long (seconds on one core), which a run on several cores must not leave for the end.
LONG = {
    "methods/test_contract.py": 122,
    "cli/test_resume.py": 45,
    "golden/test_trajectories.py": 45,
    "federation/test_workers.py": 41,
    "federation/test_lone_steps.py": 35,
    "methods/test_precision.py": 33,
    "federation/test_graphs.py": 33,
    "methods/test_composition.py": 29,
    "cli/test_workers.py": 28,
    "federation/test_lanes.py": 25,
    "cli/test_table.py": 26,
    "methods/test_on_a_gpu.py": 23,
    "cli/test_wandb.py": 20,
    "cli/test_fit.py": 19,
    "federation/test_cohort.py": 18,
    "federation/test_schedules.py": 17,
    "federation/test_wire.py": 16,
    "federation/test_privacy.py": 16,
    "federation/test_devices.py": 16,
    "methods/test_drdfl.py": 15,
    "cli/test_report.py": 10,
    "cli/test_commands.py": 14,
    "cli/test_signals.py": 14,
    "docs/test_docs.py": 12,
    "federation/test_peers.py": 11,
    "federation/test_launch.py": 9,
    "methods/test_fedfed.py": 9,
    "methods/test_fedcpd.py": 9,
    "cli/test_heterogeneous_models.py": 9,
    "methods/test_dispfl.py": 8,
    "test_classifier.py": 8,
    "models/test_lightning_module.py": 8,
    "cli/test_tune.py": 8,
    "cli/test_bad_input.py": 8,
}


def pytest_collection_modifyitems(items):
    """The longest files first, each in its own order."""

    def seconds(item):
        return next((time for name, time in LONG.items() if item.path.as_posix().endswith(f"tests/{name}")), 0)

    items.sort(key=seconds, reverse=True)


def pytest_collection_finish():
    """What is there by now stays: collecting garbage need not look at it again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a federation makes so many objects in a blink
    gc.enable()


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        gc.unfreeze()  # or libraries that count their objects find some left over
