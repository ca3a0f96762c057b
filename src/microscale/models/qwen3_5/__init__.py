"""Qwen3.5-MoE and Qwen3.6: config, checkpoint, model and presets."""
