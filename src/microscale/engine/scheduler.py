"""Which tokens of which requests run in the next step.

Requests are served by rank: lower ``priority`` first, then first come first served. A request's rank rises while it
waits, so none starves. A step has a budget of tokens. Requests that decode take one each, before anything else. The
rest goes to prompts, of equal priority the shortest first: a prompt that can be finished in this step is, and a long
one does not hold up a short one behind it. The others take equal shares of what is left, and the first prompt of all
never less than that. Waiting requests are admitted while their whole prompt fits into the free pages that no running
request will need soon.

When a decoding request finds no page, the running request of lowest rank is *preempted*: its pages go back, and it
waits with its tokens to be computed again (mostly from the prefix cache, where its full pages still are). Greedy
decoding then goes on as if nothing had happened, because the tokens themselves are kept.

Drafts come last: they take what the others have left of the budget and of the free pages, and no request is preempted
for them. ``page_ledger`` draws which request holds which pages, and what becomes of the pages of rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from microscale.engine.limits import SCORED_TOKENS, Limits
from microscale.engine.page_ledger import PageLedger, pages_for
from microscale.engine.pages import PageKeys, PagePool
from microscale.engine.request import Request
from microscale.engine.work import Work
from microscale.errors import BadRequest, QueueFull
from microscale.models.config import PAGED, LayerKind

AGING_STEPS = 512
"""Steps in the queue after which a request counts as one priority better."""
MIN_SHARE = 64
"""A prompt gets at least this many tokens of a step's budget, if there are any left: smaller pieces waste a launch."""


NO_DRAFTS: Mapping[str, Sequence[int]] = {}
NONE_ACCEPTED: Mapping[str, Sequence[int]] = {}


class Scheduler:
    """``add`` requests, ``schedule`` a step, report what was ``computed``, ``remove`` those that are done."""

    def __init__(self, pools: Mapping[LayerKind, PagePool], limits: Limits) -> None:
        self.pools = pools
        self.limits = limits
        self._full = pools[LayerKind.FULL]
        self._sliding = pools[LayerKind.SLIDING]
        self._ledger = PageLedger(pools, limits)
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._arrivals = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._rows: dict[str, int] = {}
        """Where in the last step each request ran."""
        self._scored_left = SCORED_TOKENS
        """Rows of logits that prompts which are scored may still have in this step."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def scores(self) -> bool:
        """The last step scores a prompt."""
        return self._scored_left < SCORED_TOKENS

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it at once with the reason."""
        limits = self.limits
        if request.request_id in self._waiting or request.request_id in self._running:
            raise BadRequest(f"Request {request.request_id!r} is already here; request ids are given once.")
        if len(self._waiting) >= limits.max_queue:
            raise QueueFull(f"{limits.max_queue} requests are waiting already; try again later, or raise --max-queue.")
        if request.num_total > limits.max_model_len:
            raise BadRequest(
                f"{request.num_prompt} prompt tokens and {request.params.max_tokens} new ones exceed the context of "
                f"{limits.max_model_len}."
            )
        self._refuse_what_never_fits(request)
        request.keys = PageKeys(limits.page_size, request.cache_salt, limits.key_lookahead)
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting[request.request_id] = request

    def _refuse_what_never_fits(self, request: Request) -> None:
        needed = pages_for(request.num_total, self.limits.page_size)
        if needed > self._full.num_pages:
            raise BadRequest(
                f"The request needs {needed} KV pages of {self.limits.page_size} tokens and there are "
                f"{self._full.num_pages} in all: {request.num_total} tokens never fit."
            )
        # One token at a time is the least: its window, and its own page.
        least = min(needed, pages_for(self.limits.window, self.limits.page_size) + 1)
        if least > self._sliding.num_pages:
            raise BadRequest(
                f"A window needs {least} sliding KV pages, and there are {self._sliding.num_pages} in all."
            )

    def remove(self, request_id: str) -> Request | None:
        """Forget a request, done or not; its pages are free at once. ``None`` if it is not here."""
        request = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if request is not None:
            self._ledger.release(request)
        return request

    def requests(self) -> Iterator[Request]:
        yield from self._running.values()
        yield from self._waiting.values()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> list[Work]:
        """The next step. Pages for all of it are taken when this returns; it is empty only when nothing can run, or not
        before the last step is read.

        ``drafts``: by request, tokens to run after its own if it decodes; as many as there is room for.
        """
        budget = self.limits.max_num_batched_tokens
        self._scored_left = SCORED_TOKENS
        decoding: list[Request] = []
        prompts: list[Request] = []
        unread = False
        for request in sorted(self._running.values(), key=_rank):
            unread |= request.is_unread
            if not request.ends_unread:
                (decoding if request.num_pending == 1 else prompts).append(request)
        if unread and self._lacks_pages(decoding):
            return []  # somebody must be preempted, and not before its token is read
        schedule = self._decode(decoding)
        budget -= len(schedule)
        if prompts or self._waiting:
            schedule += self._prompts([r for r in prompts if r.request_id in self._running], budget)
        # In a step with a prompt a sequence writes only its last state, so drafts could not be taken back.
        if drafts and (LayerKind.LINEAR not in self.pools or all(work.decodes for work in schedule)):
            schedule = self._with_drafts(schedule, drafts)
        if not schedule and self._running and not unread:
            # Prompts hold all pages between them and none can go on: the last one gives its pages back.
            self._preempt(max(self._running.values(), key=_rank))
            return self.schedule()
        if not schedule:
            return []
        for request in self._waiting.values():
            request.waited += 1
        return self._in_place(schedule)

    def _lacks_pages(self, decoding: Sequence[Request]) -> bool:
        """Whether there are too few for the next tokens of all these."""
        free = min(self._full.num_free, self._sliding.num_free)
        if len(decoding) <= free:
            return False
        return sum(self._ledger.missing(request, request.num_computed + 1) for request in decoding) > free

    def _in_place(self, schedule: list[Work]) -> list[Work]:
        """The same work, each request in the row that it had in the last step, where that is possible: page tables are
        kept row by row, and a row with another request is rewritten."""
        last, self._rows = self._rows, {}
        rows: dict[int, Work] = {}
        others = []
        for work in schedule:
            row = last.get(work.request.request_id, len(schedule))
            if row < len(schedule):
                rows[row] = work
            else:
                others.append(work)
        placed = []
        newcomers = iter(others)
        for row in range(len(schedule)):
            work = rows[row] if row in rows else next(newcomers)
            self._rows[work.request.request_id] = row
            placed.append(work)
        return placed

    def drafted(self) -> list[Request]:
        """The running requests that could have drafts in the next step: those that decode."""
        return [r for r in self._running.values() if r.num_pending == 1 and not r.scoring]

    def schedule_ahead(self, last: list[Work], lengths: Sequence[int] = ()) -> list[Work] | None:
        """The step after ``last``, whose tokens the host has not read yet: all its requests decode once more.
        ``lengths``: of their drafts, if they have any.

        ``None`` where another step may be better, or where a request has left or must be preempted: then the tokens are
        read first.
        """
        if len(last) != len(self._running) or (self._waiting and len(last) < self.limits.max_num_seqs):
            return None
        schedule = []
        # Each page is taken from both pools. What a window leaves may come back to its pool, but need not.
        tokens = fresh = 0
        for work, length in zip(last, lengths or [0] * len(last), strict=True):
            request = work.request
            if self._running.get(request.request_id) is not request:
                return None
            ahead = Work(request, work.first + 1, 1 + length, True, (0,) * length, len(work.drafts))
            schedule.append(ahead)
            tokens += ahead.count
            fresh += self._ledger.missing(request, ahead.first + ahead.slack + ahead.count)
        if tokens > self.limits.max_num_batched_tokens:
            return None
        if fresh and fresh > min(self.pools[kind].num_free for kind in PAGED):
            return None
        if lengths and any(
            self._ledger.take_drafts(work.request, len(work.drafts)) < len(work.drafts) for work in schedule
        ):
            return None
        for request in self._waiting.values():
            request.waited += 1
        for work in schedule:
            count = work.first + work.slack + work.count - work.request.num_computed
            self._ledger.take(work.request, count, work.first)
        return schedule

    def _decode(self, requests: list[Request]) -> list[Work]:
        schedule = []
        for request in requests:
            while request.request_id in self._running and not self._take(request, 1):
                self._preempt(max(self._running.values(), key=_rank))
            # Requests come by rank and the last rank is preempted first: never one that is scheduled already.
            if request.request_id in self._running:
                schedule.append(Work(request, request.num_computed, 1, ahead=request.is_unread))
        return schedule

    def _with_drafts(self, schedule: list[Work], drafts: Mapping[str, Sequence[int]]) -> list[Work]:
        """The same step, with drafts for those that decode, by rank, while budget and pages last."""
        budget = self.limits.max_num_batched_tokens - sum(work.count for work in schedule)
        drafted = []
        for work in schedule:
            wanted = drafts.get(work.request.request_id, ())[:budget] if work.decodes else ()
            wanted = wanted[: self._ledger.take_drafts(work.request, len(wanted))] if wanted else ()
            count = self._take(work.request, 1 + len(wanted)) - 1 if wanted else 0
            budget -= count
            drafted.append(Work(work.request, work.first, 1 + count, drafts=tuple(wanted[:count])) if count else work)
        return drafted

    def _prompts(self, running: list[Request], budget: int) -> list[Work]:
        """Prompts that are on their way (by rank) and those that can be admitted, the shortest first."""
        schedule = []
        newcomers = min(len(self._waiting), self.limits.max_num_seqs - len(self._running))
        begun = list(running)
        growth = sum(map(self._ledger.growth, self._running.values())) if newcomers else 0
        first = running[0] if running else None
        # What the first of all has in any case.
        kept = max(budget // (len(running) + newcomers), MIN_SHARE) if running else 0
        left = sorted(running, key=_length)
        while budget > 0 and (left or newcomers):
            share = max(budget // (len(left) + newcomers), MIN_SHARE)
            head = self._head() if newcomers else None
            work = None
            if head is not None and (not left or _length(head) < _length(left[0])):
                newcomers -= 1
                growth += self._ledger.growth(head)
                work = self._admit(head, max(budget - kept, 0), share, growth + sum(map(self._ledger.missing, begun)))
                newcomers *= work is not None
                begun.append(head)
            elif left:
                request = left.pop(0)
                kept = 0 if request is first else kept
                count = self._take(request, _part(request, max(budget - kept, 0), share))
                work = Work(request, request.num_computed, count) if count else None
            else:
                break
            if work is not None:
                schedule.append(work)
                budget -= work.count
        return schedule

    def _head(self) -> Request | None:
        """The first in the queue. Who must have its prompt scored lets others pass in a step that scores enough
        already."""
        able = (request for request in self._waiting.values() if self._scored_left or not request.scoring)
        return min(able, key=_rank, default=None)

    def _admit(self, request: Request, free: int, share: int, spoken_for: int) -> Work | None:
        """The first in the queue begins, if its pages are there: whole if that is free in this step, else with its
        share. ``spoken_for``: pages that prompts have yet to take, and those for all that run, and it, to grow."""
        if self._running and spoken_for >= self._full.num_free:
            return None
        hit = self._ledger.share_prefix(request)
        fits = not self._running or self._ledger.missing(request) + spoken_for <= self._full.num_free
        count = self._take(request, _part(request, free, share)) if fits else 0
        if not count:
            self._ledger.release(request)
            return None
        if not request.num_preempted:
            request.num_cached = hit
            if self.limits.prefix_caching:
                self.prefix_queries += request.num_prompt
                self.prefix_hits += hit
        self._running[request.request_id] = self._waiting.pop(request.request_id)
        return Work(request, request.num_computed, count)

    def computed(
        self,
        schedule: Sequence[Work],
        accepted: Mapping[str, Sequence[int]] = NONE_ACCEPTED,
        pending: Sequence[Work] = (),
    ) -> None:
        """The step is done: its tokens are in the cache, and others can share full pages.

        ``accepted``: of each request's drafts. Pages that hold only rejected drafts go back, except those that the next
        step writes to, if it is ``pending`` already.
        """
        next_counts = {work.request.request_id: work.count for work in pending} if pending else {}
        for work in schedule:
            request = work.request
            if self._running.get(request.request_id) is not request:
                continue  # it ended while the step ran
            kept = accepted[request.request_id] if work.drafts else ()
            self._ledger.settle(work, kept, next_counts.get(request.request_id, 0))

    # ---- pages -------------------------------------------------------------------------------------------------------

    def _take(self, request: Request, count: int) -> int:
        """Pages for up to ``count`` more tokens; gives for how many there are."""
        if not request.scoring:
            return self._ledger.take(request, count)
        count = self._ledger.take(request, min(count, self._scored_left))
        self._scored_left -= count
        return count

    def _preempt(self, request: Request) -> None:
        self._ledger.release(request)
        request.num_preempted += 1
        self.num_preemptions += 1
        self._waiting[request.request_id] = self._running.pop(request.request_id)

    def check(self, pending: Sequence[Work] = ()) -> None:
        """Pools are consistent, and only running requests hold pages, and no more than their tokens need. ``pending``:
        a step that was not ``computed`` yet, for which pages are held too."""
        self._ledger.check(self._running.values(), self._waiting.values(), pending)


def _part(request: Request, free: int, share: int) -> int:
    """Of a prompt in one step: all that is left of it if so much is free, else a share."""
    return request.num_pending if request.num_pending <= free else min(share, free)


def _length(request: Request) -> tuple[int, int, int]:
    """By which prompts take their turn in a step: priority, what is left of them, and who came first."""
    priority, arrival = _rank(request)
    return (priority, request.num_pending, arrival)


def _rank(request: Request) -> tuple[int, int]:
    return (request.priority - request.waited // AGING_STEPS, request.arrival)
