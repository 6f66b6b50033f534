"""The oracle against PyTorch's attention and against a loop over single positions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minillm.attention.interface import LayerAttention
from minillm.attention.reference import attention_reference, paged_attention_reference


def by_hand(q, k, v, params: LayerAttention):
    """One query, one head, one key at a time, in double precision."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        at = len(k) - len(q) + i
        begin = 0 if params.sliding_window is None else max(0, at - params.sliding_window + 1)
        for head in range(q.shape[1]):
            scores = []
            for j in range(begin, at + 1):
                s = float(q[i, head].double() @ k[j, head // group].double()) * params.scale
                scores.append(s if params.soft_cap is None else params.soft_cap * math.tanh(s / params.soft_cap))
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            for j, weight in zip(range(begin, at + 1), weights, strict=True):
                out[i, head] += weight / sum(weights) * v[j, head // group].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("query_len", "context_len"), [(1, 1), (1, 7), (4, 4), (5, 9)])
def test_equals_the_definition(window, soft_cap, query_len, context_len):
    torch.manual_seed(0)
    q = torch.randn(query_len, 6, 8)
    k, v = torch.randn(context_len, 2, 8), torch.randn(context_len, 2, 8)
    params = LayerAttention(0.4, window, soft_cap)
    assert torch.allclose(attention_reference(q, k, v, params).double(), by_hand(q, k, v, params), atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (14, 2), (16, 1)])
def test_equals_sdpa_on_whole_prompts(heads, kv_heads):
    torch.manual_seed(1)
    q, k, v = torch.randn(33, heads, 16), torch.randn(33, kv_heads, 16), torch.randn(33, kv_heads, 16)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.repeat_interleave(heads // kv_heads, 1).transpose(0, 1)[None],
        v.repeat_interleave(heads // kv_heads, 1).transpose(0, 1)[None],
        is_causal=True,
        scale=0.3,
    )[0].transpose(0, 1)
    assert torch.allclose(attention_reference(q, k, v, LayerAttention(0.3)), expected, atol=2e-6)


def test_paged_form_reads_through_the_tables():
    torch.manual_seed(2)
    block_size, lens, queries = 4, [5, 12, 3], [1, 4, 3]
    tables = [[7, 2, 99], [0, 5, 6], [3]]
    keys, values = torch.randn(8, 2, block_size, 8), torch.randn(8, 2, block_size, 8)
    q = torch.randn(sum(queries), 4, 8)
    params = LayerAttention(0.35, 6)
    out = paged_attention_reference(q, keys, values, tables, queries, lens, params)
    start = 0
    for table, length, query in zip(tables, lens, queries, strict=True):
        k = torch.stack([keys[table[p // block_size], :, p % block_size] for p in range(length)])
        v = torch.stack([values[table[p // block_size], :, p % block_size] for p in range(length)])
        expected = attention_reference(q[start : start + query], k, v, params)
        assert torch.allclose(out[start : start + query], expected, atol=1e-6)
        start += query


def test_half_precision_input_is_computed_in_float32():
    torch.manual_seed(3)
    q, k, v = (torch.randn(9, 2, 16).bfloat16() for _ in range(3))
    out = attention_reference(q, k, v, LayerAttention(0.25))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention_reference(q.float(), k.float(), v.float(), LayerAttention(0.25)).bfloat16())


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        attention_reference(torch.ones(1, 5, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8), LayerAttention(1.0))
    with pytest.raises(ValueError, match="exceeds"):
        attention_reference(torch.ones(3, 2, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 8), LayerAttention(1.0))
    cache = torch.ones(4, 2, 4, 8)
    with pytest.raises(ValueError, match="too short"):
        paged_attention_reference(torch.ones(1, 2, 8), cache, cache, [[0]], [1], [5], LayerAttention(1.0))
    with pytest.raises(ValueError, match="rows"):
        paged_attention_reference(torch.ones(2, 2, 8), cache, cache, [[0]], [1], [3], LayerAttention(1.0))
