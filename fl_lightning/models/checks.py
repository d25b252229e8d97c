"""What a model asks of its input shape and hyperparameters, checked before a layer is built."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.errors import require


def require_image(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width), or say that `model` takes images."""
    shape = tuple(input_shape)
    fits = len(shape) == 3 and all(size >= 1 for size in shape)
    require(fits, "model", f"{model} takes images of shape (channels, height, width)", shape)
    channels, height, width = shape
    return channels, height, width


def require_tokens(model: str, input_shape: tuple[int, ...]) -> int:
    """Return the length L of a token sequence, or say that `model` takes tokens."""
    shape = tuple(input_shape)
    fits = len(shape) == 1 and shape[0] >= 1
    require(fits, "model", f"{model} takes token sequences of shape (length,)", shape)
    return shape[0]


def require_sizes(parameter: str, sizes: Sequence[int], count: int | None = None) -> None:
    """Every size must be at least 1, and there must be `count` of them where `count` is given."""
    number = "sizes" if count is None else f"{count} sizes"
    fits = all(size >= 1 for size in sizes) and (count is None or len(sizes) == count)
    require(fits, f"model.{parameter}", f"must be a list of {number} >= 1", list(sizes))


def require_size(parameter: str, size: int) -> None:
    """A single size must be at least 1."""
    require(size >= 1, f"model.{parameter}", "must be >= 1", size)


def require_dropout(parameter: str, probability: float) -> None:
    """A dropout probability must leave something over."""
    require(0.0 <= probability < 1.0, f"model.{parameter}", "must be >= 0 and < 1 (0 for no dropout)", probability)


def require_choice(parameter: str, value: object, choices: Sequence[object]) -> None:
    """The value must be one of the choices."""
    require(value in choices, f"model.{parameter}", f"must be one of {', '.join(map(str, choices))}", value)
