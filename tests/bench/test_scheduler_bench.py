"""The scheduler benchmark measures what it says, in small."""

from __future__ import annotations

from itertools import islice

import pytest

from minillm.bench import common, scheduler_bench


def test_measures_every_count_and_keeps_what_the_table_needs(tmp_path):
    rows = scheduler_bench.run(running=(1, 4), steps=30, progress=lambda text: None)
    path = tmp_path / "results" / "scheduler.csv"
    common.write_csv(path, rows)
    costs = [scheduler_bench.SchedulerCost.from_row(row) for row in common.read_csv(path)]
    assert [cost.running for cost in costs] == [1, 4]
    for cost in costs:
        assert cost.steps == 30
        assert 0 < cost.median_us <= cost.p99_us
        assert cost.tokens_per_step >= cost.running * 0.9
    columns, cells = scheduler_bench.table_cells(common.read_csv(path))
    assert columns[0] == "running" and [line[0] for line in cells] == ["1", "4"]
    assert all(len(line) == len(columns) for line in cells)


@pytest.mark.parametrize("running", [1, 8])
def test_the_load_keeps_its_number_of_requests_and_turns_the_cache_over(running):
    load = scheduler_bench._Load(running, seed=1)
    for _ in range(running):
        load.join()
    stream = scheduler_bench._steps(load)
    for _, _, _, plan in islice(stream, 1500):
        assert plan.num_tokens <= load.scheduler.config.max_num_batched_tokens
    live = load.scheduler.live_requests
    assert len(live) == running
    assert load.joins > running, "requests leave and are replaced"
    counters = load.scheduler.prefix_cache.counters
    assert counters.published > 0 and counters.evictions > 0
