"""The paths of ``triton_sampling``: which stages each has, and for which batches it is meant.

A path runs the batches that ask for just its stages. The two that have the same, with the lm_head's blocks and without,
are in the order of their launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from microscale.hardware import Gpu
from microscale.kernels.op import Reason
from microscale.kernels.sampling.spec import SamplingSpec

NO_SCAN = "it reads no logits"


@dataclass(frozen=True)
class Stages:
    """What a path does apart from ``pick``."""

    scan: bool = True
    """Read the logits; else the blocks that the lm_head made with them serve."""
    adjust: bool = False
    """Scan the adjusted copy too."""
    bias: bool = False
    weigh: bool = False
    cut: bool = False
    top: bool = False

    @property
    def name(self) -> str:
        how = "filtered draw" if self.cut else "draw" if self.weigh else "greedy"
        parts = (
            (not self.scan, "lm_head's blocks"),
            (self.adjust, "adjusted"),
            (self.bias, "biased"),
            (self.top, "top log-probabilities"),
        )
        return ", ".join([how, *(text for has, text in parts if has)])

    def supports(self, spec: SamplingSpec, gpu: Gpu) -> Reason | None:
        """``None`` where these are the stages that the batch asks for."""
        features = spec.features
        if not self.scan and not features.blocks:
            return "reads the lm_head's blocks, and none come with these logits"
        if features.draws and not self.weigh:
            return "takes the likeliest token, and some row draws"
        if features.filters and not self.cut:
            return "draws from all tokens, and some row has top-k or top-p"
        if features.adjusts and not self.adjust:
            return "takes the logits as they are, and some row has penalties, a bias or a mask"
        if features.biases and not self.bias:
            return "adds no bias, and some row has one"
        if features.tops and not self.top:
            return "gives no top log-probabilities, and some row asks for them"
        stages = self.weigh, self.cut, self.adjust, self.bias, self.top
        return None if stages == features[: len(stages)] else "does what no row asks for"


def every() -> Iterator[Stages]:
    """Each combination that a batch can ask for; without a scan first."""
    yield Stages(scan=False)
    adjusting = ((False, False), (True, False), (True, True))
    drawing = ((False, False), (True, False), (True, True))
    for (weigh, cut), (adjust, bias), top in product(drawing, adjusting, (False, True)):
        yield Stages(adjust=adjust, bias=bias, weigh=weigh, cut=cut, top=top)
