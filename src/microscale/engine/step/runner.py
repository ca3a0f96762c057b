"""Runs a scheduled step on a model and gives the logits of the requests whose next token is due.

Steps run from standing inputs, on a GPU as captured graphs, if all that was chosen for the model can be captured: those
in which every sequence decodes one token (``decode``), or some have drafts (``verify``), and those of up to
``PROMPT_GRAPH_TOKENS`` tokens with prompts among them (``prompt``). Larger ones, and all prompts on a CPU, are laid out
anew and run as they are (``inputs``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from microscale.backends.ops import AttentionBatch, Logits, Ops, Sampling
from microscale.engine.step.ahead import Ahead
from microscale.engine.step.buckets import PROMPT_GRAPH_TOKENS, buckets
from microscale.engine.step.decode import DecodeInputs, GraphKey, take_rows
from microscale.engine.step.graphs import Graphs, graph_memory, graph_size, table_width
from microscale.engine.step.holdings import pages_for
from microscale.engine.step.inputs import Chunk, build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.prompt import FEW_SEQUENCES, PromptInputs, PromptKey
from microscale.engine.step.threads import StepThreads
from microscale.engine.step.verify import VerifyInputs, VerifyKey, spare_rows
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.decoder import GaveWay
from microscale.models.families import ModelConfig
from microscale.models.recorded import SHORT_CONTEXT, kernels_by_tokens
from microscale.models.taps import Taps

FIRST_ROWS = 8
"""Sequences that decode together from the first second on without a capture in between."""
FIRST_TOKENS = 16
"""Prompts of fewer tokens are captured right after the start: a quarter of all sizes, and chats begin with more."""


Key = GraphKey | VerifyKey | PromptKey


class HasKind(Protocol):
    @property
    def kind(self) -> LayerKind: ...


class Model(Protocol):
    """What an engine needs of a model."""

    device: torch.device
    page_size: int
    ops: Ops
    sampling: Sampling

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layers(self) -> Sequence[HasKind]: ...

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits: ...

    def body(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> tuple[Tensor, Tensor]: ...

    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits: ...

    def giving_way(self, is_due: Callable[[], bool]) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Forward:
    """A model on its cache; what a draft head reads of a step goes to the first rows of ``taps``."""

    model: Model
    kv: KvCache
    taps: Taps | None

    def __call__(self, batch: ForwardBatch) -> Logits:
        return self.model.forward(batch, self.kv, self.tapped(batch.token_ids.shape[0]))

    def tapped(self, tokens: int) -> Taps | None:
        return None if self.taps is None else self.taps.first(tokens)


class PromptSteps:
    """Steps of a model with prompts, as graphs of its body and of its tail."""

    def __init__(self, forward: Forward, inputs: PromptInputs, graphs: Graphs) -> None:
        self._model, self._kv = forward.model, forward.kv
        self._forward = forward
        self.inputs = inputs
        self._graphs = graphs
        self._gathered: tuple[Tensor, Tensor] | None = None
        """Of the body, for rows that give logits: queries of the last layer and its residual stream."""

    def run(self, schedule: Sequence[Work], key: PromptKey) -> Logits:
        """Logits of the sequences whose next token is due. They last until the next step."""
        self.inputs.fill(schedule, key)
        self._graphs.run(key, key.tokens, partial(self.body, key))
        count = sum(work.num_logits for work in schedule)
        if not count:
            return self.tail(key, 0)
        return take_rows(self._run_tail(key, graph_size(count)), slice(count))

    def run_nobody(self, key: PromptKey) -> None:
        """A step of padding alone, of which one row gives logits."""
        self.inputs.fill([], key)
        self._graphs.run(key, key.tokens, partial(self.body, key))
        self._run_tail(key, 1)

    def _run_tail(self, key: PromptKey, rows: int) -> Logits:
        return self._graphs.run((rows, key.pages), rows, partial(self.tail, key, rows))

    @torch.inference_mode()
    def body(self, key: PromptKey) -> None:
        """The model's body on the standing inputs; what the tail needs of it is left in place."""
        self.inputs.lay_tables(key)
        found = self._model.body(self.inputs.batch(key), self._kv, self._forward.tapped(key.tokens))
        if self._gathered is None:
            q, x = (
                torch.zeros((self.inputs.most_rows, *each.shape[1:]), dtype=each.dtype, device=each.device)
                for each in found
            )
            self._gathered = q, x
        for each, gathered in zip(found, self._gathered, strict=True):
            torch.index_select(each, 0, self.inputs.rows(key), out=gathered)

    @torch.inference_mode()
    def tail(self, key: PromptKey, rows: int) -> Logits:
        """The model's tail for the first rows. It depends on the width of the tables alone, not on the key."""
        assert self._gathered is not None  # the body has run
        q, x = self._gathered
        kind = self._model.layers[-1].kind
        queries = self.inputs.tail_batch(key, rows, kind)
        return self._model.tail(q[:rows], x[:rows], {kind: queries}, self._kv)


class ModelRunner:
    """A model and its KV cache, whose pages ``pools`` hand out."""

    def __init__(
        self,
        model: Model,
        pools: Mapping[LayerKind, PagePool],
        limits: Limits,
        *,
        enforce_eager: bool = False,
        fill_up_prompts: bool | None = None,
        draft_tokens: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        """``fill_up_prompts``: run steps with prompts from standing inputs, filled up to buckets; by default on GPUs,
        with graphs and without: they give the same bits. ``draft_tokens``: of a sequence in a step, at most.
        ``taps``: where a draft head reads the model."""
        self._model = model
        self._pools = pools
        # One page more than the pool hands out: rows that fill up a graph's batch look there.
        self._kv = model.new_cache({kind: pool.num_pages + 1 for kind, pool in pools.items()})
        longest = min(limits.max_model_len, pools[LayerKind.FULL].num_pages * limits.page_size)
        most = min(PROMPT_GRAPH_TOKENS, limits.max_num_batched_tokens)
        # A table is as wide as the longest sequence, or as nobody's sequence that fills up a step with prompts.
        max_pages = pages_for(max(longest, most), limits.page_size)
        spare = spare_rows(limits.max_num_seqs) if draft_tokens else 0
        self._decode = DecodeInputs(pools, limits.page_size, limits.max_num_seqs, max_pages, model.device, spare)
        self._draft_tokens = draft_tokens
        self._verify: VerifyInputs | None = None
        if draft_tokens:
            most_drafted = min(limits.max_num_seqs * (1 + draft_tokens), limits.max_num_batched_tokens)
            self._verify = VerifyInputs(pools, self._decode.tables, most_drafted, model.device)
        self.taps: Taps | None = None
        """What the last step's tokens gave there, row by row as its schedule has them."""
        if taps:
            most_tokens = graph_size(limits.max_num_batched_tokens)
            self.taps = Taps.empty(taps, most_tokens, model.config.hidden, model.ops.dtype, model.device)
            self.taps.rows.zero_()  # rows that fill up a step of the head are read before they are written
        # No method of this object: a ring of references would keep the cache and the graphs after it is gone.
        self._forward = Forward(model, self._kv, self.taps)
        self._threads = StepThreads(model.ops.plan, model.ops.gpu, model.ops.threads)
        ops, waits, budget = model.ops, model.ops.ranks.world > 1, graph_memory(model.ops.gpu)
        self._graphs = Graphs(model.device, ops.uncapturable, enabled=not enforce_eager, waits=waits, budget=budget)
        self._max_rows, self._max_pages = limits.max_num_seqs, max_pages
        self._prompts: PromptSteps | None = None
        if fill_up_prompts is None:
            fill_up_prompts = model.device.type == "cuda" and model.ops.uncapturable(most) is None
        if fill_up_prompts:
            ends = buckets(most, kernels_by_tokens(model.config, model.ops, model.page_size))
            inputs = PromptInputs(pools, limits, max_pages, ends, model.device, draft_tokens)
            self._prompts = PromptSteps(self._forward, inputs, self._graphs)
        self._later = deque(self._later_keys())

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    def first_runs(self) -> int:
        """Steps so far that were slow because nothing like them had run: see ``Graphs``."""
        return self._graphs.first_runs

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        """Logits, as many rows as each part of the schedule wants, in its order. They last until the next step.

        ``tokens`` (int32 on the device, one a part) are those of a schedule that runs ahead. Nothing here waits for the
        device while such plans follow one another.
        """
        self._threads.give(sum(work.count for work in schedule))
        if all(work.decodes for work in schedule):
            key = self._decode.key(schedule)
            self._decode.fill(schedule, key.rows, tokens)
            logits = self._graphs.run(key, key.rows, partial(self._forward, self._decode.batch(key)))
            return take_rows(logits, slice(len(schedule)))
        if self._verify is not None and all(work.verifies for work in schedule):
            return self._run_drafts(self._verify, schedule)
        if self._prompts is not None:
            prompt_key = self._prompts.inputs.key(schedule)
            if prompt_key is not None:
                return self._prompts.run(schedule, prompt_key)
        chunks = [self._chunk(work) for work in schedule]
        return self._forward(build_batch(chunks, self._model.page_size, self._model.device))

    def forward_ahead(self, schedule: Sequence[Work], ahead: Ahead) -> Logits:
        """The same of a schedule with drafts that runs ahead."""
        assert self._verify is not None  # whoever has drafts said so
        self._threads.give(sum(work.count for work in schedule))
        return self._run_drafts(self._verify, schedule, ahead)

    def _run_drafts(self, inputs: VerifyInputs, schedule: Sequence[Work], ahead: Ahead | None = None) -> Logits:
        key = inputs.key(schedule)
        inputs.fill(schedule, key, ahead)
        logits = self._graphs.run(key, key.tokens, partial(self._forward, inputs.batch(key)))
        return take_rows(logits, slice(sum(work.count for work in schedule)))

    def prepare(self) -> None:
        """Capture what the first requests will want: a few sequences that decode, one prompt of all but tiny sizes."""
        if self._graphs.enabled:
            pages = table_width(1, self._model.page_size, self._max_pages)
            decoding, drafted = self._decode_keys(1, FIRST_ROWS, pages), self._draft_keys(1, 1, pages)
            prompts = [key for key in self._prompt_keys(FEW_SEQUENCES[0], pages) if key.tokens >= FIRST_TOKENS]
            for keys in (list(decoding), list(drafted), prompts):
                for key in (*keys[:1], *keys):  # the first of a kind runs as it is
                    self._run_nobody(key)

    def idle(self, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Capture one more graph, unless something ``is_due`` meanwhile. Whether there may be others."""
        if not self._graphs.enabled or not self._later:
            return False
        try:
            with self._model.giving_way(is_due):
                self._run_nobody(self._later[0])
            self._later.popleft()
        except GaveWay:
            pass
        return True

    def _later_keys(self) -> Iterator[Key]:
        """Tiny prompts; then what may come when more sequences run at once, and then with long contexts."""
        widths = [table_width(longest, self._model.page_size, self._max_pages) for longest in (1, SHORT_CONTEXT + 1)]
        yield from (key for key in self._prompt_keys(FEW_SEQUENCES[0], widths[0]) if key.tokens < FIRST_TOKENS)
        for pages in dict.fromkeys(widths):
            yield from self._decode_keys(1 if pages > widths[0] else FIRST_ROWS + 1, self._max_rows, pages)
            yield from self._draft_keys(1 if pages > widths[0] else 2, self._max_rows, pages)
            for sequences in self._prompts.inputs.sequences if self._prompts is not None else ():
                if pages > widths[0] or sequences > FEW_SEQUENCES[0]:
                    yield from self._prompt_keys(sequences, pages)

    def _decode_keys(self, first: int, last: int, pages: int) -> Iterator[GraphKey]:
        for rows in range(first, min(last, self._max_rows) + 1):
            if rows == graph_size(rows):
                yield GraphKey(rows, pages)

    def _draft_keys(self, first: int, last: int, pages: int) -> Iterator[VerifyKey]:
        """One sequence with drafts of every length; several with the longest, each of them."""
        most = self._draft_tokens
        for rows in range(first, last + 1):
            for drafts in range(1 if rows == 1 else most, most + 1):
                if self._verify is not None and rows * (1 + drafts) <= self._verify.max_tokens:
                    yield self._verify.even_key(rows, 1 + drafts, pages)

    def _prompt_keys(self, sequences: int, pages: int) -> Iterator[PromptKey]:
        """The largest first: the others then fit into its memory."""
        if self._prompts is not None and sequences in self._prompts.inputs.sequences:
            for tokens in reversed(self._prompts.inputs.buckets):
                yield PromptKey(tokens, sequences, pages)

    def _run_nobody(self, key: Key) -> None:
        """A step of padding alone. It writes to pages that are nobody's."""
        if isinstance(key, GraphKey):
            self._decode.fill([], key.rows)
            self._graphs.run(key, key.rows, partial(self._forward, self._decode.batch(key)))
            if self._model.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # it has two buffers, and no token tells that one is free
        elif isinstance(key, VerifyKey):
            assert self._verify is not None
            self._verify.fill([], key)
            self._graphs.run(key, key.tokens, partial(self._forward, self._verify.batch(key)))
        elif self._prompts is not None:
            self._prompts.run_nobody(key)

    def _chunk(self, work: Work) -> Chunk:
        pages = {kind: pool.pages_of(work.request.request_id) for kind, pool in self._pools.items()}
        return Chunk(work.tokens, work.first, pages, work.num_logits)
