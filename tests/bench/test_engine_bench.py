"""The benchmark of the engine's thread, the tokenizer of random models, and the table for a GPU, in small."""

from __future__ import annotations

import random

import pytest

from minillm.bench import common, engine_bench, gpu_table
from minillm.bench.models import random_model
from minillm.bench.program import get_program
from minillm.bench.random_tokenizer import SPECIAL_TOKENS, random_tokenizer


@pytest.mark.parametrize("vocab_size", [128, 512, 3000])
def test_every_id_of_a_random_model_has_a_text_and_texts_survive_the_way_there_and_back(vocab_size: int) -> None:
    tokenizer = random_tokenizer(vocab_size)
    assert tokenizer.vocab_size == vocab_size
    assert all(tokenizer.has_token(token_id) and tokenizer.token_bytes(token_id) for token_id in range(vocab_size))
    assert tokenizer.decode(tokenizer.encode("of the words")) == "of the words"
    assert tokenizer.eos_token_ids == {2} and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token == SPECIAL_TOKENS[2]


def test_the_pieces_are_as_long_as_those_of_a_real_vocabulary() -> None:
    tokenizer = random_tokenizer(20_000)
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(3, 20_000)]
    assert 4.5 < sum(map(len, pieces)) / len(pieces) < 7.5
    assert 0.2 < sum(not piece.isascii() for piece in pieces) / len(pieces) < 0.5
    assert len(set(pieces)) == len(pieces)
    text = tokenizer.decode(random.Random(0).choices(range(3, 20_000), k=500))
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2, "merges are used"


def test_the_engine_benchmark_measures_every_part_for_every_reader(tmp_path) -> None:
    rows = engine_bench.run(
        running=(3,), steps=30, step_seconds=1e-3, tokenizer=random_tokenizer(3000), progress=lambda text: None
    )
    assert [row["reader"] for row in rows] == list(engine_bench.READERS)
    for row in rows:
        assert 2.5 < row["mean_rows"] <= 3
        assert 0 < row["cpu_us"] <= row["cpu_p99_us"]
        assert all(row[f"{part}_us"] > 0 for part in engine_bench.PARTS)
        assert row["wall_us"] >= 900 and 0 <= row["idle_share"] < 1
    path = tmp_path / "engine.csv"
    common.write_csv(path, rows)
    program, saved = get_program("engine"), common.read_csv(path)
    assert len(program.tables(saved)) == 3 and len(program.figures(saved)) == 3
    assert program.draw(saved, path)[0].is_file()


def test_the_gpu_table_counts_every_token_and_sets_each_figure_beside_its_floor(tmp_path) -> None:
    options = gpu_table.Options(models=("random:tiny",), device="cpu", sizes=gpu_table.SMALL, runs=1, repeats=1)
    rows = gpu_table.measure(options, lambda text: None)
    assert [row["figure"] for row in rows] == ["offline", "token", "decode 2", "decode 4", "first token", "prefill"]
    work = gpu_table._offline(options)
    assert rows[0]["tokens"] == work.output_tokens and rows[0]["characters"] > work.output_tokens
    for row in rows:
        better = row["floor"] / row["value"] if row["unit"] == "tok/s" else row["value"] / row["floor"]
        assert better > 0.5
        assert row["prefix_caching"] == 0
    path = tmp_path / "gpu_table.csv"
    common.write_csv(path, rows)
    program, saved = get_program("gpu-table"), common.read_csv(path)
    assert len(next(iter(program.tables(saved).values()))[1]) == 6
    assert program.verdicts(saved) == [], "the aims are for another card"
    assert program.draw(saved, path)[0].is_file()
    renamed = [{**row, "model": "random:qwen3-0.6b", "device": "NVIDIA H200"} for row in saved]
    verdicts = program.verdicts(renamed)
    assert len(verdicts) == 4 and not verdicts[0].met
    program.draw(renamed, path)


def test_a_request_that_ends_early_is_no_figure(monkeypatch) -> None:
    options = gpu_table.Options(models=("random:tiny",), device="cpu", sizes=gpu_table.SMALL, runs=1, repeats=1)
    drive = gpu_table.drive

    def short(target, workload, **more):
        result = drive(target, workload, **more)
        result.requests[-1].output_tokens -= 1
        return result

    monkeypatch.setattr(gpu_table, "drive", short)
    with pytest.raises(gpu_table.CountError, match="tokens"):
        gpu_table.measure(options, lambda text: None)


def test_the_shape_of_qwen2_5_is_its_own() -> None:
    from minillm.bench.models import model_shape

    shape = model_shape("qwen2.5-0.5b")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (14, 2, 64)
    small = random_model("qwen2.5-0.5b", num_layers=1, sliding_windows=(None,), vocab_size=64, intermediate_size=64)
    assert small.decoder.layers[0].qkv.bias is not None
