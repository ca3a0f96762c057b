"""Draft heads without a plan: each kernel is chosen when it is bound."""

from __future__ import annotations

from microscale.models.config import OWN_FORMATS, HeadFormats
from microscale.planning.ops import Ops


def ops_for_head(target: Ops, formats: HeadFormats = OWN_FORMATS) -> Ops:
    """On the target's device, with its activations and KV format. A head keeps the formats of its checkpoint, except
    for those in ``formats``."""
    precision = target.precision.of_draft_head(formats.quantization, formats.lm_head)
    return Ops(target.gpu, target.activations, target.preference, precision, threads=target.threads, ranks=target.ranks)
