"""``dense``: one matrix product with optional bias and residual."""
