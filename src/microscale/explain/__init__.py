"""``microscale explain``: whether a model fits a GPU, how fast it will be, and which kernels run it and why.

It needs a preset or a config.json, and a known card or this machine's; no weights and no GPU.
"""

from microscale.explain.answer import answer_lines
from microscale.explain.compare import compare_lines
from microscale.explain.report import Question, Report, explain
from microscale.explain.speculative_text import draft_lines
from microscale.explain.text import render

__all__ = ["Question", "Report", "answer_lines", "compare_lines", "draft_lines", "explain", "render"]
