"""The web page at ``/``: plain files of the package, read once and served from memory.

No part of a request becomes a file path. The Content-Security-Policy lets the browser run and load only what comes
from this server, and makes it refuse strings that would become markup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Cached but revalidated each time, so that old and new files never mix after an update.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Page:
    data: bytes
    type: str
    tag: str


def _read() -> dict[str, Page]:
    pages = {}
    for file in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        data = file.read_bytes()
        name = file.relative_to(FOLDER).as_posix()
        path = "/" if name == "index.html" else f"/web/{name}"
        pages[path] = Page(data, TYPES[file.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return pages


PAGES = _read()
"""By path."""


def add_pages(app: FastAPI) -> None:
    for path, page in PAGES.items():
        app.add_api_route(path, _endpoint(page), methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def _endpoint(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        headers = HEADERS | {"ETag": page.tag}
        known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
        if page.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(page.data, headers=headers, media_type=page.type)

    return endpoint
