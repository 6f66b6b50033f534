"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) vocabularies.

The ids are those of llama.cpp. The work is done by the Rust library `tokenizers`, set up here by hand:
transformers' GGUF conversion ignores `tokenizer.ggml.pre` and so splits digits and numerals wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minillm.core.errors import ModelLoadError
from minillm.models.gguf import GGUFFile
from minillm.models.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from minillm.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

END_OF_GENERATION = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|eom_id|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<end_of_utterance>"),
        "<｜end▁of▁sentence｜>",
    )
)
"""Texts of tokens that end a generation whatever else the file declares (llama.cpp's list; files that declare only
one EOS id often lack the end of turn). Such a token is a control token even if its type says otherwise."""

_SPACE_MARK = "▁"


def load_gguf_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer and chat template of a GGUF file. Raises :class:`ModelLoadError`."""
    with GGUFFile(path) as file:
        return tokenizer_from_gguf_metadata(file.metadata, source=str(path))


def tokenizer_from_gguf_metadata(metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
    """Build a tokenizer from a GGUF header (key -> value). Raises :class:`ModelLoadError` naming the key at fault."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _field(metadata, "tokens", list, source)
    types = [NORMAL] * len(tokens)
    if _get(metadata, "token_type", None) is not None:
        types = _field(metadata, "token_type", list, source)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{source}: {len(types)} entries in tokenizer.ggml.token_type for {len(tokens)} tokens")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        raise ModelLoadError(f"{source}: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} duplicate entries")
    if model == "gpt2":
        pre = _pre_tokenizer(metadata, source)
        backend = build_byte_level_bpe(vocab, _field(metadata, "merges", list, source), pre)
        add_bos = pre.add_bos
    elif model == "llama":
        scores = _field(metadata, "scores", list, source)
        backend = build_sentencepiece_bpe(vocab, scores, types, bool(_get(metadata, "add_space_prefix", True)))
        add_bos = True
    else:
        raise ModelLoadError(f"{source}: tokenizer.ggml.model={model!r} is not supported; 'gpt2' and 'llama' are")
    _add_special_tokens(backend, tokens, types, metadata)

    bos_id = _token_id(metadata, "bos", len(tokens), 1 if model == "llama" else None)
    eos_id = _token_id(metadata, "eos", len(tokens), 2 if model == "llama" else None)
    return Tokenizer(
        backend,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        eos_token_ids=_end_ids(metadata, tokens, types, eos_id),
        unk_token_id=_token_id(metadata, "unknown", len(tokens), None),
        pad_token_id=_token_id(metadata, "padding", len(tokens), None),
        add_bos=bool(_get(metadata, "add_bos_token", add_bos)),
        add_eos=bool(_get(metadata, "add_eos_token", False)),
        chat_templates=_chat_templates(metadata),
        bos_before_chat=True,
        source=source,
    )


def build_byte_level_bpe(vocab: dict[str, int], merges: Sequence[str], pre: PreTokenizer) -> Backend:
    """A GPT-2 style byte-level BPE. `vocab`: token -> id; `merges`: "left right", most important first."""
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left in vocab and right in vocab and left + right in vocab:
            pairs.append((left, right))
    backend = Backend(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges))
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def build_sentencepiece_bpe(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int], add_space_prefix: bool
) -> Backend:
    """A SentencePiece BPE model with byte fallback: of all neighbours that join to a token, the pair whose token has
    the highest score is joined first.

    `scores` and `types` are indexed by id. Control, unknown and byte tokens take no part in joining.
    """
    if len(scores) != len(vocab):
        raise ModelLoadError(f"{len(scores)} entries in tokenizer.ggml.scores for {len(vocab)} tokens")
    unknown = next((token for token, i in vocab.items() if types[i] == UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    backend = Backend(
        models.BPE(
            vocab,
            _merges_by_score(vocab, scores, types),
            unk_token=unknown or ("<unk>" if "<unk>" in vocab else None),
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    escape = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), escape]) if add_space_prefix else escape
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to split a token into two tokens, tokens of higher score first."""
    joinable = {token: i for token, i in vocab.items() if types[i] in (NORMAL, UNUSED, USER_DEFINED)}
    ranked = sorted(joinable, key=lambda token: (-scores[joinable[token]], joinable[token]))
    merges = []
    for token in ranked:
        splits = []
        for cut in range(1, len(token)):
            left, right = joinable.get(token[:cut]), joinable.get(token[cut:])
            if left is not None and right is not None:
                splits.append((left, right, cut))
        splits.sort()
        merges += [(token[:cut], token[cut:]) for _, _, cut in splits]
    return merges


def _get(metadata: Mapping[str, Any], name: str, default: Any) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}", default)


def _field(metadata: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    value = _get(metadata, name, None)
    if not isinstance(value, kind):
        raise ModelLoadError(f"{source}: tokenizer.ggml.{name} is {'missing' if value is None else 'of a wrong type'}")
    return value


def _pre_tokenizer(metadata: Mapping[str, Any], source: str) -> PreTokenizer:
    name = _get(metadata, "pre", None)
    if name is None:
        logger.warning(
            "%s: tokenizer.ggml.pre is missing; 'default' is taken, as llama.cpp does, and text may be split "
            "otherwise than in training: convert the model again",
            source,
        )
        return DEFAULT
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.pre={name!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _is_control(token: str, kind: int) -> bool:
    return kind in (CONTROL, UNKNOWN) or token in END_OF_GENERATION


def _add_special_tokens(
    backend: Backend, tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> None:
    """Declare control and user-defined tokens, which are found in the text before anything is split."""
    # Phi-3's files carry no such flag, yet its control tokens swallow the white space after them (llama.cpp likewise
    # goes by the model's name).
    is_phi3 = any(name in str(metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    control, user_defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == NORMAL and token not in END_OF_GENERATION:
            continue
        rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        if _is_control(token, kind):
            control.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == USER_DEFINED:
            user_defined.append(AddedToken(token, special=False, normalized=False, rstrip=rstrip))
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int, default: int | None) -> int | None:
    token_id = _get(metadata, f"{name}_token_id", default)
    return token_id if isinstance(token_id, int) and 0 <= token_id < vocab_size else None


def _end_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], eos_id: int | None
) -> frozenset[int]:
    declared = {_token_id(metadata, name, len(tokens), None) for name in ("eot", "eom")} | {eos_id}
    known = {i for i, token in enumerate(tokens) if token in END_OF_GENERATION}
    texts = {tokens[i] for i in known}
    if {"<|return|>", "<|call|>"} <= texts:  # harmony: <|end|> only ends a message of several
        known = {i for i in known if tokens[i] != "<|end|>"}
    return frozenset(i for i in declared | known if i is not None)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {"default": metadata[prefix]} if isinstance(metadata.get(prefix), str) else {}
    for key, value in metadata.items():
        if key.startswith(prefix + ".") and isinstance(value, str):
            templates[key.removeprefix(prefix + ".")] = value
    return templates
