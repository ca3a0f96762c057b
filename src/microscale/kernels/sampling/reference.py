"""``sampling`` as plain torch in float64 on any device: one row after the other, with a whole sort.

The steps and their order are the contract in ``spec``; the kernels in ``blocked`` follow it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.dense.spec import Logits
from microscale.kernels.op import Cost, Reason, always
from microscale.kernels.sampling.cost import logit_bytes
from microscale.kernels.sampling.spec import (
    PROMPT_BIT,
    Sampled,
    SampleStatus,
    SamplingBatch,
    SamplingOp,
    SamplingPath,
    SamplingSpec,
    ScorePath,
    TopLogprobs,
)

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 0xFFFFFFFF
SCORED_ROWS = 16


def philox(seed: int, position: int) -> int:
    """64 random bits: the first two words of Philox4x32-10 with key ``seed`` and counter ``position``."""
    key = [seed & _WORD, seed >> 32 & _WORD]
    counter = [position & _WORD, position >> 32 & _WORD, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & _WORD, a >> 32 ^ counter[3] ^ key[1], a & _WORD]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return counter[0] << 32 | counter[1]


def adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Bias, penalties and mask (steps 1 to 4 of the contract) in float32."""
    x = logits.float().clone()
    rows, vocab = x.shape
    if batch.bias is not None:
        for row in range(rows):
            real = batch.bias.tokens[row] >= 0
            x[row, batch.bias.tokens[row][real].long()] += batch.bias.values[row][real]
    if batch.history is not None:
        entries = batch.history.counts[batch.history.slots.long()]
        output = entries & (PROMPT_BIT - 1)
        factor = torch.where(entries != 0, batch.repetition[:, None], 1.0)
        x = torch.where(x > 0, x / factor, x * factor)
        x = x - batch.frequency[:, None] * output - torch.where(output > 0, batch.presence[:, None], 0.0)
    if batch.allowed is not None:
        token = torch.arange(vocab, device=x.device)
        bit = batch.allowed[:, token // 32] >> (token % 32) & 1
        x = x.masked_fill(bit == 0, -torch.inf)
    return x


def keep(x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row of adjusted logits may be drawn (step 6), as a mask."""
    order = x.sort(descending=True, stable=True).indices  # equal logits stay in id order
    weights = ((x.double() - x.max().double()) / temperature).exp()[order]
    kept = torch.ones_like(weights, dtype=torch.bool)
    if 0 < top_k < x.numel():
        kept[top_k:] = False
    if top_p < 1:
        before = (weights * kept).cumsum(0) - weights * kept
        kept &= before < top_p * (weights * kept).sum()
    kept &= weights >= min_p * weights[0]
    return torch.empty_like(kept).scatter_(0, order, kept)


def cdf(x: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """The cumulated probability of the kept tokens of one row in id order, float64."""
    weights = torch.where(kept, ((x.double() - x.max().double()) / temperature).exp(), 0.0)
    return weights.cumsum(0) / weights.sum()


def find_top(logits: Tensor, logprobs: Tensor, count: int) -> TopLogprobs:
    """The ``count`` largest of each row."""
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return TopLogprobs(order.int(), logprobs.gather(1, order).float())


def find_status(logits: Tensor, adjusted: Tensor) -> Tensor:
    """The ``SampleStatus`` of each row."""
    broken = logits.isnan() | logits.isposinf() | adjusted.isnan() | adjusted.isposinf()
    broken_rows = broken.any(-1) | logits.isneginf().all(-1)
    empty = adjusted.isneginf().all(-1)
    status = torch.where(empty, int(SampleStatus.NOTHING_ALLOWED), int(SampleStatus.OK))
    return torch.where(broken_rows, int(SampleStatus.NON_FINITE), status).int()


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """The whole contract, row by row."""
    adjusted = adjust(logits, batch)
    status = find_status(logits, adjusted)
    chosen = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    for row, x in enumerate(adjusted):
        if status[row] != SampleStatus.OK:
            continue
        temperature = float(batch.temperature[row])
        if temperature == 0:
            chosen[row] = x.argmax()  # the lowest id among equals, as torch documents for one maximum a row
            continue
        kept = keep(x, temperature, int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row]))
        u = philox(int(batch.seed[row]), int(batch.position[row])) / 2.0**64
        cumulated = cdf(x, kept, temperature)
        chosen[row] = min(int((cumulated <= u).sum()), int(kept.nonzero()[-1]))
    if batch.history is not None:
        produced = (status == SampleStatus.OK).int()
        batch.history.counts[batch.history.slots.long(), chosen.long()] += produced
    return _scored(logits, chosen, status, batch.top_logprobs)


def score(logits: Tensor, tokens: Tensor, top_logprobs: int = 0) -> Sampled:
    """Log-probabilities of given tokens."""
    # A few rows at a time: each takes 24 bytes a token of the vocabulary, in float64 and sorted.
    parts = [
        _scored(rows, own.int(), find_status(rows, rows), top_logprobs)
        for rows, own in zip(logits.split(SCORED_ROWS), tokens.split(SCORED_ROWS), strict=True)
    ]
    tops = [part.top for part in parts if part.top is not None]
    top = None
    if tops:
        top = TopLogprobs(torch.cat([part.tokens for part in tops]), torch.cat([part.logprobs for part in tops]))
    own, logprobs, status = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs", "status")
    )
    return Sampled(own, logprobs, status, top)


def _scored(logits: Tensor, tokens: Tensor, status: Tensor, top_logprobs: int) -> Sampled:
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, tokens.long()[:, None])[:, 0].float()
    top = find_top(logits, logprobs, top_logprobs) if top_logprobs else None
    return Sampled(tokens, chosen, status, top)


def _run(spec: SamplingSpec, gpu: Gpu, logits: Tensor, batch: SamplingBatch, blocks: Logits | None) -> Sampled:
    return sample(logits, batch)


def _score(spec: SamplingSpec, gpu: Gpu, logits: Tensor, tokens: Tensor, top_logprobs: int) -> Sampled:
    return score(logits, tokens, top_logprobs)


class ReferenceSampling(SamplingOp):
    """Plain torch; synchronises with the device for every row."""

    name = "reference"
    paths = (SamplingPath("row by row", "it is the only one", always, _run),)
    score_paths = (ScorePath("row by row", "it is the only one", always, _score),)

    def supports(self, spec: SamplingSpec, gpu: Gpu) -> Reason | None:
        return None

    def cost(self, spec: SamplingSpec, gpu: Gpu) -> Cost:
        return Cost(logit_bytes(spec), 0, efficiency=0.001)
