"""CPU time of the masks of a JSON schema, along outputs as a model writes them, on the built-in model's vocabulary."""

from __future__ import annotations

import json
import time

import numpy as np

from minillm.core.structured_outputs import StructuredOutputs
from minillm.engine.grammar import GrammarCompiler, mask_words
from minillm.models.default_model import resolve_model
from minillm.models.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NAMES = ["Alice Johnson", "Bob", "Dr. Emmett L. Brown", "Zoë Müller", "李小龍", "Jean-Luc Picard", "Ada Lovelace"]


def main() -> None:
    """Three passes over the same outputs: the lexer's tables fill in the first."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m").path)
    size = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer, vocab_size=size, eos_token_ids=tokenizer.eos_token_ids)
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA))
    row = np.zeros(mask_words(size), dtype=np.int32)
    for number in range(3):
        spent = []
        for i, name in enumerate(NAMES):
            text = json.dumps({"name": name, "age": 20 + i, "tags": ["a", "b", "c"][: i % 4]}, ensure_ascii=False)
            ids: list[int] = []
            matcher = grammar.matcher(ids)
            for token in tokenizer.encode(text, add_special_tokens=False):
                begin = time.thread_time()
                matcher.fill(row)
                spent.append(1e6 * (time.thread_time() - begin))
                ids.append(token)
        median, mean, p99 = np.median(spent), np.mean(spent), np.percentile(spent, 99)
        print(f"pass {number + 1}: {len(spent)} masks, median {median:.0f} us, mean {mean:.0f} us, p99 {p99:.0f} us")


if __name__ == "__main__":
    main()
