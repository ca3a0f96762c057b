"""Text in, token ids out, and back: tokenizer, detokenising, stop strings, Harmony.

Nothing here knows the engine or HTTP. The server fills the records of ``conversation`` from its own protocol, has them
rendered by ``harmony``, and turns the engine's tokens into text with ``output``.
"""
