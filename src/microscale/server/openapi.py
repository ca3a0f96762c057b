"""The OpenAPI document. Bodies are parsed by ``protocol``, so their schemas are entered here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from microscale.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
)

BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
}


def describe(app: FastAPI) -> None:
    """Give ``app`` its document, made when it is first asked for."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    result = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [kind for body in BODIES.values() for kind in body]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    result.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for path, body in BODIES.items():
        refs = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        post = result["paths"][path]["post"]
        post["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        post["responses"] = {"200": {"description": "Done."}, "default": {"description": "An error in OpenAI's shape."}}
    return result
