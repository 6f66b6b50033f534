"""Decoder-only models that have no decoder here: Transformers' own layers over our paged attention.

Transformers calls attention through a registry of functions; ours hands q, k and v to the step's attention context
and returns what that computed. The model gets no Cache object and no mask: it runs over one flattened batch of T
tokens, with each token's own position, exactly as :class:`minillm.models.decoder.Decoder` does.

That is right only for a model that mixes tokens nowhere but in that call, and asks of it nothing that paged attention
does not compute. Both are found out when the model is loaded, by running it (:func:`_probe`), not by a list of names:

- each layer's call is recorded with its shapes and options; what is not understood is refused by name (an attention
  sink, a mask, a bias, K and V of different sizes, a layer without such a call: state-space and linear attention).
- with attention replaced by a function of the token alone, a permuted batch must give the permuted result: no
  convolution, recurrence or position counter is left anywhere in the model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.attention.interface import AttentionContext, LayerAttention
from minillm.core.errors import ModelLoadError, UnsupportedModelError

logger = logging.getLogger(__name__)

ATTENTION = "minillm_paged"
"""Name of our function in Transformers' registry. It is in none of its mask registry: so no mask is made."""

_OWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_IGNORED_OPTIONS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Keyword arguments of an attention call that change nothing here (dropout is off in evaluation)."""
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference that counts as rounding, relative to the largest value; a neighbour's influence is far above."""


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """What the engine reads of such a model. Sizes are counts of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call of the probe."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: LayerAttention


@dataclass(slots=True)
class _Layers:
    """Where the attention calls of a model go: to the probe's record, or to a step's attention context."""

    context: AttentionContext | None = None
    calls: list[_Call] = field(default_factory=list)
    order: dict[int, int] = field(default_factory=dict)
    """id of an attention module -> its layer, in the order of calls."""


class TransformersDecoder:
    """A Transformers causal language model behind the interface of the own decoder (`runner.DecoderModel`).

    Attributes:
        config: :class:`FallbackConfig`.
        dtype: of weights, activations, and of the keys and values given to attention.
        device: where the weights are.
        layer_attention: per attention layer, what the probe found.
    """

    def __init__(self, model: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Take over `model`, made with ``attn_implementation=ATTENTION``, in evaluation mode.

        Raises :class:`UnsupportedModelError` if it needs something that paged attention does not compute.
        """
        self.dtype = next(model.parameters()).dtype
        self.device = next(model.parameters()).device
        self._layers = _Layers()
        for module in model.modules():
            module.minillm_layers = self._layers
        try:
            with torch.inference_mode():
                probe = _Probe(model, self._layers)
                calls = probe.body_calls()
                self._base, self._head = _split(model)
                probe.check_head(self._base, self._head)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"model_type {model.config.model_type!r} is not supported: {error}") from None
        self.layer_attention = [call.params for call in calls]
        self.config = _config(model.config, calls, eos_token_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionContext) -> Tensor:
        """int64 [T], int64 [T] -> normalised hidden states [T, hidden_size] in ``dtype``."""
        self._layers.context = attn
        try:
            return _run(self._base, input_ids, positions)
        finally:
            self._layers.context = None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows [R, hidden_size] of :meth:`forward`'s result -> float32 logits [R, vocab_size]."""
        return self._head(hidden).float()


class _Body(nn.Module):
    """Stands where a causal model has its body, and returns hidden states that were computed before.

    So the head is the model's own code, with whatever it does beside the product (a soft cap, a scale).
    """

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self._output_type = output_type

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output_type(last_hidden_state=self.hidden)


def _body(model: Any) -> nn.Module:
    """The part of a causal model that makes hidden states."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    if not isinstance(base, nn.Module):
        raise UnsupportedModelError("its head cannot be told from its body")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedModelError("its body takes no position_ids")
    return base


def _split(model: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model's body, and its head as a function of hidden states [R, H]. The model is of no other use then."""
    base = _body(model)
    token = torch.zeros((1, 1), dtype=torch.int64, device=next(base.parameters()).device)
    body = _Body(type(base(input_ids=token, position_ids=token, use_cache=False)))
    setattr(model, model.base_model_prefix, body)

    def head(hidden: Tensor) -> Tensor:
        body.hidden = hidden[None]
        try:
            return model(input_ids=token, use_cache=False).logits[0]
        finally:
            body.hidden = None

    return base, head


def _run(base: nn.Module, input_ids: Tensor, positions: Tensor) -> Tensor:
    return base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: q [1, Hq, T, D], k and v [1, Hkv, T, D] -> ([1, T, Hq, D], no weights)."""
    layers: _Layers = module.minillm_layers  # type: ignore[assignment]
    if layers.context is None:
        return _record(layers, module, query, key, value, attention_mask, scaling, sliding_window, softcap, options)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return layers.context.attend(layers.order[id(module)], q, k, v)[None], None


def _record(
    layers: _Layers,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, None]:
    """Note what a layer asks for, and return q + k + v: a function of each token and its position alone."""
    if attention_mask is not None:
        raise UnsupportedModelError("a layer brings an attention mask or bias of its own")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise UnsupportedModelError("a layer's attention is not causal")
    if options.get("s_aux") is not None:
        raise UnsupportedModelError("an attention-sink model")
    for name, option in options.items():
        if name not in _IGNORED_OPTIONS and isinstance(option, Tensor):
            raise UnsupportedModelError(f"its attention takes a tensor {name!r}, which is not understood")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1] or key.shape[2] != query.shape[2]:
        shapes = ", ".join(str(list(tensor.shape[1:])) for tensor in (query, key, value))
        raise UnsupportedModelError(f"q, k, v of shapes {shapes}: multi-head latent attention (MLA) or shared KV")
    num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    window = int(sliding_window) if sliding_window else None
    layers.order.setdefault(id(module), len(layers.order))
    params = LayerAttention(scale, window, float(softcap) if softcap else None)
    layers.calls.append(_Call(num_heads, num_kv_heads, head_dim, params))
    repeat = num_heads // num_kv_heads
    mixed = query + key.repeat_interleave(repeat, 1) + value.repeat_interleave(repeat, 1)
    return mixed.transpose(1, 2), None


class _Probe:
    """Runs a model with attention replaced by a function of the token alone; see the module's text."""

    def __init__(self, model: Any, layers: _Layers) -> None:
        self._model = model
        self._layers = layers
        device = next(model.parameters()).device
        # Neither in order nor without gaps: a model that counts positions by itself is found out.
        self._positions = torch.tensor([0, 3, 1, 2, 7], device=device) % _max_positions(model.config)
        self._ids = torch.arange(len(self._positions), device=device) % model.config.vocab_size
        self._order = torch.tensor([3, 0, 4, 1, 2], device=device)

    def body_calls(self) -> list[_Call]:
        """The attention calls of each layer; refuses what paged attention does not compute."""
        base, layers = _body(self._model), self._layers
        hidden = _run(base, self._ids, self._positions)
        calls, layers.calls = layers.calls, []
        permuted = _run(base, self._ids[self._order], self._positions[self._order])
        _check_calls(calls, layers, self._model.config)
        if layers.calls != calls:
            raise UnsupportedModelError("its attention differs from run to run")
        if not _close(hidden[self._order], permuted):
            raise UnsupportedModelError(
                "tokens influence each other outside attention (state-space, convolution or recurrent layers, or "
                "positions that it counts by itself)"
            )
        options = {"input_ids": self._ids[None], "position_ids": self._positions[None], "use_cache": False}
        self._logits = self._model(**options).logits[0]
        return calls

    def check_head(self, base: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
        """Body and head one after the other give the whole model's logits."""
        try:
            logits = head(_run(base, self._ids, self._positions))
        except Exception as error:
            raise UnsupportedModelError(f"its head does not run by itself: {error}") from error
        if logits.shape != self._logits.shape or not _close(logits, self._logits):
            raise UnsupportedModelError("its head uses more than the last hidden states")


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of products in another order of rows."""
    scale = one.abs().max().clamp(min=1e-6)
    return bool((one - other).abs().max() / scale <= _PROBE_TOLERANCE[one.dtype])


def _check_calls(calls: list[_Call], layers: _Layers, config: Any) -> None:
    wanted = config.num_hidden_layers
    if len(calls) != wanted or len(layers.order) != wanted:
        raise UnsupportedModelError(
            f"{len(calls)} attention calls in {wanted} layers: a state-space, linear or shared attention"
        )
    if len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}) > 1:
        raise UnsupportedModelError("its layers have K and V of different sizes")
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        off = getattr(config, "use_sliding_window", True) is False
        kinds = ["sliding_attention" if window and not off and window < _max_positions(config) else None] * wanted
    for index, (kind, call) in enumerate(zip(kinds, calls, strict=True)):
        if kind is not None and kind not in _OWN_LAYER_TYPES:
            raise UnsupportedModelError(f"layer {index} is of type {kind!r}")
        if kind == "sliding_attention" and call.params.sliding_window is None:
            raise UnsupportedModelError(f"layer {index} has a sliding window that it does not tell its attention")
        if kind in ("full_attention", "attention") and call.params.sliding_window is not None:
            raise UnsupportedModelError(f"layer {index} is of type {kind!r} but has a sliding window")


def _config(config: Any, calls: list[_Call], eos_token_ids: tuple[int, ...]) -> FallbackConfig:
    first = calls[0]
    eos = config.eos_token_id
    own = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return FallbackConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_position_embeddings=_max_positions(config),
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_ids=tuple(dict.fromkeys((*own, *eos_token_ids))),
        checkpoint_dtype=str(config.dtype).removeprefix("torch.") if config.dtype is not None else None,
    )


def _max_positions(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModelError(f"max_position_embeddings={limit!r} must be a positive integer")
    return limit


def load_transformers_model(
    path: Path, kind: str, dtype: str, device: torch.device, eos_token_ids: tuple[int, ...] = ()
) -> TransformersDecoder:
    """Load a folder ("safetensors") or a GGUF file ("gguf") with Transformers, and take it over.

    `dtype` "auto" is float32 on a CPU (one stream is bound by overhead, not by bytes), and else the checkpoint's own
    16-bit one, bfloat16 if it has none. Raises :class:`UnsupportedModelError` with the reason,
    :class:`ModelLoadError` where weights are missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    folder = str(path)
    if kind == "gguf":
        folder, where["gguf_file"] = str(path.parent), path.name
    with _quiet():
        config = AutoConfig.from_pretrained(folder, **where)
        _check_config(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=_dtype(dtype, config, device),
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **({} if kind == "gguf" else {"use_safetensors": True}),
            **where,
        )
    model, info = loaded
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise ModelLoadError(f"{path}: {what.replace('_', ' ')}: {', '.join(sorted(map(str, info[what]))[:3])}")
    logger.info("%s runs through Transformers' layers over paged attention", config.model_type)
    return TransformersDecoder(model.to(device).eval(), eos_token_ids)


def _dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bars, which would mix with this package's own messages."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _check_config(config: Any) -> None:
    """Refuse what is known before any weight is read."""
    from transformers import AutoModelForCausalLM

    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"model_type {config.model_type!r} is not supported: {reason}")

    try:
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise refuse("it is no causal language model") from None
    if not getattr(kind, "_supports_attention_backend", False):
        raise refuse("Transformers' attention interface does not reach its attention")
    rope = getattr(config, "rope_parameters", None) or {}
    for params in rope.values() if all(isinstance(value, Mapping) for value in rope.values()) else [rope]:
        if params.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise refuse(f"rope type {params['rope_type']!r} depends on the length of the batch")
    if getattr(config, "use_bidirectional_attention", None):
        raise refuse("its attention is not causal")
