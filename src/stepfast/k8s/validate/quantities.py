"""Kubernetes quantities: `1700Gi`, `500m`, `8`.

Owns: their arithmetic, exact. Does not own: which of them are asked for.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_FORM = re.compile(
    r"([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))"
    r"(?:([KMGTPE]i|[numkMGTPE]?)|[eE]([+-]?\d{1,2}))\Z"
)
_SUFFIX = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    **{letter: Fraction(10 ** (3 * power)) for power, letter in enumerate("MGTPE", start=2)},
    **{f"{letter}i": Fraction(2 ** (10 * power)) for power, letter in enumerate("KMGTPE", 1)},
}


def quantity(value: Any) -> Fraction | None:
    """The quantity that a value says; None where it says none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(str(value))
    match = _FORM.match(value) if isinstance(value, str) else None
    if match is None:
        return None
    digits, suffix, exponent = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIX[suffix or ""]
    return Fraction(digits) * scale


def gib(amount: Fraction) -> str:
    """Bytes as GiB, for people."""
    return f"{float(amount / 2**30):.1f}Gi"


def plain(amount: Fraction) -> str:
    """A count, for people."""
    return str(amount.numerator) if amount.denominator == 1 else f"{float(amount):g}"
