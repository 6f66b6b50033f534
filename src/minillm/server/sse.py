"""Server-sent events as the OpenAI clients read them: `data: {json}`, a blank line, and `[DONE]` at the end.

The chunks of a stream differ in a few characters, so all that is constant is encoded once per stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream
]

encode = msgspec.json.Encoder().encode


class ChunkFrame:
    """The frames of one stream. `id`, `created` and `model` are the same in every chunk, as clients expect."""

    def __init__(self, request_id: str, kind: str, created: int, model: str, wants_usage: bool) -> None:
        head = encode({"id": request_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"

    def choice(self, choice: Any) -> bytes:
        """A chunk with one choice."""
        return self._head + encode(choice) + self._tail

    def text_parts(self, index: int, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a plain token of choice `index`."""
        head = self._head + b'{"index":%d,' % index + before
        return head, after + b"}" + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream with `include_usage`."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"
