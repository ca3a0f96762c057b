"""The owner's side of the engine process: start it (``launch``), talk to it (``link``), submit requests (``client``)
and read their outputs (``stream``). Asyncio is used here and nowhere else in the engine.
"""
