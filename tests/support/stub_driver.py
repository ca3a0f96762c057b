"""A CUDA driver for machines without a GPU: a real library, compiled here, whose GPU's memory is the host's.

It writes down what it is asked of devices and contexts (``STUB_LOG``), refuses what ``STUB_REFUSES`` begins with, and
counts what is allocated. A call in a thread that has made no context its own is refused, as by the real one.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;
enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NO_CONTEXT = 201, POISONED = 16 << 20 };

size_t free_bytes, copies_left, copied_bytes, synchronized;
long on_gpu, pinned;
static char the_context;
static __thread void *current;

static void tell(const char *name, int number) {
    const char *path = getenv("STUB_LOG");
    if (!path) return;
    FILE *file = fopen(path, "a");
    fprintf(file, "%s %d\n", name, number);
    fclose(file);
}
static int refuses(const char *name) {
    const char *refused = getenv("STUB_REFUSES");
    return refused && refused[0] == name[0] ? NO_DEVICE : OK;
}
int cuInit(unsigned flags) { tell("init", (int)flags); return refuses("init"); }
int cuDeviceGet(int *device, int ordinal) {
    tell("device", ordinal);
    *device = 40 + ordinal;
    return refuses("device");
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    tell("context", device);
    *context = &the_context;
    return refuses("context");
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    tell("asked", attribute);
    *value = device == 41;
    return refuses("asked");
}
int cuCtxSetCurrent(void *context) { current = context; return context == &the_context ? OK : NO_CONTEXT; }
int cuCtxSynchronize(void) { synchronized++; return current ? OK : NO_CONTEXT; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = free_bytes;
    *total = 2 * free_bytes;
    return current ? OK : NO_CONTEXT;
}
int cuMemAlloc_v2(address *found, size_t size) {
    if (!current) return NO_CONTEXT;
    if (size > free_bytes) return OUT_OF_MEMORY;
    char *memory = malloc(size + 64);
    memset(memory, 0xAB, size < POISONED ? size + 64 : POISONED);
    *(size_t *)memory = size;
    free_bytes -= size;
    on_gpu++;
    *found = (address)(memory + 64);
    return OK;
}
int cuMemFree_v2(address found) {
    if (!current) return NO_CONTEXT;
    char *memory = (char *)found - 64;
    free_bytes += *(size_t *)memory;
    size_t size = *(size_t *)memory;
    memset(memory, 0xCD, size < POISONED ? size : POISONED);
    free(memory);
    on_gpu--;
    return OK;
}
int cuMemHostAlloc(void **found, size_t size, unsigned flags) {
    if (!current || flags) return NO_CONTEXT;
    __sync_fetch_and_add(&pinned, 1);
    return posix_memalign(found, 4096, size) ? OUT_OF_MEMORY : OK;
}
int cuMemFreeHost(void *memory) {
    if (!current) return NO_CONTEXT;
    free(memory);
    __sync_fetch_and_sub(&pinned, 1);
    return OK;
}
int cuMemcpyHtoD_v2(address target, const void *source, size_t size) {
    if (!current) return NO_CONTEXT;
    size_t left;
    do {
        left = copies_left;
        if (!left) return 700;
    } while (!__sync_bool_compare_and_swap(&copies_left, left, left - 1));
    memcpy((void *)target, source, size);
    __sync_fetch_and_add(&copied_bytes, size);
    return OK;
}
"""


class StubDriver:
    """The library, and its counters."""

    def __init__(self, folder: Path) -> None:
        source, self.path = folder / "driver.c", str(folder / "libstub.so")
        source.write_text(SOURCE)
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", self.path], check=True)
        self._library = ctypes.CDLL(self.path)
        self.reset()

    def reset(self, free_bytes: int = 1 << 40, copies_left: int = 1 << 40) -> None:
        """``copies_left``: how many succeed."""
        for name, value in (("free_bytes", free_bytes), ("copies_left", copies_left)):
            ctypes.c_size_t.in_dll(self._library, name).value = value
        for name in ("copied_bytes", "synchronized"):
            ctypes.c_size_t.in_dll(self._library, name).value = 0

    def count(self, name: str) -> int:
        """``copied_bytes``, ``free_bytes``, ``on_gpu``, ``pinned`` (allocations), or ``synchronized``."""
        return ctypes.c_size_t.in_dll(self._library, name).value
