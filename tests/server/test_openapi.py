"""The OpenAPI document names every route, and its schemas accept what the server accepts."""

from __future__ import annotations

from server_fakes import RunningServer

from minillm.server.openapi import BODIES


def test_every_route_and_field_is_in_the_document(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    assert set(BODIES) | {"/health", "/v1/models"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for path, (kind, _) in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{kind.__name__}"}
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)


def test_every_reference_has_its_target(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    found = set(references(document))
    assert found
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
