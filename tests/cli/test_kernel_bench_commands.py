"""`bench materialize`, `bench paged-attention` and `bench swap` as commands, on the CPU and from saved files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.bench import common, materialize
from minillm.bench.attention_paths import CPUPath
from minillm.bench.timing import PathTime, PathTimer
from peer_rows import decode_rows


def test_paged_attention_measures_writes_draws_and_draws_again(cli, tmp_path: Path) -> None:
    path = tmp_path / "paged.csv"
    command = ["bench", "paged-attention", "--device", "cpu", "--iterations", "3", "--output", str(path)]
    done = cli(*command, "--length", "20", "--length", "64", "--dtype", "float32")
    assert done.code == 0, done.err
    rows = common.read_csv(path)
    assert [row["context_len"] for row in rows] == ["20", "64"]
    for row in rows:
        for name in ("token_loop", "token_loop_copy", "gather", "gather_copy", "contiguous", "direct"):
            time = PathTime.from_columns(name, row)
            assert time and time.iterations == 3 and 0 < time.min_ms <= time.median_ms <= time.max_ms
        assert row["simple_median_ms"] == "" and row["direct_path"] == "cpu"
        ratio = float(row["token_loop_median_ms"]) / float(row["direct_median_ms"])
        assert float(row["speedup_over_token_loop"]) == pytest.approx(ratio, rel=0.01)
        assert 0 < float(row["max_relative_error"]) < 1e-5
        assert float(row["direct_gbps"]) > 0 and row["dtype"] == "float32" and row["torch"] == torch.__version__
    assert "met" not in done.out.lower()  # the requirements are those of a GPU
    picture = path.with_suffix(".png")
    assert picture.stat().st_size > 10_000
    picture.unlink()
    again = cli("bench", "paged-attention", "--from-csv", str(path))
    assert again.code == 0 and again.out == done.out and picture.exists()


def test_a_wrong_path_is_not_timed_and_nothing_is_written(cli, tmp_path: Path, monkeypatch) -> None:
    right = CPUPath.run
    monkeypatch.setattr(CPUPath, "run", lambda self, layer: right(self, layer) * 1.01)
    monkeypatch.setattr(PathTimer, "time", lambda *args, **options: pytest.fail("a wrong path was timed"))
    path = tmp_path / "paged.csv"
    done = cli("bench", "paged-attention", "--device", "cpu", "--length", "32", "--output", str(path))
    assert done.code == 1 and not path.exists()
    assert done.errors == ["minillm: error: " + done.errors[0].removeprefix("minillm: error: ")]
    assert "cpu is wrong and was not timed" in done.errors[0]


def test_materialize_measures_writes_and_draws(cli, tmp_path: Path) -> None:
    path = tmp_path / "materialize.csv"
    command = ["bench", "materialize", "--device", "cpu", "--layers", "2", "--iterations", "3", "--output", str(path)]
    done = cli(*command, "--length", "16", "--length", "100")
    assert done.code == 0, done.err
    rows = common.read_csv(path)
    assert [row["context_len"] for row in rows] == ["16", "100"]
    for row in rows:
        for name in materialize.PATHS:
            time = PathTime.from_columns(name, row)
            layers = 2 if name == "all_layers" else 1
            moved = 2 * 2 * 2 * 64 * 2 * int(row["context_len"]) * layers
            assert time and float(row[f"{name}_gbps"]) == pytest.approx(moved / time.median_ms / 1e6, rel=0.01)
    assert "Cost by least squares" in done.out and path.with_suffix(".png").stat().st_size > 10_000
    assert cli("bench", "materialize", "--from-csv", str(path)).out == done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paged-attention", "--device", "tpu"], "device='tpu' must be auto, cpu, cuda or cuda:N"),
        (["paged-attention", "--dtype", "int8"], "dtype='int8' must be one of float32, float16, bfloat16"),
        (["paged-attention", "--heads", "3", "--kv-heads", "2"], "heads=3 must be a multiple of kv_heads=2"),
        (["paged-attention", "--peers", "both"], "peers='both' must be one of decode, prefill"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(cli, arguments: list[str], message: str) -> None:
    done = cli("bench", *arguments)
    assert done.code == 2 and len(done.errors) == 1 and message in done.errors[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("arguments", [["materialize", "--device", "cuda"], ["paged-attention", "--peers", "decode"]])
def test_a_gpu_program_without_one_is_one_line(cli, arguments: list[str]) -> None:
    done = cli("bench", *arguments)
    assert done.code == 2 and "device='cuda' cannot be used" in done.errors[0] and len(done.errors) == 1


def test_peer_tables_are_printed_and_drawn_from_a_file(cli, tmp_path: Path) -> None:
    path = tmp_path / "decode_peers.csv"
    common.write_csv(path, decode_rows(0.8))
    done = cli("bench", "paged-attention", "--peers", "decode", "--from-csv", str(path))
    assert done.code == 0, done.err
    assert done.out.count("flashinfer quick") == 18 and "1.25" in done.out and "NOT MET" not in done.out
    assert "copy at 4,300 GB/s" in done.out
    assert path.with_suffix(".png").stat().st_size > 10_000
