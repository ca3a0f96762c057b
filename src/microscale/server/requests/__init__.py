"""Requests as JSON: their fields, and what happens to keys that nobody reads.

The request of every API becomes three records: ``chat.ChatFields`` (what becomes a prompt), ``sampling.SamplingFields``
and ``response_format.StructuredFields``. So prompts, grammars and generation know one form.
"""
