"""``/plan``: what the engine said of itself when it was loaded."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from microscale.server.host import Host
from microscale.server.replies import PlanReply


class _Document(Struct, frozen=True):
    """What ``engine/loading/description.py`` writes."""

    table: str
    gpu: str
    precision: str
    decisions: Raw
    memory: Raw


def plan_reply(host: Host) -> PlanReply:
    ready = host.engine.ready
    common = (host.names[0], ready.vocab_size, ready.max_model_len)
    try:
        told = msgspec.json.decode(ready.plan, type=_Document)
    except msgspec.DecodeError:
        # Another engine's: its text is all there is.
        return PlanReply(*common, ready.plan)
    return PlanReply(*common, told.table, told.gpu, told.precision, told.decisions, told.memory)
