"""Requests as JSON: how they are parsed, the fields that all APIs share, and what happens to unknown keys.

The request of every API becomes three records: ``chat.ChatFields`` (what becomes a prompt), ``sampling.SamplingFields``
and ``response_format.StructuredFields``. Prompts, grammars and generation know only these.
"""
