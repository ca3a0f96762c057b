"""How a kernel becomes machine code before anybody launches it.

``source`` says what Triton compiles for a kernel and under which key, ``pool`` runs compilations in processes,
``complaints`` finds what a compiler says is wrong, ``cache`` is the folder they fill, ``job`` fills it from a process of
its own, ``loading`` takes kernels from there to the GPU, ``late`` counts those that were forgotten. Nothing here imports
torch but ``loading``'s callers: a process that only compiles starts without it.
"""
