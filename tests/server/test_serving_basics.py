"""Routes without generation, and the form of refusals."""

from __future__ import annotations

import json
import re


def test_health_version_and_ids(server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert set(server.http.get("/version").json()) == {"version"}
    answer = server.http.get("/health", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


def test_tokenize_and_back(server) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 5
    assert server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hello"}


def test_errors_are_error_objects(server) -> None:
    for answer, status in (
        (server.http.get("/nowhere"), 404),
        (server.http.get("/v1/completions"), 405),
        (server.http.post("/v1/completions", content=b"{"), 400),
        (server.http.post("/v1/completions", json={"prompt": "a", "model": "other"}), 404),
        (server.http.get("/v1/models/other"), 404),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_openapi_document_describes_every_route(server) -> None:
    document = server.http.get("/openapi.json").json()
    paths = set(document["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health"} <= paths
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= set(document["components"]["schemas"]), "every reference leads somewhere"
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert "422" not in text
