"""Searches for the tiles and thresholds of kernels on the GPU at hand (``microscale tune``)."""
