"""Matrix products on this CPU: which form of a weight is quickest for how many rows.

    python -m minillm.bench.cpu_products --threads 1 --rows 1,2,4,8,12,16,32,64,256

Every contender multiplies as many different weights as the model has layers, in turn, so that none is served from
the cache that a real step would not find warm. Contenders take turns within a round and the minimum over rounds is
printed: CPU time of the thread with one thread (other processes then disturb little), wall time with more.

    python -m minillm.bench.cpu_products --quality

runs the built-in model teacher-forced on float32's greedy tokens and prints how far dtype=auto and bfloat16 are off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.models.linear import CodesLinear, DenseLinear, OneDnnLinear, cpu_packs_bfloat16
from minillm.models.loader import LoadedModel, load_model

NUM_LAYERS = 30
ROUNDS = 7
SHAPES = {  # of SmolLM2-135M: name -> (inputs, outputs, weights of that shape, GGUF type)
    "qkv": (576, 960, NUM_LAYERS, "Q4_1"),
    "output": (576, 576, NUM_LAYERS, "Q4_1"),
    "gate_up": (576, 3072, NUM_LAYERS, "Q4_1"),
    "down": (1536, 576, NUM_LAYERS, "Q4_1"),
    "head": (576, 49152, 1, "Q8_0"),
}
_BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}
QUALITY_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time in a small village",
    "Water boils at",
    "In 1969, humans first",
    "The theory of relativity states",
)
QUALITY_TOKENS = 32

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one product of `rows` rows, by contender."""

    shape: str
    rows: int
    microseconds: dict[str, float]


def random_blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """A weight in GGUF blocks with plausible scales: uint8 [outputs, bytes per row]."""
    blocks = torch.randint(0, 256, (outputs * inputs // 32, _BLOCK_BYTES[kind]), dtype=torch.uint8)
    header = torch.full((len(blocks), 1 if kind == "Q8_0" else 2), 0.01, dtype=torch.float16)
    blocks[:, : header.shape[1] * 2] = header.view(torch.uint8)
    return blocks.view(outputs, -1)


def contenders(inputs: int, outputs: int, kind: str) -> dict[str, tuple[Product, torch.dtype]]:
    """The forms of one weight, each a product and the dtype of its input."""
    weight = torch.randn(outputs, inputs) * 0.05
    dense = DenseLinear(weight.bfloat16())
    codes = CodesLinear.from_blocks([(kind, random_blocks(kind, outputs, inputs))])
    assert codes is not None
    forms: dict[str, tuple[Product, torch.dtype]] = {
        "float32": (lambda x: F.linear(x, weight), torch.float32),
        "bfloat16": (dense, torch.bfloat16),
        "codes": (codes, torch.bfloat16),
    }
    if cpu_packs_bfloat16():
        forms["bfloat16 packed"] = (OneDnnLinear(dense), torch.bfloat16)
    return forms


def time_shape(shape: str, rows: Sequence[int], threads: int) -> list[Timing]:
    """Times every contender at every row count; see the module's text for the method."""
    inputs, outputs, copies, kind = SHAPES[shape]
    clock = time.thread_time if threads == 1 else time.perf_counter
    forms = [contenders(inputs, outputs, kind) for _ in range(copies)]
    timings = []
    for count in rows:
        x = {dtype: torch.randn(count, inputs).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
        best: dict[str, float] = {}
        for round_index in range(ROUNDS + 1):  # the first warms up
            for name in forms[0]:
                start = clock()
                for form in forms:
                    product, dtype = form[name]
                    product(x[dtype])
                elapsed = (clock() - start) / copies * 1e6
                if round_index:
                    best[name] = min(best.get(name, elapsed), elapsed)
        timings.append(Timing(shape, count, best))
    return timings


def table(timings: Sequence[Timing]) -> str:
    """Markdown: one line per shape and row count, the quickest form in bold."""
    names = list(timings[0].microseconds)
    lines = ["| product | rows | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for timing in timings:
        quickest = min(timing.microseconds.values())
        cells = [f"**{us:.0f}**" if us == quickest else f"{us:.0f}" for us in timing.microseconds.values()]
        lines.append(f"| {timing.shape} | {timing.rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class _OneSequence:
    """Keys and values of one sequence in plain tensors: attention that rounds as little as it can."""

    def __init__(self, model: LoadedModel) -> None:
        self.layers = model.decoder.layer_attention
        self.store: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.store:
            past_k, past_v = self.store[layer]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self.store[layer] = (k, v)
        query, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        causal = q.shape[0] > 1
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=causal, scale=self.layers[layer].scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).to(q.dtype)


@torch.inference_mode()
def quality(model_name: str) -> str:
    """Agreement of dtype=auto and bfloat16 with float32 on float32's own greedy text, as a Markdown table."""
    from minillm.models.tokenizer import load_tokenizer

    models = {dtype: load_model(model_name, dtype=dtype) for dtype in ("float32", "auto", "bfloat16")}
    tokenizer = load_tokenizer(models["float32"].path)
    others = ("auto", "bfloat16")
    agreed, worst, divergence = (dict.fromkeys(others, 0.0) for _ in range(3))
    steps = 0
    for prompt in QUALITY_PROMPTS:
        ids = tokenizer.encode(prompt)
        attention = {dtype: _OneSequence(model) for dtype, model in models.items()}
        first = 0
        for _ in range(QUALITY_TOKENS):
            positions = torch.arange(first, first + len(ids))
            logits = {}
            for dtype, model in models.items():
                hidden = model.decoder.forward(torch.tensor(ids), positions, attention[dtype])
                logits[dtype] = model.decoder.compute_logits(hidden[-1:])[0]
            exact = logits["float32"]
            for dtype in others:
                agreed[dtype] += float(logits[dtype].argmax() == exact.argmax())
                worst[dtype] = max(worst[dtype], float((logits[dtype] - exact).abs().max()))
                log_p = exact.log_softmax(-1)
                divergence[dtype] += float((log_p.exp() * (log_p - logits[dtype].log_softmax(-1))).sum())
            steps += 1
            first += len(ids)
            ids = [int(exact.argmax())]
    lines = ["| dtype | same greedy token | largest logit difference | mean KL divergence |", "|---|---|---|---|"]
    lines += [f"| {d} | {agreed[d] / steps:.1%} | {worst[d]:.2f} | {divergence[d] / steps:.5f} |" for d in others]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Matrix products on this CPU, by form of the weight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,8,12,16,32,64,256")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--quality", action="store_true", help="compare logits instead of timing products")
    parser.add_argument("--model", default="smollm2-135m", help="for --quality")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quality:
        print(quality(options.model))
        return
    rows = [int(count) for count in options.rows.split(",")]
    with torch.inference_mode():
        timings = [timing for shape in options.shapes.split(",") for timing in time_shape(shape, rows, options.threads)]
    print(table(timings))


if __name__ == "__main__":
    main()
