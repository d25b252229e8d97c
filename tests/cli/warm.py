"""What the fork server does once, so that no command has to do it again: all imports, and one parser and Trainer."""

import atexit
import gc

import matplotlib.pyplot  # noqa: F401
import sklearn.datasets  # noqa: F401
import wandb.sdk.launch  # noqa: F401 - wandb.init imports it, in seconds

import fl_lightning.experiment
import fl_lightning.report.console
import fl_lightning.report.figures
import fl_lightning.report.live
import fl_lightning.report.wandb  # noqa: F401
from fl_lightning.federation.trainers import make_trainer
from fl_lightning.parser import resolve
from fl_lightning.trust import Trust

named = {"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}}
resolve(named, Trust())
make_trainer({"accelerator": "cpu"})
gc.collect()
gc.freeze()  # what is there by now is never garbage
atexit.register(gc.unfreeze)  # or libraries that count their objects find some left over
