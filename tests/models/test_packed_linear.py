"""Packed CPU products against the dequantised weight, and the choice of form."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from model_oracles import make_reference, prompt, reference_logits, run, save

from minillm.models import linear
from minillm.models.gguf import dequantize
from minillm.models.linear import (
    INT4_MAX_ROWS,
    INT4_MAX_ROWS_BESIDE_FLOAT32,
    INT8_MAX_ROWS,
    INT8_MAX_ROWS_BESIDE_FLOAT32,
    CodesLinear,
    DenseLinear,
    OneDnnLinear,
    RowSwitchLinear,
    cpu_packs_bfloat16,
    pack,
)
from minillm.models.loader import load_model

needs_bfloat16 = pytest.mark.skipif(not cpu_packs_bfloat16(), reason="this CPU has no bfloat16 instructions")


def blocks(qtype: str, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight in GGUF blocks: (uint8 [rows, bytes], its exact float32 [rows, columns])."""
    weight = np.random.default_rng(seed).normal(0, 0.05, (rows, columns)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[qtype]))
    return raw, dequantize(raw, qtype).view(rows, columns)


def round_scales(weight: torch.Tensor, raw: torch.Tensor, qtype: str) -> torch.Tensor:
    """The weight with scale and zero rounded to bfloat16, from the block layout alone (no code of the package)."""
    view = raw.numpy().reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[qtype])
    scale = view[:, :2].copy().view(np.float16).astype(np.float32)
    rounded = torch.from_numpy(scale).bfloat16().float().numpy()
    if qtype == "Q8_0":
        return torch.from_numpy(view[:, 2:].copy().view(np.int8) * rounded).view_as(weight)
    codes = np.concatenate((view[:, -16:] & 15, view[:, -16:] >> 4), axis=1).astype(np.float32) - 8
    zero = np.zeros_like(scale)
    if qtype == "Q4_1":
        zero = view[:, 2:4].copy().view(np.float16).astype(np.float32) + 8 * scale
    zero = torch.from_numpy(zero).bfloat16().float().numpy()
    return torch.from_numpy(codes * rounded + zero).view_as(weight)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (16, 32), (80, 576)])
@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_are_multiplied_exactly(qtype: str, outputs: int, inputs: int, rows: int) -> None:
    """Against float64 with the same rounded scales: only the sum's float32 and the result's bfloat16 rounding stay."""
    raw, weight = blocks(qtype, outputs, inputs)
    quantized = CodesLinear.from_blocks([(qtype, raw)])
    assert quantized is not None
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
    found = quantized(x)
    assert found.dtype == torch.bfloat16
    expected = x.double() @ round_scales(weight, raw, qtype).double().T
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0"])
def test_rounded_scales_cost_no_more_than_bfloat16_weights(qtype: str) -> None:
    raw, weight = blocks(qtype, 256, 512)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ weight.double().T
    bfloat16 = (x.float() @ weight.bfloat16().float().T).bfloat16()
    quantized = CodesLinear.from_blocks([(qtype, raw)])
    assert quantized is not None

    def error(product: torch.Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    assert error(quantized(x)) < 2 * error(bfloat16) < 0.01


def test_stacked_parts_equal_their_own_products() -> None:
    """q, k and v of one layer may have different 4-bit types; their rows are stacked."""
    parts = [
        ("Q4_1", *blocks("Q4_1", 48, 64, 1)),
        ("Q4_0", *blocks("Q4_0", 16, 64, 2)),
        ("Q4_1", *blocks("Q4_1", 16, 64, 3)),
    ]
    stacked = CodesLinear.from_blocks([(kind, raw) for kind, raw, _ in parts])
    assert stacked is not None
    x = torch.randn(3, 64).bfloat16()
    singles = [CodesLinear.from_blocks([(kind, raw)]) for kind, raw, _ in parts]
    expected = torch.cat([single(x) for single in singles if single is not None], -1)
    assert torch.equal(stacked(x), expected)


def test_a_weight_of_more_rows_than_are_packed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, _ = blocks("Q4_1", 224, 64)
    whole = CodesLinear.from_blocks([("Q4_1", raw)])
    monkeypatch.setattr(linear, "_ROWS_AT_ONCE", 64)
    pieces = CodesLinear.from_blocks([("Q4_1", raw)])
    assert whole is not None
    assert pieces is not None
    assert torch.equal(whole.codes, pieces.codes)


@pytest.mark.parametrize(
    "parts",
    [
        [("Q4_1", 24, 64)],  # rows are no multiple of 16
        [("Q6_K", 16, 256)],
        [("Q4_1", 16, 64), ("Q8_0", 16, 64)],
        [("F16", 16, 64)],
    ],
)
def test_what_does_not_fit_stays_unpacked(parts: list[tuple[str, int, int]]) -> None:
    sizes = {"Q4_1": (32, 20), "Q8_0": (32, 34), "Q6_K": (256, 210), "F16": (1, 2)}
    raws = [
        (kind, torch.zeros(rows, columns // sizes[kind][0] * sizes[kind][1], dtype=torch.uint8))
        for kind, rows, columns in parts
    ]
    assert CodesLinear.from_blocks(raws) is None


FORMS = [
    pytest.param(torch.bfloat16, "Q4_1", INT4_MAX_ROWS, marks=needs_bfloat16),
    pytest.param(torch.bfloat16, "Q8_0", INT8_MAX_ROWS, marks=needs_bfloat16),
    pytest.param(torch.bfloat16, None, 0, marks=needs_bfloat16),
    (torch.float32, "Q4_0", INT4_MAX_ROWS_BESIDE_FLOAT32),
    (torch.float32, "Q8_0", INT8_MAX_ROWS_BESIDE_FLOAT32),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "qtype", "limit"), FORMS)
def test_both_forms_at_and_around_the_limit(dtype: torch.dtype, qtype: str | None, limit: int, bias: bool) -> None:
    raw, weight = blocks(qtype or "Q4_1", 96, 64)
    offset = torch.randn(96).to(dtype) if bias else None
    dense = DenseLinear(weight.to(dtype), offset)
    packed = pack(dense, [(qtype, raw)] if qtype else [])
    assert isinstance(packed, RowSwitchLinear if qtype else OneDnnLinear)
    assert (packed.in_features, packed.out_features) == (64, 96)
    for rows in {1, max(limit, 1), limit + 1, 64, 200}:
        x = torch.randn(rows, 64).to(dtype)
        expected = x.double() @ weight.double().T
        if offset is not None:
            expected = expected + offset.double()
        found = packed(x)
        assert (found.shape, found.dtype) == ((rows, 96), dtype)
        torch.testing.assert_close(found.double(), expected, atol=0.01, rtol=0.02)
        if rows > limit:
            exact = torch.nn.functional.linear(x, dense.weight, offset)
            torch.testing.assert_close(found, exact, atol=0.002, rtol=0.008 if dtype == torch.bfloat16 else 1e-6)


def test_codes_are_used_up_to_the_limit_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, weight = blocks("Q4_1", 96, 64)
    packed = pack(DenseLinear(weight), [("Q4_1", raw)])
    assert isinstance(packed, RowSwitchLinear)
    calls: list[str] = []
    monkeypatch.setattr(packed, "codes", lambda x: calls.append("codes") or torch.zeros(len(x), 96))
    monkeypatch.setattr(packed, "many", lambda x: calls.append("many") or torch.zeros(len(x), 96))
    packed(torch.zeros(INT4_MAX_ROWS_BESIDE_FLOAT32, 64))
    packed(torch.zeros(INT4_MAX_ROWS_BESIDE_FLOAT32 + 1, 64))
    assert calls == ["codes", "many"]


@needs_bfloat16
def test_auto_keeps_the_codes_of_a_quantised_file_and_stays_near_float32(tmp_path) -> None:
    reference = make_reference("llama", hidden_size=288, num_attention_heads=9, num_key_value_heads=3)
    path = write_gguf(reference, tmp_path / "model.gguf", "Q4_1")
    exact, auto = load_model(path, dtype="float32"), load_model(path, dtype="auto")
    assert (exact.dtype, exact.packed) == ("float32", False)
    assert (auto.dtype, auto.packed) == ("bfloat16", True)
    assert isinstance(auto.decoder.layers[0].qkv, RowSwitchLinear)
    ids = prompt(40)
    whole = run(exact.decoder, ids)
    for chunks in (None, [1] * 40, [4] * 10):
        difference = run(auto.decoder, ids, chunks) - whole
        assert difference.norm() < 0.03 * whole.norm()


@needs_bfloat16
def test_explicit_bfloat16_uses_no_codes(tmp_path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf", "Q4_1")
    model = load_model(path, dtype="bfloat16")
    assert model.packed
    assert isinstance(model.decoder.layers[0].qkv, OneDnnLinear)


@needs_bfloat16
def test_auto_of_safetensors_is_packed_bfloat16(tmp_path) -> None:
    reference = make_reference("qwen2")
    model = load_model(save(reference, tmp_path), dtype="auto")
    assert (model.dtype, model.packed) == ("bfloat16", True)
    ids = prompt(30)
    theirs = reference_logits(reference, ids)
    assert (run(model.decoder, ids) - theirs).norm() < 0.03 * theirs.norm()


def without_bfloat16(monkeypatch: pytest.MonkeyPatch, codes: bool) -> None:
    monkeypatch.setattr("minillm.models.loader.cpu_packs_bfloat16", lambda: False)
    monkeypatch.setattr("minillm.models.loader.cpu_multiplies_codes", lambda: codes)


def test_auto_without_bfloat16_instructions_keeps_codes_beside_float32(tmp_path, monkeypatch) -> None:
    without_bfloat16(monkeypatch, codes=True)
    reference = make_reference("llama", hidden_size=288, num_attention_heads=9, num_key_value_heads=3)
    path = write_gguf(reference, tmp_path / "model.gguf", "Q4_1")
    exact, auto = load_model(path, dtype="float32"), load_model(path, dtype="auto")
    assert (auto.dtype, auto.packed) == ("float32", True)
    assert not exact.packed
    ids = prompt(40)
    whole = run(exact.decoder, ids)
    torch.testing.assert_close(run(auto.decoder, ids), whole, atol=1e-5, rtol=1e-5)  # 40 rows: float32 itself
    difference = run(auto.decoder, ids, [1] * 40) - whole
    assert 0 < difference.norm() < 0.03 * whole.norm()


def test_auto_without_either_is_plain_float32(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bfloat16(monkeypatch, codes=False)
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf", "Q4_1")
    model = load_model(path, dtype="auto")
    assert (model.dtype, model.packed) == ("float32", False)


def test_explicit_float32_never_uses_codes(tmp_path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf", "Q4_1")
    model = load_model(path, dtype="float32")
    assert not model.packed
    assert isinstance(model.decoder.layers[0].qkv, DenseLinear)


@needs_bfloat16
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_packed_and_the_embedding_stays(tied: bool, tmp_path) -> None:
    path = write_gguf(
        make_reference("llama", tie_word_embeddings=tied, vocab_size=144), tmp_path / "model.gguf", "Q8_0"
    )
    decoder = load_model(path, dtype="auto").decoder
    exact = load_model(path, dtype="float32").decoder
    torch.testing.assert_close(decoder.embedding.float(), exact.embedding, atol=0, rtol=2**-8)
    hidden = torch.randn(1, 64).bfloat16()
    torch.testing.assert_close(
        decoder.compute_logits(hidden), exact.compute_logits(hidden.float()), atol=0.02, rtol=0.02
    )
    assert decoder.head.codes.inputs_twice


@needs_bfloat16
@pytest.mark.parametrize("qtype", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("vocab", [128, 131, 203])
def test_a_vocabulary_that_is_no_multiple_of_a_tile(vocab: int, qtype: str, tmp_path) -> None:
    """Logits are exactly vocab_size wide in every form; ids behind the tokenizer's are the sampler's to mask."""
    path = write_gguf(make_reference("llama", vocab_size=vocab), tmp_path / "model.gguf", qtype)
    exact = load_model(path, dtype="float32").decoder
    for dtype in ("auto", "bfloat16"):
        decoder = load_model(path, dtype=dtype).decoder
        for rows in (0, 1, 5, 17):
            hidden = torch.randn(rows, 64).bfloat16()
            logits = decoder.compute_logits(hidden)
            assert logits.shape == (rows, vocab)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, exact.compute_logits(hidden.float()), atol=0.05, rtol=0.02)
