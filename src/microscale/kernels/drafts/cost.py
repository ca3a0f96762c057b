"""Bytes that must be moved between two steps with drafts. They are few: what it costs is its launches."""

from __future__ import annotations

NUMBER, DRAWN, PAGE = 8, 4, 4


def follow(sequences: int, last_rows: int, rows: int) -> int:
    """Drawn tokens and the drafts they are held against, where sequences begin and how long drafts are, the next
    drafts; own tokens, counts, next drafts and what rows move by."""
    read = last_rows * DRAWN + (last_rows - sequences) * NUMBER + 4 * sequences * NUMBER + (rows - sequences) * NUMBER
    return read + (2 * sequences + rows - sequences + rows) * NUMBER


def move_on(sequences: int, rows: int, kinds: int) -> int:
    """Of a step: positions and lengths read and written, tokens written, a page read and a slot written of each kind;
    counts and where sequences begin."""
    of_rows = rows * (3 * NUMBER + NUMBER + kinds * (PAGE + NUMBER))
    return of_rows + sequences * (3 * NUMBER + 2 * DRAWN)
