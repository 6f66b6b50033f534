"""The raw kernel loop: a model stepped at full batch with no scheduler, no queue and no engine around it.

Every step's plan is made before the clock starts. Rows are filled from the list of requests as they become free, so
the batch is full until requests run out: what an engine can at best be, on this model and these lengths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minillm.bench.recording import RequestRecord, RunResult, StepLog
from minillm.bench.runs import Target
from minillm.bench.workloads import Workload
from minillm.core.block_manager import blocks_for
from minillm.core.errors import ConfigError
from minillm.core.plan import DecodeBatch, PrefillChunk, RowAssignment, StepPlan, TableUpdate
from minillm.core.sampling_params import SamplingParams
from minillm.core.stats import Counters

if TYPE_CHECKING:
    from minillm.runner.interface import ModelRunner


def list_schedule(lengths: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """(row, first step) of requests that take `lengths` steps each, in order, each on the row that is free first."""
    free = [(0, row) for row in range(rows)]
    places = []
    for length in lengths:
        start, row = heapq.heappop(free)
        places.append((row, start))
        heapq.heappush(free, (start + length, row))
    return places


def make_plans(workload: Workload, *, rows: int, block_size: int, num_blocks: int, vocab_size: int) -> list[StepPlan]:
    """The plans of all steps. Each row has blocks of its own, enough for the longest request; ConfigError if the pool
    does not have them."""
    width = blocks_for(workload.longest, block_size)
    if rows * width > num_blocks:
        raise ConfigError(f"the raw loop needs {rows} rows of {width} blocks; the pool has {num_blocks}")
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    places = list_schedule([request.max_tokens for request in workload.requests], rows)
    steps = max(start + request.max_tokens for (_, start), request in zip(places, workload.requests, strict=True))
    plans = [StepPlan(step, DecodeBatch(), []) for step in range(steps)]
    for index, ((row, start), request) in enumerate(zip(places, workload.requests, strict=True)):
        prompt = workload.token_ids(index, vocab_size)
        table = list(range(row * width, (row + 1) * width))
        name, first = f"w{index}", plans[start]
        first.assignments.append(RowAssignment(row, name, params, index, 0, prompt, []))
        first.table_updates.append(TableUpdate(row, 0, table))
        first.prefills.append(PrefillChunk(name, row, prompt, 0, len(prompt), table, (row,), 0, False))
        for output in range(1, request.max_tokens):
            position = len(prompt) + output - 1
            batch = plans[start + output].decodes
            batch.request_ids.append(name)
            batch.rows.append(row)
            batch.token_ids.append(-1)  # the runner has it
            batch.positions.append(position)
            batch.kv_slots.append(table[position // block_size] * block_size + position % block_size)
            batch.output_indices.append(output)
    return plans


def drive_raw(target: Target, workload: Workload) -> RunResult:
    """Run the workload on the target's runner alone; nothing may be live in its engine."""
    engine, config = target.engine, target.config
    if engine.has_work:
        raise ConfigError("the engine has work already: one run at a time")
    plans = make_plans(
        workload,
        rows=min(config.max_num_seqs, len(workload)),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        vocab_size=target.vocab_size,
    )
    log = StepLog()
    outputs: dict[str, list[tuple[float, int]]] = {f"w{index}": [] for index in range(len(workload))}
    begin = engine.clock()
    for plan in plans:
        tokens = _step(engine.runner, plan)
        now = engine.clock() - begin
        _log(log, plan, now)
        for request_id, ids in zip(plan.sampling_request_ids(), tokens, strict=True):
            outputs[request_id].append((now, ids[0]))
    records = []
    for index, request in enumerate(workload.requests):
        times = [time for time, _ in outputs[f"w{index}"]]
        record = RequestRecord(index, request.label, request.user, request.priority, 0.0)
        record.first_token, record.finish = times[0], times[-1]
        record.prompt_tokens, record.output_tokens, record.finish_reason = request.own_tokens, len(times), "length"
        records.append(record)
    counters = Counters(steps=len(plans), generated_tokens=workload.output_tokens)
    counters.prefilled_tokens = sum(log.prefill_tokens)
    seconds = log.time[-1] if log.time else math.nan
    made = [[token for _, token in one] for one in outputs.values()]
    return RunResult(records, log, counters, seconds, target.num_layers, target.bytes_per_block, made)


def _step(runner: ModelRunner, plan: StepPlan) -> list[list[int]]:
    handle = runner.forward(plan)
    runner.sample(handle)
    return runner.collect(handle).token_ids


def _log(log: StepLog, plan: StepPlan, now: float) -> None:
    """What the recorder would note of this step."""
    decodes = plan.decodes
    log.seconds.append(now - (log.time[-1] if log.time else 0.0))
    log.time.append(now)
    log.decode_rows.append(len(decodes))
    log.prefill_chunks.append(len(plan.prefills))
    log.prefill_tokens.append(sum(chunk.end for chunk in plan.prefills))
    log.context_tokens.append(sum(decodes.positions) + len(decodes))
    log.prefill_pairs.append(sum(chunk.end * (chunk.end + 1) // 2 for chunk in plan.prefills))
    for column in (log.swapped_out, log.swapped_in, log.waiting, log.swapped):
        column.append(0)
    log.running.append(len(decodes) + len(plan.prefills))
    log.blocks_used.append(sum(len(update.blocks) for update in plan.table_updates))
