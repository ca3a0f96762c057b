"""Tokens as the API's log-probabilities name them."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.engine.engine import Output
from microscale.server.replies import ChatLogprobs, TokenLogprob, TopLogprob
from microscale.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone: control tokens by name, bytes that are no character of their own as OpenAI writes them."""
    name = tokenizer.control_name(token)
    if name is not None:
        return name
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, outputs: Sequence[Output]) -> ChatLogprobs:
    """One entry for each token, of every channel, in the order of the token ids."""
    return ChatLogprobs([_entry(tokenizer, output) for output in outputs])


def _entry(tokenizer: Tokenizer, output: Output) -> TokenLogprob:
    token = output.token or 0
    top = [
        TopLogprob(token_text(tokenizer, other), logprob, list(tokenizer.token_bytes(other)))
        for other, logprob in output.top_logprobs
    ]
    data = list(tokenizer.token_bytes(token))
    return TokenLogprob(token_text(tokenizer, token), output.logprob or 0.0, data, top)
