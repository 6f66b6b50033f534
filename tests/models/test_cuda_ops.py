"""The decoder's fused kernels against plain PyTorch, and what their launch wrappers refuse."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm.attention import cuda_build
from minillm.models import cuda_batch_linear, cuda_op_launches, cuda_ops, cuda_small_linear
from minillm.models.cuda_small_linear import SmallLinearConfig, choose_config
from reference_ops import (
    add_rms_norm as reference_norm,
)
from reference_ops import (
    embed as reference_embed,
)
from reference_ops import (
    qk_norm_rope_write as reference_rope,
)
from reference_ops import (
    silu_and_mul as reference_silu,
)
from reference_ops import (
    small_linear as reference_linear,
)

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="NVRTC is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
cuda = [pytest.mark.cuda, needs_gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HIDDEN = (576, 896, 1024, 2048, 4096, 8192)
TOKENS = (1, 2, 3, 7, 8, 17, 256, 4096)
HEADS = ((9, 3, 64), (14, 2, 64), (16, 8, 128), (32, 8, 128), (64, 8, 128), (4, 1, 256), (6, 2, 80), (2, 2, 8))
EPSILON = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Largest relative error of rounding once."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed * 7919 + sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def full_of_nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def assert_rounds_alike(out: Tensor, expected: Tensor, dtype: torch.dtype, flips: float = 0.01) -> None:
    """At most one unit in the last place apart, and that rarely: another order of summation moves few roundings."""
    assert out.isfinite().all()
    difference = (out.double() - expected.double()).abs()
    unit = 2 * EPSILON[dtype] * expected.double().abs().clamp_min(1e-3)
    assert (difference <= unit * 1.01).all(), float((difference / unit).max())
    if dtype != torch.float32:
        assert (difference > 0).double().mean() <= flips


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills_registers(arch):
    specs = [spec for module in (cuda_ops, cuda_small_linear, cuda_batch_linear) for spec in module.specs(arch)]
    for kernel, _ in cuda_build.build_many([(spec, arch) for spec in specs], threads=1):
        assert kernel.spill_bytes == 0, kernel.symbol
        if kernel.source == "small_linear.cu":
            assert kernel.registers <= 128, kernel.symbol  # two blocks of neighbouring launches share a multiprocessor


MODELS = {
    "SmolLM2-135M": (576, 960, 576, 1536, 49152),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864, 151936),
    "Qwen3-0.6B": (1024, 4096, 2048, 3072, 151936),
    "Llama-3.2-1B": (2048, 3072, 2048, 8192, 128256),
    "Llama-3.1-8B": (4096, 6144, 4096, 14336, 128256),
}
"""Hidden size, rows of the packed q, k, v product, inputs of the output product, inner size, vocabulary."""


@pytest.mark.parametrize(("arch", "limit", "multiprocessors"), [("sm_90a", 232448, 132), ("sm_80", 166912, 108),
                                                                ("sm_89", 101376, 128)])  # fmt: skip
@pytest.mark.parametrize("model", MODELS)
def test_every_product_of_known_models_has_a_registered_kernel_that_fits(model, arch, limit, multiprocessors):
    hidden, qkv, inputs, inner, vocab = MODELS[model]
    registered = set(cuda_small_linear._all_configs(arch))
    products = [(qkv, hidden, False, True), (hidden, inputs, False, False), (inner, hidden, True, True),
                (hidden, inner, False, False), (vocab, hidden, False, True), (vocab, hidden, False, False)]  # fmt: skip
    for rows, (n, k, gated, norm) in product((1, 2, 4, 8), products):
        config = choose_config(
            rows, n, k, gated=gated, norm=norm, multiprocessors=multiprocessors, shared_limit=limit - 256
        )
        if config is None:
            assert norm  # many long rows to normalise where shared memory is small
            assert rows * k * 2 > limit - (80 << 10)
            continue
        assert config in registered
        assert config.shared_bytes(rows, k) <= limit - 256
        # A multiprocessor gets at most a tile more than its share.
        passes = -(-n // config.outputs)
        load = -(-passes // multiprocessors) * config.outputs
        assert load <= n / multiprocessors + 8


def test_two_neighbouring_products_of_a_small_batch_share_a_multiprocessor():
    """So that the second fetches its weights while the first one runs: 228 KiB, 1 KiB of them per block reserved."""
    for hidden, qkv, inputs, inner, _ in MODELS.values():
        sizes = [
            choose_config(1, n, k, gated=gated, norm=norm, multiprocessors=132, shared_limit=232192).shared_bytes(1, k)
            for n, k, gated, norm in ((qkv, hidden, False, True), (hidden, inputs, False, False),
                                      (inner, hidden, True, True), (hidden, inner, False, False))
        ]  # fmt: skip
        assert 2 * (max(sizes) + 1280) <= 228 << 10, sizes


def test_products_of_float32_or_many_rows_are_not_supported():
    device = torch.device("cpu")
    assert not cuda_ops.supports_small_linear(1, 64, 64, torch.float32, device)
    assert not cuda_ops.supports_small_linear(9, 64, 64, torch.bfloat16, device)
    assert not cuda_ops.supports_small_linear(0, 64, 64, torch.bfloat16, device)
    assert not cuda_ops.supports_small_linear(1, 64, 60, torch.bfloat16, device)


def test_many_passes_over_few_columns_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cuda_small_linear, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda_small_linear, "shared_limit", lambda device: 232192)
    cuda_small_linear.config_for.cache_clear()
    device = torch.device("cpu")
    given = {"dtype": torch.bfloat16, "device": device}
    assert not cuda_ops.supports_small_linear(1, 49152, 576, **given)
    assert cuda_ops.supports_small_linear(1, 49152, 1024, **given)
    assert cuda_ops.supports_small_linear(8, 1536, 576, gated=True, norm=True, **given)
    cuda_small_linear.config_for.cache_clear()


def test_wrong_shapes_and_dtypes_are_named():
    ids, residual = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 64)
    with pytest.raises(ValueError, match=r"input_ids has dtype torch\.int32"):
        cuda_ops.embed(ids.int(), torch.zeros(9, 64), residual)
    with pytest.raises(ValueError, match=r"residual has shape \(3, 64\), it must be \(3, 32\)"):
        cuda_ops.embed(ids, torch.zeros(9, 32), residual)
    with pytest.raises(ValueError, match=r"weight has dtype torch\.bfloat16"):
        cuda_ops.add_rms_norm(None, residual, torch.zeros(64).bfloat16(), 1e-6, torch.zeros(3, 64).half())
    with pytest.raises(ValueError, match="multiples of 8"):
        cuda_ops.add_rms_norm(None, torch.zeros(3, 60), torch.zeros(60), 1e-6, torch.zeros(3, 60).half())
    with pytest.raises(ValueError, match="longer than"):
        long = torch.zeros(1, 65536)
        cuda_ops.add_rms_norm(None, long, long[0], 1e-6, long.half())
    with pytest.raises(ValueError, match=r"gate_up has shape"):
        cuda_ops.silu_and_mul(torch.zeros(3, 64), torch.zeros(3, 64))
    weight = torch.zeros(16, 64, dtype=torch.half)
    with pytest.raises(ValueError, match=r"x has 9 rows, it must have 1 to 8"):
        cuda_ops.small_linear(torch.zeros(9, 64).half(), weight)
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float32"):
        cuda_ops.small_linear(torch.zeros(1, 64), weight.float())
    with pytest.raises(ValueError, match=r"x has dtype torch\.float16, it must be torch\.float32"):
        cuda_ops.small_linear(torch.zeros(1, 64).half(), weight, norm_weight=torch.zeros(64))
    with pytest.raises(ValueError, match="exclude each other"):
        cuda_ops.small_linear(torch.zeros(1, 64).half(), weight, out=torch.zeros(1, 16), residual=torch.zeros(1, 16))
    with pytest.raises(ValueError, match="even number"):
        cuda_ops.small_linear(torch.zeros(1, 64).half(), weight[:15], gated=True)


def test_the_layout_of_a_known_tensor_is_a_number():
    a, b = torch.zeros(4, 8), torch.zeros(4, 8)
    assert cuda_op_launches.fixed_layout(a) == cuda_op_launches.fixed_layout(a) == cuda_op_launches.fixed_layout(b) >= 0
    others = [a.half(), torch.zeros(8, 4), torch.zeros(8, 4).t(), torch.zeros(4, 8, device="meta"), a[:, :4]]
    numbers = {cuda_op_launches.fixed_layout(tensor) for tensor in (a, *others)}
    assert len(numbers) == 6
    assert cuda_op_launches.fixed_layout(None) == -1
    for _ in range(100):  # objects whose id is that of one that is gone
        size = int(torch.randint(1, 9, ()))
        again = torch.zeros(size, 8)
        assert (cuda_op_launches.fixed_layout(again) == cuda_op_launches.fixed_layout(a)) == (size == 4)
        del again


class RecordedLaunch:
    """Stands in for `PreparedLaunch`."""

    made: list[RecordedLaunch] = []

    def __init__(self, kernel, grid, block, num_pointers, scalars, *, shared_bytes, cluster, dependent) -> None:
        self.grid, self.num_pointers, self.scalars, self.calls = grid, num_pointers, scalars, []
        RecordedLaunch.made.append(self)

    def __call__(self, *addresses: int) -> None:
        assert len(addresses) == self.num_pointers
        self.calls.append(addresses)


def test_a_layout_is_prepared_once_and_launched_with_the_addresses_at_hand(monkeypatch):
    monkeypatch.setattr(cuda_op_launches, "PreparedLaunch", RecordedLaunch)
    fresh = cuda_op_launches._ThreadLaunches()
    for module in (cuda_ops, cuda_small_linear, cuda_batch_linear, cuda_op_launches):
        monkeypatch.setattr(module, "launches", fresh)
    for module in (cuda_ops, cuda_small_linear, cuda_batch_linear):
        monkeypatch.setattr(module, "get_kernel", lambda spec, device, overlapping: spec)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for module in (cuda_small_linear, cuda_batch_linear):
        monkeypatch.setattr(module, "shared_limit", lambda device: 232192)
    monkeypatch.setattr(RecordedLaunch, "made", [])
    weight = torch.ones(64)

    def norm(tokens: int, dtype: torch.dtype) -> tuple[int, ...]:
        x, residual, out = torch.zeros(tokens, 64, dtype=dtype), torch.zeros(tokens, 64), torch.zeros(tokens, 64)
        out = out.to(dtype)
        cuda_ops.add_rms_norm(x, residual, weight, 1e-6, out)
        norm.keep = x, residual, out
        return out.data_ptr(), residual.data_ptr(), x.data_ptr(), weight.data_ptr()

    calls = [norm(3, torch.half), norm(3, torch.half), norm(5, torch.half), norm(3, torch.bfloat16)]
    assert [launch.calls for launch in RecordedLaunch.made] == [calls[:2], calls[2:3], calls[3:]]
    assert [launch.grid for launch in RecordedLaunch.made] == [(3, 1), (5, 1), (3, 1)]

    x, matrix, bias = torch.zeros(2, 64).half(), torch.zeros(48, 64).half(), torch.zeros(48).half()
    residual, stream = torch.zeros(2, 48), torch.zeros(2, 64)
    cuda_ops.small_linear(x, matrix, bias=bias, residual=residual)
    cuda_ops.small_linear(stream, matrix, norm_weight=weight, gated=True)
    plain, gated = RecordedLaunch.made[3:]
    assert plain.calls == [(matrix.data_ptr(), x.data_ptr(), 0, bias.data_ptr(), residual.data_ptr())]
    assert [int(scalar) for scalar in plain.scalars[:6]] == [64, 48, 2, 48, 64, 2]
    assert gated.calls[0][:4] == (matrix.data_ptr(), stream.data_ptr(), weight.data_ptr(), 0)
    assert [int(scalar) for scalar in gated.scalars[:6]] == [64, 24, 2, 24, 64, 0]


def test_rope_arguments_are_checked():
    cache = torch.zeros(4, 2, 16, 64)
    arguments = (torch.zeros(3, 256), None, None, 1e-6, torch.zeros(3).long(), torch.zeros(32), 1.0, cache, cache)
    with pytest.raises(ValueError, match="k_cache is on cpu"):
        cuda_ops.qk_norm_rope_write(*arguments, torch.zeros(3).long(), torch.zeros(3, 2, 64))


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_embed(hidden, dtype):
    embedding = randn(1000, hidden, dtype=dtype)
    for tokens in TOKENS:
        ids = torch.randint(1000, (tokens,), device="cuda")
        out = cuda_ops.embed(ids, embedding, full_of_nan(tokens, hidden, dtype=torch.float32))
        assert torch.equal(out, reference_embed(ids, embedding, torch.empty_like(out)))
    ids = torch.tensor([5, -1, 999, 1000], device="cuda")
    out = cuda_ops.embed(ids, embedding, torch.zeros(4, hidden, device="cuda"))
    assert out.isnan().all(1).tolist() == [False, True, False, True]
    assert torch.equal(out[[0, 2]], embedding[[5, 999]].float())


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", (8, *HIDDEN, 16384))
def test_add_rms_norm(hidden, dtype):
    weight = randn(hidden, seed=1) + 1
    for tokens, strided, added in product(TOKENS, (False, True), (True, False)):
        packed = randn(tokens, hidden + 8, dtype=dtype, seed=tokens)
        x = (packed[:, :hidden] if strided else packed[:, :hidden].contiguous()) if added else None
        residual = randn(tokens, hidden, seed=2, scale=3)
        expected_residual = residual.clone()
        expected = reference_norm(x, expected_residual, weight, 1e-5, torch.empty(tokens, hidden, dtype=dtype).cuda())
        out = cuda_ops.add_rms_norm(x, residual, weight, 1e-5, full_of_nan(tokens, hidden, dtype=dtype))
        assert torch.equal(residual, expected_residual)
        assert_rounds_alike(out, expected, dtype)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", (8, 1536, 3072, 4864, 14336))
def test_silu_and_mul(inner, dtype):
    for tokens in TOKENS:
        gate_up = randn(tokens, 2 * inner + 8, dtype=dtype, scale=4)[:, : 2 * inner]
        out = cuda_ops.silu_and_mul(gate_up, full_of_nan(tokens, inner, dtype=dtype))
        assert_rounds_alike(out, reference_silu(gate_up, torch.empty_like(out)), dtype)


def rope_inputs(heads: tuple[int, int, int], tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype, norm: bool):
    num_heads, num_kv_heads, dim = heads
    block_size = 16
    blocks = -(-tokens // block_size) + 3
    both = torch.full((blocks, 2, num_kv_heads, block_size, dim), 7.0, dtype=cache_dtype, device="cuda")
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
    slots[1::5] = -1
    slots[3::11] = blocks * block_size + 3
    positions = torch.randint(40_000, (tokens,), device="cuda")
    positions[0] = 131_071
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    qkv = randn(tokens, (num_heads + 2 * num_kv_heads) * dim + 8, dtype=dtype, seed=tokens)[:, :-8]
    weights = (randn(dim, seed=3) + 1, randn(dim, seed=4) + 1) if norm else (None, None)
    return qkv, *weights, positions, inv_freq, both, slots


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_qk_norm_rope_write(heads, dtype, norm):
    for tokens, long in product(TOKENS, (True, False)):
        factor = 1.0 if long else 1.2
        qkv, q_weight, k_weight, positions, inv_freq, both, slots = rope_inputs(heads, tokens, dtype, dtype, norm)
        qkv = qkv if (heads[0] + 2 * heads[1]) % 2 else qkv.contiguous()
        expected = both.clone()
        fixed = (qkv, q_weight, k_weight, 1e-6, positions if long else positions.int(), inv_freq, factor)
        q = full_of_nan(tokens, heads[0], heads[2], dtype=dtype)
        want = reference_rope(*fixed, expected[:, 0], expected[:, 1], slots, torch.empty_like(q))
        cuda_ops.qk_norm_rope_write(*fixed, both[:, 0], both[:, 1], slots, q)
        assert_rotated_alike(q, want, dtype)
        assert torch.equal(both[:, 1], expected[:, 1])
        assert torch.equal(both == 7, expected == 7)
        assert_rotated_alike(both[:, 0], expected[:, 0], dtype)


def assert_rotated_alike(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Rounding of the parts may move by a unit where a norm's last bit did, so the bound is by the row's size."""
    assert out.isfinite().all()
    difference = (out.double() - expected.double()).abs()
    assert difference.max() <= 4 * EPSILON[dtype] * expected.double().abs().max()
    assert difference.norm() <= 0.2 * max(EPSILON[dtype], 1e-6) * expected.double().norm()


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(("dtype", "cache_dtype"), [pair for pair in product(DTYPES, DTYPES) if pair[0] != pair[1]])
def test_qk_norm_rope_write_into_a_cache_of_another_dtype(dtype, cache_dtype):
    qkv, q_weight, k_weight, positions, inv_freq, both, slots = rope_inputs((16, 8, 128), 33, dtype, cache_dtype, True)
    qkv, expected = qkv.contiguous(), both.clone()
    fixed = (qkv, q_weight, k_weight, 1e-6, positions, inv_freq, 1.0)
    q = full_of_nan(33, 16, 128, dtype=cache_dtype)
    want = reference_rope(*fixed, expected[:, 0], expected[:, 1], slots, torch.empty_like(q))
    cuda_ops.qk_norm_rope_write(*fixed, both[:, 0], both[:, 1], slots, q)
    coarser = max(dtype, cache_dtype, key=EPSILON.__getitem__)
    assert_rotated_alike(q, want, coarser)
    assert_rotated_alike(both[:, 0], expected[:, 0], coarser)
    assert torch.equal(both[:, 1], expected[:, 1])


LINEAR_SHAPES = (
    (576, 576), (960, 576), (49152, 576), (1152, 896), (896, 4864), (1024, 2048), (4096, 1024), (1024, 3072),
    (6144, 4096), (4096, 14336), (2560, 8192), (72, 200), (5, 8), (131, 1000), (20_003, 520),
)  # fmt: skip
"""(outputs, inputs) of models, and awkward ones: fewer rows than a tile, k no multiple of a chunk, odd n."""


def assert_product(out: Tensor, expected: Tensor, x: Tensor, weight: Tensor, rounding: float) -> None:
    """By the error of a float32 sum, which grows with the size of its terms, and of rounding the result."""
    assert out.isfinite().all()
    size = x.double().abs() @ weight.double().abs().T
    difference = (out.double() - expected.double()).abs()
    assert (difference <= 2e-6 * size + 1.01 * rounding * expected.double().abs()).all()


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), LINEAR_SHAPES)
def test_small_linear(n, k, dtype):
    weight, bias = randn(n, k, dtype=dtype, scale=k**-0.5), randn(n, dtype=dtype, seed=1)
    x = randn(8, k + 8, dtype=dtype, seed=2)[:, :k]
    exact = x.double() @ weight.double().T
    whole = cuda_ops.small_linear(x, weight, out=full_of_nan(8, n, dtype=torch.float32))
    assert_product(whole, exact, x, weight, 0.0)
    for rows in range(1, 9):
        y = cuda_ops.small_linear(x[:rows], weight, out=full_of_nan(rows, n, dtype=torch.float32))
        assert torch.equal(y, whole[:rows])  # a row's result does not depend on its batch
    rounded = cuda_ops.small_linear(x[:3], weight, bias=bias)
    assert rounded.dtype == dtype
    assert_product(rounded, exact[:3] + bias.double(), x[:3], weight, EPSILON[dtype])
    residual = randn(8, n, seed=5)
    expected = residual + whole
    assert torch.equal(cuda_ops.small_linear(x, weight, residual=residual), expected)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1536, 576), (4864, 896), (3072, 1024), (14336, 4096), (130, 72), (77, 8192)])
def test_small_linear_with_norm_and_activation(n, k, dtype):
    weight, bias = randn(2 * n, k, dtype=dtype, scale=k**-0.5), randn(2 * n, dtype=dtype, seed=1)
    norm_weight, residual = randn(k, seed=3) + 1, randn(8, k, seed=4, scale=5)
    x = torch.empty(8, k, dtype=dtype, device="cuda")
    cuda_ops.add_rms_norm(None, residual, norm_weight, 1e-6, x)
    for rows in (1, 2, 3, 4, 5, 8):
        if not cuda_ops.supports_small_linear(rows, n, k, dtype, residual.device, gated=True, norm=True):
            continue
        given = {"norm_weight": norm_weight, "eps": 1e-6}
        y = cuda_ops.small_linear(residual[:rows], weight, out=full_of_nan(rows, 2 * n, dtype=torch.float32), **given)
        separate = cuda_ops.small_linear(x[:rows], weight, out=torch.empty_like(y))
        # The sums of squares are added in another order, which moves the rounding of a few inputs.
        assert (y - separate).norm() <= 0.1 * EPSILON[dtype] * separate.norm()
        gated = cuda_ops.small_linear(residual[:rows], weight, bias=bias, gated=True, **given)
        expected = reference_linear(x[:rows], weight, bias=bias, gated=True, out=torch.empty(rows, n, device="cuda"))
        assert gated.isfinite().all()
        assert (gated - expected).norm() <= EPSILON[dtype] * expected.norm()
        assert torch.equal(cuda_ops.small_linear(x[:rows], weight, bias=bias, gated=True),
                           cuda_ops.small_linear(x, weight, bias=bias, gated=True)[:rows])  # fmt: skip


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("config", sorted(cuda_small_linear._all_configs("sm_90a"), key=str), ids=str)
def test_every_instance_of_small_linear_agrees_with_torch(config: SmallLinearConfig):
    n, k = 3000, 1160
    weight = randn(2 * n if config.gated else n, k, dtype=torch.bfloat16, scale=k**-0.5)
    x = randn(7, k, dtype=torch.bfloat16, seed=1)
    out = full_of_nan(7, n, dtype=torch.float32)
    cuda_ops.small_linear(x, weight, out=out, gated=config.gated, config=config)
    expected = reference_linear(x, weight, gated=config.gated, out=torch.empty_like(out))
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.cuda
@needs_gpu
def test_misaligned_rows_are_refused():
    weight, x = randn(256, 512, dtype=torch.bfloat16), randn(1, 520, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x begins at address"):
        cuda_ops.small_linear(x[:, 1:513], weight)


@pytest.mark.cuda
@needs_gpu
def test_a_chain_of_dependent_launches_is_right_and_repeatable_in_a_graph():
    """Four layers' products and row-wise operations on shared buffers: each reads what the one before wrote."""
    hidden, inner, layers, dtype = 1024, 3072, 4, torch.bfloat16
    up = [randn(2 * inner, hidden, dtype=dtype, seed=i, scale=hidden**-0.5) for i in range(layers)]
    down = [randn(hidden, inner, dtype=dtype, seed=9 + i, scale=inner**-0.5) for i in range(layers)]
    norm_weight = randn(hidden, seed=30) + 1
    embedding, ids = randn(50, hidden, dtype=dtype, seed=31), torch.tensor([3, 11], device="cuda")
    residual, act = torch.empty(2, hidden, device="cuda"), torch.empty(2, inner, dtype=dtype, device="cuda")
    x, gate_up = torch.empty(2, hidden, dtype=dtype, device="cuda"), torch.empty(2, 2 * inner, dtype=dtype).cuda()

    def run(ops, fused: bool) -> Tensor:
        ops.embed(ids, embedding, residual)
        for layer in range(layers):
            if fused:
                ops.small_linear(residual, up[layer], norm_weight=norm_weight, eps=1e-6, gated=True, out=act)
            else:
                ops.add_rms_norm(None, residual, norm_weight, 1e-6, x)
                ops.small_linear(x, up[layer], out=gate_up)
                ops.silu_and_mul(gate_up, act)
            ops.small_linear(act, down[layer], residual=residual)
        return residual

    import reference_ops

    expected = run(reference_ops, True).clone()
    for fused in (True, False):
        first = run(cuda_ops, fused).clone()
        assert (first - expected).norm() <= 0.01 * expected.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(cuda_ops, fused)
        for _ in range(200):
            graph.replay()
            assert torch.equal(residual, first)
