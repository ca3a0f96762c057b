"""Text to token ids and back: tokenizer, chat formats, detokenizing, stop strings.

Nothing here knows the engine or HTTP. The server fills the records of ``conversation`` from its protocol, a
``chat_format`` renders them, and ``output`` turns the engine's tokens into text.
"""
