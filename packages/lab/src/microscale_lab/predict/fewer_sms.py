"""A part of the GPU's SMs, as a stand-in for a smaller card: a CUDA green context, checked by a probe.

Inside ``fewer_sms(n)`` kernels of this process run on ``n`` SMs (what the driver rounds that to), and memory and clocks
stay the whole card's. The probe lets many programs say on which SM they run: where more are seen than were asked for,
or the driver refuses, the reason is one sentence. To be entered before anything else runs on the GPU: streams that
were made earlier belong to the whole card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch.cuda import green_contexts

from microscale.errors import Unsupported
from microscale.kernels.launch import launch

PROGRAMS = 8192
SPIN = 64
ROUNDING = 8
"""SMs by which the driver may go beyond what is asked for."""


@triton.jit  # type: ignore[untyped-decorator]
def sm_probe(out_ptr, SPIN: tl.constexpr):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Every program writes the number of its SM, after some work, so that the programs spread."""
    place = tl.program_id(0)
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)
    value = number * 0
    for step in range(SPIN):
        value = (value * 3 + step) % 7
    tl.store(out_ptr + place, number + (value >> 8))


def seen_sms() -> int:
    """On how many SMs kernels of this context run."""
    out = torch.empty(PROGRAMS, dtype=torch.int32, device="cuda")
    launch(sm_probe, (PROGRAMS,), (out,), {"SPIN": SPIN}, {"num_warps": 1})
    return int(out.unique().numel())


@contextmanager
def fewer_sms(number: int | None) -> Iterator[int | None]:
    """Inside, kernels run on about ``number`` SMs; gives how many the probe saw. ``None``: all, and nothing is done."""
    if number is None:
        yield None
        return
    have = torch.cuda.get_device_properties(0).multi_processor_count
    if not 1 <= number <= have:
        raise Unsupported(f"--sms {number} is not between 1 and the {have} SMs of this GPU.")
    try:
        context = green_contexts.GreenContext.create(num_sms=number, device_id=0)
        context.set_context()  # type: ignore[attr-defined]
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise Unsupported(f"--sms {number}: no green context can be had here ({why}).") from None
    try:
        seen = seen_sms()
        if seen > number + ROUNDING:
            raise Unsupported(f"--sms {number}: kernels still run on {seen} SMs; the green context has no effect here.")
        yield seen
    finally:
        context.pop_context()  # type: ignore[attr-defined]
