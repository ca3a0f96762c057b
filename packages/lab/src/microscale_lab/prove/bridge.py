"""Microscale's launches and cards as ``ptxproof`` has them: inside ``interpreted`` and ``as_card``, kernels run as on
another card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ptxproof
from microscale.errors import Unsupported
from microscale.hardware import Gpu, card_name, played, present
from microscale.kernels.launch import Kernel, Launch, taken_by
from microscale_lab.cases.case import just_written_noted
from ptxproof import Card, CardRun, Edit
from ptxproof.interpreter.launched import Compile


def proof_kernel(kernel: Kernel) -> ptxproof.TritonKernel:
    parts = kernel.name, kernel.specialisation, kernel.options, kernel.fn
    return ptxproof.TritonKernel(*parts, kernel.promise, kernel.spills_because)


@contextmanager
def interpreted(sm: int, edit: Edit | None = None, to_ptx: Compile | None = None) -> Iterator[dict[Kernel, int]]:
    """Inside, launches on CPU tensors run in the interpreter as they would on ``sm``. Gives the kernels that ran, and
    how often. ``to_ptx`` replaces the compiler."""
    ran: dict[Kernel, int] = {}
    chain = ptxproof.Chain()

    def take(started: Launch) -> bool:
        kernel = started.kernel()
        ran[kernel] = ran.get(kernel, 0) + 1
        ptxproof.interpret(ptxproof.TritonLaunch(*started), sm, edit, to_ptx, chain)
        return False

    with taken_by(take), just_written_noted(chain.precede):
        yield ran


def card_of(gpu: Gpu) -> Card:
    return Card(gpu.name, gpu.sm, gpu.num_sms)


@contextmanager
def as_card(gpu: Gpu, edit: Edit | None = None) -> Iterator[CardRun]:
    """Inside, ``detect()`` gives ``gpu`` and kernels run as on it. ``edit`` changes a kernel's PTX before it is
    translated. See ``ptxproof.as_card``."""
    here = present()
    if here.is_cpu:
        raise Unsupported(f"Running {gpu.name}'s kernels needs a GPU to run them on; this machine has none.")
    launched: list[ptxproof.TritonKernel] = []

    def note(started: Launch) -> bool:
        launched[:] = [proof_kernel(started.kernel())]
        return True

    def edit_launched(ptx: str) -> str:
        return edit(launched[0], ptx) if edit is not None and launched else ptx

    try:
        with ExitStack() as stack:
            stack.enter_context(played(gpu))
            edited = None if edit is None else edit_launched
            executed = stack.enter_context(ptxproof.as_card(card_of(gpu), card_of(here), edited))
            if edit is not None:
                stack.enter_context(taken_by(note))
            yield executed
    except ptxproof.Unsupported as error:
        raise Unsupported(str(error)) from None


def label(gpu: Gpu, executed: CardRun) -> str:
    """What every figure that was measured inside ``as_card(gpu)`` must carry."""
    name = card_name(gpu) or gpu.name
    return f"{name}'s kernels on an {executed.here.name}; not {name}'s speed"
