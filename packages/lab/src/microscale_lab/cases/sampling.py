"""Cases of ``sampling``: greedy and drawn tokens, top-k, top-p and min-p, penalties, masks, biases, log-probabilities.

The kernels' weights are integers from float32 exponentials, the reference's are float64. A draw whose u lies within
``TOLERANCE`` of the border between two tokens may therefore fall on either, and a cut whose weight lies that near to
top-p of the total too: ``distance`` says how far beyond the token's own part of the line u lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.kernels.dense.spec import Logits
from microscale.kernels.op import Reason
from microscale.kernels.sampling import reference
from microscale.kernels.sampling.spec import (
    PROMPT_BIT,
    Bias,
    History,
    Sampled,
    SampleStatus,
    SamplingBatch,
    SamplingSpec,
)
from microscale.planning import registry
from microscale_lab.calls import run_sampling, run_score
from microscale_lab.cases.case import Compared, Finish, KernelCase, compare, just_written, same
from microscale_lab.cases.errors import Errors, step

# exp2 takes (x - max) * log2(e) / T, rounded twice, in size at most 36 where the weight is not 0: its relative error is
# up to 2 * 36 * ln 2 steps of float32, and 2 more are its own.
TOLERANCE = 52 * step("float32")
# A sum of exponentials of 1 to 64 blocks, a logarithm and two subtractions of numbers up to 32.
LOGPROB_TOLERANCE = 64 * step("float32")
DEFAULTS = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0,
}  # fmt: skip


def make_batch(rows: int, device: str, *, seed: int = 1, **given: Any) -> SamplingBatch:
    """A batch from numbers (for every row) or lists (one a row); the flags follow from them."""
    tensors = {}
    for name, default in DEFAULTS.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        tensors[name] = torch.as_tensor(given.pop(name, default), dtype=dtype).expand(rows).contiguous().to(device)
    draws = tensors["temperature"] > 0
    filters = draws & ((tensors["top_k"] > 0) | (tensors["top_p"] < 1))
    seeds = (torch.arange(rows) * 7919 + seed).to(device)
    positions = (torch.arange(rows) * (2**32 + 3)).to(device)
    flags = {"draws": bool(draws.any()), "filters": bool(filters.any())}
    numbers: dict[str, Any] = {**tensors, **flags, **given}
    return SamplingBatch(seed=seeds, position=positions, **numbers)


def random_logits(rows: int, vocab: int, device: str, spread: float = 2.0, seed: int = 0) -> Tensor:
    """Rows of a wider matrix whose other columns hold NaN, which no output may show."""
    padded = torch.full((rows, vocab + 16), math.nan)
    padded[:, :vocab] = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return padded.to(device)[:, :vocab]


def mask_of(allowed: list[list[int]], vocab: int, device: str) -> Tensor:
    words = torch.zeros(len(allowed), -(-vocab // 32), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << token % 32
    return words.to(torch.int32).to(device)  # bit 31 wraps to the sign


def bias_of(pairs: list[dict[int, float]], capacity: int, device: str) -> Bias:
    tokens = torch.full((len(pairs), capacity), -1, dtype=torch.int32)
    values = torch.zeros(len(pairs), capacity)
    for row, items in enumerate(pairs):
        for place, (token, value) in enumerate(items.items()):
            tokens[row, place], values[row, place] = token, value
    return Bias(tokens.to(device), values.to(device))


def penalised(x: Tensor, device: str) -> SamplingBatch:
    """Five rows: repeats in the output, tokens of the prompt alone, of both; one row has no penalties."""
    vocab = x.shape[1]
    counts = torch.zeros(8, vocab, dtype=torch.int32)
    for slot in range(8):
        top = x[slot % 5].cpu().topk(6).indices
        counts[slot, top[:2]] = 3
        counts[slot, top[2]] = PROMPT_BIT
        counts[slot, top[3]] = PROMPT_BIT + 1
    return make_batch(
        5,
        device,
        temperature=[0.0, 0.0, 1.0, 1.0, 0.0],
        top_p=[1.0, 1.0, 0.9, 1.0, 1.0],
        repetition=[1.3, 1.0, 0.5, 2.0, 1.0],
        presence=[0.0, 1.5, -2.0, 0.5, 0.0],
        frequency=[0.0, 0.7, 0.1, -2.0, 0.0],
        history=History(torch.tensor([5, 1, 2, 3, 4], dtype=torch.int32).to(device), counts.to(device)),
        bias=bias_of([{int(x[0].argmax()): -3.0}, {}, {}, {7: 2.0}, {}], 16, device),
        allowed=mask_of([list(range(0, vocab, 2))] * 2 + [list(range(vocab))] * 3, vocab, device),
    )


def distance(row: int, token: int, adjusted: Tensor, batch: SamplingBatch) -> float:
    """How far u lies from the part of the line that is ``token``'s, at its own top-p or within the tolerance of it."""
    temperature, top_k = float(batch.temperature[row]), int(batch.top_k[row])
    top_p, min_p = float(batch.top_p[row]), float(batch.min_p[row])
    u = reference.philox(int(batch.seed[row]), int(batch.position[row])) / 2.0**64
    nearest = math.inf
    for p in {top_p, min(top_p * (1 + TOLERANCE), 1.0), top_p * (1 - TOLERANCE)}:
        kept = reference.keep(adjusted, temperature, top_k, p, min_p)
        if not 0 <= token < len(kept) or not kept[token]:
            continue
        ends = reference.cdf(adjusted, kept, temperature)
        begin, end = float(ends[token - 1]) if token else 0.0, float(ends[token])
        nearest = min(nearest, max(begin - u, u - end, 0.0))
    return nearest


def counted_apart(batch: SamplingBatch) -> SamplingBatch:
    """The same batch with its own copy of the history."""
    if batch.history is None:
        return batch
    return replace(batch, history=replace(batch.history, counts=batch.history.counts.clone()))


def hold_sampled(got: Sampled, logits: Tensor, before: SamplingBatch, after: SamplingBatch) -> Iterator[Compared]:
    """Every row against the reference. ``after`` is ``before`` with the tokens counted."""
    adjusted, want = reference.adjust(logits, before), reference.sample(logits, counted_apart(before))
    yield same("status", got.status, want.status)
    fine = want.status == SampleStatus.OK
    greedy = ~fine | (before.temperature.to(fine.device) == 0)
    yield same("tokens that are not drawn", got.tokens[greedy], torch.where(fine, want.tokens, 0)[greedy])
    drawn = [row for row in range(len(fine)) if not greedy[row]]
    farthest = max((distance(row, int(got.tokens[row]), adjusted[row], before) for row in drawn), default=0.0)
    yield Compared("draws", Errors(farthest, farthest), Errors(TOLERANCE, TOLERANCE))
    yield from _hold_logprobs(got, logits, fine)
    if before.history is not None and after.history is not None:
        counts = before.history.counts.clone()
        for row, token in enumerate(got.tokens.tolist()):  # one more for each token that was taken, whichever it is
            counts[before.history.slots[row], token] += int(fine[row])
        yield same("counts of tokens", after.history.counts, counts)


def _hold_logprobs(got: Sampled, logits: Tensor, fine: Tensor) -> Iterator[Compared]:
    exact = torch.log_softmax(logits.double(), -1)
    place = got.tokens.long().clamp(0, logits.shape[1] - 1)[:, None]
    mine, truth = got.logprobs[fine].double(), exact.gather(1, place)[:, 0][fine]
    # Relative to their own size, and near 0 to that of the numbers that they come from.
    off = (mine - truth).abs() / (truth.abs() + 32)
    found = Errors(float(off.max()), float(off.square().mean().sqrt())) if off.numel() else Errors(0.0, 0.0)
    yield Compared("log-probabilities", found, Errors(LOGPROB_TOLERANCE, LOGPROB_TOLERANCE))
    if got.top is not None:
        want = reference.find_top(logits[fine], exact[fine], got.top.tokens.shape[1])
        yield same("likeliest tokens", got.top.tokens[fine], want.tokens)
        room = Errors(32 * LOGPROB_TOLERANCE, 32 * LOGPROB_TOLERANCE)
        yield compare("their log-probabilities", got.top.logprobs[fine], want.logprobs, room)


@dataclass(frozen=True)
class SamplingInput:
    """Rows of logits and how each is sampled."""

    name: str
    rows: int
    vocab: int
    params: dict[str, Any] = field(default_factory=dict)
    spread: float = 2.0
    mean: float = 0.0


SETUPS = [
    SamplingInput("greedy", 3, 1000),
    SamplingInput("one token in the vocabulary", 2, 1, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}),
    SamplingInput("no rows", 0, 100, {"temperature": 1.0}),
    SamplingInput("a block and one", 2, 4097, {"temperature": 1.5}),
    SamplingInput("201088 tokens, greedy", 1, 201088),
    SamplingInput("201088 tokens, top-k and top-p", 1, 201088, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
    SamplingInput("top-p over a flat row", 1, 30000, {"temperature": 1.0, "top_p": 0.95}, spread=0.5),
    SamplingInput("temperature", 4, 5000, {"temperature": [0.3, 1.0, 5.0, 100.0]}),
    SamplingInput("the least temperature", 2, 5000, {"temperature": [1e-38, 1e-5]}),
    SamplingInput("top-k", 5, 5000, {"temperature": 1.0, "top_k": [1, 2, 40, 3000, 4999]}),
    # Five blocks of negative numbers: zeros of the places behind them would be the largest.
    SamplingInput("top-k of negative logits", 2, 20000, {"temperature": 1.0, "top_k": [2, 5]}, mean=-50.0),
    SamplingInput("top-k off", 4, 5000, {"temperature": 1.0, "top_k": [0, -1, 5000, 9999]}),
    SamplingInput("top-k beyond what has weight", 2, 5000, {"temperature": 0.05, "top_k": [40, 4000],
                                                            "top_p": [1.0, 0.9]}),
    SamplingInput("top-p", 5, 5000, {"temperature": 1.0, "top_p": [1e-9, 0.1, 0.5, 0.9, 0.9999]}),
    # Of few tokens: one more or one less moves all the others, and each draw has an even chance to show it.
    SamplingInput("top-p of few tokens", 32, 48, {"temperature": 1.0, "top_p": [0.03 * (1 + n) for n in range(32)]},
                  spread=0.3),
    SamplingInput("top-k of few tokens", 16, 20, {"temperature": 1.0, "top_k": list(range(1, 17))}, spread=0.3),
    SamplingInput("all three of few tokens", 16, 48, {"temperature": 1.0, "top_k": [8 + n for n in range(16)],
                                                      "top_p": 0.7, "min_p": 0.2}),
    SamplingInput("min-p", 3, 5000, {"temperature": 1.0, "min_p": [1e-4, 0.1, 1.0]}),
    SamplingInput("all three", 3, 5000, {"temperature": 1.2, "top_k": [7, 100, 1000], "top_p": [0.9, 0.5, 0.99],
                                 "min_p": 0.02}),
    SamplingInput("greedy next to drawn", 4, 5000, {"temperature": [0, 1, 0, 1], "top_k": [0, 5, 7, 0],
                                           "top_p": [0.1, 1, 1, 1]}),
]  # fmt: skip
LARGE = [SamplingInput("top-p over a flat row of 201088", 1, 201088, {"temperature": 1.0, "top_p": 0.95}, spread=0.5)]

Make = Callable[[str], tuple[Tensor, SamplingBatch]]
"""Logits and batch on a device."""


@dataclass(frozen=True)
class SamplingCase(KernelCase):
    title: str
    spec: SamplingSpec
    make: Make
    given_blocks: bool = False
    """Whether the lm_head's blocks come with the logits."""

    op: ClassVar[str] = "sampling"

    def variant(self, gpu: Gpu) -> str:
        return f"triton_sampling, {self.title}"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return registry.sampling("triton_sampling").supports(self.spec, gpu)

    def start(self, gpu: Gpu, device: str) -> Finish:
        logits, batch = self.make(device)
        before = counted_apart(batch)
        blocks = blocks_of(logits, 24) if self.given_blocks else None
        just_written(logits, None if blocks is None else blocks.values)
        got = run_sampling(registry.sampling("triton_sampling"), gpu, logits, batch, blocks)

        return lambda: hold_sampled(got, logits, before, batch)


@dataclass(frozen=True)
class ScoreCase(SamplingCase):
    """Tokens are given, and their log-probabilities are asked for."""

    def start(self, gpu: Gpu, device: str) -> Finish:
        logits, batch = self.make(device)
        tokens = (torch.arange(len(logits)) * 4096 % logits.shape[1]).int().to(device)
        just_written(logits)
        got = run_score(registry.sampling("triton_sampling"), gpu, logits, tokens, batch.top_logprobs)

        def finish() -> Iterator[Compared]:
            want = reference.score(logits, tokens, batch.top_logprobs)
            yield same("status", got.status, want.status)
            yield from _hold_logprobs(got, logits, want.status == SampleStatus.OK)

        return finish


def blocks_of(x: Tensor, rows: int) -> Logits:
    """The summary that an lm_head's epilogue gives of blocks of ``rows`` rows."""
    tokens, vocab = x.shape
    padded = torch.nn.functional.pad(x, (0, -vocab % rows), value=-math.inf).view(tokens, -1, rows)
    top = padded.amax(-1)
    argmax = padded.nan_to_num(math.inf).argmax(-1) + torch.arange(top.shape[1], device=x.device) * rows
    return Logits(x, top, argmax.int(), (padded - top[..., None]).exp().sum(-1), rows)


def _of(setup: SamplingInput) -> Make:
    def make(device: str) -> tuple[Tensor, SamplingBatch]:
        logits = random_logits(setup.rows, setup.vocab, device, setup.spread).add_(setup.mean)
        return logits, make_batch(setup.rows, device, **setup.params)

    return make


FAR = 2**30
"""Numbers from row to row: the third begins where an offset needs 64 bits."""


def _far(device: str) -> tuple[Tensor, SamplingBatch]:
    """Rows so far apart that offsets need 64 bits. A CPU has only what lies in them in memory."""
    rows, vocab = 3, 5000
    wide = torch.empty(2 * FAR + vocab, device=device)
    logits = wide.as_strided((rows, vocab), (FAR, 1)).copy_(random_logits(rows, vocab, device))
    return logits, make_batch(rows, device, temperature=[0.0, 1.0, 1.0], top_k=[0, 5, 40], top_p=0.9)


def _far_top(device: str) -> tuple[Tensor, SamplingBatch]:
    return _far(device)[0], make_batch(3, device, temperature=[0.0, 0.7, 1.0], top_logprobs=5)


def _broken(device: str) -> tuple[Tensor, SamplingBatch]:
    """NaN, both infinities, and rows of which few tokens are left."""
    x = random_logits(7, 5000, device).clone()
    x[1, 4999], x[2, 17] = math.nan, math.inf
    x[3] = x[4, 1:] = x[5, 100:] = -math.inf
    return x, make_batch(7, device, temperature=[1.0] * 6 + [0.0], top_p=[0.9] * 6 + [1.0])


def _masked(device: str) -> tuple[Tensor, SamplingBatch]:
    """One token, none, two of which one is the last of the vocabulary, all."""
    vocab = 4111
    allowed = mask_of([[4095], [], [31, vocab - 1], list(range(vocab))], vocab, device)
    return random_logits(4, vocab, device), make_batch(4, device, temperature=1.0, top_k=[0, 3, 5, 2], allowed=allowed)


def _penalised(device: str) -> tuple[Tensor, SamplingBatch]:
    x = random_logits(5, 5003, device)
    return x, penalised(x, device)


def _top(device: str) -> tuple[Tensor, SamplingBatch]:
    x = random_logits(3, 20000, device)
    return torch.where(x > 5, 5.0, x), make_batch(3, device, temperature=1.0, top_logprobs=20)  # many equal largest


def _top_of_low(device: str) -> tuple[Tensor, SamplingBatch]:
    """Rows that differ in size, all far below the zeros of places that are not there. Few blocks have a likeliest."""
    x = random_logits(3, 20000, device) - torch.tensor([100.0, 200.0, 150.0], device=device)[:, None]
    return x, make_batch(3, device, top_logprobs=2)


def _on_levels(device: str) -> tuple[Tensor, SamplingBatch]:
    """25 temperatures are 32, so that the search's first threshold is 2 below the maximum, where 20 tokens are."""
    x = torch.tensor([0.0] + [-2.0] * 20 + [-3.0] * 27)
    order = torch.rand(2, 48, generator=torch.Generator().manual_seed(0)).argsort(1)
    return x[order].to(device), make_batch(2, device, temperature=1.28, top_k=[26, 30])


def _longer_list(device: str) -> tuple[Tensor, SamplingBatch]:
    """One token more than a part of the list holds, and it is the largest. With a third token, u of 0.43 draws that."""
    x = torch.ones(1, 4097)
    x[:, 4096] += 2.0**-23
    return x.to(device), make_batch(1, device, seed=2, temperature=1.0, top_k=2)


def _at_borders(device: str) -> tuple[Tensor, SamplingBatch]:
    """What is drawn is exactly the weight of the first block, so that the second block's first token is next. The
    weights are powers of two that add up to 2**38."""
    batch = make_batch(4, device, temperature=1 / math.log(2))
    x = torch.full((4, 4160), -math.inf)
    for row in range(4):
        first = reference.philox(int(batch.seed[row]), int(batch.position[row])) >> 26
        for begin, weight in ((0, first), (4096, 2**38 - first)):
            falls = [0.0] * (weight >> 36) + [bit - 36.0 for bit in range(35, -1, -1) if weight >> bit & 1]
            x[row, begin : begin + len(falls)] = torch.tensor(falls)
    return x.to(device), batch


def cases() -> Iterator[KernelCase]:
    for setup in (*SETUPS, *LARGE):
        title = "greedy" if not setup.params else "filtered" if {"top_k", "top_p"} & set(setup.params) else "drawn"
        spec = SamplingSpec(setup.vocab, setup.rows)
        yield SamplingCase(setup.name, title, spec, _of(setup), large=setup in LARGE)
    greedy = SETUPS[0]
    yield SamplingCase("blocks", "greedy from the lm_head's blocks", SamplingSpec(1000, 3), _of(greedy), True)
    yield SamplingCase("broken rows", "filtered", SamplingSpec(5000, 7), _broken)
    yield SamplingCase("rows 2**30 apart", "filtered", SamplingSpec(5000, 3), _far)
    yield SamplingCase("rows 2**30 apart, likeliest", "top log-probabilities", SamplingSpec(5000, 3), _far_top)
    yield SamplingCase("masks", "masks", SamplingSpec(4111, 4), _masked)
    yield SamplingCase("penalties, biases and masks", "penalties", SamplingSpec(5003, 5), _penalised)
    yield SamplingCase("logits on the thresholds", "filtered", SamplingSpec(48, 2), _on_levels)
    yield SamplingCase("a list longer than its parts", "filtered", SamplingSpec(4097, 1), _longer_list)
    yield SamplingCase("draws at the border of two blocks", "drawn", SamplingSpec(4160, 4), _at_borders)
    yield SamplingCase("2 likeliest of low logits", "top log-probabilities", SamplingSpec(20000, 3), _top_of_low)
    yield SamplingCase("20 likeliest of many equals", "top log-probabilities", SamplingSpec(20000, 3), _top)
    yield ScoreCase("given tokens", "given tokens", SamplingSpec(20000, 3), _top)
