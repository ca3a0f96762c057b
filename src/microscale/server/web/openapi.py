"""The OpenAPI document. Handlers parse bodies themselves, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from microscale.server.anthropic.error_replies import ROUTE
from microscale.server.anthropic.request import CountRequest, MessagesRequest
from microscale.server.openai.chat.schema import ChatRequest
from microscale.server.openai.completions.schema import CompletionRequest
from microscale.server.openai.responses.request import ResponsesRequest
from microscale.server.openai.tokenize import DetokenizeRequest, TokenizeChat, TokenizeText
from microscale.server.requests.base import Body

BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/responses/input_tokens": (ResponsesRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
}


SUMMARIES = {
    ("post", "/v1/completions"): "Continue a raw prompt, given as text or token ids.",
    ("post", "/v1/chat/completions"): "Answer a conversation.",
    ("post", "/v1/responses"): "Answer a conversation of items, and store it.",
    ("post", "/v1/messages"): "Answer a conversation, as Anthropic's Messages API does.",
    ("post", "/v1/messages/count_tokens"): "Count the tokens of a conversation for /v1/messages.",
    ("post", "/tokenize"): "The token ids of a text or of a conversation.",
    ("post", "/detokenize"): "The text of token ids.",
    ("get", "/health"): "Whether the server accepts requests. Needs no key.",
    ("get", "/ping"): "The same as /health, under SageMaker's name.",
    ("get", "/load"): "The number of requests in progress.",
    ("get", "/version"): "The version of the server.",
    ("get", "/v1/models"): "The names under which the model is served.",
    ("get", "/v1/models/{name}"): "One of these names.",
    ("post", "/v1/responses/input_tokens"): "Count the tokens of a request's prompt.",
    ("get", "/v1/responses/{response_id}/input_items"): "The input of a stored response.",
    ("post", "/v1/responses/{response_id}/cancel"): "Always refused: no response runs in the background.",
    ("get", "/v1/responses/{response_id}"): "A stored response.",
    ("delete", "/v1/responses/{response_id}"): "Delete a stored response.",
    ("get", "/plan"): "Which kernels run, and why.",
    ("get", "/metrics"): "Counters and histograms for Prometheus.",
}


def describe(app: FastAPI) -> None:
    """Give ``app`` its document, which is made on first use."""
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
    for (method, path), summary in SUMMARIES.items():
        result["paths"][path][method]["summary"] = summary
    for path, body in BODIES.items():
        refs = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        post = result["paths"][path]["post"]
        post["operationId"] = path.strip("/").replace("/", "_")
        post["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        failed = f"An error in {'Anthropic' if path.startswith(ROUTE) else 'OpenAI'}'s shape."
        post["responses"] = {
            "200": {"description": "Done."},
            "default": {"description": failed},
        }
    return result
