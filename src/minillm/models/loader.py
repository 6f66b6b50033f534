"""Loading a model: from a name to a decoder whose every weight has been written.

Tensors stream one by one from the file's memory map into their place in the decoder, converted on the way (on a GPU
several threads read safetensors: :mod:`minillm.models.weight_stream`); a checkpoint is never held twice. Nothing here
unpickles: ``.bin`` files are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from minillm.models.config import GGUF_ARCHITECTURES, SUPPORTED_ARCHITECTURES, ModelConfig, check_foreign
from minillm.models.decoder import Decoder
from minillm.models.default_model import resolve_model
from minillm.models.gguf import GGUFFile, dequantize
from minillm.models.linear import DenseLinear, Linear, cpu_multiplies_codes, cpu_packs_bfloat16, pack
from minillm.models.transformers_fallback import FallbackConfig, TransformersDecoder, load_transformers_model
from minillm.models.untrusted import reading
from minillm.models.weight_stream import StoredTensor, stored_tensors, stream_weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, and what the tokenizer and the sampling defaults need.

    ``path`` is the model folder (``kind`` "safetensors") or the GGUF file (``kind`` "gguf"). ``dtype`` is the
    decoder's ("float32", ...); ``packed`` says whether products have forms of their own for this CPU.
    ``generation_config`` is the model's own (empty where it has none).
    """

    name: str
    decoder: Decoder | TransformersDecoder
    config: ModelConfig | FallbackConfig
    path: Path
    kind: str
    dtype: str
    packed: bool
    generation_config: dict[str, Any]

    @property
    def own_decoder(self) -> Decoder:
        """The decoder, for what looks into its layers. Raises :class:`UnsupportedModelError` for a foreign one."""
        if not isinstance(self.decoder, Decoder):
            raise UnsupportedModelError(f"{self.name} runs through Transformers' layers; this needs an own decoder")
        return self.decoder


class WeightSource(Protocol):
    """Tensors of a checkpoint under Transformers' names."""

    def names(self) -> set[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor in its logical shape; any floating dtype."""
        ...


def load_model(
    spec: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        spec: ``smollm2-135m`` (built in), a folder with ``config.json`` and safetensors, a ``.gguf`` file, or a
            Hugging Face hub id.
        dtype: "float32" (exact, for parity), "bfloat16", "float16", or "auto" (what runs fastest on the device: on a
            GPU bfloat16, or float16 for a checkpoint in that).
        device: torch device of the weights.
        progress: told in one line what takes long (a download).

    Raises:
        ModelLoadError: the model is unknown, unreachable, corrupt, truncated, or lacks a tensor.
        UnsupportedModelError: its architecture is refused.
        ConfigError: `dtype` is unknown, or there is no such device.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known; known: auto, {', '.join(_DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no CUDA device that works")
    resolved = resolve_model(spec, progress)
    load = _load_gguf if resolved.kind == "gguf" else _load_folder
    with single_threaded(), reading(resolved.path):
        decoder, generation_config = load(resolved.path, dtype, torch.device(device))
    return LoadedModel(
        name=resolved.name,
        decoder=decoder,
        config=decoder.config,
        path=resolved.path,
        kind=resolved.kind,
        dtype=str(decoder.dtype).removeprefix("torch."),
        packed=isinstance(decoder, Decoder) and not isinstance(decoder.layers[0].qkv, DenseLinear),
        generation_config=generation_config,
    )


def _load_folder(
    folder: Path, dtype: str, device: torch.device
) -> tuple[Decoder | TransformersDecoder, dict[str, Any]]:
    fields = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation_config = _read_json(generation_path) if generation_path.is_file() else {}
    name = str(fields.get("model_type"))
    if name not in SUPPORTED_ARCHITECTURES and _transformers_knows(name):
        check_foreign(name, "model_type", fields)
        _shards(folder)  # says what is missing, or that there are pickles only
        more = _eos_ids(generation_config)
        return load_transformers_model(folder, "safetensors", dtype, device, more), generation_config
    config = _with_eos_ids(ModelConfig.from_hf(fields), generation_config)
    with SafetensorsFolder(folder) as source:
        decoder = _build(config, source, _resolve_dtype(dtype, config, device), device, str(folder))
    _pack_for_cpu(decoder)
    return decoder, generation_config


def _load_gguf(path: Path, dtype: str, device: torch.device) -> tuple[Decoder | TransformersDecoder, dict[str, Any]]:
    with GGUFFile(path) as file:
        name = str(file.metadata.get("general.architecture"))
        if name not in GGUF_ARCHITECTURES and _transformers_reads_gguf(name):
            prefix = f"{name}."
            options = {key.removeprefix(prefix): value for key, value in file.metadata.items()}
            check_foreign(name, "GGUF architecture", options)
            return load_transformers_model(path, "gguf", dtype, device), {}
        source = GGUFWeights(file)
        decoder = _build(source.config, source, _resolve_dtype(dtype, source.config, device), device, str(path))
        _pack_for_cpu(decoder, source if dtype == "auto" else None)
    return decoder, {}


def _build(config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device, where: str) -> Decoder:
    """A decoder with the weights of `source`."""
    try:
        decoder = Decoder(config, dtype, device)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelLoadError(f"{where}: no memory for the weights that the config asks for: {reason}") from error
    fill(decoder, source, where)
    return decoder


def _pack_for_cpu(decoder: Decoder, coded: GGUFWeights | None = None) -> None:
    """Give every product its quickest form; `coded` is the file whose 4- and 8-bit codes may be used as they are."""
    use_codes = coded is not None and cpu_multiplies_codes()
    use_onednn = decoder.dtype == torch.bfloat16 and cpu_packs_bfloat16()
    if decoder.device.type != "cpu" or not (use_codes or use_onednn):
        return

    def packed(names: tuple[str, ...], linear: Linear) -> Linear:
        assert isinstance(linear, DenseLinear)
        stored = [(coded.type_name(name), coded.raw(name)) for name in names] if coded is not None and use_codes else []
        return pack(linear, stored)

    decoder.transform_linears(packed)


def _resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_packs_bfloat16() else torch.float32
    return torch.float16 if config.checkpoint_dtype == "float16" else torch.bfloat16


def _transformers_knows(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _transformers_reads_gguf(architecture: str) -> bool:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return architecture in GGUF_SUPPORTED_ARCHITECTURES


def _eos_ids(generation_config: dict[str, Any]) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _with_eos_ids(config: ModelConfig, generation_config: dict[str, Any]) -> ModelConfig:
    """Ids that end a text: the generation config knows the chat turn's end, which config.json often lacks."""
    more = _eos_ids(generation_config)
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def fill(decoder: Decoder, source: WeightSource, where: str) -> None:
    """Write every weight of `decoder` from `source`.

    A head that is tied by the config but present as well is used if it differs from the embedding, as Transformers
    does since version 5; equal ones share the embedding's memory.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or is left over.
    """
    views = decoder.weight_views()
    names = source.names()
    tied = decoder.config.tie_word_embeddings
    aliases = {EMBEDDING: HEAD} if tied and EMBEDDING not in names and HEAD in names else {}
    missing = sorted(name for name in views if aliases.get(name, name) not in names)
    if missing:
        raise ModelLoadError(f"{where}: {_count('tensor', missing)} missing: {_list(missing)}")
    extra_head = tied and HEAD in names and not aliases
    known = {aliases.get(name, name) for name in views} | ({HEAD} if extra_head else set())
    left_over = sorted(name for name in names - known if not name.endswith("rotary_emb.inv_freq"))
    if left_over:
        raise ModelLoadError(f"{where}: {_count('tensor', left_over)} not known to this model: {_list(left_over)}")
    stored = source.stored() if decoder.device.type == "cuda" and isinstance(source, SafetensorsFolder) else {}
    streamed = []
    for name, view in views.items():
        tensor = stored.get(aliases.get(name, name))
        if tensor is not None and tensor.shape == tuple(view.shape) and view.is_contiguous():
            streamed.append((view, tensor))
        else:  # what cannot be streamed, and what is refused
            _copy(view, source.read(aliases.get(name, name)), name, where)
    stream_weights(streamed)
    if extra_head:
        head = torch.empty_like(decoder.embedding)
        _copy(head, source.read(HEAD), HEAD, where)
        if not torch.equal(head, decoder.embedding):
            decoder.untie(head)


def _copy(view: Tensor, tensor: Tensor, name: str, where: str) -> None:
    if view.shape != tensor.shape:
        raise ModelLoadError(
            f"{where}: tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(view.shape)}"
        )
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise ModelLoadError(f"{where}: tensor {name!r} has dtype {tensor.dtype}; quantised safetensors are not read")
    view.copy_(tensor)


def _count(noun: str, items: list[str]) -> str:
    return f"1 {noun} is" if len(items) == 1 else f"{len(items)} {noun}s are"


def _list(items: list[str]) -> str:
    shown = ", ".join(repr(item) for item in items[:3])
    return shown if len(items) <= 3 else f"{shown}, ..."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return data


class SafetensorsFolder:
    """The safetensors of a model folder: ``model.safetensors``, or the shards that the index lists."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for shard, expected in _shards(folder).items():
            try:
                file = safe_open(folder / shard, framework="pt", device="cpu").__enter__()
            except FileNotFoundError:
                raise ModelLoadError(f"{folder}: {shard} is missing") from None
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{folder / shard}: not a usable safetensors file: {error}") from None
            self._files[shard] = file
            present = set(file.keys())
            lost = sorted(expected - present)
            if lost:
                raise ModelLoadError(f"{folder / shard}: {_count('tensor', lost)} missing: {_list(lost)}")
            self._shard_of.update(dict.fromkeys(expected or present, shard))

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def names(self) -> set[str]:
        return set(self._shard_of)

    def read(self, name: str) -> Tensor:
        return self._files[self._shard_of[name]].get_tensor(name)

    def stored(self) -> dict[str, StoredTensor]:
        """Where each tensor's bytes are."""
        places = {shard: stored_tensors(self._folder / shard) for shard in self._files}
        return {name: places[shard][name] for name, shard in self._shard_of.items() if name in places[shard]}


def _shards(folder: Path) -> dict[str, set[str]]:
    """File name -> the tensors it must hold (empty: whatever it holds)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index}: weight_map is missing")
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelLoadError(f"{index}: shard {shard!r} is not a plain file name")
            shards.setdefault(shard, set()).add(name)
        return shards
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found or len(found) == 1:
        return {"model.safetensors" if "model.safetensors" in found else found[0]: set()}
    if found:
        raise ModelLoadError(f"{folder}: {len(found)} safetensors files and no {index.name} that says what they hold")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when loaded; convert it to safetensors"
        )
    raise ModelLoadError(f"{folder}: model.safetensors is missing")


class GGUFWeights:
    """A GGUF file's tensors under Transformers' names, with q and k rows in Transformers' order.

    Files of architecture ``llama`` keep the rows of q and k (weights and biases) so that the two members of a
    rotated pair are neighbours; here a head's first half is paired with its second half. Whole rows move, so
    quantised rows are put back as they are. Other architectures are not permuted.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        divisors: tuple[float, ...] = ()
        if _ROPE_DIVISORS in file.tensors:
            divisors = tuple(file.load(_ROPE_DIVISORS).flatten().tolist())
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        self.config = ModelConfig.from_gguf(file.metadata, shapes, divisors)
        self._stored = {_transformers_name(name): name for name in file.tensors if name != _ROPE_DIVISORS}

    def names(self) -> set[str]:
        return set(self._stored)

    def type_name(self, name: str) -> str:
        """The tensor's GGML type, such as "Q4_1"."""
        return self.file.tensors[self._stored[name]].type_name

    def raw(self, name: str) -> Tensor:
        """Stored bytes, uint8 [rows, bytes per row] (a vector: [1, bytes]), rows in Transformers' order."""
        stored = self._stored[name]
        raw = self.file.raw(stored)
        heads = self._permuted_heads(name)
        if heads is None:
            return raw
        shape = self.file.tensors[stored].shape
        rows = raw.view(shape[0], -1)
        if shape[0] % (2 * heads):
            raise ModelLoadError(f"{self.file.path}: tensor {stored!r} has {shape[0]} rows for {heads} heads")
        unpaired = rows.view(heads, shape[0] // heads // 2, 2, -1).transpose(1, 2)
        return unpaired.reshape(raw.shape)

    def read(self, name: str) -> Tensor:
        tensor = self.file.tensors[self._stored[name]]
        return dequantize(self.raw(name), tensor.type_name).view(tensor.shape)

    def _permuted_heads(self, name: str) -> int | None:
        if self.config.architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config.num_heads
        if ".self_attn.k_proj." in name:
            return self.config.num_kv_heads
        return None


def _transformers_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; a name without a rule stays."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"
    return name


@contextmanager
def single_threaded() -> Iterator[None]:
    """One torch thread inside: converting small tensors gains nothing from more, and suffers where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
