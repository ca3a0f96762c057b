"""What every command that loads a model does."""

from __future__ import annotations

from microscale.cli.bars import loading_bar
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared
from microscale.engine.loading.warming import kernels_ready
from microscale.models.families import AnyModel
from microscale.models.recorded import Wanted


def load_with_progress(prepared: Prepared, wanted: Wanted | None = None) -> AnyModel:
    """Load a model while its kernels are made ready, and show how much is there, and how fast it comes.

    ``wanted``: what will be run; without it, greedy steps as large as the workload has them.
    """
    workload = prepared.memory.workload
    wanted = wanted or Wanted(workload.step_tokens, workload.sequences)
    with loading_bar(f"Loading {prepared.options.model}") as tell:

        def on_kernels(done: int, total: int) -> None:
            if total:
                tell(done, total, "kernels")

        with kernels_ready(prepared, None, on_kernels, wanted):
            return load(prepared, lambda done, total: tell(done, total, "bytes"))
