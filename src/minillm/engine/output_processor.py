"""From the scheduler's events to what users see: text, stop strings, logprobs, outputs.

All of it is host work on one request at a time; an error in it fails that request alone.

Work per token is done only for choices that are *followed*: somebody reads their events, or a stop string or logprobs
have to be looked at. Of the others nothing is touched until they end; then their text is made at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from minillm.core.errors import RequestFailedError
from minillm.core.plan import FinishEvent, PromptLogprobsEvent, StepEvents, TokenLogprobs
from minillm.core.plan import TokenEvent as CoreTokenEvent
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenEvent

if TYPE_CHECKING:
    from minillm.engine.stop_checker import TextStream

logger = logging.getLogger("minillm.engine")


_new_event = tuple.__new__
"""Makes a :class:`TokenEvent` of all its fields in half the time of its own constructor: one is made per token."""

TextStreamFactory: TypeAlias = "Callable[[SamplingParams, list[int]], TextStream]"


class ChoiceState:
    """Output of one choice (one sequence of the core) so far."""

    __slots__ = (
        "cumulative_logprob",
        "error",
        "finish_reason",
        "followed",
        "index",
        "logprobs",
        "owner",
        "parts",
        "request",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, owner: TrackedRequest, index: int, request: Request, text: TextStream) -> None:
        self.owner = owner
        self.index = index
        self.request = request
        self.text = text
        self.token_ids: list[int] = []
        self.parts: list[str] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if request.sampling_params.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: RequestFailedError | None = None
        self.followed = owner.wants_events or bool(request.sampling_params.stop) or self.logprobs is not None

    def output(self) -> CompletionOutput:
        """The choice as it stands; a copy."""
        return CompletionOutput(
            index=self.index,
            text="".join(self.parts),
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            error=self.error,
        )


class TrackedRequest:
    """A live request as the engine sees it. `tag` is the caller's: updates carry it back.

    Without `wants_events` nothing is made per token but the output itself.
    """

    __slots__ = ("choices", "num_open", "prompt", "prompt_scores", "request", "tag", "wants_events")

    def __init__(self, request: Request, prompt: str | None, tag: Any, wants_events: bool) -> None:
        self.request = request
        self.prompt = prompt
        self.tag = tag
        self.wants_events = wants_events
        self.choices: list[ChoiceState] = []
        self.num_open = request.sampling_params.n
        self.prompt_scores: list[dict[int, Logprob] | None] | None = None
        if request.sampling_params.prompt_logprobs is not None:
            self.prompt_scores = [None]

    def metrics(self, now: float) -> RequestMetrics:
        """The request's times and counts, as of `now` (seconds)."""
        sequences = [choice.request for choice in self.choices]
        firsts = [seq.first_token_time for seq in sequences if seq.first_token_time is not None]
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self.request.first_scheduled_time,
            first_token_time=min(firsts, default=None),
            finished_time=now,
            num_preemptions=sum(seq.num_preemptions for seq in sequences),
            num_cached_tokens=self.request.cached_tokens,
            recomputed_tokens=sum(seq.recomputed_tokens for seq in sequences),
        )


class RequestUpdate:
    """What happened to one request since the last look: its events in order and, at its end, the output."""

    __slots__ = ("events", "output", "tracked")

    def __init__(self, tracked: TrackedRequest) -> None:
        self.tracked = tracked
        self.events: list[TokenEvent] = []
        self.output: RequestOutput | None = None

    @property
    def tag(self) -> Any:
        """The caller's own object that came with the request."""
        return self.tracked.tag


class OutputProcessor:
    """Keeps the output side of every live request and turns core events into :class:`RequestUpdate`."""

    def __init__(self, text_stream: TextStreamFactory, token_text: Callable[[int], str]) -> None:
        """`text_stream` makes a choice's :class:`TextStream`; `token_text` gives one token's text for logprobs."""
        self._text_stream = text_stream
        self._token_text = lru_cache(maxsize=1 << 16)(token_text)
        self._choices: dict[str, ChoiceState] = {}
        self._followed: dict[str, ChoiceState] = {}
        self._live: dict[str, TrackedRequest] = {}
        self._updates: dict[TrackedRequest, RequestUpdate] = {}

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def live(self) -> list[TrackedRequest]:
        """The live requests, in order of arrival."""
        return list(self._live.values())

    def get(self, request_id: str) -> TrackedRequest | None:
        """The live request with this id (a parent's id), or None."""
        return self._live.get(request_id)

    def add(
        self, request: Request, prompt: str | None = None, tag: Any = None, wants_events: bool = True
    ) -> TrackedRequest:
        """Track a request that the scheduler has just accepted (its children exist)."""
        tracked = TrackedRequest(request, prompt, tag, wants_events)
        for index, sequence in enumerate([request, *request.children]):
            text = self._text_stream(request.sampling_params, request.input_ids)
            tracked.choices.append(ChoiceState(tracked, index, sequence, text))
        for choice in tracked.choices:
            self._choices[choice.request.request_id] = choice
            if choice.followed:
                self._followed[choice.request.request_id] = choice
        self._live[request.request_id] = tracked
        return tracked

    def take_updates(self) -> list[RequestUpdate]:
        """Updates since the last call."""
        updates = list(self._updates.values())
        self._updates.clear()
        return updates

    def process(self, events: StepEvents, now: float) -> tuple[list[tuple[str, int]], list[str]]:
        """Take in one step's events.

        Returns what the scheduler has to be told: (sequence id, index of its last token) for each choice that a stop
        string ended, and the ids of requests whose output failed.
        """
        stops: list[tuple[str, int]] = []
        failed: list[str] = []
        for scores in events.prompt_logprobs:
            if (choice := self._choices.get(scores.request_id)) is not None:
                try:
                    self._on_prompt_scores(choice.owner, scores)
                except Exception as error:
                    self._fail(choice.owner, error, failed, now)
        if self._followed:
            self._process_tokens(events, now, stops, failed)
        for finish in events.finished:
            if (choice := self._choices.get(finish.request_id)) is not None:
                try:
                    self._on_finish(choice, finish, now)
                except Exception as error:
                    self._fail(choice.owner, error, failed, now)
        return stops, failed

    def _process_tokens(self, events: StepEvents, now: float, stops: list[tuple[str, int]], failed: list[str]) -> None:
        """The tokens of followed choices. The hot path of streaming: what is usual must stay cheap per token."""
        columns = events.tokens
        stopped = {event.request_id for event in events.finished if event.reason == "stop"}
        choices = map(self._followed.get, columns.request_ids)
        scores = chain(columns.logprobs, repeat(None))
        for choice, index, token_id, logprobs in zip(choices, columns.indices, columns.token_ids, scores, strict=False):
            if choice is None or choice.finish_reason is not None:
                continue
            try:
                sequence_id = choice.request.request_id
                is_stop_token = bool(stopped) and sequence_id in stopped and token_id in choice.request.stop_ids
                if is_stop_token or choice.logprobs is not None:
                    token = CoreTokenEvent(sequence_id, index, token_id, logprobs)
                    stop = self._on_special_token(choice, token, is_stop_token)
                else:
                    text, stop = choice.text.push(token_id)
                    self._append(choice, index, token_id, text, logprobs)
                if stop is not None:
                    choice.stop_reason = stop
                    self._end(choice, "stop", now, flush=False)
                    stops.append((sequence_id, index))
            except Exception as error:
                self._fail(choice.owner, error, failed, now)

    def end_open_choices(self, tracked: TrackedRequest, reason: str, now: float, error: str | None = None) -> None:
        """End what is still open of a request with `reason`."""
        for choice in tracked.choices:
            if choice.finish_reason is None:
                self._end(choice, reason, now, None if error is None else RequestFailedError(error))

    def fail(self, sequence_id: str, error: str, now: float) -> str | None:
        """End the request of this sequence with `error`; its id, or None if it is not live."""
        choice = self._choices.get(sequence_id)
        if choice is None:
            return None
        self.end_open_choices(choice.owner, "error", now, error)
        return choice.owner.request.request_id

    def discard_all(self) -> None:
        """Forget every live request and pending update (the engine failed; the caller tells the owners)."""
        self._choices.clear()
        self._followed.clear()
        self._live.clear()
        self._updates.clear()

    def _fail(self, tracked: TrackedRequest, error: Exception, failed: list[str], now: float) -> None:
        logger.error("request %s: its output failed", tracked.request.request_id, exc_info=error)
        cause = RequestFailedError(f"output of request {tracked.request.request_id} failed: {error!r}")
        cause.__cause__ = error
        for choice in tracked.choices:
            if choice.finish_reason is None:
                self._end(choice, "error", now, cause, flush=False)
        failed.append(tracked.request.request_id)

    def _update(self, tracked: TrackedRequest) -> RequestUpdate:
        update = self._updates.get(tracked)
        if update is None:
            update = self._updates[tracked] = RequestUpdate(tracked)
        return update

    def _append(
        self, choice: ChoiceState, index: int, token_id: int, text: str, logprobs: TokenLogprobs | None
    ) -> None:
        """Take over a token. All that can fail was done before: a token is taken wholly or not at all."""
        choice.token_ids.append(token_id)
        if text:
            choice.parts.append(text)
        owner = choice.owner
        if owner.wants_events:
            logprob = None if logprobs is None else logprobs.logprob
            values = (owner.request.request_id, choice.index, index, token_id, text, logprob, None, logprobs, None)
            self._update(owner).events.append(_new_event(TokenEvent, values))

    def _on_special_token(self, choice: ChoiceState, token: CoreTokenEvent, is_stop_token: bool) -> str | None:
        """Append a token that has logprobs or ends the choice; returns the stop string that it completes, or None."""
        params = choice.request.sampling_params
        entry = self._token_entry(token) if choice.logprobs is not None else None
        text, stop = "", None
        if not is_stop_token:
            text, stop = choice.text.push(token.token_id)
        elif params.include_stop_str_in_output:
            # A stop token that is to be shown cannot complete a stop string as well: the id has decided.
            text, _ = choice.text.push(token.token_id)
        if entry is not None and choice.logprobs is not None:
            choice.cumulative_logprob += entry[token.token_id].logprob
            choice.logprobs.append(entry)
        if is_stop_token and token.token_id in params.stop_token_ids:
            choice.stop_reason = token.token_id
        self._append(choice, token.index, token.token_id, text, token.logprobs)
        return stop

    def _on_finish(self, choice: ChoiceState, finish: FinishEvent, now: float) -> None:
        error = RequestFailedError(finish.error or "the request failed") if finish.reason == "error" else None
        if finish.reason == "cancelled":
            why = choice.request.history[-1].reason
            choice.stop_reason = why if why != "cancelled" else None
        self._end(choice, finish.reason, now, error)

    def _on_prompt_scores(self, tracked: TrackedRequest, scores: PromptLogprobsEvent) -> None:
        entries = tracked.prompt_scores
        if entries is None:
            return
        if scores.start != len(entries):
            raise RuntimeError(f"prompt logprobs from position {scores.start} came after {len(entries)} positions")
        entries.extend(self._logprob_entry(entry) for entry in scores.entries)

    def _end(
        self, choice: ChoiceState, reason: str, now: float, error: RequestFailedError | None = None, flush: bool = True
    ) -> None:
        """Mark the choice ended: the finish reason goes on its last event of this step, or on one without a token."""
        tracked = choice.owner
        if not choice.followed:
            self._catch_up(choice, reason, with_text=flush)
        text = choice.text.flush() if flush else ""
        if text:
            choice.parts.append(text)
        choice.finish_reason, choice.error = reason, error
        update = self._update(tracked)
        if tracked.wants_events:
            self._mark_last_event(choice, update, text)
        self._choices.pop(choice.request.request_id, None)
        self._followed.pop(choice.request.request_id, None)
        tracked.num_open -= 1
        if tracked.num_open == 0:
            del self._live[tracked.request.request_id]
            update.output = self._output(tracked, now)

    @staticmethod
    def _catch_up(choice: ChoiceState, reason: str, with_text: bool) -> None:
        """All tokens, and their text, of a choice that was not followed."""
        request = choice.request
        ids = choice.token_ids = list(request.generated_ids)
        if not with_text:
            return
        if reason == "stop" and ids and ids[-1] in request.stop_ids:
            if ids[-1] in request.sampling_params.stop_token_ids:
                choice.stop_reason = ids[-1]
            if not request.sampling_params.include_stop_str_in_output:
                ids = ids[:-1]
        choice.parts.append(choice.text.push_all(ids))

    def _mark_last_event(self, choice: ChoiceState, update: RequestUpdate, text: str) -> None:
        """Put the end and the rest of the text on the choice's last event, or on a new one if that has gone out."""
        reason, error = choice.finish_reason, choice.error
        for at in range(len(update.events) - 1, -1, -1):
            event = update.events[at]
            if event.choice == choice.index:
                update.events[at] = event._replace(text=event.text + text, finish_reason=reason, error=error)
                return
        request_id = choice.owner.request.request_id
        count = len(choice.token_ids)
        update.events.append(TokenEvent(request_id, choice.index, count, None, text, finish_reason=reason, error=error))

    def _output(self, tracked: TrackedRequest, now: float) -> RequestOutput:
        return RequestOutput(
            request_id=tracked.request.request_id,
            prompt=tracked.prompt,
            prompt_token_ids=list(tracked.request.input_ids),
            outputs=[choice.output() for choice in tracked.choices],
            prompt_logprobs=tracked.prompt_scores,
            metrics=tracked.metrics(now),
        )

    def _token_entry(self, token: CoreTokenEvent) -> dict[int, Logprob]:
        if token.logprobs is None:
            raise RuntimeError(f"token {token.index} came without the logprobs that were asked for")
        return self._logprob_entry(token.logprobs)

    def _logprob_entry(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        """The k most likely tokens, most likely first, then the token itself if it is not among them."""
        entry = {
            token_id: Logprob(logprob, rank, self._token_text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True), start=1)
        }
        entry[scores.token_id] = Logprob(scores.logprob, scores.rank, self._token_text(scores.token_id))
        return entry


def sequence_ids(request_id: str, n: int) -> Iterable[str]:
    """Ids of a request's n sequences in the core: its own, then one per further choice."""
    yield request_id
    for choice in range(1, n):
        yield f"{request_id}#{choice}"
