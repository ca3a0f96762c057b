"""Log-probabilities of a chat's tokens, as OpenAI's clients read them."""

from __future__ import annotations

from collections import deque

from msgspec import UNSET, Struct, UnsetType

from microscale.engine.output import Output
from microscale.server.generation.choice import ChoiceStep
from microscale.text.events import TextKind
from microscale.text.output import ChatOutput, PlainOutput
from microscale.text.tokenizer import Tokenizer


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    """Only for the tokens of ``content``."""
    refusal: None = None
    reasoning: list[TokenLogprob] | UnsetType = UNSET
    """For the tokens of ``reasoning``."""


FLOOR = -9999.0
"""Sent for the logarithm of zero: JSON has no infinity, and OpenAI's API uses this number."""


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can represent."""
    if logprob is None:
        return 0.0
    return min(logprob, 0.0) if logprob >= FLOOR else FLOOR


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token: control tokens by name, incomplete characters as ``bytes:\\x..``, like OpenAI."""
    name = tokenizer.control_name(token)
    if name is not None:
        return name
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobSorter:
    """Assigns the entries of one choice to content or reasoning.

    Entries of content are sent with their text: text that is held back (it may begin a stop string) holds back its
    entries, and text that is cut off at a stop string drops them.
    """

    def __init__(self, tokenizer: Tokenizer, output: ChatOutput | PlainOutput) -> None:
        self._tokenizer = tokenizer
        self._output = output
        self._kinds: list[TextKind | None] | None = None
        if isinstance(output, ChatOutput):
            self._kinds = output.kinds = []
        self._num_tokens = 0
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """Entries of content, each with the offset of its first byte."""
        self._num_bytes = 0
        """Bytes of all tokens of content."""
        self._num_shown = 0
        """Bytes of content that the client has received."""

    def sort(self, step: ChoiceStep) -> ChatLogprobs:
        reasoning: list[TokenLogprob] = []
        for output in step.outputs:
            kind = self._next_kind()
            if kind is TextKind.REASONING:
                reasoning.append(_entry(self._tokenizer, output))
            elif kind is TextKind.CONTENT:
                self._held.append((self._num_bytes, _entry(self._tokenizer, output)))
                self._num_bytes += len(self._tokenizer.token_bytes(output.token or 0))
        self._num_shown += len(step.delta.content.encode("utf-8", "surrogatepass"))
        whole = step.finish is not None and self._output.stopped is None
        content = []
        while self._held and (whole or self._held[0][0] < self._num_shown):
            content.append(self._held.popleft()[1])
        return ChatLogprobs(content, reasoning=reasoning or UNSET)

    def _next_kind(self) -> TextKind | None:
        at = self._num_tokens
        self._num_tokens += 1
        if self._kinds is None:
            return TextKind.CONTENT
        return self._kinds[at] if at < len(self._kinds) else None


def _entry(tokenizer: Tokenizer, output: Output) -> TokenLogprob:
    token = output.token or 0
    top = [
        TopLogprob(token_text(tokenizer, other), finite(logprob), list(tokenizer.token_bytes(other)))
        for other, logprob in output.top_logprobs
    ]
    data = list(tokenizer.token_bytes(token))
    return TokenLogprob(token_text(tokenizer, token), finite(output.logprob), data, top)
