"""Configuration of the scheduling core: read once, validated, immutable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from minillm.core.errors import ConfigError

GIB = 1 << 30
PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of a scheduler. Sizes in tokens or blocks; times in seconds.

    - ``max_num_batched_tokens``: token budget of a step, shared by decodes and prefill chunks.
    - ``max_prefill_tokens_per_step``: the prefill throttle; None leaves only the shared budget.
    - ``max_model_len``: longest prompt + output; reduced to the pool's capacity (``max_model_len_reduced``).
    - ``num_swap_blocks``: host block slots (0 disables swapping). ``max_swapped_requests``: None is unbounded.
    - ``watermark_blocks``: blocks that an admission leaves free for running decodes (ignored when nothing runs).
    - ``ageing_interval``: a request gains one priority level per this many seconds of waiting; None is off.
      Bound: one of priority p is overtaken by a later one of priority q < p only if that arrived less than
      (p - q) * ageing_interval seconds after it.
    - ``max_preemptions``: at this many a request is chosen last where running requests need room, and no more for a
      waiting one.
    - ``max_waiting``: bound of the waiting queue; None is unbounded.
    - ``user_weights``: share of each user under the `fair` policy; 1 where not given.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_tokens_per_step: int | None = None
    max_model_len: int = 1 << 30
    num_swap_blocks: int = 0
    max_swapped_requests: int | None = None
    preemption_mode: str = "auto"
    queue_policy: str = "priority"
    victim_policy: str = "lifo"
    enable_prefix_caching: bool = True
    watermark_blocks: int = 1
    ageing_interval: float | None = None
    max_preemptions: int = 8
    max_waiting: int | None = None
    user_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_swap_blocks", "watermark_blocks", "max_preemptions"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("max_prefill_tokens_per_step", "max_swapped_requests", "max_waiting"):
            value = getattr(self, name)
            least = 0 if name == "max_swapped_requests" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}, or None")
        if self.ageing_interval is not None and not self.ageing_interval > 0:  # NaN too: it has no order
            raise ConfigError(f"ageing_interval={self.ageing_interval} must be a number of seconds > 0, or None")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(f"preemption_mode={self.preemption_mode!r} must be one of {', '.join(PREEMPTION_MODES)}")
        for user, weight in self.user_weights.items():
            if not isinstance(user, str) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(f"user_weights[{user!r}]={weight!r} must be a user's name and a finite number over 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def effective_max_model_len(self) -> int:
        """`max_model_len`, reduced to the pool's capacity."""
        return min(self.max_model_len, self.capacity_tokens)

    @property
    def max_model_len_reduced(self) -> bool:
        """Whether the pool's capacity, not the model, sets the limit."""
        return self.capacity_tokens < self.max_model_len
