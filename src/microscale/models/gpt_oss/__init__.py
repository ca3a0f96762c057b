"""gpt-oss: config, checkpoint, model and presets."""
