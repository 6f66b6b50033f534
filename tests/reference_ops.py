"""The decoder's GPU operations in plain PyTorch, with the signatures of :mod:`minillm.models.cuda_ops`.

They are the oracle of the kernels, and let the GPU's way through a model be tested on any device. Where the product's
code has the operation (:mod:`minillm.models.layers`), that is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.models.deferred_norm import SQUARES_COLUMNS, DeferredNorm
from minillm.models.layers import RMSNorm

MAX_SMALL_ROWS = 8


def embed(input_ids: Tensor, embedding: Tensor, residual: Tensor) -> Tensor:
    known = (input_ids >= 0) & (input_ids < len(embedding))
    residual.copy_(embedding[input_ids.where(known, 0)])
    residual[~known] = torch.nan
    return residual


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    if x is not None:
        residual.add_(x)
    return out.copy_(_norm(weight, eps, out.dtype)(residual))


def silu_and_mul(gate_up: Tensor, out: Tensor, deferred: DeferredNorm | None = None) -> Tensor:
    gate, up = (gate_up.float() * _scale(deferred)).chunk(2, -1)
    return out.copy_(torch.nn.functional.silu(gate) * up)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_out: Tensor,
    deferred: DeferredNorm | None = None,
) -> Tensor:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    num_heads, dtype = q_out.shape[1], qkv.dtype
    if deferred is not None:
        qkv = (qkv.float() * _scale(deferred)).to(dtype)
    heads = qkv.reshape(len(qkv), -1, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        q, k = _norm(q_weight, eps, dtype)(q), _norm(k_weight, eps, dtype)(k)
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    cos, sin = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
    q, k = (torch.addcmul(part * cos, part.roll(head_dim // 2, -1), sin) for part in (q, k))
    stored = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots = slot_mapping[stored]
    k_cache[slots // block_size, :, slots % block_size] = k[stored].to(k_cache.dtype)
    v_cache[slots // block_size, :, slots % block_size] = v[stored].to(v_cache.dtype)
    return q_out.copy_(q)


def supports_small_linear(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, norm: bool = False
) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and 1 <= rows <= MAX_SMALL_ROWS and k % 8 == 0


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    if norm_weight is not None:
        x = _norm(norm_weight, eps, weight.dtype)(x)
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        return residual.add_(y)
    return y.to(weight.dtype) if out is None else out.copy_(y)


def batch_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    deferred: DeferredNorm | None = None,
    next_norm: Tensor | None = None,
    next_deferred: DeferredNorm | None = None,
) -> Tensor:
    y = x.float() @ weight.float().T * _scale(deferred)
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is None:
        return y.to(weight.dtype) if out is None else out.copy_(y)
    residual.add_(y)
    if next_norm is not None and next_deferred is not None:
        next_deferred.x.copy_(residual * next_norm)
        squares = torch.nn.functional.pad(residual.square(), (0, -residual.shape[1] % SQUARES_COLUMNS))
        next_deferred.squares.copy_(squares.unflatten(1, (-1, SQUARES_COLUMNS)).sum(2).T)
    return residual


def _scale(deferred: DeferredNorm | None) -> Tensor | float:
    if deferred is None:
        return 1.0
    return (deferred.squares.sum(0) / deferred.hidden + deferred.eps).rsqrt()[:, None]


def _norm(weight: Tensor, eps: float, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(len(weight), eps, dtype, weight.device)
    norm.weight = weight
    return norm
