"""The policy of captured decode steps, with recorded launches in place of a GPU's."""

from __future__ import annotations

import pytest

from minillm.runner.cuda_graphs import GRAPH_BYTES, StepGraphs, padded_sizes


class Recorder:
    """Captures steps as lists of what they enqueued, and counts what runs."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.captured: list[int] = []
        self._capturing: list[int] | None = None
        self.fail = False

    def step(self, size: int) -> None:
        (self.ran if self._capturing is None else self._capturing).append(size)

    def capture(self, work):
        if self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._capturing = held = []
        work()
        self._capturing = None
        self.captured += held
        return RecordedGraph(self, held)


class RecordedGraph:
    def __init__(self, recorder: Recorder, sizes: list[int]) -> None:
        self.recorder, self.sizes, self.replays = recorder, sizes, 0

    def replay(self) -> None:
        self.replays += 1
        self.recorder.ran += self.sizes


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 1000])
def test_sizes_hold_every_number_of_rows_with_little_padding(most):
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most  # the attention kernel's plan has room for no more rows
    graphs = StepGraphs(sizes, None)
    for rows in range(1, most + 1):
        size = graphs.size_for(rows)
        assert rows <= size <= max(2 * rows - 1, 1)
        assert size - rows < (16 if rows <= 64 else 32 if rows <= 256 else 64)
    with pytest.raises(IndexError):
        graphs.size_for(sizes[-1] + 1)


def test_a_thousand_sequences_need_a_few_dozen_graphs():
    assert padded_sizes(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    assert len(padded_sizes(1024)) == 26


def test_a_size_is_captured_when_it_comes_again_and_replayed_from_then_on():
    recorder = Recorder()
    graphs = StepGraphs([1, 2, 4], recorder.capture)
    for size in (4, 2, 4, 4, 2, 4):
        graphs.run(size, recorder.step)
    assert recorder.ran == [4, 2, 4, 4, 2, 4]  # each step once, whether launched or replayed
    assert recorder.captured == [4, 2]
    assert graphs.captured == [2, 4]
    assert graphs._graphs[4].replays == 3
    assert graphs.reserved_bytes == 3 * GRAPH_BYTES


def test_without_capture_every_step_is_launched_and_nothing_is_reserved():
    recorder = Recorder()
    graphs = StepGraphs([1, 2], None)
    for _ in range(3):
        graphs.run(2, recorder.step)
    assert recorder.ran == [2, 2, 2]
    assert graphs.captured == []
    assert graphs.reserved_bytes == 0


def test_a_capture_that_fails_costs_the_graphs_and_no_step(caplog):
    recorder = Recorder()
    graphs = StepGraphs([1, 2], recorder.capture)
    graphs.run(1, recorder.step)
    graphs.run(1, recorder.step)
    recorder.fail = True
    for _ in range(4):
        graphs.run(2, recorder.step)
    graphs.run(1, recorder.step)
    assert recorder.ran == [1, 1, 2, 2, 2, 2, 1]
    assert graphs.captured == [1]  # what was captured before still serves
    assert len(caplog.records) == 1
    assert "capturing size 2 failed: operation not permitted" in caplog.text


def test_warming_up_captures_every_size_and_without_graphs_does_nothing():
    recorder = Recorder()
    graphs = StepGraphs([1, 2, 4], recorder.capture)
    graphs.warm_up(recorder.step)
    assert graphs.captured == [1, 2, 4]
    assert recorder.captured == [4, 2, 1]
    StepGraphs([1, 2], None).warm_up(recorder.step)
    assert recorder.ran == [4, 4, 2, 2, 1, 1]


def test_graphs_that_are_forgotten_are_captured_again():
    recorder = Recorder()
    graphs = StepGraphs([1], recorder.capture)
    for _ in range(2):
        graphs.run(1, recorder.step)
    graphs.forget()
    assert graphs.captured == []
    for _ in range(2):
        graphs.run(1, recorder.step)
    assert recorder.captured == [1, 1]


def test_after_closing_no_graph_is_held():
    recorder = Recorder()
    graphs = StepGraphs([1], recorder.capture)
    for _ in range(2):
        graphs.run(1, recorder.step)
    graphs.close()
    assert graphs.captured == []
    graphs.run(1, recorder.step)
    assert recorder.ran == [1, 1, 1]
