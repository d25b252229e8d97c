"""The name of the W&B logger, known without importing it."""

from __future__ import annotations

CLASS_PATH = "fl_lightning.report.wandb.WandbLogger"


def takes_place_of(name: str) -> bool:
    """Whether `WandbLogger` is meant by a name: it stands in for Lightning's own, too."""
    package, _, last = name.rpartition(".")
    lightning = package.startswith(("lightning.pytorch.loggers", "pytorch_lightning.loggers"))
    return name == "wandb" or (last == "WandbLogger" and (not package or lightning))
