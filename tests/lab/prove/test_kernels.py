"""Our expert kernels, on the architectures that `make test` has time for; `make prove` does all ops on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from microscale import settings
from microscale.hardware import Gpu, known
from microscale.kernels.launch import Kernel
from microscale.planning.precision import PRECISIONS
from microscale_lab.prove import inventory
from microscale_lab.prove.run import prove
from ptxproof.targets import target

MODELS = ("gpt-oss-120b", "gemma-4-26b-a4b")


def of_real_models(gpu: Gpu) -> Iterable[Kernel]:
    """What both start in the checkpoint's own formats; activations in bf16, and in 8 bits where that is faster."""
    found = inventory.recorded(gpu, MODELS, inventory.SETTINGS[:2])
    return [kernel for kernel, users in found.items() if set(users) & set(MODELS)]


def proved(kernels: Callable[[Gpu], Iterable[Kernel]], gpu: str) -> int:
    """How many kernels there were, none of which was refused."""
    rows = prove(kernels, [gpu], ops=["moe"], cache_dir=settings.load().cache_dir)
    refused = [f"{row.op} {row.variant}: {row.reason}" for row in rows if not row.ok]
    assert not refused, "\n".join(refused)
    return len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "rtx5090"])
def test_every_expert_kernel_is_proved(gpu: str) -> None:
    assert proved(of_real_models, gpu) > 30


@pytest.mark.slow
def test_what_only_gb10_starts_is_proved() -> None:
    """Most of its kernels are an RTX 5090's too: the same PTX (``test_run`` compares) and as much shared memory."""
    known_ones, own = set(of_real_models(known("rtx5090"))), set(of_real_models(known("gb10")))
    assert target(known("rtx5090").sm).shared_limit == target(known("gb10").sm).shared_limit
    assert len({kernel for kernel in own & known_ones if kernel.op == "moe"}) > 30
    assert proved(lambda gpu: own - known_ones, "gb10") >= 1


@pytest.mark.parametrize("gpu", ["rtx5090", "gb10"])
@pytest.mark.parametrize("name", MODELS)
def test_block_scaled_arithmetic_is_promised_where_the_card_has_it(name: str, gpu: str) -> None:
    """Without a promise the gate could not tell a fall-back to BF16 from what was meant."""
    assert PRECISIONS["balanced"].narrow_activations == ("moe",)
    found = inventory.record_setting(inventory.models()[name], known(gpu), inventory.Setting("balanced"))
    assert found is not None
    promises = [kernel.promise or "" for kernel in found if kernel.constants.get("MX")]
    assert promises
    instruction = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
    fallback = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    for promise in promises:
        assert re.search(promise, instruction)
        assert not re.search(promise, fallback)
