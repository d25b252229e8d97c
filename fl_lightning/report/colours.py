"""One colour a method, the same in every picture; a method's further appearances differ by line style.

Where there is one method alone, its lines have a colour each (`series_of`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

# Light and dark theme's form of each colour. In both, any two are at least 18 apart (CIE76) for normal sight,
# deuteranopia and protanopia (Machado et al. 2009); on white, orange and sky blue alone are below a contrast of 3:1.
PALETTE = (
    ("#0073B2", "#1291FF"),  # blue
    ("#EF2E18", "#CE664F"),  # red
    ("#06915C", "#26E595"),  # green
    ("#CF76A7", "#D99FD3"),  # pink
    ("#5A4DC7", "#B2AAFF"),  # indigo
    ("#56B4E9", "#8FFFFD"),  # sky blue
    ("#636369", "#AFB2AA"),  # grey
    ("#66922D", "#9DD76C"),  # olive
    ("#E69F00", "#F2B93B"),  # orange
    ("#6A007C", "#C34A74"),  # purple
)
DASHES: tuple[tuple[int, ...], ...] = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 4))
"""Line styles as lengths of strokes and gaps; the first is solid."""
SHAPES = ("circle", "diamond", "triangle-up", "square", "cross")
"""Shapes of points, where there are no lines: one a line style."""
_SALT = 3492  # the ten methods of the papers' main tables fall on ten colours


def colours_of(methods: Iterable[str]) -> dict[str, int]:
    """The place of each method's colour in `PALETTE`.

    A method's name chooses its colour, whatever else is drawn, unless another one of the same picture has it: then it
    takes the next free one, in alphabetical order. Beyond ten methods colours come again.

    >>> colours_of(["b", "a"]) == colours_of(["a", "b"])
    True
    """
    found: dict[str, int] = {}
    names = sorted(set(methods))
    wanted = {name: zlib.crc32(f"{_SALT}{name}".encode()) % len(PALETTE) for name in names}
    waiting = []
    for name in names:
        if wanted[name] in found.values():
            waiting.append(name)
        else:
            found[name] = wanted[name]
    for name in waiting:
        taken = list(found.values())
        ring = [(wanted[name] + step) % len(PALETTE) for step in range(len(PALETTE))]
        found[name] = min(ring, key=taken.count)
    return found
