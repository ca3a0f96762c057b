"""``/tokenize`` and ``/detokenize``: the tokenizer alone, without the engine."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from microscale.server import error_texts
from microscale.server.error_texts import BadField
from microscale.server.generation.chat_prompt import render
from microscale.server.host import Host
from microscale.server.http.encoding import encode
from microscale.server.http.exchange import Exchange
from microscale.server.openai.logprobs import token_text
from microscale.server.requests.base import Body
from microscale.server.requests.chat import ChatFields
from microscale.server.requests.fields import CHAT_MARKS, MARKS, Tokens


class TokenizeText(Body):
    HARMLESS = MARKS

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    HARMLESS = CHAT_MARKS

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    HARMLESS = MARKS

    model: str | None = None
    tokens: Tokens


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    prompt: str


async def tokenize(host: Host, body: bytes, exchange: Exchange) -> None:
    """Tokenize a text, or a conversation as it would be rendered."""
    try:
        text: TokenizeText | TokenizeChat = await host.read_request(TokenizeText, body, exchange)
    except BadField as error:
        if error.param != "prompt":
            raise
        text = await host.read_request(TokenizeChat, body, exchange)
    await exchange.json(await host.off_loop(len(body), lambda: _tokenize(host, text)))


def _tokenize(host: Host, request: TokenizeText | TokenizeChat) -> bytes:
    host.check_model(request.model)
    if isinstance(request, TokenizeChat):
        ids = render(host, request).tokens
    else:
        added = request.add_special_tokens is not False
        ids = host.chat_format.encode_text(request.prompt, add_special_tokens=added)
    texts = [token_text(host.tokenizer, token) for token in ids] if request.return_token_strs else UNSET
    return encode(Tokenized(len(ids), host.max_model_len, ids, texts))


async def detokenize(host: Host, body: bytes, exchange: Exchange) -> None:
    request = await host.read_request(DetokenizeRequest, body, exchange)
    host.check_model(request.model)
    largest, size = max(request.tokens, default=0), host.engine.ready.vocab_size
    if largest >= size:
        raise error_texts.token_not_in_vocabulary(largest, size)
    await exchange.json(
        await host.off_loop(
            len(body), lambda: encode(Detokenized(host.tokenizer.decode(request.tokens, show_control=True)))
        )
    )
