"""Errors as clients see them: one table from class to status, one shape."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from microscale import errors
from microscale.errors import BadRequest, MicroscaleError


class BadField(BadRequest):
    """A field of a request is wrong; ``param`` names it as OpenAI's errors do."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        """OpenAI's, where it has one for this."""


class NoSuchModel(MicroscaleError):
    """The request names a model that is not served here."""


class NoSuchResponse(MicroscaleError):
    """The request names a response that is not kept here."""


class NoSuchItem(MicroscaleError):
    """The request refers to an item that is not kept here."""

    param = "input"


class NoSuchPrevious(MicroscaleError):
    """The request continues a response that is not kept here."""

    param = "previous_response_id"


class Unauthorized(MicroscaleError):
    """The API key is missing or wrong."""


class ForeignName(MicroscaleError):
    """The request calls this machine by a name that is not known to be its own."""


class BodyTooLarge(MicroscaleError):
    """The body has more bytes than are taken."""


class BodyTooSlow(MicroscaleError):
    """The body did not arrive in time."""


class NotJson(MicroscaleError):
    """The body is not said to be JSON."""


class UnknownEncoding(MicroscaleError):
    """The body is packed in a way that is not known here."""


class SlowReader(MicroscaleError):
    """The client reads too slowly to be written to; it is hung up on."""


@dataclass(frozen=True)
class Fault:
    """How a class of errors is told."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None


FAULTS: dict[type[MicroscaleError], Fault] = {
    BadField: Fault(400, "invalid_request_error", "invalid_value"),
    BadRequest: Fault(400, "invalid_request_error", "invalid_value"),
    errors.Unsupported: Fault(400, "invalid_request_error", "unsupported"),
    Unauthorized: Fault(401, "authentication_error", "invalid_api_key"),
    ForeignName: Fault(403, "permission_error", "host_not_allowed"),
    NoSuchModel: Fault(404, "invalid_request_error", "model_not_found"),
    NoSuchResponse: Fault(404, "invalid_request_error", "response_not_found"),
    NoSuchItem: Fault(404, "invalid_request_error", "item_not_found"),
    NoSuchPrevious: Fault(404, "invalid_request_error", "previous_response_not_found"),
    BodyTooSlow: Fault(408, "invalid_request_error", "body_timeout"),
    BodyTooLarge: Fault(413, "invalid_request_error", "body_too_large"),
    NotJson: Fault(415, "invalid_request_error", "not_json"),
    UnknownEncoding: Fault(415, "invalid_request_error", "unknown_encoding"),
    errors.QueueFull: Fault(429, "rate_limit_error", "queue_full", retry_after_s=1),
    errors.EngineDied: Fault(503, "server_error", "engine_died"),
    errors.RankFailed: Fault(503, "server_error", "engine_died"),
    errors.Draining: Fault(503, "server_error", "draining", retry_after_s=1),
    errors.OutOfPages: Fault(503, "server_error", "out_of_pages", retry_after_s=1),
    SlowReader: Fault(408, "invalid_request_error", "slow_reader"),
    # From here on it is the server that is wrong, never the client.
    errors.BadLogits: Fault(500, "server_error", "bad_logits"),
    errors.BadMessage: Fault(500, "server_error", "internal"),
    errors.BadSetting: Fault(500, "server_error", "internal"),
    errors.BadCheckpoint: Fault(500, "server_error", "internal"),
    errors.BadConfig: Fault(500, "server_error", "internal"),
    MicroscaleError: Fault(500, "server_error", "internal"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def fault_of(error: MicroscaleError) -> Fault:
    """The row of the nearest class."""
    return next(FAULTS[kind] for kind in type(error).__mro__ if kind in FAULTS)


def code_of(error: MicroscaleError) -> str:
    return error.code if isinstance(error, BadField) else fault_of(error).code


def error_json(error: MicroscaleError) -> bytes:
    return reply_json(str(error), fault_of(error).type, code_of(error), getattr(error, "param", None))


def reply_json(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    # A message may quote what the client sent, lone surrogates included, which are no UTF-8.
    clean = message.encode("utf-8", "backslashreplace").decode()
    return msgspec.json.encode(ErrorReply(ErrorBody(clean, kind, param, code)))


def error_headers(error: MicroscaleError) -> dict[str, str]:
    headers = {}
    fault = fault_of(error)
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(fault.retry_after_s)
    if fault.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if fault.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not waited for
    return headers
