"""`minillm generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minillm.cli import console
from minillm.cli.options import CHOICES, ENGINE, SAMPLING, Options, with_options
from minillm.cli.session import follow, has_chat_template, messages_of, open_runtime, sampling_params, summary

if TYPE_CHECKING:
    from minillm.engine.outputs import CompletionOutput, RequestOutput


@with_options(sampling=SAMPLING, choices=CHOICES, engine=ENGINE)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)],
    engine: Options,
    sampling: Options,
    choices: Options,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or complete it as it is. "
            "Default: the template if the model has one.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message for the chat template.")] = None,
    stream: Annotated[bool, typer.Option(help="Print text as it comes, or only when it is complete.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is complete.")] = False,
) -> None:
    """Answer PROMPT. The answer goes to standard output, all else to standard error."""
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template, so it does not go with --raw")
    text = sys.stdin.read() if prompt == "-" else prompt
    requested = sampling | choices
    sampling_params(requested)
    with open_runtime(engine) as runtime:
        use_chat = has_chat_template(runtime) if chat is None else chat
        request = messages_of(text, system) if use_chat else text
        params = sampling_params(requested, runtime)
        if stream and not as_json and params.n == 1:
            output = follow(runtime, request, params, _write)
            _write("" if output.outputs[0].text.endswith("\n") else "\n")
        else:
            output = runtime.submit(request, params).result().raise_for_error()
            if as_json:
                print(json.dumps(as_dict(output, runtime.config.model), ensure_ascii=False))
            else:
                _print_choices(output)
        console.info(summary(output))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_choices(output: RequestOutput) -> None:
    for choice in output.outputs:
        if len(output.outputs) > 1:
            print(f"--- choice {choice.index} ({choice.finish_reason})")
        print(choice.text)


def as_dict(output: RequestOutput, model: str) -> dict[str, Any]:
    """The JSON form of an answer; times in seconds."""
    metrics = output.metrics
    return {
        "id": output.request_id,
        "model": model,
        "choices": [_choice_as_dict(choice) for choice in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
            "cached_tokens": output.num_cached_tokens,
        },
        "metrics": {
            "time_in_queue": metrics.time_in_queue,
            "time_to_first_token": metrics.time_to_first_token,
            "latency": metrics.latency,
            "preemptions": metrics.num_preemptions,
        },
    }


def _choice_as_dict(choice: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        fields["logprobs"] = [
            [
                {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
                for token_id, entry in position.items()
            ]
            for position in choice.logprobs
        ]
    return fields
