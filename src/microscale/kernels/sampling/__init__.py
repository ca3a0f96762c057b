"""``sampling``: from logits to one token a row, its log-probability and those of the likeliest others."""
