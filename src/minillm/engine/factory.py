"""Assembly of an engine, in one place: model, tokenizer, KV pool, swap space, runner, scheduler, step loop."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.config import GIB
from minillm.core.errors import ConfigError, InvalidParameterError, MiniLLMError, ModelLoadError, shorten
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.devices import resolve_device
from minillm.engine.inputs import InputProcessor
from minillm.engine.llm_engine import LLMEngine
from minillm.engine.output_processor import OutputProcessor
from minillm.engine.process import after_loading
from minillm.models.chat_template import load_chat_template

if TYPE_CHECKING:
    from minillm.core.observer import Observer
    from minillm.memory.paged_kv_cache import KVCacheSpec
    from minillm.models.loader import LoadedModel
    from minillm.models.tokenizer import Tokenizer
    from minillm.runner.interface import ModelRunner
    from minillm.runner.pytorch_model_runner import PyTorchModelRunner

logger = logging.getLogger("minillm.engine")

DEFAULT_SWAP_GIB = 4.0

_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of a generation_config.json that set sampling defaults, and the fields they set (vLLM's list)."""


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What the assembly needs to know of a model and the memory around it. Sizes in tokens and blocks."""

    name: str
    path: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    num_swap_blocks: int


@dataclass(frozen=True, kw_only=True)
class ModelInfo(ModelLimits):
    """What was loaded and how much room it has.

    `max_model_len` is what holds; `max_model_len_reduced` says that the KV pool, not the model, sets it.
    """

    max_model_len_reduced: bool
    block_size: int


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An assembled engine and what its users' side needs."""

    config: EngineConfig
    engine: LLMEngine
    inputs: InputProcessor
    model_info: ModelInfo


def build_engine(
    config: EngineConfig,
    *,
    observer: Observer | None = None,
    progress: Callable[[str], None] | None = None,
    model: LoadedModel | None = None,
    tokenizer: Tokenizer | None = None,
) -> EngineParts:
    """Load the model and assemble its engine.

    Raises :class:`ConfigError` for settings that do not fit the model or this machine, :class:`ModelLoadError` for a
    model that cannot be loaded, :class:`KernelBuildError` where a GPU's kernels cannot be built. `progress` is told in
    one line what takes long. `model` and `tokenizer`, where given, are used instead of loading (several engines may
    share them: nothing in them changes); the engine then runs where the model is.
    """
    check_names(config)
    from minillm.models.default_model import resolve_model
    from minillm.models.loader import load_model
    from minillm.runner.device import is_device_failure

    with ThreadPoolExecutor(1, "minillm-tokenizer") as pool:
        reading: Future[Tokenizer] | None = None
        if tokenizer is None:
            if config.tokenizer is not None:
                path = resolve_model(config.tokenizer, progress, "tokenizer").path
            else:
                path = model.path if model is not None else resolve_model(config.model, progress).path
            reading = pool.submit(_read_tokenizer, path)
        device = resolve_device(config.device) if model is None else _device_of(model, config)
        if model is None:
            model = load_model(config.model, config.dtype, device, progress)
        if reading is not None:
            tokenizer = reading.result()
    assert tokenizer is not None
    # Ids that the logits do not have cannot be sampled, nor masked.
    named_eos = {*model.config.eos_token_ids, *tokenizer.eos_token_ids}
    eos_ids = {token_id for token_id in named_eos if 0 <= token_id < model.config.vocab_size}
    limits = _limits(config, model, device)
    try:
        limits, runner = _make_runner(config, model, limits, tokenizer, eos_ids)
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        if isinstance(error, MiniLLMError) or is_device_failure(error):
            raise
        sizes = f"block_size={config.block_size}, num_blocks={limits.num_blocks}, max_num_seqs={config.max_num_seqs}"
        raise ConfigError(f"{sizes} do not fit this machine's memory: {shorten(str(error))}") from error
    parts = assemble_engine(
        config,
        limits,
        runner,
        tokenizer,
        eos_token_ids=eos_ids,
        default_params=default_sampling_params(config.generation_config, model.generation_config),
        observer=observer,
        asynchronous=device != "cpu",
    )
    after_loading()
    return parts


def _read_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer, with the tables that texts are made from; beside the weights, which take longer."""
    from minillm.models.tokenizer import TextMode, load_tokenizer

    tokenizer = load_tokenizer(path)
    if tokenizer.text_mode is TextMode.BYTES:
        tokenizer.text_table(skip_special_tokens=True)
    return tokenizer


def _device_of(model: LoadedModel, config: EngineConfig) -> str:
    """Where a model that was loaded before is; ConfigError if the configuration names another device."""
    device = str(model.decoder.device)
    if config.device != "auto" and config.device.partition(":")[0] != model.decoder.device.type:
        raise ConfigError(f"device={config.device!r}, but the model given is on {device}")
    return device


def _make_runner(
    config: EngineConfig, model: LoadedModel, limits: ModelLimits, tokenizer: Tokenizer, eos_ids: set[int]
) -> tuple[ModelLimits, ModelRunner]:
    """The runner with its KV pool and swap space, and the limits with the pool's size if it had to be found out."""
    from minillm.memory.paged_kv_cache import PagedKVCache
    from minillm.memory.swap_space import SwapSpace
    from minillm.runner.pytorch_model_runner import PyTorchModelRunner

    spec = _kv_spec(config, model)
    invalid_ids = [i for i in range(limits.vocab_size) if not tokenizer.has_token(i)]

    def make(num_blocks: int, max_model_len: int, num_swap_blocks: int) -> PyTorchModelRunner:
        cache = PagedKVCache(spec, num_blocks, limits.device)
        swap = None
        if num_swap_blocks:
            swap = SwapSpace(cache, num_swap_blocks, pin_memory=config.pin_memory is not False)
        return PyTorchModelRunner(
            model.decoder,
            cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            swap_space=swap,
            eos_token_ids=sorted(eos_ids),
            invalid_token_ids=invalid_ids,
            max_num_batched_tokens=_max_num_batched_tokens(config, limits.device),
            enforce_eager=config.enforce_eager,
        )

    if limits.device == "cpu":
        longest = min(limits.max_model_len, limits.num_blocks * config.block_size)
        return limits, make(limits.num_blocks, longest, limits.num_swap_blocks)
    return _make_gpu_runner(config, limits, spec, make)


def _max_num_batched_tokens(config: EngineConfig, device: str) -> int:
    """Tokens of the largest step, whatever the size of the pool."""
    return config.scheduler_config(
        num_blocks=1, num_swap_blocks=0, max_model_len=1, device=device
    ).max_num_batched_tokens


def _make_gpu_runner(
    config: EngineConfig,
    limits: ModelLimits,
    spec: KVCacheSpec,
    make: Callable[[int, int, int], PyTorchModelRunner],
) -> tuple[ModelLimits, ModelRunner]:
    """The same on a GPU: the largest step is run before any request is, on a pool of one block to find the size of the
    real one, or on the real one where its size was given."""
    from minillm.engine.gpu_memory import profiled_num_blocks
    from minillm.runner.largest_step import run_largest_step

    _keep_float32_exact(limits.dtype)
    max_tokens = _max_num_batched_tokens(config, limits.device)

    def try_out(runner: PyTorchModelRunner, max_model_len: int) -> None:
        run_largest_step(
            runner,
            max_num_seqs=config.max_num_seqs,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )

    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = profiled_num_blocks(
            lambda: make(1, limits.max_model_len, 0),
            lambda runner: try_out(runner, limits.max_model_len),
            device=limits.device,
            utilization=config.gpu_memory_utilization,
            spec=spec,
            num_swap_blocks=limits.num_swap_blocks,
        )
    longest = min(limits.max_model_len, num_blocks * config.block_size)
    runner = make(num_blocks, longest, limits.num_swap_blocks)
    if config.num_gpu_blocks_override is not None:
        try_out(runner, longest)
    runner.warm_up()
    return replace(limits, num_blocks=num_blocks), runner


def _keep_float32_exact(dtype: str) -> None:
    """float32 is the exact path: its products must not be rounded to TF32 by a setting made elsewhere."""
    import torch

    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        logger.warning("dtype=float32: torch's float32 matmul precision is set to 'highest' (no TF32) in this process")
        torch.set_float32_matmul_precision("highest")


def assemble_engine(
    config: EngineConfig,
    limits: ModelLimits,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    *,
    eos_token_ids: Iterable[int],
    default_params: SamplingParams | None = None,
    observer: Observer | None = None,
    asynchronous: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> EngineParts:
    """Put scheduler, step loop and input and output processing around a runner, whichever it is.

    `asynchronous` says that the runner works while the host does; it decides about overlap where the configuration
    does not.
    """
    from minillm.core.scheduler import ContinuousScheduler
    from minillm.core.static_scheduler import StaticScheduler
    from minillm.engine.stop_checker import TextStream

    scheduler_config = config.scheduler_config(
        num_blocks=limits.num_blocks,
        num_swap_blocks=limits.num_swap_blocks,
        max_model_len=limits.max_model_len,
        device=limits.device,
    )
    kind = StaticScheduler if config.scheduler == "static" else ContinuousScheduler
    scheduler = kind(scheduler_config, observer=observer)
    if scheduler_config.max_model_len_reduced:
        logger.warning(
            "max_model_len is %d, not %d: the KV pool has %d blocks of %d tokens",
            scheduler_config.effective_max_model_len,
            limits.max_model_len,
            limits.num_blocks,
            config.block_size,
        )
    outputs = OutputProcessor(
        lambda params, prompt_ids: TextStream(tokenizer, params, prompt_ids),
        lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
    )
    engine = LLMEngine(
        scheduler,
        runner,
        outputs,
        overlap=asynchronous if config.overlap is None else config.overlap,
        check_invariants=config.check_invariants,
        clock=clock,
    )
    inputs = InputProcessor(
        tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=frozenset(eos_token_ids),
        default_params=default_params,
        chat_template=_chat_template(config),
        seed=config.seed,
    )
    held = replace(limits, max_model_len=scheduler_config.effective_max_model_len)
    reduced = scheduler_config.max_model_len_reduced
    info = ModelInfo(**asdict(held), max_model_len_reduced=reduced, block_size=config.block_size)
    return EngineParts(config, engine, inputs, info)


def check_names(config: EngineConfig) -> None:
    """Refuse what names nothing (a policy, a template file) before the model is loaded."""
    from minillm.core.policies import get_queue_policy, get_victim_policy

    get_queue_policy(config.scheduling_policy)
    get_victim_policy(config.victim_policy)
    _chat_template(config)


def default_sampling_params(source: str, model_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults: of the model ("auto"), the neutral ones ("vllm"), or of a folder's generation_config.json."""
    if source == "vllm":
        return SamplingParams()
    values = model_config
    if source != "auto":
        try:
            path = Path(source).expanduser() / "generation_config.json"
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: nested without end; no such user's home
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"generation_config={shorten(source)}: its file cannot be read: {why}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"generation_config={shorten(source)}: {path} is not a JSON object")
    given = {field: values[key] for key, field in _SAMPLING_DEFAULTS.items() if values.get(key) is not None}
    try:
        return replace(SamplingParams(), **given)
    except InvalidParameterError as error:
        raise ModelLoadError(f"generation_config of the model: {error}") from error


def _chat_template(config: EngineConfig) -> str | None:
    return None if config.chat_template is None else load_chat_template(config.chat_template)


def _kv_spec(config: EngineConfig, model: LoadedModel) -> KVCacheSpec:
    import torch

    from minillm.runner.pytorch_model_runner import kv_cache_spec

    spec = kv_cache_spec(model.decoder, config.block_size)
    return spec if config.kv_cache_dtype == "auto" else replace(spec, dtype=getattr(torch, config.kv_cache_dtype))


def _limits(config: EngineConfig, model: LoadedModel, device: str) -> ModelLimits:
    """Sizes of the context, the pool (0: to be found out on the GPU) and the swap space."""
    from minillm.memory.paged_kv_cache import available_memory, default_num_blocks
    from minillm.memory.swap_space import SwapSpace

    longest = model.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's {longest} positions")
    max_model_len = config.max_model_len if config.max_model_len is not None else longest
    spec = _kv_spec(config, model)
    num_blocks = config.num_gpu_blocks_override or 0
    if not num_blocks and device == "cpu":
        num_blocks = default_num_blocks(spec, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)
    swap_gib = config.swap_space
    if swap_gib is None:
        swap_gib = min(DEFAULT_SWAP_GIB, available_memory() / 8 / GIB)
    return ModelLimits(
        name=model.name,
        path=str(model.path),
        architecture=model.config.architecture,
        dtype=model.dtype,
        device=device,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_swap_blocks=SwapSpace.slots_within(spec, swap_gib),
    )
