"""Sampling on a CPU for mock models."""

from __future__ import annotations

from microscale import hardware
from microscale.planning.ops import Activations, Ops, Preference, Sampling


def sampling_on_cpu(vocab: int) -> Sampling:
    return Ops(hardware.cpu(), Activations.FLOAT32, Preference()).sampling(vocab)
