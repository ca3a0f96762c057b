"""Errors in Anthropic's shape, and which requests get them."""

from __future__ import annotations

import secrets

from msgspec import UNSET
from starlette.types import Scope, Send

from microscale import errors
from microscale.errors import MicroscaleError
from microscale.server.anthropic.replies import AnthropicErrorReply, ErrorDetails, ErrorInfo
from microscale.server.http import error_replies as common
from microscale.server.http.encoding import encode
from microscale.server.http.exchange import Exchange, Record

ROUTE = "/v1/messages"
VERSION = b"anthropic-version"
"""A header that every Anthropic client sends, also to shared routes such as ``/v1/models``."""
REQUEST_ID = "request-id"
"""Anthropic's name for the header x-request-id."""
OVERLOADED = 529
"""Anthropic's own status, which its clients retry like any 5xx."""
BUSY = (errors.Draining, errors.OutOfPages)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}

CODES = {"thread": "thread_unsupported_request"}
"""Field → Anthropic's code, for fields where its clients act on the code."""


def speaks_anthropic(scope: Scope) -> bool:
    """Whether errors of this request have Anthropic's shape."""
    path = scope["path"]
    return path == ROUTE or path.startswith(ROUTE + "/") or any(name == VERSION for name, _ in scope["headers"])


def status_of(error: MicroscaleError) -> int:
    return OVERLOADED if isinstance(error, BUSY) else common.status_of(error).status


def reply_json(message: str, status: int, request_id: str, code: str | None = None) -> bytes:
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    details = UNSET if code is None else ErrorDetails(code)
    return encode(AnthropicErrorReply(ErrorInfo(kind, common.valid_unicode(message), details), request_id))


def error_reply(error: MicroscaleError, request_id: str) -> tuple[bytes, int, dict[str, str]]:
    """Body, status and headers."""
    status = status_of(error)
    code = CODES.get(getattr(error, "param", None) or "")
    headers = {**common.error_headers(error), REQUEST_ID: request_id}
    return reply_json(str(error), status, request_id, code), status, headers


class AnthropicExchange(Exchange):
    """Sends errors in Anthropic's shape, and a ``request-id`` with every reply."""

    ERROR_EVENT = b"error"

    def __init__(self, scope: Scope, send: Send, record: Record) -> None:
        super().__init__(scope, send, record)
        record.request_id = f"msg_{secrets.token_hex(12)}"
        self.headers[REQUEST_ID] = record.client_id

    def error_reply(self, error: MicroscaleError) -> tuple[bytes, int, dict[str, str]]:
        return error_reply(error, self.record.client_id)
