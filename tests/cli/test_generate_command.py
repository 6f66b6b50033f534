"""`minillm generate` against a scripted runtime."""

from __future__ import annotations

import io
import json
import sys

import pytest

from minillm.cli import session
from minillm.core.errors import ModelLoadError, PromptTooLongError


def test_only_the_answer_goes_to_stdout(cli, runtime) -> None:
    done = cli("generate", "Capital of France?")
    assert (done.code, done.out) == (0, "Paris.\n")
    assert "4 prompt tokens, 3 generated, time to first token 1.00 s, 1.0 tokens/s, stop" in done.err
    assert runtime.closed and runtime.closed_streams == 1


def test_chat_template_is_the_default_where_the_model_has_one(cli, runtime) -> None:
    cli("generate", "Hi")
    assert runtime.prompts == [[{"role": "user", "content": "Hi"}]]


def test_raw_gives_the_prompt_as_it_is(cli, runtime) -> None:
    cli("generate", "Hi", "--raw")
    assert runtime.prompts == ["Hi"]


def test_a_model_without_template_completes_the_prompt(cli, runtime) -> None:
    runtime.tokenizer.chat_templates = {}
    cli("generate", "Hi")
    assert runtime.prompts == ["Hi"]


def test_system_message_comes_first_and_refuses_raw(cli, runtime) -> None:
    cli("generate", "Hi", "--system", "Be brief.")
    assert runtime.prompts[0][0] == {"role": "system", "content": "Be brief."}
    done = cli("generate", "Hi", "--system", "Be brief.", "--raw")
    assert done.code == 2 and len(done.errors) == 1 and "--raw" in done.errors[0]


def test_dash_reads_the_prompt_from_stdin(cli, runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    cli("generate", "-", "--raw")
    assert runtime.prompts == ["from a pipe\n"]


def test_sampling_options_reach_the_request_and_others_keep_the_models_defaults(cli, runtime) -> None:
    runtime.defaults = type(runtime.defaults)(top_k=7, temperature=0.6)
    cli("generate", "Hi", "--temperature", "0.2", "--top-p", "0.5", "--seed", "4", "--stop", "a", "--stop", "b")
    (params,) = runtime.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.2, 0.5, 7, 4)
    assert params.stop == ("a", "b")


def test_engine_options_reach_the_configuration(cli, runtime) -> None:
    cli("generate", "Hi", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--swap-space", "0.5", "-m", "other")
    config = runtime.config
    assert (config.max_num_seqs, config.enable_prefix_caching, config.swap_space, config.model) == (
        3,
        False,
        0.5,
        "other",
    )


def test_json_has_choices_usage_and_metrics(cli, runtime) -> None:
    done = cli("generate", "Hi", "--json", "--logprobs", "1")
    answer = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "cached_tokens": 16}
    assert answer["metrics"] == {"time_in_queue": 0.5, "time_to_first_token": 1.0, "latency": 3.0, "preemptions": 3}
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("Paris.", [100, 101, 102], "stop")
    assert choice["logprobs"] == [[{"token_id": 7, "token": "Par", "logprob": -0.5, "rank": 1}]]


def test_several_choices_are_printed_under_headings(cli, runtime) -> None:
    done = cli("generate", "Hi", "--n", "2")
    assert done.out == "--- choice 0 (stop)\nParis.\n--- choice 1 (stop)\nParis.\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-tokens", "0"), "max_tokens=0"),
        (("--max-tokens", "-1"), "max_tokens=-1"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--top-p", "1.1"), "top_p=1.1"),
        (("--n", "0"), "n=0"),
        (("--dtype", "int3"), "dtype='int3'"),
        (("--preemption-mode", "never"), "preemption_mode='never'"),
        (("--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--max-num-seqs", "many"), "--max-num-seqs"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_bad_values_are_one_line_and_exit_2(cli, runtime, arguments: tuple[str, ...], named: str) -> None:
    done = cli("generate", "Hi", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    assert named in done.errors[0]
    assert runtime.prompts == []


def test_a_refused_prompt_exits_2_and_names_both_sizes(cli, runtime) -> None:
    runtime.error = PromptTooLongError(9000, None, 8192)
    done = cli("generate", "Hi")
    assert done.code == 2 and "9000" in done.errors[0] and "8192" in done.errors[0]
    assert runtime.closed


def test_a_failure_exits_1_in_one_line(cli, runtime) -> None:
    runtime.error = ModelLoadError("model.gguf: truncated\nat byte 17")
    done = cli("generate", "Hi")
    assert (done.code, done.err) == (1, "minillm: error: model.gguf: truncated at byte 17\n")


def test_an_unexpected_error_hides_its_traceback_unless_debug(cli, runtime) -> None:
    runtime.error = ZeroDivisionError("oops")  # type: ignore[assignment]
    done = cli("generate", "Hi")
    assert done.code == 1 and "ZeroDivisionError: oops" in done.err and "Traceback" not in done.err
    done = cli("generate", "Hi", "--debug")
    assert done.code == 1 and "Traceback" in done.err and len(done.errors) == 1


def test_ctrl_c_closes_the_stream_and_exits_130(cli, runtime) -> None:
    runtime.interrupt_at = 1
    done = cli("generate", "Hi")
    assert done.code == 130
    assert done.out == "Par"
    assert "Traceback" not in done.err
    assert runtime.closed_streams == 1 and runtime.closed


@pytest.mark.parametrize("text", ["", "--help"])
def test_prompt_is_taken_literally_after_a_double_dash(cli, runtime, text: str) -> None:
    cli("generate", "--raw", "--", text)
    assert runtime.prompts == [text]


def test_without_a_seed_each_run_gives_another_answer(monkeypatch) -> None:
    monkeypatch.setattr("minillm.models.default_model.resolve_model", lambda *_: None)
    monkeypatch.setattr("minillm.engine.runtime.Runtime", lambda config, observer: config)
    assert session.open_runtime({}).seed is None
