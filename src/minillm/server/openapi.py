"""The OpenAPI document: FastAPI's own routes, and those that are served below it, described by their structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from minillm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
ERROR_STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_REF = "#/components/schemas/{name}"
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
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of an application; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = msgspec.json.schema_components([kind for kind, _ in BODIES.values()], ref_template=_REF)
        components = made.setdefault("components", {}).setdefault("schemas", {})
        components.update({**schemas, "Error": _ERROR})
        for path, (kind, text) in BODIES.items():
            made["paths"][path] = {"post": _operation(path, kind, text)}
        for operations in made["paths"].values():
            for operation in operations.values():
                _add_errors(operation["responses"])
        app.openapi_schema = made
    return app.openapi_schema


def _operation(path: str, kind: type, text: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path.startswith("/v1/"):
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": text,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}},
        },
        "responses": {"200": {"description": "The answer.", "content": answers}},
    }


def _add_errors(responses: dict[str, Any]) -> None:
    """Every operation refuses in the same form; FastAPI's 422 is a 400 here."""
    responses.pop("422", None)
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    for status in ERROR_STATUSES:
        responses.setdefault(str(status), {"description": "Refused or failed.", "content": error})
