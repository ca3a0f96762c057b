"""Which pages of both pools each request holds: taken before a step, kept or given back after it.

Before a step with drafts a request that decodes holds

    full layers     | pages of computed tokens          | the next token | drafts            |
    sliding layers  | dropped | what the next token sees | the next token | drafts            |
                    0         first - window + 1         first            first + 1           first + count

and after it, with n drafts accepted,

    both            | …                                 | the next token | n drafts | rejected: pages go back |
                                                        first                       first + 1 + n

A page goes back if it holds only rejected drafts; in the last page that stays, the request's next tokens overwrite
them. Only full pages of accepted tokens are published, so that others can share them. The window moves with ``first``,
so by what was accepted. Between steps no request holds a page without a computed token (``check``), so a pool of pages
looks as if there had never been a draft.

Layers with states have *slots*. A sequence has one, for the state after its computed tokens, and one more per draft. A
step writes the state after its own token and after each draft. Once drafts are verified, the slot of the last accepted
one is swapped with the sequence's own, unless the next step is launched already: then the device picks the slot. One
step of a prompt ends at the end of a page, at least ``KEPT_BEFORE_END`` tokens before the prompt's end. Its slot is
published under that page's key and never written again: the next step reads it and writes another slot, as does the
first step of a request that shares it.

    slots          | only read, or none | its own: read and written | after each draft |

A step that is launched before the one with drafts is read begins somewhere after the next token. It holds pages for the
case that all drafts are accepted; when their number n is known, those that it cannot reach go back:

    both            | …                                 | the next token | n drafts | the step after | goes back |
                                                        first                       first + 1 + n
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from microscale.engine.limits import Limits
from microscale.engine.pages import NOWHERE, PagePool, longest_hit, window_pages
from microscale.engine.request import Request
from microscale.engine.work import Work
from microscale.models.config import PAGED, LayerKind

KEPT_BEFORE_END = 8
"""A later turn of a chat repeats a prompt, except for its last few tokens, which open the answer."""
LEAST_KEPT = 64
"""Tokens from which on their state is worth a slot, and a step that ends there."""

ROOM = 64
"""Tokens that each running request can yet grow by when another is admitted. Without that room a request is admitted,
preempted and admitted again, and with a full pool up to twice as many tokens are computed again as are generated
(docs/lab/many_streams.md)."""


class PageLedger:
    """The pages of an engine's requests."""

    def __init__(self, pools: Mapping[LayerKind, PagePool], limits: Limits) -> None:
        self._pools = pools
        self._paged = [pools[kind] for kind in PAGED]
        self._slots = pools.get(LayerKind.LINEAR)
        """Where the states of requests are, for a model that has such layers."""
        self._arranged: dict[str, int] = {}
        """By request: where the step begins that its slots were taken for."""
        self._full = pools[LayerKind.FULL]
        self._sliding = pools[LayerKind.SLIDING]
        self._limits = limits

    def missing(self, request: Request, tokens: int | None = None) -> int:
        """Full pages that a running request has yet to take for ``tokens`` tokens, or for those that it has."""
        count = len(request.tokens) if tokens is None else tokens
        held = len(self._full.pages_of(request.request_id))
        return max(0, -(-count // self._limits.page_size) - held)

    def growth(self, request: Request) -> int:
        """Full pages that a request takes if it grows by ``ROOM``, or by all that it may."""
        size, count = self._limits.page_size, len(request.tokens)
        return pages_for(min(count + ROOM, request.num_total), size) - pages_for(count, size)

    def share_prefix(self, request: Request) -> int:
        """Begin a request with what the prefix cache has of it. Gives the number of tokens."""
        limits = self._limits
        if not limits.prefix_caching or request.scoring:
            return 0
        # The last token must run in any case: it gives the logits.
        keys = request.keys.of(request.tokens, (len(request.tokens) - 1) // limits.page_size)
        pages = longest_hit(keys, self._full, self._sliding, limits.window, limits.page_size)
        if self._slots is not None:
            pages = next((n for n in range(pages, 0, -1) if self._slots.find(keys[n - 1])), 0)
            if pages:
                self._slots.share(request.request_id, keys[pages - 1 : pages])
        if pages:
            seen = window_pages(pages, limits.window, limits.page_size)
            self._full.share(request.request_id, keys[:pages])
            self._sliding.share(request.request_id, [None] * seen + list(keys[seen:pages]))
            request.num_computed = pages * limits.page_size
        return request.num_computed

    def take(self, request: Request, count: int, begin: int | None = None) -> int:
        """Pages for up to ``count`` more tokens; gives for how many there are. ``begin``: where the step begins, if the
        one before is still running."""
        size, owner, first = self._limits.page_size, request.request_id, request.num_computed
        if self._slots is not None:
            if not self._take_slot(self._slots, owner, first if begin is None else begin):
                return 0
            kept = self._kept_state(request)
            if first < kept < first + count:
                count = kept - first
        if first % size and first + count <= len(self._full.pages_of(owner)) * size:
            return count  # the token before has its page, and there is room
        # The first new token sees from here on; what lies before is of no more use.
        self._sliding.drop(owner, max(0, first - self._limits.window + 1) // size)
        held = len(self._full.pages_of(owner))  # as many places as in the other pool
        free = min(self._full.num_free, self._sliding.num_free)
        count = min(count, (held + free) * size - first)
        if count <= 0:
            return 0
        total = pages_for(first + count, size)
        if total > held:
            self._full.grow(owner, total)
            self._sliding.grow(owner, total)
        return count

    def _take_slot(self, slots: PagePool, owner: str, first: int) -> bool:
        """Take slots for the step that begins at ``first``. Gives whether there were any."""
        held = slots.pages_of(owner)
        if self._arranged.get(owner) == first and held:
            return True
        if len(held) > 1:
            slots.drop(owner, 1)  # what the step before read
            if slots.is_published(held[1]):
                slots.reorder(owner, [1])
        held = slots.pages_of(owner)
        if len(held) < 2:
            if slots.num_free:
                if not held:
                    slots.share(owner, [None])
                slots.grow(owner, 2)
            elif held and slots.unpublish(held[0]):
                slots.reorder(owner, [None, 0])
            else:
                return False
        self._arranged[owner] = first
        return True

    def take_drafts(self, request: Request, count: int) -> int:
        """Slots for the states after ``count`` drafts; gives for how many there are."""
        if self._slots is None:
            return count
        owner = request.request_id
        held = len(self._slots.pages_of(owner))
        self._slots.grow(owner, min(2 + count, held + self._slots.num_free))
        return min(count, len(self._slots.pages_of(owner)) - 2)

    def _kept_state(self, request: Request) -> int:
        """The position up to which the state of a prompt is kept; 0 where it is not."""
        size = self._limits.page_size
        kept = (len(request.tokens) - KEPT_BEFORE_END) // size * size
        return kept if self._limits.prefix_caching and kept >= LEAST_KEPT else 0

    def settle(self, work: Work, accepted: Sequence[int], pending: int = 0) -> None:
        """A step has computed ``work``, of whose drafts these were accepted: publish full pages, give back the others.
        ``pending``: tokens after them that the next step computes, if it is launched already."""
        request, size, ahead = work.request, self._limits.page_size, self._limits.key_lookahead
        request.num_computed = work.first + work.count - len(work.drafts) + len(accepted)
        if work.drafts:
            for pool in self._paged:
                pool.shrink(request.request_id, pages_for(request.num_computed + pending, size))
        if self._slots is not None and accepted and not pending:
            # A pending step has found the state by itself, and has written it to the slots in their old order.
            places: list[int | None] = list(range(len(self._slots.pages_of(request.request_id))))
            last = 1 + len(accepted)
            places[1], places[last] = last, 1
            self._slots.reorder(request.request_id, places)
        # A page whose key covers the token after it waits for that one.
        known = request.num_computed if accepted else len(request.tokens)
        begin = max(work.first - ahead, 0) // size
        end = min(request.num_computed, known - ahead) // size
        if not self._limits.prefix_caching or begin >= end:
            return
        tokens: Sequence[int] = request.tokens
        if accepted:
            tokens = [*tokens[: work.first + 1], *accepted]
        self._publish(request, tokens, begin, end)
        if self._slots is not None and work.count > 1 and request.num_computed == self._kept_state(request):
            self._slots.publish(request.request_id, 1, request.keys.of(tokens, end)[end - 1])

    def _publish(self, request: Request, tokens: Sequence[int], begin: int, end: int) -> None:
        keys = request.keys.of(tokens, end)
        for index in range(begin, end):
            for pool in self._paged:
                pool.publish(request.request_id, index, keys[index])

    def release(self, request: Request) -> None:
        """Give all pages back. The last full one may have waited for the token after it, which is known by now."""
        size, ahead = self._limits.page_size, self._limits.key_lookahead
        end = min(request.num_computed, len(request.tokens) - ahead) // size
        if ahead and end and self._limits.prefix_caching:
            self._publish(request, request.tokens, end - 1, end)
        for pool in self._pools.values():
            pool.release(request.request_id)
        self._arranged.pop(request.request_id, None)
        request.num_computed = 0

    def check(self, running: Iterable[Request], waiting: Iterable[Request], pending: Sequence[Work] = ()) -> None:
        """Between steps: pools are consistent, waiting requests hold no page, and running ones none beyond their
        tokens, those of a ``pending`` step included."""
        running = list(running)
        ends = {id(work.request): work.first + work.count for work in pending}
        for pool in self._pools.values():
            pool.check()
            for request in waiting:
                if pool.pages_of(request.request_id):
                    raise AssertionError(f"{request.request_id} waits and holds pages")
            for request in running:
                end = ends.get(id(request), request.num_computed)
                pages = pool.pages_of(request.request_id)
                held, needed = len(pages), pages_for(end, self._size)
                if pool is self._slots:
                    held, needed = sum(page == NOWHERE for page in pages[1:]), 0
                if held != needed:
                    raise AssertionError(
                        f"{request.request_id} holds {held} pages, and its tokens in the cache take {needed}"
                    )

    @property
    def _size(self) -> int:
        return self._limits.page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that hold this many tokens."""
    return -(-tokens // page_size)
