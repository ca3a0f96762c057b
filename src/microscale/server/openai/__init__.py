"""OpenAI's APIs: chat, completions, responses, models; and vLLM's tokenize.

Each folder has its requests and replies (``schema``, or ``request`` and ``replies``) and a ``handler``, which answers
one request from start to end.
"""
