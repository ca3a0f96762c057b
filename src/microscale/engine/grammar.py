"""Grammars over the vocabulary: which tokens may come next, through ``llguidance``.

Owns the vocabulary as llguidance wants it, compiled grammars, and a ``Matcher`` for each request that has one. A
grammar is llguidance's own text, made by the server; the engine does not interpret it. A matcher's state follows from
its request's tokens alone, so preemption and the prefix cache do not affect it.

``llguidance`` is imported with the first grammar: benchmarks, and engines that see none, do without it.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from microscale.errors import BadRequest, Unsupported

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 64
MAX_CACHED_CHARS = 4 * 2**20
"""Compiled grammars that are kept, and the length of their texts together."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each. llguidance's own bound is five times as high."""
PARALLEL_ROWS = 4
"""From here on masks are filled by several threads: 64 rows in 0.19 ms instead of 0.39 (two cores, llguidance 1.9)."""
MAX_REASON_CHARS = 400


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token. A control token is known by its name, as grammars spell it, and no text matches it."""

    tokens: Sequence[bytes]
    control: Sequence[int]
    split: str = r"[\s\S]+"
    """What text is cut into before bytes are merged. It decides which of many spellings a forced text gets."""


class Matcher:
    """The state of one request in its grammar."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token: int) -> None:
        self.inner.consume_token(token)

    def after(self, token: int) -> Matcher:
        """Another matcher, in the state that follows ``token``. 2 us, and 10 more with a mask of its own."""
        matcher = Matcher(self.inner.deep_copy())
        matcher.accept(token)
        return matcher

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these could follow, one after the other."""
        return 0 if self.fault else self.inner.validate_tokens(list(tokens))

    @property
    def ended(self) -> bool:
        """No token may follow: the grammar is complete, or has failed."""
        return self.inner.is_stopped()

    @property
    def fault(self) -> str | None:
        """Why no mask can be made here."""
        if self.inner.is_error():
            return f"The grammar cannot be followed any further: {reason(self.inner.get_error())}"
        if self.ended:
            return "The grammar is complete, and its last token did not end the output; add it to stop_token_ids."
        return None


class Grammars:
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, num_tokens: int) -> None:
        """``num_tokens``: how many the model has; those that ``vocabulary`` lacks are never allowed."""
        self._vocabulary: Vocabulary | None = vocabulary
        self._num_tokens = num_tokens
        self._mask_bytes = -(-num_tokens // 32) * 4
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, text: str) -> Matcher:
        """A matcher at the beginning of the grammar ``text``; compiles what is not at hand, which may take a second."""
        with self._lock:
            compiled = self._compiled.get(text)
            if compiled is not None:
                self._compiled.move_to_end(text)
                return Matcher(compiled.deep_copy())
        made = self._compile(text)
        with self._lock:
            self._compiled[text] = made
            while len(self._compiled) > MAX_CACHED or sum(map(len, self._compiled)) > MAX_CACHED_CHARS:
                self._compiled.popitem(last=False)
        return Matcher(made.deep_copy())

    def warm_up(self) -> None:
        """Make what every grammar needs: 0.8 s for 201,088 tokens, in which no other thread of Python's runs."""
        with self._lock:
            if self._tokenizer is None:
                assert self._vocabulary is not None
                self._tokenizer = _tokenizer(self._vocabulary, self._num_tokens)
                self._vocabulary = None

    def fill(self, rows: Sequence[tuple[int, Matcher]], address: int, num_rows: int) -> dict[int, str]:
        """Write the mask of each matcher to its row of a standing [num_rows, words] buffer at ``address``.

        Gives the rows that have none, with the reason.
        """
        faults = {row: fault for row, matcher in rows if (fault := matcher.fault)}
        good = [(matcher.inner, row) for row, matcher in rows if row not in faults]
        if len(good) >= PARALLEL_ROWS:
            if self._executor is None:
                self._executor = import_library().LLExecutor()
            self._executor.unsafe_compute_mask_ptr(good, address, self._mask_bytes, num_rows)
        else:
            for inner, row in good:
                inner.unsafe_compute_mask_ptr(address + row * self._mask_bytes, self._mask_bytes)
        return faults | {row: fault for row, matcher in rows if matcher.inner.is_error() and (fault := matcher.fault)}

    def _compile(self, text: str) -> llguidance.LLMatcher:
        self.warm_up()
        library = import_library()
        limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        assert self._tokenizer is not None
        made: llguidance.LLMatcher = library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if made.is_error():
            raise BadRequest(reason(made.get_error()))
        # Some grammars that nothing satisfies are only refused with their first mask.
        made.compute_bitmask()
        if made.is_error():
            message = reason(made.get_error())
            # llguidance's word for a grammar that allows no token; any other is a bound that was met.
            raise BadRequest("No text satisfies it." if "NoExtension" in message else message)
        made.reset()
        return made


def _tokenizer(vocabulary: Vocabulary, num_tokens: int) -> llguidance.LLTokenizer:
    control = {token for token in vocabulary.control if token < num_tokens}
    known = list(enumerate(vocabulary.tokens[:num_tokens]))
    # Byte-pair merges go by rank, and a rank is an id. Where two tokens have the same bytes, the first is a spare
    # for characters that the vocabulary lacks, and text has the second.
    ranks = {text: token for token, text in known if text and token not in control}
    try:
        made: llguidance.LLTokenizer = import_library().LLTokenizer.from_tiktoken(
            encoder=ranks,
            special_tokens={text.decode(): token for token, text in known if token in control},
            pattern=vocabulary.split,
            # Grammars name the token that ends them, so this one is allowed only where nothing is asked any more.
            eos_token=max(control),
            n_vocab=num_tokens,
        )
    except ValueError as error:
        raise Unsupported(f"llguidance cannot use this tokenizer: {error}.") from None
    return made


def import_library() -> ModuleType:
    """With the first grammar, and not above: a machine that only runs benchmarks need not have it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise Unsupported("Structured output needs llguidance; install it: pip install llguidance") from None


_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_NOISE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: |<non-verbose/>|^ *\^+ *$", re.MULTILINE)


def reason(message: str) -> str:
    """llguidance's sentence, without its place in a text that the client has not written."""
    text = " ".join(_NOISE.sub("", _LISTING.sub("", message)).split())
    return text[:MAX_REASON_CHARS].rstrip(". ") + "."
