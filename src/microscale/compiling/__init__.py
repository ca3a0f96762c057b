"""How kernels become machine code before anybody launches them.

``source`` says what Triton compiles for a kernel and under which key. ``pool`` runs compilations in processes,
``complaints`` finds what a compiler says is wrong. ``cache`` is the folder that they fill, and ``job`` fills it: the
process of ``__main__`` compiles, and starts in half a second since nothing here imports torch. ``loading`` takes
kernels from the folder to the GPU, and counts those that were left for later.
"""
