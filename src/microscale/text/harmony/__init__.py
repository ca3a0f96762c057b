"""Harmony, the chat format of gpt-oss: messages on channels; calls are messages to a function."""
