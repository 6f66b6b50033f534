"""Hostile chat templates end in a typed error, soon, and reach nothing of Python."""

from __future__ import annotations

import time

import pytest

from minillm.core.errors import ChatTemplateError
from minillm.models import template_sandbox
from minillm.models.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]

NEVER_ENDING = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops over a literal": "{% for a in [1,2] recursive %}{{ loop([1,2]) if loop.depth < 60 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
TOO_LARGE = {
    "string": "{{ 'a' * 10000000000 }}",
    "string on the right": "{{ 10000000000 * 'a' }}",
    "list": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{{ (2 ** 1000000) * (2 ** 1000000) }}",
}
ESCAPES = {
    "class": "{{ messages.__class__.__mro__ }}",
    "globals": "{{ lipsum.__globals__['os'] }}",
    "init": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "clock": "{{ check_time() }}",
    "change": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", NEVER_ENDING.values(), ids=NEVER_ENDING)
def test_templates_that_never_end_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(ChatTemplateError, match="seconds"):
        render_chat(template, MESSAGES)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE)
def test_operators_make_nothing_huge(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="would make more than"):
        render_chat(template, MESSAGES)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 1000)
    template = "{% for a in range(N) %}0123456789{% endfor %}"
    assert len(render_chat(template.replace("N", "100"), MESSAGES)[0]) == 1000
    with pytest.raises(ChatTemplateError, match="over 1000 characters"):
        render_chat(template.replace("N", "101"), MESSAGES)


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES)
def test_nothing_of_python_is_reached(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(template, MESSAGES)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}", "1hi"),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% break %}{% endfor %}", "2"),
        ("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}", "---1024123.00.5"),
        ("{{ dict(self=1, context=2).context }}", "2"),
    ],
)
def test_ordinary_loops_operators_and_calls_work(template: str, text: str) -> None:
    assert render_chat(template, MESSAGES)[0] == text
