"""Folders with models of random weights, as a download would leave them: what loading is timed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minillm.bench.models import random_model
from minillm.bench.random_tokenizer import SPECIAL_TOKENS, random_backend
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder

SHARD_BYTES = 5 << 30


def write_model_folder(name: str, folder: Path, *, dtype: str = "bfloat16", device: str = "cpu") -> Path:
    """Write `random:NAME` as config.json, tokenizer.json and safetensors (in shards above 5 GiB) into `folder`.

    A folder that has been written completely before is left as it is. `device` is where the weights are made.
    """
    from safetensors.torch import save_file

    done = folder / "tokenizer.json"
    if done.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(name, dtype=dtype, device=device)
    assert isinstance(model.decoder, Decoder) and isinstance(model.config, ModelConfig)
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for weight, view in model.decoder.weight_views().items():
        if size and size + view.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][weight] = view
        size += view.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({weight: view.cpu().contiguous() for weight, view in shard.items()}, folder / file)
        index.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(hf_config(model.config, dtype), indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL_TOKENS[2]}))
    random_backend(model.config.vocab_size).save(str(done))
    return folder


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a shape of :mod:`minillm.bench.models`."""
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": dtype,
    }
