"""What the two phases of a local fit may be; read without torch, so that a mistake is answered at once."""

from __future__ import annotations

from fl_lightning.errors import require


def check_alternation(head_epochs: int, body_epochs: int | None, head_lr: float | None = None) -> None:
    """Refuse what the two phases cannot be.

    Args:
        head_epochs: >= 0.
        body_epochs: >= 0, or None for `federation.local_epochs`.
        head_lr: > 0, or None for the optimizer's own.

    Raises:
        ConfigError: naming the method's option of that name.
    """
    require(head_epochs >= 0, "method.head_epochs", "must be >= 0", head_epochs)
    require(body_epochs is None or body_epochs >= 0, "method.body_epochs", "must be >= 0 or null", body_epochs)
    require(head_lr is None or head_lr > 0, "method.head_lr", "must be > 0 or null", head_lr)
