"""Layers that carry a state from token to token: the gated delta rule."""
