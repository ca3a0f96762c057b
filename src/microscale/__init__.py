"""Microscale: inference for mixture-of-experts models in microscaling formats, on every NVIDIA GPU from Ampere on."""

from microscale.version import __version__

__all__ = ["__version__"]
