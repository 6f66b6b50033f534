"""A conversation with a server instead of an engine of this process; nothing but the standard library."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from minillm.bench.load import authorization, error_message, served_models, server_root
from minillm.core.errors import ConfigError, RequestError

Message = dict[str, str]
SILENCE_TIMEOUT = 600.0
"""Seconds without a byte after which a server counts as gone; a queue in front of a model may take long."""


class RemoteModel:
    """A model behind `/v1/chat/completions` of any OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """`model` None takes the first that the server lists. Raises :class:`ConfigError` where no server answers."""
        self._url = server_root(url)
        self._headers = {"Content-Type": "application/json", **authorization(api_key)}
        names = served_models(url, api_key)
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
            with self._open({**body, "stream_options": {"include_usage": True}}) as answer:
                for line in answer:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        break
                    event = json.loads(data) if data else {}
                    if "error" in event:
                        raise RequestError(error_message(data))
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices", ()):
                        text = choice.get("delta", {}).get("content")
                        if text:
                            first = time.perf_counter() if first is None else first
                            write(text)
                else:
                    raise RequestError("the server broke off in the middle of the answer")
        except RequestError:
            raise
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"the server at {self._url} failed: {error!r}") from error
        waited = f"time to first token {first - start:.2f} s" if first is not None else "no text"
        return f"{tokens} generated, {waited}, {time.perf_counter() - start:.2f} s in all"

    def _open(self, body: Mapping[str, Any]) -> Any:
        request = Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(), self._headers)
        try:
            return urlopen(request, timeout=SILENCE_TIMEOUT)
        except HTTPError as error:
            raise RequestError(f"HTTP {error.code}: {error_message(error.read(1 << 16))}") from error
