"""Requests that are hostile as HTTP: framing, headers, methods, paths, and clients that are slow or leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fuzz_bodies import PATHS, dump, hostile_body, valid_body

GETS = (
    *("/health", "/version", "/v1/models", "/v1/models/random:tiny", "/openapi.json", "/metrics", "/dashboard"),
    *("/v1/requests", "/v1/requests/cmpl-r1/explain"),
)


@dataclass(frozen=True)
class Sent:
    """What one client sends on a connection of its own, and what it may expect.

    `parts` are bytes, and pauses in seconds between them. `answers`: so many whole responses must come; None: the
    message is not whole or not HTTP, so the server may also close. `end`: `wait` for the answers, `half` closes the
    client's side after the last part, `abort` resets the connection.
    """

    what: str
    parts: Sequence[bytes | float]
    answers: int | None = 1
    end: str = "wait"
    is_head: bool = False


def message(
    method: str, path: str | bytes, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = (), close: bool = True
) -> bytes:
    """A request in HTTP/1.1; `headers` come beside Host and the body's own."""
    target = path.encode() if isinstance(path, str) else path
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"Host: x"]
    if body or method == "POST":
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    lines += [name + b": " + value for name, value in headers]
    if close:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _with_head(rng: Random, *lines: bytes, body: bytes | None = None) -> tuple[bytes, bytes]:
    """A head with these lines, and a body."""
    path = rng.choice(PATHS)
    body = dump(valid_body(path, rng)) if body is None else body
    head = [b"POST " + path.encode() + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *lines]
    return b"\r\n".join(head) + b"\r\nConnection: close\r\n\r\n", body


def lengths(rng: Random) -> Sent:
    """A Content-Length that is not that of the body."""
    body = dump(valid_body(rng.choice(PATHS), rng))
    size = len(body)
    value, answers, end = rng.choice(
        (
            (b"%d" % (size - rng.randint(1, size)), None, "wait"),
            (b"%d" % (size + rng.randint(1, 1000)), None, "half"),
            (b"-1", 1, "wait"),
            (b"+%d" % size, 1, "wait"),
            (b"0x%x" % size, 1, "wait"),
            (b"9" * 30, 1, "wait"),
            (b"%d" % (8 << 30), 1, "wait"),
            (b"", None, "half"),
            (b"%d, %d" % (size, size), 1, "wait"),
            (b"%d\r\nContent-Length: %d" % (size, size + 1), 1, "wait"),
            (b"1e3", 1, "wait"),
        )
    )
    head, body = _with_head(rng, b"Content-Length: " + value, body=body)
    return Sent("lengths", [head, body], answers, end)


def chunks(rng: Random) -> Sent:
    """Transfer-Encoding, right and wrong."""
    _, path, content = hostile_body(rng)
    content = content[:100_000] or b"x"
    half = len(content) // 2
    pieces = (content[:half], content[half:])
    whole = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
    encoding, body, answers, end = rng.choice(
        (
            (b"chunked", whole + b"0\r\n\r\n", 1, "wait"),
            (b"chunked", whole + b"0\r\nTrailer: x\r\n\r\n", 1, "wait"),
            (
                b"chunked",
                b"".join(b"1;ext=%d\r\n%c\r\n" % (i, c) for i, c in enumerate(content[:300])) + b"0\r\n\r\n",
                1,
                "wait",
            ),
            (b"chunked", whole, None, "half"),
            (b"chunked", b"zz\r\nabc\r\n0\r\n\r\n", 1, "wait"),
            (b"chunked", b"F" * 16 + b"\r\nabc", None, "half"),
            (b"chunked", b"F" * 40 + b"\r\nabc", 1, "wait"),
            (b"chunked", b"-5\r\nabc\r\n", 1, "wait"),
            (b"chunked", b"3\r\nabcde\r\n0\r\n\r\n", 1, "wait"),
            (b"chunked", b"5;" + b"e" * 200_000 + b"\r\nhello\r\n0\r\n\r\n", None, "half"),
            (b"chunked", whole + b"0\r\n" + b"T: x\r\n" * 40_000 + b"\r\n", None, "half"),
            (b"gzip", b"\x1f\x8b\x08abc", None, "half"),
            (b"chunked, identity", whole, None, "half"),
            (b"chunked\r\nContent-Length: 5", whole + b"0\r\n\r\n", None, "half"),
            (b"\x0bchunked", whole + b"0\r\n\r\n", None, "half"),
        )
    )
    head, _ = _with_head(rng, b"Transfer-Encoding: " + encoding, body=b"")
    return Sent("chunks", [head.replace(PATHS[0].encode(), path.encode()), body], answers, end)


def headers(rng: Random) -> Sent:
    """Heads that are large or not as they should be."""
    path = rng.choice(PATHS)
    body = dump(valid_body(path, rng))
    pair, answers = rng.choice(
        (
            ((b"X-Long", b"a" * 30_000), 1),
            ((b"X-Long", b"a" * 70_000), None),
            ((b"X-Long", b"a" * 1_000_000), None),
            ((b"X" * 100_000, b"a"), None),
            ((b"X-Many", b"\r\n".join(b"h%d: v" % i for i in range(3000))), 1),
            ((b"X-Many", b"\r\n".join(b"h%d: v" % i for i in range(30_000))), None),
            ((b"X-Nul", b"a\x00b"), 1),
            ((b"X-Bytes", b"\xff\xfe\x80"), 1),
            ((b"X Space", b"a"), 1),
            ((b"", b"a"), 1),
            ((b"X-Fold", b"a\r\n b"), None),
            ((b"X-Request-Id", rng.choice((b"a" * 128, b"a" * 129, b"\xff", b"../..", b"", b"a b"))), 1),
            ((b"X-Request-Timeout", rng.choice((b"nan", b"inf", b"-1", b"0", b"1e400", b"", b"\xb2", b"1_0"))), 1),
            ((b"Authorization", rng.choice((b"Bearer", b"Basic \xff", b"Bearer " + b"x" * 10_000))), 1),
            ((b"Expect", rng.choice((b"100-continue", b"200-ok"))), 1),
            ((b"Upgrade", rng.choice((b"websocket", b"h2c", b"x"))), 1),
            ((b"Connection", b"upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x"), None),
            ((b"Content-Encoding", b"gzip"), 1),
            ((b"Accept", b"\x80/*;q=nan"), 1),
            ((b"Origin", b"null"), 1),
            ((b"Host", b"a b/\x7f"), None),
            ((b"X-No-Colon\r\nAlone", b"a"), 1),
        )
    )
    return Sent("headers", [message("POST", path, body, [pair])], answers, "half" if answers is None else "wait")


def types(rng: Random) -> Sent:
    """Content types that are others, or odd."""
    path = rng.choice(PATHS)
    value = rng.choice(
        (
            *(b"text/plain", b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded", b"", b";", b"a"),
            *(
                b"application/json; charset=utf-16",
                b"application/json;;;",
                b"\xff",
                b"x" * 5000,
                b"application/vnd.a+json",
            ),
        )
    )
    body = dump(valid_body(path, rng)) if rng.random() < 0.7 else rng.randbytes(200)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return Sent("types", [head % (path.encode(), value, len(body)), body])


METHODS = ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD", "PROPFIND", "POST", "SOURCE")


def methods(rng: Random) -> Sent:
    """Every method on every path."""
    method, path = rng.choice(METHODS), rng.choice((*PATHS, *GETS, "/", "/dashboard/events"))
    if (method, path) == ("GET", "/dashboard/events"):  # a stream without an end
        return Sent("methods", [message(method, path), 0.05], None, "abort")
    body = rng.choice((b"", b"{}", b"x" * 1000))
    return Sent("methods", [message(method, path, body)], is_head=method == "HEAD")


def lines(rng: Random) -> Sent:
    """First lines that are none, and other protocols."""
    line = rng.choice(
        (
            *(
                b"",
                b"\r\n\r\n",
                b"GET\r\n\r\n",
                b"GET /\r\n\r\n",
                b"get / HTTP/1.1\r\n\r\n",
                b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
            ),
            *(b"GET / HTTP/1.1\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b" GET / HTTP/1.1\r\n\r\n"),
            *(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            ),
            *(b"GET / HTTP/1.1\nHost: x\n\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"\x00" * 100),
            *(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"A" * 100_000),
            *(
                rng.randbytes(rng.randint(1, 2000)),
                b"POST http:// HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET // HTTP/1.1\r\n\r\n",
            ),
        )
    )
    return Sent("lines", [line], None, "half")


def paths(rng: Random) -> Sent:
    """Targets that are encoded, long, or absolute."""
    path = rng.choice(
        (
            *(b"/%00", b"/%ff%fe", b"/%2e%2e/%2e%2e/etc/passwd", b"/../../etc/passwd", b"//v1//models", b"/v1/models/"),
            *(b"/v1/models/%00", b"/v1/models/%ff", b"/v1/models/a%0d%0aX:%20y", b"/v1/models/" + b"a" * 10_000, b"/%"),
            *(
                b"/v1/models/%F0%9F%98%80",
                b"/v1/models/\xc3\xa9",
                b"/v1/models?" + b"a=b&" * 3000,
                b"/v1/models#x",
                b"/?",
            ),
            *(b"http://other:99/v1/models", b"/v1/requests/%00/explain", b"/v1/requests//explain", b"/v1/models;x=y"),
            *(
                b"/v1/requests/" + b"%ff" * 500 + b"/explain",
                b"/dashboard/../metrics",
                b"/metrics?name[]=\xff",
                b"/%zz",
            ),
            *(b"/" + b"a" * 60_000, b"/health%20", b"/HEALTH", b"/v1/chat/completions/", b"/openapi.json/", b"/docs"),
            b"/" + bytes(rng.choice(b"/%.?&;=:@+abc019~") for _ in range(rng.randint(1, 60))),
        )
    )
    method = rng.choice(("GET", "GET", "POST"))
    return Sent("paths", [message(method, path, b"{}" if method == "POST" else b"")])


def pipelined(rng: Random) -> Sent:
    """Several requests at once; the last may be garbage, which must not stand between the others' answers."""
    count = rng.randint(2, 8)
    several = []
    for _ in range(count):
        path = rng.choice((*PATHS, "/health"))
        method, body = ("GET", b"") if path == "/health" else ("POST", dump(valid_body(path, rng)))
        several.append(message(method, path, body, close=False))
    if rng.random() < 0.3:
        return Sent("pipelined", [b"".join(several) + b"\x00garbage\r\n\r\n"], None, "half")
    last = message("GET", "/health")
    return Sent("pipelined", [b"".join(several) + last], count + 1)


def slow(rng: Random) -> Sent:
    """A request in small pieces, whole in the end or not."""
    _, path, body = hostile_body(rng)
    text = message("POST", path, body[:5000])
    cuts = sorted(rng.randrange(len(text)) for _ in range(rng.randint(1, 12)))
    parts: list[bytes | float] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += [text[begin:end], rng.random() * 0.05]
    if rng.random() < 0.3:
        return Sent("slow", parts[: rng.randrange(1, len(parts))], None, rng.choice(("half", "abort")))
    return Sent("slow", parts)


def leaving(rng: Random) -> Sent:
    """A whole request whose client closes its side, or everything, at once or soon."""
    path = rng.choice(PATHS[:2])
    body = valid_body(path, rng) | {"max_tokens": 60, "min_tokens": 0}
    text = message("POST", path, dump(body))
    return Sent("leaving", [text, rng.choice((0.0, 0.0, 0.01, 0.1))], None, rng.choice(("half", "abort")))


def body_only(rng: Random) -> Sent:
    """A right request of HTTP with a hostile body."""
    what, path, body = hostile_body(rng)
    return Sent(what, [message("POST", path, body)])


WAYS: dict[Callable[[Random], Sent], float] = {
    body_only: 70,
    lengths: 4,
    chunks: 5,
    headers: 5,
    types: 2,
    methods: 4,
    lines: 2,
    paths: 3,
    pipelined: 2,
    slow: 2,
    leaving: 2,
}
"""What is sent, and how often."""


def hostile_request(seed: int, number: int) -> Sent:
    """Request `number` of a seed."""
    rng = Random(f"{seed} {number}")
    return rng.choices(list(WAYS), list(WAYS.values()))[0](rng)
