"""The model that comes with the package: what it is called, where it lies, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

from microscale.errors import BadCheckpoint

NAME = "demo"
"""What users type. It always means the embedded model: a folder of this name is ``./demo``."""
SERVED_NAME = "microscale-demo"
ABOUT = "a toy of 30 million parameters that knows small sums, capitals, dates, function calls and little else"
FOLDER = Path(__file__).parents[1] / "demo_model"
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "draft_head/config.json",
    "draft_head/model.safetensors",
)
DRAFT_HEAD = FOLDER / "draft_head"
"""Its EAGLE3 head."""


def embedded_folder() -> Path:
    """Where the embedded model is, checked to be there as a whole."""
    missing = [name for name in FILES if not (FOLDER / name).is_file()]
    if missing:
        raise BadCheckpoint(
            f"The embedded model is not whole: {FOLDER} lacks {', '.join(missing)}; install microscale again, or name "
            f"another model."
        )
    return FOLDER
