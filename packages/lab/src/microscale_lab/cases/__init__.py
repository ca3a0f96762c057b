"""Case tables of every op: what is run, what the float32 reference says, and how far apart they may be.

``prove --run`` executes them for cards that are not here, on a GPU or on a CPU that interprets PTX; the kernel tests
import the same tables. ``case`` says what a case is, ``errors`` has the norms and the formats' steps; each op has a
module with the inputs, the table and the bounds. Which path runs a case on a card is asked of the oracle.
"""

from microscale_lab.cases.case import Compared, KernelCase
from microscale_lab.cases.tables import all_cases

__all__ = ["Compared", "KernelCase", "all_cases"]
