"""``/v1/completions``: continues a raw prompt."""
