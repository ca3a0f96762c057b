"""Compiles kernels before anything launches them.

``source`` says what Triton compiles for a kernel and under which key. ``pool`` runs compilations in processes.
``cache`` is the folder that they fill, and ``job`` fills it: the process of ``__main__`` compiles, and starts in half a
second since nothing here imports torch. ``warming`` loads kernels from the folder to the GPU, and counts late ones.
"""
