"""The contract of ``sampling``: one token for each row of logits.

What a row goes through, in this order:

1. bias: ``x + bias`` (``-inf`` bans a token);
2. repetition penalty r, for tokens of the prompt or the output: ``x / r`` where x > 0, else ``x * r``;
3. frequency f and presence p, for tokens of the output: ``x - f * count - p``;
4. mask: what a grammar forbids becomes ``-inf``;
5. temperature T: the weight of a token is ``exp((x - max) / T)``; T = 0 is greedy and ends here;
6. top-k: the k largest; top-p: of those the fewest that hold at least p of their weight, largest first; min-p: of those
   the ones with at least min-p of the largest weight. Equal logits rank by token id, the lower first, everywhere;
7. draw: one uniform number u in [0, 1) and the first token in id order whose cumulated weight exceeds u of the total.

u is Philox4x32-10 with the row's ``seed`` as key and its ``position`` as counter. It depends on no other row, on no row
index and on no batch size, and neither does anything else above: a request gets the same tokens in every batch.

Log-probabilities are those of the raw logits, before 1 to 6 and without temperature: what OpenAI and vLLM report.
``-inf`` is a logit like any other, of a token that cannot be; NaN and ``+inf`` are not, and end their own row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from microscale.hardware import Gpu
from microscale.kernels.dense.spec import Logits
from microscale.kernels.op import Implementation, Path

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_BIT = 1 << 30
"""In an entry of ``History.counts``: the token is in the prompt. The bits below count it in the output."""


class SamplingFeatures(NamedTuple):
    """What some row of a batch asks for. With the vocabulary and the rows this decides which kernels run."""

    draws: bool = False
    """A temperature above 0."""
    filters: bool = False
    """Top-k or top-p, by a row that draws."""
    adjusts: bool = False
    """Penalties, a bias or a mask: the logits change first."""
    biases: bool = False
    tops: bool = False
    """The likeliest tokens and their log-probabilities."""
    blocks: bool = False
    """The lm_head's own blocks come with the logits."""


GREEDY = SamplingFeatures()


@dataclass(frozen=True)
class SamplingSpec:
    """A vocabulary, and the rows of logits that are sampled together."""

    vocab: int
    tokens: int
    features: SamplingFeatures = GREEDY


class SampleStatus(IntEnum):
    """What became of a row. A row that is not ``OK`` has token 0 and no meaning in its log-probability."""

    OK = 0
    NON_FINITE = 1
    """The logits hold NaN or +inf, or nothing but -inf."""
    NOTHING_ALLOWED = 2
    """Bias and mask leave no token."""


@dataclass(frozen=True)
class History:
    """Which tokens a request has seen. ``run`` counts the token that it chooses."""

    slots: Tensor  # int32 [rows]: whose counts a row reads
    counts: Tensor  # int32 [slots, vocab]: how often in the output, and PROMPT_BIT


@dataclass(frozen=True)
class Bias:
    """Pairs of a token and what is added to its logit; no token occurs twice in a row, and -1 is no pair."""

    tokens: Tensor  # int32 [rows, capacity]
    values: Tensor  # float32 [rows, capacity]


@dataclass(frozen=True)
class SamplingBatch:
    """How each row is sampled: numbers on the device, and on the host only what decides which kernels run."""

    temperature: Tensor  # float32 [rows]
    top_k: Tensor  # int32 [rows]; 0 and below, and vocab and above: off
    top_p: Tensor  # float32 [rows]; 1: off
    min_p: Tensor  # float32 [rows]; 0: off
    repetition: Tensor  # float32 [rows]; 1: off
    presence: Tensor  # float32 [rows]; 0: off
    frequency: Tensor  # float32 [rows]; 0: off
    seed: Tensor  # int64 [rows]
    position: Tensor  # int64 [rows]: the token's place among those of its request that were drawn
    draws: bool
    """Some row has a temperature above 0."""
    filters: bool
    """Some row that draws has top-k or top-p."""
    history: History | None = None
    """Without it no row has penalties."""
    bias: Bias | None = None
    allowed: Tensor | None = None  # int32 [rows, ceil(vocab / 32)]: bit t % 32 of word t // 32 admits token t
    top_logprobs: int = 0

    def features(self, blocks: Logits | None) -> SamplingFeatures:
        """What the paths of an implementation differ in."""
        biases = self.bias is not None
        adjusts = biases or self.history is not None or self.allowed is not None
        filters = self.draws and self.filters
        return SamplingFeatures(self.draws, filters, adjusts, biases, self.top_logprobs > 0, blocks is not None)


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens of each row, largest first, lower ids first among equals."""

    tokens: Tensor  # int32 [rows, count]
    logprobs: Tensor  # float32 [rows, count]


@dataclass(frozen=True)
class Sampled:
    """One token a row."""

    tokens: Tensor  # int32 [rows]
    logprobs: Tensor  # float32 [rows]
    status: Tensor  # int32 [rows]: ``SampleStatus``
    top: TopLogprobs | None = None
    together: Tensor | None = None  # int32 [3, rows or more]: the three, where they lie side by side, for one copy


@dataclass(frozen=True)
class SamplingPath(Path[SamplingSpec]):
    """One way from logits to tokens."""

    start: Callable[[SamplingSpec, Gpu, Tensor, SamplingBatch, Logits | None], Sampled]


@dataclass(frozen=True)
class ScorePath(Path[SamplingSpec]):
    """One way to the log-probabilities of given tokens."""

    start: Callable[[SamplingSpec, Gpu, Tensor, Tensor, int], Sampled]


class SamplingOp(Implementation[SamplingSpec]):
    """What every implementation of ``sampling`` has."""

    op = "sampling"
    layout = "none"
    uncapturable = "runs after the model's step, which alone is captured"
    paths: tuple[SamplingPath, ...]
    score_paths: tuple[ScorePath, ...]
    """The ways of ``score``."""

    def run(
        self, spec: SamplingSpec, gpu: Gpu, logits: Tensor, batch: SamplingBatch, blocks: Logits | None,
        path: SamplingPath,
    ) -> Sampled:  # fmt: skip
        """Sample ``logits`` (float32 [rows, vocab]) by ``path``; ``blocks`` are those that the lm_head made with
        them."""
        return path.start(spec, gpu, logits, batch, blocks)

    def score(
        self, spec: SamplingSpec, gpu: Gpu, logits: Tensor, tokens: Tensor, top_logprobs: int, path: ScorePath
    ) -> Sampled:
        """Log-probabilities of given ``tokens`` (int32 [rows]), a prompt's own for instance, and of the likeliest."""
        return path.start(spec, gpu, logits, tokens, top_logprobs)
