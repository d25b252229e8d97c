"""Pictures of other depths than a byte a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def as_bytes(image: Image) -> Image:
    """A PIL image of one byte a channel: 16 bits are scaled, which PIL would clip, and a palette gives its colours.

    Raises:
        ValueError: for wider numbers, whose black and white nobody knows.
    """
    from PIL import Image as images

    if image.mode in ("P", "PA"):
        return image.convert("RGB")
    if image.mode == "1":
        return image.convert("L")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return images.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit numbers (mode {image.mode}); write it with 8 or 16 bits")
    return image
