"""What runs inside the engine process: ``__main__`` (``python -m microscale.engine.process``), ``connection``, ``loop``
and ``service``. Its owner uses ``engine/client``; both share ``engine/protocol``.
"""
