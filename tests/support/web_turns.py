"""What a scripted model says to the web page, and the plan of a card that is not here."""

from __future__ import annotations

from microscale import hardware
from microscale.engine.loading.build import Precisions, describe
from microscale.engine.loading.memory import Workload, memory_for
from microscale.engine.loading.precisions import precision_offers, precisions_line
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import EXACT
from support.live_server import TURNS

START, END = "<|start|>assistant", "<|end|>"
THOUGHT = (
    "The user asks about block scaling. I should explain that a block of **32 numbers** shares one scale, and show the "
    "arithmetic in a few lines of code. A table of the formats will help."
)
ANSWER = """\
A *block-scaled* format gives 32 neighbouring numbers **one shared scale**, a power of two. Each number then needs only
4 or 8 bits of its own.

### The arithmetic

The scale is chosen so that the largest number of the block still fits:

```python
def scale_of(block: list[float]) -> float:
    largest = max(abs(x) for x in block)  # of 32 numbers
    return 2.0 ** (floor(log2(largest)) - 2)
```

| format | bits a number | with its scale | largest |
| :-- | --: | --: | --: |
| MXFP4 | 4 | 4.25 | 6 |
| MXFP8 | 8 | 8.25 | 448 |

Three things follow:

1. An outlier spoils its own block, and no other.
2. Scales are exact: they multiply by shifting.
3. Weights take about a quarter of `bf16`:
   - 20 billion of them fit into 12 GiB,
   - and are read four times as fast.

> Small blocks are why this works: 32 is few enough that one large value is rare.

<script>alert("no")</script> stays text, [so does this](javascript:alert(1)), and [this is a link](https://example.org/mx)."""
TURN = f"<|channel|>analysis<|message|>{THOUGHT}{END}{START}<|channel|>final<|message|>{ANSWER}<|return|>"
ENDLESS = f"<|channel|>analysis<|message|>Count.{END}{START}<|channel|>final<|message|>" + "and on " * 400
AFTER_CALL = "<|channel|>final<|message|>In Paris it is 21 degrees and sunny.<|return|>"
FORMULAS = r"""<|channel|>final<|message|>The roots of \(ax^2+bx+c=0\) are

\[
x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}
\]

and $$\int_{-\infty}^{\infty} e^{-x^2}\,dx = \sqrt{\pi}$$ is in a line of text. It costs $5, or $6 with H<sub>2</sub>O.

\[ \underbrace{a_1+a_2+a_3+\dots+a_n}_{n} = \sum_{i=1}^{n} a_i = \binom{n}{2} + \mathbb{E}[X] + \mathcal{O}(n^2) \]

- [x] This is wrong: \(\frac{a}{\)
- [ ] These set styles: \(\pmb{x} \href{javascript:alert(1)}{b}\)<|return|>"""
EXTRA = {"markdown": TURN, "endless": ENDLESS, "after a call": AFTER_CALL, "formulas": FORMULAS}
PAGES = {LayerKind.FULL: 23_000, LayerKind.SLIDING: 2_000}
SEEDS = {name: len(TURNS) + number for number, name in enumerate(EXTRA)}


def plan_document(model: str = "gpt-oss-20b", card: str = "rtx5090") -> str:
    """What the engine would say of ``model`` on ``card``."""
    config = PRESETS[model]
    setup = Setup(hardware.known(card), Activations.BF16)
    shape = outline(model, config, setup.activations, 16, config.max_context)
    plan, workload = make_plan(model, shape.uses, setup), Workload(sequences=64)
    memory = memory_for(shape, plan, setup, workload)
    offers = precision_offers(shape, setup, workload)
    line = precisions_line(model, setup.gpu.name, offers)
    return describe(plan, Precisions(EXACT, offers, line), memory, PAGES)
