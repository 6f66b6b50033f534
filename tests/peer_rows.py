"""Made-up rows of the peers' tables."""

from __future__ import annotations

from minillm.bench import peers
from minillm.bench.attention_batch import AttentionShape

WHERE = {"device": "a gpu", "torch": "2", "flashinfer-python": "0", "commit": "abc", "date": "2030-01-01"}


def peer_row(
    shape: peers.PeerShape, family: str, variant: str, us: float | None, table: str = "decode"
) -> dict[str, str]:
    attention = AttentionShape(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    timed = us is not None
    return {
        "table": table,
        "family": family,
        "variant": variant,
        **attention.columns(),
        "batch": str(shape.batch),
        "query_len": str(shape.query_len),
        "context_len": str(shape.context_len),
        "median_us": f"{us:.3f}" if us is not None else "",
        "gbps": f"{attention.kv_bytes([shape.context_len] * shape.batch) / us / 1e3:.1f}" if us is not None else "",
        "tflops": "1.0" if timed else "",
        "relative_error": "1e-3" if timed else "",
        "status": "ok" if timed else "ImportError: no such module",
        "copy_gbps": "4300",
        "matmul_tflops": "700",
        **WHERE,
    }


def decode_rows(ours_over_best: float) -> list[dict[str, str]]:
    rows = []
    for shape in peers.DECODE_SHAPES:
        attention = AttentionShape(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        best = attention.kv_bytes([shape.context_len] * shape.batch) / 4_000_000 + 5  # us
        rows += [
            peer_row(shape, "minillm", "direct", best * ours_over_best),
            peer_row(shape, "flashinfer", "slow", best * 3),
            peer_row(shape, "flashinfer", "quick", best),
            peer_row(shape, "torch", "cudnn", None),
        ]
    return rows
