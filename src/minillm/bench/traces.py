"""Readers of public traces, each by path: what a file does not say in tokens becomes segments of the workload's seed.

Where the files come from (none is part of this package):

- Azure 2023: ``AzureLLMInferenceTrace_{conv,code}.csv`` of github.com/Azure/AzurePublicDataset
- Mooncake: ``FAST25-release/traces/*.jsonl`` of github.com/kvcache-ai/Mooncake
- ServeGen: ``data/`` of github.com/alibaba/ServeGen, as one JSON line per client (see :func:`read_servegen`)
- ShareGPT: any JSON list of ``{"conversations": [{"from": ..., "value": ...}, ...]}``

All raise :class:`TraceError`, which names file, line and field, for what is not in its format.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import IO, Any, cast

from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.errors import ConfigError, TraceError, shorten

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

KINDS = ("azure", "mooncake", "servegen", "sharegpt")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(
    path: Path,
    kind: str = "auto",
    *,
    rows: int | None = None,
    seed: int = 0,
    duration: float = 600.0,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Workload:
    """A trace of any kind; `auto` tells by the name (.csv, .jsonl, .json) and a .jsonl's first line.

    `duration` (seconds) is for ServeGen, which is a law of arrivals rather than a list; `encode` for ShareGPT, whose
    rows are text.
    """
    kind = _kind_of(path) if kind == "auto" else kind
    if kind == "azure":
        return read_azure(path, rows=rows, seed=seed)
    if kind == "mooncake":
        return read_mooncake(path, rows=rows, seed=seed)
    if kind == "servegen":
        return read_servegen(path, rows=rows, seed=seed, duration=duration)
    if kind != "sharegpt":
        raise ConfigError(f"trace kind={kind!r} must be one of auto, {', '.join(KINDS)}")
    if encode is None:
        raise ConfigError("a ShareGPT file holds text: it needs a tokenizer, so a model")
    return read_sharegpt(path, encode, rows=rows, seed=seed)


def _kind_of(path: Path) -> str:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix in (".csv", ".json"):
        return "azure" if suffix == ".csv" else "sharegpt"
    for _, row in _json_lines(path):
        if "hash_ids" in row:
            return "mooncake"
        if "client" in row:
            return "servegen"
        break
    raise TraceError(path, 1, f"no known trace: known are {', '.join(KINDS)}")


def read_azure(path: Path, *, rows: int | None = None, seed: int = 0) -> Workload:
    """Azure 2023: arrival (to 100 ns), prompt and output tokens. Prompts share nothing: the trace does not say."""
    requests = []
    with _open(path) as file:
        reader = csv.DictReader(_decoded(path, file))
        if tuple(reader.fieldnames or ()) != AZURE_COLUMNS:
            raise TraceError(path, 1, f"the columns must be {','.join(AZURE_COLUMNS)}")
        first = None
        for number, row in enumerate(_decoded(path, reader)):
            if rows is not None and number == rows:
                break
            at = _azure_time(path, number + 2, row["TIMESTAMP"])
            first = at if first is None else first
            prompt, output = (_count(path, number + 2, name, row[name]) for name in AZURE_COLUMNS[1:])
            requests.append(
                WorkloadRequest(arrival=at - first, segments=(Segment(f"r{number}", prompt),), max_tokens=output)
            )
    return _workload(path, requests, seed)


def _azure_time(path: Path, line: int, text: object) -> float:
    """Seconds of '2023-11-16 18:15:46.6805900'; datetime knows microseconds only, so the fraction is read apart."""
    try:
        whole, _, fraction = str(text).partition(".")
        return datetime.fromisoformat(whole + "+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError as error:
        raise TraceError(path, line, f"TIMESTAMP={shorten(text)} is no time") from error


def read_mooncake(path: Path, *, rows: int | None = None, seed: int = 0) -> Workload:
    """Mooncake: every prompt as hash ids of 512 tokens each, so that who shares what is the trace's own."""
    requests: list[WorkloadRequest] = []
    for line, row in _json_lines(path):
        if rows is not None and len(requests) == rows:
            break
        length = _count(path, line, "input_length", row.get("input_length"))
        output = _count(path, line, "output_length", row.get("output_length"))
        at = row.get("timestamp")
        if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < math.inf:
            raise TraceError(path, line, f"timestamp={shorten(at)} must be a number of milliseconds >= 0")
        hashes = row.get("hash_ids")
        if not isinstance(hashes, list) or not all(isinstance(value, int) for value in hashes):
            raise TraceError(path, line, f"hash_ids={shorten(hashes)} must be a list of integers")
        if len(hashes) != math.ceil(length / MOONCAKE_BLOCK):
            raise TraceError(
                path, line, f"{len(hashes)} hash_ids do not make input_length={length} at {MOONCAKE_BLOCK} tokens each"
            )
        tail = length - MOONCAKE_BLOCK * (len(hashes) - 1)
        segments = [Segment(f"h{value}", MOONCAKE_BLOCK) for value in hashes[:-1]]
        segments.append(Segment(f"h{hashes[-1]}", tail))
        requests.append(WorkloadRequest(arrival=at / 1000, segments=tuple(segments), max_tokens=output))
    return _workload(path, requests, seed)


def read_servegen(
    path: Path, *, rows: int | None = None, seed: int = 0, start: float = 0.0, duration: float = 600.0
) -> Workload:
    """ServeGen: requests drawn from each client's law of arrivals and lengths, from `start` on for `duration` seconds.

    One JSON line per client: ``{"client": id, "trace": [[t, rate, cv, "Gamma" | "Weibull" | null, shape, scale], ...],
    "dataset": {t: {"input_tokens": {count: probability}, "output_tokens": {...}}}}``; `t` is the second at which a
    window begins, `rate` requests per second. Gaps have the window's distribution and shape, and its mean rate.
    """
    drawn: list[tuple[float, WorkloadRequest]] = []
    for line, row in _json_lines(path):
        client, windows, dataset = (row.get(name) for name in ("client", "trace", "dataset"))
        if not isinstance(windows, list) or not windows:
            raise TraceError(path, line, f"trace={shorten(windows)} must be a list of windows")
        lengths = _servegen_lengths(path, line, dataset or {})
        if not lengths:  # a client whose lengths were not published
            continue
        rng = Random(f"{seed} servegen {client}")
        for index, window in enumerate(windows):
            opens, rate, shape, kind = _servegen_window(path, line, window)
            closes = windows[index + 1][0] if index + 1 < len(windows) else math.inf
            if opens >= start + duration or closes <= start or rate == 0:
                continue
            law = lengths[max(0, sum(1 for at, _, _ in lengths if at <= opens) - 1)]
            at = max(opens, start)
            for count in range(1 << 40):
                at += _gap(rng, kind, shape) / rate
                if at >= min(closes, start + duration):
                    break
                key = f"{client}.{index}.{count}"
                request = WorkloadRequest(
                    arrival=at - start,
                    segments=(Segment(key, law[1](rng)),),
                    max_tokens=law[2](rng),
                    user=str(client),
                )
                drawn.append((at, request))
    drawn.sort(key=lambda entry: entry[0])
    return _workload(path, [request for _, request in drawn[:rows]], seed)


def _gap(rng: Random, kind: str, shape: float) -> float:
    """A gap of mean 1."""
    if kind == "Weibull":
        return rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape)
    return rng.gammavariate(shape, 1 / shape)


def _servegen_window(path: Path, line: int, window: Any) -> tuple[float, float, float, str]:
    """(start, rate, shape, distribution) of a window; an idle one has rate 0."""
    try:
        opens, rate, _, kind, shape, _ = window
        opens, rate, shape = float(opens), float(rate), float(shape)
    except (TypeError, ValueError) as error:
        raise TraceError(path, line, f"window {shorten(window)} must be [t, rate, cv, kind, shape, scale]") from error
    if rate and (kind not in ("Gamma", "Weibull") or not shape > 0 or not 0 < rate < math.inf):
        raise TraceError(path, line, f"window {shorten(window)}: rate and shape must be > 0, kind Gamma or Weibull")
    return opens, rate, shape, kind


_Draw = Callable[[Random], int]


def _servegen_lengths(path: Path, line: int, dataset: Any) -> list[tuple[float, _Draw, _Draw]]:
    """(start, draw of input tokens, draw of output tokens) of each window of lengths that has any, in order."""
    try:
        windows = sorted(
            (float(at), _pdf(fields["input_tokens"]), _pdf(fields["output_tokens"]))
            for at, fields in dataset.items()
            if fields["input_tokens"] and fields["output_tokens"]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(path, line, f"dataset: {error!r}; input_tokens and output_tokens must map counts") from error
    return [(at, *(_drawer(*pdf) for pdf in pdfs)) for at, *pdfs in windows]  # type: ignore[misc]


def _pdf(given: Mapping[str, float]) -> tuple[list[int], list[float]]:
    """(token counts, cumulative probabilities)."""
    counts, sums = [int(count) for count in given], list(accumulate(given.values()))
    if min(counts) < 0 or min(given.values()) < 0 or not 0 < sums[-1] < math.inf:
        raise ValueError("it must have counts >= 0 with probabilities")
    return counts, sums


def _drawer(counts: Sequence[int], sums: Sequence[float]) -> _Draw:
    return lambda rng: max(1, counts[min(bisect_left(sums, rng.random() * sums[-1]), len(counts) - 1)])


def read_sharegpt(
    path: Path, encode: Callable[[str], Sequence[int]], *, rows: int | None = None, seed: int = 0
) -> Workload:
    """ShareGPT: each conversation's first message is a prompt, the length of its answer the output's (vLLM's rule).

    As there, conversations of fewer than two messages are left out, and so are prompts or answers of fewer than 4
    tokens. All arrive at once; :meth:`Workload.with_arrivals` spreads them.
    """
    with _open(path) as file:
        try:
            conversations = json.load(file)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise TraceError(path, getattr(error, "lineno", 1), f"no JSON: {error}") from error
    if not isinstance(conversations, list):
        raise TraceError(path, 1, "it must be a list of conversations")
    requests: list[WorkloadRequest] = []
    for number, conversation in enumerate(conversations, start=1):
        if rows is not None and len(requests) == rows:
            break
        messages = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(messages, list):
            raise TraceError(path, number, "conversations must be a list of messages", unit="entry")
        if len(messages) < 2:
            continue
        texts = [message.get("value") if isinstance(message, dict) else None for message in messages[:2]]
        if not all(isinstance(text, str) for text in texts):
            raise TraceError(path, number, "each message must have a text as its value", unit="entry")
        prompt, answer = (encode(cast(str, text)) for text in texts)
        if min(len(prompt), len(answer)) >= 4:
            requests.append(WorkloadRequest(ids=tuple(prompt), max_tokens=len(answer)))
    return _workload(path, requests, seed)


# -- what the readers share -------------------------------------------------------------------------------------------


def _workload(path: Path, requests: Sequence[WorkloadRequest], seed: int) -> Workload:
    if not requests:
        raise TraceError(path, 1, "it has no requests")
    for index in range(1, len(requests)):
        if requests[index].arrival < requests[index - 1].arrival:
            raise TraceError(path, index + 1, "arrival times must not decrease", unit="request")
    return Workload(path.name.partition(".")[0], tuple(requests), seed, path.name)


def _open(path: Path) -> IO[str]:
    try:
        path.stat()
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(path, 0, f"it cannot be read: {error.strerror or error}") from error


def _decoded(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    """The rows of an open file; what cannot be decoded, decompressed or split is a TraceError."""
    line = 0
    try:
        for row in rows:
            line += 1
            yield row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(path, line + 1, f"it cannot be read: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    with _open(path) as file:
        for line, text in enumerate(_decoded(path, file), start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TraceError(path, line, f"no JSON: {error}") from error
            if not isinstance(row, dict):
                raise TraceError(path, line, "each line must be a JSON object")
            yield line, row


def _count(path: Path, line: int, field: str, value: object) -> int:
    """A number of tokens >= 1, as an integer or its digits."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise TraceError(path, line, f"{field}={shorten(value)} must be a number of tokens >= 1")
    return number
