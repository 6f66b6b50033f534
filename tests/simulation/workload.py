"""Random settings and requests of a simulation, from one `random.Random` only: a seed is a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from minillm.core.config import SchedulerConfig
from minillm.core.sampling_params import SamplingParams

QUEUE_POLICIES = ("priority", "priority", "priority", "fcfs", "fcfs", "shortest_prompt", "fair")
VICTIM_POLICIES = ("lifo", "fifo", "largest", "cost_based")
SALTS = (None, None, None, "a", "b")
USERS = ("", "ann", "bob")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """One run's scheduler and how the world around it behaves. The rates are probabilities per step."""

    config: SchedulerConfig
    static: bool = False
    overlap: bool = False
    constant_hash: bool = False
    """Every prefix hash is the same: only the token comparison keeps prefixes apart."""
    vocab_size: int = 8
    arrival_rate: float = 0.3
    burst: int = 1
    """Usual number of requests that arrive together."""
    max_live: int = 10
    max_new_tokens: int = 20
    prompt_share: float = 0.67
    """Longest usual prompt as a share of the longest possible: short prompts are admitted easily and then grow."""
    stop_rate: float = 0.5
    """Share of requests with stop token ids (EOS aside)."""
    group_rate: float = 0.1
    cancel_rate: float = 0.0
    fault_rate: float = 0.0
    swap_fault_rate: float = 0.0
    string_stop_rate: float = 0.0
    deadline_rate: float = 0.0
    bad_request_rate: float = 0.0
    prompt_logprobs_rate: float = 0.0
    reset_rate: float = 0.0
    engine_failure_rate: float = 0.0
    id_reuse_rate: float = 0.0
    timing_rate: float = 0.0
    logprobs_rate: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestSpec:
    """All that makes a request, before it is one."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    user: str = ""
    cache_salt: str | None = None
    deadline_in: float | None = None
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    string_stop: tuple[int, int] | None = None
    """(output index at whose end a stop string is found, tokens delivered after it before anyone notices)."""


def random_settings(rng: Random) -> SimSettings:
    """Settings for one seed: small pools, tight limits, every policy, faults in half of the runs.

    One run in fifty has a crowd instead (up to 160 live requests), for what only happens to large heaps and batches.
    """
    settings = _small_settings(rng)
    if rng.random() >= 1 / 50:
        return settings
    size = settings.config.block_size
    num_blocks = rng.randint(800, 2000) // size + 1
    max_num_seqs = rng.choice((16, 48))
    config = replace(
        settings.config,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice((1, 64, 256)),
        max_prefill_tokens_per_step=None,
        max_model_len=rng.choice((60, 200)),
        num_swap_blocks=rng.choice((0, num_blocks // 8, num_blocks)),
        max_waiting=None,
    )
    return replace(
        settings, config=config, max_live=160, arrival_rate=0.9, burst=8, max_new_tokens=60, deadline_rate=0.3
    )


def _small_settings(rng: Random) -> SimSettings:
    block_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16, 32))
    capacity = rng.randint(8, rng.choice((24, 60, 160)))
    num_blocks = min(44, max(1, capacity // block_size) + rng.randint(0, 3))
    max_num_seqs = rng.randint(1, 8)
    swapping = rng.random() < 0.65
    budget = max_num_seqs + rng.choice((0, 0, 1, 3, 8, 16, 64))
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_tokens_per_step=rng.choice((None, None, 1, 2, 5, 16)),
        max_model_len=rng.choice((1 << 30, 1 << 30, max(2, capacity // 2), capacity)),
        num_swap_blocks=rng.choice((1, 2, 5, num_blocks, 2 * num_blocks)) if swapping else 0,
        max_swapped_requests=rng.choice((None, None, 1, 2)) if swapping else rng.choice((None, 0)),
        preemption_mode=rng.choice(("auto", "auto", "swap", "recompute")),
        queue_policy=rng.choice(QUEUE_POLICIES),
        victim_policy=rng.choice(VICTIM_POLICIES),
        enable_prefix_caching=rng.random() < 0.75,
        watermark_blocks=rng.choice((0, 0, 1, 1, 2, 4)),
        ageing_interval=rng.choice((None, None, 0.05, 0.5, 5.0)),
        max_preemptions=rng.choice((0, 1, 2, 8)),
        max_waiting=rng.choice((None, None, None, 6)),
        user_weights=rng.choice(({}, {"ann": 3.0, "bob": 0.5})),
    )
    faulty = rng.random() < 0.5
    pressing = rng.random() < 0.5
    return SimSettings(
        config=config,
        static=rng.random() < 0.08,
        overlap=rng.random() < 0.5,
        constant_hash=rng.random() < 0.1,
        vocab_size=rng.choice((2, 4, 8, 8, 50)),
        arrival_rate=rng.choice((0.1, 0.2, 0.4)) if pressing else rng.choice((0.05, 0.1, 0.2)),
        max_live=rng.choice((6, 10, 14)) if pressing else rng.choice((3, 6, 10)),
        max_new_tokens=capacity if pressing else rng.choice((4, 10, 20, 40)),
        prompt_share=rng.choice((0.1, 0.25, 0.67)) if pressing else 0.67,
        stop_rate=0.1 if pressing else 0.5,
        group_rate=rng.choice((0.0, 0.05, 0.2)),
        cancel_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
        fault_rate=rng.choice((0.0, 0.01, 0.05)) if faulty else 0.0,
        swap_fault_rate=rng.choice((0.0, 0.1, 0.5)) if faulty else 0.0,
        string_stop_rate=rng.choice((0.0, 0.1, 0.3)),
        deadline_rate=rng.choice((0.0, 0.0, 0.1)),
        bad_request_rate=rng.choice((0.0, 0.02)),
        prompt_logprobs_rate=rng.choice((0.0, 0.0, 0.1)),
        reset_rate=rng.choice((0.0, 0.0, 0.005)),
        engine_failure_rate=0.002 if faulty and rng.random() < 0.3 else 0.0,
        id_reuse_rate=rng.choice((0.0, 0.2)),
        timing_rate=rng.choice((0.0, 0.3)),
        logprobs_rate=rng.choice((0.0, 0.0, 0.5)),
    )


@dataclass(slots=True)
class Workload:
    """Makes requests that share prefixes, come back with their own output, and stop in every way."""

    settings: SimSettings
    rng: Random
    bases: list[list[int]] = field(default_factory=list)
    past: list[list[int]] = field(default_factory=list)
    """Prompt + output of some ended requests: a second turn continues from them."""

    def __post_init__(self) -> None:
        config, rng = self.settings.config, self.rng
        length = min(config.effective_max_model_len, 120)
        self.bases = [[rng.randrange(self.settings.vocab_size) for _ in range(length)] for _ in range(3)]

    def remember(self, tokens: list[int]) -> None:
        """Let a later request continue from these tokens."""
        self.past.append(tokens)
        if len(self.past) > 4:
            self.past.pop(self.rng.randrange(4))

    def _prompt(self, limit: int) -> list[int]:
        rng, vocab = self.rng, self.settings.vocab_size
        kind = rng.random()
        if kind < 0.3 and self.past:
            prompt = list(rng.choice(self.past)[:limit])
        elif kind < 0.8:
            prompt = rng.choice(self.bases)[: rng.randint(1, limit)]
        else:
            prompt = []
        for _ in range(min(rng.randint(0, 3) if prompt else rng.randint(1, limit), limit - len(prompt))):
            prompt.append(rng.randrange(vocab))
        return prompt

    def request(self) -> RequestSpec:
        """A random request that fits the limits (the scheduler may still refuse it: full queue, too large a group)."""
        settings, rng = self.settings, self.rng
        config = settings.config
        limit = config.effective_max_model_len
        usual = max(1, min(limit - 1, round(limit * settings.prompt_share)))
        prompt = self._prompt(limit if rng.random() < 0.03 else limit - 1 if rng.random() < 0.1 else usual)
        room = limit - len(prompt)
        max_tokens = min(room, rng.randint(1, settings.max_new_tokens))
        if room == 0 or rng.random() < 0.1:
            max_tokens = None
        scored = rng.random() < settings.prompt_logprobs_rate
        if scored and rng.random() < 0.3:
            max_tokens = 0
        number = rng.randint(1, 2) if rng.random() < settings.stop_rate else 0
        stops = tuple(rng.randrange(settings.vocab_size) for _ in range(number))
        if settings.vocab_size <= 2:
            stops = stops[:1]
        eos = (0,) if rng.random() < 0.5 * settings.stop_rate and settings.vocab_size > 2 else ()
        params = SamplingParams(
            n=rng.randint(2, 4) if rng.random() < settings.group_rate else 1,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(3, 1 if max_tokens is None else max_tokens)) if rng.random() < 0.3 else 0,
            stop_token_ids=stops,
            ignore_eos=rng.random() < 0.3,
            prompt_logprobs=1 if scored else None,
        )
        stop_at = None
        if rng.random() < settings.string_stop_rate:
            stop_at = (rng.randint(0, max(0, (max_tokens or 8) - 1)), rng.randint(0, 3))
        return RequestSpec(
            prompt=prompt,
            params=params,
            priority=rng.choice((0, 0, 0, 0, -1, 1, 2)),
            user=rng.choice(USERS),
            cache_salt=rng.choice(SALTS),
            deadline_in=rng.uniform(0.0, 0.5) if rng.random() < settings.deadline_rate else None,
            seed=rng.randrange(1 << 32),
            eos_token_ids=eos,
            string_stop=stop_at,
        )

    def bad_request(self) -> RequestSpec:
        """A request that must be refused: it can never fit, or it is empty."""
        rng, limit = self.rng, self.settings.config.effective_max_model_len
        kind = rng.randrange(3)
        if kind == 0:
            return RequestSpec(prompt=[], params=SamplingParams(max_tokens=1))
        if kind == 1:
            return RequestSpec(prompt=[1] * (limit + rng.randint(1, 3)), params=SamplingParams(max_tokens=1))
        prompt = [1] * rng.randint(1, limit)
        return RequestSpec(prompt=prompt, params=SamplingParams(max_tokens=limit - len(prompt) + 1))
