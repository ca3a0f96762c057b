"""Tests that need a real GPU: ``make gpu-test``. Elsewhere they are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
