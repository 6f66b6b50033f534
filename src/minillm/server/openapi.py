"""The OpenAPI document of the routes that read bodies themselves: schemas come from the structs that check them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from minillm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts: text, token ids, or lists of either."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of the whole application, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        references, components = msgspec.json.schema_components(
            [kind for kind, _ in BODIES.values()], ref_template="#/components/schemas/{name}"
        )
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(components | {"Error": _ERROR})
        for (path, (_, summary)), reference in zip(BODIES.items(), references, strict=True):
            made["paths"][path] = {"post": _operation(path, summary, reference)}
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's; here it is a 400
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        app.openapi_schema = made
    return app.openapi_schema


def _operation(path: str, summary: str, body: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers = {"application/json": {"schema": {"type": "object"}}}
    if path.startswith("/v1/"):
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The answer, or with `stream` its events.", "content": answers},
            "4XX": {"description": "Refused, with the reason.", "content": error},
            "503": {"description": "The server drains, or its engine is dead.", "content": error},
        },
    }
