"""What a model takes, before it is loaded: weights by layer kind, KV cache, activations, graphs, and what fits.

    usable = weights + runtime + graphs + activations of one step + KV cache
    KV cache = sequences * (full layers: context; sliding layers: window + drafts + one page; states)
             + sliding layers: one step; states after drafts

A server promises the context to one sequence, and to the others ``LEAST_CONTEXT``: long ones rarely come together, and
when they do, requests wait.

A step writes its keys before it attends, so for its length sliding layers hold the step's tokens as well as their
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from microscale.engine.graphs import graph_memory
from microscale.engine.limits import SCORED_TOKENS, drafted_sequences
from microscale.engine.loading.usable import usable_memory
from microscale.errors import BadSetting
from microscale.hardware import GIB, Gpu
from microscale.hardware.tiles.attention import WIDEN_BYTES
from microscale.models.config import NO_SLIDING_LAYERS, LayerKind
from microscale.models.outline import AT_THE_END, Outline
from microscale.planning import registry
from microscale.planning.decision import Plan
from microscale.planning.ops import AttentionSpec, DenseSpec, MoeSpec, RecurrentSpec
from microscale.planning.plan import Setup
from microscale.planning.precision import BITS

RUNTIME = GIB
"""CUDA's context, cuBLAS's workspaces and compiled kernels on a GPU. An estimate."""
LEAST_CONTEXT = 1024
"""A start needs room for this many tokens of each sequence, or for their limit if that is less."""

MAX_SEQUENCES = 1 << 16
MAX_PAGE_SIZE = 1024
MORE_SEQUENCES, ROOM = (256, 128), 4096
"""Without ``--max-num-seqs``: more sequences than the least where each has room for so many tokens."""
KEPT_STATES, KEPT_STATES_SHARE = 4, 4
"""At most this many slots per sequence of ``--max-num-seqs`` keep states of prompts, in at most one byte of this many
that are left."""
KEPT_WINDOWS = 8
"""One byte in this many of what is left after the least that sequences need goes to sliding layers, for windows at
which prefixes may go on. An estimate: a window of 128 is an eighth of a prompt of 1024."""


@dataclass(frozen=True)
class HeadNeed:
    """The memory that a draft head takes in addition to its target's."""

    weights: int
    """Bytes, in the layouts that were decided."""
    cached_numbers: int
    """That one position takes in its KV cache, whose pages are those of the target's full layers."""
    working: int
    """Bytes for one row: what was tapped, and what the head makes of it."""
    drafting: int
    """Bytes for one sequence that gets drafts: its logits, and what experts take."""

    def working_bytes(self, workload: Workload, kv_size: int) -> int:
        """A step's rows; of each sequence what drafting takes and the pages of guesses."""
        scratch = -(-(workload.draft_tokens + 1) // workload.page_size) + 1
        guesses = 2 * scratch * workload.page_size * self.cached_numbers * kv_size
        return workload.step_tokens * self.working + workload.sequences * (guesses + self.drafting)


@dataclass(frozen=True)
class Workload:
    """What must fit in memory with the weights. The names of the options are in parentheses."""

    context: int | None = None
    """Positions of one sequence (``--max-model-len``); ``None``: as many as fit."""
    sequences: int = 1
    """Sequences at once (``--max-num-seqs``)."""
    step_tokens: int = 2048
    """New tokens in one step (``--max-num-batched-tokens``)."""
    page_size: int = 16
    """Positions in one page of the KV cache (``--block-size``)."""
    utilization: float = 0.9
    """The part of the memory that may be used (``--gpu-memory-utilization``)."""
    reserve: int | None = None
    """Bytes that stay with the system where it shares its memory (``--reserve-memory``); ``None``: by the machine."""
    draft_tokens: int = 0
    """Drafted tokens of a sequence in one step (``--speculative-config``)."""
    head: HeadNeed | None = None
    """The draft head, if drafts come from one."""
    promised: int | None = None
    """Positions that every sequence can have at once, if not the whole context."""

    def check_page_size(self) -> None:
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise BadSetting(f"--block-size is {self.page_size}; a page holds 1 to {MAX_PAGE_SIZE} positions.")

    def check(self, model: str, max_context: int) -> None:
        if self.context is not None and not 1 <= self.context <= max_context:
            raise BadSetting(f"--max-model-len {self.context} is not between 1 and {max_context}, {model}'s limit.")
        if self.sequences < 1:
            raise BadSetting(f"--max-num-seqs {self.sequences} is less than 1.")
        if self.step_tokens < 1:
            raise BadSetting(f"--max-num-batched-tokens {self.step_tokens} is less than 1.")
        if not 0 < self.utilization <= 1:
            raise BadSetting(f"--gpu-memory-utilization {self.utilization} is not above 0 and up to 1; try 0.9.")


@dataclass(frozen=True)
class KvNeed:
    """What the cache takes, in bytes. Full and sliding layers apart."""

    full_per_token: int
    sliding_per_position: int
    window: int
    page_size: int
    step_tokens: int
    draft_tokens: int = 0
    states: int = 0
    """Of a sequence in layers with states, however long it is."""

    def bytes(self, context: int, sequences: int, promised: int | None = None) -> int:
        """``promised``: positions that all sequences but one have, if not the whole context."""
        longest, others = (-(-positions // self.page_size) for positions in (context, promised or context))
        full = self.full_per_token * self.page_size * (longest + (sequences - 1) * others)
        # One slot more, for the sequences that pad a step.
        slots = sequences + self.drafted_slots(sequences) + 1
        return full + sequences * self._sliding(longest) + self._step(longest) + self.states * slots

    def drafted_slots(self, sequences: int) -> int:
        """Slots for the states after drafts."""
        return drafted_sequences(sequences, states=True) * self.draft_tokens if self.states else 0

    def per_sequence_sliding(self) -> int:
        """All that a long sequence takes in sliding layers: the window and one page more."""
        return self._sliding(self.window_pages)

    @property
    def window_pages(self) -> int:
        """Sliding pages of a sequence: its window, the drafts that it may have in a step, and one more."""
        return -(-(self.window + self.draft_tokens) // self.page_size) + 1

    def _sliding(self, pages: int) -> int:
        held = min(pages, self.window_pages)
        return self.sliding_per_position * held * self.page_size

    def _step(self, pages: int) -> int:
        return self.sliding_per_position * min(self.step_tokens, pages * self.page_size)


@dataclass(frozen=True)
class Memory:
    """The memory of one model, with one plan, GPU and workload."""

    model: str
    gpu: Gpu
    workload: Workload
    usable: int
    usable_because: str
    weights: Mapping[str, int]
    """By layer kind."""
    kv: KvNeed
    activations: int
    graphs: int
    runtime: int
    model_context: int
    logits_row: int
    """Of ``activations``: what one sequence more would add to them."""
    available: int | None
    """What the machine reported as free; ``None``: the card is taken to be empty."""

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return sum(self.weights.values()) + self.activations + self.graphs + self.runtime

    @property
    def context(self) -> int:
        """The context that must fit."""
        return self.workload.context or min(LEAST_CONTEXT, self.model_context)

    @property
    def promised(self) -> int:
        """The part of the context that every sequence can have at once."""
        return min(self.workload.promised or self.context, self.context)

    def kv_bytes(self, context: int, sequences: int) -> int:
        """What the cache must hold: of one sequence the whole context, and of the others what is promised."""
        return self.kv.bytes(context, sequences, min(self.workload.promised or context, context))

    @property
    def needed(self) -> int:
        return self.fixed + self.kv_bytes(self.context, self.workload.sequences)

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def max_context(self) -> int:
        """The longest context that fits; 0 where not even the weights do."""
        return _most(self.model_context, lambda n: self.fixed + self.kv_bytes(n, self.workload.sequences), self.usable)

    @property
    def max_sequences(self) -> int:
        """How many sequences fit."""
        fixed, row = self.fixed - self.workload.sequences * self.logits_row, self.logits_row
        return _most(MAX_SEQUENCES, lambda n: fixed + n * row + self.kv_bytes(self.context, n), self.usable)

    def pages(self) -> dict[LayerKind, int]:
        """How many KV pages each kind of layer gets of memory that suffices, and slots for states.

            usable = fixed | sliding: a window and a page a sequence, one step | full: 7/8 of the rest | more windows

        Without sliding layers, full ones get all of the rest, and the pages of sliding ones, which have no bytes, stay
        few.
        Full layers get at least what was promised. On a CPU, whose memory is not ours to fill, they get no more than
        every sequence at full length.
        """
        kv, work = self.kv, self.workload

        def pages(positions: int) -> int:
            return -(-positions // kv.page_size)

        context, others = pages(self.context), pages(self.promised)
        window = pages(max(kv.window, NO_SLIDING_LAYERS) + kv.draft_tokens) + 1
        sliding = work.sequences * min(window, context) + min(pages(work.step_tokens), context)
        # A model without full layers gives their pages no bytes; then any number will do.
        full_bytes = max(kv.full_per_token * kv.page_size, 1)
        sliding_bytes = kv.sliding_per_position * kv.page_size
        own_states = work.sequences + kv.drafted_slots(work.sequences)
        left = self.usable - self.fixed - sliding * sliding_bytes - (own_states + 1) * kv.states
        kept_states = self._kept_states(left) if kv.states else 0
        left -= kept_states * kv.states
        kept = left // KEPT_WINDOWS if sliding_bytes else 0
        full = max((left - kept) // full_bytes, context + (work.sequences - 1) * others)
        if self.gpu.is_cpu:
            full = min(full, work.sequences * pages(work.context or self.model_context))
        windows = max(left - full * full_bytes, 0) // sliding_bytes if sliding_bytes else 0
        if self.gpu.is_cpu:
            windows = min(windows, sliding)
        slots = {LayerKind.LINEAR: own_states + kept_states} if kv.states else {}
        return {LayerKind.FULL: full, LayerKind.SLIDING: sliding + windows, **slots}

    def _kept_states(self, left: int) -> int:
        """Slots that keep states of prompts for later requests. ``left``: bytes after what sequences hold anyway."""
        least = self.kv.full_per_token * (self.context + (self.workload.sequences - 1) * self.promised)
        most = self.workload.sequences * (1 if self.gpu.is_cpu else KEPT_STATES)
        return min(most, max(left - least, 0) // KEPT_STATES_SHARE // self.kv.states)

    def by_kind(self) -> dict[str, int]:
        """Every part of ``needed``, then what a token and a sequence cost, then what there is."""
        return {
            **self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "runtime": self.runtime,
            "kv_cache": self.kv_bytes(self.context, self.workload.sequences),
            "total": self.needed,
            "usable": self.usable,
            "kv_full_per_token": self.kv.full_per_token,
            "kv_sliding_per_sequence": self.kv.per_sequence_sliding(),
            "states_per_sequence": self.kv.states,
        }


def _most(limit: int, needed: Callable[[int], int], usable: int) -> int:
    """The largest n up to ``limit`` with ``needed(n) <= usable``; 0 where there is none. ``needed`` only grows."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= usable else (low, middle - 1)
    return low


def with_room(memory: Memory, for_workload: Callable[[Workload], Memory]) -> Memory:
    """The memory for as many sequences as a card serves by default; ``memory`` itself is for the least."""
    room = min(memory.workload.context or ROOM, ROOM, memory.model_context)
    for sequences in () if memory.gpu.is_cpu else MORE_SEQUENCES:
        more = for_workload(replace(memory.workload, sequences=sequences))
        fits = more.fits and more.fixed + more.kv.bytes(room, sequences) <= more.usable
        if fits and sequences <= more.workload.step_tokens:
            return more
    return memory


def memory_for(outline: Outline, plan: Plan, setup: Setup, workload: Workload, available: int | None = None) -> Memory:
    """``available``: free bytes as the machine reports them; ``None``: the card is taken to be empty."""
    workload.check(outline.name, outline.max_context)
    usable, because = usable_memory(setup.gpu, workload.utilization, available, workload.reserve)
    on_gpu = not setup.gpu.is_cpu
    weights, activations = weight_bytes(outline, plan, setup), _activations(outline, workload)
    head = workload.head
    if head is not None:
        weights |= {"draft_head": head.weights}
        activations += head.working_bytes(workload, setup.kv_size)
    if on_gpu and setup.kv_size == 1:
        activations += _widened_bytes(outline, workload)
    # The head's graphs have as much room as the target's.
    graphs = graph_memory(setup.gpu) * (1 if head is None else 2)
    return Memory(
        model=outline.name,
        gpu=setup.gpu,
        workload=workload,
        usable=usable,
        usable_because=because,
        weights=weights,
        kv=_kv_need(outline, setup, workload),
        activations=activations,
        graphs=graphs if on_gpu else 0,
        runtime=RUNTIME if on_gpu else 0,
        model_context=outline.max_context,
        logits_row=_logits_row(outline),
        available=available,
    )


def weight_bytes(outline: Outline, plan: Plan, setup: Setup) -> dict[str, int]:
    """Bytes of the weights by layer kind, in the layouts that were decided."""
    sizes: dict[str, int] = {}
    for use in outline.uses:
        decision = plan.of(use.op, use.layer)[0]
        size = use.count * registry.find(use.op, decision.chosen).packed_bytes(decision.spec)
        if size:
            name = use.layer.partition(".")[0]
            sizes[name] = sizes.get(name, 0) + size
    embed = setup.precision.format_of("embed", "bf16")
    lm_head = setup.precision.format_of("lm_head", "bf16")
    # One tensor can serve both only as rows of bf16: what lm_head packs for its kernels cannot be looked up in.
    if not (outline.tied and embed == lm_head == "bf16"):
        scales = 4 * outline.vocab_size if embed == "fp8" else 0
        sizes["embed"] = int(outline.vocab_size * outline.hidden * BITS[embed] / 8) + scales
    sizes["small"] = outline.other_bytes
    return sizes


def _kv_need(outline: Outline, setup: Setup, workload: Workload) -> KvNeed:
    full = sum(layers.numbers_per_position() for layers in outline.cached if layers.window is None)
    sliding = sum(layers.numbers_per_position() for layers in outline.cached if layers.window is not None)
    window = max((layers.window for layers in outline.cached if layers.window is not None), default=0)
    if workload.head is not None:
        full += workload.head.cached_numbers
    size = setup.kv_size
    step, drafts = workload.step_tokens, workload.draft_tokens
    return KvNeed(full * size, sliding * size, window, workload.page_size, step, drafts, outline.state_bytes)


def _activations(outline: Outline, workload: Workload) -> int:
    """The most that one op holds for a step's tokens, three copies of the residual stream, and the logits."""
    per_token = max(op_working_bytes(use.spec) for use in outline.uses if use.layer not in AT_THE_END)
    # One row a sequence, one a draft, and those of the prompts that are scored.
    drafted = drafted_sequences(workload.sequences, states=outline.state_bytes > 0) * workload.draft_tokens
    rows = workload.sequences + min(drafted, workload.step_tokens) + min(SCORED_TOKENS, workload.step_tokens)
    return workload.step_tokens * (per_token + 3 * 2 * outline.hidden) + rows * _logits_row(outline)


def _widened_bytes(outline: Outline, workload: Workload) -> int:
    """Of the bf16 copy of a prompt's keys and values that one layer has where the cache is in FP8."""

    def needed(spec: AttentionSpec) -> int:
        positions = workload.context or outline.max_context
        if spec.window is not None:
            positions = min(positions, spec.window + workload.step_tokens)
        return 4 * workload.sequences * positions * spec.num_kv_heads * spec.head_dim

    specs = (use.spec for use in outline.uses if isinstance(use.spec, AttentionSpec))
    return min(WIDEN_BYTES, max(map(needed, specs), default=0))


def _logits_row(outline: Outline) -> int:
    """Bytes of the logits of one token: bf16 from the matrix product, then float32."""
    return outline.vocab_size * 6


def op_working_bytes(spec: object) -> int:
    """Bytes that an op holds for one token: what goes in, what comes out, and between the two GEMMs of experts."""
    if isinstance(spec, DenseSpec):
        return 2 * (spec.rows + spec.columns)
    if isinstance(spec, MoeSpec):
        return 2 * (2 * spec.hidden + spec.top_k * (spec.intermediate + spec.hidden))
    if isinstance(spec, RecurrentSpec):
        return 2 * (spec.channels + 2 * spec.width) + 4 * (spec.channels + spec.width)
    if isinstance(spec, AttentionSpec):
        return 4 * spec.num_heads * spec.head_dim
    return 0
