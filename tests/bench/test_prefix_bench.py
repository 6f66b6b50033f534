"""`bench prefix`: the scheduler's hit ratio against an LRU count of its own, rows, tables, and a small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.bench import prefix, prefix_program
from minillm.bench.runs import drive, virtual_target
from minillm.bench.virtual import H200_8B
from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.errors import ConfigError

BLOCK = 512


def independent_lru(prompts: list[tuple[list[object], int]], capacity: int) -> float:
    """Share of full blocks found, counted by age stamps instead of a list: (hash ids, prompt tokens) in order."""
    age: dict[object, int] = {}
    clock = hits = looked_up = 0
    for ids, length in prompts:
        full = ids[: length // BLOCK]
        usable = full[: (length - 1) // BLOCK]
        looked_up += len(usable)
        run = next((i for i, key in enumerate(usable) if key not in age), len(usable))
        hits += run
        for key in reversed(full):
            clock += 1
            age[key] = clock
        if len(age) > capacity:
            for key in sorted(age, key=lambda key: age[key])[: len(age) - capacity]:
                del age[key]
    return hits / looked_up


def workload_of(prompts: list[tuple[list[object], int]], gap: float) -> Workload:
    requests = []
    for number, (ids, length) in enumerate(prompts):
        tail = length - BLOCK * (len(ids) - 1)
        segments = [Segment(f"h{key}", BLOCK) for key in ids[:-1]] + [Segment(f"h{ids[-1]}", tail)]
        requests.append(WorkloadRequest(arrival=number * gap, segments=tuple(segments), max_tokens=3))
    return Workload("made", tuple(requests))


def scheduler_hit_ratio(workload: Workload, blocks: int) -> float:
    with virtual_target(H200_8B, prefix._config(blocks, prefix.Options(), enabled=True)) as target:
        drive(target, workload)
        counters = target.engine.scheduler.prefix_cache.counters
    return counters.hits / (counters.hits + counters.misses)


def test_both_counts_by_hand() -> None:
    prompts: list[tuple[list[object], int]] = [
        (["a", "b", "c"], 1100),  # nothing is there: 2 looked up; c is not full
        (["a", "b", "d"], 1536),  # a, b found of 2 (the last block's last token must be computed)
        (["x", "y"], 1024),  # 1 looked up; x, y push out the oldest of a, b, d: d and b
        (["a", "b", "z"], 1030),  # a found, b not
    ]
    assert independent_lru(prompts, 3) == (0 + 2 + 0 + 1) / (2 + 2 + 1 + 2)
    keys = [[str(key) for key in ids[: length // BLOCK]] for ids, length in prompts]
    assert prefix.lru_hit_ratio(keys, [length for _, length in prompts], 3) == 3 / 7


def test_the_scheduler_equals_the_count_where_nothing_overlaps_and_nothing_is_evicted() -> None:
    made = prefix.conversations(6, seed=3)
    prompts = [([segment.key for segment in request.segments], request.own_tokens) for request in made.requests]
    workload = workload_of(prompts, gap=30.0)
    distinct = len({key for ids, _ in prompts for key in ids})
    expected = independent_lru([([f"h{key}" for key in ids], n) for ids, n in prompts], distinct)
    assert expected > 0.5
    assert scheduler_hit_ratio(workload, distinct + 8) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_scheduler_stays_near_the_count_under_eviction(share: float) -> None:
    made = prefix.conversations(60, rate=0.2, seed=1)
    prompts = [([s.key for s in request.segments], request.own_tokens) for request in made.requests]
    blocks = int(len({key for ids, _ in prompts for key in ids}) * share)
    expected = independent_lru(prompts, blocks)
    workload = made.limited(max_output=64).scaled(3.0)  # short outputs: steps cost the test its time
    assert scheduler_hit_ratio(workload, blocks) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("share", prefix.POOL_SHARES)
def test_on_the_mooncake_trace_the_hit_ratio_is_within_two_points_of_an_lru_count(
    shared_data: Path, share: float
) -> None:
    """The first 800 requests with outputs of at most 64 tokens; docs/sla-study.md has the whole trace."""
    path, rows = shared_data / "traces" / "mooncake_conversation.jsonl", 800
    with path.open() as file:
        raw = [json.loads(line) for line, _ in zip(file, range(rows), strict=False)]
    prompts = [(row["hash_ids"], row["input_length"]) for row in raw]
    blocks = int(len({key for ids, _ in prompts for key in ids}) * share)
    workload = prefix.make_workload(prefix.Options(trace=path, requests=rows)).limited(max_output=64).scaled(2.0)
    ratio = scheduler_hit_ratio(workload, blocks)
    assert ratio == pytest.approx(independent_lru(prompts, blocks), abs=0.02)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(prefix.measure(prefix.Options(requests=160), lambda text: None))


def test_rows_say_what_the_cache_saves(rows) -> None:
    off, *cached = rows
    assert (off["cache"], off["hit_ratio"], off["cached_tokens"]) == ("off", "0.00000", "0")
    assert [row["pool_share"] for row in cached] == ["0.1", "0.3", "1"]
    ratios = [float(row["hit_ratio"]) for row in cached]
    assert ratios == sorted(ratios) and ratios[-1] > 0.5
    assert float(cached[-1]["ttft_mean"]) < float(off["ttft_mean"])
    assert int(cached[-1]["cached_tokens"]) < int(off["prompt_tokens"])
    columns, cells = prefix_program.table_cells(rows)
    assert len(cells) == 4 and {len(line) for line in cells} == {len(columns)}
    near, faster = prefix_program.verdicts([off, cached[-1]])
    assert near.met and faster.met
    apart = dict(cached[-1], lru_hit_ratio=f"{float(cached[-1]['hit_ratio']) + 0.021:.5f}")
    assert not prefix_program.verdicts([off, apart])[0].met
    assert len(prefix_program.figures(rows)) == 6


def test_a_workload_that_is_not_made_of_blocks_is_refused() -> None:
    segments = (Segment("a", 100), Segment("b", BLOCK))
    workload = Workload("w", (WorkloadRequest(segments=segments, max_tokens=1),))
    with pytest.raises(ConfigError, match="512-token blocks"):
        prefix.full_blocks(workload)


def test_on_a_model_cached_prefixes_are_not_computed_again(tmp_path: Path) -> None:
    options = prefix.ModelOptions(model="random:tiny", prefixes=(64, 256), requests=6, repeats=2)
    rows = list(prefix.measure_model(options, lambda text: None))
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        # Two system prompts; whoever comes first computes them. 4 requests (at least) find all 64 or 256 tokens.
        cached = int(row["cached_tokens"])
        assert cached >= 4 * int(row["prefix"]) if row["cache"] == "on" else cached == 0
    columns, cells = prefix_program.model_table_cells(rows)
    assert [line[0] for line in cells] == ["64", "256"] and {len(line) for line in cells} == {len(columns)}
    assert len(prefix_program._model_verdicts(rows)) == 1
    pytest.importorskip("matplotlib")
    (path,) = prefix_program.MODEL_PROGRAM.draw(rows, tmp_path / "prefix_model.csv")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_plots_are_drawn(rows, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (path,) = prefix_program.PROGRAM.draw(rows, tmp_path / "prefix.csv")
    assert path.read_bytes()[:4] == b"\x89PNG"
