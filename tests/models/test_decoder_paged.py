"""The decoder over the paged cache and its CPU attention: mixed batches of several sequences against Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_oracles import make_reference, prompt, reference_logits, save

from minillm.attention.cpu import PagedAttentionContext
from minillm.attention.metadata import AttentionMetadata, PrefillSpan
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.models.loader import load_model


def run_paged(decoder: Any, sequences: list[list[int]], prefill: list[int], block_size: int) -> list[torch.Tensor]:
    """Logits of every position: step k prefills ``prefill[k]`` tokens of sequence k and decodes all earlier ones."""
    config = decoder.config
    spec = KVCacheSpec(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=block_size
    )
    per_sequence = -(-max(map(len, sequences)) // block_size)
    cache = PagedKVCache(spec, per_sequence * len(sequences))
    # Interleaved block tables: neighbours in a sequence are far apart in the pool.
    tables = [[i * len(sequences) + k for i in range(per_sequence)] for k in range(len(sequences))]
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while any(count < len(ids) for count, ids in zip(done, sequences, strict=True)):
        decodes = [k for k, count in enumerate(done) if 0 < count < len(sequences[k])]
        parts = [(k, done[k], 1) for k in decodes]
        prefills = []
        if step < len(sequences):
            parts.append((step, 0, prefill[step]))
            prefills = [PrefillSpan(len(decodes), prefill[step], prefill[step], tables[step])]
        slots = [tables[k][p // block_size] * block_size + p % block_size for k, s, n in parts for p in range(s, s + n)]
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            decode_block_tables=torch.tensor([tables[k] for k in decodes]).view(len(decodes), per_sequence),
            decode_seq_lens=torch.tensor([done[k] + 1 for k in decodes], dtype=torch.int64),
            prefills=prefills,
        )
        ids = torch.tensor([token for k, s, n in parts for token in sequences[k][s : s + n]])
        positions = torch.tensor([p for _, s, n in parts for p in range(s, s + n)])
        with torch.inference_mode():
            context = PagedAttentionContext(cache, decoder.layer_attention, metadata)
            rows = decoder.compute_logits(decoder.forward(ids, positions, context))
        for (k, _, n), part in zip(parts, rows.split([n for _, _, n in parts]), strict=True):
            logits[k].append(part)
            done[k] += n
        step += 1
    return [torch.cat(part) for part in logits]


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("qwen2", {"hidden_size": 112, "num_attention_heads": 14}),
        ("qwen3", {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}),
        ("mistral", {"sliding_window": 9}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ],
    ids=["llama 9/3", "qwen2 14/2", "qwen3 16/8", "mistral window 9", "qwen3 windowed from layer 1"],
)
def test_mixed_paged_batches_equal_transformers(family: str, options: dict, block_size: int, tmp_path) -> None:
    reference = make_reference(family, **options)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    sequences = [prompt(length, seed=length) for length in (30, 23, 11)]
    for ours, ids in zip(run_paged(decoder, sequences, [17, 9, 3], block_size), sequences, strict=True):
        theirs = reference_logits(reference, ids)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
