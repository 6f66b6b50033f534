"""Pre-tokenizers of byte-level BPE vocabularies, by the name that `tokenizer.ggml.pre` gives.

The names and what they mean follow llama.cpp (`src/llama-vocab.cpp`). A pre-tokenizer is a list of regular
expressions applied one after the other: each splits every piece so far into its matches and what lies between.
Where llama.cpp rewrites a model's own expression for the limits of its regex engine (case-insensitive groups,
`\\p{Lu}` classes), the model's original is used, since the engine here (Oniguruma) knows both.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_HEAD = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_CASED_TAIL = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED_HEAD}|{_CASED_TAIL}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED_HEAD}{_CONTRACTION}?|{_CASED_TAIL}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED_REST}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# DeepSeek's letters, by code point since some of them are easily swapped for look-alikes (U+2126 OHM SIGN for U+03A9).
_DEEPSEEK_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _code_points(ranges: str) -> str:
    """The inside of a character class from hexadecimal code points and ranges."""
    return "".join("-".join(f"\\x{{{code}}}" for code in pair.split("-")) for pair in ranges.split())


_CJK_HANGUL = f"[{_code_points('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_CJK_KANA = f"[{_code_points('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_DEEPSEEK_MARKS = rf"\s?[!-/:-~{_code_points('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE vocabulary splits text before merging.

    ``ignore_merges``: a piece that is itself an entry of the vocabulary is taken whole.
    ``add_bos``: whether a BOS is added where the file says nothing about it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
"""What llama.cpp takes where a file does not name its pre-tokenizer."""

_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

_NAMES: dict[PreTokenizer, str] = {
    DEFAULT: "default",
    _LLAMA_BPE: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    _PLAIN_LLAMA3: "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_code_points(_DEEPSEEK_LETTERS)}]+",
            _DEEPSEEK_MARKS,
            r"\s+$",
            _CJK_HANGUL,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")): "deepseek-coder",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    _DIGITS_THEN_GPT2: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    _PLAIN_GPT2: "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    _PLAIN_QWEN2: "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2",
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_BLOOM,)): "poro-chat bloom gpt3-finnish",
    PreTokenizer((_BLOOM, r"\p{N}")): "viking",
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    _BAILING: "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)): "seed-coder",
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _NAMES.items() for name in names.split()}
"""Pre-tokenizers by their llama.cpp name."""
