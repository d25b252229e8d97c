"""What the fork server does once, so that no command has to: all imports, and a command up to its refusal."""

import atexit
import gc
import importlib
import io
import pkgutil
from contextlib import redirect_stderr, suppress
from functools import lru_cache

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import PIL.Image
import sklearn.datasets.data  # noqa: F401
import torch.utils.serialization.config  # noqa: F401
import wandb.sdk.launch  # noqa: F401 - wandb.init imports it, in seconds
from lightning.pytorch.trainer.connectors import callback_connector

import fl_lightning
from fl_lightning import cli, source
from fl_lightning.federation.trainers import make_trainer

for _, name, _ in pkgutil.walk_packages(fl_lightning.__path__, "fl_lightning."):
    source.statements(name)
    if name != "fl_lightning.__main__":
        importlib.import_module(name)
callback_connector._load_external_callbacks = lru_cache(callback_connector._load_external_callbacks)
with suppress(ImportError):  # of the extra `report`
    import vl_convert  # noqa: F401
PIL.Image.init()
# Sources are read and parsed, and the classes of most tests imported, before it is refused.
refused = ["fit", "--config", "quickstart", "--method", "FedRep", "--federation.workers", "0"]
with redirect_stderr(io.StringIO()) as said, suppress(SystemExit):
    cli.main(refused)
assert "federation.workers: must be auto or a number" in said.getvalue(), said.getvalue()
make_trainer({"accelerator": "cpu"})
gc.collect()
gc.freeze()  # what is there by now is never garbage
atexit.register(gc.unfreeze)  # or libraries that count their objects find some left over
