"""Follows the control flow of a kernel: all lanes together where they agree, under masks where they do not.

Of several groups of lanes that have branched apart the one furthest behind runs first, so that they meet again as early
as they can. At a barrier a block waits until all its threads that have not ended are there.

A program may look at a number until other programs have changed it (``ld.acquire`` in a loop). Lanes that look again
before anything has changed rest until nothing else can run. If nothing changes even then, the programs wait for each
other, or for one that cannot begin before they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from typing import Any

import numpy as np

from ptxproof.errors import InterpretError, NotInterpreted
from ptxproof.interpreter.access import GENERIC, Look, build_look, space_of, store_bytes
from ptxproof.interpreter.build import build
from ptxproof.interpreter.dependent import Chain
from ptxproof.interpreter.lanes import WARP, Lanes, Mask
from ptxproof.interpreter.mbarrier import Wait, build_wait
from ptxproof.interpreter.memory import GlobalMemory
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.operands import Operands, Read, Step
from ptxproof.interpreter.program import WAITS, ProgramLine, PtxProgram, looks

LANES_AT_ONCE = 8192
"""Blocks run together up to this many threads, so that the cost of a NumPy call is small next to its work."""


@dataclass(frozen=True)
class _Block:
    steps: tuple[Step, ...]
    ends: str
    """``bra``, ``brx``, ``ret``, ``bar``, ``wait``, ``look``, or ``next``: it runs on into the next one."""
    target: int = 0
    condition: Read | None = None
    table: tuple[int, ...] = ()
    """Of ``brx``: where each number that ``index`` may have leads."""
    index: Read | None = None
    wait: Wait | None = None
    """At an mbarrier."""
    look: Look | None = None
    barrier: tuple[int, int | None] = (0, None)
    """Its number, and how many threads it waits for; ``None``: for all of the block."""


class InterpretedKernel:
    """A kernel that can be run."""

    def __init__(self, ptx: str, shared_bytes: int) -> None:
        self.program = PtxProgram.parse(ptx)
        self._shared_bytes = shared_bytes
        stores = [
            placed.instruction.opcode
            for block in self.program.blocks
            for placed in block
            if placed.instruction.opcode.startswith("st") and space_of(placed.instruction.opcode) in ("shared", GENERIC)
        ]
        widths = [store_bytes(opcode) for opcode in stores if not opcode.startswith("stmatrix")]
        self._grain = min([4, *widths])
        self._global_grain = min([4, *self._global_widths()])
        self._built: dict[tuple[int, ...], list[_Block]] = {}
        """The steps, by the addresses of the program's constants: a kernel is started more than once."""

    def _global_widths(self) -> Iterator[int]:
        """Bytes that stores and atomics change at once."""
        for placed in joined.from_iterable(self.program.blocks):
            opcode = placed.instruction.opcode
            if opcode.startswith(("st", "atom", "red.")) and space_of(opcode) in ("global", GENERIC):
                yield store_bytes(opcode)

    def run(
        self, grid: Sequence[int], arguments: Sequence[Any], memory: GlobalMemory, chain: Chain | None = None,
        *, dependent: bool = False, resident: int | None = None,
    ) -> None:  # fmt: skip
        """``arguments``: numbers as their bits, addresses of ``memory`` for tensors. What Triton adds to them is 0.
        ``chain``: the launches before, which may still run if this one is ``dependent``. ``resident``: how many
        programs the card runs at once, all by default; it counts where they wait for each other."""
        constants = {
            name: memory.add(np.frombuffer(content, np.uint8)) for name, content in self.program.constants.items()
        }
        x, y, z = (*grid, 1, 1)[:3]
        total = x * y * z
        memory.fill(self._global_grain, total, self.program.threads)
        if chain is not None:
            memory.order = chain.begin(memory.storages(), memory.bytes.size, dependent=dependent)
        key = tuple(constants.values())
        if key not in self._built:
            ops = Operands(self.program, constants)
            self._built[key] = [self._build(ops, at) for at in range(len(self.program.blocks))]
        blocks = self._built[key]
        names = [name for name, _ in self.program.params]
        params = dict.fromkeys(names, 0) | dict(zip(names, arguments, strict=False))
        at_once = max(1, LANES_AT_ONCE // self.program.threads)
        if self.program.looks:
            at_once = total if resident is None else min(total, resident)
        with np.errstate(all="ignore"):
            for first in range(0, total, at_once):
                ids = np.arange(first, min(first + at_once, total))
                lanes = Lanes(self.program, ids, (x, y, z), params, memory, self._shared_bytes, self._grain)
                _Flow(lanes, blocks, total).run()
                if memory.order is not None:
                    memory.order.all_waited &= bool(lanes.waited.all())
                    memory.order.released_late |= lanes.released_late()
        memory.restore()
        if chain is not None and memory.order is not None:
            chain.end(memory.order)

    def _build(self, ops: Operands, at: int) -> _Block:
        placed = self.program.blocks[at]
        last = placed[-1].instruction
        name = last.opcode.partition(".")[0]
        if name == "bra":
            condition = None if last.guard is None else ops.read(last.guard, 1)
            target = self.program.labels[last.operands[0]]
            return _Block(tuple(build(ops, each) for each in placed[:-1]), "bra", target, condition)
        if last.opcode == "brx.idx" and last.guard is None:
            table = tuple(self.program.labels[label] for label in self.program.tables[last.operands[1]])
            steps = tuple(build(ops, each) for each in placed[:-1])
            return _Block(steps, "brx", table=table, index=ops.read(last.operands[0], 32))
        if name in ("ret", "exit"):
            if last.guard is not None:
                raise NotInterpreted(f"line {placed[-1].line}: a {name} under a predicate is not interpreted.")
            return _Block(tuple(build(ops, each) for each in placed[:-1]), "ret")
        if name in ("bar", "barrier") and not last.opcode.startswith("bar.warp"):
            return _Block(tuple(build(ops, each) for each in placed[:-1]), "bar", barrier=_barrier(placed[-1]))
        if last.opcode.startswith(WAITS):
            return _Block((), "wait", wait=build_wait(ops, last))
        if looks(last):
            return _Block((), "look", look=build_look(ops, last))
        return _Block(tuple(build(ops, each) for each in placed), "next")


def _barrier(placed: ProgramLine) -> tuple[int, int | None]:
    """``bar.sync 1, 128;``"""
    instruction = placed.instruction
    parts = instruction.opcode.split(".")
    if (
        "sync" not in parts
        or instruction.guard is not None
        or not all(part.isdecimal() for part in instruction.operands)
    ):
        raise NotInterpreted(f"line {placed.line}: {instruction} is not interpreted.")
    number, count = (*map(int, instruction.operands), None, None)[:2]
    return number or 0, count


class _Flow:
    """The run of one set of blocks of threads."""

    def __init__(self, lanes: Lanes, blocks: Sequence[_Block], total: int) -> None:
        self._lanes = lanes
        self._total = total
        """Programs of the launch."""
        self._blocks = blocks
        self._work: dict[int, Mask] = {}
        self._late_work: dict[int, Mask] = {}
        self._late = lanes.block == lanes.num_blocks - 1 if lanes.program.looks and lanes.num_blocks > 1 else None
        """Lanes of a program that is slower than all others, where programs wait for each other: it runs only when they
        cannot, so that whoever does not wait for it shows."""
        self._join(0, None)
        self._waiting: dict[int, Array] = {}
        self._parked: dict[int, Array] = {}
        """Lanes that wait at an mbarrier for a phase to end."""
        self._phases = 0
        self._looked: dict[int, Array] = {}
        """By load and lane, how often memory had changed when it looked last."""
        self._resting: dict[int, Array] = {}
        """Lanes that have looked, and nothing has changed since."""
        self._before: Any = None
        """How everything stood when they were last woken."""
        self._ended = np.zeros(lanes.num, np.bool_)

    def run(self) -> None:
        while self._work or self._late_work or self._waiting or self._parked or self._resting:
            work = self._work or self._late_work
            if not work and self._resting:
                self._wake()
                work = self._work or self._late_work
            if not work:
                places = ", ".join(map(str, sorted({*self._waiting, *self._parked})))
                raise InterpretError(
                    f"{self._lanes.program.name}: threads of one block wait at different barriers or for threads that "
                    f"have branched away (after basic blocks {places})."
                )
            at = min(work)
            active = work.pop(at)
            if at >= len(self._blocks):
                raise InterpretError(f"{self._lanes.program.name}: control runs past the last instruction.")
            self._run_block(at, active)
            if self._lanes.mbarriers.phases > self._phases:
                self._phases = self._lanes.mbarriers.phases
                for place, parked in self._parked.items():
                    self._join(place, parked)
                self._parked = {}

    def _run_block(self, at: int, active: Mask) -> None:
        lanes, block = self._lanes, self._blocks[at]
        for step in block.steps:
            step(lanes, active)
        if block.ends == "next":
            self._join(at + 1, active)
        elif block.ends == "bra":
            self._branch(at, block, active)
        elif block.index is not None:
            self._choose(at, block.table, block.index, active)
        elif block.ends == "ret":
            self._ended |= True if active is None else active
            self._release()
        elif block.wait is not None:
            self._await(at, block.wait, active)
        elif block.look is not None:
            self._look(at, block.look, active)
        elif active is None and block.barrier[1] in (None, lanes.program.threads):
            lanes.shared.barrier(None)
            lanes.meet(None)
            self._join(at + 1, None)
        else:
            everyone = np.ones(lanes.num, np.bool_) if active is None else active
            self._waiting[at] = self._waiting.get(at, np.zeros(lanes.num, np.bool_)) | everyone
            self._release()

    def _await(self, at: int, wait: Wait, active: Mask) -> None:
        everyone = np.ones(self._lanes.num, np.bool_) if active is None else active
        ready = wait(self._lanes, active)
        if ready.any():
            self._join(at + 1, None if ready.all() else ready)
        if (everyone & ~ready).any():
            self._parked[at] = self._parked.get(at, np.zeros(self._lanes.num, np.bool_)) | (everyone & ~ready)

    def _look(self, at: int, look: Look, active: Mask) -> None:
        lanes = self._lanes
        everyone = np.ones(lanes.num, np.bool_) if active is None else active
        last = self._looked.setdefault(at, np.full(lanes.num, -1))
        again = everyone & (last == lanes.memory.changes)
        first = everyone & ~again
        if first.any():
            some = None if first.all() else first
            look(lanes, some)
            last[first] = lanes.memory.changes
            self._join(at + 1, some)
        if again.any():
            self._resting[at] = self._resting.get(at, np.zeros(lanes.num, np.bool_)) | again

    def _wake(self) -> None:
        """Let resting lanes look once more, now that nothing else can run."""
        lanes = self._lanes
        waiting = (self._resting, self._waiting, self._parked)
        now = lanes.memory.changes, [{at: mask.tobytes() for at, mask in each.items()} for each in waiting]
        if now == self._before:
            running, total = lanes.num_blocks, self._total
            begun = "" if running == total else f", of which {running} of {total} programs run at once"
            who = lanes.name(int(np.flatnonzero(next(iter(self._resting.values())))[0]))
            raise InterpretError(
                f"{lanes.program.name}: {who} waits for a number in global memory that no program will change{begun}."
            )
        self._before = now
        for at, mask in self._resting.items():
            self._looked[at][mask] = -1
            self._join(at, None if mask.all() else mask)
        self._resting = {}

    def _branch(self, at: int, block: _Block, active: Mask) -> None:
        if block.condition is None:
            self._join(block.target, active)
            return
        self._lanes.where = f"{self._lanes.program.name}, a branch in basic block {at}"
        self._lanes.undefined = None
        taken = self._lanes.wide(block.condition(self._lanes, active))
        self._lanes.refuse_undefined("depends on a predicate", active)
        everyone = np.ones(self._lanes.num, np.bool_) if active is None else active
        for target, part in ((block.target, taken & everyone), (at + 1, ~taken & everyone)):
            if part.any():
                self._join(target, None if part.all() else part)

    def _choose(self, at: int, table: Sequence[int], index: Read, active: Mask) -> None:
        self._lanes.where = f"{self._lanes.program.name}, a branch in basic block {at}"
        self._lanes.undefined = None
        chosen = self._lanes.wide(index(self._lanes, active))
        self._lanes.refuse_undefined("depends on a number", active)
        everyone = np.ones(self._lanes.num, np.bool_) if active is None else active
        if (chosen[everyone] >= len(table)).any():
            raise InterpretError(f"{self._lanes.where}: it has {len(table)} targets, and no {chosen[everyone].max()}.")
        for number, target in enumerate(table):
            part = (chosen == number) & everyone
            if part.any():
                self._join(target, None if part.all() else part)

    def _join(self, at: int, active: Mask) -> None:
        if self._late is None:
            _add(self._work, at, active)
            return
        for work, part in ((self._work, ~self._late), (self._late_work, self._late)):
            some = part if active is None else part & active
            if some.any():
                _add(work, at, some)

    def _release(self) -> None:
        """Let go the blocks for which a barrier has all the threads that it waits for."""
        for number, count in {self._blocks[at].barrier for at in self._waiting}:
            places = [at for at in self._waiting if self._blocks[at].barrier[0] == number]
            if len({self._blocks[at].barrier for at in places}) > 1:
                raise InterpretError(
                    f"{self._lanes.program.name}: barrier {number} is for different numbers of threads."
                )
            arrived = np.zeros(self._lanes.num, np.bool_)
            for at in places:
                arrived |= self._whole_warps(self._waiting[at])
            free = arrived & self._ready(arrived, count)[self._lanes.block]
            if free.any():
                self._let_go(places, free)

    def _whole_warps(self, waiting: Array) -> Array:
        """A warp arrives when all its lanes wait at the same instruction."""
        warps = waiting.reshape(-1, WARP)
        living = ~self._ended.reshape(-1, WARP)
        whole: Array = (warps & (warps == living).all(1)[:, None]).reshape(-1)
        return whole

    def _ready(self, arrived: Array, count: int | None) -> Array:
        """Which blocks a barrier lets go."""
        shape = (self._lanes.num_blocks, -1)
        here, ended = arrived.reshape(shape).sum(1), self._ended.reshape(shape).sum(1)
        if count is not None:
            met: Array = here == count
            return met
        missing = (here > 0) & (ended > 0) & (here + ended == self._lanes.program.threads)
        if missing.any():
            block = int(np.flatnonzero(missing)[0])
            raise InterpretError(
                f"{self._lanes.program.name}: a barrier for all threads of a block, of which {int(ended[block])} have "
                f"ended, in block {block}."
            )
        ready: Array = here == self._lanes.program.threads
        return ready

    def _let_go(self, places: Sequence[int], free: Array) -> None:
        self._lanes.shared.barrier(free)
        self._lanes.meet(free)
        for at in places:
            waiting = self._waiting.pop(at)
            if (waiting & ~free).any():
                self._waiting[at] = waiting & ~free
            if (waiting & free).any():
                here = waiting & free
                self._join(at + 1, None if here.all() else here)


def _add(work: dict[int, Mask], at: int, active: Mask) -> None:
    """Lanes that run on there, together with those that are there already."""
    other = work.get(at)
    if at in work and active is not None and other is not None:
        active = other | active
    elif at in work:
        active = None
    work[at] = None if active is None or active.all() else active
