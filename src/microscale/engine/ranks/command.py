"""How the process of a rank is started. Nothing here imports torch."""

from __future__ import annotations

import sys

COMMAND = (sys.executable, "-P", "-m", "microscale.engine.ranks")
"""``-P``: a file of the current directory never stands in for a module."""
END_S = 2.0
"""How long a rank has to end when it is asked to."""
