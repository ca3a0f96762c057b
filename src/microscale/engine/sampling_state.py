"""From logits to the next tokens and their log-probabilities, for all requests of a step at once.

Owns the state of a request between steps: its seed, how many tokens it has drawn, with penalties which tokens it has
seen, and with a grammar the state of its matcher. The arithmetic and the order of its steps: ``kernels/sampling``.

Drafts are verified by sampling. A request with k drafts has k + 1 rows; row i is drawn as the token after its first i
drafts would be: with the request's own number u for that place, its bias and its grammar's mask there. Drafts are
accepted as long as they are what was drawn. A draft d is one token, so it is accepted with the probability that the
model and the request's options give d, and otherwise the token drawn in its place has the distribution of the others:
rejection sampling. Each token is the one that would have been drawn without drafts.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from microscale.engine.ahead import Ahead, Layouts
from microscale.engine.grammar import Grammars, Matcher
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.token_readback import NextToken, Reading, SampledLists
from microscale.errors import Unsupported
from microscale.planning.following import follow
from microscale.planning.ops import PROMPT_BIT, Bias, History, Logits, SampleStatus, Sampling, SamplingBatch
from microscale.planning.ranks import likeliest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Request:
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    slot: int
    """Row of the token counts; 0 belongs to all requests without penalties."""
    matcher: Matcher | None
    drawn: int = 0
    """Tokens of it that were drawn and are, or will be, its output."""

    @cached_property
    def plain(self) -> bool:
        """It takes the likeliest token, whatever was drawn before, and has no other options."""
        p = self.params
        changed = p.penalised or p.logit_bias or p.min_tokens or self.matcher is not None
        return p.temperature <= 0 and not p.logprobs and not changed

    def bias(self, after: int = 0) -> dict[int, float]:
        """The logit bias of the token after the next ``after`` ones."""
        pairs = dict(self.params.logit_bias)
        if self.drawn + after < self.params.min_tokens:
            pairs |= dict.fromkeys(self.stops, -math.inf)
        return pairs


class _LogitRow(NamedTuple):
    """One row of logits: the place after ``after`` drafts of a request."""

    request: _Request
    after: int = 0
    draft: int | None = None
    """The token that is drafted for this place, if there is one: the next row is the place after it."""


@dataclass(frozen=True)
class Drawn:
    """Tokens that were drawn and not read yet."""

    tokens: Tensor
    """int32 on the device, row by row."""
    reading: Reading
    requests: Sequence[_Request]
    drafts: Sequence[Sequence[int]]
    """Of each request, which has one more row than drafts. Where drafts are only on the device, ``ahead`` has them."""
    ahead: Ahead | None
    faults: Mapping[int, str]
    """Rows whose grammar has failed."""


class Sampler:
    """The requests of an engine. ``add`` one, ``sample`` those of a step, ``remove`` it when it is done."""

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars = grammars
        """Without them no request may have a grammar."""
        self._sampling = sampling
        self._vocab = vocab
        self._device = device
        self._eos = tuple(eos_token_ids)
        self._requests: dict[int, _Request] = {}
        self._next_id = 0
        # int32 [slots, vocab], 0.8 MB a slot for gpt-oss: made when the first request with penalties comes.
        self._counts: Tensor | None = None
        self._free_slots: list[int] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Rows → what ``_unread`` made for them.
        self._off: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._plain: dict[int, SamplingBatch] = {}
        # int32 [rows, words], on the host and pinned: made when the first request with a grammar comes.
        self._masks: Tensor | None = None
        self._layouts = Layouts(device)

    def add(self, params: SamplingParams, prompt: Sequence[int] = (), matcher: Matcher | None = None) -> int:
        """Add a request; gives its number here. ``matcher``: of its grammar, if that is compiled already."""
        params.check_vocab(self._vocab)
        matcher = matcher or self._matcher(params.grammar)
        slot = self._take_slot(prompt) if params.penalised else 0
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._requests[self._next_id] = _Request(params, seed, params.stop_tokens(self._eos), slot, matcher)
        self._next_id += 1
        return self._next_id - 1

    def remove(self, request_id: int) -> None:
        slot = self._requests.pop(request_id).slot
        if slot:
            self._free_slots.append(slot)

    def sample(self, logits: Tensor, request_ids: Sequence[int], blocks: Logits | None = None) -> list[NextToken]:
        """The next token of each request from its row of ``logits`` (float32 [rows, vocab])."""
        return [token for [token] in self.read(self.draw(logits, request_ids, blocks))]

    def draw(
        self,
        logits: Tensor,
        request_ids: Sequence[int],
        blocks: Logits | None = None,
        drafts: Sequence[Sequence[int]] = (),
        ahead: Ahead | None = None,
    ) -> Drawn:
        """Queue the sampling of these rows. The tokens are on the device when its turn comes; ``read`` waits for them.

        Requests may be drawn again before they are read, except where ``needs_host``. ``drafts``: of each request,
        already ``cut``; it has one more row for each. ``ahead``: the last tokens had drafts, or these drafts are on the
        device alone: see ``after``.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        drafts = drafts or [()] * len(requests)
        # On the host, while the device still computes the logits.
        faults: Mapping[int, str] = {}
        if all(request.plain for request in requests):
            batch = self._plain_batch(len(requests) + sum(map(len, drafts)))
        else:
            rows = _rows(requests, drafts)
            allowed, faults = self._allowed(rows)
            batch = self._batch(rows, allowed, ahead)
        if blocks is not None and logits.shape[1] < self._vocab:
            # Of several ranks, whose logits stayed where they are: see ``engine/ranks/steps``.
            changed = any(option is not None for option in (batch.history, batch.bias, batch.allowed))
            if batch.draws or batch.top_logprobs or changed:
                raise AssertionError("these rows need all logits")
            sampled = likeliest(blocks)
        else:
            sampled = self._sampling(logits, batch, blocks)
        for request in requests:
            request.drawn += 1
        reading = Reading(sampled, self._side, None if ahead is None else ahead.drafts)
        return Drawn(sampled.tokens, reading, requests, drafts, ahead, faults)

    def take(self, tokens: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of tokens that are on the device alone."""
        return tokens.index_select(0, self._layouts.to_device(torch.tensor(rows, dtype=torch.int32)))

    def after(self, drawn: Drawn, drafts: Tensor, lengths: Sequence[int]) -> Ahead:
        """What the next step takes from the device if it is launched before ``drawn`` is read. ``drafts``: its drafts
        (int64 [requests, …]), of which each request has ``lengths``."""
        last, layout = self._layouts.of([len(draft) for draft in drawn.drafts]), self._layouts.of(lengths)
        verified = self._layouts.drafts(drawn.drafts) if drawn.ahead is None else drawn.ahead.drafts
        return follow(drawn.tokens, last, verified, layout, drafts, self._given(drawn))

    def _given(self, drawn: Drawn) -> Tensor | None:
        """int64 [requests] on the device: how many drafts are accepted, where that does not follow from the tokens."""
        return None

    def read(self, drawn: Drawn) -> list[list[NextToken]]:
        """Wait for what was drawn. Gives one token for each request, and before it the drafts that were accepted."""
        lists = drawn.reading.lists()
        result: list[list[NextToken]] = []
        at = 0
        counts = self._accepted(drawn, lists) if any(drawn.drafts) else [0] * len(drawn.requests)
        for request, draft, accepted in zip(drawn.requests, drawn.drafts, counts, strict=True):
            wanted, faults = request.params.logprobs or 0, drawn.faults
            rows = range(at, at + accepted + 1)
            tokens = [lists.next_token(row, wanted, faults.get(row)) for row in rows]
            request.drawn += accepted
            if request.matcher is not None:
                for token in tokens:
                    if token.fault is None and token.status is SampleStatus.OK:
                        request.matcher.accept(token.token)
            result.append(tokens)
            at += 1 + len(draft)
        return result

    def _accepted(self, drawn: Drawn, lists: SampledLists) -> list[int]:
        """How many tokens of each request's draft are what was drawn. A row without a token ends it."""
        drafts = drawn.drafts
        if drawn.ahead is not None:
            drafts = [row[: len(draft)] for row, draft in zip(drawn.reading.drafts(), drafts, strict=True)]
        counts, at, faults = [], 0, drawn.faults
        for draft in drafts:
            count = 0
            for row, token in enumerate(draft, start=at):
                if lists.tokens[row] != token or lists.status[row] or row in faults:
                    break
                count += 1
            counts.append(count)
            at += 1 + len(draft)
        return counts

    def cut(self, request_id: int, draft: Sequence[int]) -> Sequence[int]:
        """As much of a draft as may be verified: nothing from a stop token on (the row before it draws that as well),
        and nothing that the grammar forbids."""
        request = self._requests[request_id]
        if not request.stops.isdisjoint(draft):
            draft = draft[: next(place for place, token in enumerate(draft) if token in request.stops)]
        if request.matcher is not None and draft:
            draft = draft[: request.matcher.count_allowed(draft)]
        return draft

    def needs_host(self, request_id: int, drafted: int = 0) -> bool:
        """Its next token depends on what the host knows of the last one, or on how many of its ``drafted`` drafts were
        accepted."""
        request = self._requests[request_id]
        return request.matcher is not None or (drafted > 0 and request.drawn < request.params.min_tokens)

    def prompt_logprobs(self, logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[NextToken]:
        """How likely given tokens were: row i of ``logits`` belongs to the place that ``tokens[i]`` took."""
        ids = torch.tensor(tokens, dtype=torch.int32).to(self._device)
        return Reading(self._sampling.score(logits, ids, top), self._side).next_tokens([top] * len(tokens))

    def _matcher(self, grammar: str | None) -> Matcher | None:
        if grammar is None:
            return None
        if self.grammars is None:
            raise Unsupported("Structured output is unavailable: the engine was started without a tokenizer.")
        return self.grammars.matcher(grammar)

    def _allowed(self, rows: Sequence[_LogitRow]) -> tuple[Tensor | None, Mapping[int, str]]:
        """int32 [rows, ceil(vocab / 32)]: bit t % 32 of word t // 32 admits t; and rows whose grammar has failed."""
        bound = _matchers(rows)
        if not bound or self.grammars is None:
            return None, {}
        if self._masks is None or len(self._masks) < len(rows):
            shape = (max(64, len(rows)), -(-self._vocab // 32))
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masks = self._masks[: len(rows)]
        free = [at for at, row in enumerate(rows) if row.request.matcher is None]
        if free:
            masks[free] = -1
        faults = self.grammars.fill(bound, masks.data_ptr(), len(rows))
        # One copy for all rows. The buffer is free again when the tokens have come back.
        return masks.to(self._device, non_blocking=True), faults

    def _batch(self, rows: Sequence[_LogitRow], allowed: Tensor | None, ahead: Ahead | None) -> SamplingBatch:
        all_params = [row.request.params for row in rows]
        draws = any(p.temperature > 0 for p in all_params)
        penalised = any(p.penalised for p in all_params)
        numbers, wide, top_k = self._numbers(rows) if draws or penalised else self._unread(len(rows))
        temperature, top_p, min_p, repetition, presence, frequency = numbers
        places = wide[1] if ahead is None or not draws else wide[1] + ahead.moved
        history = None
        if self._counts is not None and penalised:
            history = History(wide[2].int(), self._counts)
        return SamplingBatch(
            temperature, top_k, top_p, min_p, repetition, presence, frequency, wide[0], places,
            draws=draws,
            filters=any(p.filtered for p in all_params),
            history=history,
            bias=self._bias([row.request.bias(row.after) for row in rows]),
            allowed=allowed,
            top_logprobs=max((p.logprobs or 0 for p in all_params), default=0),
        )  # fmt: skip

    def _plain_batch(self, rows: int) -> SamplingBatch:
        """Of requests that are all plain: the same for each number of rows."""
        if rows not in self._plain:
            (temperature, top_p, min_p, repetition, presence, frequency), wide, top_k = self._unread(rows)
            self._plain[rows] = SamplingBatch(
                temperature, top_k, top_p, min_p, repetition, presence, frequency, wide[0], wide[1],
                draws=False, filters=False,
            )  # fmt: skip
        return self._plain[rows]

    def _numbers(self, rows: Sequence[_LogitRow]) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [6, rows], int64 [3, rows] (seed, place, slot) and top-k: two copies to the device, however many."""
        all_params = [row.request.params for row in rows]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in all_params
        ]
        numbers = self._layouts.to_device(torch.tensor(floats, dtype=torch.float32).view(-1, 6).T.contiguous())
        numbered = [(r.seed, r.drawn + after, r.slot, r.params.top_k) for r, after, _ in rows]
        whole = torch.tensor(numbered, dtype=torch.int64)
        wide = self._layouts.to_device(whole.view(-1, 4).T.contiguous())
        return numbers, wide[:3], wide[3].int()

    def _unread(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same for rows that all take the likeliest token, which none of these numbers changes: everything off, and
        nothing to copy. Each copy is made between two steps, about 3 us of a step of 1500 (gpt-oss-20b, H200)."""
        if rows not in self._off:
            off = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]).view(6, 1).expand(6, rows)
            whole = torch.zeros((3, rows), dtype=torch.int64)
            to_device = self._layouts.to_device
            self._off[rows] = to_device(off.contiguous()), to_device(whole), to_device(whole[0].int())
        return self._off[rows]

    def _bias(self, pairs: Sequence[Mapping[int, float]]) -> Bias | None:
        capacity = max((len(items) for items in pairs), default=0)
        if not capacity:
            return None
        capacity = -(-capacity // 16) * 16
        tokens = torch.full((len(pairs), capacity), -1, dtype=torch.int32)
        values = torch.zeros(len(pairs), capacity)
        for row, items in enumerate(pairs):
            tokens[row, : len(items)] = torch.tensor(list(items), dtype=torch.int32)
            values[row, : len(items)] = torch.tensor(list(items.values()))
        return Bias(self._layouts.to_device(tokens), self._layouts.to_device(values))

    def _take_slot(self, prompt: Sequence[int]) -> int:
        if not self._free_slots:
            held = 1 if self._counts is None else len(self._counts)
            grown = torch.zeros(2 * held + 6, self._vocab, dtype=torch.int32, device=self._device)
            if self._counts is not None:
                grown[:held] = self._counts
            self._counts = grown
            self._free_slots = list(range(held, len(grown)))
        slot = self._free_slots.pop()
        assert self._counts is not None
        row = self._counts[slot].zero_()
        row[torch.tensor(list(prompt), dtype=torch.int64, device=self._device)] = PROMPT_BIT
        return slot


def _rows(requests: Sequence[_Request], drafts: Sequence[Sequence[int]]) -> list[_LogitRow]:
    """A row for each request, and one more for each of its drafts."""
    return [
        _LogitRow(request, after, token)
        for request, draft in zip(requests, drafts, strict=True)
        for after, token in enumerate((*draft, None))
    ]


def _matchers(rows: Sequence[_LogitRow]) -> list[tuple[int, Matcher]]:
    """For each row whose request has a grammar: a matcher in the state in which the row is drawn."""
    matchers: list[tuple[int, Matcher]] = []
    for at, row in enumerate(rows):
        if row.request.matcher is None:
            continue
        drafted = rows[at - 1].draft if row.after else None
        matchers.append((at, row.request.matcher if drafted is None else matchers[-1][1].after(drafted)))
    return matchers
