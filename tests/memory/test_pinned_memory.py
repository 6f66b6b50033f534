"""Page-locked memory: its pages, its size, and when it is unlocked; with a driver that is made up, and a real one."""

from __future__ import annotations

import gc

import pytest
import torch

from minillm.memory.pinned import PinnedMemory


class Driver:
    def __init__(self, refuse: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.refuse = refuse

    def register(self, address: int, num_bytes: int) -> None:
        if self.refuse:
            raise RuntimeError("no more memory can be locked")
        self.locked[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


@pytest.mark.parametrize("num_bytes", [4096, 5 << 20, (130 << 20) + 12])
def test_it_is_as_large_as_asked_for_zero_and_writable(num_bytes: int) -> None:
    driver = Driver()
    memory = PinnedMemory(num_bytes, driver.register, driver.unregister)
    assert memory.tensor.shape == (num_bytes,) and not memory.tensor.any()
    assert driver.locked == {memory.tensor.data_ptr(): num_bytes}
    memory.tensor[-1] = 7
    assert memory.tensor.sum() == 7


def test_it_is_unlocked_once_it_is_gone_while_a_view_of_it_lives_on() -> None:
    driver = Driver()
    memory = PinnedMemory(1 << 16, driver.register, driver.unregister)
    view = memory.tensor.view(torch.int32)[:4]
    view.fill_(3)
    del memory
    gc.collect()
    assert driver.locked == {}
    assert view.tolist() == [3] * 4


def test_what_the_driver_refuses_is_an_error_and_what_it_cannot_unlock_is_none() -> None:
    with pytest.raises(RuntimeError, match="no more memory"):
        PinnedMemory(4096, Driver(refuse=True).register)

    def failing(address: int) -> None:
        raise RuntimeError("the device has failed")

    memory = PinnedMemory(4096, Driver().register, failing)
    del memory
    gc.collect()


def test_more_than_there_can_be_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="host memory"):
        PinnedMemory(1 << 62, Driver().register)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_real_driver_locks_it_and_copies_do_not_wait() -> None:
    torch.cuda.init()
    memory = PinnedMemory(64 << 20)
    assert memory.tensor.is_pinned()
    device = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    memory.tensor.fill_(5)
    device.copy_(memory.tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert int(device.float().mean()) == 5
    del memory
    gc.collect()
    again = PinnedMemory(64 << 20)
    assert again.tensor.is_pinned()
