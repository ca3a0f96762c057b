"""Chooses a checkpoint's chat format, and checks at start-up that its tokenizer can carry a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from microscale.errors import BadCheckpoint, BadSetting
from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Message, RenderOptions, Role
from microscale.text.gemma.format import GemmaFormat
from microscale.text.harmony.format import HarmonyFormat
from microscale.text.output import ChatOutput
from microscale.text.template_format import TemplateFormat
from microscale.text.tokenizer import Tokenizer

FORMATS: tuple[type[ChatFormat], ...] = (GemmaFormat, HarmonyFormat, ChatmlFormat)
DEFAULT: type[ChatFormat] = HarmonyFormat
"""For random weights, and for tokenizers that fit no format: its error names the missing token."""


def chat_format_for(tokenizer: Tokenizer, template: Path | None = None) -> ChatFormat:
    """The format whose control tokens the tokenizer has, with another ``template`` than the checkpoint's if given."""
    kind = next((kind for kind in FORMATS if kind.fits(tokenizer)), DEFAULT)
    if template is None:
        return kind.of(tokenizer)
    if not issubclass(kind, TemplateFormat):
        raise BadSetting(
            "--chat-template does not work with this model: its chat format (Harmony) is part of Microscale and not a "
            "template; leave the option out."
        )
    return kind(tokenizer, ChatTemplate.read(template))


QUESTION = "What is 2 + 2?\nNaïve <|end|> 日本 👩‍👧"
THOUGHT = "Two and two: 4. Größe, 👩‍👧"
ANSWER = "2 + 2 = 4 — naïvely, 日本."


def self_test(chat_format: ChatFormat, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
    """Render and parse one turn; raise unless it comes back unchanged, in tokens that the model has.

    ``eos_token_ids``: the end tokens of the checkpoint's config, if it has one. The token that ends an answer must be
    among them; otherwise tokenizer and model do not belong together.
    """
    tokenizer = chat_format.tokenizer
    prompt = chat_format.render([Message(Role.USER, QUESTION)], RenderOptions(date="2026-11-15"))
    answer = chat_format.turn(Message(Role.ASSISTANT, ANSWER, THOUGHT))
    largest = max(*prompt, *answer, *chat_format.stops)
    if largest >= vocab_size:
        raise BadCheckpoint(
            f"{tokenizer.source} has the token {largest}, but the model has a vocabulary of {vocab_size}: "
            f"they do not belong together."
        )
    end = chat_format.answer_end
    if eos_token_ids and end not in eos_token_ids:
        raise BadCheckpoint(
            f"{tokenizer.source} ends a turn with token {end}, but the model's config with {list(eos_token_ids)}: "
            f"they do not belong together."
        )
    text = tokenizer.decode(prompt, show_control=True)
    if not chat_format.shows(text, QUESTION):
        raise BadCheckpoint(
            f"{tokenizer.source} does not decode a prompt to the text that was encoded: {text[-200:]!r}."
        )
    output = ChatOutput(chat_format.parser(()))
    deltas = [delta for token in answer if (delta := output.feed([token])) is not None] + [output.finish()]
    reasoning, content = ("".join(getattr(d, name) for d in deltas) for name in ("reasoning", "content"))
    if (reasoning, content, list(output.flaws)) != (THOUGHT, ANSWER, []):
        raise BadCheckpoint(
            f"{tokenizer.source} does not decode an answer correctly: it gives {reasoning[:80]!r} and {content[:80]!r}."
        )
