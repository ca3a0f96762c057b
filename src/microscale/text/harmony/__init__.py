"""Harmony, the chat format of gpt-oss: messages on channels, and calls as messages to a function."""
