"""Token ids in, token ids out. No text; asyncio in its owner's half only (``client``, ``link``, ``stream``)."""
