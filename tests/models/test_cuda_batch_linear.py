"""Products of a decode batch: which instance is chosen, what is refused, and on a GPU the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.models import cuda_batch_linear, cuda_ops
from minillm.models.cuda_batch_linear import BatchLinearConfig, batch_linear, choose_batch_config, supports_batch_linear
from minillm.models.cuda_op_launches import launches
from minillm.models.deferred_norm import DeferredNorm
from reference_ops import batch_linear as reference

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

SHARED_LIMIT = 232448 - 256
MODELS = {
    "SmolLM2-135M": (576, 960, 576, 1536),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864),
    "Qwen3-0.6B": (1024, 4096, 2048, 3072),
    "Llama-3.1-8B": (4096, 6144, 4096, 14336),
    "Llama-3.1-70B": (8192, 10240, 8192, 28672),
}
"""Hidden size, rows of the packed q, k, v product, inputs of the output product, inner size."""


def products(model: str) -> list[tuple[int, int, bool]]:
    hidden, qkv, inputs, inner = MODELS[model]
    return [(qkv, hidden, False), (hidden, inputs, False), (inner, hidden, True), (hidden, inner, False)]


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [114, 132])
@pytest.mark.parametrize("model", MODELS)
def test_every_product_of_known_models_has_a_registered_kernel_that_fits(model, multiprocessors):
    registered = set(cuda_batch_linear.specs("sm_90a"))
    for n, k, gated in products(model):
        for rows in range(1, 257):
            if rows > cuda_batch_linear._most_rows(n, k, gated, to_residual=not gated):
                continue
            config = choose_batch_config(rows, n, k, gated=gated, multiprocessors=multiprocessors)
            assert config.spec("__nv_bfloat16") in registered
            assert config.shared_bytes(k, SHARED_LIMIT) + 4 * config.tokens <= SHARED_LIMIT
            assert config.stages(k, SHARED_LIMIT) >= min(3, -(-k // 64 // config.splits))
            token_tiles = -(-rows // config.tokens)
            assert token_tiles * config.tokens < rows + 48 * token_tiles  # little of a tile is padding
            assert config.splits <= -(-k // 64)  # every block has a part of k


def test_the_order_of_a_rows_sums_does_not_depend_on_the_batch():
    for model in MODELS:
        for n, k, gated in products(model):
            configs = [choose_batch_config(rows, n, k, gated=gated, multiprocessors=132) for rows in range(1, 129)]
            assert len({config.splits for config in configs}) == 1


def test_small_weights_are_divided_among_the_multiprocessors():
    """Blocks at work for a batch of 32: at least about half as many as there are multiprocessors."""
    for model in ("Qwen3-0.6B", "Llama-3.1-8B"):
        for n, k, gated in products(model):
            config = choose_batch_config(32, n, k, gated=gated, multiprocessors=132)
            blocks = -(-n * (2 if gated else 1) // config.tile_rows) * config.splits
            assert 60 <= blocks <= 132, (n, k, config)


def test_there_are_kernels_for_hopper_alone():
    assert cuda_batch_linear.specs("sm_80") == cuda_batch_linear.specs("sm_100") == []
    assert not supports_batch_linear(32, 64, 64, torch.bfloat16, torch.device("cpu"))


def test_what_is_supported(monkeypatch):
    monkeypatch.setattr(cuda_batch_linear, "_is_hopper", lambda device: True)
    device = torch.device("cpu")

    def takes(rows: int, n: int = 1024, k: int = 1024, dtype: torch.dtype = torch.bfloat16, **kind: bool) -> bool:
        return supports_batch_linear(rows, n, k, dtype, device, **kind)

    small, large = (8, 9, 129, 256, 257), (8, 9, 128, 129)
    assert [takes(rows) for rows in small] == [False, True, True, True, False]
    assert [takes(rows, gated=True) for rows in small] == [False, True, True, True, False]
    assert [takes(rows, n=4096, k=4096) for rows in large] == [False, True, True, False]
    assert [takes(rows, n=4096, k=4096, to_residual=True) for rows in small] == [False, True, True, True, False]
    assert [takes(rows, n=8192, k=4096, to_residual=True) for rows in large] == [False, True, True, False]
    assert not takes(16, dtype=torch.float32)
    assert takes(16, dtype=torch.float16)
    assert not takes(16, n=1020)
    assert not takes(16, k=1020)


def test_wrong_arguments_are_named():
    weight, x = torch.zeros(64, 128, dtype=torch.half), torch.zeros(16, 128).half()
    for given, message in (
        ({"weight": weight.float()}, r"weight has dtype torch\.float32"),
        ({"x": x.float()}, r"x has dtype torch\.float32"),
        ({"x": x[:, :64]}, r"weight has shape \(64, 128\), it must be \(any, 64\)"),
        ({"weight": weight[:60]}, "60 outputs must be a multiple of 8"),
        ({"weight": weight[:63], "gated": True}, "even number"),
        ({"x": torch.zeros(257, 128).half()}, "x has 257 rows, it must have 1 to 256"),
        ({"x": torch.zeros(129, 4096).half(), "weight": torch.zeros(8192, 4096).half()}, "it must have 1 to 128"),
        ({"bias": torch.zeros(64)}, r"bias has dtype torch\.float32"),
        ({"residual": torch.zeros(16, 64).half()}, r"residual has dtype torch\.float16"),
        ({"residual": torch.zeros(16, 64), "out": torch.zeros(16, 64)}, "exclude each other"),
        ({"out": torch.zeros(16, 32)}, r"out has shape \(16, 32\), it must be \(16, 64\)"),
        ({"x": torch.zeros(16, 132).half()[:, :128]}, "multiples of 8"),
        ({"deferred": DeferredNorm(x, torch.zeros(3, 16), 1e-6)}, r"squares has shape \(3, 16\), it must be \(2, 16\)"),
        ({"next_norm": torch.zeros(64)}, "takes next_norm, next_deferred and residual"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_linear(**({"x": x, "weight": weight} | given))


def test_a_prepared_launch_serves_no_arguments_that_were_not_checked(monkeypatch):
    """Norms of another layout are looked at again, though everything else is as before."""
    launched: list[tuple[int, ...]] = []

    def prepare(key, *_: object):
        launches.prepared[key] = lambda *addresses: launched.append(addresses)
        return launches.prepared[key]

    monkeypatch.setattr(launches, "prepared", {})
    monkeypatch.setattr(cuda_batch_linear, "_prepare_launch", prepare)
    weight, x, residual = torch.zeros(64, 128).half(), torch.zeros(16, 128).half(), torch.zeros(16, 64)
    norm, squares = torch.zeros(64), torch.zeros(1, 16)
    given = {"next_norm": norm, "next_deferred": DeferredNorm(torch.zeros(16, 64).half(), squares, 1e-6)}
    for _ in range(2):
        batch_linear(x, weight, residual=residual, **given)
    assert len(launched) == 2 and len(launches.prepared) == 1
    wide = torch.zeros(16, 128).half()[:, :64]
    for change, message in (
        ({"next_norm": torch.zeros(32)}, "next_norm has shape"),
        ({"next_norm": norm.half()}, "next_norm has dtype"),
        ({"next_deferred": DeferredNorm(torch.zeros(16, 64), squares, 1e-6)}, r"deferred\.x has dtype"),
        ({"next_deferred": DeferredNorm(wide, squares, 1e-6)}, r"deferred\.x .*contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_linear(x, weight, residual=residual, **(given | change))
    assert len(launched) == 2


# ---- On a GPU --------------------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed * 7919 + sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def full_of_nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
SHAPES = [*products("Qwen3-0.6B"), *products("Qwen2.5-0.5B"), *products("SmolLM2-135M"), (4096, 4096, False),
          (6144, 4096, False), (7168, 1024, True), (1000, 72, False), (8, 8, False), (72, 1160, True)]  # fmt: skip


@pytest.mark.cuda
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "gated"), SHAPES)
def test_batch_linear(n, k, gated, dtype):
    weight = randn(2 * n if gated else n, k, dtype=dtype, scale=k**-0.5)
    bias, x = randn(len(weight), dtype=dtype, seed=1), randn(256, k + 8, dtype=dtype, seed=2)[:, :k]
    most = cuda_batch_linear._most_rows(n, k, gated, to_residual=False)
    expected = reference(x, weight, bias=bias, gated=gated, out=torch.empty(256, n, device="cuda"))
    whole = batch_linear(x[:128], weight, bias=bias, gated=gated, out=full_of_nan(128, n))
    for rows in (1, 9, 16, 17, 31, 33, 48, 64, 77, 96, 97, 128, 129, 160, 191, 224, 255, 256):
        if rows > most:
            continue
        around = full_of_nan(rows + 2, n)
        y = batch_linear(x[:rows], weight, bias=bias, gated=gated, out=around[1:-1])
        assert around[0].isnan().all() and around[-1].isnan().all()
        assert (y - expected[:rows]).norm() <= 1e-5 * expected[:rows].norm()
        if rows <= 128:
            assert torch.equal(y, whole[:rows])  # a row's result does not depend on its batch
        rounded = batch_linear(x[:rows], weight, bias=bias, gated=gated)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, y.to(dtype))
        if not gated:
            residual = randn(rows, n, seed=5)
            added = residual + batch_linear(x[:rows], weight, out=full_of_nan(rows, n))
            assert torch.equal(batch_linear(x[:rows], weight, residual=residual), added)


@pytest.mark.cuda
@needs_hopper
@pytest.mark.parametrize("index", range(44))
def test_every_instance_agrees_with_torch(monkeypatch, index):
    registered = [spec for spec in cuda_batch_linear.specs("sm_90a") if "bfloat16" in spec.symbol]
    assert len(registered) == 44
    config = list(cuda_batch_linear._all_instances())[index]
    n, k = 1000, 1160
    weight = randn(2 * n if config.gated else n, k, dtype=torch.bfloat16, scale=k**-0.5)
    for splits in (1, 2, 4):
        chosen = BatchLinearConfig(config.tokens, config.groups, config.gated, splits)
        monkeypatch.setattr(cuda_batch_linear, "_config_for", lambda *args, chosen=chosen: chosen)
        monkeypatch.setattr(launches, "prepared", {})  # whose launches another instance has prepared
        # Two tiles of tokens where that many rows are taken.
        for rows in (config.tokens - 3, min(2 * config.tokens - 5, 256)):
            x = randn(rows, k, dtype=torch.bfloat16, seed=rows + splits)
            out = batch_linear(x, weight, gated=config.gated, out=full_of_nan(rows, n))
            expected = reference(x, weight, gated=config.gated, out=torch.empty_like(out))
            assert (out - expected).norm() <= 1e-5 * expected.norm(), (chosen, rows)


@pytest.mark.cuda
@needs_hopper
def test_misaligned_arguments_are_refused():
    weight, x = randn(256, 512, dtype=torch.bfloat16), randn(16, 520, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x begins at address"):
        batch_linear(x[:, 1:513], weight)
    with pytest.raises(ValueError, match="target begins at address"):
        batch_linear(x[:, :512], weight, out=torch.empty(16, 264, device="cuda")[:, 1:257])


def squares_of(residual: Tensor) -> Tensor:
    """Sums over 64 columns, [ceil(H / 64), T]."""
    padded = torch.nn.functional.pad(residual.double().square(), (0, -residual.shape[1] % 64))
    return padded.unflatten(1, (-1, 64)).sum(2).T


@pytest.mark.cuda
@needs_hopper
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (896, 4864), (4096, 14336), (8192, 8192), (584, 72)])
@pytest.mark.parametrize("rows", [9, 16, 31, 64, 128, 200, 256])
def test_a_product_defers_the_norm_behind_it(n, k, rows):
    if rows > 128 and n > 4096:
        pytest.skip("left to torch")
    dtype = torch.bfloat16
    weight, x = randn(n, k, dtype=dtype, scale=k**-0.5), randn(rows, k, dtype=dtype, seed=1)
    norm_weight, residual = randn(n, seed=2) + 1, randn(rows, n, seed=3, scale=3)
    expected = batch_linear(x, weight, residual=residual.clone())
    around = torch.full((-(-n // 64), rows + 3), torch.nan, device="cuda")
    deferred = DeferredNorm(full_of_nan(rows, n, dtype=dtype), around[:, :rows], 1e-6)
    batch_linear(x, weight, residual=residual, next_norm=norm_weight, next_deferred=deferred)
    assert torch.equal(residual, expected)
    assert torch.equal(deferred.x, (residual * norm_weight).to(dtype))
    torch.testing.assert_close(deferred.squares.double(), squares_of(residual), rtol=1e-5, atol=1e-5)
    assert around[:, rows:].isnan().all()


@pytest.mark.cuda
@needs_hopper
@pytest.mark.parametrize("rows", [9, 48, 128])
def test_deferred_norms_are_applied_behind_products(rows):
    hidden, inner, heads, kv_heads, dim, dtype = 1024, 3072, 16, 8, 128, torch.bfloat16
    residual, norm_weight = randn(rows, hidden, scale=20), randn(hidden, seed=1) + 1
    x = (residual * norm_weight).to(dtype)
    squares = torch.full((hidden // 64, 256), torch.nan, device="cuda")[:, :rows]
    squares.copy_(squares_of(residual))
    deferred = DeferredNorm(x, squares, 1e-6)
    scale = (residual.double().square().mean(1, keepdim=True) + 1e-6).rsqrt().float()
    weight, bias = randn(2 * inner, hidden, dtype=dtype, scale=hidden**-0.5), randn(2 * inner, dtype=dtype, seed=2)
    product = x.float() @ weight.float().T * scale
    y = batch_linear(x, weight[:inner], bias=bias[:inner], deferred=deferred, out=full_of_nan(rows, inner))
    torch.testing.assert_close(y, product[:, :inner] + bias[:inner], rtol=1e-4, atol=1e-4)
    gate, up = (product + bias).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    y = batch_linear(x, weight, bias=bias, gated=True, deferred=deferred, out=full_of_nan(rows, inner))
    assert (y - expected).norm() <= 1e-5 * expected.norm()

    gate_up = torch.mm(x, weight.t())
    once = cuda_ops.silu_and_mul(gate_up, full_of_nan(rows, inner, dtype=dtype), deferred)
    gate, up = (gate_up.float() * scale).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert (once.float() - expected).norm() <= 2**-8 * expected.norm()

    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=3, scale=9)
    rotated = []
    for given, scaled in ((qkv, None), ((qkv.float() * scale).to(dtype), True)):
        caches = [torch.zeros(32, kv_heads, 16, dim, dtype=dtype, device="cuda") for _ in range(2)]
        q = torch.empty(rows, heads, dim, dtype=dtype, device="cuda")
        cuda_ops.qk_norm_rope_write(
            given, None, None, 1e-6, torch.arange(rows, device="cuda"), randn(dim // 2, seed=4).abs(), 1.0, *caches,
            torch.arange(rows, device="cuda") + 5, q, None if scaled else deferred,
        )  # fmt: skip
        rotated.append([q.float(), *(cache.float() for cache in caches)])
    for ours, theirs in zip(*rotated, strict=True):
        assert (ours - theirs).norm() <= 2**-7 * theirs.norm()


@pytest.mark.cuda
@needs_hopper
@pytest.mark.parametrize("rows", [16, 48, 128, 192])
def test_a_chain_of_dependent_launches_is_right_and_repeatable_in_a_graph(rows):
    """Layers' products, norms and torch's products on shared buffers: each reads what the one before wrote."""
    hidden, inner, layers, dtype = 1024, 3072, 4, torch.bfloat16
    up = [randn(2 * inner, hidden, dtype=dtype, seed=i, scale=hidden**-0.5) for i in range(layers)]
    down = [randn(hidden, inner, dtype=dtype, seed=9 + i, scale=inner**-0.5) for i in range(layers)]
    norm_weight, first = randn(hidden, seed=30) + 1, randn(rows, hidden, seed=31)
    residual, act = torch.empty_like(first), torch.empty(rows, inner, dtype=dtype, device="cuda")
    x, gate_up = torch.empty(rows, hidden, dtype=dtype, device="cuda"), torch.empty(rows, 2 * inner, dtype=dtype).cuda()

    deferred = DeferredNorm(x, torch.empty(hidden // 64, rows, device="cuda"), 1e-6)

    def run(linear, defer: bool) -> Tensor:
        residual.copy_(first)
        pending = None
        for layer in range(layers):
            if pending is None:
                cuda_ops.add_rms_norm(None, residual, norm_weight, 1e-6, x)
            if layer % 2 or rows < 128:
                linear(x, up[layer], gated=True, out=act, deferred=pending)
            else:
                torch.mm(x, up[layer].t(), out=gate_up)
                cuda_ops.silu_and_mul(gate_up, act, pending)
            pending = deferred if defer else None
            linear(act, down[layer], residual=residual, next_norm=norm_weight if defer else None, next_deferred=pending)
        return residual

    expected = run(reference, False).clone()
    for defer in (False, True):
        once = run(batch_linear, defer).clone()
        assert (once - expected).norm() <= 0.01 * expected.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(batch_linear, defer)
        for _ in range(200):
            graph.replay()
            assert torch.equal(residual, once)
