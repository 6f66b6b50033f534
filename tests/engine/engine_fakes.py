"""A scripted runner and a toy tokenizer: the whole engine in milliseconds, without a model.

The runner checks what a device would need: rows are assigned before use, input tokens are those sampled before,
positions follow each other, and at most two plans are uncollected.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minillm.core.plan import RowAssignment, StepOutcome, StepPlan, TokenLogprobs
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.factory import EngineParts, ModelLimits, assemble_engine
from minillm.engine.llm_engine import LLMEngine
from minillm.engine.output_processor import RequestUpdate
from minillm.engine.outputs import CompletionOutput, RequestOutput, TokenEvent
from minillm.engine.runtime import Runtime
from minillm.models.tokenizer import Tokenizer

WORDS = ["DEF", "G", "HI", "J", "X", " hello", " world", "aa", "b", "\u00c4", "pre"]
"""Tokens beside the single bytes (byte-level spelling for the space is done below)."""
SPECIALS = ["<bos>", "<eos>", "<turn>", "<end>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def toy_tokenizer(more_specials: Sequence[str] = (), **options: Any) -> Tokenizer:
    """Byte-level, without merges: text is encoded byte by byte; ids of WORDS and SPECIALS come after the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "\u0120") if word.isascii() else "\u00c3\u0126" for word in WORDS]
    pieces = list(dict.fromkeys([*alphabet, *words]))
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*SPECIALS, *more_specials)]
    )
    eos = backend.token_to_id("<eos>")
    settings: dict[str, Any] = {"eos_token_id": eos, "chat_templates": {"default": CHAT_TEMPLATE}, **options}
    return Tokenizer(backend, **settings)


TOKENIZER = toy_tokenizer()
EOS = TOKENIZER.piece_to_id("<eos>")
END = TOKENIZER.piece_to_id("<end>")
VOCAB = TOKENIZER.vocab_size

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=200)
WAIT = 20.0
"""Seconds after which a test that waits has failed."""


def token(text: str) -> int:
    """Id of a toy token by its text."""
    found = TOKENIZER.piece_to_id(text.replace(" ", "\u0120"))
    assert found is not None, text
    return found


def letters(text: str) -> list[int]:
    """Ids of single characters (ASCII)."""
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass(slots=True)
class Row:
    """What the runner keeps of a sequence slot."""

    assignment: RowAssignment
    outputs: list[int]


Script = Callable[[RowAssignment, int], int]
"""(owner of the row, output index) -> the token to sample."""


def counting_script(assignment: RowAssignment, index: int) -> int:
    """Letters that depend on the prompt, the seed, the choice and the index, and on nothing else."""
    greedy = assignment.sampling_params.is_greedy
    salt = 0 if greedy else assignment.seed * 31 + assignment.choice * 17
    value = (sum(assignment.input_ids) * 7 + index * index + 3 * index + salt) % 26
    return letters("abcdefghijklmnopqrstuvwxyz")[value]


def tokens_script(*tokens: int) -> Script:
    """The given tokens, the last one for ever."""
    return lambda _, index: tokens[min(index, len(tokens) - 1)]


def by_request(scripts: dict[str, Sequence[int]]) -> Script:
    """Tokens by request id; other requests count."""

    def script(assignment: RowAssignment, index: int) -> int:
        tokens = scripts.get(assignment.request_id)
        return counting_script(assignment, index) if tokens is None else tokens[min(index, len(tokens) - 1)]

    return script


class Valve:
    """A gate that lets a number of steps through: a request that needs more cannot end before the test wants."""

    def __init__(self, steps: int = 20) -> None:
        self._left: float = steps
        self._changed = threading.Condition()

    def wait(self, timeout: float) -> bool:
        with self._changed:
            passed = self._changed.wait_for(lambda: self._left > 0, timeout)
            self._left -= passed
            return passed

    def allow(self, steps: float) -> None:
        """Let `steps` more through, whatever was left of earlier ones."""
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def open(self) -> None:
        """Hold up nothing any more."""
        self.allow(math.inf)


@dataclass
class ScriptedRunner:
    """A runner whose tokens come from a script. `raise_in` maps a method to the call (from 1) that fails.

    `gate`, if set, is waited for in every `forward`: a step takes as long as the test wants.
    """

    script: Script = counting_script
    raise_in: dict[str, int] = field(default_factory=dict)
    row_failures: dict[tuple[str, int], str] = field(default_factory=dict)
    gate: threading.Event | Valve | None = None
    calls: Counter = field(default_factory=Counter)
    prefilled: Counter = field(default_factory=Counter)
    rows: dict[int, Row] = field(default_factory=dict)
    closed: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    _uncollected: list[StepPlan] = field(default_factory=list)

    def _enter(self, method: str) -> None:
        assert not self.closed, f"{method} after close"
        self.calls[method] += 1
        if self.raise_in.get(method) == self.calls[method]:
            raise RuntimeError(f"injected fault in {method}")

    def forward(self, plan: StepPlan) -> dict[str, Any]:
        self._enter("forward")
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30), "the gate was never opened"
        assert len(self._uncollected) < 2, "a third plan was issued"
        self._uncollected.append(plan)
        for assignment in plan.assignments:
            self.rows[assignment.row] = Row(assignment, list(assignment.output_ids))
        handle: dict[str, Any] = {"plan": plan, "samples": [], "prompt_logprobs": {}}
        for i, row in enumerate(plan.decodes.rows):
            self._check_decode(plan, i)
            handle["samples"].append(row)
        for chunk in plan.prefills:
            self.prefilled[chunk.request_id] += chunk.end - chunk.start
            if chunk.prompt_logprobs:
                handle["prompt_logprobs"][chunk.request_id] = self._scores(chunk.row, chunk.start, chunk.end)
            handle["samples"].extend(chunk.sample_rows)
        return handle

    def _check_decode(self, plan: StepPlan, i: int) -> None:
        decodes = plan.decodes
        row = self.rows[decodes.rows[i]]
        assert row.assignment.request_id == decodes.request_ids[i]
        index = decodes.output_indices[i]
        assert index == len(row.outputs), f"{row.assignment.request_id}: output {index}, sampled {len(row.outputs)}"
        if decodes.token_ids[i] == -1:
            assert len(self._uncollected) == 2, "a placeholder, but no plan in flight that samples it"
        else:
            assert decodes.token_ids[i] == row.outputs[index - 1]
        assert decodes.positions[i] == len(row.assignment.input_ids) + index - 1

    def _scores(self, row: int, start: int, end: int) -> tuple[int, list[TokenLogprobs]]:
        """A chunk scores the positions after its own: [start + 1, end + 1), and nothing behind the prompt."""
        assignment = self.rows[row].assignment
        ids = assignment.input_ids
        count = assignment.sampling_params.prompt_logprobs or 0
        return start + 1, [logprobs_of(ids[p], count) for p in range(start + 1, min(end + 1, len(ids)))]

    def sample(self, handle: dict[str, Any], masks: Any | None = None) -> None:
        self._enter("sample")
        handle["tokens"] = []
        for row_index in handle["samples"]:
            row = self.rows[row_index]
            sampled = self.script(row.assignment, len(row.outputs))
            row.outputs.append(sampled)
            handle["tokens"].append((row.assignment, len(row.outputs) - 1, sampled))

    def collect(self, handle: dict[str, Any]) -> StepOutcome:
        assert self._uncollected and self._uncollected[0] is handle["plan"], "collected out of order"
        self._uncollected.pop(0)
        self._enter("collect")
        failures = {}
        logprobs: list[TokenLogprobs | None] = []
        for i, (assignment, index, sampled) in enumerate(handle["tokens"]):
            count = assignment.sampling_params.logprobs
            logprobs.append(None if count is None else logprobs_of(sampled, count))
            if (assignment.request_id, index) in self.row_failures:
                failures[i] = self.row_failures[assignment.request_id, index]
        return StepOutcome(
            step=handle["plan"].step,
            token_ids=[[sampled] for _, _, sampled in handle["tokens"]],
            logprobs=logprobs if any(entry is not None for entry in logprobs) else None,
            prompt_logprobs=handle["prompt_logprobs"],
            failures=failures,
        )

    def close(self) -> None:
        self.closed = True
        self.calls["close"] += 1
        if self.raise_in.get("close") == self.calls["close"]:
            raise RuntimeError("injected fault in close")


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """Made-up scores: the token is the most likely one if its id is even, else outside of the top."""
    top = [token_id] if token_id % 2 == 0 else []
    top = [*top, *(i for i in range(300, 400) if i != token_id)][:count]
    rank = 1 if token_id % 2 == 0 else 25
    return TokenLogprobs(
        token_id, -0.5 * rank, rank, [i % VOCAB for i in top], [-0.5 * (i + 1) for i in range(len(top))]
    )


def make_parts(
    runner: ScriptedRunner | None = None,
    *,
    num_blocks: int = 64,
    num_swap_blocks: int = 0,
    max_model_len: int = 256,
    tokenizer: Tokenizer = TOKENIZER,
    default_params: SamplingParams | None = None,
    eos_token_ids: Iterable[int] = (EOS,),
    clock: Callable[[], float] | None = None,
    asynchronous: bool = False,
    observer: Any = None,
    **options: Any,
) -> EngineParts:
    """An engine around a scripted runner; `options` are fields of EngineConfig."""
    settings: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    settings.setdefault("check_invariants", find_spec("minillm.core.invariants") is not None)
    limits = ModelLimits(
        name="toy",
        path="toy",
        architecture="scripted",
        dtype="float32",
        device="cpu",
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
    )
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    return assemble_engine(
        EngineConfig("toy", **settings),
        limits,
        runner if runner is not None else ScriptedRunner(),
        tokenizer,
        eos_token_ids=eos_token_ids,
        default_params=default_params,
        asynchronous=asynchronous,
        observer=observer,
        **more,
    )


def make_runtime(runner: ScriptedRunner | None = None, **options: Any) -> Runtime:
    """A runtime around a scripted runner (see :func:`make_parts`)."""
    return Runtime(parts=make_parts(runner, **options))


class EngineDriver:
    """Drives an engine step by step without threads, collecting what every request got."""

    def __init__(self, runner: ScriptedRunner | None = None, **options: Any) -> None:
        self.runner = runner if runner is not None else ScriptedRunner()
        self.parts = make_parts(self.runner, **options)
        self.engine: LLMEngine = self.parts.engine
        self.events: dict[str, list[TokenEvent]] = {}
        self.outputs: dict[str, RequestOutput] = {}

    def add(self, request_id: str, prompt: Any, params: SamplingParams | None = None, **options: Any) -> None:
        request, text = self.parts.inputs.prepare(
            prompt, params, request_id=request_id, now=self.engine.clock(), **options
        )
        self.engine.add_request(request, text, request_id)

    def take(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            self.events.setdefault(update.tag, []).extend(update.events)
            if update.output is not None:
                assert update.tag not in self.outputs, "a second end"
                self.outputs[update.tag] = update.output

    def step(self) -> None:
        self.take(self.engine.step())

    def cancel(self, request_id: str) -> bool:
        cancelled = self.engine.cancel(request_id)
        self.take(self.engine.take_updates())
        return cancelled

    def run(self, limit: int = 5000) -> dict[str, RequestOutput]:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.engine.has_work:
                return self.outputs
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def text(self, request_id: str, choice: int = 0) -> str:
        """What a streaming reader of one choice has seen."""
        return "".join(event.text for event in self.events.get(request_id, []) if event.choice == choice)


def check_events(events: Sequence[TokenEvent], output: RequestOutput) -> None:
    """What must hold of every stream: indices in order, one end per choice and at its end, text as in the output."""
    for choice in output.outputs:
        mine = [event for event in events if event.choice == choice.index]
        tokens = [event for event in mine if event.token_id is not None]
        assert [event.index for event in tokens] == list(range(len(tokens)))
        assert [event.token_id for event in tokens] == choice.token_ids
        assert "".join(event.text for event in mine) == choice.text
        reasons = [event.finish_reason for event in mine]
        assert reasons[-1] == choice.finish_reason is not None
        assert all(reason is None for reason in reasons[:-1])


def idle_state(engine: LLMEngine) -> tuple[Any, ...]:
    """What must be the same whenever nothing runs."""
    stats = engine.stats()
    return (
        stats.waiting,
        stats.running,
        stats.swapped,
        stats.plans_in_flight,
        stats.blocks_free + stats.blocks_evictable,
        stats.blocks_quarantined,
        stats.blocks_referenced,
        stats.swap_slots_used,
        engine.outputs.num_live,
    )


def finished(driver: EngineDriver) -> None:
    """After a run: every stream is in form, nothing is held, no invariant was broken."""
    for request_id, output in driver.outputs.items():
        check_events(driver.events[request_id], output)
    assert not driver.engine.has_work
    assert driver.engine.num_invariant_violations == 0
    state = idle_state(driver.engine)
    assert state == (0, 0, 0, 0, driver.parts.model_info.num_blocks, 0, 0, 0, 0)


def run_one(driver: EngineDriver, params: SamplingParams, prompt: object = "abc") -> CompletionOutput:
    """The only choice of one request, run to its end."""
    driver.add("r", prompt, params)
    output = driver.run()["r"]
    finished(driver)
    return output.outputs[0]


def eventually(condition, what: str = "condition") -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.002)


def wait_idle(runtime: Runtime) -> tuple:
    """The engine's state once nothing is live any more."""
    eventually(lambda: runtime._thread.num_live == 0 and not runtime._engine.has_work, "idle")
    return idle_state(runtime._engine)
