"""One contender of `minillm bench cpu`, in a process of its own.

Two engines in one process disturb each other: each thread that calls torch has its own OpenMP workers, and with more
of them than cores they stop spinning between products, which costs a small model half its speed. So every contender
has a process; they take turns, and those that wait sleep on a pipe.

The parent writes a line of JSON, ``{"prompts": [[ids]], "new_tokens": n}``, and gets one back: the tokens of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType

TokenLists = list[list[int]]
Generate = Callable[[Sequence[Sequence[int]], int], TokenLists]


class Worker:
    """A running contender. A context manager; `generate` raises RuntimeError with its stderr if the process failed."""

    def __init__(self, kind: str, dtype: str) -> None:
        """`kind` is engine or transformers."""
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> TokenLists:
        """Greedy tokens of each prompt, `new_tokens` of them; end-of-sequence ids are ordinary tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            self._stderr.seek(0)
            raise RuntimeError(f"a benchmark process ended with {code}: {self._stderr.read().strip()[-2000:]}")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its input: it ends by itself
        self._stderr.close()


def _engine(dtype: str) -> Generate:
    from minillm.bench.cpu_bench import MODEL
    from minillm.core.sampling_params import SamplingParams
    from minillm.engine.config import EngineConfig
    from minillm.engine.runtime import Runtime

    runtime = Runtime(EngineConfig(model=MODEL, device="cpu", dtype=dtype, enable_prefix_caching=False))

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> TokenLists:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        futures = [runtime.submit(list(prompt), params) for prompt in prompts]
        return [list(future.result().raise_for_error().outputs[0].token_ids) for future in futures]

    return generate


def _transformers(dtype: str) -> Generate:
    import torch

    from minillm.bench import transformers_baseline
    from minillm.bench.cpu_bench import MODEL
    from minillm.models.loader import load_model

    decoder = load_model(MODEL, dtype="float32", device="cpu").own_decoder
    model = transformers_baseline.build_llama(decoder, getattr(torch, dtype))
    return lambda prompts, new_tokens: transformers_baseline.greedy(model, prompts, new_tokens)


def main(kind: str, dtype: str) -> None:
    """Serve requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not end up between the answers
    generate = _engine(dtype) if kind == "engine" else _transformers(dtype)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(generate(request["prompts"], request["new_tokens"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
