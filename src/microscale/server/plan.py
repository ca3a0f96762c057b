"""``/plan``: what the engine said of itself when it was loaded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from microscale.server.host import Host


class PlanReply(Struct, frozen=True):
    model: str
    vocab_size: int
    max_model_len: int
    plan: str
    """Which kernel runs what, as a table."""
    start_s: Mapping[str, float]
    """Seconds of the engine's start: its process, what it loaded, the rest."""
    gpu: str | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    decisions: Raw | UnsetType = UNSET
    """By op, layer kind and batch size: the kernel, and why each other one does not run."""
    memory: Raw | UnsetType = UNSET
    """Bytes by what they hold."""
    predicted: Raw | UnsetType = UNSET
    """Tokens per second of several batches and prompts, with the range that holds them nine times in ten."""
    speculative: Raw | UnsetType = UNSET
    """Who drafts, what a step with drafts is predicted to cost, and the drafter's kernels where it has some."""


class _Document(Struct, frozen=True):
    """What ``engine/loading/description.py`` writes."""

    table: str
    gpu: str
    precision: str
    decisions: Raw
    memory: Raw
    predicted: Raw = Raw(b"[]")
    speculative: Raw | UnsetType = UNSET


def plan_reply(host: Host) -> PlanReply:
    ready = host.engine.ready
    common = (host.names[0], ready.vocab_size, ready.max_model_len)
    try:
        told = msgspec.json.decode(ready.plan, type=_Document)
    except msgspec.DecodeError:
        # Another engine's: its text is all there is.
        return PlanReply(*common, ready.plan, host.start_s)
    return PlanReply(
        *common, told.table, host.start_s, told.gpu, told.precision, told.decisions, told.memory, told.predicted,
        told.speculative,
    )  # fmt: skip
