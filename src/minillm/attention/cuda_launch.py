"""Launching compiled kernels through the CUDA driver.

A step of a 30-layer decoder launches a hundred kernels, so Python must not cost more than the driver. For each
signature (the types of the arguments) a thread keeps a buffer for the values, a generated function that packs them
with one :class:`struct.Struct` call, and the array of pointers that the driver takes. No object is made per argument.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minillm.core.errors import KernelLaunchError

if TYPE_CHECKING:
    from cuda.bindings import driver

DEFAULT_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may use without asking for more (CUDA programming guide, 'Shared memory')."""

DEPENDENT_LAUNCHES = os.environ.get("MINILLM_DEPENDENT_LAUNCHES", "1") not in ("", "0")
"""``MINILLM_DEPENDENT_LAUNCHES=0`` lets every kernel wait for the end of the one in front of it: to tell a race between
neighbours from other mistakes, and to measure what overlapping gains."""

_MOST_CONFIGS = 1024
"""Launch configurations that a kernel keeps: prompts of every length have grids of every size."""

Dim = tuple[int, int, int] | tuple[int, int] | tuple[int] | int

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The calls behind torch.cuda.current_device and current_stream, without building Python objects (1.5 us less)."""


_FORMATS: dict[type, tuple[str, int, str]] = {
    Tensor: ("Q", 8, "{}.data_ptr()"),
    torch.nn.Parameter: ("Q", 8, "{}.data_ptr()"),
    type(None): ("Q", 8, "0"),
    np.int32: ("i", 4, "{}"),
    np.uint32: ("I", 4, "{}"),
    np.int64: ("q", 8, "{}"),
    np.uint64: ("Q", 8, "{}"),
    np.float32: ("f", 4, "{}"),
    np.float64: ("d", 8, "{}"),
    ctypes.c_int: ("i", 4, "{}.value"),
    ctypes.c_uint: ("I", 4, "{}.value"),
    ctypes.c_long: ("q", 8, "{}.value"),
    ctypes.c_ulong: ("Q", 8, "{}.value"),
    ctypes.c_float: ("f", 4, "{}.value"),
    ctypes.c_void_p: ("Q", 8, "({}.value or 0)"),
}
"""Argument type -> struct format, bytes (also the alignment), and the expression of its value."""

_STRUCT_ALIGNMENT = 64
"""Of arguments given as raw bytes: what CUtensorMap asks for."""


class _Packer:
    """Argument values and the pointers to them, for one signature; used by one thread only."""

    def __init__(self, signature: tuple[Any, ...]) -> None:
        layout, end = "=", 0
        offsets: list[int] = []
        values: list[str] = []
        for index, kind in enumerate(signature):
            if isinstance(kind, int):  # the length of a bytes argument
                code, size, alignment, value = f"{kind}s", kind, _STRUCT_ALIGNMENT, "{}"
            else:
                if kind not in _FORMATS:
                    raise TypeError(
                        f"kernel argument {index} is a {kind.__name__}; give a tensor, None, a numpy or ctypes scalar "
                        "(a Python number has no width), or the bytes of a struct"
                    )
                code, size, value = _FORMATS[kind]
                alignment = size
            padding = -end % alignment
            layout += f"{padding}x{code}" if padding else code
            offsets.append(end + padding)
            end += padding + size
            values.append(value.format(f"args[{index}]"))
        buffer = ctypes.create_string_buffer(end + _STRUCT_ALIGNMENT)
        first = -ctypes.addressof(buffer) % _STRUCT_ALIGNMENT
        base = ctypes.addressof(buffer) + first
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)
        """Of the pointer array. The driver copies the values that it points to during the launch."""
        # Generated as namedtuple's constructor is: a third of the time of a loop over converters. The text is made of
        # _FORMATS and positions only.
        source = f"lambda args: pack_into(buffer, {first}, {', '.join(values)})"
        self.pack: Callable[[Sequence[Any]], None] = eval(
            source, {"pack_into": struct.Struct(layout).pack_into, "buffer": buffer}
        )
        """Store the values of arguments of this signature."""
        self._base = base

    def words(self, count: int) -> ctypes.Array[ctypes.c_uint64]:
        """The first `count` values, which must be pointers, to set without packing the others again."""
        return (ctypes.c_uint64 * count).from_address(self._base)


def _signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments' types, with the length in place of `bytes`."""
    types = tuple(map(type, args))
    if bytes in types:
        return tuple(len(arg) if type(arg) is bytes else type(arg) for arg in args)
    return types


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.packers: dict[tuple[Any, ...], _Packer] = {}
        self.devices: set[int] = set()


_thread = _ThreadState()


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call's result; raises :class:`KernelLaunchError` naming `what` and the driver's error."""
    code, *values = result
    if code:
        raise KernelLaunchError(f"{what}: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else tuple(values)


def ensure_context(device_index: int) -> None:
    """Make the primary context of `device_index` (torch's own) current in this thread, if no context is.

    torch makes it current with the first runtime call of a thread; a thread that launches before that has none.
    """
    from cuda.bindings import driver

    if device_index in _thread.devices:
        return
    torch.cuda.init()
    context = check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if not int(context):
        device = check(driver.cuDeviceGet(device_index), "cuDeviceGet")
        context = check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    _thread.devices.add(device_index)


class Kernel:
    """One compiled kernel, loaded on one device."""

    def __init__(self, name: str, cubin: bytes, lowered_name: str, device_index: int) -> None:
        """Load `cubin`; raises :class:`KernelLaunchError` where the driver does not take it."""
        from cuda.bindings import driver

        self.name = name
        self.device_index = device_index
        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._launch_ex = driver.cuLaunchKernelEx
        self._takes_dependents = torch.cuda.get_device_capability(device_index) >= (9, 0)
        self._configs: dict[tuple[object, ...], driver.CUlaunchConfig] = {}
        with torch.cuda.device(device_index):
            ensure_context(device_index)
            self._module = check(driver.cuModuleLoadData(cubin), f"loading {name}")
            function = driver.cuModuleGetFunction(self._module, lowered_name.encode())
            self._function: driver.CUfunction = check(function, f"looking up {name}")
            # Asking for an attribute also makes the driver load the code, which it may not do during graph capture.
            attributes = driver.CUfunction_attribute
            self.num_regs = self._attribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS)
            self.local_bytes = self._attribute(attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
            self.static_shared_bytes = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self._shared_limit = DEFAULT_SHARED_BYTES - self.static_shared_bytes

    def _attribute(self, attribute: Any) -> int:
        return int(check(self._driver.cuFuncGetAttribute(attribute, self._function), f"attributes of {self.name}"))

    def set_max_shared(self, shared_bytes: int) -> None:
        """Allow `shared_bytes` of dynamic shared memory; :meth:`launch` does so by itself."""
        if shared_bytes <= self._shared_limit:
            return
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
            f"{self.name} with {shared_bytes} bytes of dynamic shared memory",
        )
        self._shared_limit = shared_bytes

    def prefer_shared_memory(self) -> None:
        """Ask for as much of L1 as shared memory as there is.

        A multiprocessor divides L1 anew only when it is empty, so kernels that are to overlap must agree.
        """
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(self._driver.cuFuncSetAttribute(self._function, attribute, 100), f"shared memory of {self.name}")

    def max_active_blocks(self, threads: int, shared_bytes: int = 0) -> int:
        """Blocks of `threads` threads that one multiprocessor holds at a time."""
        with torch.cuda.device(self.device_index):
            ensure_context(self.device_index)
            self.set_max_shared(shared_bytes)
            query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared_bytes)
            return int(check(query, f"occupancy of {self.name}"))

    def launch(
        self,
        grid: Dim,
        block: Dim,
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        stream: torch.cuda.Stream | int | None = None,
        cluster: Dim | None = None,
        dependent: bool = False,
    ) -> None:
        """Launch on `stream` (default: the current one of the kernel's device); does not wait.

        `args`: tensors (passed as pointers, not checked), None (a null pointer), numpy or ctypes scalars of the
        parameter's exact type, bytes for a struct by value. Raises :class:`KernelLaunchError` if the driver refuses,
        TypeError for another argument. Capturable in a CUDA graph.

        `dependent`: the kernel may start before the one in front of it on the stream has ended (programmatic dependent
        launch, compute capability 9.0 and newer; no effect on older ones). Only for kernels of which every thread
        block executes ``wait_for_previous_grid()`` (``dependent_launch.cuh``) before it touches anything that earlier
        work on the stream reads or writes.
        """
        signature = _signature(args)
        packers = _thread.packers
        packer = packers.get(signature)
        if packer is None:
            packer = packers[signature] = _Packer(signature)
        if self.device_index not in _thread.devices:
            ensure_context(self.device_index)
        if shared_bytes > self._shared_limit:
            self.set_max_shared(shared_bytes)
        if stream is None:
            stream = current_raw_stream(self.device_index)
        elif not isinstance(stream, int):
            stream = stream.cuda_stream
        packer.pack(args)
        if current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                self._start(grid, block, shared_bytes, stream, cluster, dependent, packer.address)
        else:
            self._start(grid, block, shared_bytes, stream, cluster, dependent, packer.address)

    def _start(
        self,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        stream: int,
        cluster: Dim | None,
        dependent: bool,
        values: int,
    ) -> None:
        dependent = dependent and self._takes_dependents and DEPENDENT_LAUNCHES
        if cluster is None and not dependent:
            gx, gy, gz = _three(grid)
            bx, by, bz = _three(block)
            (code,) = self._launch(self._function, gx, gy, gz, bx, by, bz, shared_bytes, stream, values, 0)
        else:
            key = (grid, block, shared_bytes, stream, cluster, dependent)
            config = self._configs.get(key)
            if config is None:
                config = self._configure(*key)
                if len(self._configs) >= _MOST_CONFIGS:
                    self._configs.clear()
                self._configs[key] = config
            (code,) = self._launch_ex(config, self._function, values, 0)
        if code:
            raise KernelLaunchError(
                f"launch of {self.name} failed: {code.name} ({int(code)}); grid={grid}, block={block}, "
                f"shared_bytes={shared_bytes}, cluster={cluster}, dependent={dependent}"
            )

    def _configure(
        self, grid: Dim, block: Dim, shared_bytes: int, stream: int, cluster: Dim | None, dependent: bool
    ) -> driver.CUlaunchConfig:
        """A launch's configuration with attributes; kept and never changed, so threads may share it."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        attributes = []
        if cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = _three(cluster)
            attributes.append(attribute)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


class PreparedLaunch:
    """A launch of which nothing changes but addresses: the quickest way to launch from Python. For one thread only.

    `scalars`: numpy scalars, the kernel's parameters behind its `num_pointers` pointers. The others are those of
    :meth:`Kernel.launch`.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim,
        block: Dim,
        num_pointers: int,
        scalars: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cluster: Dim | None = None,
        dependent: bool = False,
    ) -> None:
        self.kernel, self.grid = kernel, grid
        self._block, self._shared_bytes, self._cluster, self._dependent = block, shared_bytes, cluster, dependent
        self._device_index = kernel.device_index
        kernel.set_max_shared(shared_bytes)
        self._packer = _Packer((ctypes.c_void_p,) * num_pointers + _signature(scalars))
        self._packer.pack([ctypes.c_void_p()] * num_pointers + list(scalars))
        self._values = self._packer.address
        self._pointers = self._packer.words(num_pointers)
        self._stream = -1
        self._config: Any = None
        self._overlaps = False

    def __call__(self, *addresses: int) -> None:
        """Launch on the current stream with these addresses (0: a null pointer)."""
        if current_device() != self._device_index:
            with torch.cuda.device(self._device_index):
                self(*addresses)
            return
        stream = current_raw_stream(self._device_index)
        if stream != self._stream or self._overlaps != DEPENDENT_LAUNCHES:
            self._configure(stream)
        self._pointers[:] = [*addresses]
        (code,) = self.kernel._launch_ex(self._config, self.kernel._function, self._values, 0)
        if code:
            raise KernelLaunchError(
                f"launch of {self.kernel.name} failed: {code.name} ({int(code)}); grid={self.grid}, "
                f"block={self._block}, shared_bytes={self._shared_bytes}, cluster={self._cluster}"
            )

    def _configure(self, stream: int) -> None:
        ensure_context(self._device_index)
        dependent = self._dependent and self.kernel._takes_dependents and DEPENDENT_LAUNCHES
        key = (self.grid, self._block, self._shared_bytes, stream, self._cluster, dependent)
        self._config = self.kernel._configure(*key)
        self._stream, self._overlaps = stream, DEPENDENT_LAUNCHES


def _three(dim: Dim) -> tuple[int, int, int]:
    if isinstance(dim, int):
        return dim, 1, 1
    return (*dim, 1, 1)[:3]


def memcpy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue a copy between two addresses, on the device or in host memory, on a raw stream of the current device.

    The driver's call without torch's tensors around it: copying many pieces costs a fifth of the host's time. It may be
    the first call of its thread, as in an engine's thread whose model was loaded by another.
    """
    from cuda.bindings import driver

    device = current_device()
    if device not in _thread.devices:
        ensure_context(device)
    check(driver.cuMemcpyAsync(target, source, num_bytes, stream), f"copy of {num_bytes} bytes")


_TENSOR_MAP_TYPES = {
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.uint8: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
    torch.int32: "CU_TENSOR_MAP_DATA_TYPE_INT32",
}


def tensor_map(
    base: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle_bytes: int = 0,
    l2_promotion_bytes: int = 256,
) -> bytes:
    """A CUtensorMap (128 bytes, for a ``const __grid_constant__ CUtensorMap`` parameter) over `base`'s memory.

    `shape`, `strides` and `box` are in elements and in torch's order, outermost first; the innermost stride must be 1.
    Elements outside `shape` read as zeros. `swizzle_bytes`: 0, 32, 64 or 128. Limits (driver API,
    cuTensorMapEncodeTiled): 1 to 5 dimensions, base and outer strides multiples of 16 bytes, box sides at most 256,
    and with a swizzle the innermost box side at most `swizzle_bytes`. Raises ValueError or :class:`KernelLaunchError`.
    """
    from cuda.bindings import driver

    rank = len(shape)
    if not 1 <= rank <= 5 or len(strides) != rank or len(box) != rank:
        raise ValueError(f"tensor_map: shape, strides and box need 1 to 5 equal ranks, got {shape}, {strides}, {box}")
    if strides[-1] != 1:
        raise ValueError(f"tensor_map: the innermost stride must be 1, got strides={tuple(strides)}")
    size = base.element_size()
    encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, _TENSOR_MAP_TYPES[base.dtype]),
        rank,
        base.data_ptr(),
        [driver.cuuint64_t(extent) for extent in reversed(shape)],
        [driver.cuuint64_t(stride * size) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(side) for side in reversed(box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(
            driver.CUtensorMapSwizzle,
            f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle_bytes}B' if swizzle_bytes else 'NONE'}",
        ),
        getattr(
            driver.CUtensorMapL2promotion,
            f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{l2_promotion_bytes}B' if l2_promotion_bytes else 'NONE'}",
        ),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    mapped = check(encoded, f"cuTensorMapEncodeTiled shape={tuple(shape)} strides={tuple(strides)} box={tuple(box)}")
    return ctypes.string_at(mapped.getPtr(), 128)
