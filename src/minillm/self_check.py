"""`minillm doctor --self-check`: every way of running a prompt must give the same tokens, on the built-in model.

Greedy and in float32. The reference is one prompt at a time, computed whole, on the CPU. Against it: all at once, in
chunks of at most 64 tokens a step, under memory pressure with swapping and with recomputing, a second time over the
prefix cache, and transformers' `generate` on the same weights. With a GPU all ways run there, one at a time too. A way
that did not do what it is there for (no preemption, no cache hit) is a failure too: it checked nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig

if TYPE_CHECKING:
    from minillm.engine.outputs import RequestOutput
    from minillm.engine.runtime import Runtime
    from minillm.models.loader import LoadedModel
    from minillm.models.tokenizer import Tokenizer

MODEL = "smollm2-135m"
NEW_TOKENS = 16
MAX_MODEL_LEN = 256
CHUNK_BUDGET = 64
BLOCK_SIZE = 16
POOL_BLOCKS = 26
"""All eight prompts fit (3 blocks each), but not their answers (a fourth block each)."""

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List the first six prime numbers.",
    "Explain in one paragraph why the sky is blue, to someone who has never had a lesson in physics.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Who wrote Hamlet, when, and what is it about?",
    "What is 7 times 8?",
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running the prompts: the engine's options, and the counter that shows that the way was taken."""

    name: str
    options: dict[str, Any]
    one_by_one: bool = False
    passes: int = 1
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one way gave. `differing` counts prompts whose tokens are not the reference's."""

    name: str
    prompts: int
    differing: int
    swap_preemptions: int
    recompute_preemptions: int
    cached_tokens: int
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Same tokens, and the way did what it is there for."""
        return self.differing == 0 and not self.problem


_COMMON = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": False,
    "check_invariants": True,
    "num_gpu_blocks_override": 256,
}
_SMALL_POOL = {"num_gpu_blocks_override": POOL_BLOCKS, "swap_space": 0.25, "max_num_seqs": len(QUESTIONS)}

WAYS = (
    Way("one at a time", {}, one_by_one=True),
    Way("all at once", {}),
    Way(f"in chunks of {CHUNK_BUDGET}", {"max_num_batched_tokens": CHUNK_BUDGET, "max_num_seqs": len(QUESTIONS)}),
    Way("small pool, swap", {**_SMALL_POOL, "preemption_mode": "swap"}, proof="preemptions_swap"),
    Way("small pool, recompute", {**_SMALL_POOL, "preemption_mode": "recompute"}, proof="preemptions_recompute"),
    Way("prefix cache, second pass", {"enable_prefix_caching": True}, passes=2, proof="cached_tokens"),
)


REFERENCE = WAYS[0]


def run_self_check(status: Callable[[str], None] = lambda _: None, device: str = "auto") -> Iterator[Result]:
    """Yield the result of each way as it is ready; the first is the reference for all others.

    Raises :class:`ConfigError` for a device that cannot be used.
    """
    from minillm.engine.devices import resolve_device
    from minillm.models.loader import load_model
    from minillm.models.tokenizer import load_tokenizer

    device = resolve_device(device)
    on_cpu = load_model(MODEL, dtype="float32", progress=status)
    tokenizer = load_tokenizer(on_cpu.path)
    prompts = chat_prompts(tokenizer, QUESTIONS)
    first = replace(REFERENCE, name=f"{REFERENCE.name}, cpu")
    status(first.name)
    result, reference = _run(first, on_cpu, tokenizer, prompts, [])
    yield result
    model, ways = on_cpu, list(WAYS[1:])
    if device != "cpu":
        model, ways = load_model(MODEL, dtype="float32", device=device), list(WAYS)
    for way in ways:
        name = f"{way.name}, {device}"
        status(name)
        result, _ = _run(replace(way, name=name), model, tokenizer, prompts, reference)
        yield result
    status("transformers")
    yield _run_transformers(on_cpu, prompts, reference)


def chat_prompts(tokenizer: Tokenizer, questions: Sequence[str]) -> list[list[int]]:
    """Each question as a chat of one message, in token ids."""
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in questions]
    return [list(prompt) for prompt in prompts if not isinstance(prompt, str)]


def _run(
    way: Way, model: LoadedModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], reference: list[list[int]]
) -> tuple[Result, list[list[int]]]:
    from minillm.engine.factory import build_engine
    from minillm.engine.runtime import Runtime

    config = EngineConfig(model=MODEL, **{**_COMMON, **way.options})
    parts = build_engine(config, model=model, tokenizer=tokenizer)
    with Runtime(parts=parts) as runtime:
        start = time.perf_counter()
        for _ in range(way.passes):
            outputs = _generate(runtime, prompts, way.one_by_one)
        seconds = time.perf_counter() - start
        counters = runtime.stats().counters
    tokens = [output.outputs[0].token_ids for output in outputs]
    problem = ""
    if way.proof is not None and getattr(counters, way.proof) == 0:
        problem = f"{way.proof} is 0: nothing was checked"
    elif parts.engine.num_invariant_violations:
        problem = f"{parts.engine.num_invariant_violations} invariant violations"
    result = Result(
        name=way.name,
        prompts=len(prompts),
        differing=_count_differing(tokens, reference or tokens),
        swap_preemptions=counters.preemptions_swap,
        recompute_preemptions=counters.preemptions_recompute,
        cached_tokens=counters.cached_tokens,
        seconds=seconds,
        problem=problem,
    )
    return result, tokens


def _generate(runtime: Runtime, prompts: Sequence[list[int]], one_by_one: bool) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    if one_by_one:
        return [runtime.submit(prompt, params).result().raise_for_error() for prompt in prompts]
    futures = [runtime.submit(prompt, params) for prompt in prompts]
    return [future.result().raise_for_error() for future in futures]


def _run_transformers(model: LoadedModel, prompts: Sequence[list[int]], reference: Sequence[list[int]]) -> Result:
    import torch

    from minillm.bench import transformers_baseline

    baseline = transformers_baseline.build_llama(model.own_decoder, torch.float32)
    start = time.perf_counter()
    tokens = [transformers_baseline.greedy(baseline, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    seconds = time.perf_counter() - start
    differing = _count_differing(tokens, reference)
    return Result("transformers generate", len(prompts), differing, 0, 0, 0, seconds)


def _count_differing(tokens: Sequence[list[int]], reference: Sequence[list[int]]) -> int:
    return sum(mine != theirs for mine, theirs in zip(tokens, reference, strict=True))
