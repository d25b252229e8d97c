"""The two phases of a local fit that many methods have: the head, then the body."""

from __future__ import annotations

from fl_lightning.core.facts import Phase


def head_then_body(head_epochs: int, body_epochs: int | None, head_lr: float | None = None) -> list[Phase]:
    """The head on a frozen body, then the body, with the terms, under the frozen head.

    Args:
        head_epochs: epochs of the first phase.
        body_epochs: epochs of the second one; None takes `federation.local_epochs`.
        head_lr: learning rate of the head; None takes the optimizer's own.
    """
    head = Phase("head", trains=("model.head",), epochs=head_epochs, lr=head_lr)
    return [head, Phase("body", trains=("model.body", "terms"), epochs=body_epochs)]
