"""Speculative decoding: drafters propose the next tokens of requests, and the engine's steps verify them."""
