"""What the README and the docs say is so: programs run, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def command_lines() -> list[str]:
    """Every `minillm ...` line of a code block or a code span, without its comment."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        found += [line for line in lines if line.startswith("minillm ")]
        found += [
            span for span in re.findall(r"`(minillm [^`]+)`", text) if "COMMAND" not in span and "NAME" not in span
        ]
    return sorted(set(found))


@pytest.mark.integration
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_of_the_readme_run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    if "capital of France" in program:
        assert "Paris" in done.stdout


@pytest.mark.parametrize("line", command_lines())
def test_commands_of_the_pages_have_these_options(cli, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "<", ">")), len(words))]
    commands = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
    help_text = cli(*(commands if commands[0] in ("bench", "kernels") else commands[:1]), "--help")
    assert help_text.code == 0, help_text.err
    for option in (word for word in words if word.startswith("--")):
        assert option in help_text.out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in slugs, target
