"""``microscale explain``: for a model on a GPU, which kernel runs each layer and why, what fits, how fast it will be.

No weights and no GPU are needed: a preset or a config.json, and a card from the table or the one of this machine.
"""

from microscale.explain.report import Question, Report, explain
from microscale.explain.text import render

__all__ = ["Question", "Report", "explain", "render"]
