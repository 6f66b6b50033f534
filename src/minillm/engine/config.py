"""Configuration of an engine: vLLM's keyword names where it has them; read once, validated, immutable."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from minillm.core.config import PREEMPTION_MODES, SchedulerConfig
from minillm.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
CPU_BATCHED_TOKENS = 512
GPU_BATCHED_TOKENS = 8192
SCHEDULERS = ("continuous", "static")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is built from. Sizes in tokens, blocks, GiB or seconds as said.

    An unknown keyword raises :class:`ConfigError` that names it and near matches; nothing is dropped silently.

    Model and text:

    - ``model``: a built-in name, a folder, a GGUF file or a hub id. ``tokenizer``: None takes the model's own.
    - ``device``: "auto" is the first GPU that can be used, else the CPU; or "cpu", "cuda", "cuda:1".
    - ``dtype``: "auto" is what is fastest on the device (on a GPU bfloat16, or float16 for a checkpoint in that);
      "float32" is the exact path.
    - ``chat_template``: a file or the template's text; None takes the model's own.
    - ``generation_config``: "auto" takes sampling defaults from the model, "vllm" the neutral ones of
      :class:`SamplingParams`, anything else names a folder with a generation_config.json. EOS ids always come from
      the model.
    - ``seed``: unseeded requests draw their seeds from a generator that starts here; None starts it at random.

    Memory:

    - ``max_model_len``: longest prompt + output; None takes the model's. Reduced to what the KV pool holds.
    - ``num_gpu_blocks_override``: number of KV blocks (on a CPU too); None sizes the pool from free memory:
      on a GPU what ``gpu_memory_utilization`` of its memory leaves beside the weights and the largest step, which is
      run once to find out; on a CPU the smaller of a quarter of free memory and
      ``max_num_seqs * max_model_len`` tokens.
    - ``swap_space``: GiB of host memory for swapped requests, 0 disables swapping; None is 4, or an eighth of free
      memory if that is less. ``max_swapped_requests`` bounds it in requests too.
    - ``pin_memory``: None pins the swap pool when there is a GPU.

    Scheduling:

    - ``max_num_seqs``, ``max_num_batched_tokens``: sequences and tokens of a step; None is 8192 tokens on a GPU (fewer
      leave it idle between the kernels of a small model), 512 on a CPU (a longer chunk is no faster there and holds up
      running decodes), and never less than ``max_num_seqs``.
    - ``max_prefill_tokens_per_step`` throttles prefill further, so that running decodes keep their pace.
    - ``scheduler``: "continuous", or "static" (the baseline). ``scheduling_policy`` orders the queue,
      ``victim_policy`` chooses whom memory pressure preempts, ``preemption_mode`` how.
    - ``user_weights``: shares of users under the `fair` policy; 1 for those that are not named.
    - ``max_waiting``: bound of the queue in requests (:class:`QueueFullError` beyond it); None is unbounded.
    - ``overlap``: whether step n+1 is scheduled while step n runs; None turns it on where the device works
      asynchronously (a GPU).
    - ``check_invariants``: check the core after every step and log what is wrong (slow).
    - ``enforce_eager``: no captured CUDA graphs; decode steps are launched kernel by kernel (a CPU never has any).
    """

    model: str = "smollm2-135m"
    _: KW_ONLY
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    seed: int | None = 0
    chat_template: str | None = None
    generation_config: str = "auto"

    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    swap_space: float | None = None
    max_swapped_requests: int | None = None
    pin_memory: bool | None = None

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_prefill_tokens_per_step: int | None = None
    scheduler: str = "continuous"
    scheduling_policy: str = "priority"
    victim_policy: str = "lifo"
    preemption_mode: str = "auto"
    ageing_interval: float | None = None
    watermark_blocks: int = 1
    max_preemptions: int = 8
    user_weights: Mapping[str, float] | None = None
    max_waiting: int | None = None
    overlap: bool | None = None
    check_invariants: bool = False
    enforce_eager: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> EngineConfig:
        """Refuse unknown keywords by name before dataclass' own `__init__` sees them."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ConfigError(f"{name} is not a known option{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        object.__setattr__(self, "kv_cache_dtype", DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype))
        self._one_of("dtype", DTYPES)
        self._one_of("kv_cache_dtype", KV_CACHE_DTYPES)
        self._one_of("scheduler", SCHEDULERS)
        self._one_of("preemption_mode", PREEMPTION_MODES)
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
            raise ConfigError(f"device={self.device!r} must be auto, cpu, cuda or cuda:N")
        if not self.model:
            raise ConfigError("model='' must name a model")
        for name in ("max_model_len", "num_gpu_blocks_override", "max_waiting"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1, or None")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]")
        if self.swap_space is not None and not 0 <= self.swap_space < 1 << 20:
            raise ConfigError(f"swap_space={self.swap_space} must be a number of GiB >= 0, or None")
        self.scheduler_config(num_blocks=1, num_swap_blocks=0, max_model_len=1)

    def _check_types(self) -> None:
        """Refuse values of the wrong type, by the annotations: a string "8" is not a number."""
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = field.type.split(" | ") if isinstance(field.type, str) else []
            if value is None and "None" in allowed:
                continue
            matches = {
                "bool": isinstance(value, bool),
                "int": isinstance(value, int) and not isinstance(value, bool),
                "float": isinstance(value, int | float) and not isinstance(value, bool),
                "str": isinstance(value, str),
                "Mapping[str, float]": isinstance(value, Mapping),
            }
            if not any(matches.get(name, False) for name in allowed):
                raise ConfigError(f"{field.name}={value!r} must be of type {field.type}")

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")

    def scheduler_config(
        self, *, num_blocks: int, num_swap_blocks: int, max_model_len: int, device: str = "cpu"
    ) -> SchedulerConfig:
        """The scheduler's part of this configuration, for a pool of this size; validates the shared limits.

        Not `max_waiting`: the bound holds where callers submit, before the engine thread takes over.
        """
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(self.max_num_seqs, CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS)
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens_per_step=self.max_prefill_tokens_per_step,
            max_model_len=max_model_len,
            num_swap_blocks=num_swap_blocks,
            max_swapped_requests=self.max_swapped_requests,
            preemption_mode=self.preemption_mode,
            queue_policy=self.scheduling_policy,
            victim_policy=self.victim_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark_blocks=self.watermark_blocks,
            ageing_interval=self.ageing_interval,
            max_preemptions=self.max_preemptions,
            user_weights=dict(self.user_weights or {}),
        )
