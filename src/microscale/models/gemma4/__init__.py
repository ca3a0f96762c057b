"""Gemma 4 with experts: config, checkpoint, model and presets."""
