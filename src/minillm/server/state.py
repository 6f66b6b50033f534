"""What all handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from minillm.server.config import ServerConfig
from minillm.server.delivery import Mailbox
from minillm.server.errors import ApiError, draining
from minillm.server.intake import Intake, TextTools

if TYPE_CHECKING:
    from minillm.engine.runtime import Runtime

MAX_RETRY_AFTER = 60


class ServerState:
    """The runtime, the configuration, and whether the server still takes requests. Belongs to one event loop."""

    def __init__(self, runtime: Runtime, config: ServerConfig) -> None:
        self.runtime = runtime
        self.config = config
        self.model_names = config.served_model_names or (runtime.config.model,)
        self.created = int(time.time())
        self.draining = False
        self.num_calls = 0
        """Generation calls that have not been answered to their end."""
        self.on_drain: list[Callable[[], None]] = []
        """Called in the event loop when draining begins: ends of streams that have no end of their own."""
        self.intake = Intake(
            TextTools(
                runtime.tokenizer,
                runtime.chat_template,
                runtime.max_model_len,
                runtime.model_info.max_model_len_reduced,
                self.model_names,
            )
        )
        self._mailbox: Mailbox | None = None
        self._latency = 1.0

    @property
    def mailbox(self) -> Mailbox:
        """The way from the engine's thread to this event loop; made when it is first used there."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
            self.runtime.on_delivered(self._mailbox.flush)
        return self._mailbox

    def check_open(self) -> None:
        """Raise a 503 while the server drains, or if its engine is dead."""
        if self.draining:
            raise draining()
        if not self.runtime.is_alive:
            raise ApiError(503, "the engine is dead", code="engine_dead")

    def clamp_priority(self, priority: int | None) -> int:
        """A client's priority, brought into the operator's range."""
        low, high = self.config.priority_range
        return min(max(priority or 0, low), high)

    def note_latency(self, seconds: float) -> None:
        """A request took this long; `retry_after` learns from it."""
        self._latency += 0.1 * (seconds - self._latency)

    def retry_after(self) -> int:
        """Seconds after which a full queue should have room: the time of one more round of running sequences."""
        return max(1, min(MAX_RETRY_AFTER, round(self._latency)))

    def model_card(self, name: str) -> Mapping[str, Any]:
        """An entry of /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "minillm",
            "root": self.runtime.config.model,
            "parent": None,
            "max_model_len": self.runtime.max_model_len,
        }

    async def close(self) -> None:
        """Free what the state itself holds; the runtime is its owner's."""
        self.runtime.on_delivered(None)
        await self.intake.close()
