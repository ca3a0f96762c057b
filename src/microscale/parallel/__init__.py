"""Tensor parallelism: which part of a model a rank holds (``sharding``), sums and gathers over all ranks (``group``),
and how ranks of several machines connect (``handshake``). The engine's messages between ranks are in
``engine/ranks``."""
