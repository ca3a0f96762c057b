"""Microscale inside other engines. Nothing here is imported unless the other engine asks for it."""
