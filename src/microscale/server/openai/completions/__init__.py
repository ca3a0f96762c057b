"""``/v1/completions``: a raw prompt and its continuation."""
