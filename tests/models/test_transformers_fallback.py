"""Models that run through Transformers' own layers over paged attention: logits, greedy tokens, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from model_oracles import run

from minillm import EngineConfig, Runtime, SamplingParams
from minillm.attention.interface import LayerAttention
from minillm.core.errors import MiniLLMError, ModelLoadError, UnsupportedModelError
from minillm.engine.factory import build_engine
from minillm.models.loader import load_model
from minillm.models.tokenizer import load_tokenizer
from minillm.models.transformers_fallback import TransformersDecoder
from model_folders import VOCAB, save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 1.2 / 64**0.5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 1.2 / 64**0.5,
    "bos_token_id": None,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
SUPPORTED: dict[str, dict[str, Any]] = {
    "GPT2": GPT2,
    "Gemma3Text": {**SIZES, "head_dim": 32, "sliding_window": 8, "layer_types": SLIDING},
    "Gemma2": {**SIZES, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
    "Phi3": SIZES,
    "Granite": {**SIZES, "attention_multiplier": 0.3, "logits_scaling": 4.0},
    "Cohere2": {**SIZES, "sliding_window": 8},
    "GPTNeoX": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "Olmo2": SIZES,
}
IDS = [(7 * i + 3) % VOCAB for i in range(40)]


def make_model(kind: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.3, 0.3) if "gemma" in config.model_type else parameter.uniform_(0.5, 1.5)
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(params=SUPPORTED)
def reference(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, **SUPPORTED[request.param])


def test_logits_are_the_models_own_in_one_go_and_in_chunks(reference: Any, tmp_path: Path) -> None:
    decoder = load_model(save(reference, tmp_path), "float32").decoder
    assert isinstance(decoder, TransformersDecoder)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS]), use_cache=False).logits[0]
    scale = expected.abs().max()
    for chunks in (None, [7, 1, 1, 20, 11]):
        assert (run(decoder, IDS, chunks) - expected).abs().max() < 2e-5 * scale


def test_each_layer_keeps_its_own_window_cap_and_scale(tmp_path: Path) -> None:
    options = {**SUPPORTED["Gemma2"], "query_pre_attn_scalar": 9}
    decoder = load_model(save(make_model("Gemma2", **options), tmp_path), "float32").decoder
    sliding, full = LayerAttention(1 / 3, 8, 5.0), LayerAttention(1 / 3, None, 5.0)
    assert decoder.layer_attention == [sliding, full, sliding, full]
    config = decoder.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, VOCAB)


@pytest.mark.parametrize("kind", ["GPT2", "Gemma3Text"])
def test_engine_makes_the_greedy_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    """Sixteen prompts at once, chunked, in a pool that forces preemption, against Transformers one by one."""
    reference = make_model(kind, **SUPPORTED[kind])
    model = load_model(save(reference, tmp_path), "float32")
    prompts = [[(5 * i + 11 * j + 3) % VOCAB for j in range(4 + 3 * i)] for i in range(16)]
    expected = [_generate(reference, prompt, 24) for prompt in prompts]
    for options in ({}, {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 32}):
        config = EngineConfig(str(tmp_path), max_num_seqs=16, max_model_len=128, check_invariants=True, **options)
        parts = build_engine(config, model=model, tokenizer=load_tokenizer(tmp_path))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        with Runtime(parts=parts) as runtime:
            outputs = [f.result(timeout=120).outputs[0] for f in [runtime.submit(p, params) for p in prompts]]
            preemptions = runtime.stats().counters
        assert [output.token_ids for output in outputs] == expected
        assert parts.engine.num_invariant_violations == 0
    assert preemptions.preemptions_swap + preemptions.preemptions_recompute > 0


def _generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an attention sink": ("GptOss", {**SIZES, "head_dim": 16, "num_local_experts": 2}, "sink"),
    "latent attention": ("DeepseekV3", {**SIZES, "kv_lora_rank": 16}, "MLA"),
    "a state-space model": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}, "state-space"),
    "ALiBi": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "convolutions": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"] * 2}, "state-space"),
    "a mixture of experts": ("Olmoe", {**SIZES, "num_experts": 4}, "mixture of experts"),
    "an attention that cannot be replaced": ("StableLm", SIZES, "attention interface"),
    "a rope that depends on the batch": (
        "Phi3",
        {**SIZES, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "depends on the length",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason_before_any_weight_is_read(what: str, tmp_path: Path) -> None:
    import transformers

    kind, options, reason = REFUSED[what]
    getattr(transformers, f"{kind}Config")(**options).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path)


class TestProbe:
    """Mechanisms that no list names are found by running the model."""

    def decoder(self, spoil: Any, kind: str = "Phi3") -> TransformersDecoder:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from minillm.models import transformers_fallback

        ALL_ATTENTION_FUNCTIONS.register(transformers_fallback.ATTENTION, transformers_fallback._attend)
        model = make_model(kind, **SUPPORTED[kind])
        model.set_attn_implementation(transformers_fallback.ATTENTION)
        spoil(model)
        return TransformersDecoder(model)

    def test_unspoilt(self) -> None:
        assert len(self.decoder(lambda model: None).layer_attention) == SIZES["num_hidden_layers"]

    def test_a_layer_that_mixes_neighbours(self) -> None:
        def shift(model: Any) -> None:
            mlp = model.model.layers[2].mlp
            inner = mlp.forward
            mlp.forward = lambda x: inner(x + 0.1 * x.roll(1, 1))

        with pytest.raises(UnsupportedModelError, match="outside attention"):
            self.decoder(shift)

    def test_positions_counted_by_the_model(self) -> None:
        def count(model: Any) -> None:
            rotary = model.model.rotary_emb
            inner = rotary.forward
            rotary.forward = lambda x, position_ids: inner(x, position_ids=torch.arange(x.shape[1])[None])

        with pytest.raises(UnsupportedModelError, match="outside attention"):
            self.decoder(count)

    def test_a_layer_without_attention(self) -> None:
        def drop(model: Any) -> None:
            model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)

        with pytest.raises(UnsupportedModelError, match="3 attention calls in 4 layers"):
            self.decoder(drop)

    def test_a_mask_of_its_own(self) -> None:
        def mask(model: Any) -> None:
            attention = model.model.layers[0].self_attn
            inner = attention.forward
            attention.forward = lambda **kw: inner(**{**kw, "attention_mask": torch.zeros(1, 1, 5, 5)})

        with pytest.raises(UnsupportedModelError, match="mask or bias"):
            self.decoder(mask)

    def test_a_window_that_attention_is_not_told(self) -> None:
        def hide(model: Any) -> None:
            for layer in model.model.layers:
                layer.self_attn.sliding_window = None

        with pytest.raises(UnsupportedModelError, match="sliding window"):
            self.decoder(hide, "Gemma3Text")

    def test_a_head_that_looks_at_more_than_hidden_states(self) -> None:
        def bias(model: Any) -> None:
            inner = model.forward
            model.forward = lambda input_ids, **kw: _add(inner(input_ids=input_ids, **kw), input_ids)

        def _add(output: Any, ids: torch.Tensor) -> Any:
            output.logits = output.logits + ids[..., None]
            return output

        with pytest.raises(UnsupportedModelError, match="more than the last hidden states"):
            self.decoder(bias)


def test_weights_missing_from_the_file_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(make_model("Phi3", **SIZES), tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys.*layers\.1\.mlp\.down_proj"):
        load_model(tmp_path)


def test_pickles_and_code_in_the_folder_are_never_used(tmp_path: Path) -> None:
    import json

    save(make_model("Phi3", **SIZES), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickle"):
        load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(MiniLLMError, match="mine"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.integration
@pytest.mark.timeout(1200)  # Transformers reads a GGUF file's 262,144 tokens in Python, four times in all
def test_gemma_3_270m_real_weights() -> None:
    """Greedy tokens of 8 prompts x 32 are those of Transformers' own loader and `generate`, in float32."""
    name = os.environ.get("MINILLM_GEMMA_GGUF")
    if not name or not Path(name).is_file():
        pytest.skip("MINILLM_GEMMA_GGUF does not name the file gemma-3-270m-q4_k_m.gguf (docs/models.md)")
    from transformers import AutoModelForCausalLM

    path = Path(name)
    texts = [
        "The capital of France is",
        "Once upon a time, in a small village,",
        "def fibonacci(n):\n",
        "Water boils at",
        "La tour Eiffel se trouve",
        "1, 2, 3, 5, 8,",
        "The three primary colours are",
        "In 1969, the first man on the moon said",
    ]
    with Runtime(EngineConfig(name, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=8)) as runtime:
        prompts = [runtime.tokenizer.encode(text) for text in texts]
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        outputs = [future.result(timeout=250) for future in [runtime.submit(prompt, params) for prompt in prompts]]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    expected = [_generate(reference, prompt, 32) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert "France" in outputs[0].outputs[0].text
