"""From the engine's thread to the event loop: one wake-up per step, whatever the number of streams.

```
engine thread   sinks ──► mailbox (a list) ──► end of the step: call_soon_threadsafe(deliver, batch)
event loop      deliver: each item to its collector, each collector's reader is woken once
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from minillm.engine.outputs import Logprob, RequestOutput, TokenEvent
from minillm.server.errors import ClientGone

Item: TypeAlias = Sequence[TokenEvent] | RequestOutput | Exception
PromptScores: TypeAlias = list[dict[int, Logprob] | None]


class Mailbox:
    """What the engine thread has for the readers of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: list[tuple[StreamSink, Item]] = []

    def put(self, sink: StreamSink, item: Item) -> None:
        """Engine thread only."""
        self._batch.append((sink, item))

    def flush(self) -> None:
        """Engine thread only: hand over what came since the last flush."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has no readers
                raise


def _deliver(batch: list[tuple[StreamSink, Item]]) -> None:
    for sink, item in batch:
        sink.collector.put(sink.index, item)


class StreamSink:
    """Where the engine puts what happens to one request (:class:`minillm.engine.streams.Sink`)."""

    __slots__ = ("collector", "index", "mailbox", "prompt_scores", "wants_events")

    def __init__(self, mailbox: Mailbox, collector: Collector, index: int, wants_events: bool) -> None:
        self.mailbox = mailbox
        self.collector = collector
        self.index = index
        self.wants_events = wants_events
        self.prompt_scores: PromptScores | None = None

    def on_events(self, events: Sequence[TokenEvent], prompt_scores: PromptScores | None) -> None:
        """New tokens."""
        self.prompt_scores = prompt_scores
        self.mailbox.put(self, events)

    def on_output(self, output: RequestOutput) -> None:
        """The end."""
        self.mailbox.put(self, output)

    def on_error(self, error: Exception) -> None:
        """The engine failed, or refused the request late."""
        self.mailbox.put(self, error)


class Collector:
    """What the requests of one HTTP call have brought and its handler has not yet taken. Event loop only.

    Unbounded: a slow client holds up nobody, and its requests' lengths bound what can come.
    """

    __slots__ = ("_items", "_waiter", "hung_up")

    def __init__(self) -> None:
        self._items: list[tuple[int, Item]] = []
        self._waiter: asyncio.Future[None] | None = None
        self.hung_up = False

    def put(self, index: int, item: Item) -> None:
        """Something of the call's request `index`."""
        self._items.append((index, item))
        self._wake()

    def hang_up(self) -> None:
        """The client has gone."""
        self.hung_up = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> list[tuple[int, Item]]:
        """All there is; waits until there is something. Raises :class:`ClientGone`."""
        while not self._items and not self.hung_up:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.hung_up:
            raise ClientGone
        items, self._items = self._items, []
        return items
