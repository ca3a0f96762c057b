"""What the real engine's load raises."""

from __future__ import annotations

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.process import service
from microscale.errors import Unsupported


def test_a_gpu_whose_memory_is_taken_during_the_load_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(config: EngineConfig) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(service, "prepare", prepare)
    with pytest.raises(Unsupported, match=r"ran out of memory while demo was loaded \(CUDA out of memory\); another"):
        service.load(EngineConfig("demo"), lambda done, total: None)
