"""Before the first request: one turn of the chat there and back, so that a wrong tokenizer serves nobody nonsense."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.errors import BadCheckpoint
from microscale.text import gemma_tokens
from microscale.text import harmony_tokens as names
from microscale.text.chat_format import Renderer
from microscale.text.conversation import Message, RenderOptions, Role
from microscale.text.gemma_render import GemmaRenderer
from microscale.text.harmony_render import HarmonyRenderer
from microscale.text.output import ChatOutput
from microscale.text.tokenizer import Tokenizer

QUESTION = "What is 2 + 2?\nNaïve <|end|> 日本 👩‍👧"
THOUGHT = "Two and two: 4. Größe, 👩‍👧"
ANSWER = "2 + 2 = 4 — naïvely, 日本."


def self_test(tokenizer: Tokenizer, renderer: Renderer, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
    """Raise unless a turn comes back as it was written, in tokens that the model has.

    ``eos_token_ids``: the end tokens of the checkpoint's config, where there is one. What ends a turn (``<|return|>``,
    ``<turn|>``) must be among them: otherwise tokenizer and model do not belong together.
    """
    prompt = renderer.render([Message(Role.USER, QUESTION)], RenderOptions(date="2026-11-15"))
    is_gemma = isinstance(renderer, GemmaRenderer)
    answer = renderer.turn(THOUGHT, ANSWER) if isinstance(renderer, GemmaRenderer) else _answer(tokenizer, renderer)
    largest = max(*prompt, *answer, *renderer.tokens.stops)
    if largest >= vocab_size:
        raise BadCheckpoint(
            f"{tokenizer.source} has the token {largest}, and the model a vocabulary of {vocab_size}: "
            f"they do not belong together."
        )
    end = tokenizer.control[gemma_tokens.END_TURN if is_gemma else names.RETURN]
    if eos_token_ids and end not in eos_token_ids:
        raise BadCheckpoint(
            f"{tokenizer.source} ends a turn with token {end}, and the model's config with {list(eos_token_ids)}: "
            f"they do not belong together."
        )
    text = tokenizer.decode(prompt, show_control=True)
    wanted = f"{names.START}user{names.MESSAGE}{QUESTION}{names.END}{names.START}assistant"
    begins, ends = text.startswith(f"{names.START}system{names.MESSAGE}"), text.endswith(wanted)
    # What stands around the question is the template's affair.
    if QUESTION not in text if is_gemma else not (begins and ends):
        raise BadCheckpoint(f"{tokenizer.source} does not give a prompt back as it was written: {text[-200:]!r}.")
    output = ChatOutput(renderer.tokens, tools=())
    deltas = [delta for token in answer if (delta := output.feed([token])) is not None] + [output.finish()]
    reasoning, content = ("".join(getattr(d, name) for d in deltas) for name in ("reasoning", "content"))
    if (reasoning, content, list(output.flaws)) != (THOUGHT, ANSWER, []):
        raise BadCheckpoint(
            f"{tokenizer.source} does not decode a turn of the chat: it gives {reasoning[:80]!r} and {content[:80]!r}."
        )


def _answer(tokenizer: Tokenizer, renderer: HarmonyRenderer) -> list[int]:
    tokens = renderer.tokens
    return [
        *renderer.header("analysis"),
        *tokenizer.encode(THOUGHT),
        tokens.end,
        tokens.start,
        *tokenizer.encode("assistant"),
        *renderer.header("final"),
        *tokenizer.encode(ANSWER),
        tokenizer.control[names.RETURN],
    ]
