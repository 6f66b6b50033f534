"""Tokenizers from a Hugging Face folder: `tokenizer.json` and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minillm.core.errors import ModelLoadError
from minillm.models.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder with `tokenizer.json`.

    Read besides, where they exist: `tokenizer_config.json`, `special_tokens_map.json` (special tokens, BOS/EOS
    flags, template), `chat_template.jinja`, `chat_template.json`, `additional_chat_templates/`, and
    `generation_config.json` or else `config.json` (EOS ids). Raises :class:`ModelLoadError`.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = ""
        if any(folder.glob("*.model")):
            hint = (
                "; a SentencePiece .model alone is not read: save it with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes tokenizer.json"
            )
        raise ModelLoadError(f"{folder}: tokenizer.json is missing{hint}")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()

    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    _add_missing_tokens(backend, config, named)
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    prefix, suffix = _affixes(backend, config, ids.get("bos_token"), ids.get("eos_token"))
    variables: dict[str, Any] = dict(named)
    extra = config.get("additional_special_tokens")
    if isinstance(extra, list):
        variables["additional_special_tokens"] = [text for token in extra if (text := _token_text(token))]
    return Tokenizer(
        backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        unk_token_id=ids.get("unk_token"),
        pad_token_id=ids.get("pad_token"),
        eos_token_ids=_configured_eos(folder),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_templates=_chat_templates(folder, config),
        template_variables=variables,
        source=str(folder),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """A token given as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_missing_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only the configuration declares, and special flags that only it gives."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    items = sorted(declared.items(), key=lambda item: int(item[0])) if isinstance(declared, dict) else []
    tokens = []
    for _, value in items:
        text = _token_text(value)
        if text is not None and text not in known:
            flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
            tokens.append(AddedToken(text, normalized=bool(value.get("normalized", not flags["special"])), **flags))
    seen = known.keys() | {token.content for token in tokens}
    tokens += [
        AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(named.values())
        if text not in seen or (text in known and not known[text].special)
    ]
    for token in tokens:
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _affixes(backend: Backend, config: dict[str, Any], bos: int | None, eos: int | None) -> tuple[list[int], list[int]]:
    """Ids that `add_special_tokens` puts before and after a text.

    Explicit `add_bos_token` / `add_eos_token` decide, as in transformers; else the file's own post-processor does.
    """
    if "add_bos_token" in config or "add_eos_token" in config or backend.post_processor is None:
        prefix = [bos] if config.get("add_bos_token") and bos is not None else []
        suffix = [eos] if config.get("add_eos_token") and eos is not None else []
        return prefix, suffix
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _configured_eos(folder: Path) -> list[int]:
    """EOS ids of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise ModelLoadError(f"{folder / name}: eos_token_id={value!r} is not a token id or a list of them")
            return ids
    return []


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for value in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            named = [item for item in value if isinstance(item, dict)]
            templates |= {str(item.get("name")): str(item.get("template")) for item in named}
    files = [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in [*files, ("default", folder / "chat_template.jinja")]:
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    return templates
