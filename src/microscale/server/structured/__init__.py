"""Structured output: from a request's fields and tools to one grammar of the whole turn.

output_format   the fields of all APIs → one ``OutputFormat``
grammar         output format and tools → the turn's grammar
check, worker   compile the grammar in a process that can be killed, before the engine sees it
"""
