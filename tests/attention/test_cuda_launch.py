"""Packing of kernel arguments (no GPU), and launching (GPU)."""

from __future__ import annotations

import ctypes
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from minillm.attention import cuda_build, cuda_launch
from minillm.attention.cuda_build import KernelSpec
from minillm.core.errors import KernelLaunchError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def packed(*args: object) -> list[int]:
    """Pack, and return the address of each argument's value."""
    packer = cuda_launch._Packer(cuda_launch._signature(args))
    packer.pack(args)
    packed.keep = packer
    return list(ctypes.cast(packer.address, ctypes.POINTER(ctypes.c_uint64))[0 : len(args)])


def test_values_lie_at_their_pointers_with_their_widths():
    tensor = torch.zeros(3)
    args = (
        np.int32(-5),
        tensor,
        np.float32(1.5),
        None,
        np.int64(-(1 << 40)),
        ctypes.c_int(7),
        np.uint64((1 << 64) - 1),
        ctypes.c_void_p(0x1234),
    )
    at = packed(*args)
    kinds = (ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32)
    values = [kind.from_address(address).value for kind, address in zip(kinds, at, strict=False)]
    assert values == [-5, tensor.data_ptr(), 1.5, 0, -(1 << 40), 7]
    assert ctypes.c_uint64.from_address(at[6]).value == (1 << 64) - 1
    assert ctypes.c_uint64.from_address(at[7]).value == 0x1234
    assert all(address % ctypes.sizeof(kind) == 0 for kind, address in zip(kinds, at, strict=False))


def test_structs_are_copied_whole_and_aligned_to_64_bytes():
    first, second = bytes(range(128)), bytes(range(64))
    at = packed(np.int32(1), first, np.int32(2), second)
    assert at[1] % 64 == at[3] % 64 == 0
    assert ctypes.string_at(at[1], 128) == first
    assert ctypes.string_at(at[3], 64) == second
    assert ctypes.c_int32.from_address(at[2]).value == 2


@pytest.mark.parametrize("value", [3, 1.0, "x", True, [1]])
def test_arguments_without_a_width_are_refused(value):
    with pytest.raises(TypeError, match="kernel argument 1"):
        packed(np.int32(0), value)


def test_every_thread_packs_into_memory_of_its_own():
    args = (np.int32(1),)
    addresses = []

    def remember() -> None:
        packers = cuda_launch._thread.packers
        assert packers == {}
        packers[cuda_launch._signature(args)] = cuda_launch._Packer(cuda_launch._signature(args))
        addresses.append(packers[cuda_launch._signature(args)].address)

    threads = [threading.Thread(target=remember) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == 2


class RecordingKernel:
    """Stands in for a kernel on the device: reads its arguments as the driver would."""

    device_index, name, _function, _takes_dependents = 0, "recording", None, True

    def __init__(self) -> None:
        self.launches: list[list[int]] = []
        self.configs: list[tuple[object, ...]] = []

    def set_max_shared(self, shared_bytes: int) -> None:
        pass

    def _configure(self, *key: object) -> tuple[object, ...]:
        self.configs.append(key)
        return key

    def _launch_ex(self, config: object, function: object, values: int, extra: int) -> tuple[int]:
        pointers = ctypes.cast(values, ctypes.POINTER(ctypes.c_uint64))[0:5]
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
        self.launches.append([kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True)])
        return (0,)


def test_a_prepared_launch_changes_addresses_alone_and_configures_once_a_stream(monkeypatch):
    stream = [7]
    monkeypatch.setattr(cuda_launch, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_launch, "current_raw_stream", lambda index: stream[0])
    monkeypatch.setattr(cuda_launch, "ensure_context", lambda index: None)
    kernel = RecordingKernel()
    scalars = (np.int32(-3), np.int64(1 << 40), np.float32(0.5))
    launch = cuda_launch.PreparedLaunch(kernel, (4, 2), 64, 2, scalars, shared_bytes=1024, dependent=True)
    launch(0x1000, 0x2000)
    launch(0x3000, 0)
    assert kernel.launches == [[0x1000, 0x2000, -3, 1 << 40, 0.5], [0x3000, 0, -3, 1 << 40, 0.5]]
    stream[0] = 8
    launch(1, 2)
    monkeypatch.setattr(cuda_launch, "DEPENDENT_LAUNCHES", False)
    launch(1, 2)
    launch(1, 2)
    key = ((4, 2), 64, 1024)
    assert kernel.configs == [(*key, 7, None, True), (*key, 8, None, True), (*key, 8, None, False)]
    with pytest.raises(ValueError, match="size"):
        launch(1)


SOURCE = """
struct Pair { int a[16]; };
__global__ void fill(int* out, int n, const __grid_constant__ Pair pair) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = pair.a[i % 16];
}
__global__ void shared_sum(int* out) {
    extern __shared__ int values[];
    const int last = 100 * 1024 / 4 - 1;
    if (threadIdx.x == 0) values[last] = 41;
    __syncthreads();
    if (threadIdx.x == 1) out[0] = values[last] + 1;
}
__global__ void add_later(int* out, const volatile int* in, int delay) {
    for (int i = 0; i < delay; ++i) __nanosleep(1000);
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < delay; ++i) __nanosleep(1000);
    out[threadIdx.x] = in[threadIdx.x] + 1;
}
__global__ void cluster_size(int* out) {
    int size;
    asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(size));
    if (threadIdx.x == 0) out[blockIdx.x] = size;
}
"""


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    (tmp_path / "probe.cu").write_text(SOURCE)
    monkeypatch.setattr(cuda_build, "KERNEL_DIR", tmp_path)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    cuda_build._source_digest.cache_clear()
    yield lambda symbol: cuda_build.get_kernel(KernelSpec("probe.cu", symbol), torch.device("cuda"))
    cuda_build._source_digest.cache_clear()


@pytest.mark.cuda
@needs_gpu
def test_launch_passes_tensors_scalars_and_structs(kernel):
    out = torch.full((70,), -1, dtype=torch.int32, device="cuda")
    pair = np.arange(100, 116, dtype=np.int32).tobytes()
    fill = kernel("fill")
    fill.launch((3, 1), 32, (out, np.int32(65), pair))
    assert out.tolist() == [100 + i % 16 for i in range(65)] + [-1] * 5
    assert kernel("fill") is fill
    assert fill.num_regs > 0
    assert fill.local_bytes == 0
    assert fill.max_active_blocks(1024) in (1, 2)


@pytest.mark.cuda
@needs_gpu
def test_launch_raises_the_limit_of_shared_memory(kernel):
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel("shared_sum").launch(1, 32, (out,), shared_bytes=100 * 1024)
    assert out.item() == 42
    with pytest.raises(KernelLaunchError, match="shared_sum"):
        kernel("shared_sum").launch(1, 32, (out,), shared_bytes=1 << 20)


@pytest.mark.cuda
@needs_gpu
def test_a_refused_launch_names_kernel_and_grid(kernel):
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(KernelLaunchError, match=r"shared_sum.*CUDA_ERROR_INVALID_VALUE.*block=4096"):
        kernel("shared_sum").launch(1, 4096, (out,))


@pytest.mark.cuda
@needs_gpu
def test_launch_with_clusters(kernel):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    kernel("cluster_size").launch(8, 32, (out,), cluster=(4, 1, 1))
    assert out.tolist() == [4] * 8


@pytest.mark.cuda
@needs_gpu
def test_launch_from_a_thread_that_has_used_no_cuda_yet(kernel):
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    shared_sum = kernel("shared_sum")
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            shared_sum.launch(1, 32, (out,), shared_bytes=100 * 1024)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert out.item() == 42


@pytest.mark.cuda
@needs_gpu
def test_launch_goes_to_the_current_or_the_given_stream(kernel):
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    shared_sum = kernel("shared_sum")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        shared_sum.launch(1, 32, (out,), shared_bytes=100 * 1024)
        done = stream.record_event()
    assert not done.query()
    stream.synchronize()
    assert out.item() == 42
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
    shared_sum.launch(1, 32, (out,), shared_bytes=100 * 1024, stream=stream)
    assert not stream.query()
    stream.synchronize()


@pytest.mark.cuda
@needs_gpu
def test_tensor_map_is_128_bytes_and_refuses_what_the_hardware_does_not_take():
    base = torch.zeros((64, 128), dtype=torch.bfloat16, device="cuda")
    assert len(cuda_launch.tensor_map(base, (64, 128), (128, 1), (16, 64), swizzle_bytes=128)) == 128
    with pytest.raises(ValueError, match="innermost stride"):
        cuda_launch.tensor_map(base, (64, 64), (128, 2), (16, 64))
    with pytest.raises(KernelLaunchError, match="cuTensorMapEncodeTiled"):
        cuda_launch.tensor_map(base, (64, 128), (128, 1), (16, 512))


@pytest.mark.cuda
@needs_gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("prepared", [False, True])
def test_dependent_launches_see_what_the_kernels_before_wrote(kernel, prepared):
    """A chain in which every kernel starts early and ends late, eagerly and in a graph."""
    add = kernel("add_later")
    buffers = torch.zeros(40, 32, dtype=torch.int32, device="cuda")
    launch = cuda_launch.PreparedLaunch(add, 1, 32, 2, (np.int32(3),), dependent=True)

    def chain() -> None:
        for source, target in pairwise(buffers):
            if prepared:
                launch(target.data_ptr(), source.data_ptr())
            else:
                add.launch(1, 32, (target, source, np.int32(3)), dependent=True)

    chain()
    assert buffers[:, 0].tolist() == list(range(40))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for start in range(1, 20):
        buffers.zero_()
        buffers[0] = start
        graph.replay()
        assert buffers[:, 31].tolist() == list(range(start, start + 40))


@pytest.mark.cuda
@needs_gpu
def test_a_copy_may_be_the_first_call_of_its_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from minillm.attention.cuda_launch import current_raw_stream, memcpy_async

    source = torch.arange(8, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()

    def copy() -> None:
        memcpy_async(target.data_ptr(), source.data_ptr(), source.nbytes, current_raw_stream(0))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy).result()
    torch.cuda.synchronize()
    assert torch.equal(target, source)
