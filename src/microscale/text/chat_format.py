"""Which chat format a checkpoint has: its tokenizer's control tokens say so."""

from __future__ import annotations

from pathlib import Path

from microscale.text import gemma_tokens
from microscale.text.chat_template import ChatTemplate
from microscale.text.gemma_render import GemmaRenderer
from microscale.text.harmony_render import HarmonyRenderer
from microscale.text.tokenizer import Tokenizer

Renderer = HarmonyRenderer | GemmaRenderer


def renderer_for(tokenizer: Tokenizer) -> Renderer:
    """Gemma's with the template that lies beside the tokenizer, where that has Gemma's turns; Harmony's otherwise."""
    if gemma_tokens.TURN in tokenizer.control:
        return GemmaRenderer(tokenizer, ChatTemplate.load(Path(tokenizer.source).parent))
    return HarmonyRenderer(tokenizer)
