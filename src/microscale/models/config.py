"""What the configs of all families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from microscale.errors import BadConfig

MAX_NUMBER = 2**31 - 1
"""No size or constant of a model is larger, and every one fits the kernels' 32-bit arguments."""
MAX_DRAFT = 15
"""Tokens of a draft in speculative decoding, at most: with the token before them, 16 of a sequence run in a step."""
NO_SLIDING_LAYERS = 1
"""What a config has as ``sliding_window`` where no layer slides: a window of the token itself. The engine then keeps
the fewest pages of sliding layers that it can, and these take no memory."""


@dataclass(frozen=True)
class HeadFormats:
    """The formats in which a draft head's weights are held; ``None``: as its checkpoint has them."""

    quantization: str | None = None
    """All dense layers whose shapes fit the format."""
    lm_head: str | None = None
    """Its own lm_head alone."""


OWN_FORMATS = HeadFormats()


class LayerKind(StrEnum):
    """What the attention of a layer sees. The values are the words of ``layer_types`` in config.json."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


def check_positive(record: object, name: str) -> None:
    """Refuse a field that is no size."""
    value = getattr(record, name)
    if not 0 < value <= MAX_NUMBER:
        raise BadConfig(f"{name} is {value if abs(value) < 1e30 else 'huge'} and must be above 0 and below 2**31.")


def last_of_each(layers: Sequence[object]) -> list[int]:
    """The last layer of each sort, in the order of the model."""
    return sorted({layer: place for place, layer in enumerate(layers)}.values())
