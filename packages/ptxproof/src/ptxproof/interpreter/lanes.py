"""The threads of several blocks at once: registers, where each lane is, and which lanes are active."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxproof.errors import InterpretError, NotInterpreted
from ptxproof.interpreter.memory import GlobalMemory, LocalMemory
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.pending_products import Products
from ptxproof.interpreter.phases import Mbarriers
from ptxproof.interpreter.program import PtxProgram
from ptxproof.interpreter.shared import SharedMemory
from ptxproof.interpreter.threads import Threads

WARP = 32
Mask = Array | None
"""Active lanes; ``None``: all."""


class Lanes(Threads):
    """Registers are arrays with one number for each lane, or a single one where all lanes have the same; unsigned,
    whatever they mean."""

    def __init__(
        self,
        program: PtxProgram,
        blocks: Array,
        grid: tuple[int, int, int],
        params: dict[str, int],
        memory: GlobalMemory,
        shared_bytes: int,
        grain: int,
    ) -> None:
        super().__init__(len(blocks), program.threads, int(blocks[0]))
        self.program = program
        self.params = params
        self._grid = grid
        self._block_ids = [
            np.repeat(part.astype(np.uint32), program.threads)
            for part in (blocks % grid[0], blocks // grid[0] % grid[1], blocks // (grid[0] * grid[1]))
        ]
        self._registers: list[Array | None] = [None] * len(program.registers)
        self._unset: dict[int, Array] = {}
        """Registers that were written in some lanes only, and the lanes where they were not."""
        self._widths = list(program.registers.values())
        self.undefined: Mask = None
        """Lanes in which a number that this instruction has read is undefined; ``None``: in no lane."""
        self.carry = np.zeros(self.num, np.uint64)
        self.memory = memory
        self.shared = SharedMemory(self, shared_bytes, grain)
        self.mbarriers = Mbarriers(self, self.shared)
        self.products = Products(self.num // WARP, program.product_registers)
        self.local = LocalMemory(self.num, program.local_bytes)

    # ---- registers ---------------------------------------------------------------------------------------------------

    def get(self, place: int, active: Mask) -> Array:
        """A register. Where it was not written the lanes are noted: what is computed from them is undefined as well,
        and ``refuse_undefined`` stops it where it would count."""
        if self.products.using(place, active, writing=False):
            raise InterpretError(f"{self.where}: reads a register before the wgmma that writes it was waited for.")
        value = self._registers[place]
        unset = np.ones(self.num, np.bool_) if value is None else self._unset.get(place)
        if unset is not None:
            self._note_undefined(unset)
        return np.zeros(1, UNSIGNED[self._widths[place]]) if value is None else value

    def get_unset(self, place: int) -> Array:
        """As ``get``, but where nothing was written the numbers are garbage. LLVM packs an undefined half next to
        a defined one, and the result of the undefined half is not used."""
        garbage = np.uint64(0xDEADBEEFDEADBEEF).astype(UNSIGNED[self._widths[place]])
        value = self._registers[place]
        if value is None:
            return np.array([garbage])
        unset = self._unset.get(place)
        return value if unset is None else np.where(unset, garbage, value)

    def put(self, place: int, value: Array, active: Mask) -> None:
        if self.products.using(place, active, writing=True):
            raise InterpretError(f"{self.where}: overwrites a register of a wgmma that was not waited for.")
        self.products.changed(place, active)
        undefined = self.undefined
        if active is None:
            self._registers[place] = value
            self._unset.pop(place, None)
            if undefined is not None and undefined.any():
                self._unset[place] = self.wide(undefined)
            return
        old = self._registers[place]
        unset = np.ones(self.num, np.bool_) if old is None else self._unset.get(place)
        if unset is not None or undefined is not None:
            before = np.zeros(self.num, np.bool_) if unset is None else unset & ~active
            left = before if undefined is None else before | (undefined & active)
            self._unset.pop(place, None)
            if left.any():
                self._unset[place] = left
        if old is None:
            old = np.zeros(self.num, UNSIGNED[self._widths[place]])
        self._registers[place] = np.where(active, value, old)

    def _note_undefined(self, lanes: Array) -> None:
        self.undefined = lanes if self.undefined is None else self.undefined | lanes

    def taken_undefined(self) -> Array:
        """The lanes noted so far, which are noted no longer."""
        noted, self.undefined = self.undefined, None
        return np.zeros(1, np.bool_) if noted is None else noted

    def refuse_undefined(self, what: str, active: Mask) -> None:
        """Stop if a number that was read for ``what`` is undefined in an active lane."""
        if self.undefined is None:
            return
        used = self.undefined if active is None else self.undefined & active
        if used.any():
            raise InterpretError(
                f"{self.where}: {what} that was never written, in {self.name(int(np.flatnonzero(used)[0]))}."
            )

    def undefined_in_warps(self) -> None:
        """What a warp computes together is undefined if one of its lanes' numbers is."""
        if self.undefined is not None:
            self.undefined = np.repeat(self.undefined.reshape(-1, WARP).any(1), WARP)

    def special(self, name: str) -> Array:
        base, _, axis = name.partition(".")
        if base in ("%tid", "%ctaid", "%ntid", "%nctaid"):
            at = "xyz".index(axis)
            if base == "%ctaid":
                return self._block_ids[at]
            if base == "%tid" and at == 0:
                return self.thread
            sizes: dict[str, Any] = {"%nctaid": self._grid[at], "%ntid": self.program.threads if at == 0 else 1}
            return np.array([sizes.get(base, 0)], np.uint32)
        if name == "%laneid":
            return self.thread % np.uint32(WARP)
        if name == "%warpid":
            return self.thread // np.uint32(WARP)
        raise NotInterpreted(f"{self.where}: the special register {name} is not known.")

    def meet(self, active: Mask) -> None:
        super().meet(active)
        self.memory.visible.barrier(self, active)

    def wide(self, value: Array) -> Array:
        """One number for each lane."""
        return value if value.size == self.num else np.broadcast_to(value, (self.num,)).copy()

    # ---- lanes and warps ---------------------------------------------------------------------------------------------

    def selected(self, active: Mask) -> Array:
        return np.arange(self.num) if active is None else np.flatnonzero(active)

    def warps(self, active: Mask) -> Array:
        """The active warps, each of them whole."""
        if active is None:
            return np.arange(self.num // WARP)
        lanes = active.reshape(-1, WARP)
        whole = lanes.all(1)
        if (lanes.any(1) != whole).any():
            raise InterpretError(f"{self.where}: an instruction of whole warps in a warp that has branched apart.")
        return np.flatnonzero(whole)
