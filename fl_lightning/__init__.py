"""fl_lightning: heterogeneous and personalised federated learning on PyTorch Lightning.

``Experiment``, ``Run`` and ``load`` are imported when they are first used: importing the package alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.api import Experiment as Experiment
    from fl_lightning.classifier import load as load
    from fl_lightning.errors import ConfigError as ConfigError
    from fl_lightning.run import Run as Run

__version__ = "0.2.0"
__all__ = ["ConfigError", "Experiment", "Run", "__version__", "load"]

_HOMES = {"ConfigError": "errors", "Experiment": "api", "Run": "run", "load": "classifier"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
