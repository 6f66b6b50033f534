"""Bodies that no client should send: valid ones, broken in one or more places (:func:`hostile_body`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

LONG = 1_000_000
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


class Raw(bytes):
    """JSON, or what should be some, that goes out as it is."""


class Pairs(list[tuple[Any, Any]]):
    """An object whose keys may come more than once."""


def dump(value: Any) -> bytes:
    """JSON of a value with raw parts."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict | Pairs):
        items = value.items() if isinstance(value, dict) else value
        return b"{" + b",".join(dump(key) + b":" + dump(inner) for key, inner in items) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dump, value)) + b"]"
    return json.dumps(value).encode()


# -- values ------------------------------------------------------------------------------------------------------------

NUMBERS = (
    *(b"0", b"-0", b"-1", b"1", b"2", b"128", b"129", b"255", b"256", b"257", b"2147483648", b"-9223372036854775808"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"1e999"),
    *(b"-1e999", b"1e308", b"1e-320", b"1e-400", b"0.1", b"1.0", b"-0.5", b"1E5", b"NaN", b"Infinity", b"-Infinity"),
    *(b"nan", b"0x10", b"01", b"1.", b".5", b"+1", b"1e", b"--1", b"9" * 400, b"0." + b"3" * 4000, b"1_000"),
)
STRINGS = (
    *(b'""', b'" "', b'"\\u0000"', b'"a\\u0000b"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\xff"'),
    *(
        b'"\xc0\x80"',
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\xe2\x82"',
        b'"\x00"',
        b'"\t"',
        b'"\\x41"',
        b'"\\u12"',
    ),
    *(b'"\xef\xbf\xbf\xef\xbb\xbf"', b'"\\u202e\\u0301"', b'"' + b"\xcc\x81" * 2000 + b'"', b'"../../etc/passwd"'),
    *(b'"{{ 7*7 }}{% for x in range(10**9) %}"', b'"<|endoftext|><|begin|>"', b'"\r\nX: y"', b"'a'", b'"unended'),
    *(
        b'"' + b"\\ud83d" * 3000 + b'"',
        b'"\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9"',
        b'"-1"',
        b'"1e5"',
        b'"\\uff11"',
    ),
)
OTHERS = (b"null", b"true", b"false", b"[]", b"{}", b"[[]]", b"[null]", b'{"":null}', b"undefined", b"", b",", b"[1,]")


def nested(rng: Random) -> Raw:
    """Lists or objects in each other; some without their ends."""
    depth = rng.choice((10, 65, 200, 1000, 5000, 100_000))
    kind = rng.randrange(4)
    if kind == 0:
        return Raw(b"[" * depth + b"]" * depth)
    if kind == 1:
        return Raw(b'{"a":' * depth + b"1" + b"}" * depth)
    return Raw(b"[" * depth if kind == 2 else b'[{"type":"object","properties":' * (depth // 4))


def long_value(rng: Random) -> Raw:
    """A million of something, within what a body may have (mostly)."""
    count = rng.choice((LONG // 100, LONG // 100, LONG // 10, LONG))
    piece = rng.choice((b"a", b" ", b"\\n", b"\xc3\xa9", b"a b", b"\\u0000"))
    form = rng.randrange(5)
    if form <= 1:
        return Raw(b'"' + piece * count + b'"')
    if form == 2:
        return Raw(b"[" + b"1," * count + b"1]")
    if form == 3:
        return Raw(b"[" + b'"x",' * count + b'"y"]')
    return Raw(b"{" + b",".join(b'"%d":0' % i for i in range(count // 10)) + b"}")


def odd_value(rng: Random) -> Any:
    """A value of any kind, rarely the right one."""
    roll = rng.random()
    if roll < 0.4:
        return Raw(rng.choice(NUMBERS))
    if roll < 0.7:
        return Raw(rng.choice(STRINGS))
    if roll < 0.85:
        return Raw(rng.choice(OTHERS))
    if roll < 0.91:
        return nested(rng)
    if roll < 0.915:
        return long_value(rng)
    return [odd_value(rng) for _ in range(rng.randint(1, 4))]


# -- valid bodies ------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    """A function that may be called."""
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema or SCHEMA}}


def _sampling(rng: Random) -> dict[str, Any]:
    every: dict[str, Any] = {
        "temperature": rng.choice((0, 0.7, 2)),
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "seed": rng.randrange(100),
        "stop": rng.choice(("ab", ["a", "bc"])),
        "stop_token_ids": [7, 8],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 3.5, "17": -100},
        "min_tokens": 2,
        "ignore_eos": True,
        "n": rng.choice((1, 2, 3)),
        "user": "u",
        "priority": 3,
        "timeout": 100.0,
        "cache_salt": "s",
        "request_id": f"r{rng.randrange(5)}",
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "return_tokens_as_token_ids": True,
        "metadata": {"a": "b"},
    }
    chosen = {name: every[name] for name in rng.sample(sorted(every), rng.randint(0, 6))}
    if rng.random() < 0.4:
        chosen["stream"] = True
        if rng.random() < 0.5:
            chosen["stream_options"] = {"include_usage": True}
    return chosen


def valid_body(path: str, rng: Random) -> dict[str, Any]:
    """A body that the server answers within a few steps."""
    model = {} if rng.random() < 0.7 else {"model": "random:tiny"}
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello there"}]
    if path == "/detokenize":
        return {"tokens": [5, 6, 100], **model}
    if path == "/tokenize":
        source = {"prompt": "hello there"} if rng.random() < 0.5 else {"messages": messages}
        return {**source, **model, "return_token_strs": rng.random() < 0.5}
    common = {**model, "max_tokens": rng.randint(1, 6), **_sampling(rng)}
    common["max_tokens"] = max(common["max_tokens"], common.get("min_tokens", 0))
    if path == "/v1/completions":
        prompt = rng.choice(("hello", [5, 6, 7], ["a", "b"], [[4, 5], [6]]))
        extra = {"echo": True, "logprobs": 3} if rng.random() < 0.3 else {}
        return {"prompt": prompt, **extra, **common}
    body: dict[str, Any] = {"messages": messages, **common}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 3}
    if rng.random() < 0.3:
        body |= {"tools": [tool("f"), tool("g")], "tool_choice": rng.choice(("auto", "auto", "none"))}
    if rng.random() < 0.02:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    return body


# -- what is done to them ----------------------------------------------------------------------------------------------


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a tree."""
    found = [] if found is None else found
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(inner, dict | list):
            places(inner, found)
    return found


def swap(body: dict[str, Any], path: str, rng: Random) -> None:
    """Other values in one to three places."""
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(body) or [(body, "x")])
        container[key] = odd_value(rng)


def drop(body: dict[str, Any], path: str, rng: Random) -> None:
    """One field less."""
    if body:
        del body[rng.choice(sorted(body))]


FIELDS = (
    *("suffix", "functions", "audio", "modalities", "best_of", "echo", "logprobs", "top_logprobs", "n", "min_tokens"),
    *("guided_regex", "guided_choice", "truncate_prompt_tokens", "documents", "tool_choice", "parallel_tool_calls"),
    *("reasoning_effort", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "verbosity"),
    *("max_completion_tokens", "timeout", "priority", "request_id", "cache_salt", "model", "temprature", "__class__"),
    *("messages", "prompt", "tokens", "tools", "stream", "stream_options", "response_format", "chat_template", ""),
)


def add(body: dict[str, Any], path: str, rng: Random) -> None:
    """Fields that do not belong there, or have odd values."""
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = odd_value(rng)


def long_field(body: dict[str, Any], path: str, rng: Random) -> None:
    """A million of something in one place."""
    container, key = rng.choice(places(body) or [(body, "prompt")])
    container[key] = long_value(rng)


def deep_field(body: dict[str, Any], path: str, rng: Random) -> None:
    """Deep nesting in one place."""
    container, key = rng.choice(places(body) or [(body, "prompt")])
    container[key] = nested(rng)


def extremes(body: dict[str, Any], path: str, rng: Random) -> None:
    """Numbers out of range, or that contradict each other."""
    chosen: dict[str, Any] = {
        "n": rng.choice((0, 128, 129, 10**9)),
        "best_of": rng.choice((0, 4, 128)),
        "logprobs": rng.choice((20, 21, 10**6, True)),
        "top_logprobs": rng.choice((20, 21, -1)),
        "min_tokens": rng.choice((100, 2**63)),
        "timeout": Raw(rng.choice((b"0", b"-1", b"1e-9", b"0.001", b"1e308", b"1e999"))),
        "priority": rng.choice((2**63, -(2**63), 2**200)),
        "seed": rng.choice((-(2**63), 2**64 - 1, 2**64)),
        "top_k": rng.choice((-1, -2, 2**62, 2**70)),
        "max_tokens": rng.choice((0, -1, 2**63, 250)),
        "temperature": rng.choice((1e-9, 1e6, -0.1)),
        "repetition_penalty": rng.choice((1e-300, 0, 100)),
    }
    body.update({name: chosen[name] for name in rng.sample(sorted(chosen), rng.randint(1, 3))})


def stops(body: dict[str, Any], path: str, rng: Random) -> None:
    """Hostile lists of stops and biases."""
    field, value = rng.choice(
        (
            ("stop", [""]),
            ("stop", ["a" * 100_000]),
            ("stop", [f"s{i}" for i in range(65)]),
            ("stop", ["a" * i for i in range(1, 65)]),
            ("stop", ["\x00", "\ufffd", " ", "\n"]),
            ("stop", Raw(b'["\\ud800"]')),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", list(range(257))),
            ("stop_token_ids", list(range(100_000))),
            ("stop_token_ids", [2**31]),
            ("logit_bias", {str(i): -100 for i in range(256)}),
            ("logit_bias", {str(i): 100 for i in range(256)}),
            ("logit_bias", {"abc": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"99999999": 1}),
            ("logit_bias", {"\uff11": 1}),
            ("logit_bias", {"0" * 5000: 1}),
            ("logit_bias", Raw(b'{"1":1e999}')),
            ("logit_bias", Pairs([("1", 1), ("01", 2), ("1", 3)])),
        )
    )
    body[field] = value


def _grow(depth: int) -> dict[str, Any]:
    return {"allOf": [_grow(depth - 1)] * 2} if depth else {"type": "object"}


SCHEMAS: tuple[Callable[[], Any], ...] = (
    lambda: {"$ref": "#"},
    lambda: {"$ref": "http://127.0.0.1:1/x"},
    lambda: {"$ref": "#/$defs/none"},
    lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    lambda: {"type": "nothing"},
    lambda: {"type": ["string", 5]},
    lambda: {"enum": []},
    lambda: {"enum": [f"v{i}" for i in range(10_000)]},
    lambda: {"type": "string", "pattern": "(a+)+$"},
    lambda: {"type": "string", "pattern": "(?=a)b\\1"},
    lambda: {"type": "string", "pattern": "["},
    lambda: {"type": "string", "minLength": 10**9},
    lambda: {"type": "array", "minItems": 2**70, "items": {}},
    lambda: {"type": "integer", "minimum": 5, "maximum": 4},
    lambda: {"type": "number", "multipleOf": 0},
    lambda: {"allOf": [{"type": "string"}, {"type": "integer"}]},
    lambda: {"not": {}},
    lambda: {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    lambda: {"patternProperties": {"(": {}}},
    lambda: {"required": "a", "properties": []},
    lambda: _grow(9),
    lambda: {"type": "object", "properties": {"\x00\ud83d\ude00": {}}},
    lambda: True,
    lambda: Raw(b'{"maximum":1e999}'),
)
PATTERNS = (
    *(
        "(",
        "[z-a]",
        "\\",
        "(?P<n>a)(?P=n)",
        "(a{1000}){1000}{1000}",
        "a{100000000}",
        "(a|a)*b",
        "\\p{Nope}",
        "(?i)\\u{110000}",
    ),
    *(".*" * 5000, "(" * 20_000, "[^\\x00-\\x{10ffff}]", "\x00", "$^", "(?<=a)b", "x" * 300_000, "\\b\\B"),
)
GRAMMARS = ("root ::= root", "start: start", "root ::=", "start: /(/", "\x00", 'start: "a" | ' * 9, "%import python.x")


def forms(body: dict[str, Any], path: str, rng: Random) -> None:
    """Schemas, expressions and grammars that are wrong, or cost a lot."""
    schema = rng.choice(SCHEMAS)()
    kind = rng.randrange(7)
    if kind == 0:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    elif kind == 1:
        body["structured_outputs"] = {"regex": rng.choice(PATTERNS)}
    elif kind == 2:
        body["guided_json"] = schema
    elif kind == 3:
        body["structured_outputs"] = {"grammar": rng.choice(GRAMMARS)}
    elif kind == 4:
        body["guided_choice"] = rng.choice(([], [""], ["a"] * 5000, ["\x00", "\ufffd"], ["a" * 300_000]))
    elif kind == 5:
        body["tools"] = [tool("f", schema), tool("g")]
        body["tool_choice"] = "required"
    else:
        body["structured_outputs"] = {"json_object": True, "whitespace_pattern": rng.choice(PATTERNS[:8])}


def chat_parts(body: dict[str, Any], path: str, rng: Random) -> None:
    """Messages, tools and template arguments of odd forms."""
    messages = rng.choice(
        (
            [],
            [{}],
            [{"role": "user"}],
            [{"role": "nobody", "content": None}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": "{"}}]}],
            [{"role": "tool", "tool_call_id": 5, "content": {"a": "b"}}],
            [{"role": "user", "content": "x"}] * 20_000,
            [{"role": "user", "content": 5, "name": ["x"]}],
            [{"role": "assistant", "content": "to be continued"}],
        )
    )
    body["messages"] = messages
    arguments = ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "self", "tokenize", "")
    if rng.random() < 0.4:
        body["chat_template_kwargs"] = {rng.choice(arguments): odd_value(rng)}
    if rng.random() < 0.3:
        body["continue_final_message"] = True
    if rng.random() < 0.4 and path.startswith("/v1"):
        body["tools"] = rng.choice(
            ([tool("f")] * 2, [tool("f" * 65)], [tool("")], [tool(f"t{i}") for i in range(129)], [5])
        )
        body["tool_choice"] = rng.choice(({"type": "function"}, "f", {"type": "allowed_tools", "allowed_tools": {}}, 5))


def repeat_keys(body: dict[str, Any], path: str, rng: Random) -> Pairs:
    """The same keys again, with other values."""
    pairs = Pairs(body.items())
    for _ in range(rng.randint(1, 5)):
        pairs.insert(rng.randint(0, len(pairs)), (rng.choice([*body, "a"]), odd_value(rng)))
    if rng.random() < 0.1:
        pairs.extend([("stop", "x")] * 10_000)
    return pairs


def damage(text: bytes, rng: Random) -> bytes:
    """Bytes cut off, changed, put in or put before."""
    kind = rng.randrange(5)
    at = rng.randrange(len(text) + 1)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + rng.randbytes(rng.randint(1, 8)) + text[at:]
    if kind == 2:
        changed = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 3:
        return text + rng.choice((b"{}", b"x", b"\x00", b"]", b" " * 10_000, text))
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"/**/", b" ", b"[")) + text


Change = Callable[[dict[str, Any], str, Random], Pairs | None]
CHANGES: dict[str, tuple[Change, float]] = {
    "swapped values": (swap, 30),
    "a field less": (drop, 3),
    "odd fields": (add, 10),
    "long": (long_field, 0.8),
    "deep": (deep_field, 4),
    "extreme numbers": (extremes, 10),
    "stops": (stops, 7),
    "forms": (forms, 3),
    "chat parts": (chat_parts, 7),
    "repeated keys": (repeat_keys, 4),
}
"""Changes, and how often each is made."""


def hostile_body(rng: Random) -> tuple[str, str, bytes]:
    """What is wrong, the path, and the body."""
    path = rng.choices(PATHS, (8, 8, 3, 2))[0]
    body = valid_body(path, rng)
    if rng.random() < 0.15:
        return "damaged", path, damage(dump(body), rng)
    name = rng.choices(list(CHANGES), [weight for _, weight in CHANGES.values()])[0]
    changed = copy.deepcopy(body)
    result = CHANGES[name][0](changed, path, rng)
    text = dump(changed if result is None else result)
    if rng.random() < 0.03:
        text = damage(text, rng)
    return name, path, text
