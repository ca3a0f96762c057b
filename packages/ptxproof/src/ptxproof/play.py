"""Runs another card's kernels on the GPU at hand: compiled for that card, translated, assembled for this one.

Inside ``as_card(card)`` Triton's driver reports ``card`` as its target. So Triton chooses that card's layouts, lanes
and instructions, and only the last stage of compiling differs: the PTX goes through ``translate``, and ptxas assembles
it for the GPU that is present. The limit of shared memory is that card's too: a kernel that takes too much fails as it
would there. Clocks and memory stay this GPU's, so a time that is measured inside says nothing about the card.

Triton asks a driver object for all of this, and ours replaces it. Three things do not go through the driver. Stages are
replaced by ``knobs.runtime.add_stages_inspection_hook``. Triton 3.6 does not ask that hook for a part of the cache key,
so the cache's manager adds one. And jit functions keep what they compiled by the device's number alone, so the driver's
device is a number that equals no other.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager

from ptxproof import instructions, spelled, spelled_mma, translation
from ptxproof import ptx as ptx_text
from ptxproof.errors import Unsupported
from ptxproof.targets import WARP_SIZE, target
from ptxproof.translation import translate


@dataclass(frozen=True)
class Card:
    """A GPU as Triton sees it."""

    name: str
    sm: int
    num_sms: int

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that one block may opt in to."""
        return target(self.sm).shared_limit


def present_card() -> Card | None:
    """This machine's GPU; ``None`` without one."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Card(found.name, 10 * found.major + found.minor, found.multi_processor_count)


@dataclass
class CardRun:
    """What ran inside ``as_card``: the kernels that were started at least once, from a cold or a warm cache."""

    card: Card
    here: Card
    by_kernel: dict[str, Counter[str]] = field(default_factory=dict)
    """Triton's hash of a kernel → how many instructions of each form were spelled out in it."""

    @property
    def kernels(self) -> int:
        return len(self.by_kernel)

    @property
    def spelled(self) -> Counter[str]:
        """How many instructions of each form were spelled out, in all kernels together."""
        return sum(self.by_kernel.values(), Counter())

    def summary(self) -> str:
        """One line: card, kernels, instructions spelled out."""
        forms = ", ".join(f"{count} {form}" for form, count in self.spelled.most_common()) or "nothing"
        return f"as {self.card.name} on {self.here.name}: {self.kernels} kernels; spelled out: {forms}"


@contextmanager
def as_card(card: Card, here: Card | None = None, edit: Callable[[str], str] | None = None) -> Iterator[CardRun]:
    """Inside, Triton compiles for ``card`` and its kernels run on ``here``, by default this machine's GPU.

    ``edit`` changes a kernel's PTX before it is translated; the results of an edit are not cached. For one thread at a
    time. A graph that was captured inside must be replayed inside.
    """
    here = here or present_card()
    if here is None:
        raise Unsupported(f"Running {card.name}'s kernels needs a GPU to run them on; this machine has none.")
    target(here.sm), target(card.sm)  # refuses an SM that is not in the tables
    executed = CardRun(card, here)
    stages = _Stages(card.sm, here.sm, edit)
    with ExitStack() as stack:
        stack.enter_context(_cached_apart(stages.key, keep=edit is None))
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.add_stages_inspection_hook = stages.hook
        stack.enter_context(_driven_by(_Driver(driver.active, executed)))
        yield executed


class _Stages:
    """The last stage of compiling, replaced."""

    def __init__(self, sm: int, here: int, edit: Callable[[str], str] | None) -> None:
        self.key = f"sm{sm}-on-sm{here}-{_version()}"
        self._here = here
        self._edit = edit

    def hook(self, *arguments: Any) -> tuple[str, str] | None:
        """Triton from 3.7 on calls this without arguments for a part of its cache key. All hand over the stages."""
        if not arguments:
            return self.key, self.key
        stages, options = arguments[1:3]
        assembler: Any = make_backend(GPUTarget("cuda", self._here, WARP_SIZE))
        newest = ptx_get_version(get_ptxas(self._here).version)

        def make_cubin(ptx: str, metadata: dict[str, Any]) -> bytes:
            made = translate(ptx if self._edit is None else self._edit(ptx), self._here, divmod(newest, 10))
            metadata["spelled"] = dict(made.spelled)
            cubin: bytes = assembler.make_cubin(made.ptx, metadata, options, self._here)
            return cubin

        stages["cubin"] = make_cubin
        return None


@cache
def _version() -> str:
    """Of the translation: what the kernels in the cache were made by."""
    modules = (instructions, ptx_text, spelled, spelled_mma, translation)
    sources = b"".join(Path(module.__file__ or "").read_bytes() for module in modules)
    return hashlib.sha256(sources).hexdigest()[:12]


@contextmanager
def _cached_apart(key: str, *, keep: bool) -> Iterator[None]:
    """Keep another card's kernels apart from this GPU's own and from those of another translation. Without ``keep``
    they go to a temporary folder."""
    usual: type[FileCacheManager] = knobs.cache.manager_class or FileCacheManager

    class Apart(usual):  # type: ignore[misc]
        def __init__(self, asked: str, *arguments: Any, **named: Any) -> None:
            super().__init__(f"{asked}-{key}", *arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(knobs.cache.scope())
        knobs.cache.manager_class = Apart
        if not keep:
            knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxproof-edited-"))
        yield


class _Device(int):
    """The number of a device, and the key of what was compiled for the card that it plays."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)


class _Passing:
    """All that the object behind it has, but for what a subclass says otherwise."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


class _Driver(_Passing):
    """Triton's driver, which says that its GPU is the card."""

    def __init__(self, behind: Any, executed: CardRun) -> None:
        while isinstance(behind, _Driver):  # a card inside of another: only the inner one counts
            behind = behind._behind
        super().__init__(behind)
        self.utils = _Utils(behind.utils, executed.card)
        self._executed = executed
        self._devices: dict[int, _Device] = {}
        self._used: list[Any] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._executed.card.sm, WARP_SIZE)

    def get_current_device(self) -> int:
        number = int(self._behind.get_current_device())
        return self._devices.setdefault(number, _Device(number))

    def get_current_stream(self, device: int) -> Any:
        return self._behind.get_current_stream(int(device))

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self._used.append(source.fn)
        launch: Callable[..., None] = self._behind.launcher_cls(source, _launchable(metadata, self._executed))
        by_kernel = self._executed.by_kernel

        def counted(*arguments: Any) -> None:
            launch(*arguments)
            if metadata.hash not in by_kernel:
                by_kernel[metadata.hash] = Counter(metadata.spelled)

        return counted

    def forget(self) -> None:
        """Take from jit functions what they compiled here."""
        for function in self._used:
            for device in self._devices.values():
                function.device_caches.pop(device, None)


class _Utils(_Passing):
    def __init__(self, behind: Any, card: Card) -> None:
        super().__init__(behind)
        self._card = card

    def get_device_properties(self, device: int) -> dict[str, Any]:
        found: dict[str, Any] = self._behind.get_device_properties(int(device))
        return found | {"max_shared_mem": self._card.shared_limit, "multiprocessor_count": self._card.num_sms}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int, *more: Any) -> Any:
        return self._behind.load_binary(name, cubin, shared, int(device), *more)


def _launchable(metadata: Any, executed: CardRun) -> Any:
    """The launch as the GPU at hand can have it. Refuses what the card would not start, and what this GPU cannot."""
    card, here = executed.card, executed.here
    if here.shared_limit < metadata.shared <= card.shared_limit:
        raise Unsupported(
            f"{metadata.name} takes {metadata.shared} bytes of shared memory, which {card.name} has and {here.name}, "
            f"which runs it, has not ({here.shared_limit})."
        )
    if not metadata.launch_pdl:
        return metadata
    if instructions.lacked("griddepcontrol.wait", 0, card.sm):
        raise Unsupported(f"{metadata.name} asks for programmatic dependent launch, which {card.name} does not have.")
    # Without it the kernel before has ended, which is what waiting for it means; the translation leaves the wait out.
    return metadata._replace(launch_pdl=not instructions.lacked("griddepcontrol.wait", 0, here.sm))


@contextmanager
def _driven_by(ours: _Driver) -> Iterator[None]:
    before = driver.active
    driver.set_active(ours)
    try:
        yield
    finally:
        driver.set_active(before)
        ours.forget()
