"""Proof for hardware that is not here: every kernel that may be launched is compiled for every architecture.

``inventory`` lists what the models start, ``run`` gathers it, ``compiler`` compiles one kernel in a process that
``pool`` forks, ``cache`` keeps what it found, ``gate`` judges, ``report`` shows. The limits and instructions of the
cards are in ``hardware``, not here.
"""

from microscale.prove.command import run_prove
from microscale.prove.gate import Row
from microscale.prove.inventory import recorded
from microscale.prove.run import prove

__all__ = ["Row", "prove", "recorded", "run_prove"]
