"""Decode steps over persistent buffers: the host's message, padding, table changes, failures of a row.

On the CPU with reference kernels; marked tests compare the kernel and the graphs on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from step_loop import VOCAB, Loop, decoder_of, prompt, tiny_reference, wide_head_reference

from minillm.attention.cuda_prepare import HEADER_INTS, DecodeBuffers, pack_step, prepare_decode
from minillm.core.plan import DecodeBatch, StepPlan, TableUpdate
from minillm.models.cuda_decoder import why_not
from minillm.models.decoder import Decoder
from minillm.runner.cuda_graphs import StepGraphs
from minillm.runner.finite_rows import flag_not_finite
from minillm.runner.pytorch_model_runner import NOT_FINITE
from minillm.runner.short_prefill import SIZES, sizes_for
from reference_kernels import ReferenceKernels, ReferenceOps

cuda = pytest.mark.cuda


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=cuda)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def make(device: str, model: Any = None, **options: Any) -> Loop:
    runner_options = options.pop("runner_options", {})
    if device == "cpu":
        runner_options = {"kernels": ReferenceKernels(), "ops": ReferenceOps(few=4, some=8, rest=16), **runner_options}
    model = model if model is not None else decoder_of(tiny_reference(), device=device)
    return Loop(model, device=device, runner_options=runner_options, **options)


# ---- The message and the kernel --------------------------------------------------------------------------------------


def test_the_message_has_a_header_four_columns_and_the_updates():
    message = pack_step([5, 1, 3], [-1, 20, 30], [47, 0, 11], [6, 1, 2], [5, 2, 70, 1, 0, 9], 8)
    assert message.dtype == np.int32
    assert message[:HEADER_INTS].tolist() == [3, 2, 0, 0]
    columns = message[HEADER_INTS : HEADER_INTS + 32].reshape(4, 8)
    assert columns[:, :3].tolist() == [[5, 1, 3], [-1, 20, 30], [47, 0, 11], [6, 1, 2]]
    buffers = DecodeBuffers(8, 3, torch.device("cpu"))
    buffers.step[: len(message)] = torch.from_numpy(message)
    assert buffers.sent_rows[:3].tolist() == [5, 1, 3]
    assert buffers.output_indices[:3].tolist() == [6, 1, 2]
    assert message[HEADER_INTS + 32 :].tolist() == [5, 2, 70, 1, 0, 9]


def prepared(device: str, count: int, num_rows: int, seed: int = 0) -> tuple[DecodeBuffers, torch.Tensor]:
    """Buffers after a step of `count` random rows padded to `num_rows`, and the tables by row."""
    generator = torch.Generator().manual_seed(seed)
    max_seqs, width, block_size = 24, 40, 8
    tables = torch.randint(0, 1000, (max_seqs, width), generator=generator, dtype=torch.int32).to(device)
    last_tokens = torch.randint(0, 500, (max_seqs,), generator=generator).to(device)
    buffers = DecodeBuffers(32, width, torch.device(device))
    buffers.slot_mapping.fill_(77)  # of the step before
    buffers.context_lens.fill_(77)
    rows = torch.randperm(max_seqs, generator=generator)[:count].tolist()
    tokens = [-1 if i % 3 else 100 + i for i in range(count)]
    positions = torch.randint(0, width * block_size, (count,), generator=generator).tolist()
    updates = [[row, p // block_size, 2000 + row] for row, p in zip(rows[::2], positions[::2], strict=True)]
    updates += [[row, 0, 3000 + row] for row, p in zip(rows[::2], positions[::2], strict=True) if p >= block_size]
    flat = [number for update in updates for number in update]
    message = torch.from_numpy(pack_step(rows, tokens, positions, [1] * count, flat, buffers.capacity))
    buffers.step[: len(message)] = message.to(device)
    prepare = prepare_decode if device == "cuda" else ReferenceKernels().prepare_decode
    prepare(num_rows, buffers, tables, last_tokens, block_size)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        assert buffers.input_ids[i] == (tokens[i] if tokens[i] >= 0 else last_tokens[row])
        block = int(tables[row, position // block_size])
        assert block == 2000 + row or i % 2
        assert buffers.slot_mapping[i] == block * block_size + position % block_size
        used = position // block_size + 1
        assert torch.equal(buffers.tables[i, :used], tables[row, :used])
    assert buffers.rows[:count].tolist() == rows
    assert buffers.positions[:count].tolist() == positions
    assert buffers.context_lens[:count].tolist() == [position + 1 for position in positions]
    return buffers, tables


@pytest.mark.parametrize(("count", "num_rows"), [(1, 1), (3, 4), (17, 32), (24, 32)])
def test_the_device_makes_a_steps_columns_from_the_message(device, count, num_rows):
    buffers, _ = prepared(device, count, num_rows)
    assert buffers.slot_mapping[count:num_rows].tolist() == [-1] * (num_rows - count)
    assert buffers.context_lens[count:num_rows].tolist() == [0] * (num_rows - count)
    assert buffers.slot_mapping[num_rows:].tolist() == [77] * (32 - num_rows)  # not this step's


@cuda
def test_a_step_is_refused_that_the_buffers_do_not_hold():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    buffers = DecodeBuffers(4, 3, torch.device("cuda", 0))
    tables, tokens = torch.zeros(8, 3, dtype=torch.int32, device="cuda:0"), torch.zeros(8, device="cuda:0").long()
    for rows in (0, 5):
        with pytest.raises(ValueError, match=f"num_rows={rows} must be between 1 and 4"):
            prepare_decode(rows, buffers, tables, tokens, 8)
    with pytest.raises(ValueError, match="tables has shape"):
        prepare_decode(1, buffers, tables[:, :2].contiguous(), tokens, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_with_a_number_that_is_not_finite_are_flagged(device, dtype):
    rows = torch.full((6, 300), torch.finfo(dtype).max, dtype=dtype)
    rows[1, 299], rows[3, 0], rows[4, 100] = torch.nan, torch.inf, -torch.inf
    flags = torch.ones(6, dtype=torch.bool, device=device)
    assert flag_not_finite(rows.to(device), flags).tolist() == [False, True, False, True, True, False]
    assert flags.tolist() == [False, True, False, True, True, False]


# ---- Steps -----------------------------------------------------------------------------------------------------------


def test_decode_steps_are_padded_and_small_ones_take_the_small_products():
    loop = make("cpu")
    kernels, ops = loop.runner_options["kernels"], loop.runner_options["ops"]
    for i in range(5):
        loop.submit(f"{i}", prompt(4 + i, i), max_tokens=3 + 2 * i)
    loop.run()
    assert set(kernels.prepared) == {1, 2, 4, 8}
    assert kernels.prepared == sorted(kernels.prepared, reverse=True)
    assert ops.calls["small_linear"] and ops.calls["silu_and_mul"]


def test_table_changes_of_rows_that_are_not_in_the_step_are_applied_too():
    loop = make("cpu")
    runner = loop.runner
    forward = runner.cuda_forward
    runner.builder.update_tables([TableUpdate(3, 0, [5, 6]), TableUpdate(1, 1, [7])])
    batch = forward.prepare(StepPlan(0, DecodeBatch(["a"], [3], [4], [9], [49], [1]), []))
    forward._decode_rows(1)
    tables = forward._attention._tables
    assert tables[3, :2].tolist() == [5, 6]
    assert tables[1, :2].tolist() == [0, 7]
    assert forward.buffers.step[1] == 0
    assert forward.buffers.slot_mapping[0] == batch.slots[0] == 6 * 8 + 1
    runner.builder.update_tables([TableUpdate(3, 1, [2])])
    forward.prepare(StepPlan(1, DecodeBatch(["a"], [3], [4], [10], [18], [2]), []))
    assert forward.buffers.step[1] == 1  # travels with the step


def test_a_row_that_is_not_finite_fails_alone_in_a_decode_step(device):
    """B33 for the fused pass: NaN comes in by a token's embedding, as a faulty checkpoint's would."""
    bad = 130
    model = decoder_of(tiny_reference(), device=device)
    prompts = [[t % 129 for t in prompt(n, n)] for n in (20, 9, 26)]
    biases = [{bad: 100.0} if i == 1 else {bad: -100.0} for i in range(3)]
    wanted = {}
    for spoil in (False, True):
        if spoil:
            model.embedding[bad] = torch.nan
        loop = make(device, model, overlap=spoil)
        for i, ids in enumerate(prompts):
            loop.submit(f"{i}", ids, max_tokens=10, logit_bias=biases[i])
        tokens = loop.run()
        if not spoil:
            wanted = tokens
    assert (tokens["0"], tokens["2"]) == (wanted["0"], wanted["2"])
    assert loop.finished["1"] == ("error", NOT_FINITE)
    assert tokens["1"] == [bad]
    assert loop.cache.store.isfinite().all()
    loop.submit("next", prompts[1], max_tokens=6, logit_bias={bad: -100.0})
    fresh = make(device, model)
    fresh.submit("next", prompts[1], max_tokens=6, logit_bias={bad: -100.0})
    assert loop.run()["next"] == fresh.run()["next"]


def test_bfloat16_logits_are_not_rounded_before_the_choice(device):
    loop = make(device, decoder_of(tiny_reference(), torch.bfloat16, device))
    forward = loop.runner.cuda_forward
    hidden = torch.randn(9, loop.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(device, torch.bfloat16)
    logits = forward.compute_logits(hidden)
    assert logits.dtype == torch.float32
    exact = hidden.double() @ loop.model.head.weight.double().T
    assert torch.allclose(logits.double(), exact, atol=0.05 if device == "cpu" else 1e-3)


def test_models_that_cannot_be_fused_say_why():
    assert why_not(object(), torch.float32) == "object is no Decoder"
    decoder = decoder_of(tiny_reference())
    assert why_not(decoder, torch.float32) is None
    assert why_not(decoder, torch.bfloat16) == "the KV cache is in torch.bfloat16, the model in torch.float32"
    odd = decoder_of(tiny_reference(), torch.bfloat16)
    odd.config = type("Config", (), {"hidden_size": 72, "intermediate_size": 100, "head_dim": 8})()
    assert why_not(odd, torch.bfloat16) == "intermediate_size=100 is no multiple of 8"
    odd.layers[0].down = lambda x: x
    assert why_not(odd, torch.bfloat16) == "its weights are packed"
    assert isinstance(decoder, Decoder)


# ---- Short prefills --------------------------------------------------------------------------------------------------


class CountingGraphs(StepGraphs):
    """Notes the sizes that run, and how often all graphs were dropped."""

    def __init__(self, graphs: StepGraphs) -> None:
        super().__init__(graphs.sizes, None)
        self.ran: list[int] = []
        self.dropped = 0

    def run(self, size, step):
        self.ran.append(size)
        super().run(size, step)

    def forget(self):
        self.dropped += 1
        super().forget()


def test_short_prefills_are_padded_and_give_the_tokens_of_long_ones():
    results = []
    for budget, layout in ((400, "fixed"), (400, None), (40, "fixed")):
        loop = make("cpu", num_blocks=200, options={"max_num_batched_tokens": budget})
        loop.runner_options["kernels"].layout = layout
        short = loop.runner.cuda_forward.short_prefill
        short.graphs = CountingGraphs(short.graphs)
        for i, length in enumerate((5, 33, 60, 90)):
            loop.submit(f"{i}", prompt(length, i), max_tokens=4)
        results.append(loop.run())
        loop.submit("4", prompt(150, 4), max_tokens=4)
        results[-1].update(loop.run())
        if layout is None:  # launches that no graph can hold
            assert short.graphs.ran == []
        elif budget == 400:
            assert short.graphs.ran == [192, 192]
            assert short.graphs.dropped == 1  # there was none to drop yet
        else:  # the steps between have decode rows beside the chunks
            assert short.graphs.ran[0] == 64
    assert results[0] == results[1] == results[2]


def test_graphs_of_short_prefills_are_dropped_when_the_lists_that_they_read_move():
    loop = make("cpu", num_blocks=200)
    short = loop.runner.cuda_forward.short_prefill
    short.graphs = CountingGraphs(short.graphs)
    for i, layout in enumerate((1, 1, 2, 2, 1)):
        loop.runner_options["kernels"].layout = layout
        loop.submit(f"{i}", prompt(20, i), max_tokens=1)
        loop.run()
    assert short.graphs.ran == [32] * 5
    assert short.graphs.dropped == 3


def test_a_larger_model_has_fewer_sizes_of_short_prefills():
    class Shape:
        def __init__(self, hidden: int) -> None:
            linear = type("Linear", (), {"in_features": hidden, "out_features": 4 * hidden})()
            layer = dict.fromkeys(("qkv", "output", "gate_up", "down"), linear)
            self.model = type("Model", (), {"layers": [type("Layer", (), layer)()]})()

    small, large, huge = (sizes_for(Shape(hidden)) for hidden in (512, 4096, 1 << 16))
    assert small == list(SIZES)
    assert large == [size for size in SIZES if size <= 128]
    assert huge == [16]


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def all_tokens(loop: Loop, passes: int = 2, tag: str = "", **params: Any) -> list[dict[str, list[int]]]:
    """Tokens of several passes over the same prompts, staggered so that every number of rows comes up."""
    results = []
    for pass_ in range(passes):
        for i in range(11):
            ids = prompt(3 + 5 * i, i)
            loop.submit(f"{tag}{pass_} {i}", ids, max_tokens=6 + 3 * i, seed=i, **params)
        results.append({name.split()[-1]: ids for name, ids in loop.run().items() if name.startswith(f"{tag}{pass_} ")})
    return results


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reference", [tiny_reference, wide_head_reference])
def test_graphs_give_the_tokens_of_launches(dtype, reference):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(reference(), dtype, "cuda")
    # In bfloat16 a prompt whose most is cached rounds otherwise: its products are those of few tokens.
    options = {"enable_prefix_caching": dtype == torch.float32}
    wanted = None
    for eager in (True, False):
        runner_options = {"enforce_eager": eager}
        loop = make("cuda", model, num_blocks=200, overlap=True, options=options, runner_options=runner_options)
        results = all_tokens(loop) + all_tokens(loop, tag="drawn ", temperature=0.8, top_p=0.9)
        assert loop.runner.cuda_forward.graphs.captured == ([] if eager else [1, 2, 4, 8, 16])
        assert results[0] == results[1]
        assert results[2] == results[3] != results[0]
        wanted = wanted or results
        assert results == wanted


@cuda
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_short_prefills_in_graphs_give_the_tokens_of_launches(head_dim):
    """Several chunks of a step, cached prefixes in front of them, and lengths that change from replay to replay."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(wide_head_reference(head_dim), torch.bfloat16, "cuda")
    tokens = []
    for eager in (True, False):
        loop = make("cuda", model, num_blocks=400, block_size=16, runner_options={"enforce_eager": eager})
        for round_ in range(4):
            for i in range(1 + round_):
                shared = prompt(48, 9) if round_ % 2 else []
                loop.submit(f"{round_} {i}", shared + prompt(30 + 11 * i + 7 * round_, i), max_tokens=3)
            loop.run()
        captured = loop.runner.cuda_forward.short_prefill.graphs.captured
        assert bool(captured) != eager
        tokens.append(dict(loop.tokens))
    assert tokens[0] == tokens[1]


@cuda
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_graphs_under_memory_pressure_give_the_same_tokens(mode):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(tiny_reference(), device="cuda")
    wanted = all_tokens(make("cuda", model, num_blocks=200), passes=1)[0]
    options = {"preemption_mode": mode, "enable_prefix_caching": False, "watermark_blocks": 0}
    loop = make("cuda", model, num_blocks=24, num_swap_blocks=200, overlap=True, options=options)
    assert all_tokens(loop) == [wanted, wanted]
    counters = loop.scheduler.counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    assert len(loop.runner.cuda_forward.graphs.captured) > 2


@cuda
def test_warming_up_captures_all_sizes_and_changes_no_token():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(tiny_reference(), device="cuda")
    warm, cold = make("cuda", model), make("cuda", model)
    warm.runner.warm_up()
    assert warm.runner.cuda_forward.graphs.captured == [1, 2, 4, 8, 16]
    assert not warm.cache.store[:, :, 0].any()
    assert all_tokens(warm, passes=1) == all_tokens(cold, passes=1)


@cuda
def test_capturing_while_another_thread_uses_the_device():
    import threading

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = threading.Event()

    def other() -> None:
        while not done.is_set():
            torch.ones(VOCAB, device="cuda").sum().item()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        loop = make("cuda")
        results = all_tokens(loop)
    finally:
        done.set()
        thread.join()
    assert results[0] == results[1]
    assert loop.runner.cuda_forward.graphs.captured == [1, 2, 4, 8, 16]
