"""``bench sweep`` on a GPU: a few rows, a second call, and a part of the SMs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from microscale_lab.predict import sweep

FEWER = """
from microscale_lab.kernel_bench.dense import streamed_gbs
from microscale_lab.predict.fewer_sms import fewer_sms, seen_sms
from microscale_lab.kernel_bench.timing import measure_read
from microscale.errors import Unsupported
try:
    with fewer_sms(48) as seen:
        print("seen", seen, seen_sms(), measure_read(), streamed_gbs())
except Unsupported as error:
    print("refused", error)
"""


def test_rows_come_and_are_not_measured_again() -> None:
    found = []
    for row in sweep.run("gpt-oss-20b", ("exact",), (), time.monotonic() + 120):
        found.append(row)
        if len(found) == 3:
            break
    assert len({row.case for row in found}) == 3
    assert all(row.us > 0 for row in found)
    left = next(sweep.run("gpt-oss-20b", ("exact",), found, time.monotonic() + 120))
    assert left.case not in {row.case for row in found}


def test_a_part_of_the_sms_or_one_sentence_why_not() -> None:
    """In a process of its own: the context must come before any stream."""
    out = subprocess.run([sys.executable, "-c", FEWER], capture_output=True, text=True, timeout=300, check=True).stdout
    word, *numbers = out.split()
    if word == "refused":
        pytest.skip(out.strip())
    assert int(numbers[0]) == int(numbers[1]) <= 56 < torch.cuda.get_device_properties(0).multi_processor_count
    assert 0.5 < float(numbers[3]) / float(numbers[2]) < 1.05, "an lm_head against a plain read"
