"""Log-probabilities of ``/v1/completions``: of continuations, of echoed prompts, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from microscale.engine.output import Output, Scored
from microscale.server.openai.completions.schema import PromptLogprob, TextLogprobs
from microscale.server.openai.logprobs import finite, token_text
from microscale.text.detokenize import Detokenizer
from microscale.text.tokenizer import Tokenizer


class ScoredToken(NamedTuple):
    """One token of a prompt or of its continuation."""

    token: int
    logprob: float | None
    """``None`` for the first token of a prompt."""
    top: tuple[tuple[int, float], ...]
    was_added: bool = False
    """Added before the prompt by the chat format, and so not part of its text."""


class LogprobWriter:
    """Writes the log-probabilities of one choice, each with the offset of its token's text."""

    def __init__(self, tokenizer: Tokenizer, *, shows_control: bool) -> None:
        """``shows_control``: the text includes control tokens by name."""
        self._tokenizer = tokenizer
        self._shows_control = shows_control
        self._detokenizer = Detokenizer(tokenizer)
        """A character may be spread over several tokens."""
        self._offset = 0

    def write(self, tokens: Sequence[ScoredToken]) -> TextLogprobs:
        tokenizer = self._tokenizer
        logprobs = TextLogprobs([], [], [], [])
        for token in tokens:
            logprobs.tokens.append(token_text(tokenizer, token.token))
            logprobs.token_logprobs.append(token.logprob)
            logprobs.top_logprobs.append(_top(tokenizer, token))
            logprobs.text_offset.append(self._offset)
            if token.was_added:
                continue
            name = (tokenizer.control_name if self._shows_control else tokenizer.plain_name)(token.token)
            self._offset += len(name or self._detokenizer.feed(token.token))
        return logprobs


def generated(output: Output) -> ScoredToken:
    return ScoredToken(output.token or 0, finite(output.logprob), output.top_logprobs)


def echoed(prompt: Sequence[int], scored: Sequence[Scored], most: int, num_added: int) -> list[ScoredToken]:
    """A prompt's tokens, each with up to ``most`` alternatives. The chat format added the first ``num_added``."""
    first = ScoredToken(prompt[0], None, (), num_added > 0)
    others = [
        ScoredToken(token, finite(logprob), top[:most], at < num_added)
        for at, (token, logprob, top) in enumerate(scored, 1)
    ]
    return [first, *others]


def prompt_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored], most: int) -> list[dict[str, PromptLogprob] | None]:
    """For every token but the first: the most likely tokens in its position, and itself."""
    positions: list[dict[str, PromptLogprob] | None] = [None]
    for token, logprob, top in scored:
        ranked = {other: (likely, rank) for rank, (other, likely) in enumerate(top[:most], 1)}
        entries = {token: ranked.get(token, (logprob, None)), **ranked}
        positions.append(
            {
                str(other): PromptLogprob(finite(likely), rank, token_text(tokenizer, other))
                for other, (likely, rank) in entries.items()
            }
        )
    return positions


def _top(tokenizer: Tokenizer, token: ScoredToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {token_text(tokenizer, other): finite(logprob) for other, logprob in token.top}
    # The chosen token is always included, like OpenAI's.
    return top | {token_text(tokenizer, token.token): token.logprob}
