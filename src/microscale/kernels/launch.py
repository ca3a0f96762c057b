"""How every kernel is started: one record of function, grid, arguments, constants and options. Owns nothing else.

``launch`` starts a kernel. Under ``recording`` it lists the kernel instead: the code that runs a model, on tensors
without memory (``device="meta"``), then says what it would start, and ``prove`` compiles just that. Under ``watching``
it starts the kernel and lists it too, so that a test can hold what ran against what was recorded.

A ``Kernel`` is what Triton compiles. Its identity is Triton's own specialisation of the arguments (types, integers that
are 1 or divide by 16, aligned pointers), the constants and the options: equal kernels are the same machine code. An
integer or an address that varies with the batch must therefore not be specialised: ``do_not_specialize`` and
``do_not_specialize_on_alignment``, next to the jit function, say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from microscale.kernels import binding

if TYPE_CHECKING:
    from torch import Tensor


class Launch(NamedTuple):
    """One start of one kernel, with what ``prove`` must know about it."""

    fn: Any
    """The jit function (Triton or Gluon)."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    """Compile options: ``num_warps``, ``num_stages``, ``maxnreg``, ``arch`` …"""
    promise: str | None
    """A regular expression that must match in the PTX: the matrix instruction that the caller was promised."""
    spills_because: str | None
    """Why this kernel may spill registers. Without it a spill fails the proof."""

    def kernel(self) -> Kernel:
        """What this launch compiles."""
        _, specialisation, options = binding.binder(self.fn)(*self.arguments, **self.constants, **self.options)
        key = tuple(specialisation), tuple(sorted(options.items()))
        return Kernel(_name(self.fn), *key, self.fn, self.promise, self.spills_because)

    def load(self) -> None:
        """All that this launch would do before it starts: its kernel is compiled, or found in the cache, and loaded to
        the current device, and later launches find it in Triton's table of this process."""
        named = {**self.constants, **_in_order(self.options)}
        self.fn.run(*self.arguments, grid=self.grid, warmup=True, **named)._init_handles()


@dataclass(frozen=True)
class Kernel:
    """One kernel as it is compiled. Equal kernels are the same machine code on the same SM."""

    name: str
    """Module below ``kernels`` and function: ``moe.small_batch_jit.gate_up_small``."""
    specialisation: tuple[tuple[str, Any], ...]
    """For each parameter Triton's type and what it assumes of the value; a constant is ``("constexpr", value)``."""
    options: tuple[tuple[str, Any], ...]
    fn: Any = field(compare=False, repr=False)
    promise: str | None = field(default=None, compare=False)
    spills_because: str | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        """The op whose folder the function is in; ``shared`` for those of several."""
        return self.name.partition(".")[0] if self.name.count(".") > 1 else "shared"

    @property
    def module(self) -> str:
        """The jit module, by the name of what launches it: ``small_batch``."""
        return self.name.split(".")[-2].removesuffix("_jit")

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def signature(self) -> dict[str, str]:
        """Parameter → Triton's type."""
        return {param.name: kind for param, (kind, _) in zip(self.fn.params, self.specialisation, strict=True)}

    @property
    def constants(self) -> dict[str, Any]:
        """The values that are compiled in: constants, and integers that are 1."""
        pairs = zip(self.fn.params, self.specialisation, strict=True)
        return {param.name: value for param, (kind, value) in pairs if kind == "constexpr"}

    @cached_property
    def label(self) -> str:
        """The function with its constants, flags by their names, and its number of warps."""
        parts = []
        for param in self.fn.params:
            if param.is_constexpr and (value := self.constants[param.name]) is not False:
                parts.append(param.name if value is True else f"{param.name}={value:g}" if isinstance(value, float)
                             else f"{param.name}={value}")  # fmt: skip
        return f"{self.short_name} {' '.join(parts)} warps={dict(self.options).get('num_warps', 4)}"


Listener = Callable[[Launch], bool]
"""Gets a launch before it starts, and returns whether it starts."""

_listeners: dict[int, Listener] = {}
"""By thread. Empty without listeners, which is all that a launch then looks at."""


def launch(
    fn: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    promise: str | None = None,
    spills_because: str | None = None,
) -> None:
    """Start a kernel: the one way to do so. See ``Launch`` for the arguments."""
    if not _listeners or _lets_through(Launch(fn, grid, arguments, constants, options, promise, spills_because)):
        _start(fn, grid, arguments, constants, options)


def _start(
    fn: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """The first time Triton does it; a kernel that it started before is given to the driver at once."""
    place = table, key = binding.place_of(fn, arguments, constants, options)
    kept = table.get(key)
    if kept is not None:
        kept.start(grid, arguments)
        return
    kernel = fn.run(*arguments, grid=grid, warmup=False, **constants, **_in_order(options))
    binding.keep(place, kernel, (fn, arguments, constants, options))


def _in_order(options: Mapping[str, Any]) -> dict[str, Any]:
    """Triton finds a loaded kernel by the text of its options, so each launch must name them in the same order."""
    return dict(sorted(options.items()))


def or_unread(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The argument for a tensor that may be missing: ``other`` is a pointer that the kernel then does not follow."""
    return other if tensor is None else tensor


@contextmanager
def recording() -> Iterator[dict[Kernel, Launch]]:
    """Inside, kernels are listed and not started. Gives each kernel once, with its first launch, in that order.

    In this thread alone: others start kernels as usual. For tensors whose values are never read: what a kernel would
    have written is not there.
    """
    found: dict[Kernel, Launch] = {}

    def listen(started: Launch) -> bool:
        found.setdefault(started.kernel(), started)
        return False

    with taken_by(listen):
        yield found


@contextmanager
def watching() -> Iterator[dict[Kernel, None]]:
    """Inside, kernels are started and listed too."""
    found: dict[Kernel, None] = {}

    def listen(started: Launch) -> bool:
        found.setdefault(started.kernel())
        return True

    with taken_by(listen):
        yield found


@contextmanager
def taken_by(listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` gets every launch of this thread first and returns whether it starts: how a kernel runs on
    another device. Listeners from outside get what it lets through."""
    thread = threading.get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = listener if before is None else lambda started: listener(started) and before(started)
    try:
        yield
    finally:
        if before is None:
            del _listeners[thread]
        else:
            _listeners[thread] = before


def _lets_through(started: Launch) -> bool:
    """Whether the listeners of this thread let a launch start."""
    listener = _listeners.get(threading.get_ident())
    return listener is None or listener(started)


def _name(fn: Any) -> str:
    return f"{fn.__module__.removeprefix('microscale.kernels.')}.{fn.__name__}"
