"""Text in, token ids out, and back: tokenizer, chat formats, detokenising, stop strings.

Nothing here knows the engine or HTTP. The server fills the records of ``conversation`` from its own protocol, has them
rendered by a ``chat_format``, and turns the engine's tokens into text with ``output``.
"""
