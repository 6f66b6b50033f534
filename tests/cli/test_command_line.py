"""The command line as a whole: what it imports, how fast it answers, and its help."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from minillm.core.errors import EngineDeadError

HEAVY = {"torch", "transformers", "numpy", "gguf", "tokenizers", "safetensors", "jinja2"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "cpu", "--help"]])
def test_help_and_version_import_nothing_heavy_and_answer_at_once(arguments: list[str]) -> None:
    code = f"""
import sys
from minillm.cli.app import run
code = run({arguments!r})
print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
raise SystemExit(code)
"""
    start = time.perf_counter()
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert done.stdout
    assert time.perf_counter() - start < 5


def test_help_lists_the_commands_that_exist_and_no_others(cli) -> None:
    text = cli("--help").out
    for command in ("generate", "chat", "serve", "models", "doctor", "bench"):
        assert command in text
    for command in ("record", "replay", "simulate", "timeline"):
        assert f" {command} " not in text


def test_an_unknown_command_is_one_line_and_exit_2(cli) -> None:
    done = cli("sing")
    assert done.code == 2 and len(done.err.splitlines()) == 1 and "sing" in done.errors[0]


def test_engine_help_shows_the_defaults_of_the_configuration(cli) -> None:
    text = " ".join(cli("generate", "--help").out.split())
    assert "--max-num-seqs" in text and "once. [64]" in text
    assert "--enable-prefix-caching" in text and "--no-enable-prefix-caching" in text


def test_every_engine_option_is_a_field_of_the_configuration_and_back() -> None:
    from dataclasses import fields

    from minillm.cli.options import ENGINE
    from minillm.engine.config import EngineConfig

    of_a_server = {"ageing_interval", "max_waiting", "user_weights"}
    not_options = of_a_server | {"seed", "watermark_blocks", "max_preemptions", "overlap"}
    assert set(ENGINE.help) | not_options == {field.name for field in fields(EngineConfig)}


def test_a_closed_pipe_ends_quietly() -> None:
    code = "from minillm.cli import main; import sys; main(['generate', '--help'])"
    shell = f'{sys.executable} -c "{code}" | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() in ("0", "1")


def test_log_records_are_one_line_and_show_a_traceback_only_under_debug(cli, runtime, monkeypatch) -> None:
    import logging

    def submit(*_: object) -> None:
        try:
            raise ValueError("first\nsecond")
        except ValueError as error:
            logging.getLogger("minillm.engine").error("step %d failed", 7, exc_info=error)
        raise EngineDeadError("dead")

    monkeypatch.setattr(runtime, "submit", submit)
    done = cli("generate", "Hi", "--no-stream")
    assert done.code == 1 and done.err.splitlines() == ["minillm: error: step 7 failed", "minillm: error: dead"]
    assert "Traceback" in cli("generate", "Hi", "--no-stream", "--debug").err


def test_control_characters_of_an_error_are_spelled_out(capsys) -> None:
    from minillm.cli import console

    console.print_error("template says \x1b[2J\x07\nDone: ü")
    assert capsys.readouterr().err == "minillm: error: template says \\x1b[2J\\x07 Done: ü\n"
