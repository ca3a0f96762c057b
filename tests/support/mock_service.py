"""The real engine over ``MockRunner``, for ``microscale.engine.process --factory support.mock_service:load``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.limits import LEAST_SEQUENCES, Limits
from microscale.engine.pages import PagePool
from microscale.engine.process.service import Service
from microscale.engine.protocol.messages import Ready
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.models.config import PAGED
from support.mock_runner import MockRunner
from support.sampling import sampling_on_cpu

VOCAB = 97
WINDOW = 6
PAGES = 256


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Service:
    limits = Limits(
        page_size=config.block_size,
        window=WINDOW,
        max_num_seqs=config.max_num_seqs or LEAST_SEQUENCES,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or 512,
        max_queue=config.max_queue,
    )
    torch.set_num_threads(1)
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    sampler = Sampler(sampling_on_cpu(VOCAB), VOCAB, torch.device("cpu"))
    engine = Engine(MockRunner(pools, limits, VOCAB), Scheduler(pools, limits), sampler, VOCAB)
    on_progress(1, 1)
    return Service(engine, Ready(VOCAB, limits.max_model_len, (), "mock"))
