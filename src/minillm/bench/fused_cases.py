"""What `minillm bench fused` times: the decoder's operations at the shapes of known models, ours and torch's.

A case has several contenders over the same inputs. Inputs are rotated: `calls` gives one call per set, enough sets for
their bytes to exceed the L2 cache, so that a replay finds weights and activations in device memory, as a model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm.bench.attention_batch import ERROR_BOUNDS, WrongResultError
from minillm.memory import cuda_kv_ops
from minillm.models import cuda_ops, cuda_small_linear
from minillm.models.config import RopeConfig
from minillm.models.cuda_small_linear import SmallLinearConfig
from minillm.models.layers import RMSNorm, RotaryEmbedding, silu_and_mul

OURS = "minillm"
LIBRARY = "torch, product alone"
NORM_APART = f"{OURS}, norm in a kernel of its own"
DTYPE = torch.bfloat16
EPS = 1e-6
Call = Callable[[], Tensor]
Contenders = Mapping[str, Sequence[Call]]
"""By name, one call per set of inputs; a call returns its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide a decoder layer's kernels."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    qk_norm: bool = False
    qkv_bias: bool = False

    @property
    def qkv(self) -> int:
        """Outputs of the packed q, k, v product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


SMOL = ModelShape(name="SmolLM2-135M", hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, inner=1536, vocab=49152)
QWEN25 = ModelShape(
    name="Qwen2.5-0.5B",
    hidden=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    inner=4864,
    vocab=151936,
    qkv_bias=True,
)
QWEN3 = ModelShape(
    name="Qwen3-0.6B",
    hidden=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    inner=3072,
    vocab=151936,
    qk_norm=True,
)
LLAMA8B = ModelShape(
    name="Llama-3.1-8B", hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, inner=14336, vocab=128256
)
BATCH_ROWS = (16, 32, 64, 128)
LAYERS = {SMOL.name: 30, QWEN25.name: 24, QWEN3.name: 28, LLAMA8B.name: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape. `set_bytes`: what a call reads and writes at least; `weight` is part of it."""

    op: str
    model: ModelShape
    rows: int
    n: int = 0
    k: int = 0
    gated: bool = False
    norm: bool = False
    residual: bool = False
    bias: bool = False
    to_float: bool = False

    @property
    def shape(self) -> str:
        """For tables: the weight's shape, or the row's."""
        return f"{self.n * (2 if self.gated else 1)}x{self.k}" if self.n else self.model.name

    @property
    def set_bytes(self) -> int:
        """Bytes that must move: each input read once, each output written once."""
        m, rows, size = self.model, self.rows, DTYPE.itemsize
        if self.op == "embed":
            return rows * m.hidden * (size + 4)
        if self.op == "add_rms_norm":
            return rows * m.hidden * (2 * size + 8) + 4 * m.hidden
        if self.op == "silu_and_mul":
            return rows * m.inner * 3 * size
        if self.op == "qk_norm_rope_write":
            return rows * m.qkv * 2 * size
        weight = self.n * self.k * size * (2 if self.gated else 1)
        out = self.rows * self.n * (8 if self.residual else 4 if self.to_float else size)
        return weight + rows * self.k * (4 if self.norm else size) + out


def products(model: ModelShape, rows: int) -> list[Case]:
    """The five products of a decode step with what is fused to them."""
    case = Case(op="product", model=model, rows=rows)
    inputs = model.num_heads * model.head_dim
    return [
        replace(case, op="qkv", n=model.qkv, k=model.hidden, norm=True, bias=model.qkv_bias),
        replace(case, op="output", n=model.hidden, k=inputs, residual=True),
        replace(case, op="gate_up", n=model.inner, k=model.hidden, norm=True, gated=True),
        replace(case, op="down", n=model.hidden, k=model.inner, residual=True),
        replace(case, op="head", n=model.vocab, k=model.hidden, norm=True, to_float=True),
    ]


def batch_products(model: ModelShape, rows: int) -> list[Case]:
    """The same of a batch, behind a norm: what the batch kernel takes."""
    return [replace(case, norm=False) for case in products(model, rows)]


def all_cases() -> Iterator[Case]:
    """Row-wise operations from one token to a long prompt, products of 1 to 8 rows and of a batch."""
    for op in ("embed", "add_rms_norm", "qk_norm_rope_write", "silu_and_mul"):
        for model in (QWEN3, LLAMA8B):
            for rows in (1, 32, 256, 8192):
                yield Case(op=op, model=model, rows=rows)
    for model in (SMOL, QWEN25, QWEN3, LLAMA8B):
        for rows in (1, 2, 4, 8) if model in (QWEN3, LLAMA8B) else (1, 8):
            yield from products(model, rows)
    for model in (QWEN3, LLAMA8B):
        for rows in BATCH_ROWS:
            yield from batch_products(model, rows)


def contenders(case: Case, sets: int, device: torch.device, variants: bool) -> dict[str, list[Call]]:
    """The case's contenders over `sets` sets of random inputs; `variants` adds other instances of our kernel."""
    make = {
        "embed": _embed,
        "add_rms_norm": _norm,
        "silu_and_mul": _silu,
        "qk_norm_rope_write": _rope,
    }.get(case.op)
    if make is not None:
        return make(case, sets, device)
    return _product(case, sets, device, variants)


class DecodeStep:
    """All kernels of a decode step but attention: embedding, every layer, the head; random weights of their own each.

    `run` is the fused step; `run_library` has torch's products with the row-wise kernels between them.
    """

    def __init__(self, model: ModelShape, rows: int, device: torch.device) -> None:
        self.model = model
        hidden, inner, inputs = model.hidden, model.inner, model.num_heads * model.head_dim
        shapes = {"qkv": (model.qkv, hidden), "output": (hidden, inputs), "gate_up": (2 * inner, hidden),
                  "down": (hidden, inner)}  # fmt: skip
        self.weights = [
            {name: _random(*shape, device=device, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
            for _ in range(LAYERS[model.name])
        ]
        self.head = _random(model.vocab, hidden, device=device, scale=hidden**-0.5)
        self.bias = _random(model.qkv, device=device) if model.qkv_bias else None
        self.ids = torch.randint(model.vocab, (rows,), device=device)
        self.norm_weight, self.head_norm = torch.ones(hidden, device=device), torch.ones(model.head_dim, device=device)
        self.residual = torch.empty(rows, hidden, device=device)
        self.logits = torch.empty(rows, model.vocab, device=device)
        self.hidden, self.product = (_random(rows, hidden, device=device) for _ in range(2))
        self.act = _random(rows, inner, device=device)
        self.gate_up = _random(rows, 2 * inner, device=device)
        self.qkv = _random(rows, model.qkv, device=device)
        self.q = _random(rows, model.num_heads, model.head_dim, device=device)
        self.cache = torch.zeros(2, rows, model.num_kv_heads, 16, model.head_dim, dtype=DTYPE, device=device)
        self.slots = torch.arange(rows, device=device) * 16
        self.inv_freq = torch.ones(model.head_dim // 2, device=device)

    @property
    def set_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(w.nbytes for layer in self.weights for w in layer.values()) + self.head.nbytes

    def _rope(self) -> None:
        weight = self.head_norm if self.model.qk_norm else None
        keys, values = self.cache
        where = self.slots
        cuda_ops.qk_norm_rope_write(
            self.qkv, weight, weight, EPS, where, self.inv_freq, 1.0, keys, values, where, self.q
        )

    def run(self) -> Tensor:
        """Logits by the fused kernels."""
        cuda_ops.embed(self.ids, self.head, self.residual)
        given: dict[str, Any] = {"norm_weight": self.norm_weight, "eps": EPS}
        for layer in self.weights:
            cuda_ops.small_linear(self.residual, layer["qkv"], bias=self.bias, out=self.qkv, **given)
            self._rope()
            cuda_ops.small_linear(self.q.flatten(1), layer["output"], residual=self.residual)
            cuda_ops.small_linear(self.residual, layer["gate_up"], gated=True, out=self.act, **given)
            cuda_ops.small_linear(self.act, layer["down"], residual=self.residual)
        return cuda_ops.small_linear(self.residual, self.head, out=self.logits, **given)

    def run_norms_apart(self) -> Tensor:
        """The same with every norm in a kernel of its own."""
        cuda_ops.embed(self.ids, self.head, self.residual)
        given = (None, self.residual, self.norm_weight, EPS, self.hidden)
        for layer in self.weights:
            cuda_ops.add_rms_norm(*given)
            cuda_ops.small_linear(self.hidden, layer["qkv"], bias=self.bias, out=self.qkv)
            self._rope()
            cuda_ops.small_linear(self.q.flatten(1), layer["output"], residual=self.residual)
            cuda_ops.add_rms_norm(*given)
            cuda_ops.small_linear(self.hidden, layer["gate_up"], gated=True, out=self.act)
            cuda_ops.small_linear(self.act, layer["down"], residual=self.residual)
        cuda_ops.add_rms_norm(*given)
        return cuda_ops.small_linear(self.hidden, self.head, out=self.logits)

    def run_library(self) -> Tensor:
        """Torch's products, our row-wise kernels between them."""
        linear = torch.nn.functional.linear
        cuda_ops.embed(self.ids, self.head, self.residual)
        x = None
        for layer in self.weights:
            cuda_ops.add_rms_norm(x, self.residual, self.norm_weight, EPS, self.hidden)
            if self.bias is None:
                torch.mm(self.hidden, layer["qkv"].t(), out=self.qkv)
            else:
                torch.addmm(self.bias, self.hidden, layer["qkv"].t(), out=self.qkv)
            self._rope()
            x = linear(self.q.flatten(1), layer["output"])
            cuda_ops.add_rms_norm(x, self.residual, self.norm_weight, EPS, self.hidden)
            torch.mm(self.hidden, layer["gate_up"].t(), out=self.gate_up)
            cuda_ops.silu_and_mul(self.gate_up, self.act)
            x = linear(self.act, layer["down"])
        cuda_ops.add_rms_norm(x, self.residual, self.norm_weight, EPS, self.hidden)
        return linear(self.hidden, self.head).float()


def _random(*shape: int, device: torch.device, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=device).normal_(std=scale)


def _each(count: int, make: Callable[[int], Call]) -> list[Call]:
    return [make(index) for index in range(count)]


def _embed(case: Case, sets: int, device: torch.device) -> dict[str, list[Call]]:
    model = case.model
    table = _random(model.vocab, model.hidden, device=device)
    ids = torch.randint(model.vocab, (sets, case.rows), device=device)
    out = torch.empty(sets, case.rows, model.hidden, device=device)
    return {
        OURS: _each(sets, lambda i: lambda: cuda_ops.embed(ids[i], table, out[i])),
        "torch": _each(sets, lambda i: lambda: torch.nn.functional.embedding(ids[i], table).float()),
    }


def _norm(case: Case, sets: int, device: torch.device) -> dict[str, list[Call]]:
    hidden = case.model.hidden
    x, residual = _random(sets, case.rows, hidden, device=device), torch.zeros(sets, case.rows, hidden, device=device)
    out = torch.empty_like(x)
    layer = RMSNorm(hidden, EPS, DTYPE, device)
    layer.weight.fill_(1.0)
    return {
        OURS: _each(sets, lambda i: lambda: cuda_ops.add_rms_norm(x[i], residual[i], layer.weight, EPS, out[i])),
        "torch": _each(sets, lambda i: lambda: layer.add_and_norm(x[i], residual[i])),
    }


def _silu(case: Case, sets: int, device: torch.device) -> dict[str, list[Call]]:
    gate_up = _random(sets, case.rows, 2 * case.model.inner, device=device)
    out = torch.empty(sets, case.rows, case.model.inner, dtype=DTYPE, device=device)
    return {
        OURS: _each(sets, lambda i: lambda: cuda_ops.silu_and_mul(gate_up[i], out[i])),
        "torch": _each(sets, lambda i: lambda: silu_and_mul(gate_up[i])),
    }


def _rope(case: Case, sets: int, device: torch.device) -> dict[str, list[Call]]:
    model, rows, block_size = case.model, case.rows, 16
    q_heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    blocks = -(-rows // block_size)
    qkv = _random(sets, rows, model.qkv, device=device)
    cache = torch.zeros(sets, 2, blocks, kv_heads, block_size, dim, dtype=DTYPE, device=device)
    slots = torch.randperm(blocks * block_size, device=device)[:rows]
    positions = torch.arange(rows, device=device)
    out = torch.empty(sets, rows, q_heads, dim, dtype=DTYPE, device=device)
    rope = RotaryEmbedding(RopeConfig(theta=500000.0), dim, DTYPE, device)
    norm = RMSNorm(dim, EPS, DTYPE, device)
    norm.weight.fill_(1.0)
    weight = norm.weight if model.qk_norm else None

    def ours(i: int) -> Call:
        return lambda: cuda_ops.qk_norm_rope_write(
            qkv[i], weight, weight, EPS, positions, rope.inv_freq, 1.0, cache[i, 0], cache[i, 1], slots, out[i]
        )

    def separate(i: int) -> Call:
        def call() -> Tensor:
            cos, sin = rope.tables(positions)
            heads = qkv[i].view(rows, -1, dim)
            both = heads[:, : q_heads + kv_heads]
            rotated = rope.rotate(norm(both) if model.qk_norm else both, cos, sin)
            cuda_kv_ops.write_kv(rotated[:, q_heads:], heads[:, q_heads + kv_heads :], cache[i, 0], cache[i, 1], slots)
            return rotated[:, :q_heads]

        return call

    return {OURS: _each(sets, ours), "torch": _each(sets, separate)}


def _product(case: Case, sets: int, device: torch.device, variants: bool) -> dict[str, list[Call]]:
    n, k, rows = case.n, case.k, case.rows
    weight = _random(sets, n * (2 if case.gated else 1), k, device=device, scale=k**-0.5)
    x = _random(rows, k, device=device)
    stream, norm_weight = _random(rows, k, device=device, dtype=torch.float32), torch.ones(k, device=device)
    bias = _random(len(weight[0]), device=device) if case.bias else None
    normed = torch.empty_like(x)
    if case.norm:
        cuda_ops.add_rms_norm(None, stream, norm_weight, EPS, x)
    wide = case.residual or case.to_float
    out = torch.zeros(rows, n, dtype=torch.float32 if wide else DTYPE, device=device)
    target: dict[str, Any] = {"residual": out} if case.residual else {"out": out}

    def fused(i: int, config: SmallLinearConfig | None) -> Call:
        given: dict[str, Any] = {"norm_weight": norm_weight, "eps": EPS} if case.norm else {}
        source = stream if case.norm else x
        return lambda: cuda_ops.small_linear(
            source, weight[i], bias=bias, gated=case.gated, config=config, **target, **given
        )

    def separate(i: int) -> Call:
        def call() -> Tensor:
            cuda_ops.add_rms_norm(None, stream, norm_weight, EPS, normed)
            return cuda_ops.small_linear(normed, weight[i], bias=bias, gated=case.gated, **target)

        return call

    def batch(i: int) -> Call:
        return lambda: cuda_ops.batch_linear(x, weight[i], bias=bias, gated=case.gated, **target)

    def library(i: int) -> Call:
        return lambda: torch.nn.functional.linear(x, weight[i], bias)

    found = {LIBRARY: _each(sets, library)}
    if cuda_ops.supports_small_linear(rows, n, k, DTYPE, device, gated=case.gated, norm=case.norm):
        found[OURS] = _each(sets, lambda i: fused(i, None))
    elif cuda_ops.supports_batch_linear(rows, n, k, DTYPE, device, gated=case.gated, to_residual=case.residual):
        found[OURS] = _each(sets, batch)
    if case.norm:
        found[NORM_APART] = _each(sets, separate)
    for config in variants_of(case, device) if variants else ():
        name = f"{OURS}, {config.tiles} tiles, ring {config.ring_bytes >> 10} KiB, x {config.x_place}"
        found[name] = _instance(sets, fused, config)
    expected = torch.nn.functional.linear(x.float(), weight[0].float(), None if bias is None else bias.float())
    if case.gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    for name, calls in found.items():
        if name != LIBRARY:
            _check(name, case, calls[0], out, expected)
    return found


def _instance(
    sets: int, make: Callable[[int, SmallLinearConfig | None], Call], config: SmallLinearConfig
) -> list[Call]:
    return _each(sets, lambda i: make(i, config))


def _check(name: str, case: Case, call: Call, out: Tensor, expected: Tensor) -> None:
    """What is wrong is not timed."""
    out.zero_()
    error = float((call().float() - expected).norm() / expected.norm())
    if not error <= ERROR_BOUNDS[DTYPE]:
        raise WrongResultError(f"{case.op} {case.shape}, {case.rows} rows, {name}: relative error {error:.2e}")


RINGS = (64 << 10, 96 << 10, 144 << 10, 192 << 10)


def variants_of(case: Case, device: torch.device) -> Iterator[SmallLinearConfig]:
    """Instances beside the chosen one, each different in one thing: the ring, the tiles, or the place of x."""
    chosen = cuda_small_linear.config_for(case.rows, case.n, case.k, case.gated, case.norm, device)
    if chosen is None:
        return
    found = [replace(chosen, ring_bytes=ring) for ring in RINGS]
    found += [replace(chosen, tiles=tiles) for tiles in ((2, 4, 6) if case.gated else (1, 2, 4, 6))]
    if not (case.gated or case.norm):
        found.append(replace(chosen, shared_x=not chosen.shared_x))
    limit = cuda_small_linear.shared_limit(device)
    for config in found:
        if config != chosen and config.stages > 0 and config.shared_bytes(case.rows, case.k) <= limit:
            yield config
