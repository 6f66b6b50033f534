"""The step loop in its shortest form, and tiny random models: what runner tests drive the scheduler with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from minillm.core.config import SchedulerConfig
from minillm.core.plan import NoPlan, StepOutcome, TokenLogprobs
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.scheduler import ContinuousScheduler
from minillm.memory.paged_kv_cache import PagedKVCache
from minillm.memory.swap_space import SwapSpace
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.runner.pytorch_model_runner import PyTorchModelRunner, kv_cache_spec

VOCAB = 131


@cache
def tiny_reference(heads: int = 9, kv_heads: int = 3, seed: int = 0) -> Any:
    """A random Llama of Transformers (float32, eager attention), its products of order one."""
    import transformers

    hidden = heads * 8
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=1.2 / hidden**0.5,
        tie_word_embeddings=False,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def decoder_of(reference: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Our decoder with the reference's weights."""
    decoder = Decoder(ModelConfig.from_hf(reference.config.to_dict()), dtype, device)
    weights = reference.state_dict()
    with torch.no_grad():
        for name, view in decoder.weight_views().items():
            view.copy_(weights[name])
    return decoder


def windowed_reference() -> Any:
    """A random Mistral whose layers see 12 positions."""
    import transformers

    torch.manual_seed(3)
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=12,
            initializer_range=0.15,
            attn_implementation="eager",
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def wide_head_reference(head_dim: int = 32) -> Any:
    """A random Qwen3 with head_dim 32 where hidden / heads is 16, and q/k norms."""
    import transformers

    torch.manual_seed(4)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            initializer_range=0.15,
            attn_implementation="eager",
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def generate(reference: Any, ids: list[int], new_tokens: int) -> list[int]:
    """Greedy generation by Transformers itself."""
    prompt = torch.tensor([ids])
    out = reference.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(ids) :].tolist()


@cache
def greedy_reference(ids: tuple[int, ...], new_tokens: int, heads: int = 9, kv_heads: int = 3) -> list[int]:
    """Transformers' own greedy generation on :func:`tiny_reference`."""
    return generate(tiny_reference(heads, kv_heads), list(ids), new_tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Loop:
    """A scheduler and a runner over one pool. `run` drives them until all is done."""

    model: Any
    num_blocks: int = 64
    block_size: int = 8
    num_swap_blocks: int = 0
    max_model_len: int = 512
    overlap: bool = False
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    runner_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_swap_blocks=self.num_swap_blocks,
            max_model_len=self.max_model_len,
            **{"max_num_seqs": 16, **self.options},
        )
        cache_ = PagedKVCache(kv_cache_spec(self.model, self.block_size), self.num_blocks, self.device)
        self.cache = cache_
        self.scheduler = ContinuousScheduler(config)
        self.runner = PyTorchModelRunner(
            self.model,
            cache_,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.effective_max_model_len,
            swap_space=SwapSpace(cache_, self.num_swap_blocks) if self.num_swap_blocks else None,
            **self.runner_options,
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprobs | None]] = defaultdict(list)
        self.prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = defaultdict(dict)
        self.finished: dict[str, tuple[str, str | None]] = {}
        self.outcomes: list[StepOutcome] = []
        self.now = 0.0

    def submit(self, request_id: str, ids: list[int], *, seed: int = 0, priority: int = 0, **params: Any) -> Request:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
        request = Request(request_id, ids, sampling, seed=seed, priority=priority, arrival_time=self.now)
        self.scheduler.submit(request, self.now)
        return request

    def run(self, max_steps: int = 2000, *, to_the_end: bool = True) -> dict[str, list[int]]:
        """All tokens so far, after as many steps or, with `to_the_end`, when every request has ended."""
        in_flight: list[tuple[Any, Any]] = []
        for _ in range(max_steps):
            self.now += 1.0
            plan = self.scheduler.schedule(self.now)
            if isinstance(plan, NoPlan):
                if not in_flight:
                    break
                self._commit(*in_flight.pop(0))
                continue
            handle = self.runner.forward(plan)
            if in_flight:
                self._commit(*in_flight.pop(0))
            self.runner.sample(handle)
            in_flight.append((plan, handle))
            if not self.overlap:
                self._commit(*in_flight.pop(0))
        for plan, handle in in_flight:
            self._commit(plan, handle)
        assert not to_the_end or not self.scheduler.has_live_requests
        return dict(self.tokens)

    def _commit(self, plan: Any, handle: Any) -> None:
        outcome = self.runner.collect(handle)
        self.outcomes.append(outcome)
        events = self.scheduler.commit(plan, outcome, self.now)
        for event in events.tokens:
            assert event.index == len(self.tokens[event.request_id])
            self.tokens[event.request_id].append(event.token_id)
            self.logprobs[event.request_id].append(event.logprobs)
        for scored in events.prompt_logprobs:
            for position, entry in enumerate(scored.entries, scored.start):
                assert position not in self.prompt_logprobs[scored.request_id]
                self.prompt_logprobs[scored.request_id][position] = entry
        for end in events.finished:
            self.finished[end.request_id] = (end.reason, end.error)
