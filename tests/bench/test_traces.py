"""Readers of traces: own small files of every kind, malformed ones, and the public files where they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from minillm.bench import traces, workloads
from minillm.bench.recording import percentile
from minillm.core.errors import ConfigError, TraceError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
]
SERVEGEN = {
    "client": 3,
    "trace": [
        [0.0, 4.0, 1.0, "Gamma", 1.0, 0.25],
        [100.0, 0.0, 0.0, None, 0.0, 0.0],
        [200.0, 2.0, 0.5, "Weibull", 2, 1],
    ],
    "dataset": {
        "0": {"input_tokens": {"10": 0.5, "20": 0.5}, "output_tokens": {"3": 1.0}},
        "150": {"input_tokens": {"99": 1.0}, "output_tokens": {"4": 1.0}},
        "300": {"input_tokens": {}, "output_tokens": {}},
    },
}
SHAREGPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "a b c d e"}],
    },
    {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "too short"}, {"from": "gpt", "value": "a b c d e"}]},
]


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)  # type: ignore
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_azure_rows_keep_times_and_lengths(tmp_path):
    made = traces.read_trace(write(tmp_path, "azure.csv", AZURE))
    assert [request.arrival for request in made.requests] == pytest.approx([0.0, 4.314579])
    assert made.prompt_tokens() == [374, 396]
    assert [request.max_tokens for request in made.requests] == [44, 109]
    assert len(traces.read_azure(tmp_path / "azure.csv", rows=1)) == 1


def test_mooncake_hash_ids_become_shared_tokens(tmp_path):
    made = traces.read_trace(write(tmp_path, "trace.jsonl", MOONCAKE))
    first, second, third = (made.token_ids(i, 32_000) for i in range(3))
    assert [len(ids) for ids in (first, second, third)] == [1200, 1024, 600]
    assert first[:1024] == second
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]
    assert [request.arrival for request in made.requests] == [0.0, 2.5, 2.5]


@pytest.mark.parametrize("name", ["clients.jsonl", "clients.jsonl.gz"])
def test_servegen_draws_each_window_by_its_law(tmp_path, name):
    path = write(tmp_path, name, [SERVEGEN, {"client": 4, "trace": [[0.0, 9.0, 1.0, "Gamma", 1, 1]], "dataset": None}])
    made = traces.read_trace(path, duration=600.0)
    early = [request for request in made.requests if request.arrival < 100]
    late = [request for request in made.requests if request.arrival >= 100]
    assert len(early) == pytest.approx(400, rel=0.2)
    assert len(late) == pytest.approx(2.0 * 400, rel=0.2)
    assert all(request.arrival >= 200 for request in late)
    assert {request.own_tokens for request in early} == {10, 20}
    assert {request.own_tokens for request in late} == {99}
    assert {request.max_tokens for request in late} == {4}
    assert made == traces.read_servegen(path, duration=600.0)
    window = traces.read_servegen(path, start=200.0, duration=50.0)
    assert 0 <= window.requests[0].arrival < 5 and window.duration < 50


def test_sharegpt_takes_the_first_message_and_the_length_of_its_answer(tmp_path):
    path = write(tmp_path, "share.json", json.dumps(SHAREGPT))
    made = traces.read_trace(path, encode=words)
    assert [(request.ids, request.max_tokens) for request in made.requests] == [((3, 3, 5, 4), 5)]
    with pytest.raises(ConfigError, match="tokenizer"):
        traces.read_trace(path)


MALFORMED = [
    ("a.csv", "when,what\n1,2\n", r"a\.csv, line 1: the columns"),
    ("a.csv", AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "line 3: TIMESTAMP='yesterday'"),
    ("a.csv", AZURE.replace("396", "-3"), "line 3: ContextTokens='-3'"),
    ("a.csv", AZURE.replace(",109", ""), "line 3: GeneratedTokens=None"),
    ("a.csv", AZURE.splitlines()[0], "no requests"),
    ("a.csv", AZURE + "2023-11-16 18:15:00.0,3,3\n", "request 3: arrival times must not decrease"),
    ("a.jsonl", '{"hash_ids": [1]}\nnot json\n', "line 1: input_length=None"),
    ("a.jsonl", "[1]\n", "line 1: each line must be a JSON object"),
    ("a.jsonl", "{\n", "line 1: no JSON"),
    ("a.jsonl", '{"a": 1}\n', "no known trace"),
    ("a.jsonl", [{**MOONCAKE[0], "hash_ids": [1, 2]}], "2 hash_ids do not make input_length=1200"),
    ("a.jsonl", [{**MOONCAKE[0], "timestamp": "soon"}], "timestamp='soon'"),
    ("a.jsonl", [{**MOONCAKE[0], "hash_ids": ["x"]}], "hash_ids="),
    ("a.jsonl", [{**SERVEGEN, "trace": [[0, 1, 1, "Pareto", 1, 1]]}], "kind Gamma or Weibull"),
    ("a.jsonl", [{**SERVEGEN, "trace": [[0, 1]]}], "window"),
    ("a.jsonl", [{**SERVEGEN, "dataset": {"0": {}}}], "input_tokens"),
    ("a.json", "{", "no JSON"),
    ("a.json", "{}", "must be a list of conversations"),
    ("a.json", '[{"id": 1}]', "entry 1: conversations"),
    ("a.json", '[{"conversations": [{"value": 1}, {"value": "x"}]}]', "entry 1: each message must have a text"),
]


@pytest.mark.parametrize(("name", "content", "message"), MALFORMED)
def test_malformed_files_are_refused_with_file_line_and_field(tmp_path, name, content, message):
    with pytest.raises(TraceError, match=message):
        traces.read_trace(write(tmp_path, name, content), encode=words)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(tmp_path / "absent.csv")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(tmp_path / "bad.jsonl.gz")
    (tmp_path / "latin.csv").write_bytes(AZURE.encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(tmp_path / "latin.csv")
    with pytest.raises(ConfigError, match="kind='zip'"):
        traces.read_trace(tmp_path / "latin.csv", "zip")


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("azure2023_conv.csv", "azure-conv"),
        ("azure2023_code.csv", "azure-code"),
        ("mooncake_conversation.jsonl", "mooncake-conv"),
    ],
)
def test_the_generators_parameters_are_those_of_the_traces(shared_data, name, law):
    made = traces.read_trace(shared_data / "traces" / name)
    known = workloads.LAWS[law]
    for lengths, values in (
        (known.prompt, made.prompt_tokens()),
        (known.output, [request.max_tokens for request in made.requests]),
    ):
        assert percentile(values, 0.5) == pytest.approx(lengths.p50, abs=1)
        assert percentile(values, 0.9) == pytest.approx(lengths.p90, abs=1)
        assert max(values) == lengths.most
    assert len(made) / made.duration == pytest.approx(known.rate, rel=0.001)


def test_the_mooncake_trace_has_the_published_sharing(shared_data):
    made = traces.read_mooncake(shared_data / "traces" / "mooncake_conversation.jsonl")
    keys = [segment.key for request in made.requests for segment in request.segments]
    assert (len(made), sum(made.prompt_tokens()), len(keys), len(set(keys))) == (12_031, 144_793_823, 288_500, 182_790)


def test_the_servegen_clients_make_their_published_rate(shared_data):
    path = shared_data / "traces" / "servegen_reason_deepseek-r1_24h.jsonl.gz"
    made = traces.read_servegen(path, start=43_200.0, duration=600.0)
    assert 4.31 * 600 < len(made) < 42.52 * 600
    values = made.prompt_tokens()
    assert 50 < percentile(values, 0.5) < 1000
