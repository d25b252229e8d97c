"""Keeping the coordinates of embeddings uncorrelated, so that they do not collapse to few dimensions.

Shi, Liang, Zhang, Tan, Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning" (FedDecorr), ICLR 2023, equation 8. The authors' code leaves out the diagonal and normalises otherwise; both
forms are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host

Form = Literal["code", "paper"]
SMALLEST_VARIANCE = 1e-8


@checked
def decorrelation_loss(z: Float[Tensor, "B D"], form: Form = "code") -> Float[Tensor, ""]:
    """How strongly the coordinates of embeddings are correlated over the batch.

    With r [D, D] the correlation matrix: ``paper`` is 1/D² ‖r‖²_F, at least 1/D; ``code`` the mean of ((B − 1) r_jk)²
    over j ≠ k, over B, which is about B times as much and 0 for uncorrelated coordinates.

    Args:
        z: [B, D] embeddings.
        form: ``code`` or ``paper``.

    Returns:
        Scalar, float32; 0 (attached to the graph) for a batch of one or a single coordinate, which have no correlation.

    >>> z = Tensor([[1., 1.], [-1., -1.], [1., -1.], [-1., 1.]])
    >>> float(decorrelation_loss(z)), round(float(decorrelation_loss(z, "paper")), 4)
    (0.0, 0.5)
    """
    size, coordinates = z.shape
    wide = widened(z)
    if size < 2 or coordinates < 2:
        return wide.sum() * 0
    centred = wide - wide.mean(0)
    scaled = centred / (centred.square().sum(0) / (size - 1) + SMALLEST_VARIANCE).sqrt()
    products = scaled.t() @ scaled  # (B − 1) r
    squares = products.square()
    if form == "paper":
        return squares.sum() / ((size - 1) * coordinates) ** 2
    return (squares.sum() - squares.diagonal().sum()) / (coordinates * (coordinates - 1) * size)


class Decorrelation(Term):
    """Spread embeddings over all dimensions of their space (FedDecorr); any method takes it as an extra term.

    Args:
        weight: β, >= 0; the paper's 0.1 belongs to the form ``code``.
        form: ``code`` or ``paper``, see `decorrelation_loss`.
    """

    paper = "Shi et al., ICLR 2023"
    reaches = ("model.body",)

    def __init__(self, weight: float = 0.1, form: Form = "code") -> None:
        super().__init__(weight)
        require_choices("Decorrelation", form=(form, Form))
        self.form = form

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return decorrelation_loss(out.z, self.form)
