"""What every test shares."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine is no fault of the code: nothing here is judged by how long it took.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in one process per core; torch's own threads would only fight each other for them.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="Write tests/golden anew instead of comparing.")


@pytest.fixture(autouse=True)
def triton_is_left_as_it_was() -> Iterator[None]:
    """Settings of Triton are the process's. Who leaves them changed breaks whatever runs next in the same process."""
    knobs = sys.modules.get("triton.knobs")
    groups = [] if knobs is None else [knobs.cache, knobs.compilation, knobs.runtime]
    before = [dict(vars(group)) for group in groups]
    yield
    assert [dict(vars(group)) for group in groups] == before
