"""How errors are sent: one table from error class to status, type and code, and OpenAI's JSON shape."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from microscale import errors as base
from microscale.errors import BadRequest, MicroscaleError
from microscale.server import errors
from microscale.server.errors import BadField


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
    errors.Unauthorized: ErrorStatus(401, "authentication_error", "invalid_api_key"),
    errors.HostNotAllowed: ErrorStatus(403, "permission_error", "host_not_allowed"),
    errors.ModelNotFound: ErrorStatus(404, "invalid_request_error", "model_not_found"),
    errors.ResponseNotFound: ErrorStatus(404, "invalid_request_error", "response_not_found"),
    errors.ItemNotFound: ErrorStatus(404, "invalid_request_error", "item_not_found"),
    errors.PreviousResponseNotFound: ErrorStatus(404, "invalid_request_error", "previous_response_not_found"),
    errors.BodyTimeout: ErrorStatus(408, "invalid_request_error", "body_timeout"),
    errors.BodyTooLarge: ErrorStatus(413, "invalid_request_error", "body_too_large"),
    errors.NotJson: ErrorStatus(415, "invalid_request_error", "not_json"),
    errors.UnknownEncoding: ErrorStatus(415, "invalid_request_error", "unknown_encoding"),
    base.QueueFull: ErrorStatus(429, "rate_limit_error", "queue_full", retry_after_s=1),
    base.EngineDied: ErrorStatus(503, "server_error", "engine_died"),
    base.RankFailed: ErrorStatus(503, "server_error", "engine_died"),
    base.Draining: ErrorStatus(503, "server_error", "draining", retry_after_s=1),
    base.OutOfPages: ErrorStatus(503, "server_error", "out_of_pages", retry_after_s=1),
    errors.SlowReader: ErrorStatus(408, "invalid_request_error", "slow_reader"),
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
    """The entry of the error's class, or of its nearest base class."""
    return next(ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS)


def code_of(error: MicroscaleError) -> str:
    return error.code if isinstance(error, BadField) else status_of(error).code


def error_json(error: MicroscaleError) -> bytes:
    return reply_json(str(error), status_of(error).type, code_of(error), getattr(error, "param", None))


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
