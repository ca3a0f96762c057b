"""``/docs``: the OpenAPI document as one plain page, without scripts. It is made once."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

PATH = "/docs"
METHODS = ("get", "post", "put", "patch", "delete")
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2rem; border-bottom: 1px solid gray; }
h3 code { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; }
b { text-transform: uppercase; }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
# Constraints of a schema on numbers, texts and lists.
BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "default": "default {}",
}


def add_docs(app: FastAPI) -> None:
    made: list[bytes] = []

    async def docs(request: Request) -> Response:
        if not made:
            made.append(page(app.openapi()).encode())
        return Response(made[0], headers=HEADERS, media_type="text/html; charset=utf-8")

    app.add_api_route(PATH, docs, methods=["GET"], include_in_schema=False, response_model=None)


def page(document: Mapping[str, Any]) -> str:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = "\n".join([*_operations(document), "<h2>Schemas</h2>", *_schemas(document)])
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n'
        f'<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. Fields that are not listed are '
        f"ignored, and named in the reply's header <code>x-microscale-ignored</code>.</p>\n{body}\n</body>\n</html>\n"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Paths</h2>"
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method not in operations:
                continue
            operation = operations[method]
            yield f"<h3><code><b>{method}</b> {escape(path)}</code></h3>"
            yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
            for parameter in operation.get("parameters", []):
                kind = _type(parameter.get("schema", {}))
                yield f"<p><code>{escape(parameter['name'])}</code> in the {escape(parameter['in'])}: {kind}</p>"
            for media, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body, {escape(media)}: {_type(content['schema'])}</p>"


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
        if "description" in schema:
            yield f"<p>{escape(schema['description'])}</p>"
        required = schema.get("required", [])
        rows = [
            f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' (optional)'}</td>"
            f"<td>{_type(inner)}</td></tr>"
            for field, inner in schema.get("properties", {}).items()
        ]
        yield f"<table>{''.join(rows)}</table>" if rows else f"<p>{_type(schema)}</p>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in one line, with links to named schemas."""
    bounds = [
        text.format(escape(json.dumps(schema[key]))) for key, text in BOUNDS.items() if schema.get(key) is not None
    ]
    return ", ".join([_kind(schema), *bounds])


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(choice) for choice in schema[key] if choice.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(str(schema.get("type", "anything")))
