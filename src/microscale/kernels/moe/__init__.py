"""``moe``: the expert layer of a mixture-of-experts model."""
