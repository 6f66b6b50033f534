"""The built-in model on a GPU against the same model on the CPU, for 16 prompts of 48 greedy tokens.

    python tools/gpu_parity.py [--device cuda] [--csv parity.csv]

- In float32 every way of running the prompts on the device must give the CPU's token ids: at once, without overlap, in
  chunks, under swapping, under recomputing, over cached prefixes, one at a time.
- In bfloat16 a way may differ where rounding decides. For each prompt the first token that differs from float32's is
  looked up in the float32 distribution at that place (the tokens before it are the same): its log-probability must be
  within GAP_BOUND of the best token's. The table has the worst gap seen, and beside it (spread) the largest difference
  of a token's log-probability to float32's behind the same tokens, which is where such gaps come from.

Ends with 1 if a way differs where it must not, or did not do what it is there for (no preemption, no cache hit).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm import EngineConfig, RequestOutput, Runtime, SamplingParams
from minillm.bench import common
from minillm.bench.cpu_bench import QUESTIONS
from minillm.engine.devices import resolve_device
from minillm.engine.factory import build_engine
from minillm.models.loader import LoadedModel, load_model
from minillm.models.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m"
NEW_TOKENS = 48
TOP = 20
GAP_BOUND = 0.5
"""Nats. bfloat16 moves this model's log-probabilities by up to 0.25 (the spread; its best logits are 16 to 32, where
bfloat16 goes in steps of 1/8), so two tokens that are less than twice that apart may change places."""

CONFIG = EngineConfig(
    MODEL,
    max_model_len=256,
    max_num_seqs=16,
    num_gpu_blocks_override=512,
    swap_space=0.25,
    enable_prefix_caching=False,
    check_invariants=True,
)


@dataclass(frozen=True)
class Way:
    """One way of running the prompts: options of the engine, and the counter that shows that it was taken."""

    name: str
    options: dict[str, Any]
    proof: str = "prefilled_tokens"
    passes: int = 1
    one_by_one: bool = False


WAYS = (
    Way("at once", {}),
    Way("no overlap", {"overlap": False}),
    Way("chunks of 64", {"max_num_batched_tokens": 64}),
    Way("swap", {"preemption_mode": "swap", "num_gpu_blocks_override": 30}, "preemptions_swap"),
    Way("recompute", {"preemption_mode": "recompute", "num_gpu_blocks_override": 30}, "preemptions_recompute"),
    Way("prefix cache", {"enable_prefix_caching": True}, "cached_tokens", passes=2),
)
SLOW_WAYS = (Way("one at a time", {}, one_by_one=True),)
"""The longest, and in bfloat16 no news: for float32 alone, at the end."""


class Parity:
    """The prompts, the CPU's answers, and the rows of the table."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cpu = load_model(MODEL, "float32")
        self.tokenizer: Tokenizer = load_tokenizer(self.cpu.path)
        self.prompts = make_prompts(self.tokenizer)
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        scored = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP)
        outputs, _, seconds = self.generate(self.cpu, WAYS[0], self.prompts, scored)
        self.wanted = [output.outputs[0].token_ids for output in outputs]
        self.scores = [output.outputs[0].logprobs or [] for output in outputs]
        self.logprobs = self.score(self.cpu)
        print(f"float32 on the CPU: {len(self.prompts)} prompts x {NEW_TOKENS} tokens in {seconds:.1f} s", flush=True)

    def generate(
        self, model: LoadedModel, way: Way, prompts: Sequence[list[int]], params: SamplingParams
    ) -> tuple[list[RequestOutput], Any, float]:
        """Outputs of the last pass, the scheduler's counters, and seconds."""
        parts = build_engine(replace(CONFIG, **way.options), model=model, tokenizer=self.tokenizer)
        with Runtime(parts=parts) as runtime:
            start = time.perf_counter()
            for _ in range(way.passes):
                if way.one_by_one:
                    outputs = [runtime.submit(prompt, params).result().raise_for_error() for prompt in prompts]
                else:
                    futures = [runtime.submit(prompt, params) for prompt in prompts]
                    outputs = [future.result(timeout=300).raise_for_error() for future in futures]
            seconds = time.perf_counter() - start
            counters = runtime.stats().counters
        if parts.engine.num_invariant_violations:
            self.failed.append(f"{way.name}: {parts.engine.num_invariant_violations} invariant violations")
        return outputs, counters, seconds

    def score(self, model: LoadedModel) -> list[float]:
        """The model's log-probability of every token of the prompts and the CPU's answers."""
        whole = [prompt + wanted for prompt, wanted in zip(self.prompts, self.wanted, strict=True)]
        outputs, _, _ = self.generate(model, WAYS[0], whole, SamplingParams(max_tokens=0, prompt_logprobs=0))
        return [
            entry[token].logprob
            for output in outputs
            for token, entry in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        ]

    def spread(self, model: LoadedModel) -> float:
        """Largest difference of such a log-probability to that of float32 on the CPU."""
        return max(abs(mine - wanted) for mine, wanted in zip(self.score(model), self.logprobs, strict=True))

    def compare(self, model: LoadedModel, way: Way, spread: float) -> None:
        """Run one way and add its row. `spread` is measured once per dtype."""
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs, counters, seconds = self.generate(model, way, self.prompts, params)
        gaps = [self.gap(i, output.outputs[0].token_ids) for i, output in enumerate(outputs)]
        differing = [gap for gap in gaps if gap is not None]
        bound = 0.0 if model.dtype == "float32" else GAP_BOUND
        worst = max(differing, default=0.0)
        taken = getattr(counters, way.proof)
        passed = taken > 0 and (worst <= bound if bound else not differing)
        self.rows.append(
            {
                "dtype": model.dtype,
                "way": way.name,
                "prompts": len(gaps),
                "tokens": NEW_TOKENS,
                "same": len(gaps) - len(differing),
                "worst_gap": f"{worst:.4f}",
                "bound": bound,
                "spread": f"{spread:.4f}",
                "preempted_swap": counters.preemptions_swap,
                "preempted_recompute": counters.preemptions_recompute,
                "cached_tokens": counters.cached_tokens,
                "seconds": f"{seconds:.2f}",
                "passed": passed,
            }
        )
        print(f"{model.dtype} {way.name}: {'passed' if passed else 'FAILED'}", flush=True)
        if not passed:
            self.failed.append(f"{model.dtype} {way.name}")

    def gap(self, index: int, tokens: Sequence[int]) -> float | None:
        """How much less likely than float32's choice the first differing token of a prompt is; None: none differs."""
        for place, (mine, wanted) in enumerate(zip(tokens, self.wanted[index], strict=True)):
            if mine != wanted:
                scores = self.scores[index][place]
                return scores[wanted].logprob - scores[mine].logprob if mine in scores else float("inf")
        return None


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """16 prompts: every other one as a chat, the others as plain text."""
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [list(chats[i]) if i % 2 else tokenizer.encode(text) for i, text in enumerate(QUESTIONS)]


def main() -> int:
    """Compare, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    device = resolve_device(options.device)
    parity = Parity(device)
    models = {dtype: load_model(MODEL, dtype, device) for dtype in options.dtypes}
    spreads = {dtype: parity.spread(model) for dtype, model in models.items()}
    for dtype, model in models.items():
        for way in WAYS:
            parity.compare(model, way, spreads[dtype])
    if "float32" in models:
        for way in SLOW_WAYS:
            parity.compare(models["float32"], way, spreads["float32"])
    columns = ("dtype", "way", "same", "prompts", "worst_gap", "bound", "spread", "seconds", "passed")
    print("  ".join(columns))
    for row in parity.rows:
        print("  ".join(str(row[name]) for name in columns))
    if options.csv:
        where = device
        if device != "cpu":
            import torch

            where = torch.cuda.get_device_name(device)
        common.write_csv(options.csv, [{**row, **common.environment(where)} for row in parity.rows])
    if parity.failed:
        print(f"failed: {', '.join(parity.failed)}", file=sys.stderr)
    return 1 if parity.failed else 0


if __name__ == "__main__":
    sys.exit(main())
