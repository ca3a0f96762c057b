"""One step of several ranks: its schedule as a message and back, and the logits of all ranks.

Rank 0 sends for each sequence what runs and how its pages have changed since the last message. The other ranks keep
only what a runner reads: a sequence's pages, and as many of its tokens as run.

    pages of a sequence   | left by its window | unchanged | fresh |
                          0                  left        kept    end
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from microscale.engine.pages import NOWHERE, PagePool
from microscale.engine.ranks.messages import HeldPages, RankRow, RankStep
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import LayerKind
from microscale.parallel.group import Group
from microscale.parallel.sharding import Shard, split_vocabulary
from microscale.planning.ops import Logits
from microscale.planning.ranks import as_one_block, summarise

# ---- rank 0 ----------------------------------------------------------------------------------------------------------


@dataclass
class _Sent:
    """What the other ranks know of a sequence."""

    number: int
    num_preempted: int
    pages: dict[LayerKind, list[int]] = field(default_factory=dict)


class StepWriter:
    """Turns rank 0's schedules into messages."""

    def __init__(self, pools: Mapping[LayerKind, PagePool]) -> None:
        self._pools = pools
        self._sent: weakref.WeakKeyDictionary[Request, _Sent] = weakref.WeakKeyDictionary()
        self._next_number = 0
        self._gone: list[int] = []
        """Numbers of sequences whose requests were garbage-collected since the last message."""

    def write(self, schedule: Sequence[Work], *, ahead: bool) -> RankStep:
        rows = tuple(self._row(work) for work in schedule)
        gone = tuple(self._gone)
        del self._gone[: len(gone)]
        return RankStep(rows, gone, ahead, largest_suffice(schedule))

    def _row(self, work: Work) -> RankRow:
        request, sent = work.request, self._sequence(work.request)
        tokens = () if work.ahead else tuple(work.tokens[: work.count - len(work.drafts)])
        held = tuple(self._held(sent, kind, request.request_id) for kind in self._pools)
        following = None if work.wants_logits else request.tokens[work.first + work.count]
        logits, scoring = work.num_logits, request.scoring
        return RankRow(sent.number, work.first, work.count, tokens, work.drafts, logits, scoring, held, following)

    def _sequence(self, request: Request) -> _Sent:
        sent = self._sent.get(request)
        if sent is None or sent.num_preempted != request.num_preempted:
            # A preempted request has other pages now: to the other ranks it is a new sequence.
            number, self._next_number = self._next_number, self._next_number + 1
            weakref.finalize(request, self._gone.append, number).atexit = False
            sent = self._sent[request] = _Sent(number, request.num_preempted)
        return sent

    def _held(self, sent: _Sent, kind: LayerKind, request_id: str) -> HeldPages:
        pages = list(self._pools[kind].pages_of(request_id))
        before = sent.pages.get(kind, [])
        left = next((place for place, page in enumerate(pages) if page != NOWHERE), len(pages))
        kept = left
        both = min(len(before), len(pages))
        if before[left:both] == pages[left:both]:  # the usual case: 128 Ki of context have 8192 pages
            kept = max(left, both)
        while kept < both and before[kept] == pages[kept]:
            kept += 1
        sent.pages[kind] = pages
        return HeldPages(left, kept, tuple(pages[kept:]))


def largest_suffice(schedule: Sequence[Work]) -> bool:
    """Whether every row of logits is only searched for its largest one."""
    return all(_is_greedy(work.request.params) and not work.request.scoring for work in schedule if work.num_logits)


def _is_greedy(params: SamplingParams) -> bool:
    changed = params.penalised or params.logit_bias or params.min_tokens or params.grammar is not None
    return params.temperature == 0 and params.logprobs is None and not changed


# ---- the other ranks -------------------------------------------------------------------------------------------------


class MirroredPages(PagePool):
    """Which pages rank 0 has given to each sequence."""

    def hold(self, owner: str, held: HeldPages) -> None:
        before = list(self.pages_of(owner))
        if held.kept > max(len(before), held.left):
            raise BadMessage(f"Sequence {owner} must keep {held.kept} pages and has {len(before)}.")
        for page in held.fresh:
            if page >= self.num_pages:
                raise BadMessage(f"Sequence {owner} is given page {page} of {self.num_pages}.")
        self._owned[owner] = [NOWHERE] * held.left + before[held.left : held.kept] + list(held.fresh)

    def forget(self, owner: str) -> None:
        self._owned.pop(owner, None)


class MirroredRequest(Request):
    """A sequence of rank 0, as far as a runner reads it."""

    is_scored = False

    @property
    def scoring(self) -> bool:
        return self.is_scored


class StepReader:
    """Turns messages back into schedules."""

    def __init__(self, pools: Mapping[LayerKind, MirroredPages]) -> None:
        self._pools = pools
        self._requests: dict[int, MirroredRequest] = {}

    def read(self, step: RankStep) -> list[Work]:
        for number in step.gone:
            self._requests.pop(number, None)
            for pool in self._pools.values():
                pool.forget(str(number))
        return [self._work(row, step.ahead) for row in step.rows]

    def _work(self, row: RankRow, ahead: bool) -> Work:
        request = self._requests.get(row.number)
        if request is None:
            request = self._requests[row.number] = MirroredRequest(str(row.number), (), SamplingParams())
        for kind, held in zip(self._pools, row.held, strict=True):
            self._pools[kind].hold(request.request_id, held)
        own = row.count - len(row.drafts)
        if not (ahead and own == 1) and len(row.tokens) != own:
            raise BadMessage(f"Sequence {row.number} has {len(row.tokens)} tokens for {own} places.")
        tokens = request.tokens
        tokens += [0] * (row.first - len(tokens))
        del tokens[row.first :]
        tokens += row.tokens
        request.is_scored = row.scoring
        work = Work(request, row.first, row.count, ahead and not row.tokens, row.drafts)
        if row.following is not None:
            tokens.append(row.following)  # the prompt goes on, so no token is sampled
        if work.num_logits != row.logits:
            raise BadMessage(f"Sequence {row.number} needs {row.logits} rows of logits and has {work.num_logits}.")
        return work


# ---- all ranks -------------------------------------------------------------------------------------------------------


def gather_logits(logits: Logits, vocab: int, group: Group, *, greedy: bool) -> Logits:
    """On rank 0 the logits of all ranks; with ``greedy`` one block of each rank next to its own logits: the largest
    logit of each row, its token, and the sum of exp(logit - largest). Other ranks get their own back."""
    if not len(logits.values):
        return logits
    shares = [split_vocabulary(vocab, Shard(rank, group.world)) for rank in range(group.world)]
    if not greedy:
        whole = group.columns(logits.values, [len(share) for share in shares])
        return logits if whole is None else summarise(whole)
    largest, tokens, total = as_one_block(logits)
    tokens = tokens.int() + shares[group.shard.rank].start
    blocks = group.columns(torch.stack((largest, tokens.view(torch.float32), total), dim=1), [3] * group.world)
    if blocks is None:
        return logits
    return Logits(
        logits.values,
        blocks[:, 0::3].contiguous(),
        blocks[:, 1::3].contiguous().view(torch.int32),
        blocks[:, 2::3].contiguous(),
        len(shares[0]),
    )
