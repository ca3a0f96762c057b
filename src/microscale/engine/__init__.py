"""Token ids in, token ids out. ``engine`` is the step loop, ``request`` and ``generate`` what is asked of it.

step/       what one step does: scheduler, pages, prefix cache, inputs, runner, CUDA graphs, sampler, threads
loading/    from the user's options to an engine that is ready
process/    the engine in a process of its own, and its owner's side

``step`` knows neither of the other two folders, ``loading`` not ``process``, and only ``process`` needs msgspec.
"""
