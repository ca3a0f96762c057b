"""Tensor parallelism: what each of several ranks holds of a model (``sharding``), and how they add up and gather what
each of them computed (``group``). What ranks say to each other beside that is the engine's (``engine/ranks``)."""
