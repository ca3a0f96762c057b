"""What others say of their engines on a card: figures with engine, source and date, not ours and not checked by us.

``date`` is the day of the figure where its page has one, else the day on which the page was read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from microscale.hardware.cards import Gpu
from microscale.hardware.gpu import card_name

FILE = Path(__file__).parent / "speeds_of_others.json"
DRAFTS_FILE = Path(__file__).parent / "drafts_of_others.json"
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Published:
    gpu: str
    model: str
    engine: str
    kind: str
    """``decode`` or ``prefill``."""
    batch: int
    context: int
    tok_s: float
    date: str
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PublishedDrafts:
    """Speculative decoding."""

    gpu: str
    model: str
    engine: str
    method: str
    drafts: int | None
    """Tokens of a draft, where the source has them."""
    batch: int
    acceptance_length: float | None
    """Tokens that a step gives, drafts and its own."""
    tok_s: float
    tok_s_without: float | None
    """The same engine without drafts."""
    date: str
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def _all(kind: type[RowT], file: Path) -> tuple[RowT, ...]:
    return tuple(kind(**row) for row in json.loads(file.read_text()))


def published(model: str, gpu: Gpu) -> tuple[Published, ...]:
    """What others published of this model on this kind of card."""
    name = card_name(gpu)
    return tuple(row for row in _all(Published, FILE) if row.gpu == name and row.model == model)


def published_drafts(model: str, gpu: Gpu) -> tuple[PublishedDrafts, ...]:
    """What others published of speculative decoding with this model on this kind of card."""
    name = card_name(gpu)
    return tuple(row for row in _all(PublishedDrafts, DRAFTS_FILE) if row.gpu == name and row.model == model)
