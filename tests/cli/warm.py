"""What the fork server does once, so that no command has to do it again: all imports, and one parser and Trainer."""

import atexit
import gc
from contextlib import suppress

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import PIL.Image
import sklearn.datasets.data  # noqa: F401
import torch.utils.serialization.config  # noqa: F401
import wandb.sdk.launch  # noqa: F401 - wandb.init imports it, in seconds

import fl_lightning.core.phases
import fl_lightning.experiment
import fl_lightning.federation.remarks
import fl_lightning.report.console
import fl_lightning.report.figures
import fl_lightning.report.live
import fl_lightning.report.partition_figures
import fl_lightning.report.picture
import fl_lightning.report.wandb
import fl_lightning.reporting  # noqa: F401
from fl_lightning.federation.trainers import make_trainer
from fl_lightning.parser import resolve
from fl_lightning.trust import Trust

with suppress(ImportError):  # of the extra `report`
    import vl_convert  # noqa: F401
PIL.Image.init()
named = {"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}}
resolve(named, Trust())
make_trainer({"accelerator": "cpu"})
gc.collect()
gc.freeze()  # what is there by now is never garbage
atexit.register(gc.unfreeze)  # or libraries that count their objects find some left over
