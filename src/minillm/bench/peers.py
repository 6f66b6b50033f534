"""`minillm bench paged-attention --peers`: the CUDA kernels against FlashInfer and torch, in one run per table.

Each shape is one step of a model of several layers, enough of them that their K and V exceed the L2 cache three times.
Every contender's step is captured in a CUDA graph; the graphs are replayed in interleaved rounds
(:func:`minillm.bench.timing.time_graphs`). A contender whose result is outside the error bound, or that cannot be made
(a missing package, a kernel that does not compile), gets a row that says so instead of a time. For our own kernels a
wrong result ends the run. What is done once per step (``plan``) is not in the times; it has its own column.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from minillm.bench import common
from minillm.bench.attention_batch import AttentionBatch, AttentionShape, Error, WrongResultError, gate, worst
from minillm.bench.attention_paths import AttentionPath, direct_path
from minillm.bench.common import Verdict, geometric_mean
from minillm.bench.peer_paths import Contender, decode_contenders, prefill_contenders
from minillm.bench.timing import Ceilings, ReplayTime, StepGraph, measure_ceilings, step_layers, time_graphs

Progress = Callable[[str], None]

OURS = "minillm"
PLAN_REPEATS = 20


@dataclass(frozen=True, slots=True)
class PeerShape:
    """`batch` sequences with `query_len` queries at the end of `context_len` tokens each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    query_len: int
    context_len: int

    @property
    def heads(self) -> str:
        """'32/8, 128'."""
        return f"{self.num_heads}/{self.num_kv_heads}, {self.head_dim}"

    @property
    def name(self) -> str:
        """What the sequences are, as in '64 x 4,096' (decode) or '4 x 512 on 8,192'."""
        if self.query_len == 1:
            return f"{self.batch} x {self.context_len:,}"
        fresh = self.query_len == self.context_len
        return f"{self.batch} x {self.query_len:,}" + ("" if fresh else f" on {self.context_len:,}")


def _shapes(heads: tuple[int, int, int], sequences: Sequence[tuple[int, int, int]]) -> list[PeerShape]:
    return [PeerShape(*heads, *sequence) for sequence in sequences]


DECODE_SHAPES = (
    *_shapes(
        (32, 8, 128),
        [
            (1, 1, 1024),
            (1, 1, 4096),
            (1, 1, 32768),
            (8, 1, 4096),
            (64, 1, 1024),
            (64, 1, 4096),
            (256, 1, 1024),
            (256, 1, 2048),
        ],
    ),
    *_shapes(
        (14, 2, 64),
        [(1, 1, 1024), (1, 1, 32768), (64, 1, 1024), (64, 1, 4096), (256, 1, 1024), (256, 1, 2048)],
    ),
    *_shapes((16, 8, 128), [(1, 1, 1024), (1, 1, 32768), (64, 1, 4096), (256, 1, 2048)]),
)
PREFILL_SHAPES = tuple(
    shape
    for heads in ((32, 8, 128), (14, 2, 64))
    for shape in _shapes(heads, [(1, 8192, 8192), (8, 1024, 1024), (4, 512, 8192), (1, 2048, 32768)])
)
TABLES = {"decode": DECODE_SHAPES, "prefill": PREFILL_SHAPES}

DECODE_GEOMEAN, DECODE_WORST, PREFILL_GEOMEAN = 1.2, 1 / 1.05, 0.75
"""What the project asks of these tables: best peer's time over ours, in geometric mean and at the worst shape."""
DECODE_RATES = {
    PeerShape(32, 8, 128, 64, 1, 4096): 4000.0,
    PeerShape(32, 8, 128, 256, 1, 2048): 4000.0,
    PeerShape(14, 2, 64, 256, 1, 2048): 3500.0,
}
"""GB/s of K and V that the decode kernel must reach."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender at one shape."""

    contender: Contender
    error: Error | None
    time: ReplayTime | None
    plan_us: float
    status: str


def measure(
    table: str,
    rounds: int,
    progress: Progress,
    *,
    shapes: Sequence[PeerShape] | None = None,
    ours: bool = True,
) -> Iterator[list[dict[str, str]]]:
    """Rows of the CSV file of `table` ('decode' or 'prefill'), shape by shape, one per contender.

    With `ours=False` the peers are timed alone.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device)
    progress(f"copy {ceilings.copy_gbps:,.0f} GB/s, bf16 product {ceilings.matmul_tflops:,.0f} TFLOP/s")
    packages = ("torch", "flashinfer-python", "apache-tvm-ffi")
    where = common.environment(torch.cuda.get_device_name(device), packages)
    for shape in TABLES[table] if shapes is None else shapes:
        start = time.perf_counter()
        layers, entries = measure_shape(shape, rounds, device, ours=ours)
        torch.cuda.empty_cache()
        best = min((e.time.median_us for e in entries if e.time and e.contender.family != OURS), default=math.nan)
        own = next((e for e in entries if e.contender.family == OURS), None)
        mine = own.time.median_us if own and own.time else math.nan
        progress(
            f"{table} {shape.heads} {shape.name}: {mine:.1f} us, best peer {best:.1f} us, {best / mine:.2f} times "
            f"({time.perf_counter() - start:.0f} s)"
        )
        yield [{**_row(table, shape, layers, entry, ceilings), **where} for entry in entries]


def measure_shape(shape: PeerShape, rounds: int, device: torch.device, *, ours: bool = True) -> tuple[int, list[Entry]]:
    """Time all contenders at one shape; also the number of layers of the step."""
    attention = AttentionShape(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    queries, contexts = [shape.query_len] * shape.batch, [shape.context_len] * shape.batch
    token_bytes = attention.num_heads * attention.head_dim * attention.dtype.itemsize
    layer_bytes = attention.kv_bytes(contexts) + sum(queries) * token_bytes
    layers = step_layers(layer_bytes, device)
    batch = AttentionBatch(attention, queries, contexts, device=device, layers=layers)
    peers = decode_contenders(batch) if shape.query_len == 1 else prefill_contenders(batch)
    contenders = [*([Contender(OURS, "direct", lambda: direct_path(batch))] if ours else []), *peers]
    graphs: dict[str, StepGraph] = {}
    made: list[tuple[Contender, Error | None, float, str]] = []
    for contender in contenders:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend does not take a shape
                path = contender.make()
                path.run(0)
            error = worst([_check(contender, path, batch, layer) for layer in (0, layers - 1)])
            # Before the capture: planning again may replace buffers that a captured graph would go on reading.
            plan_us = _plan_us(path)
            graphs[_key(contender)] = StepGraph([_bind(path, layer) for layer in range(layers)])
            made.append((contender, error, plan_us, "ok"))
        except WrongResultError:
            if contender.family == OURS:
                raise
            made.append((contender, None, math.nan, "wrong result"))
        except Exception as error:
            if contender.family == OURS:
                raise
            made.append((contender, None, math.nan, _reason(error)))
    times = time_graphs(graphs, rounds)
    return layers, [Entry(c, error, times.get(_key(c)), plan, status) for c, error, plan, status in made]


def _reason(error: Exception) -> str:
    """The error's first line without the places in generated sources that peers name."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r"( in function '.*?')? at /\S+", "", text)[:200]


def _key(contender: Contender) -> str:
    return f"{contender.family} {contender.variant}"


def _bind(path: AttentionPath, layer: int) -> Callable[[], object]:
    return lambda: path.run(layer)


def _check(contender: Contender, path: AttentionPath, batch: AttentionBatch, layer: int) -> Error:
    return gate(_key(contender), path.run(layer), batch.reference(layer), batch.shape.dtype)


def _plan_us(path: AttentionPath) -> float:
    """Microseconds of one plan by the synchronised wall clock."""
    path.plan()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(PLAN_REPEATS):
        path.plan()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / PLAN_REPEATS


def _row(table: str, shape: PeerShape, layers: int, entry: Entry, ceilings: Ceilings) -> dict[str, str]:
    attention = AttentionShape(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    queries, contexts = [shape.query_len] * shape.batch, [shape.context_len] * shape.batch
    kv_bytes, flops = attention.kv_bytes(contexts), attention.flops(queries, contexts)
    timed = entry.time
    figures = {
        "rounds": str(timed.rounds) if timed else "",
        "median_us": f"{timed.median_us:.3f}" if timed else "",
        "min_us": f"{timed.min_us:.3f}" if timed else "",
        "max_us": f"{timed.max_us:.3f}" if timed else "",
        "wall_us": f"{timed.wall_us:.3f}" if timed else "",
        "gbps": f"{kv_bytes / timed.median_us / 1e3:.1f}" if timed else "",
        "tflops": f"{flops / timed.median_us / 1e6:.1f}" if timed else "",
        "plan_us": f"{entry.plan_us:.2f}" if timed else "",
        "relative_error": f"{entry.error.relative:.2e}" if entry.error else "",
    }
    return {
        "table": table,
        "family": entry.contender.family,
        "variant": entry.contender.variant,
        **attention.columns(),
        "batch": str(shape.batch),
        "query_len": str(shape.query_len),
        "context_len": str(shape.context_len),
        "layers": str(layers),
        **figures,
        "status": entry.status,
        "copy_gbps": f"{ceilings.copy_gbps:.0f}",
        "matmul_tflops": f"{ceilings.matmul_tflops:.0f}",
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape of a saved table: the best row of each family."""

    shape: PeerShape
    best: Mapping[str, Mapping[str, str]]

    def us(self, family: str) -> float:
        """Median microseconds of the family's best variant; NaN if it has none."""
        return float(self.best[family]["median_us"]) if family in self.best else math.nan

    @property
    def ratio(self) -> float:
        """The best peer's time over ours: above 1 is faster than every peer."""
        return min((self.us(family) for family in self.best if family != OURS), default=math.nan) / self.us(OURS)


def comparisons(rows: Sequence[Mapping[str, str]]) -> Iterator[Comparison]:
    """The shapes of a saved table, in its order."""
    by_shape: dict[PeerShape, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        names = ("num_heads", "num_kv_heads", "head_dim", "batch", "query_len", "context_len")
        best = by_shape.setdefault(PeerShape(*(int(row[name]) for name in names)), {})
        if not row["median_us"]:
            continue
        family = row["family"]
        if family not in best or float(row["median_us"]) < float(best[family]["median_us"]):
            best[family] = row
    return (Comparison(shape, best) for shape, best in by_shape.items())


def family_means(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Geometric mean of each peer family's best time over ours, at the shapes that both have."""
    items = [item for item in comparisons(rows) if OURS in item.best]
    families = sorted({family for item in items for family in item.best if family != OURS})
    return {
        family: geometric_mean([item.us(family) / item.us(OURS) for item in items if family in item.best])
        for family in families
    }


def verdicts(table: str, rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """What the project asks of a table, judged on its rows."""
    shapes = [item for item in comparisons(rows) if OURS in item.best and len(item.best) > 1]
    if not shapes:
        return []
    ratios = [item.ratio for item in shapes]
    mean, least = geometric_mean(ratios), min(shapes, key=lambda item: item.ratio)
    if table == "prefill":
        text = f"best peer's time over ours, geometric mean, at least {PREFILL_GEOMEAN}"
        return [Verdict(text, f"{mean:.3f}", mean >= PREFILL_GEOMEAN)]
    found = [
        Verdict(
            f"best peer's time over ours, geometric mean, at least {DECODE_GEOMEAN}",
            f"{mean:.3f}",
            mean >= DECODE_GEOMEAN,
        ),
        Verdict(
            "the same at the worst shape, at least 1 / 1.05 = 0.952",
            f"{least.ratio:.3f} ({least.shape.heads}: {least.shape.name})",
            least.ratio >= DECODE_WORST,
        ),
    ]
    for item in shapes:
        if item.shape in DECODE_RATES:
            rate, need = float(item.best[OURS]["gbps"]), DECODE_RATES[item.shape]
            name = f"{item.shape.heads}: {item.shape.name}, at least {need:,.0f} GB/s"
            found.append(Verdict(name, f"{rate:,.0f} GB/s", rate >= need))
    return found


def table_cells(table: str, rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of a saved table: times in microseconds with the rate of each family's best variant."""
    families = [family for family in (OURS, "flashinfer", "torch") if any(row["family"] == family for row in rows)]
    unit, column = ("GB/s", "gbps") if table == "decode" else ("TFLOP/s", "tflops")
    heads = ["q/kv heads, d", "sequences"]
    for family in families:
        heads += [f"{family}, us", unit] if family == OURS else [f"{family}, us"]
    heads += ["best peer's variant", "best peer / ours", "our error"]
    cells = []
    for item in comparisons(rows):
        line = [item.shape.heads, item.shape.name]
        for family in families:
            line.append(_number(item.us(family)))
            if family == OURS:
                line.append(f"{float(item.best[OURS][column]):,.0f}" if OURS in item.best else "-")
        peers = [row for family, row in item.best.items() if family != OURS]
        best = min(peers, key=lambda row: float(row["median_us"]), default=None)
        line.append(f"{best['family']} {best['variant']}" if best else "-")
        line.append("-" if math.isnan(item.ratio) else f"{item.ratio:.2f}")
        line.append(item.best[OURS]["relative_error"] if OURS in item.best else "-")
        cells.append(line)
    return heads, cells


def _number(us: float) -> str:
    return "-" if math.isnan(us) else f"{us:,.1f}"


def provenance(rows: Sequence[Mapping[str, str]]) -> str:
    """Where the rows are from: device, versions, commit, date and the ceilings measured in the same run."""
    row = rows[0]
    return (
        f"{row['device']}, torch {row['torch']}, FlashInfer {row['flashinfer-python']}, commit {row['commit']}, "
        f"{row['date']}; in the same run a device copy at {int(row['copy_gbps']):,} GB/s and a bf16 product of 8192 "
        f"cubed at {row['matmul_tflops']} TFLOP/s; {row['dtype']}, block size {row['block_size']}"
    )
