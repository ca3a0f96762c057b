"""Tensors from disk at the disk's speed: direct reads, several in flight, past the page cache, to where they stay.

    file ──preadv, O_DIRECT──► aligned memory ─────────────────────────► tensor on the CPU (large: read in place)
                               pinned buffer ──copy on a side stream──► tensor on the GPU

``file`` reads ranges of one file, ``chunks`` cuts tensors into ranges, ``targets`` is the memory that they arrive in,
``read_ahead`` keeps several ranges in flight and holds no more than its window ahead of the tensors that were taken.
"""
