"""Makes the key of a compiled kernel the same in every process.

Triton hashes a function with the keys of those that it calls, and adds the constants that they use *if their keys were
asked for before*. So the key depends on which kernel a process came to first, and what one process compiled another
does not find: of gpt-oss-20b's 68 kernels 25 were compiled again after they had been asked for in another order (Triton
3.6.0 and 3.7.1). A callee's key has its constants in it. So for our functions nothing else is added, and a launch,
which looks at each constant that was added, has fewer to look at.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder

STABLE = ("microscale.", "triton.")
"""Functions whose keys are made so, by the beginning of their names. In vLLM's process there are others."""
_update_hash = DependenciesFinder._update_hash


def _add_callee(finder: Any, callee: Any) -> None:
    if finder.name.startswith(STABLE):
        finder.hasher.update(f"{callee.cache_key}{getattr(callee, 'noinline', False)}".encode())
    else:
        _update_hash(finder, callee)


def make_keys_stable() -> None:
    """Before the first key is asked for."""
    DependenciesFinder._update_hash = _add_callee
