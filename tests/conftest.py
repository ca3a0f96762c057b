"""What every test shares."""

from __future__ import annotations

import pytest
import torch

# Tests run in one process per core; torch's own threads would only fight each other for them.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="Write tests/golden anew instead of comparing.")
