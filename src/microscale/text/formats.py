"""The chat formats that there are: the one place in ``text`` that names them."""

from __future__ import annotations

from microscale.text.chat_format import ChatFormat
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.gemma.format import GemmaFormat
from microscale.text.harmony.format import HarmonyFormat
from microscale.text.tokenizer import Tokenizer

FORMATS: tuple[type[ChatFormat], ...] = (GemmaFormat, HarmonyFormat, ChatmlFormat)
DEFAULT: type[ChatFormat] = HarmonyFormat
"""Of random weights, and of a tokenizer that fits none: its error then names what the tokenizer lacks."""


def chat_format_for(tokenizer: Tokenizer) -> ChatFormat:
    """The format whose control tokens a checkpoint's tokenizer has."""
    return next((kind for kind in FORMATS if kind.fits(tokenizer)), DEFAULT).of(tokenizer)
