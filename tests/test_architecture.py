"""The rules of `tools/architecture.py` find what they are for, and leave innocent code alone."""

from __future__ import annotations

import pytest

from tools import architecture
from tools.architecture import Source, violations

WAIT = (
    "# mypy: ignore-errors\nfrom triton.language.extra.cuda import gdc_wait\n"
    "from microscale.kernels.pdl_jit import let_next_begin_and_wait\n"
)
JIT = "from microscale.kernels.moe import pairs_jit as jit\n"
WRONG = [
    ("models/gpt_oss/model.py", "from microscale.engine import engine"),
    ("models/decoder.py", "from microscale.planning import choose_kernel"),
    ("server/openai/logprobs.py", "from microscale.server.anthropic import convert"),
    ("engine/engine.py", "def step():\n    import torch"),
    ("engine/engine.py", "x = torch.cuda.get_device_capability()"),
    ("engine/engine.py", "if props.major >= 10: pass"),
    ("engine/engine.py", "gpu.sm in (120, 121)"),
    ("engine/engine.py", "capability() >= (10, 0)"),
    ("engine/engine.py", "arch = f'sm_{gpu}'"),
    ("engine/engine.py", "f(arch_sm120=True)"),
    ("engine/engine.py", "def is_hopper(): pass"),
    ("engine/engine.py", "GPUTarget('cuda', 90, 32)"),
    ("engine/engine.py", "if isinstance(config, Gemma4Config): pass"),
    ("server/host.py", "kind = 'gpt-oss'"),
    ("server/host.py", "f(harmony=True)"),
    ("server/host.py", "import os\nkey = os.environ['KEY']"),
    ("kernels/op.py", "# mypy: ignore-errors"),
    ("kernels/op.py", "attend[(programs, heads)](q, k)"),
    ("planning/ops.py", JIT + "jit.combine[grid](x, y, 3)"),
    ("planning/ops.py", JIT + "jit.small.warmup(x)"),
    ("kernels/op.py", "def run(x):\n    if x.shape[0] <= 64:\n        return few(x)\n    return many(x)"),
    ("kernels/op.py", "def run(x, gpu):\n    return wgmma(x) if gpu.has(A) else grouped(x)"),
    ("kernels/op.py", "def run(batch):\n    match batch.max_query_len:\n        case 1: decode()"),
    ("kernels/op.py", "def run_fused(self, q) -> Tensor | None: ..."),
    ("kernels/op.py", "def go(x, tokens):\n    if tokens > 16:\n        f(a)\nP = DensePath('GEMM', LAST, always, go)"),
    (
        "kernels/op.py",
        "def a(self):\n    launch(x)\ndef b(self):\n    if self.batch.draws:\n        self.a()",
    ),
    ("kernels/op.py", "def add(self):\n    if self.batch.bias is None:\n        return\n    launch(a)"),
    ("engine/engine.py", "path = next(p for p in entry.paths if p.supports(spec, gpu) is None)"),
    ("kernels/op.py", "tile = tiles.Tile(16, 64, 4, 3)"),
    ("kernels/op.py", "tile = replace(tile, registers=168)"),
    ("kernels/op.py", "x = gpu.has(Feature.WGMMA)"),
    ("kernels/dense/a_jit.py", WAIT + "def f(x):\n    for i in range(4):\n        if PDL:\n            gdc_wait()"),
    ("kernels/dense/a_jit.py", WAIT + "def f(x):\n    while x > 0:\n        let_next_begin_and_wait()"),
    ("unheard_of.py", ""),
]
RIGHT = [
    ("models/decoder.py", "from microscale.planning.ops import Ops"),
    ("engine/engine.py", "'''Runs on SM90.'''\nx = 1  # SM120\nnum_sms = 132\nfamily = 'small'\nRow(sm=task.sm)"),
    ("engine/engine.py", "GPUTarget('cuda', sm, 32)"),
    ("server/host.py", "'''As Gemma has it.'''\nArgument(help='A preset (gpt-oss-120b …)')\nname = 'gpt-oss-20b'"),
    (
        "kernels/dense/a_jit.py",
        WAIT + "def f(x):\n    gdc_wait()\n    for i in range(4):\n        gdc_launch_dependents()",
    ),
    ("kernels/op.py", "launch(jit.small, grid, arguments)\nentry = table[key]"),
    ("kernels/op.py", "def run(x, tokens):\n    if not tokens:\n        return y\n    launch(a)"),
    ("kernels/op.py", "def run(x, residual):\n    return y if residual is None else add(y, residual)"),
    ("kernels/op.py", "def run(x):\n    if x.shape[1] % 32:\n        raise Unsupported(f'{name(x)}')"),
    ("kernels/op.py", "def up(x, tokens):\n    tile = few(x) if tokens > 8 else many(x)\n    launch(jit, tile)"),
]


@pytest.mark.parametrize(("place", "code"), WRONG)
def test_a_violation_is_reported(place: str, code: str) -> None:
    assert len(violations(Source(place, code))) >= 1


@pytest.mark.parametrize(("place", "code"), RIGHT)
def test_innocent_code_passes(place: str, code: str) -> None:
    assert not violations(Source(place, code))


def test_every_rule_is_shown_to_bite() -> None:
    biting = {rule for place, code in WRONG for rule in architecture.RULES if any(rule(Source(place, code)))}
    assert biting == set(architecture.RULES)
