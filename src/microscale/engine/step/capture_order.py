"""Which graphs are captured before a step wants them, and in which order: before "ready", and after it.

Before "ready" it is a net: few sizes, but so that every step that is common soon after a start fits into one
(``stand_ins``). After it the rest of the net, for long contexts and large steps, and then the others, if nobody has
wanted any of them yet in the order in which a server that fills up will want them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from microscale.engine.step.buckets import coarse
from microscale.engine.step.decode import GraphKey
from microscale.engine.step.graphs import graph_size, table_width
from microscale.engine.step.prompt import FEW_SEQUENCES, PromptInputs, PromptKey, TailKey
from microscale.engine.step.stand_ins import LARGE, Key
from microscale.engine.step.verify import VerifyInputs, VerifyKey
from microscale.models.recorded import SHORT_CONTEXT

FIRST_ROWS = 8
"""Sequences of which every number that decodes together has a graph from the first second on."""
FIRST_TOKENS = 16
"""Smaller prompts have no graphs of their own before "ready": chats begin with more."""
ALONE, COMPANY, CROWD, SPARSE = 1.5, 1.7, 2.0, 4.0
"""How much larger than a step its graph of the net may be, in tokens: of one prompt, of a few sequences, of many, and
of what is seldom soon after a start: long contexts. Twice the tokens take an H200 1.1 times as long at 64 tokens, 1.45
times at 512."""
FEW = FEW_SEQUENCES[1] - 1
"""Sequences that run together soon: the others that a step with a prompt is filled up to."""


@dataclass(frozen=True)
class CaptureOrder:
    """The sizes of one runner's steps."""

    page_size: int
    max_rows: int
    max_pages: int
    draft_tokens: int
    verify: VerifyInputs | None
    prompts: PromptInputs | None
    kernel_ends: Sequence[int]
    """Buckets of prompts after which other kernels run, and the last."""

    def first(self) -> Iterator[list[Key]]:
        """The net, kind by kind."""
        narrow, *wide = self._widths
        yield [
            *self._decoding(range(1, FIRST_ROWS + 1), narrow),
            *self._decoding(_powers(2, above=FIRST_ROWS, most=self.max_rows), narrow),
            *(key for pages in wide for key in self._decoding(_powers(8, above=0, most=self.max_rows), pages)),
        ]
        yield [*self._drafts(1, 1, narrow)]
        if self.prompts is not None:
            yield [*self._net_of_prompts(narrow)]
            yield [*self._net_of_tails(narrow)]

    def later(self) -> list[Key]:
        """The others, those first that are wanted first."""
        narrow, *wide = self._widths
        keys: list[Key] = []
        if self.prompts is not None:
            keys += self._net_of_large_prompts(narrow)
            for pages in wide:
                keys += [*self._net_of_tails(pages), *self._net_of_long_contexts(pages)]
        keys += self._with_prompts(FEW_SEQUENCES[0], narrow)
        # A step of the smaller sort is filled up to fewer sequences; one of twice as many to as many as there may be.
        for place, others in enumerate((FEW, 2 * FEW), start=1):
            keys += self._with_company(others, place, narrow)
        for pages in self._widths:
            keys += self._decoding(range(1, self.max_rows + 1), pages)
            keys += self._drafts(1, self.max_rows, pages)
            keys += self._tails(self.max_rows, pages)
            for sequences in self.prompts.sequences if self.prompts is not None else ():
                keys += self._with_prompts(sequences, pages)
        known = {key for kind in self.first() for key in kind}
        return [key for key in dict.fromkeys(keys) if key not in known]

    @property
    def _widths(self) -> list[int]:
        """Of page tables: for short contexts, and for all."""
        widths = (table_width(longest, self.page_size, self.max_pages) for longest in (1, SHORT_CONTEXT + 1))
        return list(dict.fromkeys(widths))

    def _net_of_prompts(self, pages: int) -> list[PromptKey]:
        """For steps of up to ``LARGE`` tokens, the largest first: the others then fit into its memory. One prompt runs
        the kernels that it runs in a graph of its own, from ``FIRST_TOKENS`` on."""
        keys = [key for sizes in self._nets(pages) for key in sizes if key not in _beyond(sizes)]
        return sorted(keys, key=lambda key: (key.tokens, key.sequences), reverse=True)

    def _net_of_large_prompts(self, pages: int) -> list[PromptKey]:
        """For larger ones."""
        return [key for sizes in self._nets(pages) for key in _beyond(sizes)]

    def _nets(self, pages: int) -> Iterator[list[PromptKey]]:
        """For each number of sequences, the largest first."""
        assert self.prompts is not None
        ends = self.prompts.buckets
        alone, *company = self.prompts.sequences
        below = min(FIRST_TOKENS, ends[-1]) - 1
        yield [PromptKey(tokens, alone, pages) for tokens in coarse(ends, self.kernel_ends, ALONE, below)]
        for sequences in company:
            ratio, above = (COMPANY, FIRST_TOKENS) if sequences in FEW_SEQUENCES else (CROWD, 2 * FIRST_TOKENS)
            yield [PromptKey(tokens, sequences, pages) for tokens in self._spread(ratio, above)]

    def _net_of_long_contexts(self, pages: int) -> list[PromptKey]:
        assert self.prompts is not None
        alone, most = self.prompts.sequences[0], self.prompts.sequences[-1]
        sizes = self._spread(SPARSE, FIRST_TOKENS)
        return [PromptKey(tokens, sequences, pages) for tokens in sizes for sequences in dict.fromkeys((most, alone))]

    def _net_of_tails(self, pages: int) -> list[TailKey]:
        assert self.prompts is not None
        return [TailKey(rows, pages) for rows in _powers(2, above=0, most=self.prompts.most_rows)]

    def _spread(self, ratio: float, above: int) -> list[int]:
        """Buckets so far from one another, whatever kernels they run; smaller steps run in the first."""
        assert self.prompts is not None
        last = self.prompts.buckets[-1]
        return coarse(self.prompts.buckets, [last], ratio, min(above, last - 1))

    def _with_company(self, others: int, place: int, pages: int) -> Iterator[Key]:
        """Requests that come while so many others run. ``place``: of the sequences that such a step is filled up to."""
        yield from self._decoding(range(1, others + 1), pages)
        yield from self._drafts(1, others // 2, pages)
        yield from self._tails(others + 1, pages)
        for sequences in self.prompts.sequences[place : place + 1] if self.prompts is not None else ():
            yield from self._with_prompts(sequences, pages)

    def _decoding(self, rows: Iterable[int], pages: int) -> Iterator[GraphKey]:
        yield from dict.fromkeys(GraphKey(graph_size(min(each, self.max_rows)), pages) for each in rows)

    def _drafts(self, first: int, last: int, pages: int) -> Iterator[VerifyKey]:
        """One sequence with drafts of every length; several with the longest, each of them."""
        most = self.draft_tokens
        for rows in range(first, min(last, self.max_rows) + 1):
            for drafts in range(1 if rows == 1 else most, most + 1):
                if self.verify is not None and rows * (1 + drafts) <= self.verify.max_tokens:
                    yield self.verify.even_key(rows, 1 + drafts, pages)

    def _with_prompts(self, sequences: int, pages: int) -> Iterator[PromptKey]:
        """The largest first."""
        if self.prompts is not None and sequences in self.prompts.sequences:
            for tokens in reversed(self.prompts.buckets):
                yield PromptKey(tokens, sequences, pages)

    def _tails(self, last: int, pages: int) -> Iterator[TailKey]:
        if self.prompts is not None:
            sizes = (graph_size(rows) for rows in range(1, min(last, self.max_rows) + 1))
            yield from dict.fromkeys(TailKey(rows, pages) for rows in sizes)


def _beyond(sizes: Sequence[PromptKey]) -> list[PromptKey]:
    """Of the graphs for one number of sequences, the largest first, those that steps of ``LARGE`` tokens do without."""
    enough = [key for key in sizes if key.tokens >= LARGE]
    return enough[:-1]


def _powers(base: int, above: int, most: int) -> list[int]:
    """Powers of ``base``, and ``most``."""
    powers = (base**power for power in range(most.bit_length()))
    return [*(power for power in powers if above < power < most), *([most] if most > above else [])]
