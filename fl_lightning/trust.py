"""Which classes a configuration may name, and what is imported for it.

A configuration that one runs is a program that one runs: it may name classes of the user's own. What a run left behind
is data: whoever reads it says which packages beside ours it may import.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning import catalog
from fl_lightning.errors import ConfigError, is_first_process
from fl_lightning.source import UnreadableError
from fl_lightning.terminal import say

OURS = catalog.ROOT.name
KNOWN = (OURS, "lightning", "torch", "torchvision", "torchmetrics")
"""Packages whose modules may always be imported; what they offer is checked before it is called."""
_ANNOUNCED: set[str] = set()
Load = Callable[[str, str], type]
"""From the path of a class and the key that it was given for to the class."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass
class Trust:
    """What the classes of a configuration may come from.

    Args:
        packages: beside `KNOWN`, packages or modules that may be imported.
        own: whether any of the user's own modules may be imported, after a line on stderr that names it.
        announced: modules that have been named there; by default once in a process.
    """

    packages: Sequence[str] = ()
    own: bool = False
    announced: set[str] = field(default_factory=lambda: _ANNOUNCED)

    @classmethod
    def of(cls, given: Trust | str | Sequence[str]) -> Trust:
        """What a caller from Python says: packages, or one of them, or what another object trusts."""
        return given if isinstance(given, Trust) else cls((given,) if isinstance(given, str) else tuple(given))

    def load(self, class_path: str, key: str, bases: Sequence[type], load: Load | None = None) -> type:
        """Import a class that must derive from one of `bases`; nothing of it is called.

        Where the class is ours, it is found in the sources before it is imported; Python's own library is refused by
        its name.

        Args:
            class_path: its full path.
            key: where it was given.
            bases: it must derive from one of them.
            load: what gives the class instead of an import, for packages in `KNOWN`.

        Raises:
            ConfigError: if there is no such class, it is of another kind, or its module is not trusted.
            UnreadableError: if `load` cannot tell without an import.
        """
        module, _, name = class_path.rpartition(".")
        if len(class_path) > 200 or not _PATH.fullmatch(class_path) or "__main__" in class_path:
            raise ConfigError(key, "is not the full path of a class (package.module.Class)", class_path)
        if class_path.partition(".")[0] == OURS and catalog.find(module, name) is None:
            raise ConfigError(key, f"{OURS} has no such class", class_path)
        if load is not None and not is_known(module):
            raise UnreadableError(module)
        self._allow(module, key)
        found = (load or import_name)(class_path, key)
        if not isinstance(found, type) or not issubclass(found, tuple(bases)):
            kind = " or ".join(base.__name__ for base in bases)
            otherwise = [base.otherwise for base in bases if hasattr(base, "otherwise")]
            raise ConfigError(key, "; ".join([f"must be a subclass of {kind}", *otherwise]), class_path)
        return found

    def _allow(self, module: str, key: str) -> None:
        """Refuse a module that may not be imported for a configuration."""
        package = module.partition(".")[0]
        if is_known(module):
            return
        if package in sys.stdlib_module_names:
            raise ConfigError(key, "Python's own library has no class for this key", module)
        given = any(f"{module}.".startswith(f"{trusted}.") for trusted in self.packages)
        if not (self.own or given):
            say_so = f'say --trust {package} (in Python trust="{package}")'
            rule = f"nothing is imported for a run that is read; if you trust its code, {say_so}"
            raise ConfigError(key, rule, module)
        if self.own and not given and module not in self.announced and is_first_process():
            self.announced.add(module)
            say(f"fl-lightning: imports your own module {module} for {key}")
        if os.getcwd() not in sys.path:  # where a user's modules lie; last, so that none there replaces a package
            sys.path.insert(0 if self.own else len(sys.path), os.getcwd())


def import_name(path: str, key: str = "class_path") -> Any:
    """Import what a dotted path names; `key` is where it was given.

    Raises:
        ConfigError: if there is no such module or name in it, or the module fails.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises; a script ends, if it is one
        raise ConfigError(key, f"cannot import {path}: {_said(error, module)}") from error


def _said(error: BaseException, module: str) -> str:
    first = module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == first:
        remedy = "run the command in the folder where it lies, or name that in PYTHONPATH"
        return f"there is no module {first} in {os.getcwd()} nor on Python's path; {remedy}"
    own = isinstance(error, (ImportError, AttributeError))
    return str(error) if own else f"{type(error).__name__}: {error}"


def is_known(path: str) -> bool:
    """Whether a path leads into a package whose modules may always be imported."""
    return path.partition(".")[0] in KNOWN
