"""Runs a scheduled step on a model and gives the logits of the requests whose next token is due.

Steps run from standing inputs, on a GPU as captured graphs, if all that was chosen for the model can be captured: those
in which every sequence decodes one token (``decode``), or some have drafts (``verify``), and those of up to
``PROMPT_GRAPH_TOKENS`` tokens with prompts among them (``prompt``). Larger ones, and all prompts on a CPU, are laid out
anew and run as they are (``inputs``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from microscale.backends.ops import Logits
from microscale.engine.step.ahead import Ahead
from microscale.engine.step.buckets import PROMPT_GRAPH_TOKENS, buckets, kernel_ends
from microscale.engine.step.capture_order import CaptureOrder
from microscale.engine.step.decode import DecodeInputs, GraphKey, take_rows
from microscale.engine.step.forward import Forward, Model, PromptSteps
from microscale.engine.step.graphs import PART_LAYERS, GraphCounts, Graphs, Task, after_layers, graph_memory, graph_size
from microscale.engine.step.holdings import pages_for
from microscale.engine.step.inputs import Chunk, build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.prompt import PromptInputs
from microscale.engine.step.stand_ins import Key, StandIns
from microscale.engine.step.threads import StepThreads
from microscale.engine.step.verify import VerifyInputs, VerifyKey, spare_rows
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind
from microscale.models.recorded import kernels_by_tokens
from microscale.models.taps import Taps

if TYPE_CHECKING:
    from torch import Tensor


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
        self._verify: VerifyInputs | None = None
        if draft_tokens:
            most_drafted = min(limits.max_num_seqs * (1 + draft_tokens), limits.max_num_batched_tokens)
            self._verify = VerifyInputs(pools, self._decode.tables, most_drafted, model.device)
        self.taps = _standing_taps(model, taps, limits) if taps else None
        """What the last step's tokens gave there, row by row as its schedule has them."""
        # No method of this object: a ring of references would keep the cache and the graphs after it is gone.
        self._forward = Forward(model, self._kv, self.taps)
        self._threads = StepThreads(model.ops.plan, model.ops.gpu, model.ops.threads)
        ops, waits, budget = model.ops, model.ops.ranks.world > 1, graph_memory(model.ops.gpu)
        self._graphs = Graphs(model.device, ops.uncapturable, enabled=not enforce_eager, waits=waits, budget=budget)
        self._stand_ins = StandIns(self._graphs)
        self._prompts: PromptSteps | None = None
        stops: list[int] = []
        if fill_up_prompts is None:
            fill_up_prompts = model.device.type == "cuda" and model.ops.uncapturable(most) is None
        if fill_up_prompts:
            kernels = kernels_by_tokens(model.config, model.ops, model.page_size)
            ends = buckets(most, kernels)
            stops = kernel_ends(ends, kernels)
            inputs = PromptInputs(pools, limits, max_pages, ends, model.device, draft_tokens)
            self._prompts = PromptSteps(self._forward, inputs, self._graphs, self._stand_ins)
        prompts = None if self._prompts is None else self._prompts.inputs
        rows, size = limits.max_num_seqs, limits.page_size
        self._order = CaptureOrder(size, rows, max_pages, draft_tokens, self._verify, prompts, stops)
        self._later = deque(self._order.later())

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
        logits = self._run(schedule, tokens)
        self._capture_due()
        return logits

    def _run(self, schedule: Sequence[Work], tokens: Tensor | None) -> Logits:
        if all(work.decodes for work in schedule):
            key = self._decode.key(schedule)
            key = self._stand_ins.of(key, key.fits)
            self._decode.fill(schedule, key.rows, tokens)
            logits = self._graphs.run(key, *self._logits_task(key))
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
        logits = self._run_drafts(self._verify, schedule, ahead)
        self._capture_due()
        return logits

    def _run_drafts(self, inputs: VerifyInputs, schedule: Sequence[Work], ahead: Ahead | None = None) -> Logits:
        counts = [work.count for work in schedule]
        wanted = inputs.key(schedule)
        key = self._stand_ins.of(wanted, lambda other: other.holds(counts, wanted.pages))
        inputs.fill(schedule, key, ahead)
        logits = self._graphs.run(key, *self._logits_task(key))
        return take_rows(logits, slice(sum(counts)))

    def prepare(self, *, stand_ins: bool = False) -> None:
        """Capture what the first requests will want. ``stand_ins``: from now on steps of other sizes run in these."""
        if self._graphs.enabled:
            for keys in self._order.first():
                for key in (*keys[:1], *keys):  # the first of a kind runs as it is
                    self._run_nobody(key)
            self._graphs.waited_for = 0
        self._stand_ins.enabled = stand_ins

    def idle(self, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Capture one more graph, or what of it can be had before something ``is_due``. Whether there may be others."""
        if not self._graphs.enabled:
            return False
        key = self._stand_ins.most_wanted()
        if key is None and self._later:
            key = self._later[0]
        if key is None:
            return False
        if not self._graphs.has_run(key):
            self._run_nobody(key)
        if self._capture(key, is_due) and self._later and self._later[0] == key:
            self._later.popleft()
        return True

    def graphs(self) -> GraphCounts:
        return GraphCounts(len(self._graphs), self._graphs.waited_for, self._stand_ins.steps)

    def _capture_due(self) -> None:
        """Some layers of what was wanted often, while the device runs the step: a server may never be idle."""
        for key in self._stand_ins.due():
            self._capture(key, after_layers(PART_LAYERS))

    def _capture(self, key: Key, is_over: Callable[[], bool]) -> bool:
        """Go on with a capture. Whether there is nothing left of it."""
        done = self._graphs.capture(key, *self._task(key), is_over)
        if done:
            self._stand_ins.done(key)
        return done

    def _task(self, key: Key) -> Task[object]:
        if isinstance(key, GraphKey | VerifyKey):
            return self._logits_task(key)
        assert self._prompts is not None
        return self._prompts.task(key)

    def _logits_task(self, key: GraphKey | VerifyKey) -> Task[Logits]:
        if isinstance(key, GraphKey):
            return key.rows, partial(self._forward.parts, self._decode.batch(key))
        assert self._verify is not None
        return key.tokens, partial(self._forward.parts, self._verify.batch(key))

    def _run_nobody(self, key: Key) -> None:
        """A step of padding alone. It writes to pages that are nobody's."""
        if isinstance(key, GraphKey):
            self._decode.fill([], key.rows)
            self._graphs.run(key, *self._task(key))
            if self._model.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # it has two buffers, and no token tells that one is free
        elif isinstance(key, VerifyKey):
            assert self._verify is not None
            self._verify.fill([], key)
            self._graphs.run(key, *self._task(key))
        else:
            assert self._prompts is not None
            self._prompts.run_nobody(key)

    def _chunk(self, work: Work) -> Chunk:
        pages = {kind: pool.pages_of(work.request.request_id) for kind, pool in self._pools.items()}
        return Chunk(work.tokens, work.first, pages, work.num_logits)


def _standing_taps(model: Model, places: tuple[int, ...], limits: Limits) -> Taps:
    rows = graph_size(limits.max_num_batched_tokens)
    taps = Taps.empty(places, rows, model.config.hidden, model.ops.dtype, model.device)
    taps.rows.zero_()  # rows that fill up a step of the head are read before they are written
    return taps
