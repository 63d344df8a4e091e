"""Page at `/docs` that describes the API, written from the OpenAPI schema without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anyaccel.server.http.web_page import PAGE_HEADERS

__all__ = ["router", "write_docs"]

router = APIRouter(include_in_schema=False)
_METHODS = ("get", "post", "put", "delete")


# FastAPI's own pages load scripts from a CDN: https://github.com/fastapi/fastapi/issues/4924
@router.get("/docs", response_model=None)
async def show_docs(request: Request) -> Response:
    """Return the description of all endpoints as HTML."""
    page = write_docs(request.app.openapi())
    return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


def write_docs(schema: Mapping[str, Any]) -> str:
    """Return an HTML page that describes the endpoints of an OpenAPI schema."""
    info = schema["info"]
    operations = [
        (method, path, item[method]) for path, item in schema["paths"].items() for method in _METHODS if method in item
    ]
    sections = "\n".join(_write_operation(schema, method, path, item) for method, path, item in operations)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])} API</title>
<link rel="stylesheet" href="/docs.css">
</head>
<body>
<main>
<h1>{escape(info["title"])} {escape(info["version"])}: HTTP API</h1>
<p>{escape(info.get("summary", ""))} The schema is at <a href="/openapi.json">/openapi.json</a>.</p>
{sections}
</main>
</body>
</html>
"""


def _write_operation(schema: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h2><code>{method.upper()} {escape(path)}</code></h2>", f"<p>{escape(operation.get('summary', ''))}</p>"]
    if operation.get("description"):
        parts.append(f"<p>{escape(operation['description'])}</p>")
    parameters = [
        (item["name"], item["schema"], item.get("required", False), item.get("description", ""), item["in"])
        for item in operation.get("parameters", ())
    ]
    rows = [
        _write_row(schema, name, kind, required, f"In the {place}. {text}")
        for name, kind, required, text, place in parameters
    ]
    parts += _write_table("Parameters", rows)
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        parts += _write_table(f"Body ({media_type})", list(_list_fields(schema, content.get("schema", {}))))
    responses = [
        f"<tr><td><code>{escape(status)}</code></td><td>{escape(item.get('description', ''))}</td></tr>"
        for status, item in operation.get("responses", {}).items()
    ]
    parts.append(f"<h3>Responses</h3><table>{''.join(responses)}</table>")
    return f"<section>{''.join(parts)}</section>"


def _write_table(title: str, rows: list[str]) -> list[str]:
    return [f"<h3>{escape(title)}</h3><table>{''.join(rows)}</table>"] if rows else []


def _list_fields(schema: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    resolved = _resolve(schema, body)
    required = resolved.get("required", ())
    for name, kind in resolved.get("properties", {}).items():
        yield _write_row(schema, name, kind, name in required, kind.get("description", ""))


def _write_row(schema: Mapping[str, Any], name: str, kind: Mapping[str, Any], required: bool, text: str) -> str:
    needed = ", required" if required else ""
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_describe_type(schema, kind))}{needed}</td>"
        f"<td>{escape(text)}</td></tr>"
    )


def _describe_type(schema: Mapping[str, Any], kind: Mapping[str, Any]) -> str:
    resolved = _resolve(schema, kind)
    if "enum" in resolved or "const" in resolved:
        return " | ".join(str(value) for value in resolved.get("enum", [resolved.get("const")]))
    if "anyOf" in resolved:
        names = [_describe_type(schema, item) for item in resolved["anyOf"] if item.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    name = str(resolved.get("type", "any"))
    if name == "array":
        return f"array of {_describe_type(schema, resolved.get('items', {}))}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {resolved[key]:g}" for key, sign in limits.items() if key in resolved]
    kind_of_string = {"binary": "file"}.get(resolved.get("format", ""), name)
    return " ".join([kind_of_string, ", ".join(bounds)]).strip()


def _resolve(schema: Mapping[str, Any], item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema to which a reference such as `#/components/schemas/JobRequest` points."""
    while "$ref" in item:
        target: Any = schema
        for part in item["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        item = target
    return item
