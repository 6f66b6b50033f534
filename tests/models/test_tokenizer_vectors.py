"""Token ids against those of llama.cpp, for the vocabularies at hand."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from minillm.models.default_model import BUILTIN_MODELS, builtin_path
from minillm.models.pre_tokenizers import PRE_TOKENIZERS
from minillm.models.tokenizer import Tokenizer, load_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def builtin_file() -> Path:
    """The built-in model's file, where it has been fetched already."""
    path = builtin_path(BUILTIN_MODELS["smollm2-135m"])
    if not path.is_file():
        pytest.skip(f"the built-in model is not in the cache ({path})")
    return path


@pytest.fixture(scope="module")
def builtin_tokenizer(builtin_file: Path) -> Tokenizer:
    return load_tokenizer(builtin_file)


@pytest.fixture(scope="module")
def vector_tokenizers(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = shared_data / "tokenizers"
    qwen = tmp_path_factory.mktemp("qwen3")
    (qwen / "tokenizer.json").write_bytes(gzip.decompress((folder / "qwen3_tokenizer.json.gz").read_bytes()))
    shutil.copy(folder / "qwen3_tokenizer_config.json", qwen / "tokenizer_config.json")
    return {
        "gpt-2": load_tokenizer(folder / "ggml-vocab-gpt-2.gguf"),
        "phi-3": load_tokenizer(folder / "ggml-vocab-phi-3.gguf"),
        "qwen2": load_tokenizer(qwen),
    }


def read_vectors(shared_data: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = shared_data / "tokenizers" / "llamacpp_vectors" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split(SEPARATOR)
    rows = Path(f"{stem}.out").read_text().split("\n")
    return [(text, [int(i) for i in row.split()]) for text, row in zip(texts, rows, strict=True)]


@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "qwen2"])
def test_ids_equal_llamacpp_and_decode_back(
    shared_data: Path, vector_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = vector_tokenizers[name]
    vectors = read_vectors(shared_data, name)
    assert len(vectors) >= 46
    for text, ids in vectors:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "name",
    "gpt-2 llama-bpe qwen2 falcon starcoder refact command-r mpt deepseek-llm deepseek-coder".split(),  # noqa: SIM905
)
def test_no_text_is_split_into_more_pieces_than_llamacpp_has_ids(shared_data: Path, name: str) -> None:
    """For the vocabularies that are not at hand: a piece takes at least one id."""
    patterns = [Regex(pattern) for pattern in PRE_TOKENIZERS[name].patterns]
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated") for pattern in patterns])
    for text, ids in read_vectors(shared_data, name):
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)]
        assert "".join(pieces) == text
        assert len(pieces) <= len(ids)


@pytest.mark.integration
def test_builtin_model_ids_equal_llamacpp_and_decode_back(shared_data: Path, builtin_tokenizer: Tokenizer) -> None:
    lines = (shared_data / "tokenizers" / "smollm2_llamacpp_vectors.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 83
    for line in lines:
        row = json.loads(line)
        assert builtin_tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"], row["text"]
        assert builtin_tokenizer.decode(row["ids"], skip_special_tokens=False) == row["text"]


@pytest.mark.integration
def test_builtin_model_digits_and_numerals_are_split_one_by_one(builtin_tokenizer: Tokenizer) -> None:
    """The pre-tokenizer named `smollm` isolates every numeral, also after white space and outside 0-9."""
    for text, pieces in [("a 12", ["a", "Ġ", "1", "2"]), ("\t7", ["ĉ", "7"])]:
        ids = builtin_tokenizer.encode(text, add_special_tokens=False)
        assert [builtin_tokenizer.id_to_piece(i) for i in ids] == pieces
    joined = builtin_tokenizer.encode("②③", add_special_tokens=False)
    assert joined == builtin_tokenizer.encode("②", False) + builtin_tokenizer.encode("③", False)


@pytest.mark.integration
def test_builtin_model_loads_in_under_a_second(builtin_file: Path) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        load_tokenizer(builtin_file).encode("warm")
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
