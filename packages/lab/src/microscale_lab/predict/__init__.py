"""Measured rows, and how well they predict others (``bench sweep``, ``bench fit``)."""
