"""The GPU's attention operations in plain PyTorch: they let the GPU's way through a runner be tested on any device."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from minillm.attention.cuda import CudaMetadata
from minillm.attention.cuda_prepare import HEADER_INTS, UPDATE_INTS, DecodeBuffers
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference


class ReferenceKernels:
    """`AttentionKernels` by the oracle. Checks what a kernel would take on trust."""

    def __init__(self) -> None:
        self.plans = 0
        self.calls: list[tuple[str, int]] = []
        self.prepared: list[int] = []
        self._meta: CudaMetadata | None = None

    def plan(self, meta: CudaMetadata) -> None:
        self._meta = meta
        self.plans += 1
        assert meta.context_lens.dtype == meta.query_start.dtype == meta.prefill_query_start.dtype == torch.int32
        assert meta.query_start.tolist()[meta.num_decodes :] == [
            start + meta.num_decodes for start in meta.prefill_query_start.tolist()
        ]
        assert meta.host_query_start.tolist() == meta.prefill_query_start.tolist()
        assert meta.host_context_lens.tolist() == meta.context_lens.tolist()[meta.num_decodes :]

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        block_size = k_cache.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                k_cache[slot // block_size, :, slot % block_size] = k[token]
                v_cache[slot // block_size, :, slot % block_size] = v[token]

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        assert self._meta is not None
        assert len(q) == self._meta.num_decodes
        lens = self._meta.context_lens[: len(q)].tolist()
        self._attend("decode", q, k_cache, v_cache, tables, [1] * len(q), lens, params, out)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        assert self._meta is not None
        queries = self._meta.prefill_query_start.diff().tolist()
        lens = self._meta.context_lens[self._meta.num_decodes :].tolist()
        self._attend("prefill", q, k_cache, v_cache, tables, queries, lens, params, out)

    def _attend(
        self,
        kind: str,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        queries: list[int],
        lens: list[int],
        params: LayerAttention,
        out: Tensor,
    ) -> None:
        self.calls.append((kind, len(queries)))
        assert tables.dtype == torch.int32
        assert out.shape == q.shape
        # Rows of padding have no context: a kernel gives zeros.
        assert all(lens[: len(q)]) or kind == "decode"
        used = [i for i, length in enumerate(lens) if length]
        if len(used) == len(lens):
            out.copy_(paged_attention_reference(q, k_cache, v_cache, tables.tolist(), queries, lens, params))
            return
        out.zero_()
        some = paged_attention_reference(
            q[used], k_cache, v_cache, tables[used].tolist(), [1] * len(used), [lens[i] for i in used], params
        )
        out[used] = some

    def prepare_decode(
        self, num_rows: int, buffers: DecodeBuffers, tables: Tensor, last_tokens: Tensor, block_size: int
    ) -> None:
        self.prepared.append(num_rows)
        step, stride = buffers.step.tolist(), buffers.capacity
        count, num_updates = step[:2]
        assert count <= num_rows <= stride
        rows, tokens, positions = (step[HEADER_INTS + i * stride :][:count] for i in range(3))
        updates = torch.tensor(step[HEADER_INTS + 3 * stride :][: UPDATE_INTS * num_updates]).view(-1, UPDATE_INTS)
        seen = set()
        for row, index, block in updates.tolist():
            assert row in rows and (row, index) not in seen  # the row's own thread block applies it; in any order
            seen.add((row, index))
            tables[row, index] = block
        for i in range(num_rows):
            if i >= count:
                buffers.input_ids[i] = buffers.positions[i] = buffers.context_lens[i] = buffers.rows[i] = 0
                buffers.slot_mapping[i] = -1
                continue
            row, last = rows[i], positions[i] // block_size
            buffers.tables[i, : last + 1] = tables[row, : last + 1]
            buffers.input_ids[i] = tokens[i] if tokens[i] >= 0 else last_tokens[row]
            buffers.positions[i] = positions[i]
            buffers.context_lens[i] = positions[i] + 1
            buffers.slot_mapping[i] = tables[row, last] * block_size + positions[i] % block_size
            buffers.rows[i] = row


class ReferenceOps:
    """`DecoderOps` in plain PyTorch. `few` is how many tokens the small products take, 0 for none."""

    def __init__(self, few: int = 0) -> None:
        self.few = few
        self.calls: Counter[str] = Counter()

    def embed(self, input_ids: Tensor, embedding: Tensor, residual: Tensor) -> Tensor:
        self.calls["embed"] += 1
        return residual.copy_(embedding[input_ids])

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        self.calls["add_rms_norm"] += 1
        if x is not None:
            residual.add_(x)
        return out.copy_(self._norm(residual, weight, eps))

    def qk_norm_rope_write(
        self,
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
    ) -> Tensor:
        self.calls["qk_norm_rope_write"] += 1
        tokens, num_heads, head_dim = q_out.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        angles = positions[:, None, None].float() * inv_freq
        cos, sin = (torch.cat((x, x), -1) * attention_factor for x in (angles.cos(), angles.sin()))
        rotated = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            wide = x.float() if weight is None else self._norm(x, weight, eps).to(qkv.dtype).float()
            low, high = wide.chunk(2, -1)
            rotated.append((wide * cos + torch.cat((-high, low), -1) * sin).to(qkv.dtype))
        q_out.copy_(rotated[0])
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                k_cache[slot // block_size, :, slot % block_size] = rotated[1][token]
                v_cache[slot // block_size, :, slot % block_size] = v[token]

        return q_out

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        self.calls["silu_and_mul"] += 1
        gate, up = gate_up.float().chunk(2, -1)
        return out.copy_(torch.nn.functional.silu(gate) * up)

    def small_linear(
        self,
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
        self.calls["small_linear"] += 1
        assert len(x) <= self.few
        target = residual if out is None else out
        assert target is not None and (out is None or residual is None)
        if norm_weight is not None:
            x = self._norm(x, norm_weight, eps).to(weight.dtype)
        product = torch.nn.functional.linear(x, weight, bias).float()
        if gated:
            gate, up = product.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        return target.copy_(product) if residual is None else target.add_(product)

    def supports_small_linear(
        self,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gated: bool = False,
        norm: bool = False,
    ) -> bool:
        return rows <= self.few

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
