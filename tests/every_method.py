"""Every method of the package, found by itself: a new file in `methods/` is tested without being listed."""

import importlib
import inspect
import pkgutil

import fl_lightning.methods
from fl_lightning.core.method import Method

MODULES = sorted(info.name for info in pkgutil.walk_packages(fl_lightning.methods.__path__, "fl_lightning.methods."))


def find_methods():
    """Name -> class."""
    found = {}
    for module in MODULES:
        for name, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if issubclass(kind, Method) and kind.__module__ == module and not inspect.isabstract(kind):
                found[name] = kind
    return found


METHODS = find_methods()
