"""How errors are sent: the status, type and code of the engine's errors, and OpenAI's JSON shape."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from microscale import errors as base
from microscale.errors import BadRequest, MicroscaleError
from microscale.server.error_texts import BadField, RequestError


@dataclass(frozen=True)
class ErrorStatus:
    """How the errors of one class are sent."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None


ERRORS: dict[type[MicroscaleError], ErrorStatus] = {
    BadField: ErrorStatus(400, "invalid_request_error", "invalid_value"),
    BadRequest: ErrorStatus(400, "invalid_request_error", "invalid_value"),
    base.Unsupported: ErrorStatus(400, "invalid_request_error", "unsupported"),
    base.QueueFull: ErrorStatus(429, "rate_limit_error", "queue_full", retry_after_s=1),
    base.EngineDied: ErrorStatus(503, "server_error", "engine_died"),
    base.RankFailed: ErrorStatus(503, "server_error", "engine_died"),
    base.Draining: ErrorStatus(503, "server_error", "draining", retry_after_s=1),
    base.OutOfPages: ErrorStatus(503, "server_error", "out_of_pages", retry_after_s=1),
    # From here on the server is at fault, never the client.
    base.BadLogits: ErrorStatus(500, "server_error", "bad_logits"),
    base.BadMessage: ErrorStatus(500, "server_error", "internal"),
    base.BadSetting: ErrorStatus(500, "server_error", "internal"),
    base.BadCheckpoint: ErrorStatus(500, "server_error", "internal"),
    base.BadConfig: ErrorStatus(500, "server_error", "internal"),
    MicroscaleError: ErrorStatus(500, "server_error", "internal"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def status_of(error: MicroscaleError) -> ErrorStatus:
    """The error's own, or the entry of its class or nearest base class."""
    if isinstance(error, RequestError):
        return ErrorStatus(error.status, error.kind, error.code)
    return next(ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS)


def code_of(error: MicroscaleError) -> str:
    return error.code if isinstance(error, BadField) else status_of(error).code


def error_reply(error: MicroscaleError) -> tuple[bytes, int, dict[str, str]]:
    """Body, status and headers."""
    entry = status_of(error)
    body = reply_json(str(error), entry.type, code_of(error), getattr(error, "param", None))
    return body, entry.status, error_headers(error)


def reply_json(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    return msgspec.json.encode(ErrorReply(ErrorBody(valid_unicode(message), kind, param, code)))


def valid_unicode(message: str) -> str:
    """A message may quote what the client sent, including lone surrogates, which UTF-8 cannot encode."""
    return message.encode("utf-8", "backslashreplace").decode()


def error_headers(error: MicroscaleError) -> dict[str, str]:
    headers = {}
    status = status_of(error)
    if status.retry_after_s is not None:
        headers["Retry-After"] = str(status.retry_after_s)
    if status.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status.status in (408, 413):
        headers["Connection"] = "close"  # the server does not wait for the rest of the body
    return headers
