"""Tool calls beside another form: the rules that join the two, in Lark's notation.

```
start ──► @content                                               the form that was asked for
      ├─► opener @call closer   again and again                  with tags
      └─► prefix? @call         again, with a separator between  bare
```
`@content` and `@call` are grammars of their own (:func:`minillm.engine.grammar_check.make_grammar`).
"""

from __future__ import annotations

import json
from collections.abc import Collection

from minillm.core.structured_outputs import ToolCalls

_SPACE = r"/[ \t\r\n]{1,8}/"
"""Between the parts; models write a new line. Bounded, since small ones can go on with white space for ever."""


def call_rules(calls: ToolCalls, control_texts: Collection[str] = ()) -> str:
    """The rules. Tags among `control_texts` are tokens of the vocabulary that stand for no text, and are named so."""

    def term(tag: str) -> str:
        return tag if tag in control_texts else json.dumps(tag)

    def repeated(first: str, next_one: str) -> str:
        return f"{first} ({next_one}){{0,{calls.max_calls - 1}}}" if calls.max_calls > 1 else first

    ways, rules = ["@content"], [f"space: {_SPACE}"]
    if calls.tags is not None:
        opener, closer = calls.tags
        rules.append(f"tagged: {term(opener)} space? @call space? {term(closer)}")
        ways.append(repeated("tagged", "space? tagged"))
    if calls.bare:
        separator = " | ".join(json.dumps(character) for character in calls.separators)
        rules.append(f"separator: {separator}")
        prefix = f"({term(calls.prefix)} space?)? " if calls.prefix else ""
        ways.append(repeated(f"{prefix}@call", "space? separator space? @call"))
    return "\n".join([f"start: {' | '.join(ways)}", *rules])
