"""`minillm bench cpu`: this engine against transformers' `generate` on the same CPU, in one run.

Both get the same weights, token ids and number of new tokens, greedy, with end-of-sequence ids as ordinary tokens.
Before anything is timed, both must give the same tokens in float32. Prefix caching is off, since the rounds repeat
their prompts. Each contender has a process of its own (:mod:`minillm.bench.cpu_worker` says why); they take turns.
A time is from handing over the prompts to having all tokens, prefill included.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bench import common
from minillm.bench.cpu_worker import Worker
from minillm.core.errors import MiniLLMError

if TYPE_CHECKING:
    from minillm.bench.program import Cells

MODEL = "smollm2-135m"
ENGINE = "minillm"
BASELINE = "transformers"
BASELINE_DTYPES = ("float32", "bfloat16")
LOAD_REPEATS = 3
MEMORY_REQUESTS = 64

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain what a hash table is to a beginner.",
    "List three uses of copper.",
    "How do bees make honey?",
    "Translate 'good morning' into Spanish.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "How does a refrigerator work?",
    "Name five rivers of Europe and the seas that they flow into.",
    "What is a prime number?",
    "Describe a thunderstorm in two sentences.",
    "How many days are there in a leap year, and why?",
    "What should I see in Rome on a rainy day?",
)

LOAD_ENGINE = f"""
import time
start = time.perf_counter()
from minillm import LLM
llm = LLM("{MODEL}", device="cpu")
print(time.perf_counter() - start)
"""

LOAD_BASELINE = """
import sys, time
start = time.perf_counter()
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = sys.argv[1].rsplit("/", 1)
AutoTokenizer.from_pretrained(folder, gguf_file=name)
AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
print(time.perf_counter() - start)
"""

GENERATE_MANY = f"""
import sys
from minillm import LLM, SamplingParams
from minillm.bench.cpu_bench import QUESTIONS
count, new_tokens = map(int, sys.argv[1:])
llm = LLM("{MODEL}", device="cpu")
prompts = [f"{{QUESTIONS[i % len(QUESTIONS)]}} ({{i}})" for i in range(count)]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
print(sum(len(output.outputs[0].token_ids) for output in outputs))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure: see the options of the command."""

    repeats: int = 7
    streams: int = 16
    new_tokens: int = 64
    load: bool = True
    memory: bool = True


class ParityError(MiniLLMError):
    """The engine and the baseline do not give the same tokens: nothing may be timed."""


def measure(options: Options, status: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Run everything; one row per timed run, with where and when in every row."""
    from minillm.doctor import cpu_name

    where = common.environment(cpu_name())
    rows: list[dict[str, Any]] = []
    if options.load:
        rows += _measure_load(status)
    if options.memory:
        rows += _measure_memory(options.new_tokens, status)
    rows += _measure_speed(options, status)
    return [{**row, **where} for row in rows]


def _row(workload: str, contender: str, repeat: int, **figures: Any) -> dict[str, Any]:
    blank = {"seconds": "", "tokens": "", "peak_bytes": ""}
    return {"workload": workload, "contender": contender, "repeat": repeat, **blank, **figures}


def _measure_load(status: Callable[[str], None]) -> list[dict[str, Any]]:
    """Seconds from the first import to a model that is ready, each in a fresh process, files in the page cache."""
    path = str(_model_path())
    rows = []
    common.run_child(LOAD_ENGINE)
    for repeat in range(LOAD_REPEATS):
        status(f"loading with {ENGINE}, {repeat + 1} of {LOAD_REPEATS}")
        rows.append(_row("load", ENGINE, repeat, seconds=float(common.run_child(LOAD_ENGINE).stdout)))
    if importlib.util.find_spec("accelerate") is None:
        status(f"loading with {BASELINE}: not timed, it needs accelerate for GGUF files (pip install accelerate)")
        return rows
    status(f"loading with {BASELINE} (half a minute)")
    rows.append(_row("load", BASELINE, 0, seconds=float(common.run_child(LOAD_BASELINE, [path]).stdout)))
    return rows


def generate_many(requests: int, new_tokens: int) -> common.ChildResult:
    """Load the model in a fresh process and generate for many requests at once; prints the number of tokens."""
    return common.run_child(GENERATE_MANY, [str(requests), str(new_tokens)])


def _measure_memory(new_tokens: int, status: Callable[[str], None]) -> list[dict[str, Any]]:
    """Peak resident memory of a whole process."""
    status(f"memory of {MEMORY_REQUESTS} requests")
    child = generate_many(MEMORY_REQUESTS, new_tokens)
    tokens = int(child.stdout.split()[-1])
    workload = f"memory, {MEMORY_REQUESTS} requests"
    return [_row(workload, ENGINE, 0, seconds=child.seconds, tokens=tokens, peak_bytes=child.peak_bytes)]


def _model_path() -> Path:
    from minillm.models.default_model import resolve_model

    return resolve_model(MODEL).path


def _measure_speed(options: Options, status: Callable[[str], None]) -> list[dict[str, Any]]:
    """One stream, then many at once: interleaved rounds of the engine and of the baseline in each dtype."""
    prompts = _prompts(options.streams)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        status("starting the contenders")
        workers = {ENGINE: stack.enter_context(Worker("engine", "auto"))}
        for dtype in BASELINE_DTYPES:
            workers[f"{BASELINE} {dtype}"] = stack.enter_context(Worker("transformers", dtype))
        status("checking that both give the same tokens in float32")
        _check_parity(workers[f"{BASELINE} float32"], prompts, options.new_tokens)
        for workload, batch in (("1 stream", prompts[:1]), (f"{options.streams} streams", prompts)):
            contenders = {
                name: partial(_count_tokens, worker, batch, options.new_tokens) for name, worker in workers.items()
            }
            samples = common.interleaved(contenders, options.repeats, partial(_say, status, workload))
            rows += [
                _row(workload, name, repeat, seconds=sample.seconds, tokens=sample.tokens)
                for name, runs in samples.items()
                for repeat, sample in enumerate(runs)
            ]
    return rows


def _count_tokens(worker: Worker, prompts: Sequence[list[int]], new_tokens: int) -> int:
    return sum(map(len, worker.generate(prompts, new_tokens)))


def _say(status: Callable[[str], None], workload: str, number: int, name: str) -> None:
    status(f"{workload}, {f'round {number}' if number else 'warm-up'}: {name}")


def _prompts(count: int) -> list[list[int]]:
    """Chat prompts as token ids; the first has 37 tokens."""
    from minillm.models.tokenizer import load_tokenizer
    from minillm.self_check import chat_prompts

    questions = [QUESTIONS[i % len(QUESTIONS)] + (f" ({i})" if i >= len(QUESTIONS) else "") for i in range(count)]
    return chat_prompts(load_tokenizer(_model_path()), questions)


def _check_parity(baseline: Worker, prompts: Sequence[list[int]], new_tokens: int) -> None:
    with Worker("engine", "float32") as engine:
        ours = engine.generate(prompts, new_tokens)
    for index, prompt in enumerate(prompts):
        if [ours[index]] != baseline.generate([prompt], new_tokens):
            raise ParityError(f"prompt {index}: the engine's float32 tokens differ from {BASELINE}'")


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, Cells]:
    """Tables of medians and ratios from the rows of a CSV file, by title."""
    first = rows[0]
    where = f"{first['device']}, {first['cores']} cores, {first['date']}, commit {first['commit']}"
    versions = f"torch {first['torch']}, transformers {first['transformers']}"
    made: dict[str, Cells] = {}
    for workload in dict.fromkeys(row["workload"] for row in rows):
        chosen = [row for row in rows if row["workload"] == workload]
        title = f"{workload} ({where}; {versions})"
        made[title] = _load_cells(chosen) if workload == "load" else _cells(chosen)
    return made


def by_contender(rows: Sequence[Mapping[str, str]], workload: str) -> dict[str, list[float]]:
    """Of one workload, the figures of each contender's runs: seconds of `load`, tokens per second of the others."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["workload"] == workload:
            seconds = float(row["seconds"])
            value = seconds if workload == "load" else float(row["tokens"]) / seconds
            found.setdefault(row["contender"], []).append(value)
    return found


def _cells(rows: Sequence[Mapping[str, str]]) -> Cells:
    """Tokens per second; the ratio says how many times as fast as the other the engine is."""
    rates = by_contender(rows, rows[0]["workload"])
    mine = statistics.median(rates[ENGINE])
    memory = rows[0]["peak_bytes"]
    lines = []
    for name, values in rates.items():
        ratio = "" if name == ENGINE else f"{mine / statistics.median(values):.2f}"
        lines.append([name, common.Summary.of(values).text(), str(len(values)), ratio])
    columns = ["contender", "tokens/s: median (least-greatest)", "runs", f"{ENGINE} is faster by"]
    if memory:
        columns[-1], lines[0][-1] = "peak resident memory", f"{float(memory) / 2**30:.2f} GiB"
    return columns, lines


def _load_cells(rows: Sequence[Mapping[str, str]]) -> Cells:
    seconds = by_contender(rows, "load")
    lines = [[name, common.Summary.of(values).text(".2f"), str(len(values))] for name, values in seconds.items()]
    return ["contender", "seconds to ready: median (least-greatest)", "runs"], lines
