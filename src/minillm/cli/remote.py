"""A conversation with a server instead of an engine of this process; nothing but the standard library."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from minillm.core.errors import ConfigError, RequestError

Message = dict[str, str]
CONNECT_TIMEOUT = 600.0
"""Seconds without a byte after which a server counts as gone; a queue in front of a model may take long."""


class RemoteModel:
    """A model behind `/v1/chat/completions` of any OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """`model` None takes the first that the server lists. Raises :class:`ConfigError` where no server answers."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must start with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            with self._open("/v1/models") as answer:
                names = [entry["id"] for entry in json.load(answer)["data"]]
        except (RequestError, URLError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"url={url!r} does not answer as a server of models: {error}") from error
        if model is not None and model not in names:
            raise ConfigError(f"model={model!r} is not served at {url}; it has: {', '.join(names)}")
        self.model = model or names[0]

    def stream(self, messages: list[Message], params: Mapping[str, Any], write: Callable[[str], None]) -> str:
        """Hand each piece of the answer to `write`; returns counts and times in one line.

        Raises :class:`RequestError` with the server's message where it refuses or breaks off. Leaving early (Ctrl-C)
        closes the connection, which cancels the request.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **params}
        start, first, tokens = time.perf_counter(), None, 0
        try:
            with self._open("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}) as answer:
                for line in answer:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        break
                    event = json.loads(data) if data else {}
                    if "error" in event:
                        raise RequestError(str(event["error"].get("message", event["error"])))
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices", ()):
                        text = choice.get("delta", {}).get("content")
                        if text:
                            first = time.perf_counter() if first is None else first
                            write(text)
                else:
                    raise RequestError("the server broke off in the middle of the answer")
        except (URLError, OSError, ValueError) as error:
            raise RequestError(f"the server at {self._url} failed: {error}") from error
        waited = f"time to first token {first - start:.2f} s" if first is not None else "no text"
        return f"{tokens} generated, {waited}, {time.perf_counter() - start:.2f} s in all"

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(Request(self._url + path, data, self._headers), timeout=CONNECT_TIMEOUT)
        except HTTPError as error:
            raise RequestError(f"HTTP {error.code}: {_message(error.read(1 << 16))}") from error


def _message(body: bytes) -> str:
    """The server's words in an error body of whatever form."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return " ".join(body.decode(errors="replace").split())[:200]
