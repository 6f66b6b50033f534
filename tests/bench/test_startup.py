"""Start-up measured in a fresh process, and the folders that it is measured on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.bench import common, model_folder, startup
from minillm.bench.models import random_model
from minillm.bench.program import get_program
from minillm.models.loader import load_model
from minillm.models.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", ["tiny", "toy"])
def test_a_written_folder_is_the_random_model(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 100_000)
    folder = model_folder.write_model_folder(name, tmp_path / name, dtype="float32")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (name == "tiny"), "in shards, with an index"
    loaded, made = load_model(folder, "float32"), random_model(name, dtype="float32")
    views = loaded.decoder.weight_views()
    for weight, view in made.decoder.weight_views().items():
        assert torch.equal(views[weight], view), weight
    assert loaded.config.eos_token_ids == (2,)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == made.config.vocab_size
    assert tokenizer.eos_token_id == 2
    before = (folder / "config.json").stat().st_mtime_ns
    model_folder.write_model_folder(name, folder)
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_a_process_is_timed_from_its_start_to_its_first_token_in_phases(tmp_path: Path) -> None:
    folder = model_folder.write_model_folder("tiny", tmp_path / "tiny")
    rows = startup.measure(
        startup.Options(model=str(folder), device="cpu", runs=1, settings={"swap_space": 0.0, "max_model_len": 256}),
        lambda text: None,
    )
    (row,) = rows
    assert row["weights_bytes"] > 100_000 and row["dtype"] in ("float32", "bfloat16")
    phases = [row[startup._column(name)] for name in startup.PHASES]
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) == pytest.approx(row["seconds"], abs=0.01)
    assert row["imports_s"] > row["first_token_s"]
    path = tmp_path / "startup.csv"
    common.write_csv(path, rows)
    program, saved = get_program("startup"), common.read_csv(path)
    assert len(program.tables(saved)) == 1 and program.draw(saved, path)[0].is_file()


def test_a_process_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match="/nowhere/at/all"):
        startup.start_process({"model": "/nowhere/at/all", "device": "cpu"})
