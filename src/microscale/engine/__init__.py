"""Token ids in, token ids out. ``engine`` is the step loop, ``request`` and ``generate`` what is asked of it.
``config``, ``sampling_params`` and ``output`` hold the records that callers use, and that go over the socket.

step/       what one step does: scheduler, pages, prefix cache, inputs, runner, CUDA graphs, sampler, threads
loading/    from the user's options to an engine that is ready
protocol/   the messages between the engine process and its owner
process/    what runs inside the engine process
client/     the owner's side: starts that process and talks to it

``step`` knows none of the other folders, ``loading`` neither ``process`` nor ``client``.
"""
