"""The real engine over a model that writes what chance gives, for ``--factory support.chance_service:load``.

Its next token is random, with a liking for what ends things, so that a grammar decides the form and chance the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.graphs import GraphCounts
from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.process.service import Service
from microscale.engine.protocol.messages import Ready
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.models.config import LayerKind
from support.sampling import sampling_on_cpu
from support.tiny_tokenizers import tiny

VOCAB = 600
ENDS = {b"<|end|>": 7.0, b"<|return|>": 7.0, b"<|call|>": 7.0, b'"': 5.0, b"}": 5.0, b"]": 5.0}
PAGES = 2048
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


class Chance:
    """A runner whose logits depend on the tokens before and on nothing else."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._likes = torch.zeros(VOCAB)
        for token, text in enumerate(vocabulary.tokens):
            self._likes[token] = ENDS.get(text, 0.0)

    def prepare(self, *, stand_ins: bool) -> None: ...

    def idle(self) -> bool:
        return False

    def graphs(self) -> GraphCounts:
        return GraphCounts(0, 0, 0)

    def forward(self, schedule: Sequence[Work], tokens: torch.Tensor | None = None) -> Logits:
        newest: list[list[int]] = [[] for _ in schedule] if tokens is None else tokens[:, None].tolist()
        seen = [work.request.tokens + new for work, new in zip(schedule, newest, strict=True)]
        rows = [
            self._row([*seen[at], *work.drafts[:place]])
            for at, work in enumerate(schedule)
            for place in range(work.num_logits)
        ]
        return summarise(torch.stack(rows) if rows else torch.empty(0, VOCAB))

    def _row(self, tokens: Sequence[int]) -> torch.Tensor:
        chance = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**63)
        return torch.randn(VOCAB, generator=chance) + self._likes


def engine(
    vocabulary: Vocabulary,
    limits: Limits,
    pages: Mapping[LayerKind, int],
    speculation: Speculation | None = None,
) -> Engine:
    torch.set_num_threads(1)
    pools = {kind: PagePool(count) for kind, count in pages.items()}
    sampler = Sampler(sampling_on_cpu(VOCAB), VOCAB, torch.device("cpu"), grammars=Grammars(vocabulary, VOCAB))
    return Engine(Chance(vocabulary), Scheduler(pools, limits), sampler, VOCAB, speculation=speculation)


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Service:
    limits = Limits(page_size=16, window=64, max_model_len=config.max_model_len or 4096)
    made = engine(
        Vocabulary(config.vocabulary, config.control_tokens, config.split_pattern),
        limits,
        dict.fromkeys(LayerKind, PAGES),
    )
    on_progress(1, 1)
    return Service(made, Ready(VOCAB, limits.max_model_len, (), "chance"))


def harmony_vocabulary() -> Vocabulary:
    return Vocabulary(tiny().vocabulary(), sorted(tiny().control.values()), tiny().split_pattern)
