"""What the fork server does once, so that no command has to: all imports, and a command up to its refusal."""

import atexit
import gc
import io
from contextlib import redirect_stderr, suppress

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import PIL.Image
import sklearn.datasets.data  # noqa: F401
import torch.utils.serialization.config  # noqa: F401
import wandb.sdk.launch  # noqa: F401 - wandb.init imports it, in seconds

import fl_lightning.core.phases
import fl_lightning.experiment
import fl_lightning.federation.remarks
import fl_lightning.losses.prototype
import fl_lightning.report.console
import fl_lightning.report.figures
import fl_lightning.report.live
import fl_lightning.report.partition_figures
import fl_lightning.report.picture
import fl_lightning.report.wandb
import fl_lightning.reporting  # noqa: F401
from fl_lightning import cli
from fl_lightning.federation.trainers import make_trainer

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
