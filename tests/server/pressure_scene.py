"""A server with a dashboard under memory pressure: a scripted engine with a small pool, whose steps take their time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine_fakes import EOS, ScriptedRunner, letters
from server_fakes import RunningServer, serving

from minillm.core.plan import RowAssignment
from minillm.core.sampling_params import SamplingParams
from minillm.engine.runtime import Runtime

ANSWER = (
    "Twelve requests share this pool. When it is full, the newest one is swapped out to host memory and comes back."
)


class SlowRunner(ScriptedRunner):
    """Says the same sentence to everybody, a letter per step of `seconds`."""

    seconds = 0.02

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.goes_on = threading.Event()
        """Cleared, the device stands still in its next step."""
        self.goes_on.set()

    def forward(self, plan: Any) -> Any:
        time.sleep(self.seconds)
        self.goes_on.wait(60)
        return super().forward(plan)


def answer_script(assignment: RowAssignment, index: int) -> int:
    """The sentence, then EOS for requests of the chat box; others say it again and again."""
    if index >= len(ANSWER) and assignment.sampling_params.max_tokens == 128:
        return EOS
    return letters(ANSWER[index % len(ANSWER)])[0]


@contextmanager
def dashboard_server(
    config: dict[str, Any] | None = None, runner: ScriptedRunner | None = None, **options: Any
) -> Iterator[RunningServer]:
    """A running server under `/dashboard`; `options` are those of `make_runtime`."""
    settings: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 120,
        "num_swap_blocks": 160,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "max_prefill_tokens_per_step": 96,
        "max_model_len": 1024,
        "preemption_mode": "swap",
        "check_invariants": False,
        **options,
    }
    runner = runner or SlowRunner(script=answer_script)
    with serving(runner, config, **settings) as server:
        server.runner = runner  # type: ignore[attr-defined]
        yield server


def press(runtime: Runtime, count: int = 24, seed: int = 1, priorities: Sequence[int] = (0, 0, 1, 2)) -> list[Any]:
    """Submit requests of mixed sizes and priorities, a third with a common prefix: more than the pool holds."""
    rng = random.Random(seed)
    shared = "The common beginning of many prompts, as of a system prompt that everybody sends. " * 2
    futures = []
    for i in range(count):
        text = "".join(rng.choices("abcdefghij ", k=rng.randint(20, 260)))
        futures.append(
            runtime.submit(
                (shared if i % 3 == 0 else "") + text,
                SamplingParams(temperature=0, max_tokens=rng.randint(150, 400), ignore_eos=True),
                priority=rng.choice(priorities),
                user=rng.choice(["ada", "grace", "edsger"]),
            )
        )
    return futures
