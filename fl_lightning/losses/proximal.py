"""Holding local weights near the ones that were received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020,
the local objective h_k(w; w^t) = F_k(w) + μ/2 ‖w − w^t‖². Checked against the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host
    from fl_lightning.core.message import Message


@checked
def proximal_loss(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Half the squared distance of weights to their anchors, ½ Σ_k ‖θ_k − w_k‖².

    A sum over all elements of all tensors: no mean and no root. The gradient is θ − w.

    Args:
        parameters: tensors of any shapes.
        anchors: w, tensors of the same shapes in the same order; constants.

    Returns:
        Scalar, float32.

    >>> round(float(proximal_loss([torch.tensor([0.1, 0.2])], [torch.zeros(2)])), 4)
    0.025
    """
    squares = [
        F.mse_loss(widened(own), widened(anchor.detach()), reduction="sum")
        for own, anchor in zip(parameters, anchors, strict=True)
    ]
    return 0.5 * torch.stack(squares).sum() if squares else torch.zeros(())


class Proximal(Term):
    """Pull the weights towards the ones that came in with the last receive (FedProx).

    What is held is what the client exchanges of its model: all trainable parameters of a shared model, head and
    batch-norm scales among them, buffers not; the body alone where heads are private (where all is, it is refused).
    The first step of a round does not feel the term. As a part of the loss it reaches momentum and Adam's moments.

    Args:
        weight: μ, >= 0.
    """

    paper = "Li et al., MLSys 2020"
    sees = "weights"

    @override
    def setup(self, host: Host) -> None:
        if not self.weight:
            return
        owners = dict(host.named_modules())
        self.names = [
            name
            for name, parameter in host.named_parameters()
            if name.startswith("model.") and parameter.requires_grad
            if host.is_shared(name, owners[name.rpartition(".")[0]])
        ]
        rule = f"Proximal holds what is shared of the model; {type(host).__name__} shares nothing of it: leave it out"
        require(bool(self.names), "method.extra_terms", rule)
        # A phase that trains none of them leaves the term out.
        self.reaches = tuple(self.names)
        for index, name in enumerate(self.names):
            like = torch.zeros_like(host.get_parameter(name).detach())
            self.register_buffer(f"anchor_{index}", like, persistent=False)

    @torch.no_grad()
    @override
    def receive(self, host: Host, message: Message) -> None:
        self._held = [host.get_parameter(name) for name in self.names]
        for index, parameter in enumerate(self._held):
            self.get_buffer(f"anchor_{index}").copy_(parameter)

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        anchors = [self.get_buffer(f"anchor_{index}") for index in range(len(self.names))]
        return proximal_loss(self._held, anchors)
