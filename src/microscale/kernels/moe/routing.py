"""Routing on the device: which experts each token goes to, and the pairs sorted by expert. Owns the launches.

``route`` turns router logits into ``Routing``; ``dispatch`` sorts its (token, slot) pairs by expert and lists tiles of
``block`` pairs for the grouped GEMMs. (Small batches list their pairs otherwise: ``pairs_jit``.) Nothing waits for the
host and every grid follows from the token count, so all of it can be captured in a graph.

Defined results:

* Two kinds of router are in use: top-k then softmax over the k (gpt-oss), and softmax over all, top-k, renormalise,
  times a scale per expert (Gemma). Renormalising cancels the sum over all experts, so both are one function here; the
  lab's twin (``cases/routing_twins``) computes each literally.
* Among equal logits the lowest expert index wins (``torch.topk`` leaves that open); -0.0 equals 0.0.
* NaN ranks above every number, as in ``torch.topk``. A row with a NaN gets NaN weights, so that the fault shows in the
  output, and distinct ids in range, so that no kernel reads outside the weights.
* The order of pairs is stable: by expert, then by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.kernels.launch import launch, or_unread
from microscale.kernels.moe import routing_jit
from microscale.kernels.moe.spec import Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

MAX_EXPERTS = 512
MAX_TOP_K = 16
ONE_PROGRAM_TOKENS = 64
# Elements of the slot matrix that one program holds: 16 int64 keys a thread, with 8 and with 4 warps. 16 warps or twice
# the keys spill on some SM at top 8.
ONE_PROGRAM_ELEMENTS = 4096
BLOCK_ELEMENTS = 2048
ELEMENTS_PER_WARP = 512
COUNTING_REGISTERS = 128
PREFIX = {"BLOCKS": 64, "EXPERTS": 32}
MAX_JOBS = 4096
"""Sizes that are remembered."""


@dataclass(frozen=True)
class Dispatch:
    """The pairs ``token * top_k + slot`` sorted by expert, and the work list of a grouped GEMM."""

    offsets: Tensor  # [experts + 1] int32: expert e has the places offsets[e] .. offsets[e + 1]
    order: Tensor  # [pairs] int32: place → pair
    tiles: Tensor  # [tile_bound, 4] int32: expert, first place, number of pairs, the expert's first tile
    block: int
    top_k: int
    # Tiles past the last one are (-1, 0, 0, 0).

    @property
    def counts(self) -> Tensor:
        return self.offsets.diff()


def tile_bound(pairs: int, num_experts: int, block: int) -> int:
    """The most tiles that ``pairs`` pairs can need: each used expert has one, and a further one per ``block`` pairs."""
    used = min(num_experts, pairs)
    return used + (pairs - used) // block


def route(logits: Tensor, top_k: int, expert_scale: Tensor | None = None, *, always: bool = False) -> Routing:
    """``logits [tokens, experts]`` → ids and weights ``[tokens, top_k]``. ``always``: as ``Router`` has it."""
    job = _job(logits.shape[0], logits.shape[1] - always, top_k, sorts=False, always=always)
    routing = job.new_routing(logits.device)
    if job.tokens:
        job.choose(logits, routing, expert_scale, None)
    return routing


def dispatch(expert_ids: Tensor, num_experts: int, block: int) -> Dispatch:
    """Sort the pairs of ``expert_ids [tokens, top_k]`` by expert, in tiles of ``block``."""
    job = _job(expert_ids.shape[0], num_experts, expert_ids.shape[1], sorts=True)
    return job.sort(
        Routing(expert_ids.contiguous(), torch.empty(0, dtype=torch.float32, device=expert_ids.device)), block
    )


@dataclass(frozen=True)
class _RoutingSizes:
    """The sizes of one call, and what the launches derive from them."""

    tokens: int
    num_experts: int
    """Of those that are chosen among."""
    top_k: int
    sorts: bool
    always: bool = False
    """One expert more has the last of the ``top_k`` slots."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise Unsupported(f"Routing takes 1 to {MAX_EXPERTS} experts, not {self.num_experts}.")
        if not 1 <= self.top_k <= min(MAX_TOP_K, self.num_experts + self.always):
            raise Unsupported(
                f"Routing takes the top 1 to {MAX_TOP_K} of {self.num_experts} experts, not {self.top_k}."
            )

    @cached_property
    def e_pad(self) -> int:
        return next_power_of_2(self.num_experts)

    @cached_property
    def one_program(self) -> bool:
        """Whether one program chooses for all tokens. A sort has blocks: its kernels must not vary with the tokens."""
        return not self.sorts and self.tokens <= min(ONE_PROGRAM_TOKENS, ONE_PROGRAM_ELEMENTS // self.e_pad)

    def new_routing(self, device: torch.device) -> Routing:
        shape = (self.tokens, self.top_k)
        return Routing(
            torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, dtype=torch.float32, device=device)
        )

    def choice(self, logits: Tensor | None, expert_scale: Tensor | None) -> dict[str, Any]:
        return {
            "TOP_K": self.top_k,
            "K_PAD": next_power_of_2(self.top_k),
            "E_PAD": self.e_pad,
            "FROM_LOGITS": logits is not None,
            "HAS_SCALE": expert_scale is not None,
            "ALWAYS": self.always,
        }

    @cached_property
    def rows(self) -> int:
        """Tokens that one program holds."""
        if self.one_program:
            return next_power_of_2(max(self.tokens, 1))
        return max(1, min(32, BLOCK_ELEMENTS // self.e_pad))

    @cached_property
    def warps(self) -> int:
        return max(1, min(8, self.rows * self.e_pad // ELEMENTS_PER_WARP))

    @cached_property
    def blocks(self) -> int:
        return cdiv(self.tokens, self.rows)

    def entries(self, bound: int) -> int:
        """Tile-list entries that one program writes at a time."""
        return min(next_power_of_2(max(bound, 1)), max(1, BLOCK_ELEMENTS // self.e_pad))

    def choose(
        self, logits: Tensor | None, routing: Routing, expert_scale: Tensor | None, block_counts: Tensor | None
    ) -> None:
        ids, weights = routing.expert_ids, routing.weights
        arguments = (
            or_unread(logits, ids), or_unread(expert_scale, weights), ids, weights, or_unread(block_counts, ids),
            self.tokens, self.num_experts, _row_stride(logits),
        )  # fmt: skip
        constants = {"ROWS": self.rows, "COUNT": block_counts is not None, **self.choice(logits, expert_scale)}
        options = {"num_warps": self.warps}
        if block_counts is not None:
            # Left alone, ptxas 13.1 takes 72 for 64 experts on SM 12.x and spills two words; under a limit it takes 68.
            options["maxnreg"] = COUNTING_REGISTERS
        launch(routing_jit.choose_many, (self.blocks,), arguments, constants, options)

    def sort(self, routing: Routing, block: int) -> Dispatch:
        ids = routing.expert_ids
        pairs = self.tokens * self.top_k
        bound = tile_bound(pairs, self.num_experts, block)
        if not self.tokens:
            offsets = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=ids.device)
            empty = torch.empty(0, dtype=torch.int32, device=ids.device)
            return Dispatch(offsets, empty, empty.view(0, 4), block, self.top_k)
        offsets = torch.empty(self.num_experts + 1, dtype=torch.int32, device=ids.device)
        order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
        tiles = torch.empty((bound, 4), dtype=torch.int32, device=ids.device)
        entries = self.entries(bound)
        block_counts = torch.empty((self.blocks, self.num_experts), dtype=torch.int32, device=ids.device)
        counts = torch.empty(self.num_experts, dtype=torch.int32, device=ids.device)
        self.choose(None, routing, None, block_counts)
        arguments: tuple[Any, ...] = (block_counts, counts, self.blocks, self.num_experts)
        grid = (cdiv(self.num_experts, PREFIX["EXPERTS"]),)
        launch(routing_jit.prefix_counts, grid, arguments, PREFIX, {"num_warps": 4})
        arguments = (
            ids, block_counts, counts, offsets, order, tiles,
            self.tokens, self.num_experts, self.blocks, block, bound,
        )  # fmt: skip
        constants = {"TOP_K": self.top_k, "E_PAD": self.e_pad, "ROWS": self.rows, "ENTRIES": entries}
        grid = (self.blocks + cdiv(bound, entries),)
        launch(routing_jit.place_many, grid, arguments, constants, {"num_warps": self.warps})
        return Dispatch(offsets, order, tiles, block, self.top_k)


@lru_cache(MAX_JOBS)
def _job(tokens: int, num_experts: int, top_k: int, *, sorts: bool, always: bool = False) -> _RoutingSizes:
    """One for each size: all layers of a step have the same."""
    return _RoutingSizes(tokens, num_experts, top_k, sorts, always)


def _row_stride(logits: Tensor | None) -> int:
    if logits is None:
        return 0
    if logits.stride(-1) != 1:
        raise Unsupported("Router logits must be contiguous along the experts.")
    return logits.stride(0)
