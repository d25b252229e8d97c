"""FedBN: FedAvg whose batch-norm layers stay at home.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server, Weighting
from fl_lightning.core.term import Term
from fl_lightning.errors import require_choices
from fl_lightning.models.split import SplitModel


class FedBN(Method):
    """Everything is averaged but the batch-norm layers: their scales, shifts and running statistics are private.

        θ^{t+1} = Σ_i n_i/n θ_i for all layers but batch norm's, which stay θ_i

    The layers are found by type, wherever they stand; public codes look for "bn" in names, and so exchange the three
    of a ResNet's downsampling paths. Group and layer norms are shared. Without batch norm it is FedAvg.

    The server has no batch norm, so there is no Server-T. The paper's figure is `Local-T_received`.

    Args:
        weighting: ``samples`` weighs clients by samples, ``uniform`` all alike (the authors' code).
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Li et al., ICLR 2021"

    def __init__(
        self, model: SplitModel, weighting: Weighting = "samples", extra_terms: list[Term] | None = None
    ) -> None:
        require_choices("method", weighting=(weighting, Weighting))
        super().__init__(model, extra_terms=extra_terms)
        self.weighting = weighting

    @override
    def is_shared(self, name: str, module: nn.Module) -> bool:
        return super().is_shared(name, module) and not isinstance(module, _BatchNorm)

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return Server(initial, weighting=self.weighting)
