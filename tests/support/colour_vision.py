"""How far apart colours are, for those who see all of them and for those who lack one kind of cone."""

from __future__ import annotations

import math
import re

Vector = tuple[float, ...]

# Linear sRGB as seen without one kind of cone: Machado, Oliveira and Fernandes, 2009, severity 1.
EYES: dict[str, tuple[Vector, ...]] = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Linear sRGB to cones, and their cube roots to OKLab (Ottosson, 2020).
CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
OKLAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def linear(css: str) -> Vector:
    """Of a computed colour, ``rgb(1, 2, 3)``."""
    found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", css)
    assert found, css
    parts = [int(part) / 255 for part in found.groups()]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def distance(one: str, other: str) -> float:
    """In OKLab, to the eyes that tell them apart worst. 0.02 can just be seen."""
    return min(math.dist(_oklab(eyes, one), _oklab(eyes, other)) for eyes in EYES)


def contrast(one: str, other: str) -> float:
    """As WCAG counts it; what is no text needs 3."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _oklab(eyes: str, css: str) -> Vector:
    seen = tuple(min(1.0, max(0.0, part)) for part in _times(EYES[eyes], linear(css)))
    return _times(OKLAB, tuple(math.cbrt(part) for part in _times(CONES, seen)))


def _luminance(css: str) -> float:
    return _times(((0.2126, 0.7152, 0.0722),), linear(css))[0]


def _times(matrix: tuple[Vector, ...], vector: Vector) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
