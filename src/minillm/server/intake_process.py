"""Processes that read large bodies, so that their work cannot hold up this one.

A process is started when it is first needed and then kept. It holds a tokenizer and no model, speaks in frames over
its standard input and output, and ends when its input does. It also ends when this process dies, for the same reason.

```
this process    setup (once), then per body: kind, body ──► stdin
that process    stdout ──► ok, result │ error, status and message          frame = kind (1 byte), length (8), payload
```
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from minillm.server.errors import ApiError, ClientGone

if TYPE_CHECKING:
    from minillm.server.intake import TextTools

TIME_LIMIT = 120.0
"""Seconds after which a body is given up and its process ended."""
MAX_PENDING = 64
"""Large bodies that may wait for a process; each is held in memory."""
MAX_PROCESSES = 4

OK, REFUSED = b"o", b"e"
KIND_CODES = {"completion": b"p", "chat": b"c", "tokenize": b"t", "detokenize": b"d"}
HEADER_LENGTH = 9


class Setup(msgspec.Struct):
    """What a process needs to know once."""

    tokenizer: str
    chat_template: str | None
    max_model_len: int
    max_model_len_reduced: bool
    model_names: tuple[str, ...]


class Refusal(msgspec.Struct):
    """An :class:`ApiError` on its way between the processes."""

    status: int
    message: str
    param: str | None
    code: str | None


def frame(kind: bytes, payload: bytes) -> bytes:
    """A message in either direction."""
    return kind + len(payload).to_bytes(8, "little") + payload


class IntakeProcesses:
    """A few processes and who waits for them. Belongs to one event loop."""

    def __init__(self, tools: TextTools) -> None:
        self._setup = Setup(
            tools.tokenizer.source,
            tools.chat_template,
            tools.max_model_len,
            tools.max_model_len_reduced,
            tools.model_names,
        )
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._slots = asyncio.Semaphore(max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // 4)))
        self._pending = 0
        self._closed = False

    async def read(self, kind: str, body: bytes, is_wanted: Callable[[], bool]) -> bytes:
        """The encoded result. Raises :class:`ApiError`, or :class:`ClientGone` if nobody waits when its turn comes."""
        if self._pending >= MAX_PENDING:
            message = f"{self._pending} large bodies are waiting; no more are taken now"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "5"})
        self._pending += 1
        try:
            async with self._slots:
                if not is_wanted():
                    raise ClientGone
                return await self._read(kind, body)
        finally:
            self._pending -= 1

    async def _read(self, kind: str, body: bytes) -> bytes:
        process = self._idle.pop() if self._idle else await self._start()
        done = False
        try:
            async with asyncio.timeout(TIME_LIMIT):
                answer, payload = await self._exchange(process, frame(KIND_CODES[kind], body))
            done = True
        except TimeoutError:
            message = f"the body took more than {TIME_LIMIT:g} s to read"
            raise ApiError(400, message, code="request_too_costly") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise RuntimeError(f"the process that reads large bodies ended: code {process.returncode}") from error
        finally:
            if done and not self._closed:
                self._idle.append(process)
            else:
                await self._end(process)
        if answer == REFUSED:
            refusal = msgspec.msgpack.decode(payload, type=Refusal)
            raise ApiError(refusal.status, refusal.message, param=refusal.param, code=refusal.code)
        return payload

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "minillm.server.intake_worker", stdin=PIPE, stdout=PIPE
        )
        self._all.add(process)
        assert process.stdin is not None
        process.stdin.write(frame(b"s", msgspec.msgpack.encode(self._setup)))
        return process

    @staticmethod
    async def _exchange(process: Process, message: bytes) -> tuple[bytes, bytes]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(message)
        await process.stdin.drain()
        header = await process.stdout.readexactly(HEADER_LENGTH)
        return header[:1], await process.stdout.readexactly(int.from_bytes(header[1:], "little"))

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._all.discard(process)

    async def close(self) -> None:
        """End all processes; none is left behind."""
        self._closed = True
        for process in list(self._all):
            await self._end(process)
