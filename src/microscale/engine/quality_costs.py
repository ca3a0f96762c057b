"""What each precision costs in answer quality, where that was measured: ``quality_costs.json``.

``microscale quality --record`` (in the lab) writes the table, and docs/quality.md explains it. A figure is for one
model: it says nothing about another one, not even of the same family.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from microscale.models import embedded
from microscale.models.known_checkpoints import preset_of

FILE = Path(__file__).parent / "quality_costs.json"
PAGE = "docs/quality.md"


@dataclass(frozen=True)
class QualityCost:
    """The cost of one precision for one model."""

    model: str
    precision: str
    kl: float
    """KL divergence from float32, in nats per token. On a CPU ``exact`` is float32."""
    device: str
    on_gpu: bool
    """A CPU computes with float32 activations, so its figures cover weights and KV cache only."""
    prompts: int
    date: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def quality_costs(file: Path = FILE) -> tuple[QualityCost, ...]:
    return tuple(QualityCost(**row) for row in json.loads(file.read_text()))


def write(costs: list[QualityCost], file: Path = FILE) -> None:
    """Replace the rows of the same models."""
    models = {cost.model for cost in costs}
    kept = [cost for cost in quality_costs(file) if cost.model not in models]
    rows = ",\n".join(f" {json.dumps(cost.to_json())}" for cost in (*kept, *costs))
    file.write_text(f"[\n{rows}\n]\n")
    quality_costs.cache_clear()


def cost_of(model: str, precision: str) -> QualityCost | None:
    """``None`` if this was not measured."""
    name = table_name(model)
    return next((cost for cost in quality_costs() if (cost.model, cost.precision) == (name, precision)), None)


def table_name(model: str) -> str:
    """The model's name in the table; all ranks have the whole model's."""
    model = model.partition(", rank ")[0]
    return embedded.SERVED_NAME if model == embedded.NAME else preset_of(model) or model.rstrip("/")
