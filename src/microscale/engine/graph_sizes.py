"""The sizes that steps run in, and the order in which their graphs are captured.

A key (``Step``) has the sizes that kernels are chosen by. There are four kinds:

    decode   every sequence has one token            tokens, table width
    verify   sequences decode with drafts            tokens, sequences, longest sequence, table width
    body     a step with prompts, up to the queries  tokens, sequences (2, 17 or all), table width; ``rows`` is 0
             of the last layer
    tail     the rest, for tokens that give logits   rows, table width

Tables have one of two widths. The number of tokens is one of a sorted list. Decode and tail have every number up to 64,
then 16 between powers of two. Bodies have *buckets*: every number up to 16, then each at most 12 % more than the
smallest step in it. Which kernels run depends on the number of tokens, and a step must run the same ones padded as
it would unpadded: so a bucket ends wherever they change.

Before "ready" few sizes are captured, but so that every step of up to ``LARGE`` tokens with a short context fits into
one that is not much larger. The others follow when the engine is idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, log

from microscale.engine.limits import SHORT_CONTEXT
from microscale.engine.work import Work
from microscale.models.recorded import Step

EVERY_SIZE_TO, EVERY_BUCKET_TO = 64, 16
GROWTH = 1.12
ALIGNED_FROM, ALIGNMENT = 64, 8
"""Larger buckets are multiples of a matrix instruction's columns."""
FEW_SEQUENCES = (2, 17)
"""Sequences that a body is padded to, besides the most there may be: one prompt and padding, or a few of each."""
LARGE = 1024
"""Larger steps take the GPU about as long as the host needs to launch their kernels: 15 to 26 ms on an H200 for up to
2048 tokens of gpt-oss-20b, 20 to 31 on its host. Their graphs can wait until the engine is idle."""
FIRST_SEQUENCES = 8
"""Every number of sequences up to this one that decode together has a graph of its own from the start."""
FIRST_TOKENS = 16
"""Smaller prompts share a graph at first: chats begin with more."""
ALONE, COMPANY, CROWD, ROWS = 1.5, 1.7, 2.0, 1.25
"""How much larger than a step its first graph may be, in tokens: for a prompt alone, with a few sequences, with many,
and for steps without prompts. Twice the tokens take an H200 1.1 times as long at 64 tokens, 1.45 times at 512."""


def graph_size(rows: int) -> int:
    """What ``rows`` are padded to: nothing up to 64, then at most a sixteenth more."""
    if rows <= EVERY_SIZE_TO:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


def table_width(longest: int, page_size: int, max_pages: int) -> int:
    """Pages of a table whose sequences have up to ``longest`` tokens: one of two widths.

    Kernels learn from it how long a sequence may be. Up to the narrow one attention adds up its splits in the same
    launch.
    """
    short = min(SHORT_CONTEXT // page_size, max_pages)
    return short if longest <= short * page_size else max_pages


def power_of_two(number: int) -> int:
    """The next one from ``number`` on; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0


def plain_buckets(most: int) -> list[int]:
    """Ends of buckets up to ``most``, wherever kernels change."""
    ends = list(range(1, min(EVERY_BUCKET_TO, most) + 1))
    while ends[-1] < most:
        size = int((ends[-1] + 1) * GROWTH)
        if size > ALIGNED_FROM:
            size = size // ALIGNMENT * ALIGNMENT
        ends.append(min(max(size, ends[-1] + 1), most))
    return ends


def buckets(most: int, kernels: Callable[[int], Hashable]) -> list[int]:
    """``plain_buckets``, and each number of tokens after which the kernels change. ``kernels``: those of a step of so
    many tokens. If two neighbouring ends differ, they change once in between."""
    ends = plain_buckets(most)
    changes = [change for low, high in pairwise(ends) for change in _changes(low, high, kernels)]
    return sorted({*ends, *changes})


def _changes(low: int, high: int, kernels: Callable[[int], Hashable]) -> list[int]:
    """The last numbers before a change, from ``low`` on and below ``high``."""
    if kernels(low) == kernels(high):
        return []
    if high - low == 1:
        return [low]
    middle = (low + high) // 2
    return _changes(low, middle, kernels) + _changes(middle, high, kernels)


def kernel_ends(ends: Sequence[int], kernels: Callable[[int], Hashable]) -> list[int]:
    """The buckets after which the kernels change, and the last."""
    return [*(low for low, high in pairwise(ends) if kernels(low) != kernels(high)), ends[-1]]


def coarse(ends: Sequence[int], stops: Iterable[int], ratio: float, above: int = 0) -> list[int]:
    """Few of the sizes ``ends``: all ``stops`` greater than ``above``, and as many between two of them that each is
    about ``ratio`` times the smallest number that is padded to it, or less."""
    chosen: set[int] = set()
    for stop in stops:
        if stop > above:
            growth = stop / (above + 1)
            parts = max(1, ceil(log(growth) / log(ratio)))
            sizes = [(above + 1) * growth ** (part / parts) for part in range(1, parts + 1)]
            chosen |= {min(ends, key=lambda end: abs(log(end / size))) for size in sizes}
            above = stop
    return sorted(chosen)


def _powers(base: int, most: int) -> list[int]:
    """Powers of ``base`` below ``most``, and ``most``."""
    powers = (base**power for power in range(most.bit_length()))
    return [*(power for power in powers if power < most), most]


def _size(key: Step) -> tuple[int, int]:
    return key.tokens, key.sequences


def decode_key(sequences: int, pages: int) -> Step:
    size = graph_size(sequences)
    return Step(size, size, 1, pages)


def tail_key(rows: int, pages: int) -> Step:
    size = graph_size(rows)
    return Step(size, size, 1, pages, rows=size)


def verify_key(counts: Sequence[int], pages: int) -> Step:
    """The key for sequences with these numbers of tokens."""
    total, longest = sum(counts), power_of_two(max(counts))
    tokens = graph_size(total)
    sequences = power_of_two(len(counts) + -(-(tokens - total) // longest))
    return Step(tokens, sequences, longest, pages, verify=True)


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of one runner's steps."""

    page_size: int
    max_pages: int
    """Per sequence."""
    max_sequences: int
    """That decode together."""
    max_drafted: int
    """Sequences with drafts in a step."""
    draft_tokens: int
    """The longest draft; 0 without drafts."""
    max_tokens: int
    max_rows: int
    """Tokens of a step with prompts that may give logits."""
    buckets: Sequence[int]
    """Empty where steps with prompts are not padded."""
    kernel_ends: Sequence[int]
    """Buckets after which the kernels change, and the last."""

    def key(self, schedule: Sequence[Work], counts: Sequence[int]) -> Step:
        """The sizes that a schedule is padded to. ``counts``: tokens of each sequence."""
        total, end, decodes = sum(counts), 0, True
        for work in schedule:
            end = max(end, work.first + work.slack + work.count)
            decodes = decodes and work.verifies
        if decodes:
            pages = table_width(end, self.page_size, self.max_pages)
            if total == len(counts):
                return decode_key(total, pages)
            if self.draft_tokens:
                return verify_key(counts, pages)
        place = bisect_left(self.buckets, total)
        if place == len(self.buckets):
            return Step(total, len(counts), max(counts), -(-end // self.page_size), rows=0)
        # There is always room for a padding sequence: the step may run in a larger bucket.
        sequences = next(size for size in self.body_sequences if size > len(counts))
        return self._body(self.buckets[place], sequences, table_width(end, self.page_size, self.max_pages))

    def has_graph(self, key: Step) -> bool:
        """Whether steps of this size are captured. Large ones and prompts that are not padded are launched."""
        return key.rows != 0 or (bool(self.buckets) and key.tokens <= self.buckets[-1])

    @property
    def body_sequences(self) -> list[int]:
        """What the sequences of a body are padded to."""
        most = self.max_sequences + 1
        return sorted({min(size, most) for size in (*FEW_SEQUENCES, most)})

    @staticmethod
    def _body(tokens: int, sequences: int, pages: int) -> Step:
        return Step(tokens, sequences, tokens, pages, rows=0)

    def first(self) -> list[Step]:
        """What is captured before "ready". Of each kind the smallest comes first, since the first one is also launched;
        then the largest, into whose memory the others fit: a body's, then by the rows of logits. Then the rest."""
        narrow, *wide = self._widths
        most = self.max_sequences
        sizes = [graph_size(rows) for rows in range(1, most + 1)]
        many = coarse(sizes, _powers(2, most), ROWS, above=FIRST_SEQUENCES)
        decodes = [decode_key(rows, narrow) for rows in (*sizes[:FIRST_SEQUENCES], *many)]
        decodes += [decode_key(rows, pages) for pages in wide for rows in _powers(8, most)]
        bodies = [key for key in self._coarse_bodies(narrow) if key.tokens <= self._enough]
        tails = [tail_key(rows, narrow) for rows in _powers(2, self.max_rows)] if self.buckets else []
        bodies.sort(key=_size, reverse=True)
        kinds = [kind for kind in (bodies, tails, list(self._verify(narrow)), decodes) if kind]
        smallest, largest = ([choose(kind, key=_size) for kind in kinds] for choose in (min, max))
        return list(dict.fromkeys(chain(smallest, largest, *reversed(kinds))))

    def later(self) -> list[Step]:
        """What is captured when the engine is idle: first sizes that large steps and long contexts fit into, then all
        others."""
        keys: list[Step] = []
        for pages in self._widths:
            keys += self._coarse_bodies(pages)
            if self.buckets:
                keys += [tail_key(rows, pages) for rows in _powers(2, self.max_rows)]
        for pages in self._widths:
            keys += [self._body(tokens, FEW_SEQUENCES[0], pages) for tokens in self.buckets]
            keys += [decode_key(rows, pages) for rows in range(1, self.max_sequences + 1)]
            keys += self._verify(pages)
            if self.draft_tokens:
                sequences = range(1, self.max_tokens // (1 + self.draft_tokens) + 1)
                counts = ([1 + self.draft_tokens] * rows for rows in sequences if rows <= self.max_drafted)
                keys += [verify_key(lengths, pages) for lengths in counts]
            if self.buckets:
                keys += [tail_key(rows, pages) for rows in range(1, self.max_sequences + 1)]
            keys += [self._body(tokens, size, pages) for size in self.body_sequences for tokens in self.buckets]
        known = set(self.first())
        return [key for key in dict.fromkeys(keys) if key not in known]

    @property
    def _widths(self) -> list[int]:
        """Of page tables: for short contexts, and for all."""
        widths = (table_width(longest, self.page_size, self.max_pages) for longest in (1, SHORT_CONTEXT + 1))
        return list(dict.fromkeys(widths))

    @property
    def _enough(self) -> int:
        """The smallest coarse size that holds steps of ``LARGE`` tokens: it is a stop of every coarse list."""
        return next((end for end in self.buckets if end >= LARGE), self.buckets[-1] if self.buckets else 0)

    def _coarse_bodies(self, pages: int) -> Iterator[Step]:
        """A prompt alone runs the same kernels there as in its own bucket, from ``FIRST_TOKENS`` on."""
        if not self.buckets:
            return
        last = self.buckets[-1]
        alone, *others = self.body_sequences
        stops = sorted({*self.kernel_ends, self._enough})
        for tokens in coarse(self.buckets, stops, ALONE, min(FIRST_TOKENS, last) - 1):
            yield self._body(tokens, alone, pages)
        for sequences in others:
            ratio, above = (COMPANY, FIRST_TOKENS) if sequences in FEW_SEQUENCES else (CROWD, 2 * FIRST_TOKENS)
            for tokens in coarse(self.buckets, sorted({self._enough, last}), ratio, min(above, self._enough - 1)):
                yield self._body(tokens, sequences, pages)

    def _verify(self, pages: int) -> Iterator[Step]:
        """One sequence with drafts of every length; several with drafts of 1, 2, 4 … tokens, with as many padding
        sequences as any mixture of shorter drafts needs."""
        for drafts in range(1, self.draft_tokens + 1):
            yield verify_key([1 + drafts], pages)
        if not self.draft_tokens:
            return
        longest = power_of_two(1 + self.draft_tokens)
        lengths = sorted({min(1 << power, self.draft_tokens) for power in range(self.draft_tokens.bit_length())})
        for sequences in _powers(2, self.max_drafted)[1:]:
            for drafts in lengths:
                tokens = graph_size(min(sequences * (1 + drafts), self.max_tokens))
                yield Step(tokens, 2 * power_of_two(sequences), longest, pages, verify=True)
