"""Programmatic dependent launch: how a kernel stands between the one before it and the one after it.

The next kernel may begin as soon as every program of this one is there, and not only when this one has something to
wait for no more: it finds its programs' room, fetches its weights and waits. A chain of small kernels so keeps the
memory busy with the weights of the matrix product behind it.

A kernel is done when all its programs are, each of which has waited for the kernel before: whoever waits for one waits
for all before it. What a kernel reads *before* it waits must therefore be older than the whole chain: weights, and what
comes with the step (positions, slots, page tables) or was there before it (the keys of older tokens): a step begins
with a launch of torch's, which waits for all before it. There is one exception, ``moe.small_batch_jit``: ``down`` reads
the router's choice before it waits, so ``gate_up`` lets nobody begin before it has waited itself.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin_and_wait():
    """From here on the kernel may read what the one before it wrote. Every program must come by."""
    gdc_launch_dependents()
    gdc_wait()
