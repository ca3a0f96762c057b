"""OpenAI's APIs: chat, completions, responses, models; and vLLM's tokenize.

In each folder: ``request`` (what comes in), ``replies`` (what goes out), ``handler`` (one request from start to end).
"""
