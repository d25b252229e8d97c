"""Lightning's own loggers, side by side."""

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fl_lightning.errors import ConfigError
from fl_lightning.federation.loggers import Loggers


def test_two_loggers_of_one_kind_write_into_folders_of_their_own(tmp_path):
    Loggers([CSVLogger(tmp_path), TensorBoardLogger(tmp_path), CSVLogger(tmp_path, name="other")])
    with pytest.raises(ConfigError, match=r"^logger\.2: writes into the folder of logger\.0; give one of them another"):
        Loggers([CSVLogger(tmp_path), TensorBoardLogger(tmp_path), CSVLogger(tmp_path)])
