"""Staging of copies: memory that a pending copy reads is never handed out again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minillm.memory.staging import HostUpload, PinnedUpload, StagingRing, packed_bytes, to_pinned, upload_to


class Clock:
    """A device that runs behind: its events pass when somebody waits for them, or when it is told to catch up."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waits = 0

    def event(self) -> Any:
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.passed = False

    def record(self) -> None:
        self.clock.events.append(self)

    def synchronize(self) -> None:
        self.clock.waits += not self.passed
        for event in self.clock.events:  # a stream runs in order: what came before has passed too
            event.passed = True
            if event is self:
                return


def make_ring(clock: Clock, slab_bytes: int = 64, num_slabs: int = 3) -> StagingRing:
    return StagingRing(
        slab_bytes,
        num_slabs,
        allocate=lambda count: torch.zeros(count, dtype=torch.uint8),
        make_event=clock.event,
    )


def test_pieces_of_a_slab_do_not_overlap_and_are_aligned() -> None:
    ring = make_ring(Clock())
    first, second, third = ring.take(5), ring.take(24), ring.take(1)
    first.fill_(1)
    second.fill_(2)
    third.fill_(3)
    assert (first == 1).all() and (second == 2).all() and (third == 3).all()
    assert second.view(torch.int64).shape == (3,)
    assert second.data_ptr() - first.data_ptr() == 16
    assert third.data_ptr() - second.data_ptr() == 32


def test_coming_back_to_a_slab_waits_for_the_copies_out_of_it() -> None:
    clock = Clock()
    ring = make_ring(clock)
    pieces = [ring.take(64) for _ in range(3)]  # fills three slabs
    assert len({piece.data_ptr() for piece in pieces}) == 3
    assert clock.waits == 0
    again = ring.take(64)
    assert clock.waits == 1
    assert again.data_ptr() == pieces[0].data_ptr()
    assert clock.events[0].passed and not clock.events[1].passed
    ring.take(64)
    assert clock.waits == 2


def test_copies_that_are_done_cost_no_wait() -> None:
    clock = Clock()
    ring = make_ring(clock)
    for _ in range(10):
        ring.take(64)
        for event in clock.events:
            event.passed = True
    assert clock.waits == 0


def test_what_a_pending_copy_reads_stays_as_it_is() -> None:
    """Random sizes, and a device that catches up at random: every copy reads what was staged for it."""
    generator = np.random.default_rng(0)
    clock = Clock()
    ring = make_ring(clock, slab_bytes=256, num_slabs=3)
    pending: list[tuple[torch.Tensor, int, int]] = []
    for step in range(2000):
        piece = ring.take(int(generator.integers(1, 200)))
        passed = sum(event.passed for event in clock.events)
        for memory, value, number in pending:
            if number >= passed:  # behind the last event that passed: not copied yet
                assert (memory == value).all()
        pending = [entry for entry in pending if entry[2] >= passed]
        piece.fill_(step % 251)
        pending.append((piece, step % 251, len(clock.events)))
        if generator.random() < 0.05 and clock.events:
            clock.events[int(generator.integers(len(clock.events)))].synchronize()
    assert clock.waits > 0


def test_more_than_a_slab_gets_memory_of_its_own() -> None:
    ring = make_ring(Clock())
    small = ring.take(16)
    large = ring.take(1000)
    assert len(large) == 1000
    assert ring.take(16).data_ptr() - small.data_ptr() == 16


def test_one_slab_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slabs=1"):
        make_ring(Clock(), num_slabs=1)


ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.empty(0, dtype=np.int64),
    np.arange(7, dtype=np.int32),
    np.linspace(0, 1, 6).reshape(2, 3),
    np.array([1.5, 2.5], dtype=np.float32),
]


def pinned_upload() -> PinnedUpload:
    return PinnedUpload(torch.device("cpu"), make_ring(Clock(), 4096))


@pytest.mark.parametrize("make", [HostUpload, pinned_upload], ids=["host", "pinned"])
def test_arrays_arrive_with_their_shape_and_dtype(make) -> None:
    upload = make()
    for tensors in (upload.together(ARRAYS), [upload(array) for array in ARRAYS]):
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_an_array_goes_into_the_start_of_a_tensor() -> None:
    target = torch.full((6,), -1, dtype=torch.int32)
    HostUpload().into(target, np.array([5, 6, 7], dtype=np.int32))
    assert target.tolist() == [5, 6, 7, -1, -1, -1]


def test_packed_transfers_reuse_their_place_and_single_ones_do_not() -> None:
    upload = pinned_upload()
    first = upload.together([np.arange(4), np.arange(3)])
    second = upload.together([np.arange(4) + 10, np.arange(3)])
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[0].tolist() == [10, 11, 12, 13]
    kept = upload(np.arange(4))
    upload(np.arange(4) + 10)
    assert kept.tolist() == [0, 1, 2, 3]
    large = upload.together([np.arange(20_000)])
    assert large[0].tolist() == list(range(20_000))


@pytest.mark.parametrize("make", [HostUpload, pinned_upload], ids=["host", "pinned"])
def test_packed_transfers_into_a_given_place_stay_there(make) -> None:
    upload = make()
    target = torch.zeros(packed_bytes(ARRAYS), dtype=torch.uint8)
    first = upload.together(ARRAYS, target)
    assert [tensor.shape for tensor in first] == [array.shape for array in ARRAYS]
    begin = target.data_ptr()
    assert all(begin <= tensor.data_ptr() < begin + len(target) for tensor in first if tensor.numel())
    second = upload.together([array.copy() for array in ARRAYS[:-1]], target)
    assert [tensor.data_ptr() for tensor in second] == [tensor.data_ptr() for tensor in first[:-1]]
    upload.together(ARRAYS[:1])  # another place
    for tensor, array in zip(first, ARRAYS, strict=True):
        assert np.array_equal(tensor.numpy(), array)
    with pytest.raises(ValueError, match=f"the arrays take {len(target)} bytes, the target has {len(target) - 1}"):
        upload.together(ARRAYS, target[:-1])


def test_a_cpu_uploads_nothing() -> None:
    array = np.arange(3)
    tensor = upload_to("cpu")(array)
    array[0] = 7
    assert tensor[0] == 7


@pytest.mark.cuda
def test_transfers_on_a_gpu_wait_for_nothing_and_bring_what_was_staged() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    upload = PinnedUpload(device, StagingRing(1 << 12, 3))
    total = torch.zeros(64, dtype=torch.int64, device=device)
    place = torch.zeros_like(total)
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            if step % 50 == 0:
                busy = busy @ busy.clamp(-1e-3, 1e-3)  # the device falls behind, the slabs go round
            array = np.full(64, step)
            upload.into(place, array)
            total += upload(array) + upload.together([array, np.arange(3)])[0] + place - array[0].item()
            array.fill(-(10**9))
        host = to_pinned(total)
        done = torch.cuda.Event()
        done.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done.synchronize()
    assert host.is_pinned()
    assert host.tolist() == [2 * sum(range(200))] * 64
