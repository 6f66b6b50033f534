"""The runtime: an engine with its own thread, for any number of callers in threads and event loops."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from minillm.core.errors import DuplicateRequestError, InvalidParameterError
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.engine_thread import EngineThread, LoaderThread, Ticket
from minillm.engine.factory import EngineParts, build_engine
from minillm.engine.inputs import Prompt
from minillm.engine.streams import AsyncRequestStream, EventBuffer, RequestFuture, RequestStream, Sink

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.observer import Observer
    from minillm.core.stats import SchedulerStats
    from minillm.models.tokenizer import Tokenizer

T = TypeVar("T")


class Runtime:
    """Loads a model and serves requests. A context manager; every method may be called from any thread.

    Requests are tokenised and validated in the caller's thread: what is refused raises there (a
    :class:`RequestError`), before anything is queued. `submit`, `stream` and `astream` take the same arguments:

    - ``prompt``: text, token ids, chat messages (mappings with role and content), vLLM's mapping forms, or a
      :class:`Request` from :meth:`prepare` (it has its parameters; give no others).
    - ``sampling_params``: None takes :meth:`default_sampling_params`.
    - ``priority``: lower runs first. ``user``: for the `fair` policy. ``cache_salt``: prefixes are shared only with
      requests of the same salt.
    - ``timeout``: seconds from now after which the request is cancelled, wherever it is.
    - ``request_id``: None makes one. :class:`DuplicateRequestError` while another live request has it; free again
      as soon as that has ended or `cancel` was called.
    - ``chat_options``: keywords for the chat template, such as ``add_generation_prompt``, ``tools``.

    How a request ends: `stop` or `length`; `cancelled` (partial output); `error` (it failed alone: see
    `RequestOutput.raise_for_error`). If the engine fails, every future and stream raises :class:`EngineDeadError`
    with the cause, and so does every later call that would submit. A forked child has no engine: there every call
    that would submit raises it too, and futures and streams stay the parent's.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        progress: Callable[[str], None] | None = None,
        parts: EngineParts | None = None,
        **options: Any,
    ) -> None:
        """`options` are fields of :class:`EngineConfig`, in place of `config`. `observer` sees every decision;
        `progress` is told in one line what takes long while loading.

        `parts` is an engine that was assembled elsewhere (another runner, a scripted one); `config` is then its own.
        """
        loader = None
        if parts is None:
            if config is not None and options:
                raise InvalidParameterError("config", sorted(options), "give a config or keywords, not both")
            wanted = config if config is not None else EngineConfig(**options)
            loader = LoaderThread(partial(build_engine, wanted, observer=observer, progress=progress))
            parts = loader.result()
        self.config = parts.config
        self.model_info = parts.model_info
        self.max_model_len = parts.model_info.max_model_len
        self._inputs = parts.inputs
        self._engine = parts.engine
        self._thread = EngineThread(parts.engine, parts.config.max_waiting, loader)
        self._numbers = itertools.count(1)
        self._finalizer = weakref.finalize(self, EngineThread.request_close, self._thread)
        self._finalizer.atexit = False

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestFuture:
        """Queue a request; the future has `request_id` and resolves to a :class:`RequestOutput`."""
        return self.submit_many([{"prompt": prompt, "sampling_params": sampling_params, **options}])[0]

    def submit_many(self, requests: Sequence[Mapping[str, Any]]) -> list[RequestFuture]:
        """Queue several requests, each given as the arguments of `submit`, all or none: if one is refused its error
        is raised and nothing is queued."""
        tickets, futures = [], []
        for arguments in requests:
            request, text = self._prepare(**arguments)
            future = RequestFuture(self, request.request_id)
            future._ticket = Ticket(request, text, future)
            futures.append(future)
            tickets.append(future._ticket)
        self._thread.submit(tickets)
        return futures

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestStream:
        """Validate and queue a request now; iterate its :class:`TokenEvent`. Dropping the iterator cancels.

        Events are buffered without bound: a slow reader never slows the engine.
        """
        buffer = EventBuffer()
        return RequestStream(self, self._enqueue(prompt, sampling_params, buffer, options), buffer)

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncRequestStream:
        """The same for `async for`. Tokenising happens in this call: for large prompts, `prepare` in a thread first."""
        buffer = EventBuffer()
        return AsyncRequestStream(self, self._enqueue(prompt, sampling_params, buffer, options), buffer)

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> Request:
        """Tokenise and validate without queueing. `submit` and the streams take the result as their prompt, once."""
        return self._prepare(prompt, sampling_params, **options)[0]

    def attach(self, requests: Sequence[tuple[Mapping[str, Any], Sink]]) -> list[Ticket]:
        """Queue several requests, each the arguments of `submit` and the :class:`Sink` that the engine thread tells
        what happens to it, all or none. For event loops that serve many requests (see `on_delivered`)."""
        tickets = []
        for arguments, sink in requests:
            request, text = self._prepare(**arguments)
            tickets.append(Ticket(request, text, sink))
        self._thread.submit(tickets)
        return tickets

    def submits_at_once(self, params: SamplingParams) -> bool:
        """Whether no form of an output has to be compiled first, which may take seconds."""
        form = params.structured_outputs
        return form is None or self._inputs.grammars.knows(form)

    def on_delivered(self, callback: Callable[[], None] | None) -> None:
        """Have the engine thread call `callback` when sinks have been told all that a step brought: so that a loop
        is woken once a step, not once a token."""
        self._thread.after_delivery = callback

    def cancel(self, request_id: str) -> bool:
        """Cancel a request in any state: it ends with its partial output and `cancelled`. False if it is not live."""
        return self._thread.cancel(request_id)

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel by handle (for futures and streams)."""
        self._thread.cancel_ticket(ticket)

    def drop_ticket(self, ticket: Ticket) -> None:
        """Cancel by handle from a destructor."""
        self._thread.drop_ticket(ticket)

    def check_may_wait(self) -> None:
        """Raise :class:`WouldDeadlockError` where waiting for a request would stop the engine for ever: in its own
        thread, which runs the callbacks of futures."""
        self._thread.check_may_wait()

    # -- what is going on ------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inputs.tokenizer

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template that replaces the model's own; None where that one is used."""
        return self._inputs.chat_template

    def default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model's generation_config, unless configured otherwise."""
        return self._inputs.default_params

    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler, now."""
        return self._engine.stats()

    def inspect(self, look: Callable[[BaseScheduler], T]) -> T:
        """What `look` returns of the scheduler, between two of its decisions (see :meth:`LLMEngine.inspect`)."""
        return self._engine.inspect(look)

    def explain(self, request_id: str) -> str:
        """Why a request waits, or what happened to it, in words; for live ones and the last ended ones.

        Raises :class:`InvalidParameterError` for an id that is not known (any more).
        """
        try:
            return self._engine.explain(request_id)
        except KeyError:
            if self._thread.is_live(request_id):
                return f"request {request_id}: handed over, the scheduler sees it after the present step"
            raise InvalidParameterError("request_id", request_id, "no such request is known (any more)") from None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Done between two steps."""
        return self._thread.call(self._engine.reset_prefix_cache)

    # -- end -------------------------------------------------------------------------------------------------------

    def close(self, grace: float = 0.0, timeout: float | None = None) -> None:
        """Refuse new requests at once, let live ones run for up to `grace` seconds, cancel the rest, free the model.

        Cancelled ones end with their partial output; un-iterated streams get their end too. Idempotent. `timeout`
        bounds the wait for the engine thread in seconds (None: until the step that runs is over).
        """
        self._thread.close(grace, timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves requests: neither closed nor failed."""
        return self._thread.is_alive and self._engine.failure is None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _enqueue(self, prompt: Prompt, params: SamplingParams | None, sink: Sink, options: Mapping[str, Any]) -> Ticket:
        request, text = self._prepare(prompt, params, **options)
        ticket = Ticket(request, text, sink)
        self._thread.submit([ticket])
        return ticket

    def _prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> tuple[Request, str | None]:
        self._thread.check_open()
        now = self._engine.clock()
        text = None
        if isinstance(prompt, Request):
            given = (sampling_params, user or None, priority or None, cache_salt, timeout, request_id, chat_options)
            if any(value is not None for value in given):
                raise InvalidParameterError("prompt", prompt.request_id, "a Request has its parameters; give no others")
            request = self._inputs.adopt(prompt, now)
        else:
            request, text = self._inputs.prepare(
                prompt,
                sampling_params,
                request_id=self._new_id() if request_id is None else request_id,
                now=now,
                priority=priority,
                user=user,
                cache_salt=cache_salt,
                timeout=timeout,
                chat_options=chat_options,
            )
        # An id that was just cancelled may live in the scheduler for one more step: the thread's own list decides.
        with contextlib.suppress(DuplicateRequestError):
            self._engine.validate(request)
        self._engine.scheduler.prepare(request)
        return request, text

    def _new_id(self) -> str:
        while True:
            request_id = f"req-{next(self._numbers)}"
            if not self._thread.is_live(request_id):
                return request_id
