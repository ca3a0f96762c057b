"""The page of the API: every route and schema of the document, with nothing of the document taken for HTML."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel

from microscale.server.web.docs import page


class Wanted(BaseModel):
    size: int | None = None
    names: list[str] = []


def document() -> FastAPI:
    app = FastAPI(title="Test")

    @app.post("/v1/things", summary="Makes <things>")
    def things(body: Wanted) -> Wanted:
        return body

    return app


def test_routes_and_schemas_are_there_and_escaped() -> None:
    html = page(document().openapi())
    assert "/v1/things" in html
    assert "Wanted" in html
    assert "names" in html
    assert "<things>" not in html
    assert "&lt;things&gt;" in html
