"""In which tiles kernels run on which GPU. Kernels ask here and choose nothing themselves.

Tiles, register limits and thresholds that were measured are data: ``tuned/<family>.json``; ``tuned`` has the format.
Where a family has no entry, a rule by shared memory, registers and bandwidth gives the tile. ``gemm`` has those of the
grouped and dense GEMMs, ``attention`` its own, ``experts`` and ``dense`` those for small batches, and ``thresholds``
says from where on another path pays.
"""
