"""Gemma 4's chat format: turns from the checkpoint's own template, and calls in their own spelling."""
