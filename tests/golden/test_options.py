"""A new option of a class that is there must not make runs and tables of earlier versions other runs.

What is None is no part of what makes a run this run (`identity.py`). An option whose default is something else is: no
earlier run could go on, and every cell of a table that names the class would be run again. So a new one has None where
it means "as before". `pytest tests/golden --rewrite-golden` records anew; that runs cannot go on then needs a line in
CHANGELOG.md.
"""

import json
from pathlib import Path

from fl_lightning.catalog import GROUPS, KINDS, entries
from fl_lightning.source import UnreadableError
from fl_lightning.static import load, parameters

RECORDED = Path(__file__).parent / "options.json"


def told():
    """Class -> its options that a run's identity has, whatever the configuration says."""
    paths = [entry.class_path for kind in KINDS for entry in entries(kind)] + list(GROUPS.values())
    found = {}
    for path in sorted(set(paths)):
        try:
            options = parameters(load(path))
        except UnreadableError:
            continue
        name = path.rpartition(".")[2]
        found[name] = sorted(option for option, (_, default, _) in options.items() if default is not None)
    return found


def test_new_options_are_none_by_default(request):
    here = told()
    if request.config.getoption("--rewrite-golden"):
        RECORDED.write_text(json.dumps(here, indent=1, sort_keys=True) + "\n")
    recorded = json.loads(RECORDED.read_text())
    assert len(here) > 100
    new = {name: sorted(set(own) - set(recorded[name])) for name, own in here.items() if name in recorded}
    assert {name: options for name, options in new.items() if options} == {}
