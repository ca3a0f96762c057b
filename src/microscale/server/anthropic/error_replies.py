"""Errors in Anthropic's shape, and who gets them in it."""

from __future__ import annotations

from msgspec import UNSET
from starlette.types import Scope

from microscale import errors
from microscale.errors import MicroscaleError
from microscale.server.anthropic.replies import ErrorDetails, ErrorInfo, ErrorReply
from microscale.server.http.encoding import encode
from microscale.server.http.error_replies import error_headers, fault_of

ROUTE = "/v1/messages"
VERSION = b"anthropic-version"
"""A header that every client of Anthropic's sends, to shared routes such as ``/v1/models`` too."""
REQUEST_ID = "request-id"
"""Anthropic's name of the header x-request-id."""
OVERLOADED = 529
"""Anthropic's own status for it, which its clients retry as they do any of the 500s."""
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
"""Field → Anthropic's code for what is wrong with it, where its clients act on one."""


def speaks_anthropic(scope: Scope) -> bool:
    """Whether errors of this request have Anthropic's shape."""
    path = scope["path"]
    return path == ROUTE or path.startswith(ROUTE + "/") or any(name == VERSION for name, _ in scope["headers"])


def status_of(error: MicroscaleError) -> int:
    return OVERLOADED if isinstance(error, BUSY) else fault_of(error).status


def reply_json(message: str, status: int, request_id: str, code: str | None = None) -> bytes:
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    # A message may quote what the client sent, lone surrogates included, which are no UTF-8.
    clean = message.encode("utf-8", "backslashreplace").decode()
    details = UNSET if code is None else ErrorDetails(code)
    return encode(ErrorReply(ErrorInfo(kind, clean, details), request_id))


def error_reply(error: MicroscaleError, request_id: str) -> tuple[bytes, int, dict[str, str]]:
    """Body, status and headers."""
    status = status_of(error)
    code = CODES.get(getattr(error, "param", None) or "")
    headers = {**error_headers(error), REQUEST_ID: request_id}
    return reply_json(str(error), status, request_id, code), status, headers
