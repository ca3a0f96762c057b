"""``bench sweep`` on a GPU: a few rows, and a second call."""

from __future__ import annotations

import time

from microscale_lab.predict import sweep


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
