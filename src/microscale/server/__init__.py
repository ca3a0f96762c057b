"""OpenAI's and Anthropic's APIs over HTTP: requests in, text out.

Owns the protocol, its limits, and the life of the server. Tokens are the engine's, text is ``text``'s.
"""
