"""Decode steps over persistent buffers: the host's message, padding, table changes, failures of a row.

On the CPU with reference kernels; marked tests compare the kernel and the graphs on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_emulation import EmulatedKernels, library
from step_loop import VOCAB, Loop, decoder_of, prompt, tiny_reference, wide_head_reference

from minillm.attention.cuda_prepare import HEADER_INTS, DecodeBuffers, pack_step, prepare_decode
from minillm.core.plan import DecodeBatch, PrefillChunk, StepPlan, TableUpdate
from minillm.models.cuda_decoder import why_not
from minillm.models.decoder import Decoder
from minillm.runner.cuda_graphs import StepGraphs
from minillm.runner.finite_rows import flag_not_finite
from minillm.runner.pytorch_model_runner import NOT_FINITE
from minillm.runner.sampler import Sampler
from minillm.runner.short_steps import SIZES, ShortSteps, sizes_for
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


# ---- Short prefills, alone and beside decode rows --------------------------------------------------------------------


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


def counted(loop: Loop) -> ShortSteps:
    short = loop.runner.cuda_forward.short
    short.prefills, short.mixed = CountingGraphs(short.prefills), CountingGraphs(short.mixed)
    return short


def test_short_prefills_are_padded_and_give_the_tokens_of_long_ones():
    results = []
    for budget, layout in ((400, "fixed"), (400, None), (40, "fixed")):
        loop = make("cpu", num_blocks=200, options={"max_num_batched_tokens": budget})
        loop.runner_options["kernels"].layout = layout
        short = counted(loop)
        for i, length in enumerate((5, 33, 60, 90)):
            loop.submit(f"{i}", prompt(length, i), max_tokens=4)
        results.append(loop.run())
        loop.submit("4", prompt(150, 4), max_tokens=4)
        results[-1].update(loop.run())
        if layout is None:  # launches that no graph can hold
            assert short.prefills.ran == short.mixed.ran == []
        elif budget == 400:
            assert short.prefills.ran == [192, 192]
            assert short.mixed.ran == []
            assert short.prefills.dropped == 1  # there was none to drop yet
        else:  # most of the steps between have decode rows beside the chunks
            assert short.prefills.ran[0] == 64
            assert len(short.mixed.ran) > 3
    assert results[0] == results[1] == results[2]


def test_graphs_are_dropped_when_the_lists_that_they_read_move():
    loop = make("cpu", num_blocks=200)
    short = counted(loop)
    for i, layout in enumerate((1, 1, 2, 2, 1)):
        loop.runner_options["kernels"].layout = layout
        loop.submit(f"{i}", prompt(20, i), max_tokens=1)
        loop.run()
    assert short.prefills.ran == [32] * 5
    assert short.prefills.dropped == short.mixed.dropped == 3


def test_without_attention_that_a_graph_can_hold_no_step_is_padded():
    kernels = ReferenceKernels()
    kernels.layout = None  # from the start, as with the simple kernel
    loop = make("cpu", runner_options={"kernels": kernels})
    kernels.layout = "fixed"
    chunk = PrefillChunk("a", 0, [1, 2, 3], 0, 3, [5], (0,), 0, False)
    assert loop.runner.cuda_forward.prepare(StepPlan(0, DecodeBatch(), [chunk])).padded is None


def mixed_plan(decodes: int = 3) -> StepPlan:
    """Rows 0 .. decodes - 1 decode at positions 10, 11, ...; rows 10 and 11 bring chunks of 4 and 9 tokens."""
    rows = list(range(decodes))
    positions = [10 + row for row in rows]
    slots = [8 * (20 + 2 * row + position // 8) + position % 8 for row, position in enumerate(positions)]
    columns = DecodeBatch([f"{row}" for row in rows], rows, [-1] * decodes, positions, slots, [1] * decodes)
    first = PrefillChunk("first", 10, [7, 8, 9, 10], 6, 10, [1, 2], (10,), 0, False)
    second = PrefillChunk("second", 11, list(range(40, 49)), 0, 9, [3, 4], (), 0, False)
    updates = [TableUpdate(row, 0, [20 + 2 * row, 21 + 2 * row]) for row in rows]
    updates += [TableUpdate(10, 0, [1, 2]), TableUpdate(11, 0, [3, 4])]
    return StepPlan(0, columns, [first, second], table_updates=updates)


def test_a_mixed_step_is_laid_out_as_both_kernels_read_it():
    loop = make("cpu")
    forward, builder = loop.runner.cuda_forward, loop.runner.builder
    plan = mixed_plan()
    builder.update_tables(plan.table_updates)
    batch = forward.prepare(plan)
    meta, (ids, positions) = batch.metadata, batch.padded
    assert batch.num_tokens == 16
    assert len(ids) == len(positions) == len(meta.slot_mapping) == 16
    builder.update_tables(plan.table_updates)
    shorter = plan.prefills[1]._replace(token_ids=[40, 41], end=2)
    batch = forward.prepare(StepPlan(1, plan.decodes, [plan.prefills[0], shorter]))
    meta, (ids, positions) = batch.metadata, batch.padded
    assert (batch.num_tokens, len(ids)) == (9, 16)
    assert ids.tolist() == [0, 0, 0, 7, 8, 9, 10, 40, 41] + [0] * 7  # placeholders are looked up on the device
    assert positions.tolist() == [10, 11, 12, 6, 7, 8, 9, 0, 1] + [0] * 7
    assert meta.slot_mapping.tolist() == [170, 187, 204, 14, 15, 16, 17, 24, 25] + [-1] * 7
    assert batch.slots.tolist() == meta.slot_mapping.tolist()[:9]
    assert meta.rows.tolist() == [0, 1, 2, 10, 11] + [0] * 11
    assert (meta.num_decodes, meta.first_prefill) == (16, 0)
    assert meta.decode_lens.tolist() == [11, 12, 13] + [-1] * 13
    assert meta.prefill_lens.tolist()[3:5] == [10, 2]
    assert meta.prefill_query_start.tolist() == [3, 3, 3, 3, 7] + [9] * 12
    assert batch.logit_tokens.tolist() == [0, 1, 2, 6]
    assert batch.sampling_rows == [0, 1, 2, 10]
    assert [tensor.tolist() for tensor in batch.placeholders] == [[0, 1, 2], [0, 1, 2]]


def test_steps_padded_alike_are_read_from_the_same_places():
    """Whatever else travels with them: a graph holds addresses."""
    loop = make("cpu")
    forward = loop.runner.cuda_forward
    places = []
    for decodes in (1, 2, 3):
        for end in (2, 9 - decodes):
            plan = mixed_plan(decodes)
            chunks = [plan.prefills[0], plan.prefills[1]._replace(token_ids=[1] * end, end=end)]
            batch = forward.prepare(StepPlan(0, plan.decodes, chunks))
            meta = batch.metadata
            tensors = (*batch.padded, meta.slot_mapping, meta.rows, meta.decode_lens)
            places.append([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
    assert all(place == places[0] for place in places)


class Replays:
    """Captures in place of a GPU's: a graph runs again what was captured, with the sizes and tensors of that step.

    Of the step that it is replayed for it knows nothing but what is in the memory that the captured step read.
    """

    def __init__(self, loop: Loop) -> None:
        self.kernels, self.attention = loop.runner_options["kernels"], loop.runner.cuda_forward._attention
        self.replayed = 0

    def __call__(self, work):
        kernels, attention = self.kernels, self.attention
        metas, tables = (kernels._meta, attention._meta), attention._step_tables

        def replay() -> None:
            now = kernels._meta, attention._meta, attention._step_tables
            (kernels._meta, attention._meta), attention._step_tables = metas, tables
            work()
            kernels._meta, attention._meta, attention._step_tables = now
            self.replayed += 1

        return type("Graph", (), {"replay": staticmethod(replay)})()


def busy(loop: Loop, rounds: int = 5, tag: str = "", **params: Any) -> dict[str, list[int]]:
    """Requests that arrive while others decode: short ones, long ones in chunks, some with a prefix that is cached."""
    for round_ in range(rounds):
        for i in range(4):
            shared = prompt(24, 9) if i % 2 else []
            ids = shared + prompt((3, 30, 11, 70)[i] + round_, 10 * round_ + i)
            loop.submit(f"{tag}{round_} {i}", ids, max_tokens=12 + 3 * i, seed=10 * round_ + i, **params)
        loop.run(max_steps=7, to_the_end=False)
    return loop.run()


def unpadded(loop: Loop) -> None:
    """Have the loop's steps with prefills launched as they come."""
    loop.runner.cuda_forward.short.enabled = False


BUSY = {"num_blocks": 200, "options": {"max_num_batched_tokens": 48}}
PRESSED = {
    "num_blocks": 26,
    "num_swap_blocks": 200,
    "options": {
        "max_num_batched_tokens": 48,
        "preemption_mode": "swap",
        "watermark_blocks": 0,
    },
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_k": 20}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("setting", [BUSY, PRESSED], ids=["busy", "swapping"])
def test_replayed_mixed_steps_give_the_tokens_of_steps_as_they_come(overlap, params, setting):
    plain = make("cpu", overlap=overlap, **setting)
    unpadded(plain)
    wanted = busy(plain, **params)
    loop = make("cpu", overlap=overlap, **setting)
    short, replays = loop.runner.cuda_forward.short, Replays(loop)
    short.prefills._capture = short.mixed._capture = replays
    assert busy(loop, **params) == wanted
    assert replays.replayed > 10
    assert len(short.mixed.captured) > 1
    if setting is PRESSED:
        assert loop.scheduler.counters.preemptions_swap > 0


@pytest.mark.parametrize("logprobs", [None, 1])
def test_rows_of_mixed_steps_are_drawn_by_kernels_from_what_travelled_with_the_step(logprobs, monkeypatch):
    """If all of them ask for a draw alone; a step with one that asks for more takes the general way."""
    if library() is None:
        pytest.skip("no compiler for the kernels' emulation")
    params = {"temperature": 0.9, "top_k": 20, "logprobs": logprobs}
    wanted = busy(make("cpu", **BUSY), **params)
    loop = make("cpu", overlap=True, **BUSY)
    runner = loop.runner
    runner.sampler = Sampler(16, VOCAB, "cpu", upload=runner._device.upload, make_kernels=EmulatedKernels)
    general, sample = [], runner.sampler.sample
    monkeypatch.setattr(runner.sampler, "sample", lambda *args: general.append(args) or sample(*args))
    short = counted(loop)
    assert busy(loop, **params) == wanted
    assert len(short.mixed.ran) > 5
    assert len(runner.sampler.kernels.launches) > 20
    assert bool(general) == bool(logprobs)


def test_a_row_that_is_not_finite_fails_alone_in_a_mixed_step(device):
    """A chunk whose prompt has a token with a spoilt embedding, beside rows that decode; the rows go on."""
    bad = 130
    model = decoder_of(tiny_reference(), device=device)
    prompts = [[t % 129 for t in prompt(n, n)] for n in (20, 9, 26)]
    wanted = {}
    for spoil in (False, True):
        if spoil:
            model.embedding[bad] = torch.nan
        loop = make(device, model, overlap=True)
        for i, ids in enumerate(prompts):
            loop.submit(f"{i}", ids, max_tokens=20, logit_bias={bad: -100.0})
        loop.run(max_steps=4, to_the_end=False)
        if spoil:
            loop.submit("bad", [1, 2, bad, 4, 5], max_tokens=5)
        tokens = loop.run()
        wanted = wanted or tokens
    assert {name: tokens[name] for name in "012"} == wanted
    assert loop.finished["bad"] == ("error", NOT_FINITE)
    assert loop.cache.store.isfinite().all()


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
        captured = loop.runner.cuda_forward.short.prefills.captured
        assert bool(captured) != eager
        tokens.append(dict(loop.tokens))
    assert tokens[0] == tokens[1]


@cuda
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("setting", [BUSY, PRESSED], ids=["busy", "swapping"])
def test_mixed_steps_in_graphs_give_the_tokens_of_launches(head_dim, setting):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(wide_head_reference(head_dim), torch.bfloat16, "cuda")
    tokens = []
    for eager in (True, False):
        loop = make("cuda", model, overlap=True, runner_options={"enforce_eager": eager}, **setting)
        tokens.append(busy(loop) | busy(loop, tag="drawn ", temperature=0.8, top_p=0.9))
        short = loop.runner.cuda_forward.short
        assert short.mixed.captured == [] if eager else len(short.mixed.captured) > 1
        assert setting is BUSY or loop.scheduler.counters.preemptions_swap > 0
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
