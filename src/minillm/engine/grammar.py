"""Structured output: from a request's schema, expression or grammar to masks of the tokens that may come next.

```
caller's thread: GrammarCompiler.compile ──► CompiledGrammar      checked in a process of its own, cached
engine's thread: CompiledGrammar.matcher(output_ids) ──► GrammarMatcher ──► bits of the allowed tokens
```
The work is done by the library `llguidance` (a lexer of derivatives and an Earley parser over a token trie); it is
imported when the first such request comes.

A matcher's state is a function of the tokens that were committed, so nothing has to be saved or undone when a request
is preempted, swapped or recomputed.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import InvalidParameterError, MiniLLMError, StructuredOutputsUnavailableError
from minillm.core.structured_outputs import StructuredOutputs, ToolCalls
from minillm.engine import grammar_check
from minillm.engine.grammar_calls import call_rules
from minillm.models.tokenizer import TextMode

if TYPE_CHECKING:
    import numpy as np

    from minillm.models.tokenizer import Tokenizer

logger = logging.getLogger("minillm.engine")

DEFAULT_WHITESPACE = r" |\n[ \t]{0,20}"
"""What may stand between the parts of JSON: a space, or a new line with its indent (llama.cpp's rule).

JSON allows any amount, and small models can go on with it until their tokens are spent."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 20_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of the library: work at compile time, work for one mask, and about 2 KB of memory per lexer state."""

CHECK_TIMEOUT = 10.0
"""Seconds for the check of a grammar; its CPU time has a limit of its own, this is for a machine that is busy."""

MAX_MASK_SECONDS = 0.5
"""CPU time after which one mask is too dear: the whole batch waits for it."""

CACHE_ENTRIES = 64
CACHE_CHARACTERS = 8 << 20
MAX_CHECKS = 2
"""Grammars that are compiled at the same time."""

_MAX_ERROR = 300
_JSON_OBJECT = '{"type":"object"}'


class GrammarError(MiniLLMError):
    """A grammar failed while it was used; it concerns the one request."""


class GrammarCompiler:
    """Compiles structured-output requests for one tokenizer, and keeps the results. Thread-safe.

    `vocab_size` is the width of the logits. Requests that are refused are remembered as well: trying a bad schema
    again costs nothing.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self._vocabulary: Any = None
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar | str] = OrderedDict()
        self._cached_characters = 0
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CHECKS)

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """The compiled grammar. Takes microseconds for one that is known, otherwise up to some seconds.

        Raises :class:`InvalidParameterError` for what does not compile within the limits, and
        :class:`StructuredOutputsUnavailableError` where the library is missing or the tokenizer is of a wrong kind.
        """
        found = self._look_up(spec)
        if found is None:
            with self._slots:
                found = self._look_up(spec)  # whoever held the slot may have compiled the same
                if found is None:
                    found = self._compile(spec)
                    self._keep(spec, found)
        if isinstance(found, str):
            rule = found if spec.or_calls is None else f"{found} (of this form, or of the tools' parameters)"
            raise InvalidParameterError(f"structured_outputs.{spec.kind}", _value(spec), rule)
        return found

    def knows(self, spec: StructuredOutputs) -> bool:
        """Whether :meth:`compile` has the answer already."""
        return self._look_up(spec) is not None

    def has_made(self, grammar: CompiledGrammar) -> bool:
        """Whether the grammar is for this tokenizer."""
        return grammar.vocabulary is self._vocabulary

    def _look_up(self, spec: StructuredOutputs) -> CompiledGrammar | str | None:
        with self._lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
            return found

    def _keep(self, spec: StructuredOutputs, result: CompiledGrammar | str) -> None:
        with self._lock:
            if spec in self._cache:
                return
            self._cache[spec] = result
            self._cached_characters += _size(spec)
            while len(self._cache) > CACHE_ENTRIES or self._cached_characters > CACHE_CHARACTERS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_characters -= _size(oldest)

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar | str:
        """The grammar, or why there is none."""
        import numpy as np

        vocabulary = self._load_vocabulary()
        control_texts = {self._tokenizer.id_to_piece(token_id) for token_id in self._tokenizer.control_ids}
        answer = _checked_grammar(spec, control_texts)
        if "error" in answer:
            return answer["error"]
        try:
            grammar = CompiledGrammar(answer["grammar"], vocabulary, self.vocab_size, self.eos_token_ids)
            # The first mask shows what the check cannot see (nothing fits), and warms the lexer up.
            first = np.zeros(mask_words(self.vocab_size), dtype=np.int32)
            grammar.matcher([]).fill(first)
            grammar.only_empty = not (first & ~_bits(self.eos_token_ids, self.vocab_size)).any()
        except GrammarError as error:
            return str(error)
        return grammar

    def _load_vocabulary(self) -> Any:
        """The library's view of the tokenizer, made once."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _make_vocabulary(self._tokenizer, self.vocab_size, self.eos_token_ids)
            return self._vocabulary


class CompiledGrammar:
    """A grammar that compiled, for one vocabulary. Matchers are copies that share its lexer's tables."""

    def __init__(self, grammar: str, vocabulary: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.tables = 0
        """Number of the lexer tables in use; see :meth:`renew_tables`."""
        self.only_empty = False
        """Whether the empty output is the only one."""
        self._grammar = grammar
        self.vocabulary = vocabulary
        self._eos_bits = _bits(eos_token_ids, vocab_size)
        self._prototype = self._build()

    def matcher(self, output_ids: list[int], *, may_end: bool = True) -> GrammarMatcher:
        """A matcher for the sequence whose committed tokens are, and will be, in `output_ids` (the list itself).

        `may_end=False`: an EOS token is not offered as long as the output can go on (`ignore_eos`).
        """
        return GrammarMatcher(self, output_ids, None if may_end else self._eos_bits)

    def _build(self) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        made = _guarded(LLMatcher, self.vocabulary, self._grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if made.is_error():
            raise GrammarError(_first_line(made.get_error()))
        return made

    def copy(self) -> Any:
        """A library matcher in its initial state."""
        return _guarded(self._prototype.deep_copy)

    def renew_tables(self, full: int) -> None:
        """Start with empty lexer tables if those numbered `full` are in use: they have come to their limit.

        All matchers of a grammar fill the same tables. So one in steady use comes to the limit some day, and without
        this none of its requests could go on.
        """
        if self.tables == full:
            self._prototype = self._build()
            self.tables += 1


class GrammarMatcher:
    """Where one sequence stands in its grammar. For the engine's thread."""

    __slots__ = ("_count", "_grammar", "_held_back", "_matcher", "_output_ids", "_tables")

    def __init__(self, grammar: CompiledGrammar, output_ids: list[int], held_back: np.ndarray | None) -> None:
        self._grammar = grammar
        self._output_ids = output_ids
        self._held_back = held_back
        self._restart()

    def _restart(self) -> None:
        self._tables = self._grammar.tables
        self._matcher = self._grammar.copy()
        self._count = 0

    def advance(self) -> bool:
        """Take in the tokens committed since the last call; whether the output is complete and nothing can follow.

        Raises :class:`GrammarError` if a token does not fit, or the grammar cannot be followed within its limits.
        """
        self._retried(self._consume)
        return bool(self._matcher.is_stopped())

    def fill(self, row: np.ndarray) -> bool:
        """Write the bits of the tokens that may come next (int32 [ceil(V / 32)]).

        False if nothing can follow the tokens so far: the output is complete. (The empty output is not known to be
        complete without a token, so there the EOS bits are set.) Raises :class:`GrammarError`.
        """
        begun = time.thread_time()
        self._retried(self._consume)
        self._retried(lambda: _guarded(self._matcher.unsafe_compute_mask_ptr, row.ctypes.data, row.nbytes))
        spent = time.thread_time() - begun
        if spent > MAX_MASK_SECONDS:
            raise GrammarError(f"it took {spent:.2f} s for one token; the limit is {MAX_MASK_SECONDS} s")
        goes_on = not self._matcher.is_stopped()
        if goes_on and self._held_back is not None:
            others = row & ~self._held_back
            goes_on = bool(others.any())
            if goes_on:
                row[:] = others
        return goes_on or self._count == 0

    def _consume(self) -> None:
        ids = self._output_ids
        if self._count < len(ids):
            _guarded(self._matcher.consume_tokens, ids[self._count :])
            self._count = len(ids)

    def _retried(self, action: Callable[[], None]) -> None:
        """Do it; once more on new lexer tables if the shared ones are full."""
        self._run(action)
        if self._has_failed() and "too many" in self._matcher.get_error():
            logger.info("the lexer tables of a grammar are full; it starts with new ones")
            self._grammar.renew_tables(self._tables)
            self._restart()
            self._run(self._consume)
            self._run(action)
        if self._has_failed():
            raise GrammarError(_first_line(self._matcher.get_error()))

    def _run(self, action: Callable[[], None]) -> None:
        """The library reports failures by the matcher's state; some calls raise as well."""
        try:
            action()
        except GrammarError:
            if not self._has_failed():
                raise

    def _has_failed(self) -> bool:
        return bool(self._matcher.is_error())


def mask_words(vocab_size: int) -> int:
    """Length of a mask row in 32-bit words."""
    return -(-vocab_size // 32)


def _bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] with the bits of these ids set."""
    import numpy as np

    flags = np.zeros(mask_words(vocab_size) * 32, dtype=bool)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def _guarded(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call the library; what it raises (a panic of its own is no `Exception`) becomes a :class:`GrammarError`."""
    try:
        return function(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise GrammarError(_first_line(str(error)) or type(error).__name__) from error


def _first_line(message: str) -> str:
    """A message of the library without the dump of its state behind it."""
    text = " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _value(spec: StructuredOutputs) -> object:
    return getattr(spec, spec.kind)


def _size(spec: StructuredOutputs) -> int:
    value = _value(spec)
    calls = 0 if spec.or_calls is None else len(spec.or_calls.schema)
    return calls + (sum(map(len, value)) if isinstance(value, tuple) else len(str(value)))


# -- the check -------------------------------------------------------------------------------------------


def _checked_grammar(spec: StructuredOutputs, control_texts: Collection[str]) -> dict[str, str]:
    """The library's grammar for the request (`grammar`), or why there is none (`error`).

    Found out by :mod:`minillm.engine.grammar_check`, run as a process that cannot outgrow its limits (about 0.1 s of
    CPU time). What is plainly small is spared that.
    """
    kind = "json" if spec.json_object else spec.kind
    calls = spec.or_calls
    request: dict[str, Any] = {"kind": kind, "text": _text(spec), "options": _json_options(spec)}
    request["calls"] = None if calls is None else _calls(calls)
    is_small = spec.json_object or spec.choice is not None
    is_small = is_small or (spec.json is not None and is_plain(json.loads(str(spec.json))))
    is_small = is_small and (calls is None or is_plain(json.loads(str(calls.schema))))
    if not is_small or spec.whitespace_pattern is not None:
        answer = _run_check(request)
        if calls is None or "error" in answer:
            return answer
    if calls is not None:  # the process of the check has no vocabulary, and so no tokens that are tags
        request["calls"] = _calls(calls, control_texts)
    return {"grammar": grammar_check.make_grammar(**request)}


def _calls(calls: ToolCalls, control_texts: Collection[str] = ()) -> dict[str, Any]:
    options = {"lenient": calls.ignore_unsupported, "whitespace_pattern": DEFAULT_WHITESPACE}
    return {"schema": calls.schema, "options": options, "rules": call_rules(calls, control_texts)}


def _run_check(request: dict[str, Any]) -> dict[str, str]:
    command = [sys.executable, "-I", grammar_check.__file__, *_library_folder()]
    try:
        done = subprocess.run(
            command,
            input=json.dumps({**request, "limits": LIMITS}).encode(),
            capture_output=True,
            timeout=CHECK_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # Not the grammar's fault alone, which its CPU time would have shown: so it is not remembered as bad.
        rule = f"its check took more than {CHECK_TIMEOUT:.0f} s; this machine is busy, try again"
        raise InvalidParameterError("structured_outputs", request["kind"], rule) from None
    except OSError as error:
        raise StructuredOutputsUnavailableError(
            f"structured output: no process for the check of a grammar can be started: {error}"
        ) from error
    if done.returncode:
        # Killed for its CPU time, out of memory, or crashed: in each case it is the grammar that did it.
        logger.info("the check of a grammar ended with %d: %s", done.returncode, done.stderr[-500:])
        limits = f"{grammar_check.CPU_SECONDS} s of CPU time and {grammar_check.MEMORY_BYTES >> 20} MiB"
        return {"error": f"it does not compile within {limits}; make it smaller (allOf, references, repetitions)"}
    answer = json.loads(done.stdout)
    if "error" in answer:
        answer["error"] = _first_line(answer["error"])
    return answer


_ANNOTATIONS = ("$defs", "$schema", "default", "definitions", "description", "strict", "title")
_BOUNDS = ("maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum")
_PARTS = ("additionalProperties", "anyOf", "const", "enum", "items", "properties", "required", "type")
_PLAIN_BESIDE_REF = frozenset({"$ref", *_ANNOTATIONS})
_PLAIN_KEYWORDS = _PLAIN_BESIDE_REF | {*_BOUNDS, *_PARTS}
_MAX_PLAIN_SCHEMAS = 256


def is_plain(schema: object) -> bool:
    """Whether a JSON schema is one whose cost is known to be small: few parts, and none that multiply.

    Keywords that make the compiler intersect schemas or languages (allOf, oneOf, patterns, a reference with conditions
    beside it) are not plain.
    """
    waiting, count = [schema], 0
    while waiting:
        inner = waiting.pop()
        count += 1
        if isinstance(inner, bool):
            continue
        if count > _MAX_PLAIN_SCHEMAS or not isinstance(inner, dict) or not inner.keys() <= _PLAIN_KEYWORDS:
            return False
        if "$ref" in inner and not inner.keys() <= _PLAIN_BESIDE_REF:
            return False
        for name in ("properties", "$defs", "definitions"):
            waiting += list(inner.get(name, {}).values()) if isinstance(inner.get(name, {}), dict) else [None]
        branches = inner.get("anyOf", [])
        if not isinstance(branches, list) or len(branches) > 16:
            return False
        waiting += branches
        waiting += [inner[name] for name in ("items", "additionalProperties") if name in inner]
    return True


def _library_folder() -> list[str]:
    import llguidance

    return [str(Path(path).parent) for path in llguidance.__path__[:1]]


def _text(spec: StructuredOutputs) -> str:
    if spec.json_object:
        return _JSON_OBJECT
    if spec.json == "true":
        return "{}"  # the same to a schema, and it can carry options
    return json.dumps(spec.choice) if spec.choice is not None else str(_value(spec))


def _json_options(spec: StructuredOutputs) -> dict[str, Any]:
    """Options of the library's JSON schema compiler."""
    options: dict[str, Any] = {"lenient": spec.ignore_unsupported}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = spec.whitespace_pattern or DEFAULT_WHITESPACE
    return options


# -- the vocabulary --------------------------------------------------------------------------------------


class _VocabularySource:
    """The tokenizer in the form that the library reads: every id's bytes, and which ids are no text.

    Ids without a token (gaps, padding of the logits) have no bytes and are never allowed. Called with a text it
    gives the model's own tokens for it; the library asks that for text that the grammar leaves no choice about.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        control = tokenizer.control_ids | set(eos_token_ids)
        self.special_token_ids = sorted(token_id for token_id in control if token_id < vocab_size)
        self._tokenizer = tokenizer
        # A SentencePiece tokenizer puts a space before the first word of a text: encode behind something, and cut it.
        self._before = "\x02" if tokenizer.strips_first_space else ""
        self._num_before = len(self._encode(self._before)) if self._before else 0

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is encoded, not bytes")
        ids = self._encode(self._before + text)[self._num_before :]
        if b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        return self._greedy(text.encode())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def _greedy(self, data: bytes) -> list[int]:
        """Byte by byte, for a text that the tokenizer does not give back as it was."""
        single = {token: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}
        return [single[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in single]


def _make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    if tokenizer.text_mode is TextMode.BACKEND:
        raise StructuredOutputsUnavailableError(
            "structured output: this model's tokenizer does not join its tokens byte by byte, so no grammar can be "
            "followed over them"
        )
    if not eos_token_ids:
        raise StructuredOutputsUnavailableError("structured output: this model has no token that ends an output")
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise StructuredOutputsUnavailableError(
            "structured output needs the package llguidance: pip install 'minillm-runtime[structured]'"
        ) from error
    source = TokenizerWrapper(_VocabularySource(tokenizer, vocab_size, eos_token_ids))
    return _guarded(LLTokenizer, source, n_vocab=vocab_size, eos_token=list(eos_token_ids))
