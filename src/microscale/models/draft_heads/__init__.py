"""Draft heads: small models that guess the next tokens of a large one, from its residual stream."""
