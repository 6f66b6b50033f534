"""Groups of options, each defined once and shared by the commands that take it.

The options of the engine and of sampling are fields of `EngineConfig` and `SamplingParams`: names, types and defaults
come from there, only the help texts are here. A command gets a group as a dict of the options that were given, so
that what was not given keeps the engine's own default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from minillm.cli import console
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig

Options = dict[str, Any]
"""The options of a group that were given, by field name."""

_REPEATABLE: dict[Any, Any] = {Sequence[str]: list[str], Sequence[int]: list[int]}


@dataclass(frozen=True)
class OptionGroup:
    """Options for those fields of the dataclass `source` that `help` names."""

    source: type
    help: Mapping[str, str]
    short: Mapping[str, str] = field(default_factory=dict)
    show_defaults: bool = True

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter per field; its value None stands for 'not given'."""
        hints = get_type_hints(self.source)
        defaults = {f.name: f.default for f in fields(self.source)}
        return [self._parameter(name, hints[name], defaults[name]) for name in self.help]

    def _parameter(self, name: str, hint: Any, default: Any) -> inspect.Parameter:
        flag = "--" + name.replace("_", "-")
        hint = _REPEATABLE.get(hint, hint)
        if hint in (bool, bool | None) and default is not False:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(
            flag,
            *([self.short[name]] if name in self.short else []),
            help=f"{self.help[name]} [{default}]"
            if self.show_defaults and default not in (None, False)
            else self.help[name],
            show_default=False,
        )
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
        )


ENGINE = OptionGroup(
    source=EngineConfig,
    short={"model": "-m"},
    help={
        "model": "Built-in name, folder, GGUF file or Hugging Face id.",
        "tokenizer": "Folder or id of a tokenizer to use instead of the model's own.",
        "dtype": "float32, bfloat16, float16, or auto: what is fastest on this device.",
        "kv_cache_dtype": "Type of the KV cache: auto is the model's.",
        "device": "cpu, cuda, cuda:N, or auto: the first GPU that can be used, else the CPU.",
        "chat_template": "File with a Jinja chat template to use instead of the model's own.",
        "generation_config": "Where sampling defaults come from: auto (the model), vllm (neutral), or a folder.",
        "max_model_len": "Longest prompt + output in tokens; the model's own if not given.",
        "block_size": "Tokens of a KV block.",
        "num_gpu_blocks_override": "KV blocks of the pool (on a CPU too) instead of sizing it from free memory.",
        "gpu_memory_utilization": "Share of a GPU's memory that may be in use, KV pool included (no effect on a CPU).",
        "enable_prefix_caching": "Share the KV blocks of equal prefixes.",
        "swap_space": "Host memory for preempted requests, GiB; 0: none; not given: up to 4.",
        "max_swapped_requests": "Most requests that are swapped out at once.",
        "pin_memory": "Page-lock the swap pool's memory: faster copies (no effect on a CPU).",
        "max_num_seqs": "Most sequences that run at once.",
        "max_num_batched_tokens": "Token budget of a step, prefill and decode together.",
        "max_prefill_tokens_per_step": "Most prefill tokens of a step.",
        "scheduler": "continuous, or static (the baseline).",
        "scheduling_policy": "Order of the queue: priority, fcfs, shortest_prompt, fair.",
        "victim_policy": "Whom memory pressure preempts: lifo, fifo, largest, cost_based.",
        "preemption_mode": "auto, swap or recompute.",
        "check_invariants": "Check the core after every step (slow).",
        "enforce_eager": "No captured graphs (no effect on a CPU).",
    },
)

SAMPLING = OptionGroup(
    source=SamplingParams,
    show_defaults=False,
    help={
        "max_tokens": "Most tokens to generate. Default: the rest of the context for a chat prompt, 16 for a raw one.",
        "temperature": "0 is greedy.",
        "top_p": "Nucleus: smallest set of tokens with this probability, 0 to 1.",
        "top_k": "Most likely tokens that are kept; 0 keeps all.",
        "min_p": "Least probability of a token, relative to the most likely one's.",
        "presence_penalty": "-2 to 2.",
        "frequency_penalty": "-2 to 2.",
        "repetition_penalty": "1 is off.",
        "seed": "The same seed gives the same tokens. Default: drawn.",
        "stop": "Text that ends the answer; may be repeated.",
        "stop_token_ids": "Token that ends the answer; may be repeated.",
        "ignore_eos": "Go on after the end-of-sequence token.",
        "min_tokens": "Least tokens before the answer may end.",
    },
)


CHOICES = OptionGroup(
    source=SamplingParams,
    show_defaults=False,
    help={
        "n": "Number of answers; more than one are printed when all are complete.",
        "logprobs": "Most likely tokens to report at each position (in --json).",
    },
)


def with_options(**groups: OptionGroup) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command the options of each group, handed over as the dict parameter of that name.

    Every command gets `--debug` too.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name not in groups
        ]
        members = {name: group.parameters() for name, group in groups.items()}

        @wraps(command)
        def run(**values: Any) -> Any:
            console.debug = values.pop("debug") or console.debug
            for name, parameters in members.items():
                taken = {p.name: values.pop(p.name) for p in parameters}
                values[name] = {key: value for key, value in taken.items() if value is not None}
            return command(**values)

        expanded = [*own, *(p for parameters in members.values() for p in parameters), _DEBUG]
        run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in expanded}
        return run

    return decorate


_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
)
