"""``/tokenize`` and ``/detokenize``: the tokenizer alone, without the engine."""

from __future__ import annotations

from msgspec import UNSET

from microscale.server.answer import Exchange
from microscale.server.faults import BadField
from microscale.server.host import Host
from microscale.server.logprobs import token_text
from microscale.server.parsing import parse
from microscale.server.prompts import render
from microscale.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from microscale.server.replies import Detokenized, Tokenized, encode


async def tokenize(host: Host, body: bytes, exchange: Exchange) -> None:
    """A text, or a conversation as it would be rendered."""
    await exchange.json(await host.off_loop(len(body), lambda: _tokenize(host, body)))


def _tokenize(host: Host, body: bytes) -> bytes:
    try:
        text = parse(TokenizeText, body)
    except BadField as error:
        if error.param != "prompt":
            raise
        chat = parse(TokenizeChat, body)
        host.check_model(chat.model)
        ids, strings = render(host, chat).tokens, chat.return_token_strs
    else:
        host.check_model(text.model)
        ids, strings = host.tokenizer.encode_with_control(text.prompt), text.return_token_strs
    texts = [token_text(host.tokenizer, token) for token in ids] if strings else UNSET
    return encode(Tokenized(len(ids), host.max_model_len, ids, texts))


async def detokenize(host: Host, body: bytes, exchange: Exchange) -> None:
    await exchange.json(await host.off_loop(len(body), lambda: _detokenize(host, body)))


def _detokenize(host: Host, body: bytes) -> bytes:
    request = parse(DetokenizeRequest, body)
    host.check_model(request.model)
    return encode(Detokenized(host.tokenizer.decode(request.tokens, show_control=True)))
