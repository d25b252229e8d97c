"""fl_lightning: heterogeneous and personalised federated learning on PyTorch Lightning."""

__version__ = "0.2.0"
