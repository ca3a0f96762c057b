"""How KV pages are shared out: all that was promised, nothing that is not there."""

from __future__ import annotations

import pytest

from microscale import hardware
from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import Memory, Workload
from microscale.hardware import GIB
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import PRESETS
from microscale.models.outline import Outline, outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup

CASES = [
    ("gpt-oss-20b", "rtx4090", Workload(sequences=64)),
    ("gpt-oss-20b", "h200", Workload(sequences=64)),
    ("gpt-oss-120b", "rtxpro6000", Workload(context=131072)),
    ("gpt-oss-120b", "h200", Workload(context=8192, sequences=200, step_tokens=8192)),
    ("gpt-oss-tiny", "rtx3090", Workload(context=8, step_tokens=4)),
    # No sliding layers: full ones get all, and pages that take no memory are few.
    ("qwen3-30b-a3b", "h200", Workload(sequences=64)),
]


def reckoned(shape: Outline, setup: Setup, workload: Workload, available: int | None = None) -> Memory:
    memory = plan_and_size(shape, setup, workload, available)[1]
    assert memory.fits
    return memory


@pytest.mark.parametrize("model, card, workload", CASES)
def test_pages_fill_the_memory_and_keep_the_promise(model: str, card: str, workload: Workload) -> None:
    config, setup = PRESETS[model], Setup(hardware.known(card), Activations.BF16)
    memory = reckoned(outline(model, config, Activations.BF16, 16, config.max_context), setup, workload)
    pages, kv = memory.pages(), memory.kv
    full, sliding = pages[LayerKind.FULL], pages[LayerKind.SLIDING]
    taken = 16 * (full * kv.full_per_token + sliding * kv.sliding_per_position)
    page = 16 * max(kv.full_per_token, kv.sliding_per_position)
    assert memory.usable - 2 * page < memory.fixed + taken <= memory.usable
    assert full >= workload.sequences * -(-memory.context // 16)
    if not kv.sliding_per_position:
        assert sliding == 2 * workload.sequences + min(workload.step_tokens, memory.context) // 16
    assert sliding >= workload.sequences * min(-(-config.sliding_window // 16) + 1, -(-memory.context // 16))


def test_a_tight_card_gives_up_windows_before_the_promise() -> None:
    """As many sequences as fit at all: nothing is left for the windows of prefixes."""
    config, setup = PRESETS["gpt-oss-20b"], Setup(hardware.known("rtx4090"), Activations.BF16)
    shape = outline("gpt-oss-20b", config, Activations.BF16, 16, config.max_context)
    most = reckoned(shape, setup, Workload(context=4096)).max_sequences
    memory = reckoned(shape, setup, Workload(context=4096, sequences=most))
    pages = memory.pages()
    assert pages[LayerKind.FULL] >= most * 4096 // 16
    taken = 16 * sum(pages[kind] for kind in PAGED) * memory.kv.full_per_token  # as many layers of each kind
    assert memory.fixed + taken <= memory.usable


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("card", ["rtx5090", "gb10", "h200"])
def test_states_have_slots_and_leave_room(card: str, drafts: int) -> None:
    """One for each sequence and draft, and some that keep states of prompts, as long as what was promised fits."""
    name = "qwen3.6-35b-a3b-nvfp4"
    config, setup = PRESETS[name], Setup(hardware.known(card), Activations.BF16)
    shape = outline(name, config, Activations.BF16, 16, config.max_context)
    assert 63 * 2**20 < shape.state_bytes < 64 * 2**20
    memory = reckoned(shape, setup, Workload(context=4096, sequences=8, draft_tokens=drafts))
    pages, least = memory.pages(), 8 * (1 + drafts)
    assert memory.fits
    assert least < pages[LayerKind.LINEAR] <= least + 4 * 8
    assert memory.kv.bytes(4096, 8) >= (least + 1) * shape.state_bytes
    assert pages[LayerKind.FULL] >= 8 * 4096 // 16
    taken = 16 * pages[LayerKind.FULL] * memory.kv.full_per_token + (pages[LayerKind.LINEAR] + 1) * shape.state_bytes
    assert memory.fixed + taken <= memory.usable


def test_many_sequences_have_no_slots_for_drafts() -> None:
    name = "qwen3.6-35b-a3b-nvfp4"
    config, setup = PRESETS[name], Setup(hardware.known("b200"), Activations.BF16)
    shape = outline(name, config, Activations.BF16, 16, config.max_context)
    without, drafted = (
        reckoned(shape, setup, Workload(context=4096, sequences=200, draft_tokens=count)) for count in (0, 3)
    )
    assert drafted.kv.bytes(4096, 200) - without.kv.bytes(4096, 200) == 16 * 3 * shape.state_bytes


def test_without_room_no_state_of_a_prompt_is_kept() -> None:
    name = "qwen3.6-35b-a3b-nvfp4"
    config, setup = PRESETS[name], Setup(hardware.known("rtx5090"), Activations.BF16)
    shape = outline(name, config, Activations.BF16, 16, config.max_context)
    most = reckoned(shape, setup, Workload(context=4096)).max_sequences
    memory = reckoned(shape, setup, Workload(context=4096, sequences=most))
    pages = memory.pages()
    assert pages[LayerKind.LINEAR] == most
    assert pages[LayerKind.FULL] >= most * 4096 // 16
    taken = 16 * pages[LayerKind.FULL] * memory.kv.full_per_token + (most + 1) * shape.state_bytes
    assert memory.fixed + taken <= memory.usable


def test_a_cpu_keeps_its_memory() -> None:
    config, setup = PRESETS["gpt-oss-tiny"], Setup(hardware.cpu(), Activations.FLOAT32)
    shape = outline("gpt-oss-tiny", config, Activations.FLOAT32, 16, config.max_context)
    pages = reckoned(shape, setup, Workload(context=256, sequences=4), available=8 * GIB).pages()
    assert pages[LayerKind.FULL] == 4 * 256 // 16
    assert pages[LayerKind.SLIDING] == 2 * (4 * 2 + 256 // 16)
