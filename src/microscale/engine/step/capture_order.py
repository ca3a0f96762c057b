"""Which graphs are captured before a step wants them, and in which order: before "ready", and after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from microscale.engine.step.decode import GraphKey
from microscale.engine.step.forward import TailKey
from microscale.engine.step.graphs import graph_size, table_width
from microscale.engine.step.prompt import FEW_SEQUENCES, PromptInputs, PromptKey
from microscale.engine.step.verify import VerifyInputs, VerifyKey
from microscale.models.recorded import SHORT_CONTEXT

FIRST_ROWS = 8
"""Sequences that decode together from the first second on without a capture in between."""
FIRST_TOKENS = 16
"""Prompts of fewer tokens are captured right after the start: a quarter of all sizes, and chats begin with more."""
COMPANY = FEW_SEQUENCES[1] - 1
"""Sequences that run together soon: the others that a step with a prompt is filled up to."""

Key = GraphKey | VerifyKey | PromptKey | TailKey


@dataclass(frozen=True)
class CaptureOrder:
    """The sizes of one runner's steps."""

    page_size: int
    max_rows: int
    max_pages: int
    draft_tokens: int
    verify: VerifyInputs | None
    prompts: PromptInputs | None

    def first(self) -> Iterator[list[Key]]:
        """What the first requests want, kind by kind: a few sequences that decode, one prompt of all but tiny sizes."""
        pages = self._widths[0]
        yield [*self._decoding(1, FIRST_ROWS, pages)]
        yield [*self._drafts(1, 1, pages)]
        yield [key for key in self._one_prompt(pages) if key.tokens >= FIRST_TOKENS]

    def later(self) -> list[Key]:
        """The others, those first that are wanted first."""
        narrow = self._widths[0]
        keys: list[Key] = [*self._one_prompt(narrow)]
        # A step of the smaller sort is filled up to fewer sequences; one of twice as many to as many as there may be.
        for place, others in enumerate((COMPANY, 2 * COMPANY), start=1):
            keys += self._with_company(others, place, narrow)
        for pages in self._widths:
            keys += self._decoding(1, self.max_rows, pages)
            keys += self._drafts(1, self.max_rows, pages)
            keys += self._tails(1, self.max_rows, pages)
            for sequences in self.prompts.sequences if self.prompts is not None else ():
                keys += self._with_prompts(sequences, pages)
        known = {key for kind in self.first() for key in kind}
        return [key for key in dict.fromkeys(keys) if key not in known]

    @property
    def _widths(self) -> list[int]:
        """Of page tables: for short contexts, and for all."""
        widths = (table_width(longest, self.page_size, self.max_pages) for longest in (1, SHORT_CONTEXT + 1))
        return list(dict.fromkeys(widths))

    def _with_company(self, others: int, place: int, pages: int) -> Iterator[Key]:
        """Requests that come while so many others run. ``place``: of the sequences that such a step is filled up to."""
        yield from self._decoding(1, others, pages)
        yield from self._drafts(1, others // 2, pages)
        yield from self._tails(1, others + 1, pages)
        for sequences in self.prompts.sequences[place : place + 1] if self.prompts is not None else ():
            yield from self._with_prompts(sequences, pages)

    def _decoding(self, first: int, last: int, pages: int) -> Iterator[GraphKey]:
        for rows in range(first, min(last, self.max_rows) + 1):
            if rows == graph_size(rows):
                yield GraphKey(rows, pages)

    def _drafts(self, first: int, last: int, pages: int) -> Iterator[VerifyKey]:
        """One sequence with drafts of every length; several with the longest, each of them."""
        most = self.draft_tokens
        for rows in range(first, min(last, self.max_rows) + 1):
            for drafts in range(1 if rows == 1 else most, most + 1):
                if self.verify is not None and rows * (1 + drafts) <= self.verify.max_tokens:
                    yield self.verify.even_key(rows, 1 + drafts, pages)

    def _one_prompt(self, pages: int) -> Iterator[PromptKey]:
        yield from self._with_prompts(FEW_SEQUENCES[0], pages)

    def _with_prompts(self, sequences: int, pages: int) -> Iterator[PromptKey]:
        """The largest first: the others then fit into its memory."""
        if self.prompts is not None and sequences in self.prompts.sequences:
            for tokens in reversed(self.prompts.buckets):
                yield PromptKey(tokens, sequences, pages)

    def _tails(self, first: int, last: int, pages: int) -> Iterator[TailKey]:
        for rows in range(first, min(last, self.max_rows) + 1):
            if self.prompts is not None and rows == graph_size(rows):
                yield TailKey(rows, pages)
