"""Numbers as text, as the terminal shows them."""

from __future__ import annotations

import math
from typing import Any


def percent(fraction: float | None) -> str:
    """A fraction as percent with one decimal; ``-`` if there is none.

    >>> percent(0.9314), percent(None)
    ('93.1', '-')
    """
    return f"{100 * fraction:.1f}" if fraction is not None and is_number(fraction) else "-"


def loss_text(loss: float) -> str:
    """A loss with four decimals, or four digits where it is large; a loss that is no number shows as it is.

    >>> loss_text(0.12345), loss_text(123456.0), loss_text(float("nan"))
    ('0.1235', '1.235e+05', 'nan')
    """
    return f"{loss:.4f}" if abs(loss) < 1000 or math.isnan(loss) else f"{loss:.4g}"


def human(number: float, unit: str = "") -> str:
    """A count with three digits and a prefix of 10^3.

    >>> human(0, "B"), human(999), human(30_720, "B"), human(999_999)
    ('0 B', '999', '30.7 KB', '1.00 M')
    """
    value, prefixes = float(number), ["", "K", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    whole = value >= 99.95 or (value == number and value.is_integer())
    digits = f"{value:.{0 if whole else 1 if value >= 9.995 else 2}f}"
    return f"{digits} {prefixes[0]}{unit}".rstrip()


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> clock(9.4), clock(3725), clock(None)
    ('0:00:09', '1:02:05', '-:--:--')
    """
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def duration(seconds: float) -> str:
    """How long something took, in the units that people would use.

    >>> duration(7.31), duration(192), duration(7530)
    ('7.3 s', '3 min 12 s', '2 h 05 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


def measure_text(value: float | None) -> str:
    """A measure with four digits; ``-`` if there is none.

    >>> measure_text(0.93141), measure_text(None)
    ('0.9314', '-')
    """
    return f"{value:.4g}" if value is not None and is_number(value) else "-"


def is_number(value: Any) -> bool:
    """Whether a value is there and no NaN."""
    return value is not None and not math.isnan(value)
