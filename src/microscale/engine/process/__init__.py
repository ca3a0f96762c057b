"""The engine in a process of its own. ``messages``, ``frames`` and ``convert`` are used on both sides of the socket.

The process: ``__main__`` (``python -m microscale.engine.process``), ``connection``, ``loop``, ``service``.
Its owner: ``client``, ``launch``, ``child``, ``link``, ``stream``; asyncio is here and nowhere else in the engine.
"""
