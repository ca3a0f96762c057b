"""``microscale explain``: which kernels run a model on a GPU and why, what fits, and how fast it will be.

It needs a preset or a config.json, and a known card or this machine's; no weights and no GPU.
"""

from microscale.explain.report import Question, Report, explain
from microscale.explain.text import render

__all__ = ["Question", "Report", "explain", "render"]
