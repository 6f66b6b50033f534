"""The program of a process that reads large bodies (see :mod:`minillm.server.intake_process`)."""

from __future__ import annotations

import signal
import sys
from typing import BinaryIO

import msgspec

from minillm.models.tokenizer import load_tokenizer
from minillm.server.errors import ApiError, as_api_error
from minillm.server.intake import READERS, TextTools
from minillm.server.intake_process import HEADER_LENGTH, KIND_CODES, OK, REFUSED, Refusal, Setup, frame


def _read_frame(source: BinaryIO) -> tuple[bytes, bytes] | None:
    header = source.read(HEADER_LENGTH)
    if len(header) < HEADER_LENGTH:
        return None
    length = int.from_bytes(header[1:], "little")
    payload = source.read(length)
    return (header[:1], payload) if len(payload) == length else None


def _answer(kind: str, body: bytes, tools: TextTools) -> bytes:
    try:
        return frame(OK, msgspec.msgpack.encode(READERS[kind](body, tools)))
    except Exception as error:
        too_large = isinstance(error, OverflowError)  # an integer that MessagePack cannot hold
        known = ApiError(400, "an integer of the body does not fit 64 bits") if too_large else as_api_error(error)
        refusal = Refusal(known.status, known.message, known.param, known.code)
        return frame(REFUSED, msgspec.msgpack.encode(refusal))


def main() -> None:
    """Answer frames until the input ends."""
    # The parent ends this process; a Ctrl-C or a service manager's SIGTERM reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read_frame(source)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first[1], type=Setup)
    tools = TextTools(
        load_tokenizer(setup.tokenizer),
        setup.chat_template,
        setup.max_model_len,
        setup.max_model_len_reduced,
        setup.model_names,
    )
    kinds = {code: kind for kind, code in KIND_CODES.items()}
    while (message := _read_frame(source)) is not None:
        sink.write(_answer(kinds[message[0]], message[1], tools))
        sink.flush()


if __name__ == "__main__":
    main()
