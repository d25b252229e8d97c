"""Pictures of other depths than a byte a channel, with alpha, or lying on their side."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x112
"""EXIF's tag that says how a picture is to be turned."""


def as_shown(image: Image) -> Image:
    """A PIL image as viewers show it, of one byte a channel: upright by its EXIF, and on white where it has alpha.

    Args:
        image: as it was opened.

    Raises:
        ValueError: as `as_bytes`.
    """
    from PIL.Image import Transpose

    _scale_transparency(image)
    image.load()  # of TIFF files, this turns it
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    except (KeyError, OSError, SyntaxError, TypeError, ValueError, struct.error):  # the pixels are whole all the same
        turn = None
    flat = on_white(as_bytes(_grey_on_white(image)))
    return flat if turn is None else flat.transpose(turn)


def _scale_transparency(image: Image) -> None:
    """Bring the value that a PNG says is transparent to the pixels' scale: PIL scales the pixels alone."""
    given = image.info.get("transparency")
    raw = image.tile[0][3] if image.format == "PNG" and image.tile else None  # type: ignore[attr-defined]
    if raw in ("L;2", "L;4"):
        given = given if given is None else given * (85 if raw == "L;2" else 17)
    elif raw == "RGB;16B" and given is not None:
        given = tuple(value >> 8 for value in given)  # PIL keeps the upper byte
    if given is not None:
        image.info["transparency"] = given


def _grey_on_white(image: Image) -> Image:
    """A grey PNG of 16 bits is white where it is transparent, for which PIL has no alpha; another one as it is."""
    from PIL import Image as images

    if not image.mode.startswith("I") or "transparency" not in image.info:
        return image
    grey = np.asarray(image)
    return images.fromarray(np.where(grey == image.info["transparency"], 65535, grey).astype(np.uint16))


def on_white(image: Image) -> Image:
    """A PIL image without alpha: where it is transparent, white shines through. One without alpha stays as it is."""
    from PIL import Image as images

    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return image
    straight = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)).convert("RGBA")
    return images.alpha_composite(images.new("RGBA", image.size, "white"), straight).convert("RGB")


def as_bytes(image: Image) -> Image:
    """A PIL image of one byte a channel: 16 bits are scaled, which PIL would clip, and a palette gives its colours.

    Where a palette has transparent colours, white shines through.

    Raises:
        ValueError: for wider numbers, whose black and white nobody knows.
    """
    from PIL import Image as images

    if image.mode in ("P", "PA"):
        return on_white(image).convert("RGB")
    if image.mode == "1":
        return image.convert("L")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return images.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit numbers (mode {image.mode}); write it with 8 or 16 bits")
    return image


def said_of(error: Exception) -> str:
    """What PIL says of a picture, without the address of the bytes that it is read from: another one each time."""
    return re.sub(r" <_io\.BytesIO [^>]*>", "", str(error))
