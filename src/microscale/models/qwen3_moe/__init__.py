"""Qwen3-MoE: config, checkpoint, model and presets."""
