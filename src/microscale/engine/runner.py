"""Runs a scheduled step on a model and gives the logits of the requests whose next token is due.

Every step runs on tensors at fixed places (``step_inputs``), on a GPU as captured graphs if all that was chosen for the
model can be captured. A step in which sequences decode, with drafts or without, is one graph. A step with prompts is
two: the model's body, for all tokens, and its tail, for those that give logits (``models/decoder``). Steps of more than
``PROMPT_GRAPH_TOKENS`` tokens, and all steps on a CPU, are launched kernel by kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from microscale.engine.ahead import Ahead
from microscale.engine.graph_sizes import GraphSizes, buckets, graph_size, kernel_ends, power_of_two, tail_key
from microscale.engine.graphs import GraphCounts, Graphs, graph_memory
from microscale.engine.limits import PROMPT_GRAPH_TOKENS, SCORED_TOKENS, SHORT_CONTEXT, Limits, drafted_sequences
from microscale.engine.page_ledger import pages_for
from microscale.engine.pages import PagePool
from microscale.engine.step_inputs import StepInputs
from microscale.engine.work import Work
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.families import ModelConfig
from microscale.models.recorded import Step, kernels_by_tokens
from microscale.models.taps import Taps
from microscale.planning.ops import AttentionBatch, Logits, Ops, Sampling
from microscale.planning.threads import StepThreads

if TYPE_CHECKING:
    from torch import Tensor


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


def take_rows(logits: Logits, rows: slice | list[int]) -> Logits:
    """The logits of some rows."""
    return Logits(
        logits.values[rows],
        logits.block_max[rows],
        logits.block_argmax[rows],
        logits.block_sum[rows],
        logits.block_rows,
    )


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
        """``fill_up_prompts``: pad steps with prompts to buckets; by default on GPUs, with graphs and without, so that
        both give the same bits. ``draft_tokens``: the longest draft. ``taps``: where a draft head reads the model."""
        self._model = model
        # One page more than the pool hands out: the scratch page of padding.
        self._kv = model.new_cache({kind: pool.num_pages + 1 for kind, pool in pools.items()})
        self._sizes = _make_sizes(model, pools, limits, draft_tokens, fill_up_prompts)
        sizes, rows = self._sizes, graph_size(limits.max_num_seqs)
        self._inputs = StepInputs(
            pools,
            limits.page_size,
            max_tokens=graph_size(max(limits.max_num_batched_tokens, rows)),
            max_sequences=max(2 * power_of_two(rows) if draft_tokens else rows, limits.max_num_seqs + 1),
            max_rows=sizes.max_rows,
            max_pages=sizes.max_pages,
            device=model.device,
            draft_tokens=draft_tokens,
        )
        self.taps = _make_taps(model, taps, limits) if taps else None
        """What the last step's tokens gave there, row by row as its schedule has them."""
        self._threads = StepThreads(model.ops.plan, model.ops.gpu, model.ops.threads)
        ops, waits = model.ops, model.ops.ranks.world > 1
        # Graphs share the memory of their logits, which are in the plan as those of a step.
        budget = graph_memory(ops.gpu) + 4 * model.config.vocab_size * sizes.max_rows
        self._graphs = Graphs(model.device, ops.uncapturable, enabled=not enforce_eager, waits=waits, budget=budget)
        self._later = deque(sizes.later() if self._graphs.enabled else ())
        self._gathered: tuple[Tensor, Tensor] | None = None
        """What the tail takes from the body: queries and residual stream of tokens that give logits."""

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    def first_runs(self) -> int:
        """Steps so far that were slow because nothing like them had run: see ``Graphs``."""
        return self._graphs.first_runs

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        """Logits, as many rows as each part of the schedule wants, in its order. They last until the next step.

        ``tokens`` (int32 on the device, one for each part that is ``ahead``) are those that the host has not read.
        Nothing here waits for the device while such schedules follow one another.
        """
        return self._run(schedule, tokens, None)

    def forward_ahead(self, schedule: Sequence[Work], ahead: Ahead) -> Logits:
        """The same for a schedule with drafts that runs ahead."""
        return self._run(schedule, None, ahead)

    def _run(self, schedule: Sequence[Work], tokens: Tensor | None, ahead: Ahead | None) -> Logits:
        counts = [work.count for work in schedule]
        total = sum(counts)
        self._threads.give(total)
        key = self._sizes.key(schedule, counts)
        has_graph = self._sizes.has_graph(key)
        if has_graph:
            key = self._graphs.pick(key, counts)
        self._inputs.fill(schedule, key, tokens, ahead)
        if key.rows is None:
            logits = self._graphs.run(key, partial(self._compute, key))
            return logits if key.tokens == total else take_rows(logits, slice(total))
        rows = sum([work.num_logits for work in schedule])
        if not has_graph:
            self._body(key)
            return self._tail(rows, key.pages)
        self._graphs.run(key, partial(self._body, key))
        if not rows:
            return self._tail(rows, key.pages)
        tail = self._graphs.pick(tail_key(rows, key.pages), [1] * rows)
        return take_rows(self._graphs.run(tail, partial(self._compute, tail)), slice(rows))

    def _compute(self, key: Step) -> Logits:
        """The work of a key that gives logits: a step without prompts, or the tail of one with prompts."""
        if key.rows is not None:
            return self._tail(key.rows, key.pages)
        taps = None if self.taps is None else self.taps.first(key.tokens)
        return self._model.forward(self._inputs.batch(key), self._kv, taps)

    def _body(self, key: Step) -> None:
        """The body of a step with prompts. It leaves in place what the tail needs."""
        taps = None if self.taps is None else self.taps.first(key.tokens)
        with torch.inference_mode():
            result = self._model.body(self._inputs.batch(key), self._kv, taps)
            if self._gathered is None:
                q, x = (part.new_zeros((self._inputs.max_rows, *part.shape[1:])) for part in result)
                self._gathered = q, x
            for part, gathered in zip(result, self._gathered, strict=True):
                torch.index_select(part, 0, self._inputs.logit_rows(), out=gathered)

    def _tail(self, rows: int, pages: int) -> Logits:
        """The tail for the first of the tokens that give logits, after a body."""
        assert self._gathered is not None  # the body has run
        q, x = self._gathered
        kind = self._model.layers[-1].kind
        return self._model.tail(q[:rows], x[:rows], {kind: self._inputs.tail_queries(rows, pages, kind)}, self._kv)

    def prepare(self, *, stand_ins: bool = False) -> None:
        """Capture what the first requests will need. ``stand_ins``: from now on steps of other sizes run in these."""
        graphs = self._graphs
        if graphs.enabled:
            for key in self._sizes.first():
                self._run_padding(key)
                if key not in graphs:  # the first of a kind is launched
                    self._run_padding(key)
            graphs.waited_for = 0
        graphs.stand_in = stand_ins

    def idle(self) -> bool:
        """Capture one more graph: the one that most steps have missed, or the next of the list. Whether there may be
        more to do."""
        graphs = self._graphs
        if graphs.is_full or not (graphs.missed or self._later):
            return False
        [(key, _)] = graphs.missed.most_common(1) or [(self._later.popleft(), 0)]
        graphs.missed.pop(key, None)
        if not graphs.has_run(key):
            self._run_padding(key)
        graphs.capture(key, self._work(key))
        return True

    def graphs(self) -> GraphCounts:
        return GraphCounts(len(self._graphs), self._graphs.waited_for, self._graphs.stand_ins)

    def _work(self, key: Step) -> Callable[[], object]:
        return partial(self._body if key.rows == 0 else self._compute, key)

    def _run_padding(self, key: Step) -> None:
        """Run a step that contains only padding; it writes to the scratch page. A tail runs on what the last body has
        left."""
        if not key.rows:
            self._inputs.fill([], key)
        self._graphs.run(key, self._work(key))


def _make_sizes(
    model: Model, pools: Mapping[LayerKind, PagePool], limits: Limits, draft_tokens: int, fill_up_prompts: bool | None
) -> GraphSizes:
    size, max_tokens = limits.page_size, limits.max_num_batched_tokens
    most = min(PROMPT_GRAPH_TOKENS, max_tokens)
    ends: list[int] = []
    stops: list[int] = []
    if fill_up_prompts is None:
        fill_up_prompts = model.device.type == "cuda" and model.ops.uncapturable(most) is None
    if fill_up_prompts:
        kernels = kernels_by_tokens(model.config, model.ops, size, SHORT_CONTEXT // size)
        ends = buckets(most, kernels)
        stops = kernel_ends(ends, kernels)
    longest = min(limits.max_model_len, pools[LayerKind.FULL].num_pages * size)
    most_drafted = drafted_sequences(limits.max_num_seqs, states=LayerKind.LINEAR in pools)
    drafted = min(max(limits.max_num_seqs, most_drafted * (1 + draft_tokens)), max_tokens)
    return GraphSizes(
        page_size=size,
        # A table is as wide as the longest sequence, or as the padding of a step with prompts.
        max_pages=pages_for(max(longest, most), size),
        max_sequences=limits.max_num_seqs,
        max_drafted=most_drafted,
        draft_tokens=draft_tokens,
        max_tokens=drafted,
        max_rows=graph_size(min(drafted + SCORED_TOKENS, max_tokens)),
        buckets=ends,
        kernel_ends=stops,
    )


def _make_taps(model: Model, places: tuple[int, ...], limits: Limits) -> Taps:
    rows = graph_size(limits.max_num_batched_tokens)
    taps = Taps.empty(places, rows, model.config.hidden, model.ops.dtype, model.device)
    taps.rows.zero_()  # rows that pad a step of the head are read before they are written
    return taps
