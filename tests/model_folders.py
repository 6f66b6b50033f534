"""Folders with a whole tiny model: random weights and a tokenizer, as `save_pretrained` leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 128


def save_tiny_model(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A random model of `family` with products of order one (so that greedy choices are no ties), in float32."""
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 1.2 / 64**0.5,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "mistral":
        settings["sliding_window"] = 12
    torch.manual_seed(11)
    model_class(config_class(**{**settings, **options})).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of VOCAB tokens `t0`, `t1`, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t1"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t2", pad_token="t0").save_pretrained(folder)
