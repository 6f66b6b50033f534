"""What a decoder needs to know about its model, from a Hugging Face ``config.json`` or from GGUF metadata.

Everything that would change the result is either read here or refused with :class:`UnsupportedModelError`: an
architecture, rope type, layer type or activation that the decoder does not compute is never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.core.errors import ModelLoadError, UnsupportedModelError

_MAX_LAYERS = 4096

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_CAUSAL_LM_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Config keys (or, for GGUF, metadata keys after the architecture prefix) that name a mechanism which is not computed.
_REFUSED_KEYS = {
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "moe_intermediate_size": "mixture of experts",
    "expert_count": "mixture of experts",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attention.kv_lora_rank": "multi-head latent attention (MLA)",
    "vision_config": "multimodal input",
    "audio_config": "multimodal input",
    "state_size": "a state-space model",
    "ssm_state_size": "a state-space model",
    "ssm_cfg": "a state-space model",
    "mamba_d_state": "a state-space model",
    "ssm.state_size": "a state-space model",
    "alibi": "ALiBi attention biases",
    "attention.max_alibi_bias": "ALiBi attention biases",
    "is_encoder_decoder": "an encoder-decoder model",
    "add_cross_attention": "cross attention",
    "quantization_config": "quantised safetensors weights",
    "attn_logit_softcapping": "attention soft capping",
    "attn_logit_softcapping.value": "attention soft capping",
    "final_logit_softcapping": "logit soft capping",
}

_REFUSED_NAMES = {
    "mixture of experts": ("moe", "mixtral", "dbrx", "arctic", "jetmoe", "grok"),
    "an attention-sink model": ("gpt_oss", "gpt-oss"),
    "multi-head latent attention (MLA)": ("deepseek", "minicpm3", "kimi"),
    "a state-space or recurrent model": ("mamba", "rwkv", "jamba", "zamba", "recurrent", "bamba", "lfm2", "nemotron_h"),
    "ALiBi attention biases": ("bloom", "mpt", "falcon-rw"),
    "multimodal input": ("_vl", "llava", "vision", "audio", "omni", "mllama", "paligemma", "pixtral", "whisper"),
    "an encoder or encoder-decoder model": ("bert", "t5", "bart", "roberta"),
}


_LLAMA3_NAMES = ("low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and one scaling ``kind``; fields a kind does not name are ignored.

    ``default``: none. ``linear``: frequencies divided by ``factor``. ``llama3``: by wavelength, ``factor`` for long
    ones, blended between ``low_freq_factor`` and ``high_freq_factor`` of ``original_max_position``. ``yarn``: NTK by
    parts between ``beta_fast`` and ``beta_slow`` rotations; cos and sin are multiplied by ``attention_factor``.
    ``divisors``: each frequency divided by its own entry of ``divisors`` (head_dim / 2 of them; a GGUF file's
    ``rope_freqs.weight``).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelLoadError(f"model config: rope low_freq_factor=high_freq_factor={self.low_freq_factor}")
        for name in ("theta", "factor", "beta_fast", "beta_slow", "attention_factor", *_LLAMA3_NAMES):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ModelLoadError(f"model config: rope {name}={value} must be a finite number > 0")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a Llama-family decoder. Sizes are counts of elements; ids are token ids.

    ``sliding_windows`` has one entry per layer: W (a token sees W positions including itself) or None (all).
    ``checkpoint_dtype`` is what the file says its weights are ("bfloat16", ...; None where it does not say).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelLoadError(f"model config: {field}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"model config: head_dim={self.head_dim} must be even for rotary embeddings")
        if len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(
                f"model config: {len(self.sliding_windows)} layer types are given for num_layers={self.num_layers}"
            )
        for window in self.sliding_windows:
            if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
                raise ModelLoadError(f"model config: sliding_window={window!r} must be a positive integer")
        if not 0 <= self.rms_norm_eps < 1:
            raise ModelLoadError(f"model config: rms_norm_eps={self.rms_norm_eps} must be in [0, 1)")
        for token_id in (self.bos_token_id, self.pad_token_id, *self.eos_token_ids):
            # Negative ones are an old way to say that there is none; nothing is ever masked or stopped by them.
            if token_id is not None and (not isinstance(token_id, int) or isinstance(token_id, bool)):
                raise ModelLoadError(f"model config: token id {_brief(token_id)} must be an integer")

    @property
    def attention_scale(self) -> float:
        """Factor of q.k."""
        return self.head_dim**-0.5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a ``config.json`` (Transformers 4 or 5 form).

        Raises:
            UnsupportedModelError: the model needs something this decoder does not compute.
            ModelLoadError: a field is missing or inconsistent.
        """
        arch = _hf_architecture(config)
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        num_layers = _num_layers(config, "num_hidden_layers")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(f"{arch}: hidden_act={config['hidden_act']!r}; only silu is computed")
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = 128 if arch == "qwen3" else hidden_size // num_heads
        max_position = _size(config, "max_position_embeddings")
        bias = bool(config.get("attention_bias", False)) and arch in ("llama", "qwen3")
        eos = config.get("eos_token_id")
        return cls(
            architecture=arch,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=_number({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps"),
            rope=_rope_from_hf(config, max_position),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_windows=_windows_from_hf(config, arch, num_layers),
            qkv_bias=arch == "qwen2" or bias,
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and arch == "llama",
            qk_norm=arch == "qwen3",
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            checkpoint_dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_shapes: Mapping[str, tuple[int, ...]],
        rope_divisors: tuple[float, ...] = (),
    ) -> ModelConfig:
        """Read a GGUF file's metadata; ``tensor_shapes`` (name -> torch shape) tells what the file leaves unsaid.

        Args:
            rope_divisors: the values of tensor ``rope_freqs.weight`` where the file has it.

        Raises:
            UnsupportedModelError: the model needs something this decoder does not compute.
            ModelLoadError: a key is missing or inconsistent.
        """
        arch = metadata.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise _unsupported(str(arch), "GGUF architecture")
        fields = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{arch}.")}
        _refuse_keys(fields, arch)
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            if isinstance(fields.get(key), list):
                raise UnsupportedModelError(f"{arch}: {key} differs between layers")
        num_heads = _size(fields, "attention.head_count")
        hidden_size = _size(fields, "embedding_length")
        head_dim = fields.get("attention.key_length") or hidden_size // num_heads
        for key in ("attention.value_length", "rope.dimension_count"):
            if fields.get(key, head_dim) != head_dim:
                raise UnsupportedModelError(f"{arch}: {key}={fields[key]} differs from the head size {head_dim}")
        if "token_embd.weight" not in tensor_shapes:
            raise ModelLoadError("tensor 'token_embd.weight' is missing")
        num_layers = _num_layers(fields, "block_count")
        max_position = _size(fields, "context_length")
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            architecture=arch,
            vocab_size=tensor_shapes["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=_size(fields, "feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.get("attention.head_count_kv") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=_number(fields, "attention.layer_norm_rms_epsilon"),
            rope=_rope_from_gguf(fields, arch, max_position, head_dim, rope_divisors),
            tie_word_embeddings="output.weight" not in tensor_shapes,
            sliding_windows=_windows_from_gguf(fields, arch, num_layers, max_position),
            qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
            output_bias="blk.0.attn_output.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_down.bias" in tensor_shapes,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        )


def _required(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ModelLoadError(f"model config: {key} is missing")
    return value


def _size(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"model config: {key}={value!r} must be a positive integer")
    return value


def _num_layers(config: Mapping[str, Any], key: str) -> int:
    """A size that is bounded: something is made per layer before any tensor is looked for."""
    value = _size(config, key)
    if value > _MAX_LAYERS:
        raise ModelLoadError(f"model config: {key}={value} is over the limit of {_MAX_LAYERS} layers")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelLoadError(f"model config: {key}={value!r} must be a number")
    return float(value)


def _unsupported(name: str, what: str) -> UnsupportedModelError:
    lowered = name.lower()
    for reason, words in _REFUSED_NAMES.items():
        if any(word in lowered for word in words):
            return UnsupportedModelError(f"{what} {name!r} is not supported: {reason}")
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    return UnsupportedModelError(f"{what} {name!r} is not supported: its layers are not known here (known: {known})")


def check_foreign(name: str, what: str, config: Mapping[str, Any]) -> None:
    """Refuse an architecture without a decoder here whose name or options say that no path computes it.

    `what` is what `name` is called in the file, `config` its options. Soft caps are computed by the model's own code.
    """
    lowered = name.lower()
    if any(word in lowered for words in _REFUSED_NAMES.values() for word in words):
        raise _unsupported(name, what)
    _refuse_keys({key: value for key, value in config.items() if "softcapping" not in key}, name)


def _refuse_keys(config: Mapping[str, Any], arch: str) -> None:
    for key, reason in _REFUSED_KEYS.items():
        if config.get(key):
            raise UnsupportedModelError(f"{arch}: {key}={_brief(config[key])} is not supported: {reason}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _hf_architecture(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(str(model_type), "model_type")
    _refuse_keys(config, model_type)
    classes = config.get("architectures") or []
    if classes and not any(_CAUSAL_LM_CLASSES.get(name) == model_type for name in classes):
        raise UnsupportedModelError(
            f"architectures={classes} is not supported: {model_type!r} is run as a causal language model only"
        )
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModelError(f"{model_type}: partial_rotary_factor={config['partial_rotary_factor']}")
    return model_type


def _rope_from_hf(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """`rope_parameters` (Transformers 5) or `rope_theta` with `rope_scaling` (before); same precedence as there."""
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if raw and all(isinstance(value, Mapping) for value in raw.values()):
        per_type = list(raw.values())
        if any(other != per_type[0] for other in per_type[1:]):
            raise UnsupportedModelError(f"rope parameters differ between layer types {sorted(raw)}")
        raw = per_type[0]
    params = dict(raw)
    theta = params.get("rope_theta")
    if theta is None:
        theta = config.get("rope_theta")
    kind = params.get("rope_type", params.get("type")) or "default"
    if params.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModelError(f"rope: partial_rotary_factor={params['partial_rotary_factor']}")
    original = config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    return _make_rope(kind, 10_000.0 if theta is None else float(theta), params, original or max_position, max_position)


def _make_rope(kind: str, theta: float, params: Mapping[str, Any], original: int, max_position: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_number(params, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_number(params, "factor"),
            original_max_position=original,
            low_freq_factor=_number(params, "low_freq_factor"),
            high_freq_factor=_number(params, "high_freq_factor"),
        )
    if kind == "yarn":
        factor = params.get("factor")
        factor = max_position / original if factor is None else float(factor)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            beta_fast=float(params.get("beta_fast") or 32),
            beta_slow=float(params.get("beta_slow") or 1),
            truncate=bool(params.get("truncate", True)),
            attention_factor=_yarn_attention_factor(params, factor),
        )
    raise UnsupportedModelError(f"rope type {kind!r} is not supported (default, linear, llama3 and yarn are)")


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """Section 3.4 of https://arxiv.org/abs/2309.00071, with the `mscale` pair of DeepSeek as Transformers reads it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


def _rope_from_gguf(
    fields: Mapping[str, Any], arch: str, max_position: int, head_dim: int, divisors: tuple[float, ...]
) -> RopeConfig:
    theta = float(fields.get("rope.freq_base", 10_000.0))
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if divisors:
        if kind != "none" or len(divisors) != head_dim // 2:
            raise UnsupportedModelError(
                f"{arch}: rope_freqs.weight has {len(divisors)} entries for head size {head_dim}, rope scaling {kind!r}"
            )
        return RopeConfig(theta=theta, kind="divisors", divisors=divisors)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta)
    if kind == "yarn" and fields.get("rope.scaling.yarn_log_multiplier"):
        raise UnsupportedModelError(f"{arch}: rope.scaling.yarn_log_multiplier is not supported")
    params = {
        "factor": factor,
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow"),
    }
    if kind == "yarn":
        # llama.cpp multiplies its own 0.1 ln(factor) + 1 by the stored factor.
        stored = fields.get("rope.scaling.yarn_attn_factor", fields.get("rope.scaling.attn_factor", 1.0))
        params["attention_factor"] = stored * _yarn_attention_factor({}, factor)
    original = fields.get("rope.scaling.original_context_length") or max_position
    return _make_rope(kind, theta, params, original, max_position)


def _windows_from_hf(config: Mapping[str, Any], arch: str, num_layers: int) -> tuple[int | None, ...]:
    """One window per layer. `layer_types` win over the bare number; `use_sliding_window: false` means none."""
    layer_types = config.get("layer_types")
    window = config.get("sliding_window", 4096 if arch != "llama" else None)
    if arch in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if layer_types is None:
        if arch == "llama" or window is None:
            return (None,) * num_layers
        first = 0 if arch == "mistral" else config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"{arch}: layer_types {sorted(unknown)} are not supported")
    if "sliding_attention" in layer_types:
        if arch == "llama":
            raise UnsupportedModelError("llama: layer_types has 'sliding_attention', which its reference ignores")
        if window is None:
            raise ModelLoadError(f"{arch}: layer_types has 'sliding_attention' but sliding_window is not given")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _windows_from_gguf(
    fields: Mapping[str, Any], arch: str, num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    window = fields.get("attention.sliding_window") or None
    if window is None or window >= max_position:
        return (None,) * num_layers
    if arch != "llama":
        raise UnsupportedModelError(f"{arch}: attention.sliding_window={window}, but not which layers it is for")
    return (window,) * num_layers
