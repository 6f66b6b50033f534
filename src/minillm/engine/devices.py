"""Which device an engine runs on."""

from __future__ import annotations

import logging

from minillm.core.errors import ConfigError

logger = logging.getLogger("minillm.engine")

MIN_CAPABILITY = (8, 0)
"""Of a GPU; older ones have no bfloat16 and no asynchronous copies to shared memory."""


def resolve_device(device: str) -> str:
    """The device to run on: "cpu", or "cuda:N".

    "auto" is the first GPU if it can be used, else the CPU (with a warning where a GPU is there but something is
    missing). Raises :class:`ConfigError` for a GPU that is not here or cannot be used, with the reason.
    """
    if device == "cpu":
        return "cpu"
    if device == "auto":
        problem = gpu_problem(0)
        if problem is None:
            return "cuda:0"
        if has_gpu():
            logger.warning("the GPU is not used, the model runs on the CPU: %s", problem)
        return "cpu"
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not (index.isascii() and index.isdigit())):
        raise ConfigError(f"device={device!r} must be auto, cpu, cuda or cuda:N")
    number = int(index or 0)
    problem = gpu_problem(number)
    if problem is not None:
        raise ConfigError(f"device={device!r} cannot be used: {problem}")
    return f"cuda:{number}"


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_problem(index: int) -> str | None:
    """Why GPU number `index` cannot be used and what to do about it; None if it can."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build (https://pytorch.org/get-started)"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU that works; `minillm doctor` shows what is there"
    count = torch.cuda.device_count()
    if index >= count:
        return f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        name, least = torch.cuda.get_device_name(index), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; {least} or newer is needed"
    return kernels_problem()


def kernels_problem() -> str | None:
    """Why CUDA kernels can be neither compiled nor found compiled; None if they can."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except Exception as error:
        return f"cuda-bindings is missing ({error}); pip install 'minillm-runtime[cuda]'"
    from minillm.attention.cuda_build import cached_kernels, nvrtc_version

    if nvrtc_version() is None and not cached_kernels():
        return "NVRTC, which compiles the kernels, is missing; pip install 'minillm-runtime[cuda]'"
    return None
