"""Benchmarks: each checks against the reference first, then prints times beside what the card can do."""
