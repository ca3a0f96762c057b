"""``microscale bench kernels sampling``: from logits to tokens, for the vocabularies of gpt-oss and Gemma.

Tokens and log-probabilities of every row are held against the reference before it is timed. The logits were just
written, as an lm_head writes them, so that at small batches they are in L2; the floor counts one reading from memory
all the same. ``other_us`` is what one writes in plain torch. Times are of CUDA-graph replays, several calls in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.dense.spec import Logits
from microscale.kernels.sampling import reference
from microscale.kernels.sampling.blocked import TritonSampling
from microscale.kernels.sampling.cost import history_bytes, logit_bytes
from microscale.kernels.sampling.spec import PROMPT_BIT, Bias, History, Sampled, SamplingBatch, SamplingSpec
from microscale_lab.calls import run_sampling
from microscale_lab.kernel_bench.rows import KernelRow, check, row
from microscale_lab.kernel_bench.timing import Ceilings, graph_us, measure_ceilings, present_gpu

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARIES = (201088, 262144)
TOKENS = (1, 8, 64)
CALLS = 8
LM_HEAD_BLOCK = 128
# float32: a sum over the vocabulary, a logarithm, and a difference of numbers up to 32.
LOGPROB_TOLERANCE = 1e-5


@dataclass(frozen=True)
class SamplingWork:
    """How all rows of a batch are sampled."""

    name: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    spread: float = 3.0
    """Standard deviation of the logits: 3 gives a few likely tokens, 1 a flat row."""
    penalties: bool = False
    blocks: bool = False
    """The lm_head's blocks are there."""
    top_logprobs: int = 0


CASES = (
    SamplingWork("greedy, lm_head's blocks", blocks=True),
    SamplingWork("greedy"),
    SamplingWork("greedy, 20 logprobs", top_logprobs=20),
    SamplingWork("temperature", temperature=1.0),
    SamplingWork("top-k 40", temperature=1.0, top_k=40),
    SamplingWork("top-p 0.9", temperature=1.0, top_p=0.9),
    SamplingWork("top-p 0.9, flat", temperature=1.0, top_p=0.9, spread=1.0),
    SamplingWork("top-k 64, top-p 0.95", temperature=1.0, top_k=64, top_p=0.95),
    SamplingWork("all penalties", temperature=1.0, penalties=True),
)


@dataclass
class _Work:
    """One case on the device."""

    case: SamplingWork
    spec: SamplingSpec
    logits: Tensor
    batch: SamplingBatch
    blocks: Logits | None
    uniform: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.uniform = torch.empty_like(self.logits)

    def plain_torch(self) -> Tensor:
        """The usual way: softmax, a sort where something is cut, and a race of exponential numbers."""
        case, x = self.case, self.logits
        logprobs = torch.log_softmax(x, dim=-1)
        if case.penalties:
            x = reference.adjust(x, replace(self.batch, bias=None))
        if case.temperature == 0.0:
            token = x.argmax(-1, keepdim=True)
            if case.top_logprobs:
                logprobs.topk(case.top_logprobs)
            return logprobs.gather(1, token)
        x = x / case.temperature
        if case.top_p < 1:
            values, ids = x.sort(dim=-1, descending=True)
            if case.top_k:
                values[:, case.top_k :] = -torch.inf
            probabilities = values.softmax(-1)
            values = values.masked_fill(probabilities.cumsum(-1) - probabilities >= case.top_p, -torch.inf)
            x = torch.empty_like(x).scatter_(1, ids, values)
        elif case.top_k:
            x = x.masked_fill(x < x.topk(case.top_k).values[:, -1:], -torch.inf)
        token = (x.softmax(-1) / self.uniform.exponential_()).argmax(-1, keepdim=True)
        return logprobs.gather(1, token)


def _blocks(logits: Tensor) -> Logits:
    """What the logits epilogue gives."""
    rows, vocab = logits.shape
    parts = torch.nn.functional.pad(logits, (0, -vocab % LM_HEAD_BLOCK), value=-torch.inf).view(rows, -1, LM_HEAD_BLOCK)
    top, place = parts.max(-1)
    argmax = place + torch.arange(parts.shape[1], device=logits.device) * LM_HEAD_BLOCK
    return Logits(logits, top, argmax.int(), (parts - top[..., None]).exp().sum(-1), LM_HEAD_BLOCK)


def _work(case: SamplingWork, tokens: int, vocab: int, generator: torch.Generator) -> _Work:
    logits = torch.randn(tokens, vocab, device="cuda", generator=generator) * case.spread

    def same(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((tokens,), value, dtype=dtype, device="cuda")

    history, bias = None, None
    if case.penalties:
        seen = torch.rand(tokens, vocab, device="cuda", generator=generator)
        counts = (seen < 0.002).int() + (seen < 0.001).int() * PROMPT_BIT
        history = History(torch.arange(tokens, dtype=torch.int32, device="cuda"), counts)
        ids = torch.arange(16, dtype=torch.int32, device="cuda").repeat(tokens, 1)
        bias = Bias(ids, torch.ones(tokens, 16, device="cuda"))
    some = 1.0 if case.penalties else 0.0
    batch = SamplingBatch(
        same(case.temperature), same(case.top_k, torch.int32), same(case.top_p), same(0.0),
        same(1.0 + 0.1 * some), same(0.2 * some), same(0.1 * some),
        seed=torch.arange(tokens, device="cuda"), position=same(17, torch.int64),
        draws=case.temperature > 0, filters=case.top_k > 0 or case.top_p < 1,
        history=history, bias=bias, top_logprobs=case.top_logprobs,
    )  # fmt: skip
    spec = SamplingSpec(vocab, tokens)
    return _Work(case, spec, logits, batch, _blocks(logits) if case.blocks else None)


def _logprob_error(work: _Work, got: Sampled) -> float:
    """RMS error of the log-probabilities over their RMS; infinite where a token is not the reference's."""
    history = work.batch.history
    fresh = None if history is None else History(history.slots, history.counts.clone())
    want = reference.sample(work.logits, replace(work.batch, history=fresh))
    if not torch.equal(got.tokens, want.tokens) or bool(got.status.any()):
        return float("inf")
    return float((got.logprobs - want.logprobs).norm() / want.logprobs.norm())


def run(
    vocabularies: Sequence[int] = VOCABULARIES, tokens: Sequence[int] = TOKENS, cases: Sequence[SamplingWork] = CASES
) -> Iterator[KernelRow]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in."""
    gpu = present_gpu()
    ceilings = measure_ceilings()
    generator = torch.Generator("cuda").manual_seed(0)
    for vocab in vocabularies:
        for count in tokens:
            for case in cases:
                yield _measure(_work(case, count, vocab, generator), gpu, ceilings)


def _measure(work: _Work, gpu: Gpu, ceilings: Ceilings) -> KernelRow:
    op, spec = TritonSampling(), work.spec
    name = f"{work.case.name}, vocab {spec.vocab}, batch {spec.tokens}"
    history = work.batch.history
    kept = None if history is None else history.counts.clone()
    got = run_sampling(op, gpu, work.logits, work.batch, work.blocks)
    if history is not None and kept is not None:
        history.counts.copy_(kept)
    error = _logprob_error(work, got)
    check(op.name, name, gpu.name, error, LOGPROB_TOLERANCE)

    def times(call: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(CALLS):
                call()

        return graph_us(several) / CALLS

    us = times(lambda: run_sampling(op, gpu, work.logits, work.batch, work.blocks))
    num_bytes = logit_bytes(spec) + (history_bytes(spec) if work.case.penalties else 0)
    if work.blocks is not None:
        num_bytes = 3 * work.blocks.block_max.numel() * 4
    return row("sampling", name, op.name, us, num_bytes, 0, ceilings, error, times(work.plain_torch))
