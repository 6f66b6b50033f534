"""Opening an engine from the command line, and following one request to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from minillm.cli import console
from minillm.cli.options import Options
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig

if TYPE_CHECKING:
    from minillm.core.observer import Observer
    from minillm.engine.outputs import RequestOutput
    from minillm.engine.runtime import Runtime

Message = dict[str, str]


def open_runtime(engine: Options, observer: Observer | None = None) -> Runtime:
    """Start an engine with these options, showing what is being waited for. The caller closes it."""
    from minillm.models.default_model import resolve_model

    # The engine's own series of seeds starts at 0, for programs that repeat a run; here each run gives another answer.
    config = EngineConfig(**{"seed": None, **engine})
    resolve_model(config.model, console.info)
    with console.working(f"Loading {config.model}"):
        from minillm.engine.runtime import Runtime

        return Runtime(config, observer=observer)


def has_chat_template(runtime: Runtime) -> bool:
    """Whether messages can be given to this model."""
    return bool(runtime.config.chat_template or runtime.tokenizer.chat_templates)


def sampling_params(options: Options, runtime: Runtime | None = None) -> SamplingParams:
    """The given options over the model's defaults (over the neutral ones without a runtime: to check them early)."""
    return SamplingParams(**options) if runtime is None else replace(runtime.default_sampling_params(), **options)


def messages_of(text: str, system: str | None = None) -> list[Message]:
    """A conversation of one user message."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def follow(
    runtime: Runtime, prompt: str | list[Message], params: SamplingParams, write: Callable[[str], None]
) -> RequestOutput:
    """Stream a request, handing each piece of text to `write`; whatever ends this early cancels the request.

    Raises the request's own error if it failed.
    """
    with runtime.stream(prompt, params) as stream:
        for event in stream:
            if event.text:
                write(event.text)
        assert stream.output is not None
        return stream.output.raise_for_error()


def summary(output: RequestOutput) -> str:
    """Counts and times of a complete answer in one line. The rate is that of the tokens after the first."""
    metrics = output.metrics
    tokens = sum(len(choice.token_ids) for choice in output.outputs)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens", f"{tokens} generated"]
    if metrics.time_to_first_token is not None:
        parts.append(f"time to first token {metrics.time_to_first_token:.2f} s")
    if metrics.decode_time and tokens > len(output.outputs):
        parts.append(f"{(tokens - len(output.outputs)) / metrics.decode_time:.1f} tokens/s")
    parts.append("/".join(sorted({str(choice.finish_reason) for choice in output.outputs})))
    return ", ".join(parts)
