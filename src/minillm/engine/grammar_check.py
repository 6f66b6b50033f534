"""Makes a grammar of a structured-output request and checks that it compiles, as a program of its own.

A schema or an expression from outside can cost its compiler minutes and gigabytes (references inside nested `allOf`
are enough: each level multiplies the one below). The library's own limits do not stop that in time. So whatever comes
is first compiled here, in a process with a limit on CPU time and memory, and only what passes is compiled in the
engine's process.

One JSON object on standard input (`kind`, `text`, `options`, `calls`, `limits`), one on standard output: `grammar`, and
`error` if it does not compile. Imports nothing of the package: its start is part of a request's latency.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

CPU_SECONDS = 2
MEMORY_BYTES = 512 << 20
"""Address space beyond what the started interpreter has."""
TRIED_BYTES = 8


def make_grammar(kind: str, text: str, options: Any, calls: Any = None) -> str:
    """The library's grammar for a request of this kind; `text` of a choice is a JSON list. ValueError if there is none.

    `calls` (`schema` and `options` of a tool call, `rules` in Lark's notation) joins calls to it: its start rule refers
    to the grammars `@content` and `@call`. Only the syntax that has to be rewritten is checked; the grammar may not
    compile.
    """
    from llguidance import LLMatcher

    content = _make_content(kind, text, options)
    if calls is None:
        return content
    call = LLMatcher.grammar_from_json_schema(calls["schema"], overrides=calls["options"])
    parts = [{"lark_grammar": calls["rules"]}, _named("content", content), _named("call", call)]
    return json.dumps({"grammars": parts})


def _named(name: str, grammar: str) -> dict[str, Any]:
    """A grammar of the library (Lark's notation, or JSON with one member) as a member of a list of grammars."""
    part = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return {**part, "name": name}


def _make_content(kind: str, text: str, options: Any) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        quoted = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # its own classes, and whatever odd input makes of them
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check(request: dict[str, Any]) -> dict[str, str]:
    """The answer to one request."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    try:
        grammar = make_grammar(request["kind"], request["text"], request["options"], request["calls"])
    except ValueError as error:
        return {"error": str(error)}
    limits = LLParserLimits(**request["limits"])
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_error:
        return {"grammar": grammar, "error": messages[0]}
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    for share in (0.0, 0.5, 1.0):
        tried = matcher.deep_copy()
        _try_out(tried, share)
        if tried.is_error():
            return {"grammar": grammar, "error": tried.get_error()}
    return {"grammar": grammar}


def _try_out(matcher: Any, share: float) -> None:
    """Mask the first few bytes: what is valid can still cost minutes and gigabytes at its first use (`a{100000000}`,
    or `.*` some thousands of times), or be more than the library's limits allow (an object of some thousand optional
    properties, at its first name). `share` says which of the allowed bytes is taken.
    """
    for _ in range(TRIED_BYTES):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed or not matcher.consume_token(allowed[int(share * (len(allowed) - 1))]):
            return


def _limit_resources() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer the request on standard input. `argv[1]`, if given, is the folder that holds the library."""
    sys.path[:0] = sys.argv[1:2]
    request = json.loads(sys.stdin.buffer.read())
    import llguidance  # noqa: F401  (mapped before the limit is set, so that the limit is for the work alone)

    _limit_resources()
    sys.stdout.write(json.dumps(check(request)))


if __name__ == "__main__":
    main()
