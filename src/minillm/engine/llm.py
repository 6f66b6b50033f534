"""Offline inference: a list of prompts in, a list of outputs back, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any, TypeVar

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.inputs import Message, Prompt, is_messages, is_token_ids
from minillm.engine.outputs import RequestOutput
from minillm.engine.runtime import Runtime
from minillm.engine.streams import RequestFuture

if TYPE_CHECKING:
    from minillm.core.stats import SchedulerStats
    from minillm.models.tokenizer import Tokenizer

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all) whenever one ends."""


class LLM:
    """A model for offline inference, with vLLM's interface: ``LLM("smollm2-135m").generate(["Hello"])``.

    Keywords are the fields of :class:`EngineConfig`. Lists are all or nothing: if one prompt is refused, its error is
    raised and none is run. An interrupt (Ctrl-C) cancels what was submitted.
    """

    def __init__(self, model: str = "smollm2-135m", *, runtime: Runtime | None = None, **options: Any) -> None:
        """`runtime` is used instead of starting one (and `close` closes it)."""
        self.runtime = runtime if runtime is not None else Runtime(EngineConfig(model, **options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Progress = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; the outputs come in the prompts' order.

        `prompts`: text, token ids, a mapping form, or a list of these. `sampling_params` and `priority`: one for all
        or one each; None takes the model's defaults (:meth:`get_default_sampling_params`). `max_tokens` is 16 unless
        given. `use_tqdm`: True shows a progress bar, a callable gets (done, total).
        """
        single = isinstance(prompts, str | Mapping) or is_token_ids(prompts) or not isinstance(prompts, Sequence)
        items: list[Any] = [prompts] if single else list(prompts)  # type: ignore[arg-type]
        for item in items:
            if is_messages(item):
                raise InvalidParameterError("prompts", type(item).__name__, "messages go to chat()")
        return self._run(items, sampling_params, priority, use_tqdm, {})

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Progress = False,
        priority: int | Sequence[int] | None = None,
        **chat_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of them.

        `max_tokens` is what is left of the context unless given. `chat_options` go to the chat template:
        `add_generation_prompt`, `continue_final_message`, `chat_template`, `tools`, and the template's own variables.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
            raise InvalidParameterError("messages", messages, "it must be a non-empty list of messages")
        conversations = [messages] if is_messages(messages) else list(messages)
        for conversation in conversations:
            if not is_messages(conversation):
                rule = "each conversation must be a non-empty list of messages"
                raise InvalidParameterError("messages", conversation, rule)
        return self._run(conversations, sampling_params, priority, use_tqdm, {"chat_options": chat_options})

    def get_default_sampling_params(self) -> SamplingParams:
        """What None stands for: the model's generation_config, unless configured otherwise."""
        return self.runtime.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.runtime.tokenizer

    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler."""
        return self.runtime.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.runtime.reset_prefix_cache()

    def close(self) -> None:
        """End the engine thread and free the model. Dropping the object does so too."""
        self.runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | Progress,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        self.runtime.check_may_wait()
        params = _one_each("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = _one_each("priority", priority, int, len(prompts))
        futures = self.runtime.submit_many(
            [
                {"prompt": prompt, "sampling_params": one, "priority": level or 0, **options}
                for prompt, one, level in zip(prompts, params, priorities, strict=True)
            ]
        )
        try:
            _wait(futures, use_tqdm)
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _one_each(name: str, value: T | Sequence[T] | None, kind: type[T], count: int) -> Iterable[T | None]:
    """One value per prompt, from one for all or a list."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence):
        raise InvalidParameterError(name, type(value).__name__, f"it must be {kind.__name__}, or one per prompt")
    if len(value) != count:
        raise InvalidParameterError(name, len(value), f"there must be one for each of the {count} prompts")
    return value


def _wait(futures: Sequence[RequestFuture], use_tqdm: bool | Progress) -> None:
    if use_tqdm is False:
        wait(futures)
        return
    if use_tqdm is not True:
        _follow(futures, use_tqdm)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("generate", total=len(futures))
        _follow(futures, lambda done, total: bar.update(task, completed=done, total=total))


def _follow(futures: Sequence[RequestFuture], progress: Progress) -> None:
    for done, _ in enumerate(as_completed(futures), start=1):
        progress(done, len(futures))
